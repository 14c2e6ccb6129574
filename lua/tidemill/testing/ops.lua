-- What a handler can wait for, in a spec: each op of the executor, answered from stubs.
--
-- An op gets the delivery and the arguments of its wait, and returns the result, or nil and the error that
-- the handler gets. It moves the delivery's clock by as long as it took. Plain LuaJIT only.

local http = require "tidemill.testing.http"
local native = require "tidemill.native"
local record = require "tidemill.testing.record"
local sql = require "tidemill.testing.sql"

local ops = {
  http = http.request,
  query = sql.query,
  begin = sql.begin,
  commit = sql.commit,
  rollback = sql.rollback,
  finish = sql.finish,
}

function ops.sleep(delivery, secs)
  delivery.now = delivery.now + secs
  return true
end

-- `named`: the request says itself who publishes.
function ops.publish(delivery, request, named)
  local message = record.message(native.decode_items(request))
  if not named and delivery.message.published_by ~= "" then
    message.options.published_by = delivery.message.published_by
  end
  local reply
  local wrong = record.fault(delivery, message)
  if not wrong then
    reply, wrong = record.publish(delivery, message)
  end
  return reply, wrong and tostring(wrong)
end

return ops
