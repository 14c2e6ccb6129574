-- The database goes away and comes back: nothing is lost, nothing is run twice, and work resumes.

local clock = require "spec.support.clock"
local cluster = require "spec.support.cluster"
local journal = require "spec.support.journal"
local pg = require "spec.support.pg"

local server

setup(function()
  server = cluster.new()
end)

teardown(function()
  server:close()
end)

after_each(function()
  server:close_apps()
end)

local function new_app(config, body)
  config = config or {}
  config.subscribe = { t = "work" }
  return server:app { config = config, handlers = { work = body } }
end

describe("the server stopped at once and started again", function()
  it("loses nothing that was committed, and costs no message a run", function()
    local app = new_app({ executors = 2, concurrency = 20, batch = 20 }, [[
      tidemill.sleep(0.1 * math.random())
      ctx:publish("after", payload)
    ]])
    app:start()
    local committed = 0
    for _ = 1, 4 do
      journal.publish_many(app, "t", 300)
      committed = committed + 300
      local begun = #journal.begun(app)
      journal.wait_until_begun(app, begun + 50)
      server:stop "immediate"
      clock.sleep(0.2 * math.random())
      server:start()
      -- Work resumes by itself, soon: the poll is an hour away.
      begun = #journal.begun(app)
      journal.wait_until_begun(app, begun + 50, 10)
    end
    journal.wait_until_finished(app, 60)
    assert.equal(committed, journal.count(app, "done", "topic = 't' and attempts = 1"))
    assert.equal(committed, journal.count(app, "done", "topic = 'after'"))
    journal.assert_once_each(app, committed)
  end)

  it("is told of outcomes that came while it was away", function()
    local app = new_app(nil, [[ journal.wait_for "go"; if payload.n > 30 then error "no" end ]])
    local worker = app:start()
    journal.publish_many(app, "t", 60)
    journal.wait_until_begun(app, 60)
    server:stop "immediate"
    app:write("go", "")
    app:wait_until(function()
      return #journal.ended(app) == 30
    end, 10, "the handlers go on")
    clock.sleep(0.3)
    server:start()
    app:wait_until(function()
      return journal.count(app, "done", "attempts = 1 and payload ->> 'n' <= '30'") <= 30
        and journal.count(app, "done") == 30
        and journal.count(app, "pending", "attempts = 1 and error is not null") == 30
    end, 10, "thirty are done, thirty failed once")
    assert.equal(60, #journal.begun(app))
    assert.is_nil(worker:stderr():find "lease_lost")
  end)

  it("in an orderly way is the same", function()
    local app = new_app(nil, "tidemill.sleep(0.05)")
    app:start()
    journal.publish_many(app, "t", 300)
    journal.wait_until_begun(app, 60)
    server:stop "fast"
    clock.sleep(0.3)
    server:start()
    journal.wait_until_finished(app)
    assert.equal(300, journal.count(app, "done", "attempts = 1"))
    journal.assert_once_each(app, 300)
  end)

  it("for longer than the lease makes a worker begin anew, and counts the attempts", function()
    local app = new_app({ lease_secs = 2 }, [[ if ctx.attempts == 1 then tidemill.sleep(3600) end ]])
    local worker = app:start()
    journal.publish_many(app, "t", 5)
    journal.wait_until_begun(app, 5)
    server:stop "immediate"
    worker:wait_for("event=lease_over", 15)
    server:start()
    app:wait_until(function()
      return journal.count(app, "done", "attempts = 2") == 5
    end, 20, "all are done in their second attempt")
    assert.equal(10, #journal.begun(app))
    assert.equal("1", app.db:value "select count(*) from tidemill.worker")
  end)
end)

describe("a worker told to stop while the server is away", function()
  it("ends with 0 when it has nothing to say", function()
    local app = new_app({ shutdown_secs = 0.3 }, "")
    local worker = app:start()
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
    server:stop "immediate"
    worker:wait_for "event=database_lost link=work"
    worker:kill "TERM"
    assert.same({ 0 }, { worker:wait(20) })
  end)

  it("ends with 1 and says so when outcomes are left; their messages run again after the lease", function()
    local app = new_app({ shutdown_secs = 0.3, lease_secs = 2 }, "if ctx.attempts == 1 then tidemill.sleep(3600) end")
    local worker = app:start()
    journal.publish_many(app, "t", 3)
    journal.wait_until_begun(app, 3)
    server:stop "immediate"
    worker:kill "TERM"
    assert.same({ 1 }, { worker:wait(20) })
    assert.truthy(worker:stderr():find("tidemill: 3 outcomes could not be written before the stop", 1, true))
    server:start()
    app:start()
    journal.wait_until_finished(app)
    assert.equal(3, journal.count(app, "done", "attempts = 2"))
  end)

  it("waits for the server as long as shutdown_secs allow", function()
    local app = new_app({ shutdown_secs = 60 }, [[ journal.wait_for "go" ]])
    local worker = app:start()
    journal.publish_many(app, "t", 3)
    journal.wait_until_begun(app, 3)
    server:stop "immediate"
    worker:kill "TERM"
    app:write("go", "")
    worker:wait_for "event=stopping"
    clock.sleep(0.5)
    server:start()
    assert.same({ 0 }, { worker:wait(20) })
    assert.equal(3, journal.count(app, "done", "attempts = 1"))
    assert.equal("0", app.db:value "select count(*) from tidemill.worker")
  end)
end)

describe("a worker started while the server is away", function()
  it("waits for it, and says so", function()
    local app = new_app(nil, "")
    app:must_run "migrate"
    server:stop "immediate"
    local worker = app:spawn "run"
    worker:wait_for "event=database_unreached"
    server:start()
    worker:wait_for("event=ready", 20)
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
  end)
end)

describe("a server that is read-only for a while", function()
  it("is waited for; outcomes are kept, and nothing is run twice", function()
    local app = new_app(nil, [[ journal.wait_for "go" ]])
    local worker = app:start()
    journal.publish_many(app, "t", 20)
    journal.wait_until_begun(app, 20)
    local function set_read_only(value)
      app.db:exec "set default_transaction_read_only = off"
      app.db:exec("alter system set default_transaction_read_only = " .. value)
      app.db:exec "select pg_reload_conf()"
    end
    set_read_only "on"
    finally(function()
      set_read_only "off"
    end)
    app:wait_until(function()
      local probe = app:connect()
      local value = probe:value "show default_transaction_read_only"
      probe:close()
      return value == "on"
    end)
    app:write("go", "")
    worker:wait_for "event=database_lost[^\n]* sqlstate=25006"
    local id = journal.publish(app, "t")
    clock.sleep(1)
    assert.equal(20, journal.count(app, "running"))
    set_read_only "off"
    journal.wait_for_status(app, id, "done", 15)
    journal.wait_until_finished(app)
    assert.equal(21, journal.count(app, "done", "attempts = 1"))
    journal.assert_once_each(app, 21)
    local _, times = worker:stderr():gsub("event=database_lost link=work", "")
    assert.equal(1, times)
  end)
end)

describe("connection slots that are used up", function()
  it("are waited for", function()
    local app = new_app(nil, "")
    local worker = app:start()
    local others = {}
    local function take_all()
      for _ = 1, 200 do
        local ok, connection = pcall(pg.connect, server:dsn())
        if not ok then
          return
        end
        table.insert(others, connection)
      end
      error "the slots are not used up"
    end
    take_all()
    app.db:query [[select pg_terminate_backend(pid) from pg_stat_activity
      where datname = current_database() and application_name like 'tidemill %' and pid <> pg_backend_pid()
        and application_name <> 'tidemill spec']]
    take_all()
    worker:wait_for "event=database_unreached[^\n]*too many clients"
    local id = journal.publish(app, "t")
    for _, connection in ipairs(others) do
      connection:close()
    end
    journal.wait_for_status(app, id, "done", 10)
  end)
end)
