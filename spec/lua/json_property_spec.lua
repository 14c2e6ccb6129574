-- tidemill.json with random values: what is decoded and encoded again is the same value, judged by a
-- reader of its own below and by Postgres. A failing text is shown and can be put into json_spec.lua.

local ffi = require "ffi"
local json = require "tidemill.json"
local pg = require "spec.support.pg"
local random_json = require "spec.support.random_json"

local DOCUMENTS, BATCH = 20000, 500

-- ---- another reader of JSON -----------------------------------------------------------------------

-- Texts of the same value become the same text: what Postgres calls equal jsonb.

local canonical

local function canonical_number(text)
  local sign, whole, fraction, exponent = text:match "^(%-?)(%d+)%.?(%d*)[eE]?([%+%-]?%d*)$"
  local digits = (whole .. fraction):gsub("^0+", "")
  local point = #digits - #fraction + (tonumber(exponent) or 0)
  digits = digits:gsub("0+$", "")
  if digits == "" then
    return "0"
  end
  return ("%s0.%se%d"):format(sign, digits, point)
end

local function utf8(code)
  local function tail(shift)
    return 128 + math.floor(code / 2 ^ shift) % 64
  end
  if code < 0x80 then
    return string.char(code)
  elseif code < 0x800 then
    return string.char(192 + math.floor(code / 64), tail(0))
  elseif code < 0x10000 then
    return string.char(224 + math.floor(code / 4096), tail(6), tail(0))
  end
  return string.char(240 + math.floor(code / 2 ^ 18), tail(12), tail(6), tail(0))
end

local ESCAPED = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" }

local function canonical_string(text)
  text = text:gsub("\\\\", "\\u005c")
  text = text:gsub("\\u([dD][89abAB]%x%x)\\u([dD][c-fC-F]%x%x)", function(high, low)
    return utf8(0x10000 + (tonumber(high, 16) - 0xD800) * 1024 + tonumber(low, 16) - 0xDC00)
  end)
  text = text:gsub('\\([bfnrt"/])', function(letter)
    return ESCAPED[letter] or letter
  end)
  text = text:gsub("\\u(%x%x%x%x)", function(code)
    return utf8(tonumber(code, 16))
  end)
  return ("%q"):format(text)
end

local function string_end(text, at)
  repeat
    at = text:find('["\\]', at + 1)
    local escape = text:sub(at, at) == "\\"
    at = escape and at + 1 or at
  until not escape
  return at
end

local function members(text, at, close, read)
  at = text:match("^%s*()", at + 1)
  while text:sub(at, at) ~= close do
    at = text:match("^%s*,?%s*()", read(at))
  end
  return at + 1
end

-- The canonical text of the value at `at`, and where it ends.
function canonical(text, at)
  at = text:match("^%s*()", at)
  local first = text:sub(at, at)
  if first == '"' then
    local last = string_end(text, at)
    return canonical_string(text:sub(at + 1, last - 1)), last + 1
  elseif first == "[" then
    local list, value = {}, nil
    at = members(text, at, "]", function(from)
      value, from = canonical(text, from)
      table.insert(list, value)
      return from
    end)
    return "[" .. table.concat(list, ",") .. "]", at
  elseif first == "{" then
    local by_key, list, key, value = {}, {}, nil, nil
    at = members(text, at, "}", function(from)
      key, from = canonical(text, from)
      value, from = canonical(text, text:match("^%s*:()", from))
      by_key[key] = value
      return from
    end)
    for k, v in pairs(by_key) do
      table.insert(list, k .. ":" .. v)
    end
    table.sort(list)
    return "{" .. table.concat(list, ",") .. "}", at
  end
  local word, past = text:match("^([%w%.%+%-]+)()", at)
  return word:find "%d" and canonical_number(word) or word, past
end

-- ---- the properties -------------------------------------------------------------------------------

local function again(text)
  return json.encode(json.decode(text))
end

