-- One delivery: the context a handler gets, and the function that each coroutine runs.
--
-- Executor process; src/executor/task.c is the other half. A context is valid as long as its
-- delivery runs.

local host = require "tidemill.host"
local argument = require "tidemill.argument"
local await = require "tidemill.await"
local handler_sql = require "tidemill.handler_sql"
local log = require "tidemill.log"
local publication = require "tidemill.publication"
local render = require "tidemill.render"

-- A handler may have changed the library's tables.
local error, getmetatable, setmetatable, type, xpcall = error, getmetatable, setmetatable, type, xpcall
local format = string.format
local encode, take = host.encode, host.take
local finish, raised = handler_sql.finish, render.raised

local INFO = 1

-- All contexts share the metatable and what it finds methods in, so nobody gets hold of them: SEAL is
-- what they get.
local SEAL = {}
local methods = {}
local Context = { __index = methods, __metatable = SEAL }

-- Why `self` cannot be used in a method called `name`, or nothing.
local function misuse(self, name)
  if type(self) ~= "table" or getmetatable(self) ~= SEAL then
    return format("call it with a colon, ctx:%s(…)", name)
  end
  if not host.owns(self.message_id) then
    return "this ctx belongs to a delivery that is not running"
  end
end

-- Raises at the line of the handler that called the method; a tail call would lose that line.
local function refuse(name, wrong)
  error(format("ctx:%s: %s", name, wrong), 3)
end

-- End the delivery: as a failed attempt, after `secs` instead of the backoff.
function methods:retry(secs, why)
  local wrong = misuse(self, "retry") or argument.secs(secs) or argument.optional_text(why)
  refuse("retry", wrong or await.finish("retry", secs, why))
end

-- End the delivery: again after `secs`, the attempt not counted.
function methods:snooze(secs)
  local wrong = misuse(self, "snooze") or argument.secs(secs)
  refuse("snooze", wrong or await.finish("snooze", secs))
end

-- End the delivery: the message needs no more work.
function methods:discard(why)
  local wrong = misuse(self, "discard") or argument.optional_text(why)
  refuse("discard", wrong or await.finish("discard", 0, why))
end

-- Publish a message in the transaction of this one's `done`; dropped when this attempt fails.
function methods:publish(topic, payload, options)
  local wrong = misuse(self, "publish")
  local item
  if not wrong then
    item, wrong = publication.encode(nil, topic, payload, options, {
      published_by = self.published_by ~= "" and self.published_by or nil,
      headers = self.headers,
    })
  end
  wrong = wrong or host.gather(item)
  if wrong then
    refuse("publish", wrong)
  end
end

-- Calls `fn(tx)` in a transaction that marks this message `done` too: what it does in this database
-- happens exactly once. The delivery ends with it; what raises, rolls back and raises here.
function methods:finish(fn, options)
  local wrong = misuse(self, "finish")
  if wrong then
    refuse("finish", wrong)
  end
  return finish("ctx:finish", fn, options)
end

-- A line in the log that names this message.
function methods:log(text, fields)
  local wrong = misuse(self, "log") or log.write(INFO, text, fields)
  if wrong then
    refuse("log", wrong)
  end
end

-- What a handler returned, as JSON. No value at all is null.
local function written(result)
  local json, wrong = encode(result, "result")
  if not json then
    error("what the handler returned cannot be written as JSON: " .. wrong, 0)
  end
  return json
end

-- Returns what the handler returned, where that is wanted.
local function deliver(lane)
  local message_id, attempts, max_attempts, priority, created_at, published_by, deadline, raw, payload, headers,
    wants_result = take()
  local ctx = setmetatable({
    event = lane.event,
    topic = lane.topic,
    message_id = message_id,
    subscriber = lane.subscriber,
    attempts = attempts,
    principal_id = published_by,
    published_by = published_by,
    max_attempts = max_attempts,
    priority = priority,
    created_at = created_at,
    headers = headers,
    deadline = deadline,
    generation = lane.generation,
    app = lane.app,
    raw = raw,
  }, Context)
  local result = lane.handler(payload, ctx)
  if wants_result then
    return written(result)
  end
end

local task = {}

-- What a coroutine runs for each delivery. Returns nothing when the handler returned, or nil and its
-- result where that is wanted; and otherwise the error as text.
function task.main(lane)
  local ok, text = xpcall(deliver, raised, lane)
  if not ok then
    return text
  elseif text then
    return nil, text
  end
end

return task
