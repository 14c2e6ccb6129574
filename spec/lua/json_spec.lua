-- tidemill.json, reading: the rules of src/executor/json.h by example, with numbers and null, which
-- reading and writing share. Writing is in json_encode_spec.lua, random values are in
-- json_property_spec.lua.

local ffi = require "ffi"
local json = require "tidemill.json"
local folder = require "spec.support.folder"

ffi.cdef [[
  int setenv(const char *name, const char *value, int overwrite);
  int unsetenv(const char *name);
  int snprintf(char *text, size_t size, const char *format, ...);
]]

local function again(text)
  return json.encode(json.decode(text))
end

local function decode_error(text)
  local ok, err = pcall(json.decode, text)
  assert.is_false(ok, "was accepted: " .. text)
  return err
end

local function encode_error(value)
  local ok, err = pcall(json.encode, value)
  assert.is_false(ok, "was accepted")
  return err
end

describe("decode and encode", function()
  it("keep the kind of empty and full arrays and objects", function()
    for _, text in ipairs { "[]", "{}", "[[]]", "[{}]", '{"a":[]}', '{"a":{}}', "[[],{},[[]],[1,[2]]]", "[null]" } do
      assert.equal(text, again(text))
    end
  end)

  it("keep an array an array when its only element is removed", function()
    local list = json.decode "[1]"
    table.remove(list)
    assert.equal("[]", json.encode(list))
  end)

  it("keep tables with more members than wait on the stack", function()
    local list, object = {}, {}
    for i = 1, 100 do
      list[i] = tostring(i)
      object[i] = ('"k%d":%d'):format(i, i)
      local array_text = "[" .. table.concat(list, ",") .. "]"
      assert.equal(array_text, again(array_text))
      local decoded = json.decode("{" .. table.concat(object, ",") .. "}")
      local count = 0
      for key, value in pairs(decoded) do
        assert.equal(key, "k" .. value)
        count = count + 1
      end
      assert.equal(i, count)
    end
  end)

  it("agree on true, false and null, at the top level too", function()
    assert.equal("true", again " true ")
    assert.equal("false", again "false")
    assert.equal("null", again "null")
    assert.equal("null", json.encode(nil))
    assert.equal('{"a":null}', json.encode { a = json.null })
  end)

  it("go 1000 levels deep and not one further", function()
    local deep = ("["):rep(1000) .. ("]"):rep(1000)
    assert.equal(deep, again(deep))
    local objects = ('{"a":'):rep(999) .. "{}" .. ("}"):rep(999)
    assert.equal(objects, again(objects))
    assert.equal("not JSON at byte 1001: nested deeper than 1000", decode_error("[" .. deep .. "]"))
    assert.matches("nested deeper than 1000", decode_error(("["):rep(1000000)))
    assert.matches("nested deeper than 1000", decode_error(('{"a":'):rep(1000000)))
  end)

  it("work inside a coroutine and with little Lua stack left", function()
    local deep = ("["):rep(1000) .. ("]"):rep(1000)
    local function descend(n)
      if n == 0 then
        return again(deep)
      end
      return (descend(n - 1))
    end
    local co = coroutine.wrap(descend)
    assert.equal(deep, co(5000))
  end)
end)

describe("null", function()
  it("is not nil, prints as null and is lua-cjson's null", function()
    assert.is_true(json.null ~= nil)
    assert.equal("null", tostring(json.null))
    assert.is_true(json.null == require("cjson").null)
    assert.is_true(json.decode("[null]")[1] == json.null)
  end)
end)