describe("random JSON, decoded and encoded again,", function()
  local texts = random_json.documents(20240229, DOCUMENTS)

  it("is the same value", function()
    local differing = {}
    for _, text in ipairs(texts) do
      local written = again(text)
      if canonical(text, 1) ~= canonical(written, 1) then
        table.insert(differing, text .. "\n  became " .. written)
      end
    end
    assert.same({}, differing)
  end)

  it("settles: a second round writes a text of the same length", function()
    local unsettled = {}
    for _, text in ipairs(texts) do
      local once = again(text)
      if #once ~= #again(once) then
        table.insert(unsettled, once)
      end
    end
    assert.same({}, unsettled)
  end)

  it("is equal to Postgres, from our text and from the text that Postgres prints", function()
    if not os.getenv "PGHOST" then
      pending "needs a Postgres: run it by script/with-postgres"
      return
    end
    local db = pg.connect()
    finally(function() db:close() end)
    local differing = {}
    for start = 1, #texts, BATCH do
      local given, ours = {}, {}
      for i = start, start + BATCH - 1 do
        table.insert(given, texts[i])
        table.insert(ours, again(texts[i]))
      end
      given = "[" .. table.concat(given, ",") .. "]"
      ours = "[" .. table.concat(ours, ",") .. "]"
      local printed = db:value("select $1::jsonb::text", given)
      local rows = db:query([[select given::text, ours::text, printed::text
        from rows from (jsonb_array_elements($1::jsonb), jsonb_array_elements($2::jsonb),
          jsonb_array_elements($3::jsonb)) as t (given, ours, printed)
        where given is distinct from ours or given is distinct from printed]], given, ours, again(printed))
      for _, row in ipairs(rows) do
        table.insert(differing, row)
      end
    end
    assert.same({}, differing)
  end)
end)

describe("any double", function()
  it("is written so that it reads back the same, in no more digits than printf needs", function()
    local random = random_json.new_random(4711)
    local function significant(text)
      return #text:gsub("[eE].*", ""):gsub("[-.]", ""):gsub("^0+", ""):gsub("0+$", "")
    end
    local wrong = {}
    local function check(value)
      local text = json.encode(value)
      local digits = 15
      while tonumber(("%." .. digits .. "g"):format(value)) ~= value do
        digits = digits + 1
      end
      local printed = ("%." .. digits .. "g"):format(value)
      local same = tonumber(text) == value and json.decode(text) == value
      if not same or significant(text) > significant(printed) then
        table.insert(wrong, text .. " for " .. printed)
      end
    end
    for _ = 1, 20000 do
      check(tonumber(random_json.double(random)))
      check((random(2 ^ 31) - 1) / random(1000))
      check(random(2 ^ 31) * random(2 ^ 31) / 10 ^ random(20))
    end
    local double = ffi.new "union { uint64_t bits; double value; }"
    for exponent = -1074, 1023 do
      for away = -1, 1 do
        double.value = 2 ^ exponent
        double.bits = double.bits + away
        check(double.value)
      end
    end
    assert.same({}, wrong)
  end)
end)

describe("random damage to a text", function()
  it("is refused or read, and what is read can be written or has a NUL byte", function()
    local random = random_json.new_random(99)
    local texts = random_json.documents(7, DOCUMENTS / 4)
    local refused, wrong = 0, {}
    for i = 1, #texts do
      local text = texts[i]
      for _ = 1, random(3) do
        local at = random(#text + 1)
        local byte = random(3) == 1 and string.char(random(256) - 1) or ('[]{}:,"\\0e-.u'):sub(random(13)):sub(1, 1)
        text = text:sub(1, at - 1) .. byte .. text:sub(at + random(3) - 1)
      end
      local ok, value = pcall(json.decode, text)
      if ok then
        local written, result = pcall(json.encode, value)
        if not written and not result:find("NUL byte", 1, true) then
          table.insert(wrong, text .. "\n  cannot be written: " .. result)
        end
      else
        refused = refused + 1
        if not value:find "^not JSON at byte %d+: " then
          table.insert(wrong, text .. "\n  is refused by: " .. value)
        end
      end
    end
    assert.same({}, wrong)
    assert.is_true(refused > #texts / 4 and refused < #texts)
  end)
end)
