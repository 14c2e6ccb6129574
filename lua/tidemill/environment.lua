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

-- So many names are told of in the life of a process. One that writes names without end would fill the log.
local MOST_WARNINGS = 50
local warned, warnings = {}, 0

-- One line in the log of an event, with a name and the place in the user's code, once for each name.
function environment.warn_event(event, text, name)
  local key = event .. " " .. name
  if warned[key] or warnings == MOST_WARNINGS then
    return
  end
  warned[key] = true
  warnings = warnings + 1
  if warnings == MOST_WARNINGS then
    text = text .. " (the last that this process tells)"
  end
  log.warn_event(event, text, "name", name, "at", environment.place())
end

local function watch_globals()
  local metatable = debug.getmetatable(_G) or {}
  function metatable.__newindex(globals, name, value)
    environment.warn_event("global_written", "all handlers of this process share globals: write `local`",
      tostring(name))
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
  warned, warnings = {}, 0
  watch_globals()
end
-- luacheck: pop

return environment
