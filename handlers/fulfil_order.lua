-- order.paid: has the parcel packed, and tells that it is on its way.

local tidemill = require "tidemill"

return function(order, ctx)
  if order.warehouse == "closed" and ctx.attempts == 1 then
    -- Sooner or later than the backoff would be.
    return ctx:retry(2, "the warehouse is closed")
  end
  -- Waiting holds up this delivery only. A second run for the same order must do no harm, so a real
  -- warehouse is asked for the order by its id, not for one more parcel.
  tidemill.sleep(0.2)
  ctx:log("packed", { order = order.id })
  ctx:publish("order.shipped", { id = order.id, parcel = tidemill.uuid() })
end
