-- greeting.wanted: says hello.
--
-- Called with each message of a topic it is subscribed to in config.lua. Returning is success; an
-- error fails the attempt, and the message comes again later. So it may come twice: ctx.message_id is
-- the same each time.

---@type tidemill.Handler
return function(payload, ctx)
  local name = type(payload) == "table" and payload.name or "world"
  ctx:log("hello, " .. tostring(name))
end
