-- Handlers under test: runs one with no database, no runtime and no clock, and says what it did.
--
--   local testing = require "tidemill.testing"
--   before_each(testing.reset)
--
--   it("ships a paid order", function()
--     local run = testing.run("fulfil_order", { id = 7 })
--     assert.equal("done", run.outcome, run.error)
--     assert.same({ id = 7 }, run.published[1].payload)
--   end)
--
-- The handler gets what it gets in an executor: the same context, checks, errors and waits. What it asks of
-- the world is answered by stubs, and its time passes only while it waits.
--
-- A spec's process, plain LuaJIT; no executor.

local host = require "tidemill.host"
local middleware = require "tidemill.middleware"
local native = require "tidemill.native"
local app = require "tidemill.testing.app"
local argument = require "tidemill.argument"
local delivery = require "tidemill.testing.delivery"
local http = require "tidemill.testing.http"
local sql = require "tidemill.testing.sql"
local stubs = require "tidemill.testing.stubs"
local surroundings = require "tidemill.testing.surroundings"

if not host.plain then
  error("tidemill.testing is for specs, not for handlers: run it under busted, see docs/handlers.md", 0)
end

local testing = {}

local answers = stubs.new()
local active -- the delivery that runs

-- ---- options of a run ---------------------------------------------------------------------------

local function whole(low, high)
  return function(value)
    return argument.integer(value, low, high)
  end
end

local function is_topic(value)
  local wrong = argument.text(value)
  return wrong or select(2, host.topic(value))
end

local function is_string(value)
  return type(value) ~= "string" and "expected a text, found " .. argument.show(value) or nil
end

-- What `options` may say of the message, what is said where they do not, and what is wrong with a value.
local OPTIONS = {
  app = { preset = "app", check = argument.text },
  attempts = { preset = 1, check = whole(1, 32767) },
  config = { check = argument.text },
  created_at = { check = argument.text },
  event = { preset = "message", check = function(value) return argument.word(value, { "message", "failed" }) end },
  generation = { preset = 1, check = whole(1, 2 ^ 31) },
  headers = { check = argument.optional_table },
  max_attempts = { preset = 5, check = whole(1, 32767) },
  message_id = { preset = native.uuid, check = argument.text },
  now = { preset = native.now, check = function(value) return argument.number(value, 0, 253402300799) end },
  priority = { preset = 0, check = whole(-9, 9) },
  published_by = { preset = "", check = is_string },
  subscriber = { check = argument.text },
  timeout_secs = { preset = 300, check = function(value) return argument.number(value, 0.001, 31622400) end },
  topic = { preset = "test", check = is_topic },
}

-- Every option with its value. `beside` are those of the handler's module or its subscription.
local function settle(options, beside)
  local names = {}
  for name in pairs(OPTIONS) do
    table.insert(names, name)
  end
  table.sort(names)
  for name in pairs(options) do
    if not OPTIONS[name] then
      return nil, ("options: %s is unknown, known are %s"):format(argument.show(name), table.concat(names, ", "))
    end
  end
  local settled = {}
  for _, name in ipairs(names) do
    local option = OPTIONS[name]
    local value = options[name]
    if value ~= nil then
      local wrong = option.check(value)
      if wrong then
        return nil, ("options.%s: %s"):format(name, wrong)
      end
    elseif beside[name] ~= nil then
      value = beside[name]
    elseif type(option.preset) == "function" then
      value = option.preset()
    else
      value = option.preset
    end
    settled[name] = value
  end
  return settled
end

-- ---- the handler --------------------------------------------------------------------------------

-- A handler with the middleware beside it: a function, a module's name, or a list of them.
local function with_around(handle, around)
  local list = {}
  for i, each in ipairs(type(around) == "table" and around or { around }) do
    list[i] = type(each) == "string" and assert(surroundings.load(each)) or each
  end
  return middleware.compose(handle, list)
end

-- The subscription of an app's config that a name means, as `find_handler` returns it.
local function find_subscriber(config, name)
  if type(name) ~= "string" then
    return nil, "with `config` a handler is a subscriber's name, found " .. argument.show(name)
  end
  local lanes, problems = surroundings.app(config)
  if not lanes then
    return nil, problems
  end
  local lane, wrong = app.find(lanes, name)
  if not lane then
    return nil, ("%s in %s"):format(wrong, config)
  end
  return lane.handler, lane
end

-- The function, and the options that hold where a run's do not say otherwise; or nil and why there is none.
local function find_handler(handler)
  local subscriber = "handler"
  if type(handler) == "string" then
    local wrong
    subscriber = handler
    handler, wrong = surroundings.load(handler)
    if wrong then
      return nil, wrong
    end
  end
  if type(handler) == "function" then
    return handler, { subscriber = subscriber }
  elseif type(handler) == "table" and type(rawget(handler, "handle")) == "function" then
    return with_around(handler.handle, rawget(handler, "around")), {
      subscriber = subscriber, max_attempts = handler.max_attempts, timeout_secs = handler.timeout_secs,
    }
  end
  local misnamed = type(handler) == "table" and type(rawget(handler, "handler")) == "function"
  return nil, ("a handler is a function, a table with a function `handle`, or a module's name; found %s"):format(
    misnamed and "`handler`, write `handle`" or argument.show(handler))
