-- `require "tidemill"`: what handlers use.
--
-- Functions that wait (publish, sleep, http) suspend the delivery that calls them, and nothing else. A
-- wrong argument raises at the caller's line.

local host = require "tidemill.host"
local native = require "tidemill.native"
local argument = require "tidemill.argument"
local await = require "tidemill.await"
local http = require "tidemill.http"
local connection = require "tidemill.connection"
local json = require "tidemill.json"
local log = require "tidemill.log"
local publication = require "tidemill.publication"
local handler_sql = require "tidemill.handler_sql"
local sql = require "tidemill.sql"

local error = error

local tidemill = {
  http = http,
  json = json,
  null = native.null,
  array = native.array,
  decimal = native.decimal,
  -- A new UUIDv7 as text.
  uuid = native.uuid,
  -- Seconds since 1970 by this machine's clock, with a fraction.
  now = host.now or native.now,
  log = { debug = log.debug, info = log.info, warn = log.warn, error = log.error },
}

-- Publishes at once, in a transaction of its own: it stays published when this delivery fails.
-- Returns { id, topic, delivered, duplicate }.
function tidemill.publish(topic, payload, options)
  local request, wrong = publication.encode("publish", topic, payload, options)
  if not request then
    error("tidemill.publish: " .. wrong, 2)
  end
  local published
  published, wrong = await.op("publish", request, options ~= nil and options.published_by ~= nil)
  if wrong then
    error(wrong, 2)
  end
  return published
end

-- Publishes a list of messages, { topic = …, payload = …, options … } each, in one statement and a
-- transaction of its own. Returns the results in its order.
function tidemill.publish_many(list)
  local published, wrong = sql.publish_many(handler_sql.engine(), nil, list)
  if not published then
    sql.raise("tidemill.publish_many", wrong, 2)
  end
  handler_sql.tell_unwanted(published)
  return published
end

-- One SQL statement with the arguments $1 …. Returns a list of rows, which are tables by column name,
-- with `affected` (how many rows it wrote or read) and `fields` (the names of the columns).
function tidemill.query(text, ...)
  local rows, wrong = sql.ask(handler_sql.engine(), nil, text, ...)
  if not rows then
    sql.raise("tidemill.query", wrong, 2)
  end
  return rows
end

-- Calls `fn(tx)` in a transaction: committed when it returns, rolled back when it raises. Returns what
-- `fn` returned.
function tidemill.transaction(fn, options)
  return handler_sql.transaction("tidemill.transaction", fn, options)
end

-- A connection to the queue's database, for programs that are no handlers.
tidemill.connect = connection.connect

-- Lets other deliveries run for so long. 0 lets those run that are ready.
function tidemill.sleep(secs)
  local wrong = argument.secs(secs)
  if wrong then
    error("tidemill.sleep: " .. wrong, 2)
  end
  local _
  _, wrong = await.op("sleep", secs)
  if wrong then
    error(wrong, 2)
  end
end

return tidemill
