-- Checks of what a handler passes to the library. Each returns nothing when the value is good, and
-- otherwise what is wrong with it as text, for the caller to put the function's and the argument's
-- name before.
--
-- Pure Lua.

-- A handler may have changed the library's tables.
local ipairs, tostring, type = ipairs, tostring, type
local format, gsub, sub, concat = string.format, string.gsub, string.sub, table.concat

local argument = {}

-- The longest wait or delay that can be asked for: a leap year.
argument.MAX_SECS = 366 * 86400

-- A value as an error shows it.
function argument.show(value)
  local kind = type(value)
  if kind == "nil" then
    return "nothing"
  elseif kind == "string" then
    return #value <= 40 and format("%q", value) or format("%q…", sub(value, 1, 40))
  elseif kind == "number" or kind == "boolean" then
    return tostring(value)
  end
  return "a " .. kind
end

local function expected(what, value)
  return format("expected %s, found %s", what, argument.show(value))
end

function argument.number(value, low, high, what)
  -- The comparison fails for NaN.
  if type(value) ~= "number" or not (value >= low and value <= high) then
    return expected(format("%s from %d to %d", what or "a number", low, high), value)
  end
end

function argument.integer(value, low, high)
  local wrong = argument.number(value, low, high, "a whole number")
  if not wrong and value % 1 ~= 0 then
    return expected(format("a whole number from %d to %d", low, high), value)
  end
  return wrong
end

function argument.secs(value)
  return argument.number(value, 0, argument.MAX_SECS, "seconds")
end

-- A text that is not empty, of at most `max` characters when that is given.
function argument.text(value, max)
  if type(value) ~= "string" or value == "" then
    return expected("a text", value)
  end
  if max and #value > max then
    local _, characters = gsub(value, "[^\128-\191]", "")
    if characters > max then
      return format("has %d characters, at most %d are allowed", characters, max)
    end
  end
end

function argument.optional_text(value)
  if value ~= nil and type(value) ~= "string" then
    return expected("a text or nothing", value)
  end
end

function argument.optional_table(value)
  if value ~= nil and type(value) ~= "table" then
    return expected("a table or nothing", value)
  end
end

-- One of a few words.
function argument.word(value, words)
  for _, word in ipairs(words) do
    if value == word then
      return
    end
  end
  return expected('"' .. concat(words, '" or "') .. '"', value)
end

return argument
