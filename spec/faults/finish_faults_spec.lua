-- ctx:finish while everything around it dies: each message's effect is there exactly once.

local clock = require "spec.support.clock"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

local MESSAGES = 300
local KILLS = 12 -- at least so many, however fast the machine is

local HANDLER = [[
  local tidemill = require "tidemill"
  return function(payload, ctx)
    ctx:publish("after", { n = payload })
    tidemill.sleep(0.002)
    ctx:finish(function(tx)
      tx:query("insert into effect values ($1, $2)", ctx.message_id, payload)
      tidemill.sleep(0.002)
      tx:query("update total set n = n + $1", payload)
    end)
  end
]]

local function executors()
  local pids = {}
  for _, child in ipairs(process.children()) do
    if child.name:find "tidemill%-exec" then
      table.insert(pids, child.pid)
    end
  end
  return pids
end

describe("ctx:finish", function()
  after_each(tidemill.close_all)

  it("has each effect once while executors and connections die at random", function()
    local app = tidemill.app {
      config = { subscribe = { t = { "h" } }, executors = 2, concurrency = 8, sql_connections = 4, lease_secs = 2,
        max_attempts = 1000, retry_backoff_secs = 0, poll_secs = 1 },
      handlers = { h = HANDLER },
    }
    app.db:exec [[create table effect (id uuid, n int); create table total (n int); insert into total values (0)]]
    app:start()
    app:start()
    local published = 0
    local function publish()
      app.db:query([[select tidemill.publish_many(array['t'],
        array(select to_jsonb(i) from generate_series($1::int + 1, $1::int + $2::int) as i))]], published, MESSAGES)
      published = published + MESSAGES
    end
    publish()
    local seed = 42
    local function random(most)
      seed = (seed * 1103515245 + 12345) % 2147483648
      return math.floor(seed / 65536) % most + 1
    end
    local function done()
      return tonumber(app.db:value "select count(*) from tidemill.queue_message where topic = 't' and status = 'done'")
    end
    local kills = 0
    clock.wait_until(function()
      local pids = executors()
      if kills < 25 and #pids > 0 and random(3) == 1 then
        process.run { argv = { "kill", "-KILL", pids[random(#pids)] }, cwd = "/" }
        kills = kills + 1
      elseif kills < 25 and random(3) == 1 then
        app.db:query [[select pg_terminate_backend(pid) from pg_stat_activity
          where application_name = 'tidemill handler' order by random() limit 1]]
        kills = kills + 1
      end
      clock.sleep(0.05)
      if done() < published then
        return false
      elseif kills < KILLS then
        publish()
        return false
      end
      return true
    end, 240, function()
      return done() .. " are done\n" .. app:describe()
    end)
    app:stop()
    assert.is_true(kills >= KILLS)
    assert.truthy(app.processes[1]:stderr():find("event=executor_died", 1, true))
    assert.same({ tostring(published), tostring(published), tostring(published * (published + 1) / 2) }, {
      app.db:value "select count(*) from effect", app.db:value "select count(distinct id) from effect",
      app.db:value "select n from total" })
    assert.same({ tostring(published), tostring(published) }, {
      app.db:value "select count(distinct payload) from tidemill.queue_message where topic = 'after'",
      app.db:value "select count(*) from tidemill.queue_message where topic = 'after'" })
  end)

  it("has the effect of the one who holds the message, when a stopped worker comes back", function()
    local app = tidemill.app {
      config = { subscribe = { t = { "h" } }, executors = 1, lease_secs = 1, poll_secs = 1, retry_backoff_secs = 0 },
      handlers = { h = [[
        local tidemill = require "tidemill"
        return function(payload, ctx)
          ctx:finish(function(tx)
            tx:query("insert into effect values ($1, $2)", ctx.message_id, ctx.attempts)
            if ctx.attempts == 1 then tx:query "select pg_advisory_xact_lock(7)" end
          end)
        end
      ]] },
    }
    app.db:exec "create table effect (id uuid, n int)"
    local first = app:start()
    app.db:query "select pg_advisory_lock(7)"
    app:must_run("publish", "t")
    app:wait_until(function()
      return app.db:value "select count(*) from pg_stat_activity where wait_event = 'advisory'" == "1"
    end, 20, "the first attempt waits")
    -- The runtime stands still, its executor does not.
    first:kill "STOP"
    app:start()
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.queue_message where status = 'done'" == "1"
    end, 30, "the second worker has done it")
    app.db:query "select pg_advisory_unlock(7)"
    app:wait_until(function()
      return app.db:value [[select count(*) from pg_stat_activity
        where application_name = 'tidemill handler' and state like '%transaction%' or wait_event = 'advisory']] == "0"
    end, 20, "the first attempt has ended")
    first:kill "CONT"
    first:wait_for("event=lease_over", 20)
    app:wait_until(function()
      local _, ready = first:stderr():gsub("event=registered", "")
      return ready == 2
    end, 20, "it began anew")
    app:stop()
    assert.equal("2", app.db:value "select string_agg(n::text, ',') from effect")
    assert.equal("done", app:ledger()[1].status)
  end)
end)
