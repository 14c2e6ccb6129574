-- From a committed publish to a handler, and back to a row that says so.

local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local NOTE = "journal.note(ctx.subscriber)"

-- An app with one handler, `work`, on topic `t`, started.
local function start(body, config)
  config = config or {}
  config.subscribe = config.subscribe or { t = "work" }
  local app = journal.app { config = config, handlers = { work = body } }
  app:start()
  return app
end

describe("a published message", function()
  it("runs its handler on the notification alone", function()
    local app = start(NOTE)
    for _ = 1, 3 do
      local row = journal.wait_for_status(app, journal.publish(app, "t"), "done")
      assert.equal("1", row.attempts)
      assert.is_nil(row.error)
      assert.is_nil(row.claimed_by)
      assert.truthy(row.processed_at)
    end
    journal.assert_once_each(app, 3)
  end)

  it("is a row and a run for each subscriber", function()
    local app = journal.app {
      config = { subscribe = { t = { "first", "second", third = { handler = "second" } }, other = "first" } },
      handlers = { first = NOTE, second = NOTE },
    }
    app:start()
    local published = app.db:query("select * from tidemill.publish('t', '{}')")[1]
    assert.equal("3", published.delivered)
    journal.wait_until_finished(app)
    local subscribers = {}
    for _, row in ipairs(app:ledger "status = 'done' and topic = 't'") do
      subscribers[row.subscriber] = true
    end
    assert.same({ first = true, second = true, third = true }, subscribers)
    local notes = journal.notes(app)
    table.sort(notes)
    assert.same({ "first", "second", "third" }, notes)
  end)

  it("that nobody wants is recorded as done, and no handler sees it", function()
    local app = start(NOTE)
    local published = app.db:query("select * from tidemill.publish('nobody.home', '{\"a\": 1}')")[1]
    assert.equal("0", published.delivered)
    local row = journal.row(app, published.id)
    assert.same({ "done", "", "0" }, { row.status, row.subscriber, row.attempts })
    assert.truthy(row.processed_at)
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
    assert.equal(1, #journal.runs(app) / 2)
  end)

  it("is refused, by SQL and by handlers, when its topic is none", function()
    local text = "`not a topic!` is not a topic: use letters, digits, `.`, `_`, `-` or `:`"
    local app = start [[ tidemill.publish("not a topic!", {}) ]]
    assert.error_matches(function()
      journal.publish(app, "not a topic!")
    end, text, 1, true)
    local id = journal.publish(app, "t", "{}", "max_attempts => 1")
    local row = journal.wait_for_status(app, id, "failed")
    assert.truthy(row.error:find(text, 1, true), row.error)
    assert.equal(1, #app:ledger())
  end)

  it("brings its payload to the handler, whatever JSON it is", function()
    local payloads = {
      "{}", "[]", '{"a": {"b": [1, 2.5, null, true]}, "empty": [], "none": {}}', "[[], {}, [null]]", '"text"', '""',
      "0", "-1.5", "12345678901234567890", "1e400", "0.1", "true", "false", "null", '"\\u00e9 \\"quoted\\" \\n"',
      '{"ключ": "значение 🦀"}',
    }
    local app = start [[ journal.note(ctx.message_id .. " " .. tidemill.json.encode(payload)) ]]
    local sent = {}
    for _, payload in ipairs(payloads) do
      sent[journal.publish(app, "t", payload)] = payload
    end
    journal.wait_until_finished(app)
    for _, note in ipairs(journal.notes(app)) do
      local id, got = note:match "^(%S+) (.*)$"
      assert.equal("t", app.db:value("select $1::jsonb = $2::jsonb", sent[id], got), got)
      sent[id] = nil
    end
    assert.same({}, sent)
  end)

  it("too large, written by another program, fails saying so and is never delivered", function()
    local app = start("", { max_payload_bytes = 1000 })
    local id = app.db:value [[insert into tidemill.queue_message (topic, subscriber, payload)
      values ('t', 'work', to_jsonb(repeat('x', 1001))) returning id]]
    local row = journal.wait_for_status(app, id, "failed")
    assert.truthy(row.error:find("larger than max_payload_bytes", 1, true), row.error)
    assert.same({}, journal.runs(app))
  end)
end)

describe("a row written by hand", function()
  it("with the seed's columns only is run", function()
    local app = start(NOTE)
    local id = app.db:value [[insert into tidemill.queue_message
      (id, topic, subscriber, status, payload, attempts, available_at, published_by, created_at, updated_at)
      values (gen_random_uuid(), 't', 'work', 'pending', '{"a": 1}', 0, now(), 'somebody', now(), now())
      returning id]]
    assert.equal("1", journal.wait_for_status(app, id, "done").attempts)
    journal.assert_once_each(app, 1)
  end)
end)

describe("a row with values that no publish allows", function()
  it("does not stop the others", function()
    local app = start ""
    local columns = {
      headers = "jsonb_build_object('a', repeat('x', 70000))", attempts = "2147483647",
      published_by = "repeat('x', 100000)",
      created_at = "'infinity'", updated_at = "'-infinity'", crashes = "32767", errors = "'\"no list\"'",
      max_attempts = "-1", claimed_by = "'nobody'", claimed_at = "'-infinity'", processed_at = "null",
    }
    local ids = {}
    for name, value in pairs(columns) do
      ids[name] = app.db:value(([[insert into tidemill.queue_message (topic, subscriber, %s)
        values ('t', 'work', %s) returning id]]):format(name, value))
    end
    local plain = journal.publish(app, "t")
    journal.wait_until_finished(app)
    journal.wait_for_status(app, plain, "done")
    for name, id in pairs(ids) do
      local row = journal.row(app, id)
      assert.equal(name == "headers" and "failed" or "done", row.status, name)
      if name == "headers" then
        assert.equal("its headers are larger than 65536 bytes", row.error)
        assert.same({}, journal.begun(app, id))
      end
    end
  end)

  it("fails as any other when its handler does", function()
    local app = start([[ error "no" ]], { max_attempts = 1 })
    for column, value in pairs { attempts = "2147483647", errors = "'{\"a\": 1}'", crashes = "-1", attempts_ = "-7" } do
      app.db:query(([[insert into tidemill.queue_message (topic, subscriber, %s) values ('t', 'work', %s)]]):format(
        column:gsub("_$", ""), value))
    end
    journal.wait_until_finished(app)
    assert.equal(4, journal.count(app, "failed", "error like '%no%' and jsonb_array_length(errors) = 1"))
  end)
end)

describe("work is found", function()
  it("by the poll alone when notifications are off", function()
    local app = start(NOTE, { notify = false, poll_secs = 0.3 })
    assert.equal("0", app.db:value "select count(*) from pg_stat_activity where application_name = 'tidemill listen'")
    for _ = 1, 2 do
      journal.wait_for_status(app, journal.publish(app, "t", "{}", "notify => false"), "done")
    end
    journal.assert_once_each(app, 2)
  end)

  it("when it becomes due, and not before", function()
    local app = start [[ journal.note(payload.name) ]]
    journal.publish(app, "t", '{"name": "later"}', "delay => '1 hour'")
    local second = journal.publish(app, "t", '{"name": "second"}', "delay => '1.2 seconds'")
    local first = journal.publish(app, "t", '{"name": "first"}', "delay => '0.6 seconds'")
    journal.wait_for_status(app, first, "done")
    journal.wait_for_status(app, second, "done")
    assert.same({ "first", "second" }, journal.notes(app))
    assert.equal(0, #app:ledger "processed_at < available_at")
    assert.equal(1, journal.count(app, "pending"))
  end)

  it("although it was due long before the worker started", function()
    local app = start(NOTE)
    app:stop()
    local id = journal.publish(app, "t")
    app.db:query "update tidemill.queue_message set available_at = now() - interval '1 year'"
    app:start()
    journal.wait_for_status(app, id, "done")
  end)
end)

describe("a worker of one subscription", function()
  it("leaves the others to others", function()
    local app = journal.app {
      config = { subscribe = { t = { "first", "second" }, other = "second" } },
      handlers = { first = NOTE, second = NOTE },
    }
    app:start { "--only", "t/first" }
    app.db:query "select tidemill.publish('t'), tidemill.publish('other')"
    app:wait_until(function()
      return journal.count(app, "done") == 1
    end)
    assert.equal(2, journal.count(app, "pending"))
    app:start()
    journal.wait_until_finished(app)
    journal.assert_once_each(app, 3)
  end)
end)

describe("hundreds of lanes", function()
  it("are all served", function()
    local subscribe = {}
    for i = 1, 300 do
      subscribe["topic." .. i] = { work = { handler = "work" } }
    end
    local app = start("", { subscribe = subscribe })
    for _ = 1, 3 do
      app.db:query "select count(tidemill.publish('topic.' || i)) from generate_series(1, 300) as i"
    end
    journal.wait_until_finished(app)
    journal.assert_once_each(app, 900)
  end)
end)

describe("a storm of notifications", function()
  it("costs a handful of claims", function()
    local app = start([[ error "it tells the number of its claim" ]], { max_attempts = 1 })
    local worker = app.processes[1]
    worker:kill "STOP"
    app.db:exec [[do $$ begin
      for i in 1 .. 20000 loop perform pg_notify('tidemill_queue', 't'); commit; end loop;
    end $$]]
    worker:kill "CONT"
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    local claims = tonumber(row.errors:match '"by": "[^"#]*#(%d+)"')
    assert.truthy(claims < 200, claims .. " claims")
  end)
end)

describe("a handler publishes", function()
  it("with ctx:publish in the transaction of its own done", function()
    local app = start [[
      ctx:publish("after.one", { from = ctx.message_id })
      ctx:publish("after.two", { 1, 2 }, { priority = 3 })
    ]]
    local id = journal.publish(app, "t", "{}", "published_by => 'tester', headers => '{\"trace\": \"7\"}'")
    journal.wait_for_status(app, id, "done")
    local rows = app.db:query([[
      select m.topic, m.payload::text as payload, m.priority, m.published_by, m.headers::text as headers,
             m.xmin = source.xmin as together
        from tidemill.queue_message as m, tidemill.queue_message as source
       where source.id = $1 and m.topic like 'after.%' order by m.topic]], id)
    assert.same({
      {
        topic = "after.one", payload = ('{"from": "%s"}'):format(id), priority = "0", published_by = "tester",
        headers = '{"trace": "7"}', together = "t",
      },
      {
        topic = "after.two", payload = "[1, 2]", priority = "3", published_by = "tester",
        headers = '{"trace": "7"}', together = "t",
      },
    }, { rows[1], rows[2] })
  end)

  it("with ctx:publish nothing when it fails, and once when the retry succeeds", function()
    local app = start([[
      ctx:publish("after", { attempt = ctx.attempts })
      if ctx.attempts == 1 then error "first time" end
    ]], { retry_backoff_secs = 0 })
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
    local rows = app:ledger "topic = 'after'"
    assert.equal(1, #rows)
    assert.equal('{"attempt": 2}', rows[1].payload)
  end)

  it("with ctx:publish to its own subscribers, who then run", function()
    local app = start [[ if payload.left > 0 then ctx:publish("t", { left = payload.left - 1 }) end ]]
    journal.publish(app, "t", '{"left": 5}')
    app:wait_until(function()
      return journal.count(app, "done") == 6
    end, 30, "the chain of six is done")
    journal.assert_once_each(app, 6)
  end)

  it("with tidemill.publish at once, whatever becomes of the handler", function()
    local app = start([[
      local published = tidemill.publish("after", { a = 1 }, { dedupe_key = "k" })
      journal.note(tidemill.json.encode(published))
      error "and then it fails"
    ]], { max_attempts = 1 })
    journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    local rows = app:ledger "topic = 'after'"
    assert.equal(1, #rows)
    local note = journal.notes(app)[1]
    assert.equal("t", app.db:value(
      "select $1::jsonb = jsonb_build_object('id', $2::text, 'topic', 'after', 'delivered', 0, 'duplicate', false)",
      note, rows[1].id), note)
  end)

  it("with tidemill.publish in the name of whoever published the message, or in another", function()
    local app = start [[
      tidemill.publish "after"
      tidemill.publish("after", {}, { published_by = "bob" })
    ]]
    journal.wait_for_status(app, journal.publish(app, "t", "{}", "published_by => 'ann'"), "done")
    local by = {}
    for i, row in ipairs(app:ledger "topic = 'after'") do
      by[i] = row.published_by
    end
    assert.same({ "ann", "bob" }, by)
  end)

  it("something the database refuses, and fails for that reason", function()
    local app = start([[ ctx:publish("after", {}) ]], { max_attempts = 1 })
    app.db:exec [[
      create function refuse() returns trigger language plpgsql as 'begin raise ''not today''; end';
      create trigger refuse before insert on tidemill.queue_message for each row
        when (new.topic = 'after') execute function refuse();
    ]]
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    assert.equal("what the handler published was refused: not today", row.error)
    assert.equal(1, #app:ledger())
  end)
end)

describe("many messages", function()
  it("drain to the last one, each run exactly once", function()
    local app = start("", { executors = 2, batch = 500, concurrency = 250 })
    local count = 20000
    for _ = 1, 10 do
      journal.publish_many(app, "t", count / 10)
    end
    journal.wait_until_finished(app, 120)
    assert.equal(count, journal.count(app, "done", "attempts = 1 and error is null and claimed_by is null"))
    assert.equal(count, #app.db:query "select 1 from tidemill.queue_message")
    journal.assert_once_each(app, count)
  end)

  it("are shared by two workers without overlap", function()
    local app = start("tidemill.sleep(0.005)", { concurrency = 8, batch = 8 })
    app:start()
    journal.publish_many(app, "t", 1000)
    journal.wait_until_finished(app, 60)
    journal.assert_once_each(app, 1000)
    local pids = {}
    for _, run in ipairs(journal.begun(app)) do
      pids[run.pid] = true
    end
    local executors = 0
    for _ in pairs(pids) do
      executors = executors + 1
    end
    assert.equal(2, executors)
  end)
end)
