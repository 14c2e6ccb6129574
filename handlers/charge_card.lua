-- order.placed: charges the customer's card.
--
-- The bank of this sample is out of reach now and then. An error fails the attempt, and the message
-- comes again after its backoff, until it is out of attempts and becomes a dead letter.

local tidemill = require "tidemill"

-- Each executor process has its own dice: processes that start in the same moment must not agree.
math.randomseed(tonumber(tidemill.uuid():sub(-8), 16))

-- What a bank's library would do. A real one wants an idempotency key, and the message's id is one: it
-- is the same for every attempt, so a second charge for it is refused.
local function charge(card, cents, idempotency_key)
  assert(card and cents and idempotency_key)
  tidemill.sleep(0.1)
  if math.random() < 0.4 then
    error("the bank did not answer")
  end
  return "charge-" .. idempotency_key:sub(-8)
end

return function(order, ctx)
  if not order.cents then
    -- No number of attempts will change that, so there is no second one, and no dead letter either.
    tidemill.log.warn("no `cents` in the order: discarded", { order = order.id })
    return ctx:discard("an order without a price")
  end
  local receipt = charge(order.card or "4000-0000", order.cents, ctx.message_id)
  ctx:log("charged", { order = order.id, cents = order.cents, receipt = receipt })
  -- Written in the transaction that marks this message done: never without it, never twice.
  ctx:publish("order.paid", { id = order.id, cents = order.cents, receipt = receipt })
end
