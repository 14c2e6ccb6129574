-- Log lines of handlers: `log.info("charged", { amount = 5 })`. A line names the message that is
-- handled when it is written. Lines go to standard error, next to the program's own.
--
-- Executor process.

local host = require "tidemill.host"
local argument = require "tidemill.argument"

-- A handler may have changed the library's tables.
local error, pairs, select, tonumber, tostring, type = error, pairs, select, tonumber, tostring, type
local concat, format, gsub, sort, unpack = table.concat, string.format, string.gsub, table.sort, unpack

-- As in core/log.h.
local LEVELS = { debug = 0, info = 1, warn = 2, error = 3 }

-- The names of what every line has.
local TAKEN = {
  time = true, level = true, event = true, message_id = true, topic = true, subscriber = true, attempt = true,
  text = true, lines_lost = true,
}
local MAX_FIELDS = 32

local log = {}

local function field_text(value)
  local kind = type(value)
  if kind == "string" or kind == "number" then
    return value
  elseif kind == "table" then
    return host.encode(value, "field") or "a table"
  end
  return tostring(value)
end

-- name, value, name, value … in the order of the names, and how many these are.
local function flatten(fields)
  local names = {}
  for name in pairs(fields) do
    names[#names + 1] = tostring(name)
  end
  sort(names)
  local flat, n = {}, 0
  for i = 1, #names < MAX_FIELDS and #names or MAX_FIELDS do
    local name = names[i]
    local value = fields[name]
    if value == nil then
      value = fields[tonumber(name)]
    end
    local shown = gsub(name, "[^%w_]", "_")
    flat[n + 1] = TAKEN[shown] and shown .. "_" or shown
    flat[n + 2] = field_text(value)
    n = n + 2
  end
  return flat, n
end

-- One line of the event `log`. Returns what is wrong with the arguments.
function log.write(level, text, fields)
  local wrong = argument.optional_table(fields)
  if wrong then
    return "fields: " .. wrong
  end
  if level < host.log_threshold then
    return
  end
  text = type(text) == "string" and text or tostring(text)
  if fields == nil then
    host.log(level, "log", text)
  else
    local flat, n = flatten(fields)
    host.log(level, "log", text, unpack(flat, 1, n))
  end
end

for name, level in pairs(LEVELS) do
  log[name] = function(text, fields)
    local wrong = log.write(level, text, fields)
    if wrong then
      error(format("tidemill.log.%s: %s", name, wrong), 2)
    end
  end
end

-- The print of handlers: the same text, as a line of the log.
function log.print(...)
  local parts = {}
  for i = 1, select("#", ...) do
    local text = tostring((select(i, ...)))
    if type(text) ~= "string" then
      error("'tostring' must return a string to 'print'", 2)
    end
    parts[i] = text
  end
  host.log(LEVELS.info, "print", concat(parts, "\t"))
end

-- Something about the handlers themselves, by its own event name.
function log.warn_event(event, text, ...)
  host.log(LEVELS.warn, event, text, ...)
end

return log