describe("a number", function()
  local function is_number(text, value)
    local found = json.decode(text)
    assert.equal("number", type(found), text)
    assert.equal(value, found)
  end

  it("is a Lua number when that keeps its value", function()
    is_number("0", 0)
    is_number("42", 42)
    is_number("-7", -7)
    is_number("0.1", 0.1)
    is_number("19.99", 19.99)
    is_number("1.50", 1.5)
    is_number("1e2", 100)
    is_number("1E+2", 100)
    is_number("25e-1", 2.5)
    is_number("1e0000000000000000000005", 1e5)
    is_number("0e999", 0)
    is_number("0.000000000000000000000000000000000000", 0)
    is_number("9007199254740991", 9007199254740991)
    is_number("9007199254740992", 9007199254740992)
    is_number("100000000000000000000000", 1e23)
    is_number("0.30000000000000004", 0.1 + 0.2)
    is_number("123456789012345.6", 123456789012345.6)
    is_number("1.7976931348623157e308", 1.7976931348623157e308)
    is_number("2.2250738585072014e-308", 2.2250738585072014e-308)
    is_number("5e-324", 4.9406564584124654e-324)
    -- Needs 17 digits as the nearest, but 16 that are not the nearest read back too.
    is_number("5.684341886080802e-14", 2 ^ -44)
  end)

  it("is a decimal with the same text when a Lua number would change it", function()
    for _, text in ipairs {
      "9007199254740993", "12345678901234567890", "-12345678901234567890", "1152921504606846976",
      "0.1000000000000000055", "0.10000000000000001", "1e400", "-1e400", "1e-400", "1.7976931348623159e308",
      "4.9e-324", "3.14159265358979323846264338327950288", "1e999999999999999", "12345678901234567890.000",
    } do
      local value = json.decode(text)
      assert.is_true(json.is_decimal(value), text)
      assert.equal(text, tostring(value))
      assert.equal(text, json.encode(value))
      assert.equal("[" .. text .. "]", again("[" .. text .. "]"))
    end
  end)

  it("keeps the sign of zero", function()
    assert.equal(-math.huge, 1 / json.decode "-0")
    assert.equal("-0", again "-0.0")
    assert.equal("0", again "0")
  end)

  it("is refused where the grammar of JSON refuses it", function()
    for _, text in ipairs {
      "01", "-01", "00", "1.", "1.e1", ".5", "-.5", "+1", "-", "--1", "1e", "1e+", "1e1.5", "1_000", "0x10",
      "NaN", "-NaN", "Infinity", "-Infinity", "1a", "1e2e3", "1;5", "- 1", "1e9999999999999999",
    } do
      decode_error(text)
      decode_error("[" .. text .. "]")
    end
    assert.equal("not JSON at byte 5: a number that JSON does not allow", decode_error "[1,-]")
  end)

  it("is written with all its digits", function()
    assert.equal("9007199254740992", json.encode(2 ^ 53))
    assert.equal("-9007199254740991", json.encode(-9007199254740991))
    assert.equal("1000000000000000", json.encode(1e15))
    assert.equal("123456789012345", json.encode(123456789012345))
    assert.equal("0.1", json.encode(0.1))
    assert.equal("19.99", json.encode(19.99))
    assert.equal("-0.07", json.encode(-0.07))
    assert.equal("0.30000000000000004", json.encode(0.1 + 0.2))
    assert.equal("0.3333333333333333", json.encode(1 / 3))
    assert.equal("1e300", json.encode(1e300))
    assert.equal("1e-7", json.encode(1e-7))
    assert.equal("0.000001", json.encode(1e-6))
    assert.equal("1.7976931348623157e308", json.encode(1.7976931348623157e308))
    assert.equal("5e-324", json.encode(4.9406564584124654e-324))
  end)

  it("is refused when JSON has no text for it", function()
    assert.equal("value: NaN cannot be written as JSON", encode_error(0 / 0))
    assert.equal("value.a[2]: an infinite number cannot be written as JSON", encode_error { a = { 1, -math.huge } })
  end)

  it("may be a 64-bit integer of the FFI, which is written exactly", function()
    assert.equal(
      "[-5,9223372036854775807,-9223372036854775808,18446744073709551615,0]",
      json.encode { -5LL, 9223372036854775807LL, -9223372036854775807LL - 1, 18446744073709551615ULL, 0ULL }
    )
    assert.equal("value[1]: a cdata cannot be written as JSON", encode_error { ffi.new "int[2]" })
    assert.equal("value: a cdata cannot be written as JSON", encode_error(ffi.new("void *")))
  end)

  it("is read and written with a point whatever locale a handler sets", function()
    local dir = folder.temp()
    finally(function()
      os.setlocale("C", "all")
      ffi.C.unsetenv "LOCPATH"
      folder.remove(dir)
    end)
    if os.execute("localedef -i de_DE -f UTF-8 " .. dir .. "/xx_DE.utf8 >/dev/null 2>&1") ~= 0 then
      pending "needs localedef and the locale sources"
      return
    end
    ffi.C.setenv("LOCPATH", dir, 1)
    assert.equal("xx_DE.utf8", os.setlocale("xx_DE.utf8", "all"))
    local buffer = ffi.new "char[16]"
    ffi.C.snprintf(buffer, 16, "%g", 1.5)
    assert.equal("1,5", ffi.string(buffer))

    for _, text in ipairs {
      "19.99", "0.30000000000000004", "1.2345678901234567e-100", "1.7976931348623157e308", "2.5e-320",
      "1152921504606847000", "5.684341886080802e-14",
    } do
      assert.equal("number", type(json.decode(text)), text)
      assert.equal(text, again(text))
    end
    assert.equal(1234.5678901234567, json.decode("1234.5678901234567"))
    assert.equal(1.5e300, json.decimal("1.5e300"):number())
  end)
end)

