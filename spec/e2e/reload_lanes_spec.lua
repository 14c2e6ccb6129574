-- What a reload does to lanes and settings.

local clock = require "spec.support.clock"
local foreign = require "spec.support.foreign"
local journal = require "spec.support.journal"
local process = require "spec.support.process"
local reloading = require "spec.support.reloading"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local must_reload = reloading.must_reload

local function lanes(app)
  local list = {}
  for i, row in ipairs(app.db:query [[select s.topic, s.subscriber, s.lane = any (w.lanes) as declared
      from tidemill.subscription as s cross join tidemill.worker as w order by s.topic, s.subscriber]]) do
    list[i] = ("%s/%s%s"):format(row.topic, row.subscriber, row.declared == "t" and "" or " not declared")
  end
  return list
end

describe("a subscription that a reload adds", function()
  it("is registered and served", function()
    local app = reloading.app({ subscribe = { t = "work" } }, { work = "", tell = "" })
    local worker = app:start()
    reloading.set(app, { subscribe = { t = { "work", "tell" }, a = "tell" } })
    must_reload(app, worker)
    assert.same({ "a/tell", "t/tell", "t/work" }, lanes(app))
    journal.publish(app, "t")
    journal.publish(app, "a")
    journal.wait_until_finished(app)
    assert.equal(3, journal.count(app, "done"))
    assert.equal(1, #journal.begun(app, app.db:value "select id from tidemill.queue_message where topic = 'a'"))
  end)

  it("changes nothing for what is claimed already, though lanes have other places now", function()
    local app = reloading.app({ concurrency = 1, batch = 10, subscribe = { t = "work" } }, {
      work = [[ journal.note("work " .. payload.n) journal.wait_for "go" ]], tell = [[ journal.note "tell" ]],
    })
    local worker = app:start()
    journal.publish_many(app, "t", 4)
    journal.wait_until_begun(app, 1)
    -- `a/tell` comes before `t/work`, whose messages were claimed as lane 0.
    reloading.set(app, { concurrency = 1, batch = 10, subscribe = { t = "work", a = "tell" } })
    must_reload(app, worker)
    app:write("go", "")
    journal.wait_until_finished(app)
    assert.equal(4, journal.count(app, "done", "attempts = 1"))
    journal.assert_once_each(app, 4)
    assert.same({ "work 1", "work 2", "work 3", "work 4" }, journal.notes(app))
  end)

  it("of another app's is refused, and the old generation goes on", function()
    local app = reloading.app({ subscribe = { t = "work" } }, { work = "", tell = "" })
    local worker = app:start()
    app.db:exec "insert into tidemill.subscription (app, topic, subscriber) values ('other', 'a', 'tell')"
    reloading.set(app, { subscribe = { t = "work", a = "tell" } })
    local ok, line = reloading.reload(app, worker)
    assert.is_nil(ok)
    assert.truthy(line:find("`tell` of topic `a` belongs to app `other`", 1, true), line)
    journal.publish(app, "t")
    app:wait_until(function()
      return journal.count(app, "done") == 1
    end)
    reloading.wait_for_executors(app, worker, 1)
    reloading.set(app, { subscribe = { t = "work", b = "tell" } })
    must_reload(app, worker)
    assert.same({ "a/tell not declared", "b/tell", "t/work" }, lanes(app))
  end)
end)

describe("a subscription that a reload takes away", function()
  it("is claimed no more; what runs finishes, what has not started goes back", function()
    local app = reloading.app({ batch = 10, subscribe = { t = { work = { concurrency = 6 } }, u = "work" } }, {
      work = [[ journal.wait_for("go" .. ctx.topic) ]],
    })
    local worker = app:start()
    journal.publish_many(app, "t", 9)
    journal.wait_until_begun(app, 6)
    reloading.set(app, { subscribe = { u = "work" } })
    must_reload(app, worker)
    assert.same({ "t/work not declared", "u/work" }, lanes(app))
    journal.publish(app, "u")
    app:write("gou", "")
    app:wait_until(function()
      return journal.count(app, "done", "topic = 'u'") == 1
    end)
    app:write("got", "")
    app:wait_until(function()
      return journal.count(app, "done", "topic = 't'") == 6
    end)
    assert.equal(3, journal.count(app, "pending", "attempts = 0 and claimed_by is null"))
    assert.equal(7, #journal.begun(app))
    -- It comes back: so do its messages.
    reloading.set(app, { subscribe = { t = "work", u = "work" } })
    must_reload(app, worker)
    journal.wait_until_finished(app)
    assert.equal(10, journal.count(app, "done", "attempts = 1"))
    journal.assert_once_each(app, 10)
  end)

  it("gives back what waits for an executor", function()
    local app = reloading.app({ executors = 1, concurrency = 2, batch = 10, subscribe = { t = "work", u = "work" } }, {
      work = [[ if payload.n == 1 then journal.kill_myself() end journal.wait_for "go" ]],
    })
    local worker = app:start()
    -- With its executor dead and no other that loads, what is claimed waits in the worker.
    local good = reloading.read(app, "work")
    app:write_handler("work", "return 5")
    journal.publish(app, "t", '{"n": 1}')
    worker:wait_for "event=load_failed generation=1 executors_left=0"
    app:write_handler("work", good)
    reloading.set(app, { concurrency = 2, batch = 10, subscribe = { u = "work" } })
    must_reload(app, worker)
    local row = app:ledger()[1]
    assert.same({ "pending", "1" }, { row.status, row.attempts })
    app:write("go", "")
    journal.publish(app, "u")
    app:wait_until(function()
      return journal.count(app, "done") == 1
    end)
  end)

  it("is removed in time, and what still waits in it ends as a dead letter", function()
    local app = reloading.app({ lease_secs = 2, subscribe = { t = { "work", "tell" } } }, {
      work = "", tell = [[ journal.wait_for "go" ]],
    })
    local worker = app:start()
    reloading.set(app, { lease_secs = 2, subscribe = { t = "work" } })
    must_reload(app, worker)
    local id = journal.publish(app, "t")
    worker:wait_for "event=lane_removed topic=t subscriber=tell"
    app:wait_until(function()
      return journal.count(app, "failed") == 1
    end)
    assert.equal(1, journal.count(app, "done"))
    assert.truthy(app.db:value("select error from tidemill.queue_message where status = 'failed'"):find(
      "`tell` is subscribed to `t` but no such handler is loaded", 1, true))
    assert.truthy(id)
  end)

  it("is not removed while another worker of the app serves it", function()
    local app = reloading.app({ lease_secs = 2, subscribe = { t = { "work", "tell" } } }, { work = "", tell = "" })
    local first = app:start()
    local second = app:start()
    reloading.set(app, { lease_secs = 2, subscribe = { t = "work" } })
    must_reload(app, first)
    local since = app.db:value "select max(lease_until) from tidemill.worker"
    app:wait_until(function()
      return app.db:value("select min(lease_until) > $1::timestamptz + interval '4 s' from tidemill.worker", since)
        == "t"
    end)
    journal.publish(app, "t")
    journal.wait_until_finished(app)
    assert.equal(2, journal.count(app, "done"))
    must_reload(app, second)
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.subscription" == "1"
    end)
  end)
end)

describe("settings", function()
  it("of lanes follow a reload, in the database too", function()
    local app = reloading.app({ max_attempts = 1, subscribe = { t = "work" } }, { work = [[ error "no" ]] })
    local worker = app:start()
    local first = journal.publish(app, "t")
    journal.wait_for_status(app, first, "failed")
    reloading.set(app, {
      subscribe = { t = { work = { max_attempts = 3, retry_backoff_secs = 0, retain_hours = 7 } } },
    })
    must_reload(app, worker)
    local second = journal.publish(app, "t")
    assert.equal("3", journal.wait_for_status(app, second, "failed").attempts)
    assert.same({ max_attempts = "3", retry_backoff_secs = "0", retain_hours = "7" }, app.db:query
      "select max_attempts, retry_backoff_secs, retain_hours from tidemill.subscription"[1])
  end)

  it("on how much runs at once follow a reload", function()
    local app = reloading.app({ executors = 1, concurrency = 2 }, { work = [[ journal.wait_for "go" ]] })
    local worker = app:start()
    reloading.set(app, { executors = 3, concurrency = 5 })
    must_reload(app, worker)
    reloading.wait_for_executors(app, worker, 3)
    journal.publish_many(app, "t", 40)
    journal.wait_until_begun(app, 15)
    assert.equal(15, journal.count(app, "running"))
    reloading.set(app, { executors = 1, concurrency = 1, subscribe = { t = { work = { concurrency = 16 } } } })
    must_reload(app, worker)
    journal.publish(app, "t")
    journal.wait_until_begun(app, 16)
    assert.equal(16, journal.count(app, "running"))
    app:write("go", "")
    journal.wait_until_finished(app)
    journal.assert_once_each(app, 41)
    reloading.wait_for_executors(app, worker, 1)
  end)

  it("on time limits follow a reload; what runs keeps its own", function()
    local app = reloading.app({ timeout_secs = 3600, max_attempts = 1 }, {
      work = [[ if payload.n == 1 then journal.wait_for "go" else tidemill.sleep(3600) end ]],
    })
    local worker = app:start()
    local first = journal.publish(app, "t", '{"n": 1}')
    journal.wait_until_begun(app, 1)
    reloading.set(app, { timeout_secs = 0.1, max_attempts = 1 })
    must_reload(app, worker)
    local second = journal.publish(app, "t", '{"n": 2}')
    assert.truthy(journal.wait_for_status(app, second, "failed").error:find "exceeded its time limit of 0.1 s")
    app:write("go", "")
    journal.wait_for_status(app, first, "done")
  end)

  it("on leases follow a reload", function()
    local app = reloading.app({ lease_secs = 300 }, { work = "" })
    local worker = app:start()
    for _, secs in ipairs { 2, 600, 3 } do
      reloading.set(app, { lease_secs = secs })
      must_reload(app, worker)
      assert.equal(tostring(secs), app.db:value "select lease_secs from tidemill.worker")
    end
    local since = app.db:value "select lease_until from tidemill.worker"
    app:wait_until(function()
      return app.db:value("select lease_until > $1::timestamptz + interval '4 s' from tidemill.worker", since) == "t"
    end, 30, "the lease is renewed by its new length")
    assert.is_nil(worker:stderr():find "lease_over")
    journal.publish(app, "t")
    journal.wait_until_finished(app)
  end)

  it("on polling follow a reload", function()
    local app = reloading.app({ poll_secs = 3600 }, { work = "" })
    local worker = app:start()
    reloading.set(app, { poll_secs = 0.2 })
    must_reload(app, worker)
    for _ = 1, 3 do
      local id = journal.publish(app, "t", "{}", "notify => false")
      journal.wait_for_status(app, id, "done", 20)
    end
  end)

  for key, value in pairs {
    app = "other", database = "dbname=other", listen_database = "dbname=other", schema = "other", table = "other",
    prefix = "other", notify = false, max_payload_bytes = 17,
  } do
    it("that take a restart are refused by name: " .. key, function()
      local app = reloading.app({ subscribe = { t = "work" } }, { work = "" })
      local worker = app:start()
      reloading.set(app, { [key] = value, subscribe = { t = "work" }, batch = 5 })
      local ok, line = reloading.reload(app, worker)
      assert.is_nil(ok)
      assert.truthy(line:find(("`%s` has changed, which only a restart can follow"):format(key), 1, true), line)
      journal.publish(app, "t")
      journal.wait_until_finished(app)
      reloading.set(app, { subscribe = { t = "work" }, batch = 5 })
      must_reload(app, worker)
    end)
  end

  it("that take a restart are refused once, however often an executor dies", function()
    local app = reloading.app({ executors = 2 }, { work = "" })
    reloading.write(app, "work", "", [[ journal.note(journal.pid) ]])
    local worker = app:start()
    reloading.wait_for_executors(app, worker, 2)
    -- Both have read the first config: one that reads the second cannot take the place of the other.
    app:wait_until(function()
      local notes = "," .. table.concat(journal.notes(app), ",") .. ","
      for _, child in ipairs(process.children(worker.pid)) do
        if not notes:find("," .. child.pid .. ",", 1, true) then
          return false
        end
      end
      return true
    end, 30, "both executors have loaded")
    reloading.set(app, { executors = 2, prefix = "other" })
    process.run { "kill", "-9", process.children(worker.pid)[1].pid }
    worker:wait_for "event=reload_failed [^\n]*`prefix` has changed"
    for _ = 1, 4 do
      journal.publish(app, "t")
      journal.wait_until_finished(app)
      clock.sleep(0.4)
    end
    local _, failed = worker:stderr():gsub("event=reload_failed", "")
    assert.equal(1, failed)
    reloading.set(app, { executors = 2 })
    reloading.wait_for_executors(app, worker, 2)
  end)
end)

describe("a setting that changes while the program starts", function()
  it("ends it, where its connections were made for the old one", function()
    local app = reloading.app({}, { work = "" })
    app:write_config [[
      local seen = io.open "seen"
      if not seen then
        io.open("seen", "w"):close()
      end
      return { prefix = seen and "other" or "tidemill", subscribe = { t = "work" } }
    ]]
    local result = app:run "run"
    assert.equal(2, result.code)
    local wrong = ("`prefix` changed in %s while the program started"):format(app.config_path)
    assert.truthy(result.stderr:find(wrong, 1, true), result.stderr)
  end)
end)

describe("--only", function()
  it("holds across a reload, which needs such a lane", function()
    local app = reloading.app({ subscribe = { t = "work", u = "work" } }, { work = "" })
    local worker = app:start { "--only", "u" }
    reloading.set(app, { subscribe = { t = "work" } })
    local ok, line = reloading.reload(app, worker)
    assert.is_nil(ok)
    assert.truthy(line:find("--only u: no such subscription", 1, true), line)
    reloading.set(app, { subscribe = { a = "work", t = "work", u = "work" } })
    must_reload(app, worker)
    for _, topic in ipairs { "a", "t", "u" } do
      journal.publish(app, topic)
    end
    app:wait_until(function()
      return journal.count(app, "done") == 1
    end)
    assert.equal(2, journal.count(app, "pending", "topic <> 'u'"))
  end)
end)

describe("a reload while the database is away", function()
  local function connections(app, allowed)
    app.admin:exec(("alter database %s with allow_connections %s"):format(app.database, tostring(allowed)))
    if not allowed then
      app.admin:query([[select pg_terminate_backend(pid) from pg_stat_activity
        where datname = $1 and application_name ~ '^tidemill (work|lease|sweep|publish|listen)$']], app.database)
    end
  end

  it("is over when it is back; until then the old generation has what it runs", function()
    local app = reloading.app({ subscribe = { t = "work" } }, { work = [[ journal.wait_for "go" ]], tell = "" })
    local worker = app:start()
    journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    connections(app, false)
    worker:wait_for "event=database_lost link=lease"
    reloading.set(app, { subscribe = { t = { "work", "tell" } } })
    worker:kill "HUP"
    worker:wait_for "event=reload_begun"
    reloading.wait_for_executors(app, worker, 2)
    app:write("go", "")
    app:wait_until(function()
      return #journal.ended(app) == 1
    end)
    assert.is_nil(worker:stderr():find "event=reloaded")
    connections(app, true)
    worker:wait_for "event=reloaded generation=2"
    journal.publish(app, "t")
    journal.wait_until_finished(app)
    assert.equal(3, journal.count(app, "done", "attempts = 1"))
    reloading.wait_for_executors(app, worker, 1)
  end)

  it("is declared again when the answer was lost", function()
    local app = reloading.app({ lease_secs = 30, subscribe = { t = "work" } }, { work = "", tell = "" })
    local worker = app:start()
    local locker = app:connect()
    locker:exec "begin; select from tidemill.worker for update"
    reloading.set(app, { lease_secs = 20, subscribe = { t = { "work", "tell" } } })
    worker:kill "HUP"
    local function waiting()
      return app.db:value [[select pid from pg_stat_activity
        where application_name = 'tidemill lease' and wait_event_type = 'Lock' and datname = current_database()]]
    end
    for _ = 1, 2 do
      local pid = app:wait_until(waiting)
      app.db:query("select pg_terminate_backend($1::int)", pid)
      app:wait_until(function()
        return waiting() ~= pid
      end)
    end
    locker:exec "rollback"
    worker:wait_for "event=reloaded generation=2"
    local row = app.db:query("select generation, lease_secs, cardinality(lanes) as lanes from tidemill.worker")[1]
    assert.same({ generation = "2", lease_secs = "20", lanes = "2" }, row)
    journal.publish(app, "t")
    journal.wait_until_finished(app)
    assert.is_nil(worker:stderr():find "lease_over")
  end)
end)

describe("on a table of another program", function()
  it("subscriptions follow a reload, too", function()
    local app = foreign.app {
      config = { watch = false, subscribe = { t = "work" } }, handlers = { work = "", tell = "" },
    }
    local worker = app:start()
    foreign.wait_for_status(app, foreign.insert(app, "t", "work"), "done")
    local function set(subscribe)
      app:write_config {
        executors = 1, poll_secs = 3600, watch = false, migrate = false, schema = "other", table = "queue_message",
        prefix = "shop", subscribe = subscribe,
      }
      must_reload(app, worker)
    end
    set { a = "tell", t = "work" }
    foreign.wait_for_status(app, foreign.insert(app, "a", "tell"), "done")
    foreign.wait_for_status(app, foreign.insert(app, "t", "work"), "done")
    set { a = "tell" }
    local left = foreign.insert(app, "t", "work")
    foreign.wait_for_status(app, foreign.insert(app, "a", "tell"), "done")
    assert.equal("pending", foreign.row(app, left).status)
    set { a = "tell", t = "work" }
    foreign.wait_for_status(app, left, "done")
  end)
end)

describe("`on_failed`", function()
  it("that a reload adds is told of dead letters from then on", function()
    local app = reloading.app({ max_attempts = 1 }, { work = [[ error "no" ]], report = [[ journal.note(ctx.event) ]] })
    local worker = app:start()
    journal.publish(app, "t")
    app:wait_until(function()
      return journal.count(app, "failed") == 1
    end)
    reloading.set(app, { max_attempts = 1, on_failed = "report" })
    must_reload(app, worker)
    journal.publish(app, "t")
    app:wait_until(function()
      return journal.notes(app)[1] == "failed"
    end)
  end)
end)
