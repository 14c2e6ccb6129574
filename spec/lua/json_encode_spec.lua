-- tidemill.json, writing: the rules of src/executor/json.h by example.

local json = require "tidemill.json"

local function encode_error(value)
  local ok, err = pcall(json.encode, value)
  assert.is_false(ok, "was accepted")
  return err
end

describe("encoding a string", function()
  it("escapes what must be escaped and nothing else", function()
    assert.equal([["\"\\/\b\f\n\r\t\u0001\u001f]] .. "\127é€😀" .. '"', json.encode "\"\\/\b\f\n\r\t\1\31\127é€😀")
    for byte = 1, 127 do
      for length = 0, 9 do
        local text = ("x"):rep(length) .. string.char(byte) .. ("y"):rep(9)
        assert.equal(text, json.decode(json.encode(text)))
        assert.equal(text, next(json.decode(json.encode { [text] = 1 })))
      end
    end
  end)

  it("refuses NUL bytes, in keys too", function()
    assert.equal("value.name: text with a NUL byte cannot be stored by Postgres", encode_error { name = "a\0b" })
    assert.equal(
      'value.x["a?b"]: a key with a NUL byte cannot be stored by Postgres', encode_error { x = { ["a\0b"] = 1 } }
    )
    assert.equal(
      'value["?"]: a key is not UTF-8, as all text must be: write bytes as base64 or hex', encode_error { ["\255"] = 1 }
    )
  end)
end)

describe("encoding a table", function()
  it("takes exactly the keys 1…n for an array, however they are stored", function()
    assert.equal("[1,2,3]", json.encode { 1, 2, 3 })
    assert.equal("[1,2,3]", json.encode { [3] = 3, [2] = 2, [1] = 1 })
    local backwards = {}
    for i = 100, 1, -1 do
      backwards[i] = i
    end
    local text = json.encode(backwards)
    assert.same(backwards, json.decode(text))
    assert.equal("[1,2,", text:sub(1, 5))
    local shrunk = json.decode("[" .. ("1,"):rep(99) .. "1]")
    for i = 100, 4, -1 do
      shrunk[i] = nil
    end
    assert.equal("[1,1,1]", json.encode(shrunk))
  end)

  it("takes time in proportion to a deep table whose arrays are stored out of order", function()
    local list = {}
    for _ = 1, 900 do
      list = { [3] = 3, [2] = 2, [1] = list }
    end
    assert.equal(1 + 4 * 900 + 1 + 900 * 2, #json.encode(list))
  end)

  it("writes an empty one as an object unless it is marked", function()
    assert.equal("{}", json.encode {})
    assert.equal("[]", json.encode(json.array()))
    assert.equal("[]", json.encode(json.array {}))
    assert.equal('{"list":[]}', json.encode { list = json.array {} })
  end)

  it("refuses what is neither array nor object, with its path", function()
    assert.equal(
      "value: has elements of an array and the key .x: JSON has no such table", encode_error { 1, 2, x = 3 }
    )
    assert.equal(
      "value.a: [2] is missing and [3] is not: an array has no gap (use tidemill.null)",
      encode_error { a = { 1, nil, 3 } }
    )
    assert.matches("^value: %[1%] is missing and %[1000%] is not", encode_error { [1000] = true })
    assert.matches("^value: the key 0: an object's keys are strings", encode_error { [0] = 1 })
    assert.matches("^value: the key %-1:", encode_error { [-1] = 1 })
    assert.matches("^value: the key 1.5:", encode_error { [1.5] = 1 })
    assert.matches("^value: %[1%] is missing and %[inf%] is not", encode_error { [math.huge] = 1 })
    assert.equal("value: a key that is a boolean: an object's keys are strings", encode_error { [true] = 1 })
    assert.equal("value: a key that is a table: an object's keys are strings", encode_error { [{}] = 1 })
    local mixed = { x = 1 }
    mixed[2 ^ 40] = 1
    encode_error(mixed)
  end)

  it("refuses gaps and other keys in a marked array", function()
    assert.equal("value: an array cannot have the key .x", encode_error(json.array { x = 1 }))
    assert.equal("value: an array cannot have the key .x", encode_error(json.array { 1, x = 1 }))
    assert.matches("^value: %[2%] is missing and %[4%] is not", encode_error(json.array { 1, nil, 3, 4 }))
    assert.matches("^value: a key that is a boolean", encode_error(json.array { [false] = 1 }))
  end)

  it("refuses values that JSON does not have, with their path", function()
    local inner = { price = print }
    assert.equal(
      "value.items[3].price: a function cannot be written as JSON", encode_error { items = { 1, 2, inner } }
    )
    assert.equal("value[1]: a thread cannot be written as JSON", encode_error { coroutine.create(print) })
    assert.equal("value: a userdata cannot be written as JSON", encode_error(io.stdout))
    assert.equal(
      'value["two words"].a: a function cannot be written as JSON', encode_error { ["two words"] = { a = print } }
    )
    assert.equal(
      'value["9a"]["é?"]: a function cannot be written as JSON', encode_error { ["9a"] = { ["é\n"] = print } }
    )
    assert.equal(
      'value["' .. ("é"):rep(20) .. '…"]: a function cannot be written as JSON',
      encode_error { [("é"):rep(50)] = print }
    )
  end)

  it("refuses cycles and does not hang", function()
    local object, list = {}, {}
    object.up = object
    list[1] = list
    assert.matches("^value%.up%.up.*…: nested deeper than 1000: does a table hold itself%?$", encode_error(object))
    assert.matches("^value%[1%]%[1%].*…: nested deeper than 1000: does a table hold itself%?$", encode_error(list))
  end)

  it("reads tables raw", function()
    local proxy = setmetatable({ a = 1 }, {
      __index = function() error "called" end,
      __len = function() error "called" end,
      __pairs = function() error "called" end,
      __tostring = function() error "called" end,
    })
    assert.equal('{"a":1}', json.encode(proxy))
  end)

  it("leaves nothing of a failed text behind", function()
    encode_error { ("x"):rep(1000), print }
    assert.equal("[1]", json.encode { 1 })
  end)

  it("gives a large buffer back and goes on", function()
    local large = ("x"):rep(3 * 1024 * 1024)
    assert.equal(#large + 2, #json.encode(large))
    assert.equal('"x"', json.encode "x")
  end)

  it("needs a value", function()
    assert.has_error(function() json.encode() end)
  end)
end)

describe("array", function()
  it("returns the table it marks, as decoding does", function()
    local list = { 1 }
    assert.equal(list, json.array(list))
    assert.equal(list, json.array(list))
    assert.is_true(json.is_array(list))
    assert.is_true(json.is_array(json.decode "[]"))
    assert.is_false(json.is_array(json.decode "{}"))
    assert.is_false(json.is_array { 1 })
    assert.is_false(json.is_array "x")
  end)

  it("does not replace another metatable", function()
    local object = setmetatable({}, { __index = table })
    assert.has_error(function() json.array(object) end)
    assert.equal(table, getmetatable(object).__index)
    assert.has_error(function() json.array "x" end)
  end)
end)

describe("encoding", function()
  it("makes no garbage but the text", function()
    local value = json.decode '{"id":"x","list":[1,2.5,true,null,{"a":[]}],"big":12345678901234567890}'
    json.encode(value)
    collectgarbage()
    collectgarbage "stop"
    local before = collectgarbage "count"
    for _ = 1, 1000 do
      json.encode(value)
    end
    local grown = (collectgarbage "count" - before) * 1024
    collectgarbage "restart"
    assert.is_true(grown < 1000 * 8, grown .. " bytes")
  end)
end)
