-- Middleware: functions that run around a handler, named by `around` in config.lua, in a subscription
-- or in a module.
--
-- Pure Lua. A handler without any is called as it is: this file has no part in its deliveries.

local error = error

local middleware = {}

-- A handler that calls `around`, and gives it `handler` as what comes next.
local function wrap(handler, around)
  local function go_on(payload, ctx)
    if ctx == nil then
      error("next(payload, ctx): the ctx is missing", 2)
    end
    return handler(payload, ctx)
  end
  return function(payload, ctx)
    return around(go_on, payload, ctx)
  end
end

-- `handler` inside of the functions of a list, the first one outermost.
function middleware.compose(handler, list)
  for i = #list, 1, -1 do
    handler = wrap(handler, list[i])
  end
  return handler
end

return middleware
