-- `on_failed`: whatever makes a message a dead letter, the app's own handler is told, by a message that
-- is written in the same transaction.

local executor = require "spec.support.executor"
local foreign = require "spec.support.foreign"
local journal = require "spec.support.journal"
local json = require "tidemill.json"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local REPORT = [[ journal.note(tidemill.json.encode { event = ctx.event, topic = ctx.topic, told = payload,
  headers = ctx.headers, published_by = ctx.published_by }) ]]

-- An app with the handlers `work` on topic `t` and `report` on its dead letters; not started.
local function new_app(body, config)
  config = config or {}
  config.subscribe = config.subscribe or { t = "work" }
  config.on_failed = config.on_failed or "report"
  config.max_attempts = config.max_attempts or 1
  config.retry_backoff_secs = config.retry_backoff_secs or 0
  return journal.app { config = config, handlers = { work = body or "error 'no stock'", report = REPORT } }
end

local function notes(app)
  local list = {}
  for i, line in ipairs(journal.notes(app)) do
    list[i] = json.decode(line)
  end
  return list
end

-- What was told of a message, once `count` (1) tellings are there.
local function told_of(app, id, count)
  return app:wait_until(function()
    local found = {}
    for _, note in ipairs(notes(app)) do
      if note.told.id == id then
        table.insert(found, note)
      end
    end
    return #found >= (count or 1) and found[#found]
  end, 30, "the dead letter is told")
end

