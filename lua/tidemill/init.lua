-- `require "tidemill"`: what handlers use.
--
-- Functions that wait (publish, sleep, http) suspend the delivery that calls them, and nothing else. A
-- wrong argument raises at the caller's line.

local host = require "tidemill.host"
local native = require "tidemill.native"
local argument = require "tidemill.argument"
local await = require "tidemill.await"
local http = require "tidemill.http"
local json = require "tidemill.json"
local log = require "tidemill.log"
local publication = require "tidemill.publication"

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
