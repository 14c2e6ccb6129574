-- Random JSON texts: the same for the same seed, on every run and machine.

local ffi = require "ffi"

local random_json = {}

-- Park and Miller's: the same numbers on every run and machine.
function random_json.new_random(seed)
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
function random_json.double(random)
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
  function(random) return random_json.double(random) end,
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

-- `count` texts; each thousandth is nested up to the depth that is allowed.
function random_json.documents(seed, count)
  local random = random_json.new_random(seed)
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

return random_json
