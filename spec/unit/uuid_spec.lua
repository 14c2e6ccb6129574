-- UUIDs of version 7: src/core/uuid.h through the FFI, and tidemill.native.uuid.

local ffi = require "ffi"
local native = require "tidemill.native"
local unit = require "spec.support.unit"

local lib = unit.cdef [[
  void mill_uuid_v7(uint8_t id[16]);
  void mill_uuid_text(const uint8_t id[16], char text[37]);
  int mill_uuid_parse(const char *text, size_t len, uint8_t id[16]);
]]

local function parse(text)
  local id = ffi.new "uint8_t[16]"
  return lib.mill_uuid_parse(text, #text, id) == 0 and ffi.string(id, 16) or nil
end

local function text_of(id)
  local text = ffi.new "char[37]"
  lib.mill_uuid_text(ffi.cast("const uint8_t *", id), text)
  return ffi.string(text)
end

describe("a UUID", function()
  it("is parsed in either case and written in lower case", function()
    local text = "01234567-89ab-cdef-0123-456789abcdef"
    assert.equal(
      "\1\35\69\103\137\171\205\239\1\35\69\103\137\171\205\239", parse(text)
    )
    assert.equal(parse(text), parse(text:upper()))
    assert.equal(text, text_of(parse(text)))
  end)

  it("is refused in any other form", function()
    for _, text in ipairs {
      "", "0123456789abcdef0123456789abcdef", "{01234567-89ab-cdef-0123-456789abcdef}",
      "01234567-89ab-cdef-0123-456789abcde", "01234567-89ab-cdef-0123-456789abcdef0",
      "01234567-89ab-cdef-0123-456789abcdeg", "012345678-9ab-cdef-0123-456789abcdef",
      "01234567_89ab-cdef-0123-456789abcdef", " 1234567-89ab-cdef-0123-456789abcdef",
    } do
      assert.is_nil(parse(text), text)
    end
  end)
end)

describe("a new UUID", function()
  it("has version 7, the variant of RFC 9562 and the wall clock's milliseconds in front", function()
    local before = math.floor(native.now() * 1000)
    local text = native.uuid()
    local after = math.ceil(native.now() * 1000)
    assert.matches("^%x%x%x%x%x%x%x%x%-%x%x%x%x%-7%x%x%x%-[89ab]%x%x%x%-%x%x%x%x%x%x%x%x%x%x%x%x$", text)
    local ms = tonumber(text:sub(1, 8) .. text:sub(10, 13), 16)
    assert.is_true(before <= ms and ms <= after, ("%d %d %d"):format(before, ms, after))
  end)

  it("is another each time", function()
    local seen = {}
    for _ = 1, 10000 do
      local text = native.uuid()
      assert(not seen[text], text)
      seen[text] = true
    end
  end)

  it("sorts by the time of its making, finer than a millisecond", function()
    -- 4096 steps a millisecond: of two made at least one step apart the later is the larger. A wall
    -- clock that is set back meanwhile is no fault, so one run in order is enough.
    local in_order
    for _ = 1, 20 do
      in_order = true
      local last = native.uuid()
      for _ = 1, 50 do
        local start = native.now()
        while native.now() - start < 2e-6 do end
        local text = native.uuid()
        in_order = in_order and last < text
        last = text
      end
      if in_order then
        break
      end
    end
    assert.is_true(in_order)
  end)
end)
