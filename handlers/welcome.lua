-- user.signed_up: greets a new user.

local tidemill = require "tidemill"

return function(user, ctx)
  if type(user.name) ~= "string" then
    return ctx:discard("a user without a name")
  end
  -- An attempt that was cut short right here has sent its mail, and the next one sends it again. A mail
  -- service that takes an idempotency key gets ctx.message_id, and sends one.
  tidemill.log.info("mail sent", { subject = ("Welcome, %s!"):format(user.name) })
end
