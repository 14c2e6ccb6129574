-- A message to publish, checked and written as JSON: the items of publish_many and, with an `op`, the
-- request that the runtime answers.
--
-- Executor process. Knows no delivery.

local host = require "tidemill.host"
local argument = require "tidemill.argument"

-- A handler may have changed the library's tables.
local ipairs, pairs, type = ipairs, pairs, type
local byte, format, gsub, match = string.byte, string.format, string.gsub, string.match
local concat, date, floor = table.concat, os.date, math.floor

-- The limits of sql/0002_publish.sql, so that a mistake is the handler's own line and no refusal of the
-- database later.
local DELAY_SECS = 3153600000
local TEXT_CHARACTERS = 500
local HEADER_BYTES = 65536
local LAST_SECOND = 253402300799 -- of the year 9999

local NONE = {}
local OBJECT = byte "{"

local publication = {}

local function is_object(value)
  if type(value) ~= "table" then
    return "expected a table, found " .. argument.show(value)
  end
end

local function is_short_text(value)
  return argument.text(value, TEXT_CHARACTERS)
end

-- A time is a text with its zone, as the database wants it, or seconds since 1970.
local function is_time(value)
  if type(value) == "number" then
    return argument.number(value, 0, LAST_SECOND)
  end
  if type(value) == "string" then
    local rest = match(value, "^%d%d%d%d%-%d%d%-%d%d[Tt ]%d%d:%d%d(.*)$") or ""
    rest = gsub(gsub(rest, "^:%d%d", ""), "^%.%d+", "")
    if match(rest, "^[Zz]$") or match(rest, "^[+-]%d%d:?%d%d$") or match(rest, "^[+-]%d%d$") then
      return
    end
  end
  return "expected a time with its zone, such as 2030-01-31T08:00:00Z, or seconds since 1970, found "
    .. argument.show(value)
end

local function time_text(value)
  if type(value) == "string" then
    return value
  end
  return date("!%Y-%m-%dT%H:%M:%S", floor(value)) .. format(".%06dZ", floor(value % 1 * 1e6))
end

-- In the order they are written. `check` returns what is wrong, `write` what is written instead of
-- the value.
local OPTIONS = {
  { name = "at", check = is_time, write = time_text },
  { name = "dedupe_key", check = is_short_text },
  { name = "delay_secs", check = function(value) return argument.number(value, 0, DELAY_SECS, "seconds") end },
  { name = "headers", check = is_object },
  { name = "max_attempts", check = function(value) return argument.integer(value, 1, 32767) end },
  { name = "on_duplicate", check = function(value) return argument.word(value, { "keep", "replace" }) end },
  { name = "priority", check = function(value) return argument.integer(value, -9, 9) end },
  { name = "published_by", check = is_short_text },
}

local known = {}
for i, option in ipairs(OPTIONS) do
  known[i] = option.name
  known[option.name] = true
end

local function unknown_option(options)
  for name in pairs(options) do
    if not known[name] then
      return format("options: %s is unknown, known are %s", argument.show(name), concat(known, ", "))
    end
  end
end

local function headers_problem(json)
  if byte(json) ~= OBJECT then
    return "expected a table with names as keys, found a list"
  elseif #json > HEADER_BYTES then
    return format("has %d bytes as JSON, at most %d are allowed", #json, HEADER_BYTES)
  end
end

-- Appends the options to the list of JSON texts; returns what is wrong.
local function write_options(parts, options, carried)
  local wrong = unknown_option(options)
  if wrong then
    return wrong
  end
  if options.at ~= nil and options.delay_secs ~= nil then
    return "options: give `at` or `delay_secs`, not both"
  end
  for _, option in ipairs(OPTIONS) do
    local value = options[option.name]
    if value == nil then
      value = carried[option.name]
    end
    if value ~= nil then
      local path = "options." .. option.name
      local json
      wrong = option.check(value)
      if wrong then
        return path .. ": " .. wrong
      end
      json, wrong = host.encode(option.write and option.write(value) or value, path)
      if not json then
        return wrong
      end
      if option.name == "headers" then
        wrong = headers_problem(json)
        if wrong then
          return path .. ": " .. wrong
        end
      end
      parts[#parts + 1] = ',"' .. option.name .. '":' .. json
    end
  end
end

-- The JSON of a message, or nil and what is wrong. `op` is nil for an item of publish_many; `carried`
-- holds options that count where `options` do not say otherwise.
function publication.encode(op, topic, payload, options, carried)
  local wrong = argument.text(topic)
  if wrong then
    return nil, "topic: " .. wrong
  end
  wrong = argument.optional_table(options)
  if wrong then
    return nil, "options: " .. wrong
  end
  local trimmed, refused = host.topic(topic)
  if not trimmed then
    return nil, refused
  end
  local message = "{}"
  if payload ~= nil then
    message, wrong = host.encode(payload, "payload")
    if not message then
      return nil, wrong
    end
  end
  -- A topic's characters need no escaping.
  local parts = { op and '{"op":"' .. op .. '",' or "{", '"topic":"', trimmed, '","message":', message }
  wrong = write_options(parts, options or NONE, carried or NONE)
  if wrong then
    return nil, wrong
  end
  parts[#parts + 1] = "}"
  return concat(parts)
end

return publication
