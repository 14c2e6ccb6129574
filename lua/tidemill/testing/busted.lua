-- `tidemill test`: busted, inside of the program. Specs find `tidemill` and `tidemill.testing`, which are part of
-- the program, and the handlers of the app in the current folder.
--
-- A process of its own, no executor.

local program = {}

local MISSING = "busted is not installed, which runs the specs: apt-get install lua-busted, or "
  .. "luarocks --lua-version=5.1 install busted"

-- Returns the exit code, or nil and what is wrong; where specs fail, busted ends the process.
function program.run(words)
  local found, runner = pcall(require, "busted.runner")
  if not found then
    return nil, runner:find "^module 'busted.runner' not found" and MISSING or runner
  end
  package.path = "./handlers/?.lua;./handlers/?/init.lua;" .. package.path
  words[0] = "tidemill test"
  _G.arg = words
  -- busted looks at who calls it: no tail call.
  runner { standalone = false }
  return 0
end

return program
