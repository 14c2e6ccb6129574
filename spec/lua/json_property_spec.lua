-- tidemill.json with random values: what is decoded and encoded again is the same value, judged by a
-- reader of its own below and by Postgres. A failing text is shown and can be put into json_spec.lua.

local ffi = require "ffi"
local json = require "tidemill.json"
local pg = require "spec.support.pg"

local DOCUMENTS, BATCH = 20000, 500

-- ---- a generator of JSON texts --------------------------------------------------------------------

-- Park and Miller's: the same numbers on every run and machine.
local function new_random(seed)
  local state = seed
  return function(n)
    state = state * 16807 % 2147483647
    return math.floor(state / 2147483647 * n) + 1
  end
end

local CHARACTERS = {
  "a", "b", "x", "Z", "0", " ", "/", "'", "\127", "é", "ß", "я", "€", "中", "\239\191\191", "😀", "\244\143\191\191",
  "\\n", "\\t", '\\"', "\\\\", "\\/", "\\b", "\\f", "\\r", "\\u0001", "\\u001f", "\\u0041", "\\u00e9", "\\u20AC",
  "\\ud83d\\ude00", "\\uDBFF\\uDFFF", "\\uffff", "\\u2028",
}

local function random_string(random)
  local parts = {}
  local plain = random(3) > 1
  for i = 1, random(4) == 1 and random(40) or random(9) - 1 do
    parts[i] = plain and string.char(96 + random(26)) or CHARACTERS[random(#CHARACTERS)]
  end
  return '"' .. table.concat(parts) .. '"'
end

local function random_digits(random, n)
  local digits = {}
  for i = 1, n do
    digits[i] = string.char(47 + (random(4) == 1 and (random(2) == 1 and 1 or 10) or random(10)))
  end
  return table.concat(digits)
end

local function random_whole(random, n)
  local digits = random_digits(random, n):gsub("^0+", "")
  return digits == "" and "0" or digits
end

local double = ffi.new "union { uint32_t half[2]; uint64_t bits; double value; }"

-- The bits of any finite double, as other programs would write it. LuaJIT takes some NaNs for values
-- of other types, so the exponent of all ones is left out before looking.
local function random_double(random)
  double.half[0] = random(2 ^ 31) * 2 - random(2)
  double.half[1] = (random(2) - 1) * 2 ^ 31 + (random(2047) - 1) * 2 ^ 20 + random(2 ^ 20) - 1
  return ("%." .. (14 + random(4)) .. "g"):format(double.value)
end

local NUMBERS = {
  function(random) return tostring(random(1000) - 1) end,
  function(random) return random_whole(random, random(19)) end,
  function(random) return random_whole(random, random(45)) end,
  function(random) return random_whole(random, random(5)) .. "." .. random_digits(random, 2) end,
  function(random) return random_whole(random, random(18)) .. "." .. random_digits(random, random(18)) end,
  function(random) return "0." .. ("0"):rep(random(30)) .. random_digits(random, random(20)) end,
  function(random)
    return random_whole(random, random(18)) .. (random(2) == 1 and "e" or "E+") .. tostring(random(30) - 1)
  end,
  function(random)
    return random_whole(random, 1) .. "." .. random_digits(random, random(18)) .. "e-" .. random(30)
  end,
  function(random) return random_whole(random, random(20)) .. "e" .. (random(2) == 1 and "-" or "") .. random(400) end,
  function(random) return random_double(random) end,
  -- About 2^53, where whole numbers stop being doubles.
  function(random) return ("%d.0"):format(9007199254740992 - 500 + random(500)):gsub("%.0$", "") .. "" end,
  function(random) return "900719925474" .. random_digits(random, 4) end,
}

local function random_number(random)
  local text = NUMBERS[random(#NUMBERS)](random)
  return (random(3) == 1 and text:sub(1, 1) ~= "-") and "-" .. text or text
end

local function space(random)
  return random(8) == 1 and ({ " ", "\n", "\t", "\r\n" })[random(4)] or ""
end

local random_value

local function random_members(random, depth, open, close, member)
  local parts = {}
  for i = 1, random(10) == 1 and random(60) or random(6) - 1 do
    parts[i] = space(random) .. member(random, depth + 1) .. space(random)
  end
  return open .. (#parts == 0 and space(random) or table.concat(parts, ",")) .. close
end

function random_value(random, depth)
  local kind = random(depth > 5 and 6 or 10)
  if kind <= 2 then
    return random_number(random)
  elseif kind <= 4 then
    return random_string(random)
  elseif kind == 5 then
    return ({ "true", "false", "null" })[random(3)]
  elseif kind == 6 then
    return ({ "[]", "{}" })[random(2)]
  elseif kind <= 8 then
    return random_members(random, depth, "[", "]", random_value)
  end
  return random_members(random, depth, "{", "}", function(_, deeper)
    return random_string(random) .. space(random) .. ":" .. space(random) .. random_value(random, deeper)
  end)
end

local function documents(seed, count)
  local random = new_random(seed)
  local list = {}
  for i = 1, count do
    if i % 1000 == 0 then
      local depth = random(990)
      list[i] = ('[{"k":'):rep(depth / 2) .. random_value(random, 5) .. ("}]"):rep(depth / 2)
    else
      list[i] = space(random) .. random_value(random, random(4)) .. space(random)
    end
  end
  return list
end

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
  local texts = documents(20240229, DOCUMENTS)

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
    local random = new_random(4711)
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
      check(tonumber(random_double(random)))
      check((random(2 ^ 31) - 1) / random(1000))
      check(random(2 ^ 31) * random(2 ^ 31) / 10 ^ random(20))
    end
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
    local random = new_random(99)
    local texts = documents(7, DOCUMENTS / 4)
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
