-- Frames between a runtime and its executors: what is written reads back the same, and whatever else
-- arrives is refused without reading past its end. src/core/frame and src/core/message.

local ffi = require "ffi"
local header = require "spec.support.header"

local lib = header.declare("core/message.h")

local function new_buffer()
  return ffi.gc(ffi.new "struct mill_buffer", lib.mill_buffer_free)
end

local function bytes_of(buffer)
  return ffi.string(buffer.data, buffer.len)
end

local function span(text)
  return ffi.new("struct mill_span", text, text and #text or 0)
end

local function text_of(value)
  if value.data ~= nil then
    return ffi.string(value.data, value.len)
  end
end

-- A copy that ends where its memory ends, so that a sanitizer sees a read past it.
local function exact(bytes)
  local memory = ffi.new("char[?]", math.max(#bytes, 1))
  ffi.copy(memory, bytes, #bytes)
  return memory
end

-- The size of the first frame, or nil and the error; the frame; and what keeps its bytes alive.
local function parse(bytes)
  local frame, err, memory = ffi.new "struct mill_frame", ffi.new "struct mill_err", exact(bytes)
  local size = tonumber(lib.mill_frame_parse(memory, #bytes, frame, err))
  if size < 0 then
    return nil, ffi.string(err.message)
  end
  return size, frame, memory
end

local function reader_of(bytes)
  local memory = exact(bytes)
  return ffi.new("struct mill_reader", memory, memory + #bytes, false), memory
end

-- Every frame that has fields: an example, how to write and to read it, and the fields read back.
local frames = {
  LOAD = {
    kind = 1, struct = "struct mill_load", write = lib.mill_load_write, read = lib.mill_load_read,
    example = { mode = 1, generation = 4294967295, config_path = span "dir/config.lua", call = span "crm.sync",
      database = span "host=a password=b", database_yields = true, plain_table = true },
    fields = function(load)
      return { tonumber(load.mode), load.generation, text_of(load.config_path), text_of(load.call),
        text_of(load.database), load.database_yields, load.plain_table }
    end,
    expected = { 1, 4294967295, "dir/config.lua", "crm.sync", "host=a password=b", true, true },
  },
  DELIVER = {
    kind = 2, struct = "struct mill_deliver", write = lib.mill_deliver_write, read = lib.mill_deliver_read,
    example = {
      ticket = 0xfedcba9876543210ULL, lane = 7, id = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 255 },
      attempts = 3, max_attempts = 9, priority = -9, created_at = -1LL, published_by = span "",
      headers = span(nil), payload = span "{\"a\0\": 1}", wants_result = true, fence = span "host-1-a#7",
    },
    fields = function(deliver)
      return {
        tostring(deliver.ticket), deliver.lane, ffi.string(deliver.id, 16), deliver.attempts, deliver.max_attempts,
        deliver.priority, tostring(deliver.created_at), text_of(deliver.published_by), tostring(deliver.headers.data),
        text_of(deliver.payload), deliver.wants_result, text_of(deliver.fence),
      }
    end,
    expected = {
      "18364758544493064720ULL", 7, "\1\2\3\4\5\6\7\8\9\10\11\12\13\14\15\255", 3, 9, -9, "-1LL", "",
      "cdata<const char *>: NULL", "{\"a\0\": 1}", true, "host-1-a#7",
    },
  },
  CANCEL = {
    kind = 3, struct = "struct mill_cancel", write = lib.mill_cancel_write, read = lib.mill_cancel_read,
    example = { ticket = 5, reason = span "by ann" },
    fields = function(cancel)
      return { tonumber(cancel.ticket), text_of(cancel.reason) }
    end,
    expected = { 5, "by ann" },
  },
  REPLY = {
    kind = 4, struct = "struct mill_reply", write = lib.mill_reply_write, read = lib.mill_reply_read,
    example = { request = 6, ok = true, body = span "{}" },
    fields = function(reply)
      return { tonumber(reply.request), reply.ok, text_of(reply.body) }
    end,
    expected = { 6, true, "{}" },
  },
  OUTCOME = {
    kind = 66, struct = "struct mill_outcome", write = lib.mill_outcome_write, read = lib.mill_outcome_read,
    example = { ticket = 7, kind = 5, delay_secs = 2.5, error = span "why\255", publications = span "[]",
      result = span "null" },
    fields = function(outcome)
      return {
        tonumber(outcome.ticket), tonumber(outcome.kind), outcome.delay_secs, text_of(outcome.error),
        text_of(outcome.publications), text_of(outcome.result),
      }
    end,
    expected = { 7, 5, 2.5, "why\255", "[]", "null" },
  },
  REQUEST = {
    kind = 67, struct = "struct mill_request", write = lib.mill_request_write, read = lib.mill_request_read,
    example = { request = 8, ticket = 9, body = span "{}", published_by = span "ann" },
    fields = function(request)
      return {
        tonumber(request.request), tonumber(request.ticket), text_of(request.body), text_of(request.published_by),
      }
    end,
    expected = { 8, 9, "{}", "ann" },
  },
}

frames.FILE = {
  kind = 69, struct = "struct mill_file", write = lib.mill_file_write, read = lib.mill_file_read,
  example = { path = span "handlers/a.lua", digest = 0xfedcba9876543210ULL },
  fields = function(file)
    return { text_of(file.path), tostring(file.digest) }
  end,
  expected = { "handlers/a.lua", "18364758544493064720ULL" },
}

local function write(case)
  local out = new_buffer()
  case.write(out, ffi.new(case.struct, case.example))
  return bytes_of(out)
end

-- 0 or −1, and the struct.
local function read(case, body)
  local value = ffi.new(case.struct)
  return case.read(body, value, ffi.new "struct mill_err"), value
end

describe("a frame", function()
  it("reads back as it was written, whatever its type", function()
    for name, case in pairs(frames) do
      local bytes = write(case)
      local size, frame, memory = parse(bytes)
      assert.equal(#bytes, size, name)
      assert.equal(case.kind, tonumber(frame.type), name)
      local result, value = read(case, frame.body)
      assert.equal(0, result, name)
      assert.same(case.expected, case.fields(value), name)
      assert.is_truthy(memory)
    end
    local out = new_buffer()
    lib.mill_load_error_write(out, span "a\nb")
    local _, frame, memory = parse(bytes_of(out))
    local text = ffi.new "struct mill_span"
    assert.equal(lib.MILL_FRAME_LOAD_ERROR, tonumber(frame.type))
    assert.equal(0, lib.mill_load_error_read(frame.body, text, nil))
    assert.equal("a\nb", text_of(text))
    assert.is_truthy(memory)
  end)

  it("is asked for more bytes until it is whole", function()
    for name, case in pairs(frames) do
      local bytes = write(case)
      for len = 0, #bytes - 1 do
        assert.equal(0, (parse(bytes:sub(1, len))), name)
      end
      assert.equal(#bytes, (parse(bytes .. "more")), name)
    end
  end)

  it("follows another in the same bytes", function()
    local bytes = write(frames.CANCEL) .. write(frames.REPLY) .. write(frames.CANCEL)
    local kinds, at = {}, 1
    while at <= #bytes do
      local size, frame = parse(bytes:sub(at))
      table.insert(kinds, tonumber(frame.type))
      at = at + size
    end
    assert.same({ 3, 4, 3 }, kinds)
  end)

  it("may have no body", function()
    local out = new_buffer()
    lib.mill_frame_end(out, lib.mill_frame_begin(out, 5))
    local size, frame = parse(bytes_of(out))
    assert.equal(6, size)
    assert.is_true(lib.mill_reader_finished(frame.body))
  end)

  it("of an impossible length or another version is refused at once", function()
    for bytes, message in pairs {
      ["\0\0\0\0"] = "a frame of 0 bytes is not possible",
      ["\1\0\0\0"] = "a frame of 1 bytes is not possible",
      ["\255\255\255\255"] = "a frame of 4294967295 bytes is not possible",
      ["\1\0\0\16"] = "a frame of 268435457 bytes is not possible",
      ["\2\0\0\0\2\1"] = "a frame of version 2, this program speaks 1",
    } do
      local size, found = parse(bytes)
      assert.is_nil(size)
      assert.equal(message, found)
    end
    assert.equal(0, (parse "\0\0\0\16\1\1"))
  end)
end)

describe("a frame's body", function()
  it("that is cut anywhere is refused", function()
    for name, case in pairs(frames) do
      local body = write(case):sub(7)
      for len = 0, #body - 1 do
        local reader, memory = reader_of(body:sub(1, len))
        assert.equal(-1, (read(case, reader)), name)
        assert.is_truthy(memory)
      end
    end
  end)

  it("with bytes left over is refused", function()
    for name, case in pairs(frames) do
      local reader, memory = reader_of(write(case):sub(7) .. "\0")
      assert.equal(-1, (read(case, reader)), name)
      assert.is_truthy(memory)
    end
  end)

  it("with an outcome that does not exist is refused", function()
    local body = write(frames.OUTCOME):sub(7)
    for kind = 0, 255 do
      local reader, memory = reader_of(body:sub(1, 8) .. string.char(kind) .. body:sub(10))
      assert.equal(kind <= 6 and 0 or -1, (read(frames.OUTCOME, reader)))
      assert.is_truthy(memory)
    end
  end)

  it("with any byte changed is read or refused, and nothing past its end", function()
    for _, case in pairs(frames) do
      local body = write(case):sub(7)
      for at = 1, #body do
        for _, byte in ipairs { 0, 1, 127, 128, 255 } do
          local reader, memory = reader_of(body:sub(1, at - 1) .. string.char(byte) .. body:sub(at + 1))
          local result, value = read(case, reader)
          assert.is_true(result == 0 or result == -1)
          if result == 0 then
            case.fields(value)
          end
          assert.is_truthy(memory)
        end
      end
    end
  end)
end)

describe("a field", function()
  it("reads back at its limits", function()
    local out = new_buffer()
    lib.mill_write_u8(out, 255)
    lib.mill_write_u32(out, 4294967295)
    lib.mill_write_u64(out, 0xffffffffffffffffULL)
    lib.mill_write_i64(out, -0x7fffffffffffffffLL - 1)
    lib.mill_write_double(out, -math.huge)
    lib.mill_write_span(out, span "")
    lib.mill_write_span(out, span(nil))
    lib.mill_write_span(out, span "a\0b")
    local reader, memory = reader_of(bytes_of(out))
    assert.equal(255, lib.mill_read_u8(reader))
    assert.equal(4294967295, lib.mill_read_u32(reader))
    assert.equal(0xffffffffffffffffULL, lib.mill_read_u64(reader))
    assert.equal(-0x7fffffffffffffffLL - 1, lib.mill_read_i64(reader))
    assert.equal(-math.huge, lib.mill_read_double(reader))
    assert.equal("", text_of(lib.mill_read_span(reader)))
    assert.is_nil(text_of(lib.mill_read_span(reader)))
    assert.equal("a\0b", text_of(lib.mill_read_span(reader)))
    assert.is_true(lib.mill_reader_finished(reader))
    assert.is_truthy(memory)
  end)

  it("past the end is zero, and so is every later one", function()
    local reader, memory = reader_of "\1\2\3"
    assert.equal(0, lib.mill_read_u32(reader))
    assert.is_true(reader.failed)
    assert.equal(0, lib.mill_read_u8(reader))
    assert.is_nil(text_of(lib.mill_read_span(reader)))
    assert.is_false(lib.mill_reader_finished(reader))
    assert.is_truthy(memory)
  end)

  it("whose length leads past the end is refused", function()
    local reader, memory = reader_of "\4\0\0\0abc"
    assert.is_nil(text_of(lib.mill_read_span(reader)))
    assert.is_true(reader.failed)
    assert.is_truthy(memory)
  end)
end)

describe("a buffer", function()
  it("grows, and gives up its first bytes", function()
    local buffer, whole = new_buffer(), {}
    for i = 1, 1000 do
      local piece = ("%d,"):format(i)
      whole[i] = piece
      lib.mill_buffer_bytes(buffer, piece, #piece)
    end
    local text = table.concat(whole)
    assert.equal(text, bytes_of(buffer))
    lib.mill_buffer_consume(buffer, 10)
    assert.equal(text:sub(11), bytes_of(buffer))
    lib.mill_buffer_consume(buffer, #text - 10)
    assert.equal(0, tonumber(buffer.len))
    lib.mill_buffer_text(buffer, "again")
    assert.equal("again", bytes_of(buffer))
    lib.mill_buffer_reserve(buffer, 100000)
    assert.is_true(tonumber(buffer.cap) >= 100005)
    assert.equal("again", bytes_of(buffer))
  end)
end)

describe("the lane of a DELIVER frame", function()
  it("can be changed after it was written, and nothing else does", function()
    local out, other = new_buffer(), new_buffer()
    local example = frames.DELIVER.example
    lib.mill_deliver_write(out, ffi.new("struct mill_deliver", example))
    lib.mill_deliver_set_lane(out, 4000000000)
    local changed = {}
    for name, value in pairs(example) do
      changed[name] = value
    end
    changed.lane = 4000000000
    lib.mill_deliver_write(other, ffi.new("struct mill_deliver", changed))
    assert.equal(ffi.string(other.data, other.len), ffi.string(out.data, out.len))
  end)
end)