-- Neither more nor fewer were told, and they told their end.
local function assert_told(app, count)
  journal.wait_until_finished(app)
  assert.equal(count, #notes(app))
  assert.equal(count, journal.count(app, "done", "topic like 'tidemill.failed:%'"))
end

describe("a dead letter is told", function()
  it("when its handler is out of attempts: what, where, why, and how often", function()
    local app = new_app("error { code = 7 }", { max_attempts = 2 })
    app:start()
    local id = journal.publish(app, "t", '{"secret": 1}', [[published_by => 'ann', headers => '{"trace": "x"}']])
    local note = told_of(app, id)
    local row = journal.row(app, id)
    assert.same({ "failed", "tidemill.failed:app", "tidemill", { trace = "x" } },
      { note.event, note.topic, note.published_by, note.headers })
    local told = note.told
    assert.same({ id, "t", "work", "app", 2, 2, "ann" },
      { told.id, told.topic, told.subscriber, told.app, told.attempts, told.max_attempts, told.published_by })
    assert.equal(row.error, told.error)
    assert.same(json.decode(row.errors), told.errors)
    assert.equal(2, #told.errors)
    for _, name in ipairs { "created_at", "failed_at" } do
      assert.matches("^%d%d%d%d%-%d%d%-%d%dT%d%d:%d%d:%d%d%.%d%d%d%d%d%dZ$", told[name])
    end
    assert.equal("t", app.db:value([[select processed_at = $2::timestamptz and created_at = $3::timestamptz
      from tidemill.queue_message where id = $1]], id, told.failed_at, told.created_at))
    assert.is_nil(told.payload)
    assert_told(app, 1)
  end)

  it("when its handler crashes, hangs or runs too long", function()
    local app = new_app([[
      if payload.crash then journal.kill_myself() end
      if payload.hang then while true do end end
      tidemill.sleep(60)
    ]], { timeout_secs = 0.5, kill_grace_secs = 0.1 })
    app:start()
    for payload, expected in pairs {
      ['{"crash": 1}'] = "signal 9, SIGKILL", ['{"hang": 1}'] = "held the processor",
      ["{}"] = "exceeded its time limit",
    } do
      assert.matches(expected, told_of(app, journal.publish(app, "t", payload)).told.error)
    end
    assert_told(app, 3)
  end)

  it("when it was held by a worker that died, for the last time", function()
    local app = new_app("")
    app:start()
    app:stop()
    app.db:exec [[insert into tidemill.worker (id, app, lease_secs, lease_until)
      values ('gone', 'app', 1, now() - interval '1 min')]]
    local id = app.db:value [[insert into tidemill.queue_message (topic, subscriber, lane, status, attempts, claimed_by,
        claimed_at) select topic, subscriber, lane, 'running', 1, 'gone#1', now() - interval '2 min'
      from tidemill.subscription where topic = 't' returning id]]
    local unknown = app.db:value [[insert into tidemill.queue_message (topic, subscriber, lane, status, attempts,
        claimed_by, claimed_at) select topic, subscriber, lane, 'running', 1, 'nobody#1', now() - interval '2 h'
      from tidemill.subscription where topic = 't' returning id]]
    app:write_config((require("spec.support.folder").read(app.config_path):gsub('("lease_secs"%] =) 300', "%1 3")))
    app:start()
    for _, each in ipairs { id, unknown } do
      assert.equal("the subscriber holding this message stopped responding", told_of(app, each).told.error)
    end
    assert_told(app, 2)
  end)

  it("when no handler of its name is loaded any more: the apps are told that serve its topic", function()
    local app = new_app("", { lease_secs = 3 })
    local id
    app:start()
    id = app.db:value [[insert into tidemill.queue_message (topic, subscriber, updated_at)
      values ('t', 'gone', now() - interval '1 h') returning id]]
    local told = told_of(app, id).told
    assert.equal("`gone` is subscribed to `t` but no such handler is loaded", told.error)
    assert.same({ "app", json.null }, { told.app, told.max_attempts })
    assert_told(app, 1)
  end)

  it("when it is too large to be fetched", function()
    local app = new_app("", { max_payload_bytes = 4000 })
    app:start()
    local id = app.db:value [[insert into tidemill.queue_message (topic, subscriber, payload)
      values ('t', 'work', jsonb_build_object('text', repeat('x', 5000))) returning id]]
    assert.matches("larger than max_payload_bytes", told_of(app, id).told.error)
    assert_told(app, 1)
  end)

  it("in fewer words where payloads must be small", function()
    for _, case in ipairs { { 1200, "errors" }, { 300, "error" } } do
      local app = new_app("error(('x'):rep(3000))", { max_payload_bytes = case[1] })
      app:start()
      local id = journal.publish(app, "t")
      local told = told_of(app, id).told
      assert_told(app, 1)
      if case[2] == "errors" then
        assert.same({}, told.errors)
        assert.equal("t", told.topic)
        assert.is_true(#told.error > 400 and #told.error <= 500 + #"…")
      else
        assert.same({ id = id }, told)
      end
    end
  end)

  it("when a person writes the status by hand, whatever else the row holds", function()
    local app = new_app("")
    app:start()
    local id = journal.publish(app, "t", "{}", "delay => '1 h'")
    app.db:query([[update tidemill.queue_message set status = 'failed', processed_at = now(),
      error = repeat('é', 100000), errors = '"odd"', headers = '[1]', created_at = '-infinity' where id = $1]], id)
    local note = told_of(app, id)
    assert.is_true(#note.told.error <= 4003)
    assert.same({ {}, json.null }, { note.told.errors, note.told.created_at })
    assert.is_nil(note.headers)
    app.db:query("update tidemill.queue_message set status = 'failed', error = 'again' where id = $1", id)
    assert_told(app, 1)
  end)

  it("in the transaction that makes it one: both are written, or neither", function()
    local app = new_app("")
    app:start()
    local id = journal.publish(app, "t", "{}", "delay => '1 h'")
    app.db:exec "begin"
    app.db:query([[update tidemill.queue_message set status = 'failed', processed_at = now(), error = 'x'
      where id = $1]], id)
    assert.equal("1", app.db:value "select count(*) from tidemill.queue_message where topic <> 't'")
    app.db:exec "rollback"
    app:stop()
    assert.equal("0", app.db:value "select count(*) from tidemill.queue_message where topic <> 't'")
  end)

  it("by a role that may change the rows of the ledger, and nothing else here", function()
    local app = new_app("")
    app:start()
    local id = journal.publish(app, "t", "{}", "delay => '1 h'")
    local role = "spec_clerk_" .. app.admin.pid
    app.db:exec(([[create role %s; grant usage on schema tidemill to %s;
      grant select, update on tidemill.queue_message to %s; set role %s]]):format(role, role, role, role))
    app.db:query("update tidemill.queue_message set status = 'failed', processed_at = now(), error = 'x' where id = $1",
      id)
    app.db:exec(("reset role; drop owned by %s; drop role %s"):format(role, role))
    told_of(app, id)
  end)

  it("to a handler that may look its payload up", function()
    local app = new_app()
    app:write_handler("report", [[
      local tidemill = require "tidemill"
      return function(failed)
        local rows = tidemill.query("select payload from tidemill.queue_message where id = $1", failed.id)
        require "journal".note(rows[1].payload.text)
      end]])
    app:start()
    journal.publish(app, "t", '{"text": "five"}')
    app:wait_until(function() return journal.notes(app)[1] end, 30, "the dead letter is told")
    assert.equal("five", journal.notes(app)[1])
  end)

  it("again when it was retried and failed again", function()
    local app = new_app()
    app:start()
    local id = journal.publish(app, "t")
    told_of(app, id)
    app.db:query("select tidemill.retry($1)", id)
    assert.equal(2, #told_of(app, id, 2).told.errors)
    assert_told(app, 2)
  end)

  it("to each of several handlers, with options of their own", function()
    local app = new_app(nil, { on_failed = { "report", again = { handler = "flaky", max_attempts = 3 } } })
    app:write_handler("flaky", [[
      local journal = require "journal"
      return function(payload, ctx)
        if ctx.attempts < 3 then error "not yet" end
        journal.note(('{"told": {"id": "%s"}}'):format(payload.id))
      end]])
    app:start()
    told_of(app, journal.publish(app, "t"), 2)
    assert_told(app, 2)
  end)

  it("to its own app alone, though another names its handler the same", function()
    local app = new_app(nil, { app = "shop no. 1" })
    app:start()
    app:write("other/config.lua", [[return { app = "other", executors = 1, poll_secs = 3600, on_failed = "tell",
      subscribe = { u = { w = function() error "w" end } }, max_attempts = 1 }]])
    app:write("other/handlers/tell.lua", [[return function(payload, ctx)
      print(ctx.topic .. " " .. payload.app .. " " .. payload.subscriber) end]])
    app.config_path = app.dir .. "/other/config.lua"
    local other = app:start()
    local id = journal.publish(app, "t")
    journal.publish(app, "u")
    assert.equal("tidemill.failed:shop:20no.:201", told_of(app, id).topic)
    other:wait_for('event=print .*text="tidemill.failed:other other w"')
    journal.wait_until_finished(app)
    assert.equal(1, #notes(app))
    assert.equal(2, journal.count(app, "done"))
  end)
end)

describe("a dead letter about a dead letter", function()
  it("tells nobody, and is logged", function()
    local app = new_app(nil, { on_failed = { told = { handler = "report", max_attempts = 2 } } })
    app:write_handler("report", "return function() error 'the mail server is away' end")
    local worker = app:start()
    journal.publish(app, "t")
    worker:wait_for "event=message_failed message_id=%S+ topic=tidemill.failed:app subscriber=told attempt=2"
    app:stop()
    assert.equal("2", app.db:value "select count(*) from tidemill.queue_message where status = 'failed'")
    assert.equal("2", app.db:value "select count(*) from tidemill.queue_message")
  end)
end)

describe("an app without on_failed", function()
  it("is told nothing", function()
    local app = journal.app { config = { max_attempts = 1, subscribe = { t = "work" } },
      handlers = { work = "error 'x'" } }
    app:start()
    journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    assert.equal("1", app.db:value "select count(*) from tidemill.queue_message")
  end)
end)

describe("on_failed in a config", function()
  after_each(executor.stop_all)

  local function lanes(config)
    local list = {}
    local run = executor.start { config = config, handlers = { a = "return function() end" } }
    for i, lane in ipairs(run.manifest.lanes) do
      list[i] = ("%s %s %s"):format(lane.topic, lane.subscriber, lane.handler)
    end
    return list
  end

  it("is a name, a function, a list or a map", function()
    local topic = "tidemill.failed:app "
    assert.same({ topic .. "a a" }, lanes "return { on_failed = 'a' }")
    assert.same({ topic .. "on_failed function at config.lua:1" }, lanes "return { on_failed = function() end }")
    assert.same({ topic .. "a a", topic .. "b a" }, lanes "return { on_failed = { 'a', b = { handler = 'a' } } }")
    assert.same({ "tidemill.failed:caf:c3:a9.x a a" }, lanes "return { app = 'café.x', on_failed = 'a' }")
  end)

  it("that is wrong is reported, and so is another subscription to its topic", function()
    local run = executor.load { config = [[return {
  on_failed = { 5, x = { max_atempts = 3 } },
  subscribe = { ["tidemill.failed:app"] = "a" },
}]], handlers = { a = "return function() end", x = "return function() end" } }
    assert.equal(table.concat({
      "config.lua:2: on_failed[1]: a list holds modules' names, found 5; with a name before it: NAME = …",
      "config.lua:2: on_failed.x.max_atempts: unknown key, did you mean `max_attempts`?",
      'config.lua:3: subscribe["tidemill.failed:app"]: this topic is for dead letters: name their handler in '
        .. "`on_failed`",
    }, "\n"), run.load_error)
    run = executor.load { config = ("return {\n  app = '%s',\n  on_failed = 'a' }"):format(("é"):rep(40)) }
    assert.matches("^config.lua:3: on_failed: `app` is too long a name for it: ", run.load_error)
  end)

  it("is refused for a table of another program", function()
    local app = foreign.app { config = { subscribe = { t = "work" }, on_failed = "work" }, handlers = { work = "" } }
    local result = app:run "run"
    assert.equal(2, result.code)
    assert.matches("config.lua: on_failed: not available: the table ", result.stderr)
  end)
end)
