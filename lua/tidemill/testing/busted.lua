-- `tidemill test`: busted, inside of the program. Specs find `tidemill` and `tidemill.testing`, which are part of
-- the program, and the handlers of the app in the current folder.
--
-- A process of its own, no executor.

local program = {}

local MISSING = "busted is not installed, which runs the specs: apt-get install lua-busted, or "
  .. "luarocks --lua-version=5.1 install busted"
local NO_SPECS = "there is no folder spec here: specs stand in spec/NAME_spec.lua, see docs/handlers.md, and "
  .. "`tidemill init` writes one"

-- Whether busted is left to its preset, the folder `spec`, and there is none.
local function has_no_specs(words)
  for _, word in ipairs(words) do
    if word:sub(1, 1) ~= "-" or word == "--version" then
      return false
    end
  end
  local lfs = require "lfs"
  return not lfs.attributes "spec" and not lfs.attributes ".busted"
end

-- Returns the exit code, or nil and what is wrong; where specs fail, busted ends the process.
function program.run(words)
  local found, runner = pcall(require, "busted.runner")
  if not found then
    return nil, runner:find "^module 'busted.runner' not found" and MISSING or runner
  end
  if has_no_specs(words) then
    return nil, NO_SPECS
  end
  package.path = "./handlers/?.lua;./handlers/?/init.lua;" .. package.path
  words[0] = "tidemill test"
  _G.arg = words
  -- busted looks at who calls it: no tail call.
  runner { standalone = false }
  return 0
end

return program
