-- An executor with a database, whose one handler runs the Lua text it is sent: for specs of what
-- handlers do with SQL.
--
--   local run = sql.start()
--   assert.same({ 2 }, run:lua "return { t.query('select 1 + 1 as v')[1].v }")
--
-- In the text `t` is the module tidemill and `ctx` the context. `sql.stop` belongs into after_each.

local json = require "tidemill.json"
local executor = require "spec.support.executor"
local tidemill = require "spec.support.tidemill"

local sql = {}

local HANDLER = [[
  return assert(load(payload, "=text"))(tidemill, ctx)
]]

local Run = {}
Run.__index = Run

-- Starts one. `options`: `settings` (text of config.lua, each with a comma behind), `migrate` (the
-- ledger's schema is wanted too), `app` (use its database; one is made otherwise), `dsn`.
function sql.start(options)
  options = options or {}
  local app = options.app or tidemill.app { config = options.config or {} }
  if options.migrate then
    app:must_run "migrate"
  end
  local run = executor.with_handler(HANDLER, {
    settings = options.settings,
    database = options.dsn or app.dsn,
    env = options.env,
  })
  return setmetatable({ app = app, db = app.db, executor = run }, Run)
end

function sql.stop()
  executor.stop_all()
  tidemill.close_all()
end

-- Sends a text, and returns the ticket.
function Run:send(text, fields)
  fields = fields or {}
  fields.payload = json.encode("local t, ctx = ... " .. text)
  fields.wants_result = true
  return self.executor:deliver(fields)
end

-- What the text returned, when that is there; raises when it failed.
function Run:result(ticket)
  local outcome = self.executor:outcome(ticket)
  if outcome.kind ~= "done" then
    error(("the handler ended as %s: %s"):format(outcome.kind, tostring(outcome.error)), 2)
  end
  return json.decode(outcome.result)
end

-- Runs a text and returns what it returned.
function Run:lua(text)
  return self:result(self:send(text))
end

-- Runs a text that fails, and returns the error.
function Run:fails(text)
  local outcome = self.executor:outcome(self:send(text))
  if outcome.kind ~= "raised" then
    error(("the handler ended as %s, not by an error"):format(outcome.kind), 2)
  end
  return outcome.error
end

-- What the server says of the executor's connections.
function Run:connections()
  return self.db:query [[select pid, state, wait_event, query from pg_stat_activity
    where application_name = 'tidemill handler' and datname = current_database() order by backend_start]]
end

-- Waits until the number of its connections, or of those of a state, is `count`.
function Run:wait_for_connections(count, state)
  self.app:wait_until(function()
    local found = 0
    for _, row in ipairs(self:connections()) do
      found = found + ((not state or row.state == state) and 1 or 0)
    end
    return found == count
  end, 20, ("%d connections, state %s"):format(count, state or "any"))
end

local function wait_for_event(self, event)
  self.app:wait_until(function()
    for _, row in ipairs(self:connections()) do
      if row.wait_event == event then
        return true
      end
    end
  end, 20, "a statement that waits: " .. event)
end

-- Waits until a statement of its waits for an advisory lock that the spec has.
function Run:wait_for_lock()
  wait_for_event(self, "advisory")
end

-- The same for pg_sleep.
function Run:wait_for_sleep()
  wait_for_event(self, "PgSleep")
end

return sql
