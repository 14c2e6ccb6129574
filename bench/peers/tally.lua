-- The tally of a drain: which message was handled how often, and when. Memory that the adapter makes
-- and the executors of its worker write to; both sides load this file.
--
-- Each executor has a slot and a row of counts of its own, so no two processes write to one place.
-- The start times have one place per message: a message that ran twice is an error all the same.

local ffi = require "ffi"
local posix = require "posix"

ffi.cdef [[
  struct bench_slot { int64_t pid, ran, first_ns, last_ns, room[4]; };
]]

local SLOTS = 64
local HEADER = SLOTS * ffi.sizeof "struct bench_slot"

local tally = {}

local Tally = {}
Tally.__index = Tally

local function shape(n)
  local row = math.ceil(n / 64) * 64
  return { row = row, starts = HEADER + SLOTS * row, len = HEADER + SLOTS * row + 8 * row }
end

local function view(address, n, places)
  local bytes = ffi.cast("uint8_t *", address)
  return setmetatable({
    n = n,
    row = places.row,
    slots = ffi.cast("struct bench_slot *", bytes),
    counts = bytes + HEADER,
    starts = ffi.cast("int64_t *", bytes + places.starts),
  }, Tally)
end

-- For messages 0 … n−1. `path` is what the executors join it by.
function tally.new(n)
  local places = shape(n)
  local address, path = posix.shared_memory(places.len)
  local self = view(address, n, places)
  self.path = path
  return self
end

-- The executor's end: a function to be called once per handled message with its id.
function tally.join(path, n)
  local places = shape(n)
  local mine
  local address = posix.map_locked(path, places.len, function(address)
    local slots = ffi.cast("struct bench_slot *", address)
    for i = 0, SLOTS - 1 do
      if slots[i].pid == 0 then
        slots[i].pid = posix.pid()
        mine = i
        return
      end
    end
  end)
  assert(mine, "more executors than the tally has places for")
  local self = view(address, n, places)
  local slot, counts, starts = self.slots[mine], self.counts + mine * self.row, self.starts
  local now = posix.now
  return function(id)
    local at = now()
    assert(id >= 0 and id < n, "a message that this run did not send")
    if slot.ran == 0 then
      slot.first_ns = at
    end
    slot.last_ns = at
    counts[id] = counts[id] + 1
    starts[id] = at
    slot.ran = slot.ran + 1
  end
end

function Tally:ran()
  local sum = 0
  for i = 0, SLOTS - 1 do
    sum = sum + tonumber(self.slots[i].ran)
  end
  return sum
end

-- When the first and the last handler of all executors started; 0 without any.
function Tally:span()
  local first, last = math.huge, 0
  for i = 0, SLOTS - 1 do
    if self.slots[i].ran > 0 then
      first = math.min(first, tonumber(self.slots[i].first_ns))
      last = math.max(last, tonumber(self.slots[i].last_ns))
    end
  end
  return first < math.huge and first or 0, last
end

-- How often each message ran, a byte each.
function Tally:counted()
  local sum = ffi.new("uint8_t[?]", self.n)
  for i = 0, SLOTS - 1 do
    if self.slots[i].ran > 0 then
      local counts = self.counts + i * self.row
      for id = 0, self.n - 1 do
        sum[id] = math.min(sum[id] + counts[id], 255)
      end
    end
  end
  return ffi.string(sum, self.n)
end

-- When each message started last.
function Tally:started()
  local list = {}
  for id = 0, self.n - 1 do
    list[id + 1] = tonumber(self.starts[id])
  end
  return list
end

return tally
