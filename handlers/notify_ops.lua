-- Tells the people in operations what happened. One handler may serve many topics.

return function(event, ctx)
  ctx:log("for operations", { about = ctx.topic, order = event.id })
end
