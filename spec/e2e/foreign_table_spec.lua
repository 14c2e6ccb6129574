-- A table of another program (migrate = false): messages that it wrote are run by our workers, with
-- the features that its columns can carry, and nothing is added to its database.

local foreign = require "spec.support.foreign"
local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local LOST = "the subscriber holding this message stopped responding"

-- An app whose handler `work` runs this body on topic `t`; not started.
local function new_app(body, config, ddl)
  config = config or {}
  config.subscribe = config.subscribe or { t = "work" }
  return foreign.app { config = config, handlers = { work = body or "" }, ddl = ddl }
end

local function start(...)
  local app = new_app(...)
  app:start()
  return app
end

local function insert(app, payload, columns)
  return foreign.insert(app, "t", "work", payload, columns)
end

local function run(app, payload, status, columns)
  return foreign.wait_for_status(app, insert(app, payload, columns), status or "done")
end

local function published(app)
  return app:ledger "topic <> 't'"
end

local shapes = {
  { "its owner's index", foreign.TABLE .. foreign.INDEX },
  { "neither key nor index", (foreign.TABLE:gsub("primary key", "not null")) },
  { "varchar, json and bigint columns", (foreign.TABLE:gsub("jsonb", "json"):gsub("integer", "bigint")
    :gsub("text", "varchar(200)"):gsub("claimed_by varchar%(200%)", "claimed_by varchar")
    :gsub("error varchar%(200%)", "error varchar")) },
}

for _, shape in ipairs(shapes) do
  describe("a foreign table with " .. shape[1], function()
    it("has its messages run, retried, failed, published and pruned, and nothing added", function()
      local app = new_app([[
        if payload.fail then error "boom" end
        if payload.retry and ctx.attempts == 1 then return ctx:retry(0, "again") end
        if payload.publish then
          tidemill.publish("now", { a = 1 })
          ctx:publish("later", { b = 2 }, { delay_secs = 3600 })
        end
      ]], { max_attempts = 2, retry_backoff_secs = 0, lease_secs = 2, retain_hours = 1,
        subscribe = { t = "work", now = { "one", "two" }, later = "one" } }, shape[2])
      app:write_handler("one", "return function() end")
      app:write_handler("two", "return function() end")
      local old = foreign.insert_silently(app, "t", "work", "{}", { status = "'done'",
        available_at = "now() - interval '3 h'", processed_at = "now() - interval '2 h'" })
      local waiting = insert(app, "{}")
      local before = foreign.objects(app)
      app:start()
      foreign.wait_for_status(app, waiting, "done")
      local done = run(app, '{"retry": true}')
      assert.equal("2", done.attempts)
      assert.same({}, { done.error, done.claimed_by, done.claimed_at })
      assert.is_not_nil(done.processed_at)
      local failed = run(app, '{"fail": true}', "failed")
      assert.equal("2", failed.attempts)
      assert.truthy(failed.error:find "boom")
      run(app, '{"publish": true}')
      app:wait_until(function()
        return foreign.count(app, "topic = 'now' and status = 'done'") == 2
      end, 10, "what was published is run")
      assert.equal(1, foreign.count(app, "topic = 'later' and status = 'pending'"))
      app:wait_until(function()
        return not foreign.row(app, old)
      end, 20, "the old message is pruned")
      assert.equal(before, foreign.objects(app))
    end)

    it("shares many messages between two workers, each run exactly once", function()
      local app = start("tidemill.sleep(0.002)", { batch = 16, concurrency = 16 }, shape[2])
      app:start()
      foreign.insert_many(app, "t", "work", 1500)
      foreign.wait_until_finished(app, 60)
      journal.assert_once_each(app, 1500)
      assert.equal(1500, foreign.count(app, "status = 'done' and attempts = 1"))
      local pids = {}
      for _, begun in ipairs(journal.begun(app)) do
        pids[begun.pid] = true
      end
      assert.is_truthy(next(pids, next(pids)))
    end)
  end)
end

