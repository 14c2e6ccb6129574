-- The connections to Postgres: each may break at any moment, hang, or be given settings that do not
-- suit a queue, and the work goes on.

local clock = require "spec.support.clock"
local journal = require "spec.support.journal"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local function new_app(config, body)
  config = config or {}
  config.subscribe = config.subscribe or { t = "work" }
  return journal.app { config = config, handlers = { work = body or "" } }
end

-- Breaks the connections of the app's worker that have this name; returns how many.
local function break_link(app, name)
  return #app.db:query([[select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and application_name = $1]], "tidemill " .. name)
end

-- Waits until the worker has a new connection of this name.
local function wait_for_link(app, name)
  app:wait_until(function()
    return app.db:value([[select 1 from pg_stat_activity
      where datname = current_database() and application_name = $1]], "tidemill " .. name)
  end, 10, "the connection is there again: " .. name)
end

-- A setting for all new connections to the app's database.
local function set_for_all(app, name, value)
  app.db:exec(("alter database %s set %s = '%s'"):format(app.database, name, value))
end

describe("a broken connection", function()
  for _, name in ipairs { "work", "lease", "publish", "listen" } do
    it("of the name " .. name .. " is made again, and its work goes on", function()
      local app = new_app({ lease_secs = 3 }, [[ tidemill.publish("after", {}); ctx:publish("later", {}) ]])
      local worker = app:start()
      for round = 1, 3 do
        wait_for_link(app, name)
        local position = worker:position()
        assert.equal(1, break_link(app, name))
        -- At the first time it may not have been ready for use.
        worker:wait_for("event=database_[lu]%l+ link=" .. name, 10, position)
        worker:wait_for("event=database_reached link=" .. name, 10, position)
        wait_for_link(app, name)
        journal.wait_for_status(app, journal.publish(app, "t"), "done")
        assert.equal(round, #app:ledger "topic = 'after'")
        assert.equal(round, #app:ledger "topic = 'later'")
      end
      local until_now = app.db:value "select lease_until from tidemill.worker"
      app:wait_until(function()
        return app.db:value("select lease_until > $1 from tidemill.worker", until_now) == "t"
      end, 10, "the lease is renewed")
      assert.equal(3, #journal.begun(app))
      assert.is_nil(worker:stderr():find "lease_over")
    end)
  end

  it("loses no notification: what was published meanwhile is found", function()
    local app = new_app()
    local worker = app:start()
    for _ = 1, 5 do
      wait_for_link(app, "listen")
      local position = worker:position()
      assert.equal(1, break_link(app, "listen"))
      local id = journal.publish(app, "t")
      journal.wait_for_status(app, id, "done")
      worker:wait_for("event=database_reached link=listen", 10, position)
    end
  end)

  it("under load, again and again at any moment, costs no message a run or an attempt", function()
    local app = new_app({ concurrency = 40, batch = 20 }, "tidemill.sleep(0.02 * math.random())")
    app:start()
    local count = 3000
    journal.publish_many(app, "t", count)
    local broken = 0
    app:wait_until(function()
      clock.sleep(0.01 + 0.04 * math.random())
      broken = broken + break_link(app, "work")
      return journal.count(app, "done") == count
    end, 90, function()
      return ("all are done; the connection was broken %d times"):format(broken)
    end)
    assert.truthy(broken >= 5, "the connection was broken " .. broken .. " times only")
    assert.equal(count, journal.count(app, "done", "attempts = 1 and crashes = 0 and error is null"))
    journal.assert_once_each(app, count)
  end)

  it("under load does not let what a handler publishes be written twice or never", function()
    local app = new_app({ concurrency = 40, batch = 20 }, [[ ctx:publish("after", payload) ]])
    app:start()
    local count = 1000
    journal.publish_many(app, "t", count)
    app:wait_until(function()
      clock.sleep(0.03 + 0.1 * math.random())
      break_link(app, "publish")
      return journal.count(app, "done", "topic = 't'") == count
    end, 90, "all are done")
    assert.equal(tostring(count), app.db:value
      "select count(distinct payload ->> 'n') from tidemill.queue_message where topic = 'after'")
    assert.equal(count, journal.count(app, "done", "topic = 'after'"))
    journal.assert_once_each(app, count)
  end)

  it("that hangs is given up before the lease is over", function()
    local app = new_app({ lease_secs = 6 })
    local worker = app:start()
    local backend = app.db:value [[select pid from pg_stat_activity
      where datname = current_database() and application_name = 'tidemill lease']]
    process.run { "kill", "-STOP", backend }
    finally(function()
      process.run { "kill", "-CONT", backend }
    end)
    worker:wait_for("event=database_lost link=lease error=\"no answer for", 20)
    worker:wait_for("event=database_reached link=lease", 10)
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
    assert.is_nil(worker:stderr():find "lease_over")
  end)
end)

describe("an address of several servers", function()
  it("leads to the one that can be reached", function()
    local app = new_app()
    local host, port = os.getenv "PGHOST", os.getenv "PGPORT"
    app.dsn = ("host='/nowhere,localhost,%s' port=1,1,%s user='%s' dbname=%s"):format(
      host, port, os.getenv "PGUSER", app.database)
    local worker = app:start()
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
    break_link(app, "work")
    worker:wait_for "event=database_reached link=work"
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
  end)
end)

describe("a database's own settings", function()
  it("for isolation and deferral do not disturb two workers", function()
    local app = new_app({ concurrency = 16, batch = 16 })
    set_for_all(app, "default_transaction_isolation", "serializable")
    set_for_all(app, "default_transaction_deferrable", "on")
    local workers = { app:start(), app:start() }
    journal.publish_many(app, "t", 1000)
    journal.wait_until_finished(app)
    assert.equal(1000, journal.count(app, "done", "attempts = 1"))
    journal.assert_once_each(app, 1000)
    for _, worker in ipairs(workers) do
      assert.is_nil(worker:stderr():find "level=error", worker:stderr())
    end
  end)

  it("for texts, times and names do not change what is read and written", function()
    local app = new_app({ retry_backoff_secs = 1000 }, [[ error(ctx.created_at .. " " .. payload.text) ]])
    for name, value in pairs {
      search_path = "", DateStyle = "SQL, DMY", TimeZone = "Asia/Kathmandu", IntervalStyle = "sql_standard",
      standard_conforming_strings = "off", bytea_output = "escape", extra_float_digits = "-15",
      client_encoding = "LATIN1", backslash_quote = "off", array_nulls = "off", quote_all_identifiers = "on",
    } do
      set_for_all(app, name, value)
    end
    app:start()
    local id = journal.publish(app, "t", [[{"text": "naïve \\ 'quoted' 🦀"}]])
    local row = app:wait_until(function()
      local row = journal.row(app, id)
      return row.error and row
    end)
    assert.truthy(row.error:find([[naïve \ 'quoted' 🦀]], 1, true), row.error)
    assert.equal("t", app.db:value("select $1::timestamptz = created_at from tidemill.queue_message",
      row.error:match "%d%d%d%d%-%d%d%-%d%dT[%d:.]+Z"))
    assert.equal("t", app.db:value [[select available_at between now() + interval '900 seconds'
      and now() + interval '1000 seconds' from tidemill.queue_message]])
  end)

  it("for timeouts cost time when a table is locked, and nothing else", function()
    local app = new_app()
    local stranger = app:connect()
    set_for_all(app, "statement_timeout", "200ms")
    set_for_all(app, "idle_in_transaction_session_timeout", "200ms")
    local worker = app:start()
    for _ = 1, 3 do
      local id = journal.publish(app, "t")
      stranger:exec "begin; lock table tidemill.queue_message in access exclusive mode"
      clock.sleep(0.5)
      stranger:exec "commit"
      journal.wait_for_status(app, id, "done")
    end
    assert.is_nil(worker:stderr():find "lease_over")
    journal.assert_once_each(app, 3)
  end)
end)

describe("a table that is not there", function()
  it("is waited for, and said once", function()
    local app = new_app(nil, [[ journal.wait_for "go" ]])
    local worker = app:start()
    local held = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    app.db:exec "alter table tidemill.queue_message rename to elsewhere"
    app:write("go", "")
    worker:wait_for "event=outcomes_wait error=\"relation [^\n]*does not exist"
    app.db:exec "notify tidemill_queue, 't'"
    worker:wait_for "event=claim_refused error=\"relation [^\n]*does not exist"
    clock.sleep(2.5)
    app.db:exec "alter table tidemill.elsewhere rename to queue_message"
    journal.wait_for_status(app, held, "done")
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
    local _, times = worker:stderr():gsub("event=claim_refused", "")
    assert.equal(1, times)
    _, times = worker:stderr():gsub("event=outcomes_wait", "")
    assert.equal(1, times)
    journal.assert_once_each(app, 2)
  end)
end)
