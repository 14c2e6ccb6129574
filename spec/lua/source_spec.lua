-- Finding the line where a key is written: lua/tidemill/source.lua.

local source = require "tidemill.source"

local function line(text, ...)
  return source.line(text, { ... })
end

describe("the line of a key", function()
  it("is where it is written as a name, as a string in brackets, or as a string in a list", function()
    local text = 'return {\n  plain = 1,\n  ["in brackets"] = 2,\n  [\'single\'] = 3,\n  list = { "entry" },\n}'
    assert.equal(2, line(text, "plain"))
    assert.equal(3, line(text, "in brackets"))
    assert.equal(4, line(text, "single"))
    assert.equal(5, line(text, "list", "entry"))
    assert.is_nil(line(text, "absent"))
    assert.is_nil(line(text, "list", "absent"))
  end)

  it("is not in a comment, a longer word, a comparison or a value", function()
    assert.equal(6, line([==[
-- key = 1
--[[ key = 2
]] --[=[ key = 3 ]] ]=]
local mykey, keys, value = 1, key == 2, key
x[key] = 4
return { key = 5 }]==], "key"))
  end)

  it("is found past strings with escapes and long strings", function()
    assert.equal(5, line([==[
local a = "\" key = 1 \\"
local b = '\' key = 2'
local c = [=[ key = 3 ]]
]=]
return { key = a .. b .. c }]==], "key"))
  end)

  it("is inside of its parents", function()
    local text = [[
return {
  other = { a = { max = 1 } },
  subscribe = {
    ["t.x"] = {
      a = { handler = "h" },
      b = { max = 2 },
    },
    ["t.y"] = { a = { max = 3 } },
  },
  max = 4,
}]]
    assert.equal(6, line(text, "subscribe", "t.x", "b", "max"))
    assert.equal(8, line(text, "subscribe", "t.y", "a", "max"))
    assert.equal(10, line(text, "max"))
    assert.equal(5, line(text, "subscribe", "t.x", "a"))
    assert.equal(2, line(text, "other", "a", "max"))
  end)

  it("is found in statements, and before its parent when it is nowhere else", function()
    local text = "local jobs = {\n  a = 'h',\n}\nlocal config = {}\nconfig.subscribe = jobs\nreturn config"
    assert.equal(5, line(text, "subscribe"))
    assert.equal(2, line(text, "subscribe", "a"))
  end)

  it("does not stumble over text that is no Lua", function()
    for _, text in ipairs { "", "\"", "'\\", "[[", "--[[", "]]", "}}}{", "\0\255", "a = [==[ x ]=]", "key" } do
      assert.is_nil(line(text, "key", "deeper"))
    end
    assert.equal(1, line("}}} key =", "key"))
  end)
end)