describe("a foreign table", function()
  it("tells a handler all that it knows, and what its columns cannot carry is the default", function()
    local app = start([[ journal.note(tidemill.json.encode { ctx.topic, ctx.subscriber, ctx.attempts, ctx.max_attempts,
      ctx.priority, ctx.published_by, ctx.headers == nil, ctx.message_id, payload }) ]], { max_attempts = 7 })
    local id = run(app, '{"n": 1}').id
    assert.same({ ('["t","work",1,7,0,"ann",true,"%s",{"n":1}]'):format(id) }, journal.notes(app))
  end)

  it("is read in the order of due times, then of writing", function()
    local app = new_app("journal.note(payload.n)", { concurrency = 1 })
    for n, columns in ipairs {
      { available_at = "now() - interval '1 s'" },
      { available_at = "now() - interval '3 s'", created_at = "now() - interval '1 s'" },
      { available_at = "now() - interval '2 s'" },
    } do
      foreign.insert_silently(app, "t", "work", ('{"n": %d}'):format(n), columns)
    end
    app.db:query [[insert into other.queue_message
        (id, topic, subscriber, status, payload, attempts, available_at, created_at, updated_at)
      select gen_random_uuid(), 't', 'work', 'pending', '{"n": 5}', 0, available_at, created_at + interval '1 s', now()
        from other.queue_message where payload = '{"n": 2}']]
    app:start()
    foreign.wait_until_finished(app)
    assert.same({ "2", "5", "3", "1" }, journal.notes(app))
  end)

  it("is asked when the next message is due, which nobody announces", function()
    local app = new_app()
    local id = foreign.insert_silently(app, "t", "work", "{}", { available_at = "now() + interval '2 s'" })
    foreign.insert_silently(app, "t", "work", "{}", { available_at = "'infinity'" })
    app:start()
    local row = foreign.wait_for_status(app, id, "done")
    assert.is_true(row.processed_at >= row.available_at)
    assert.equal(1, foreign.count(app, "status = 'pending'"))
  end)

  it("keeps what is for others: other topics, other subscribers, nobody", function()
    local app = start(nil, { lease_secs = 1, retain_hours = 1 })
    local long_ago = "now() - interval '5 h'"
    local others = {
      foreign.insert(app, "t", "other"), foreign.insert(app, "u", "work"), foreign.insert(app, "t", ""),
      foreign.insert(app, "t", "other", "{}", { status = "'running'", claimed_at = long_ago, claimed_by = "'x'" }),
      foreign.insert(app, "u", "work", "{}",
        { status = "'done'", available_at = long_ago, processed_at = long_ago }),
      foreign.insert(app, "t", "work", "{}",
        { status = "'failed'", available_at = long_ago, processed_at = long_ago, error = "'boom'" }),
    }
    local before = app:ledger()
    assert.equal(#others, #before)
    local gone = {
      foreign.insert(app, "t", "work", "{}", { status = "'done'", available_at = long_ago, processed_at = long_ago }),
      foreign.insert(app, "z", "", "{}", { status = "'done'", available_at = long_ago, processed_at = long_ago }),
    }
    local kept = foreign.insert(app, "t", "work", "{}",
      { status = "'done'", available_at = long_ago, processed_at = "now() - interval '30 min'" })
    app:wait_until(function()
      return not foreign.row(app, gone[1]) and not foreign.row(app, gone[2])
    end, 20, "what is finished is pruned")
    run(app)
    app.db:query("delete from other.queue_message where id = any ($1::uuid[])",
      ("{%s,%s}"):format(kept, journal.begun(app)[1].id))
    assert.same(before, app:ledger())
  end)

  it("keeps what is done for ever with retain_hours = 0", function()
    local app = start(nil, { lease_secs = 1, retain_hours = 0, subscribe = { t = "work", u = { work = {
      handler = "work", retain_hours = 1 } } } })
    local then_ = "now() - interval '5 h'"
    local long_ago = { status = "'done'", available_at = then_, processed_at = then_ }
    local kept = { foreign.insert(app, "t", "work", "{}", long_ago), foreign.insert(app, "z", "", "{}", long_ago) }
    for _ = 1, 2 do
      local gone = foreign.insert(app, "u", "work", "{}", long_ago)
      app:wait_until(function()
        return not foreign.row(app, gone)
      end, 20, "what has a retention is pruned")
    end
    assert.is_not_nil(foreign.row(app, kept[1]))
    assert.is_not_nil(foreign.row(app, kept[2]))
  end)

  it("may hold what is odd: it is run, or fails saying so, and disturbs nothing", function()
    local app = start("journal.note(tidemill.json.encode(payload))", { max_payload_bytes = 1000, max_attempts = 1 },
      (foreign.TABLE:gsub("(payload jsonb) not null", "%1"):gsub("(attempts integer) not null", "%1")
        :gsub("(available_at timestamptz) not null", "%1")))
    local large = insert(app, ('"%s"'):format(("x"):rep(1000)))
    insert(app, "{}", { available_at = "null" })
    local empty = insert(app, "{}", { payload = "null", attempts = "null", published_by = "null" })
    local ancient = insert(app, "1", { available_at = "'-infinity'", created_at = "'infinity'" })
    local reset = insert(app, "2", { processed_at = "now()", error = "'by hand'", claimed_by = "'x'" })
    for _, id in ipairs { empty, ancient, reset } do
      foreign.wait_for_status(app, id, "done")
    end
    assert.truthy(foreign.wait_for_status(app, large, "failed").error:find "larger than max_payload_bytes")
    local notes = journal.notes(app)
    table.sort(notes)
    assert.same({ "1", "2", "{}" }, notes)
    assert.is_nil(app.processes[1]:stderr():find "_refused")
  end)

  it("is worked on with rights on that table only", function()
    local app = new_app("if ctx.attempts == 1 then error 'once' end ctx:publish('u')", { retry_backoff_secs = 0 })
    local role = "tidemill_spec_foreign_" .. app.db.pid
    app.db:exec(([[
      create role ROLE login; grant usage on schema other to ROLE;
      grant select, insert, update, delete on other.queue_message to ROLE]]):gsub("ROLE", role))
    app.dsn = app.dsn .. " user=" .. role
    app:start()
    local ok, row = pcall(run, app)
    app:stop()
    app.db:exec(("drop owned by %s; drop role %s"):format(role, role))
    assert.is_true(ok, row)
    assert.equal("2", row.attempts)
    assert.equal("done", published(app)[1].status)
  end)

  it("is worked on without notifications too", function()
    local app = new_app("ctx:publish('u')", { notify = false, poll_secs = 0.2, subscribe = { t = "work", u = "last" } })
    app:write_handler("last", "return function() end")
    app:start()
    local listener = app:connect()
    listener:exec "listen shop_queue"
    local id = foreign.insert_silently(app, "t", "work")
    foreign.wait_for_status(app, id, "done")
    foreign.wait_until_finished(app)
    assert.is_nil(listener:wait_notify(0.3))
  end)
end)

describe("a message of a foreign table", function()
  it("comes again after the backoff, which no notification ends", function()
    local app = start("if ctx.attempts < 3 then error 'boom' end", { retry_backoff_secs = 1 })
    local row = run(app)
    assert.equal("3", row.attempts)
    assert.equal("t", app.db:value("select processed_at - created_at >= interval '3 s' from other.queue_message"))
    assert.is_nil(row.error)
  end)

  it("ends as its handler says", function()
    local app = start [[
      if ctx.published_by == "ann" and payload.snooze and not io.open "snoozed" then
        io.open("snoozed", "w"):close()
        ctx:snooze(0)
      end
      if payload.discard then ctx:discard(payload.discard) end
    ]]
    local snoozed = run(app, '{"snooze": true}')
    assert.equal("1", snoozed.attempts)
    assert.equal(2, #journal.begun(app, snoozed.id))
    local discarded = run(app, '{"discard": "no such customer"}')
    assert.equal("discarded: no such customer", discarded.error)
    assert.is_not_nil(discarded.processed_at)
  end)

  it("is taken away while it runs: what its handler says is refused", function()
    local app = start "journal.wait_for 'go'"
    local id = insert(app)
    journal.wait_until_begun(app, 1)
    app.db:query("update other.queue_message set claimed_by = 'somebody else' where id = $1", id)
    app:write("go", "")
    app.processes[1]:wait_for "event=lease_lost"
    local row = foreign.row(app, id)
    assert.same({ "running", "somebody else" }, { row.status, row.claimed_by })
  end)

  it("is given back by an orderly stop, uncounted", function()
    local app = start("journal.wait_for 'never'", { shutdown_secs = 0.2 })
    local id = insert(app)
    journal.wait_until_begun(app, 1)
    app:stop()
    local row = foreign.row(app, id)
    assert.same({ "pending", "0" }, { row.status, row.attempts })
    assert.is_nil(row.claimed_by)
  end)
end)

describe("the lease of a foreign table's message", function()
  local function new_leased(body, config)
    config = config or {}
    config.lease_secs = 2
    return new_app(body or [[ journal.wait_for("go" .. ctx.attempts) ]], config)
  end

  it("is renewed for as long as its handler runs, so nobody else runs it", function()
    local app = new_leased()
    app:start()
    local id = insert(app)
    journal.wait_until_begun(app, 1)
    app:start()
    app:wait_until(function()
      return app.db:value "select claimed_at > created_at + interval '6 s' from other.queue_message" == "t"
    end, 30, "the lease is renewed for three times its length")
    assert.equal("running", foreign.row(app, id).status)
    app:write("go1", "")
    assert.equal("1", foreign.wait_for_status(app, id, "done").attempts)
    journal.assert_once_each(app, 1)
  end)

  it("ends with a killed worker: another runs it, the attempt counted", function()
    local app = new_leased()
    local first = app:start()
    local id = insert(app)
    journal.wait_until_begun(app, 1)
    local second = app:start()
    first:kill "KILL"
    first:wait()
    app:write("go2", "")
    assert.equal("2", foreign.wait_for_status(app, id, "done").attempts)
    second:wait_for("event=message_reclaimed[^\n]* attempt=1 error=\"" .. LOST)
    assert.equal(2, #journal.begun(app))
  end)

  it("ends with a killed worker, which runs it when it is started again", function()
    local app = new_leased()
    local first = app:start()
    local id = insert(app)
    journal.wait_until_begun(app, 1)
    first:kill "KILL"
    first:wait()
    app:write("go2", "")
    app:start()
    assert.equal("2", foreign.wait_for_status(app, id, "done").attempts)
  end)

  it("ends in the last attempt: a dead letter", function()
    local app = new_leased(nil, { max_attempts = 1 })
    local first = app:start()
    local id = insert(app)
    journal.wait_until_begun(app, 1)
    local second = app:start()
    first:kill "KILL"
    first:wait()
    local row = foreign.wait_for_status(app, id, "failed")
    assert.same({ "1", LOST }, { row.attempts, row.error })
    assert.is_not_nil(row.processed_at)
    second:wait_for "event=message_failed"
    assert.equal(1, #journal.begun(app))
  end)

  it("of another program's worker is respected until it is over", function()
    local app = new_leased("")
    local held = foreign.insert_silently(app, "t", "work", "{}",
      { status = "'running'", attempts = "1", claimed_by = "'their worker'", claimed_at = "now() + interval '3 s'" })
    local over = foreign.insert_silently(app, "t", "work", "{}",
      { status = "'running'", attempts = "1", claimed_by = "'their worker'", updated_at = "now() - interval '1 h'" })
    app:start()
    assert.equal("2", foreign.wait_for_status(app, over, "done").attempts)
    assert.equal("running", foreign.row(app, held).status)
    local row = foreign.wait_for_status(app, held, "done")
    assert.equal("t", app.db:value(
      "select processed_at >= created_at + interval '5 s' from other.queue_message where id = $1", row.id))
  end)

  it("is lost by a worker that was stopped for too long, and what it says then changes nothing", function()
    local app = new_leased()
    local first = app:start()
    local id = insert(app)
    journal.wait_until_begun(app, 1)
    app:start()
    first:kill "STOP"
    journal.wait_until_begun(app, 2)
    app:write("go1", "")
    first:kill "CONT"
    first:wait_for "event=lease_over"
    app:write("go2", "")
    local row = foreign.wait_for_status(app, id, "done")
    assert.equal("2", row.attempts)
    first:wait_for "event=registered.-event=registered"
    assert.equal(1, #app:ledger())
  end)
end)

describe("an executor that dies over a foreign table", function()
  it("costs those that waited in it no attempt, and the crash is noted in their error", function()
    local app = start([[
      if payload.innocent then return journal.wait_for "go" end
      journal.kill_myself()
    ]], { max_attempts = 1 })
    local innocent = insert(app, '{"innocent": true}')
    journal.wait_until_begun(app, 1)
    local guilty = run(app, "{}", "failed")
    assert.truthy(guilty.error:find("handler crashed its executor (signal 9, SIGKILL)", 1, true), guilty.error)
    app:wait_until(function()
      return #journal.begun(app, innocent) == 2
    end, 20, "the innocent runs again")
    local row = foreign.row(app, innocent)
    assert.same({ "running", "1", "the executor crashed while this message waited in it, crashes so far: 1" },
      { row.status, row.attempts, row.error })
    app:write("go", "")
    assert.is_nil(foreign.wait_for_status(app, innocent, "done").error)
  end)

  it("again and again is found out: what crashes it while waiting runs alone in the end", function()
    -- The first two crashes look like another's: no delivery is on the processor when it dies.
    local app = start([[
      if payload.innocent then return journal.wait_for "go" end
      local ffi = require "ffi"
      ffi.cdef "unsigned alarm(unsigned);"
      ffi.C.alarm(1)
      tidemill.sleep(3600)
    ]], { max_attempts = 1 })
    local innocent, guilty = insert(app, '{"innocent": true}'), insert(app)
    app:wait_until(function()
      return foreign.count(app, "error like '%crashes so far: 2'") == 2
    end, 20, "both were in two crashes")
    app:write("go", "")
    foreign.wait_for_status(app, guilty, "failed")
    foreign.wait_for_status(app, innocent, "done")
    assert.equal(3, #journal.begun(app, guilty))
    -- Where the last runs of both stand in the journal: one was over before the other began.
    local last = {}
    for i, recorded in ipairs(journal.runs(app)) do
      last[recorded.what .. " " .. recorded.id] = i
    end
    local blown = last["begin " .. guilty]
    assert.is_true(last["end " .. innocent] < blown or blown < last["begin " .. innocent])
    assert.equal("1", foreign.row(app, innocent).attempts)
  end)
end)
