-- Workers that die, hang and come back: what they held is run elsewhere, and what they still want to
-- say about it is refused.

local journal = require "spec.support.journal"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local LOST = "the subscriber holding this message stopped responding"

-- An app whose workers are dead to each other after two seconds. The first attempt of a message waits
-- for the file `go1`, the second for `go2`.
local function new_app(config, body)
  config = config or {}
  config.subscribe = { t = "work" }
  config.lease_secs = config.lease_secs or 2
  return journal.app {
    config = config,
    handlers = { work = body or [[ journal.wait_for("go" .. ctx.attempts) ]] },
  }
end

local function workers_alive(app)
  return tonumber(app.db:value "select count(*) from tidemill.worker where lease_until > clock_timestamp()")
end

local function worker_of(row)
  return row.claimed_by:match "^(.*)#"
end

describe("a worker", function()
  it("keeps what it runs for as long as it lives, however short the lease", function()
    local app = new_app({ lease_secs = 1 })
    local first = app:start()
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    app:start()
    local before = app.db:value "select max(lease_until) from tidemill.worker"
    app:wait_until(function()
      return app.db:value(
        "select min(lease_until) > $1::timestamptz + interval '4 seconds' from tidemill.worker", before) == "t"
    end, 30, "both have renewed their leases for four seconds")
    assert.equal("running", journal.row(app, id).status)
    app:write("go1", "")
    assert.equal("1", journal.wait_for_status(app, id, "done").attempts)
    journal.assert_once_each(app, 1)
    assert.is_nil(first:stderr():find "lease_over")
    assert.equal(2, workers_alive(app))
  end)

  it("killed leaves no process behind, whatever its handlers do", function()
    local app = new_app({ executors = 3, lease_secs = 300 }, [[
      if payload.n == 3 then while true do end end
      tidemill.sleep(3600)
    ]])
    local worker = app:start()
    journal.publish_many(app, "t", 3)
    journal.wait_until_begun(app, 3)
    assert.equal(4, #process.children())
    worker:kill "KILL"
    worker:wait()
    app:wait_until(function()
      return #process.children() == 0
    end, 10, "the executors are gone")
  end)

  it("killed loses its messages to another, the attempt counted", function()
    local app = new_app()
    local first = app:start()
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    local second = app:start()
    first:kill "KILL"
    first:wait()
    app:write("go2", "")
    local row = journal.wait_for_status(app, id, "done")
    assert.equal("2", row.attempts)
    assert.equal(LOST, app.db:value "select errors -> 0 ->> 'error' from tidemill.queue_message")
    second:wait_for("event=message_reclaimed[^\n]* attempt=1 error=\"" .. LOST)
    assert.equal(2, #journal.begun(app))
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.worker" == "1"
    end, 10, "the dead one is forgotten")
  end)

  it("killed in a message's last attempt leaves a dead letter", function()
    local app = new_app({ max_attempts = 1 })
    local first = app:start()
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    local second = app:start()
    first:kill "KILL"
    first:wait()
    local row = journal.wait_for_status(app, id, "failed")
    assert.same({ "1", LOST }, { row.attempts, row.error })
    second:wait_for "event=message_failed"
    assert.equal(1, #journal.begun(app))
  end)

  it("killed alone gets its messages back when it is started again", function()
    local app = new_app()
    local first = app:start()
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    first:kill "KILL"
    first:wait()
    app:write("go2", "")
    app:start()
    assert.equal("2", journal.wait_for_status(app, id, "done").attempts)
  end)

  it("stopped beyond its lease finds itself dead, and changes nothing of what others took", function()
    local app = new_app()
    local first = app:start()
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    local old = worker_of(journal.row(app, id))
    app:start()
    first:kill "STOP"
    journal.wait_until_begun(app, 2)
    local taken = journal.row(app, id)
    assert.equal("2", taken.attempts)
    -- Its executor runs on, and sends the outcome of the first attempt.
    app:write("go1", "")
    app:wait_until(function()
      return #journal.ended(app) == 1
    end)
    first:kill "CONT"
    first:wait_for "event=lease_over"
    local new = first:wait_for("event=lease_over.*event=registered worker=(%S+)")
    assert.are_not.equal(old, new)
    assert.same(taken, journal.row(app, id))
    app:write("go2", "")
    assert.equal("2", journal.wait_for_status(app, id, "done").attempts)
    app:wait_until(function()
      return workers_alive(app) == 2
    end)
    journal.publish_many(app, "t", 50)
    app:write("go1", "")
    journal.wait_until_finished(app)
    assert.equal(52, #journal.begun(app))
    assert.equal(52, #journal.ended(app))
  end)

  it("stopped beyond its lease while alone runs its messages anew, and no two attempts at a time", function()
    local app = new_app()
    local worker = app:start()
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    worker:kill "STOP"
    app:wait_until(function()
      return workers_alive(app) == 0
    end)
    worker:kill "CONT"
    journal.wait_until_begun(app, 2)
    app:write("go1", "")
    app:write("go2", "")
    assert.equal("2", journal.wait_for_status(app, id, "done").attempts)
    -- The handler of the first attempt was stopped before the second began.
    assert.equal(1, #journal.ended(app))
    assert.equal(2, #journal.begun(app))
  end)
end)

describe("a message held by a worker nobody knows", function()
  it("is run when its claim is older than a lease", function()
    local app = new_app()
    app:start()
    app:write("go4", "")
    local id = app.db:value [[insert into tidemill.queue_message
      (topic, subscriber, status, attempts, claimed_by, claimed_at)
      values ('t', 'work', 'running', 3, 'somebody else#7', now() - interval '10 seconds') returning id]]
    local fresh = app.db:value [[insert into tidemill.queue_message
      (topic, subscriber, status, attempts, claimed_by, claimed_at)
      values ('t', 'work', 'running', 3, 'somebody else', now() + interval '1 hour') returning id]]
    assert.equal("4", journal.wait_for_status(app, id, "done").attempts)
    assert.equal("running", journal.row(app, fresh).status)
  end)
end)

describe("a pair of topic and subscriber", function()
  it("belongs to one app: another is refused at start", function()
    local app = new_app()
    app:start()
    local other = journal.app {
      config = { app = "other", subscribe = { t = { "work", "own" } } },
      handlers = { work = "", own = "" },
      database = false,
    }
    other.dsn = app.dsn
    local result = other:run { "run" }
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find("`work` of topic `t` belongs to app `app`", 1, true), result.stderr)
    assert.equal("1", app.db:value "select count(*) from tidemill.subscription")
    assert.equal("1", app.db:value "select count(*) from tidemill.worker")
  end)
end)

describe("a lock on the table of messages", function()
  it("costs no worker its lease, however long it is held", function()
    local app = journal.app {
      config = { subscribe = { t = "work" }, lease_secs = 3 },
      handlers = { work = [[ journal.wait_for "go" ]] },
    }
    local workers = { app:start(), app:start() }
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    for _, mode in ipairs { "access exclusive", "share" } do
      local locker = app:connect()
      locker:exec(("begin; lock table tidemill.queue_message in %s mode"):format(mode))
      local since = app.db:value "select max(lease_until) from tidemill.worker"
      app:wait_until(function()
        return app.db:value("select min(lease_until) > $1::timestamptz + interval '6 s' from tidemill.worker",
          since) == "t"
      end, 60, "both have renewed for twice the lease")
      locker:exec "rollback"
    end
    app:write("go", "")
    local row = journal.wait_for_status(app, id, "done")
    assert.equal("1", row.attempts)
    for _, worker in ipairs(workers) do
      assert.is_nil(worker:stderr():find "lease_over")
    end
  end)
end)
