-- Errors as text: whatever a handler raises becomes something a person can read, and nothing it can
-- raise breaks the rendering.
--
-- Executor process. Knows nothing of deliveries.

local host = require "tidemill.host"

-- A handler may have changed the library's tables.
local pcall, rawequal, rawget, setmetatable, tostring, type = pcall, rawequal, rawget, setmetatable, tostring, type
local running = coroutine.running
local getmetatable, traceback = debug.getmetatable, debug.traceback
local find, format, gsub = string.find, string.format, string.gsub
local match, sub = string.match, string.sub
local loaded = package.loaded

-- The longest JSON shown of a table that was raised.
local TABLE_BYTES = 1000

local render = {}

local function of_table(value)
  local ok, json = pcall(host.encode, value, "error")
  if not ok or not json then
    return "the error is a table"
  end
  if #json > TABLE_BYTES then
    json = sub(json, 1, TABLE_BYTES) .. "…"
  end
  return "the error is a table: " .. json
end

-- Any value as text.
function render.value(value)
  local kind = type(value)
  if kind == "string" then
    return value
  elseif kind == "number" then
    return tostring(value)
  elseif kind == "table" or kind == "userdata" then
    local metatable = getmetatable(value)
    if type(metatable) == "table" and rawget(metatable, "__tostring") ~= nil then
      local ok, text = pcall(tostring, value)
      if ok and type(text) == "string" then
        return text
      end
      return format("the error is a %s whose __tostring fails", kind)
    end
    if kind == "table" then
      return of_table(value)
    end
  elseif kind == "cdata" then
    local ok, text = pcall(tostring, value)
    if ok and type(text) == "string" then
      return text
    end
  elseif kind == "nil" then
    return "the error is nil"
  elseif kind == "boolean" then
    return "the error is " .. tostring(value)
  end
  return "the error is a " .. kind
end

-- Whether a source, as a traceback names it, is the library's. What is part of the program has a module's name
-- for a source; in a plain program modules are files.
function render.is_own(source)
  if find(source, "^tidemill[%w._]*$") then
    return true
  end
  local name = host.plain and match(source, "tidemill/([%w_/]+)%.lua$") or nil
  return name == "init" or (name ~= nil and loaded["tidemill." .. gsub(name, "/", ".")] ~= nil)
end

local function without_own_files(text, trace)
  local path, rest = match(text, "^([^\n:]+):%d+: (.*)$")
  if path and render.is_own(path) then
    text = rest
  end
  trace = gsub(trace, "\n\t([^\n:]+):%d+: in function [^\n]*", function(place)
    return render.is_own(place) and "" or nil
  end)
  return text, trace
end

-- What runs a delivery is of no interest to whoever reads a handler's traceback, nor is a position
-- inside of it that a tail call left as the place of an error.
local function without_internals(text, trace)
  text = gsub(text, "^tidemill[%w.]*:%d+: ", "")
  if host.plain then
    text, trace = without_own_files(text, trace)
  end
  trace = gsub(trace, "\n\ttidemill[%w.]*:%d+: in function [^\n]*", "")
  -- How a wait leaves the coroutine, and gets through those of the handler's own (lua/tidemill/await.lua).
  trace = gsub(trace, "\n\t%[C%]: in function 'raw_%l+'", "")
  trace = gsub(trace, "\n\t%[C%]: in function 'xpcall'$", "")
  return text .. trace
end

-- Of each coroutine the last error that was caught to be raised again, and where it came from.
local remembered = setmetatable({}, { __mode = "k" })

-- A message handler for what catches an error only to raise it again unchanged: the traceback that
-- is shown in the end is that of the place where it was raised first.
function render.remember(value)
  remembered[running() or remembered] = { value = value, trace = traceback("", 2) }
  return value
end

-- The message handler of a delivery: the error with the traceback of its place.
function render.raised(value)
  local trace, earlier = traceback("", 2), remembered[running() or remembered]
  if earlier and rawequal(earlier.value, value) then
    trace = earlier.trace
  end
  remembered[running() or remembered] = nil
  return without_internals(render.value(value), trace)
end

-- `text` with the traceback of a suspended coroutine.
function render.waiting(co, text)
  return without_internals(text, traceback(co, ""))
end

return render
