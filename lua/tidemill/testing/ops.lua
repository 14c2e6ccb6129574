-- What a handler can wait for, in a spec: each op of src/executor/ops.c, answered from stubs.
--
-- An op gets the delivery and the arguments of its wait, and returns the result, or nil and the error that
-- the handler gets. It moves the delivery's clock by as long as it took. Plain LuaJIT only.

local http = require "tidemill.testing.http"
local native = require "tidemill.native"
local json = require "tidemill.json"

local ops = { http = http.request }

function ops.sleep(delivery, secs)
  delivery.now = delivery.now + secs
  return true
end

-- A message as a spec sees it, of its JSON: { topic, payload, options }.
local function published(item)
  local options = json.decode(item)
  local message = { topic = options.topic, payload = options.message, options = options }
  options.op, options.topic, options.message = nil, nil, nil
  return message
end

-- A stub may refuse it, and may say what the reply is.
local function publish_reply(delivery, message)
  local reply = { id = native.uuid(), topic = message.topic, delivered = 1, duplicate = false }
  local given = delivery.stubs:find("publish", message.topic)
  if type(given) == "function" then
    local wrong
    given, wrong = given(message.payload, message.options)
    if given == nil and wrong ~= nil then
      return nil, tostring(wrong)
    end
  end
  for name, value in pairs(given or {}) do
    reply[name] = value
  end
  return reply
end

-- `named`: the request says itself who publishes.
function ops.publish(delivery, request, named)
  local message = published(request)
  if not named and delivery.message.published_by ~= "" then
    message.options.published_by = delivery.message.published_by
  end
  local reply, wrong = publish_reply(delivery, message)
  if reply then
    message.at_once = true
    table.insert(delivery.published, message)
  end
  return reply, wrong
end

return { find = function(name) return ops[name] end, published = published, table = ops }
