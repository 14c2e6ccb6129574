-- What handlers find changed in the standard library: waits work in their coroutines, print goes to
-- the log, one delivery cannot end or bend the process that others share, and a global that was
-- probably meant to be local is pointed out.
--
-- Executor process, installed once, before config.lua runs.

local await = require "tidemill.await"
local log = require "tidemill.log"
local render = require "tidemill.render"

local getinfo, is_own = debug.getinfo, render.is_own
local rawset, tostring, error = rawset, tostring, error

local environment = {}

-- Every delivery shares the process: ending it would cut them all short.
local function exit()
  error("os.exit would end every delivery that runs in this process: return, raise an error, or use ctx:discard", 2)
end

-- A locale changes how the whole process writes numbers and compares texts. As where a locale is not
-- installed, the answer is nil.
local function setlocale(locale)
  if locale == nil or locale == "" or locale == "C" or locale == "POSIX" then
    return "C"
  end
  return nil
end

-- The file and line of the user's code that called, however many other functions lie between.
function environment.place()
  for level = 2, 20 do
    local info = getinfo(level, "Sl")
    if not info then
      break
    end
    if info.currentline > 0 and not is_own(info.short_src) then
      return info.short_src .. ":" .. info.currentline
    end
  end
  return "?"
end

local function watch_globals()
  local warned = {}
  local metatable = debug.getmetatable(_G) or {}
  function metatable.__newindex(globals, name, value)
    if not warned[name] then
      warned[name] = true
      log.warn_event("global_written", "all handlers of this process share globals: write `local`",
        "name", tostring(name), "at", environment.place())
    end
    rawset(globals, name, value)
  end
  setmetatable(_G, metatable)
end

-- luacheck: push ignore 122 (the library is changed on purpose)
function environment.install()
  coroutine.resume = await.resume
  coroutine.wrap = await.wrap
  os.exit = exit
  os.setlocale = setlocale
  _G.print = log.print
  watch_globals()
end
-- luacheck: pop

return environment
