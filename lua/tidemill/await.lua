-- Waiting: the one function by which Lua code waits for an op, and the coroutine functions that let
-- it work inside of coroutines of a handler's own.
--
-- A wait is a yield of a private value, the op's name and its arguments. The process that resumes
-- the handler sees the private value and starts the op. Inside of a handler's own coroutine such a
-- yield would reach whoever resumed that one; so coroutine.resume and coroutine.wrap are replaced
-- by functions that pass it outward, level by level, and pass the answer back inward.
--
-- Executor process. Errors come back as values, for the function the handler called to raise at the
-- handler's line.

local host = require "tidemill.host"

local create, raw_resume, raw_yield = coroutine.create, coroutine.resume, coroutine.yield
local isyieldable = coroutine.isyieldable
local error, format = error, string.format

-- A value nobody else has.
local WAIT = host.wait

local await = {}

-- Why an op cannot be waited for where the caller stands.
local function refusal(op)
  if host.plain and not host.running() and (op == "http" or op == "sleep") then
    return format("`%s` works only inside of a handler: in a spec, call it in a function given to testing.run", op)
  elseif host.plain and not host.running() then
    return format("`%s` works only inside of a handler: elsewhere connect first (tidemill.connect), and use the "
      .. "functions of the connection", op)
  end
  if not host.running() then
    return format("`%s` works only while a handler runs, not while config.lua and modules are loaded", op)
  end
  return format("`%s` cannot wait inside of a function that C code called "
    .. "(a callback of table.sort or string.gsub, the top level of a module): call it outside", op)
end

-- Waits for an op. Returns its result, or nil and why there is none.
function await.op(op, ...)
  if not isyieldable() or not host.running() then
    return nil, refusal(op)
  end
  -- Resumed with a text where a level further out cannot wait.
  local refused = raw_yield(WAIT, op, ...)
  if refused then
    return nil, refused
  end
  return host.outcome()
end

-- Ends the delivery: as a wait, but never resumed, so that no pcall can catch it. Returns only where
-- that is impossible, and then why.
function await.finish(op, ...)
  if not isyieldable() or not host.running() then
    return refusal(op)
  end
  return raw_yield(WAIT, op, ...)
end

local function relay(co, ok, first, op, ...)
  if ok and first == WAIT then
    if isyieldable() then
      return relay(co, raw_resume(co, raw_yield(WAIT, op, ...)))
    end
    return relay(co, raw_resume(co, refusal(op)))
  end
  return ok, first, op, ...
end

-- coroutine.resume for handlers.
function await.resume(co, ...)
  return relay(co, raw_resume(co, ...))
end

local function unwrap(ok, ...)
  if ok then
    return ...
  end
  error((...), 0)
end

-- coroutine.wrap for handlers.
function await.wrap(fn)
  local co = create(fn)
  return function(...)
    return unwrap(relay(co, raw_resume(co, ...)))
  end
end

return await