describe("a decimal", function()
  local decimal = json.decimal

  it("is made from text, a number or a decimal", function()
    assert.equal("-12.50", tostring(decimal "-12.50"))
    assert.equal("0.1", tostring(decimal(0.1)))
    assert.equal("1e400", tostring(decimal(decimal "1e400")))
    assert.equal('{"price":1.50}', json.encode { price = decimal "1.50" })
    for _, text in ipairs { "", "1 ", " 1", "x", "1.", "NaN", "1\0" } do
      assert.has_error(function() decimal(text) end)
    end
    assert.has_error(function() decimal(0 / 0) end)
    assert.has_error(function() decimal(math.huge) end)
    assert.has_error(function() decimal {} end)
  end)

  it("is compared by value", function()
    local function order(smaller, larger)
      assert.is_true(decimal(smaller) < decimal(larger), smaller .. " < " .. larger)
      assert.is_true(decimal(smaller) <= decimal(larger))
      assert.is_false(decimal(larger) <= decimal(smaller))
      assert.is_false(decimal(larger) == decimal(smaller))
    end
    order("1", "2")
    order("9", "10")
    order("-10", "-9")
    order("-1", "0")
    order("0", "1e-400")
    order("1e400", "1.0000000000000000000000000000001e400")
    order("0.1000000000000000055", "0.1000000000000000056")
    order("12345678901234567890", "12345678901234567890.1")
    order("-12345678901234567890.1", "-12345678901234567890")
    local function same(a, b)
      assert.is_true(decimal(a) == decimal(b), a .. " == " .. b)
      assert.is_true(decimal(a) <= decimal(b))
      assert.is_false(decimal(a) < decimal(b))
    end
    same("1.50", "1.5")
    same("1e400", "10e399")
    same("0.001e3", "1")
    same("100", "1e2")
    same("-0", "0.000e7")
    same("12345678901234567890", "12345678901234567890.000")
  end)

  it("becomes the nearest Lua number on demand", function()
    assert.equal(12345678901234567890, decimal("12345678901234567890"):number())
    assert.equal(0.1, decimal("0.1000000000000000055"):number())
    assert.equal(math.huge, decimal("1e400"):number())
    assert.equal(-math.huge, decimal("-1e999999999999999"):number())
    assert.equal(0, decimal("1e-999999999999999"):number())
    assert.equal(1e308, decimal("1" .. ("0"):rep(308)):number())
    -- Just above the middle between two doubles, told only by the last of 1001 digits.
    local middle = "9007199254740993." .. ("0"):rep(985)
    assert.equal(9007199254740992, decimal(middle .. "0"):number())
    assert.equal(9007199254740994, decimal(middle .. "1"):number())
  end)

  it("raises on arithmetic, telling what to use instead", function()
    local value = decimal "1e400"
    for _, operation in ipairs {
      function() return value + 1 end, function() return 1 - value end, function() return value * value end,
      function() return value / 2 end, function() return value % 2 end, function() return value ^ 2 end,
      function() return -value end,
    } do
      local ok, err = pcall(operation)
      assert.is_false(ok)
      assert.matches("json_spec.lua:%d+: a decimal holds more digits .*decimal:number%(%)", err)
    end
  end)

  it("joins texts", function()
    assert.equal("order 12345678901234567890!", "order " .. decimal "12345678901234567890" .. "!")
    assert.has_error(function() return decimal "1" .. {} end)
  end)
end)