end

-- The topic, the payload and the headers as a message has them.
local function write_message(settled, payload)
  settled.topic = host.topic(settled.topic)
  local raw, wrong = "{}", nil
  if payload ~= nil then
    raw, wrong = host.encode(payload, "payload")
  end
  if raw and settled.headers then
    settled.headers, wrong = host.encode(settled.headers, "options.headers")
  end
  settled.raw = raw
  return wrong
end

-- What becomes of the message.
local function status_of(outcome, settled)
  if outcome == "done" then
    return "done"
  elseif outcome == "discard" then
    return "discarded"
  elseif outcome ~= "snooze" and settled.attempts >= settled.max_attempts then
    return "failed"
  end
  return "pending"
end

-- Calls the handler, and keeps what it returned for the spec.
local function kept_in(run, handler)
  local function keep(...)
    run.result = ...
    return ...
  end
  return function(payload, ctx)
    return keep(handler(payload, ctx))
  end
end

-- Runs `handler` once with a message: a function, a module's table, the name of a module in `handlers/`; or, with
-- `options.config`, a subscriber of that config. Returns what it did:
--   outcome       "done", "raised", "retry", "snooze" or "discard"
--   status        what the message is then: "done", "pending", "failed" or "discarded"
--   error         the error with its traceback, or why it was retried or discarded
--   delay_secs    of a retry or a snooze
--   result        what the handler returned
--   published     { topic, payload, options, at_once }, in order
--   queries       the statements: { sql, arguments, transaction }, in order
--   requests      what was asked of tidemill.http: { method, url, headers, body, json }, in order
--   log           { level, event, text, fields }, in order
--   elapsed_secs  how long it waited
function testing.run(handler, payload, options)
  local wrong = argument.optional_table(options)
  if wrong then
    error("testing.run: options: " .. wrong, 2)
  elseif active then
    error("testing.run: a handler runs already: one at a time", 2)
  end
  options = options or {}
  local call, beside
  if type(options.config) == "string" then
    call, beside = find_subscriber(options.config, handler)
  else
    call, beside = find_handler(handler)
  end
  if not call then
    error("testing.run: " .. beside, 2)
  end
  local settled
  settled, wrong = settle(options, beside)
  wrong = wrong or write_message(settled, payload)
  if wrong then
    error("testing.run: " .. wrong, 2)
  end
  local run = {}
  active = delivery.new(settled, settled.now, settled.timeout_secs, answers)
  local leave = surroundings.enter()
  local ok, ended = pcall(active.run, active, {
    handler = kept_in(run, call),
    topic = settled.topic,
    subscriber = settled.subscriber,
    generation = settled.generation,
    event = settled.event,
    app = settled.app,
  })
  leave()
  local over = active
  active = nil
  if not ok then
    error(ended, 0)
  elseif not ended then
    -- A value that a stub raised is the spec's own, and has its place.
    error(over.broken.text and "testing.run: " .. over.broken.text or over.broken.value,
      over.broken.text and 2 or 0)
  end
  run.outcome, run.error, run.delay_secs = ended.outcome, ended.error, ended.delay_secs
  run.status = status_of(ended.outcome, settled)
  run.published, run.queries, run.requests, run.log = over.published, over.queries, over.requests, over.log
  run.elapsed_secs = over.now - settled.now
  return run
end

-- ---- stubs and time -----------------------------------------------------------------------------

-- The reply of tidemill.publish to a topic: a table whose fields replace those of the usual one, or a function
-- of payload and options that returns such a table, or nil and an error.
function testing.publish(topic, reply)
  local wrong = answers:add("publish", topic, reply, "a topic")
  if wrong then
    error("testing.publish: " .. wrong, 2)
  end
end

-- What the database answers. `what` is part of a statement, with any white space as one blank, or a Lua pattern
-- that it matches. `reply` is a list of rows, tables by column name, which may have `affected` and `fields`; or a
-- function that gets the arguments and returns such a list, or nil and an error: a text, or a table with
-- `message`, `sqlstate` and so on.
function testing.query(what, reply)
  local wrong = answers:add("query", what, reply, "a part of a statement")
    or (type(reply) == "table" and sql.problem(reply)) or nil
  if wrong then
    error("testing.query: " .. wrong, 2)
  end
end

-- What an HTTP service answers. `what` is part of a request's `METHOD URL`, or a Lua pattern that it matches.
-- `reply` is a table, { status, headers, body or json, secs }, or a function that gets the request and returns
-- such a table, or nil and an error; `secs` is how long it takes.
function testing.http(what, reply)
  local wrong = answers:add("http", what, reply, "a part of METHOD URL")
    or (type(reply) == "table" and http.problem(reply)) or nil
  if wrong then
    error("testing.http: " .. wrong, 2)
  end
end

-- Lets time pass while the handler computes, or inside of a stub.
function testing.advance(secs)
  local wrong = argument.secs(secs)
  if wrong or not active then
    error("testing.advance: " .. (wrong or "no handler runs"), 2)
  end
  active.now = active.now + secs
end

-- Forgets all stubs, and the modules that testing.run has loaded by name. For before_each.
function testing.reset()
  answers = stubs.new()
  surroundings.forget()
end

return testing
