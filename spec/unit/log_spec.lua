-- Gates that keep a storm of equal lines out of the log: src/core/log.

local ffi = require "ffi"
local header = require "spec.support.header"

local lib = header.declare("core/log.h")

local function gates()
  local self, skipped = ffi.new "struct mill_log_gates", ffi.new "uint64_t[1]"
  return function(text, secs)
    if lib.mill_log_gates(self, text, #text, secs or 3600, skipped) then
      return tonumber(skipped[0])
    end
  end
end

describe("a gate for each text", function()
  it("lets each through once", function()
    local pass = gates()
    assert.equal(0, pass "a")
    assert.equal(0, pass "b")
    assert.is_nil(pass "a")
    assert.is_nil(pass "b")
    assert.equal(0, pass "")
    assert.is_nil(pass "")
  end)

  it("lets it through again when its time is over, with the number held back", function()
    local pass = gates()
    pass "a"
    assert.is_nil(pass "a")
    assert.is_nil(pass "a")
    assert.equal(2, pass("a", 0))
    assert.equal(0, pass("a", 0))
  end)

  it("holds back what there is no place for, and tells with the next line", function()
    local pass = gates()
    for i = 1, 32 do
      assert.equal(0, pass("text " .. i))
    end
    assert.is_nil(pass "one more")
    assert.is_nil(pass "and one")
    assert.is_nil(pass "text 1")
    assert.is_nil(pass "text 32")
    assert.equal(3, pass("text 1", 0))
    assert.equal(1, pass("text 32", 0))
  end)
end)