describe("decoding a string", function()
  it("understands every escape", function()
    assert.equal('"\\/\b\f\n\r\t', json.decode [["\"\\\/\b\f\n\r\t"]])
    assert.equal("é€😀", json.decode [["\u00e9\u20AC\ud83d\uDE00"]])
    assert.equal("a\0b", json.decode [["a\u0000b"]])
    assert.equal("\239\191\191", json.decode [["\uffff"]])
  end)

  it("keeps plain text of every length, wherever the special byte is", function()
    for length = 0, 40 do
      for at = 1, length do
        for _, special in ipairs { '\\"', "\\n", "é", "😀", "\\u0041" } do
          local text = '"' .. ("x"):rep(at - 1) .. special .. ("y"):rep(length - at) .. '"'
          local meant = special:gsub('\\"', '"'):gsub("\\n", "\n"):gsub("\\u0041", "A")
          assert.equal(("x"):rep(at - 1) .. meant .. ("y"):rep(length - at), json.decode(text))
        end
      end
      assert.equal(("x"):rep(length), json.decode('"' .. ("x"):rep(length) .. '"'))
    end
  end)

  it("puts long strings with escapes together", function()
    local part = ("x"):rep(1000) .. "\\n"
    assert.equal(#part * 200 - 200, #json.decode('"' .. part:rep(200) .. '"'))
    assert.equal(("\n"):rep(5000), json.decode('"' .. ("\\n"):rep(5000) .. '"'))
  end)

  it("refuses what is not text", function()
    assert.equal("not JSON at byte 2: half of a surrogate pair without the other half", decode_error [["\ud83d"]])
    assert.equal("not JSON at byte 3: half of a surrogate pair without the other half", decode_error [["a\ude00"]])
    assert.matches("surrogate", decode_error [["\ud83d\u0041"]])
    assert.matches("surrogate", decode_error [["\ud83dx\ude00"]])
    assert.matches("byte 2: `\\u` needs four", decode_error [["\u12g4"]])
    assert.matches("byte 2: `\\u` needs four", decode_error [["\u12]])
    assert.matches("byte 3: no such escape", decode_error [["a\x"]])
    assert.matches("byte 2: no such escape", decode_error [["\]])
    assert.matches("byte 4: a control character", decode_error '"ab\n"')
    assert.matches("byte 2: a control character", decode_error '"\0"')
    assert.matches("byte 4: the end inside a string", decode_error '"ab')
    assert.matches("byte 4: the end inside a string", decode_error [["\"]])
    for _, bytes in ipairs {
      "\128", "\191", "\192\128", "\193\191", "\194", "\194x", "\224\128\128", "\224\159\191", "\226\130",
      "\237\160\128", "\237\191\191", "\240\128\128\128", "\240\143\191\191", "\240\159\152", "\244\144\128\128",
      "\245\128\128\128", "\255",
    } do
      assert.equal("not JSON at byte 3: the text is not UTF-8", decode_error('"a' .. bytes .. '"'))
      assert.matches("not UTF%-8", decode_error('"\\n' .. bytes .. '"'))
      assert.equal(
        "value: text is not UTF-8, as all text must be: write bytes as base64 or hex", encode_error("a" .. bytes)
      )
    end
    for _, text in ipairs { "\194\128", "\223\191", "\224\160\128", "\237\159\191", "\238\128\128", "\239\191\191",
      "\240\144\128\128", "\244\143\191\191" } do
      assert.equal('"' .. text .. '"', again('"' .. text .. '"'))
    end
  end)
end)

describe("decoding", function()
  it("lets the last of duplicate keys win", function()
    assert.equal('{"a":2}', again '{"a":1,"a":2}')
    local pairs_text = {}
    for i = 1, 50 do
      pairs_text[i] = ('"k%d":%d'):format(i % 3, i)
    end
    assert.same({ k0 = 48, k1 = 49, k2 = 50 }, json.decode("{" .. table.concat(pairs_text, ",") .. "}"))
  end)

  it("tells the byte and what was expected there", function()
    local errors = {
      [""] = "byte 1: expected a value, found the end",
      [" \n\t\r "] = "byte 6: expected a value, found the end",
      ["nul"] = "byte 1: expected a value, found `n`",
      ["True"] = "byte 1: expected a value, found `T`",
      ["[1,]"] = "byte 4: expected a value, found `]`",
      ["[1 2]"] = "byte 4: expected `,` or `]` in an array, found `2`",
      ["[1"] = "byte 3: expected `,` or `]` in an array, found the end",
      ["["] = "byte 2: expected a value, found the end",
      ["{"] = "byte 2: expected a key in double quotes, found the end",
      ["{a:1}"] = "byte 2: expected a key in double quotes, found `a`",
      ['{"a"}'] = "byte 5: expected `:` after a key, found `}`",
      ['{"a":1,}'] = "byte 8: expected a key in double quotes, found `}`",
      ['{"a":1 "b":2}'] = 'byte 8: expected `,` or `}` in an object, found `"`',
      ['{"a":}'] = "byte 6: expected a value, found `}`",
      ["{1:2}"] = "byte 2: expected a key in double quotes, found `1`",
      ["[] []"] = "byte 4: expected the end after the value, found `[`",
      ["1 x"] = "byte 3: expected the end after the value, found `x`",
      ["[]\0"] = "byte 3: expected the end after the value, found byte 0x00",
      ["\239\187\191{}"] = "byte 1: expected a value, found byte 0xEF",
      ["\12{}"] = "byte 1: expected a value, found byte 0x0C",
      ["'a'"] = "byte 1: expected a value, found `'`",
      ["// x\n1"] = "byte 1: expected a value, found `/`",
    }
    for text, err in pairs(errors) do
      assert.equal("not JSON at " .. err, decode_error(text))
    end
  end)

  it("refuses every beginning of a text that is cut short", function()
    local text = '{"a":[1,-2.5e3,true,false,null,"x\\n\\u00e9"],"b":{"c":{}}}'
    assert.equal("x\né", json.decode(text).a[6])
    for length = 0, #text - 1 do
      decode_error(text:sub(1, length))
    end
  end)

  it("names the line of the caller", function()
    local ok, err = pcall(function() return (json.decode "[") end)
    assert.is_false(ok)
    assert.matches("json_spec.lua:%d+: not JSON at byte 2", err)
  end)

  it("takes nothing but a text", function()
    for _, value in ipairs { 1, {}, true, json.null } do
      assert.has_error(function() json.decode(value) end)
    end
    assert.has_error(function() json.decode() end)
  end)
end)
