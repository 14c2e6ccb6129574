-- What a handler publishes in a spec, and what of it is there in the end.
--
-- Plain LuaJIT only.

local due = require "tidemill.testing.due"
local native = require "tidemill.native"

-- The preset of max_payload_bytes.
local PAYLOAD_BYTES = 1024 * 1024

local record = {}

-- Postgres prints a blank behind each comma and colon of its JSON.
local function size_fault(message)
  local json = native.encode(message.payload)
  local bytes = #json
  if bytes > PAYLOAD_BYTES / 2 then
    local _, blanks = json:gsub('\\.', ""):gsub('"[^"]*"', ""):gsub("[,:]", "")
    bytes = bytes + blanks
  end
  if bytes > PAYLOAD_BYTES then
    return ("the payload has %d bytes as text, at most %d are allowed (`max_payload_bytes`)"):format(bytes,
      PAYLOAD_BYTES)
  end
end

-- Why the database refuses a message, or nil.
function record.fault(delivery, message)
  local fault, at_first
  if message.options.at then
    fault, at_first = due.fault(message.options.at, delivery.now)
  end
  return at_first and fault or size_fault(message) or fault
end

-- Why it refuses what was gathered, or nil: it is published as a list.
function record.gathered_fault(delivery)
  local item = 0
  for _, entry in ipairs(delivery.published) do
    if entry.gathered then
      item = item + 1
      local fault = record.fault(delivery, entry.message)
      if fault then
        return ("item %d: %s"):format(item, fault)
      end
    end
  end
end

-- A message as a spec sees it, of its JSON, decoded by `decode_items`: { topic, payload, options }.
function record.message(item)
  local message = { topic = item.topic, payload = item.message, options = item }
  item.op, item.topic, item.message = nil, nil, nil
  return message
end

-- Publishes at once, or in a transaction. Returns the reply, or nil and why a stub refuses it.
function record.publish(delivery, message, session)
  local reply = { id = native.uuid(), topic = message.topic, delivered = 1, duplicate = false }
  local given = delivery.stubs:find("publish", message.topic)
  if type(given) == "function" then
    local wrong
    given, wrong = given(message.payload, message.options)
    if given == nil and wrong ~= nil then
      return nil, wrong
    end
  end
  for name, value in pairs(given or {}) do
    reply[name] = value
  end
  message.at_once = true
  table.insert(delivery.published, { message = message, session = session })
  return reply
end

-- Publishes together with `done`.
function record.gather(delivery, message)
  table.insert(delivery.published, { message = message, gathered = true })
end

local function filter(delivery, stays)
  local list = {}
  for i, entry in ipairs(delivery.published) do
    if stays(entry, i) then
      table.insert(list, entry)
    end
  end
  delivery.published = list
end

-- A transaction is over.
function record.settle(delivery, session, committed)
  filter(delivery, function(entry)
    return committed or entry.session ~= session
  end)
  for _, entry in ipairs(delivery.published) do
    if entry.session == session then
      entry.session = nil
    end
  end
end

-- What a transaction published since there were `count` entries is not published after all.
function record.undo(delivery, session, count)
  filter(delivery, function(entry, i)
    return i <= count or entry.session ~= session
  end)
end

-- What was gathered since there were `count` entries is not published after all.
function record.rewind(delivery, count)
  filter(delivery, function(entry, i)
    return i <= count or not entry.gathered
  end)
end

-- What is there in the end, in its order: all of it when the handler succeeded, and otherwise what was
-- published at once.
function record.result(delivery, done)
  local list = {}
  for _, entry in ipairs(delivery.published) do
    if done or not entry.gathered then
      table.insert(list, entry.message)
    end
  end
  return list
end

return record
