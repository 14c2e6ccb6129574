-- tidemill.testing in itself: what a run tells, virtual time, modules, and mistakes in specs. That it tells the
-- truth is for spec/e2e/testing_conformance_spec.lua to prove.

local folder = require "spec.support.folder"
local plain = require "spec.support.plain"
local process = require "spec.support.process"
local lfs = require "lfs"
local testing = require "tidemill.testing"
local tidemill = require "tidemill"

before_each(testing.reset)

describe("testing.run", function()
  it("tells what the handler did", function()
    local run = testing.run(function(order, ctx)
      tidemill.sleep(2.5)
      ctx:log("packed", { order = order.id })
      ctx:publish("order.shipped", { id = order.id }, { priority = -1 })
      tidemill.publish("audit.note")
      return order.id
    end, { id = 7 })
    assert.same({ "done", "done", 7, 2.5 }, { run.outcome, run.status, run.result, run.elapsed_secs })
    assert.is_nil(run.error)
    assert.same({
      { topic = "order.shipped", payload = { id = 7 }, options = { priority = -1 } },
      { topic = "audit.note", payload = {}, options = {}, at_once = true },
    }, run.published)
    assert.same({ { level = "info", event = "log", text = "packed", fields = { order = 7 } } }, run.log)
  end)

  it("tells what becomes of the message", function()
    for _, case in ipairs {
      { "error 'x'", 1, "raised", "pending" }, { "error 'x'", 3, "raised", "failed" },
      { "ctx:retry(1)", 2, "retry", "pending" }, { "ctx:retry(1)", 3, "retry", "failed" },
      { "ctx:snooze(1)", 3, "snooze", "pending" }, { "ctx:discard()", 1, "discard", "discarded" },
      { "", 3, "done", "done" },
    } do
      local handler = loadstring("local _, ctx = ... " .. case[1])
      local run = testing.run(handler, {}, { attempts = case[2], max_attempts = 3 })
      assert.same({ case[3], case[4] }, { run.outcome, run.status })
    end
  end)

  it("gives the handler a message as it comes from the queue, not the spec's own tables", function()
    local given = { list = tidemill.array(), number = 0.1, at = { { 1 } } }
    local seen
    testing.run(function(payload) seen = payload payload.mark = true end, given)
    assert.is_nil(given.mark)
    assert.is_true(tidemill.json.is_array(seen.list))
    testing.run(function(payload) seen = payload end)
    assert.same({}, seen)
    testing.run(function(payload) seen = payload end, tidemill.null)
    assert.equal(tidemill.null, seen)
  end)

  it("says what the message has as the options say", function()
    local fields = {}
    testing.run(function(_, ctx)
      for name, value in pairs(ctx) do fields[name] = value end
    end, {}, {
      topic = " order.paid ", subscriber = "s", app = "shop", attempts = 2, max_attempts = 9, priority = 3,
      published_by = "ann", headers = { trace = "t" }, message_id = "id", generation = 4, now = 1700000000.5,
      timeout_secs = 20,
    })
    assert.same({
      event = "message", topic = "order.paid", subscriber = "s", app = "shop", attempts = 2, max_attempts = 9,
      priority = 3, published_by = "ann", principal_id = "ann", headers = { trace = "t" }, message_id = "id",
      generation = 4, deadline = 1700000020.5, created_at = "2023-11-14T22:13:20.500000Z", raw = "{}",
    }, fields)
  end)

  it("tells a handler of dead letters what it is, and wraps it in the middleware beside it", function()
    local run = testing.run({
      around = { function(next, payload, ctx) return { ctx.event, next(payload, ctx) } end },
      handle = function(payload) return payload.error end,
    }, { error = "x" }, { event = "failed" })
    assert.same({ "failed", "x" }, run.result)
  end)

  it("takes the options beside a module's handle", function()
    local max_attempts, left
    local module = { max_attempts = 2, timeout_secs = 5, handle = function(_, ctx)
      max_attempts, left = ctx.max_attempts, ctx.deadline - tidemill.now()
    end }
    testing.run(module)
    assert.same({ 2, 5 }, { max_attempts, left })
    testing.run(module, {}, { max_attempts = 4 })
    assert.equal(4, max_attempts)
  end)
end)

describe("the ops of a spec", function()
  it("are those of an executor", function()
    local real = {}
    for name in lfs.dir "src/executor" do
      if name:find "^op.*%.c$" then
        for op in folder.read("src/executor/" .. name):gmatch '{ "(%l+)", [%l_]+_start, ' do
          real[op] = true
        end
      end
    end
    assert.is_true(real.sleep and real.query and real.http)
    local mine = {}
    for op in pairs(require "tidemill.testing.ops") do
      mine[op] = true
    end
    assert.same(real, mine)
  end)
end)

describe("time in a spec", function()
  it("passes while a handler waits, and only then", function()
    local run = testing.run(function()
      local t, os_time = tidemill.now(), os.time()
      for _ = 1, 1000 do tidemill.sleep(0.25) end
      return { tidemill.now() - t, os.time() - os_time, os.date("!%Y", 0), os.date "!%Y-%m-%d" }
    end, {}, { now = 1700000000 })
    assert.same({ 250, 250, "1970", "2023-11-14" }, run.result)
    assert.equal(250, run.elapsed_secs)
    assert.is_true(math.abs(tidemill.now() - os.time()) < 60)
  end)

  it("ends a handler at its limit, however long it would have slept", function()
    local tidied
    local run = testing.run(function(_, ctx)
      ctx:publish("a")
      pcall(tidemill.sleep, 3600)
      tidied = tidemill.now()
      tidemill.sleep(1)
      tidied = nil
    end, {}, { now = 1000, timeout_secs = 20 })
    assert.equal("raised", run.outcome)
    assert.matches("^handler exceeded its time limit of 20 s\nstack traceback:\n", run.error)
    assert.matches("testing_spec.lua:%d+: in function 'handler'", run.error)
    assert.same({ 1020, 20, {} }, { tidied, run.elapsed_secs, run.published })
    assert.equal("done", testing.run(function() tidemill.sleep(20) end, {}, { timeout_secs = 20 }).outcome)
  end)

  it("can be moved on while the handler computes", function()
    local function compute()
      testing.advance(30)
      return tidemill.now()
    end
    assert.equal("done", testing.run(compute, {}, { timeout_secs = 20 }).outcome)
    local run = testing.run(function() compute() tidemill.sleep(0) end, {}, { timeout_secs = 20 })
    assert.matches("^handler exceeded", run.error)
    assert.error_matches(function() testing.advance(1) end, "testing.advance: no handler runs")
  end)
end)

describe("testing.publish", function()
  it("says what tidemill.publish answers", function()
    testing.publish("a", { delivered = 0 })
    testing.publish("b", function(payload, options)
      return { id = payload.id .. options.dedupe_key, duplicate = true }
    end)
    local run = testing.run(function()
      local a, b = tidemill.publish "a", tidemill.publish("b", { id = "x" }, { dedupe_key = "k" })
      return { a.topic, a.delivered, a.duplicate, b.id, b.duplicate, b.delivered }
    end)
    assert.same({ "a", 0, false, "xk", true, 1 }, run.result)
    testing.reset()
    assert.equal(1, testing.run(function() return tidemill.publish("a").delivered end).result)
  end)

  it("may refuse, and then nothing is published", function()
    testing.publish("a", function() return nil, "the database refused it" end)
    local run = testing.run(function() tidemill.publish "a" end)
    assert.matches("testing_spec.lua:%d+: the database refused it\nstack", run.error)
    assert.same({}, run.published)
  end)

  it("leaves an assertion that fails inside of it to the spec, whatever the handler catches", function()
    testing.publish("a", function(payload) assert.equal(1, payload.n) end)
    assert.error_matches(function()
      testing.run(function() pcall(tidemill.publish, "a", { n = 2 }) end)
    end, "testing_spec.lua:%d+: Expected objects to be equal")
    -- And the next run is as good as new.
    assert.equal("done", testing.run(function() tidemill.publish("a", { n = 1 }) end).outcome)
  end)
end)

describe("testing.query", function()
  local function update()
    local rows = tidemill.query("update orders\n   set shipped_at = now()\n where id = $1", 7)
    return rows
  end

  it("answers statements, however they are broken into lines, and tells what was asked", function()
    testing.query("update orders set shipped_at", { affected = 1 })
    testing.query("select (.*) from orders", function(id) return { { id = id, sku = "a" }, { id = id } } end)
    local run = testing.run(function()
      local rows = tidemill.query("select id, sku from orders where id > $1", 5)
      rows[1].sku = "spoilt"
      return { update().affected, rows[2].id, rows.affected, rows.fields, #tidemill.query("select id from orders") }
    end)
    assert.same({ 1, 5, 2, { "id", "sku" }, 2 }, run.result)
    assert.same({
      { sql = "select id, sku from orders where id > $1", arguments = { n = 1, 5 } },
      { sql = "update orders set shipped_at = now() where id = $1", arguments = { n = 1, 7 } },
      { sql = "select id from orders", arguments = { n = 0 } },
    }, run.queries)
  end)

  it("tells a transaction with its statements, and publishes what was committed", function()
    testing.query("select 1", {})
    local run = testing.run(function()
      tidemill.transaction(function(tx) tx:query("select 1") tx:publish("kept", { 1 }) end)
      pcall(tidemill.transaction, function(tx) tx:publish("lost") error "no" end)
      tidemill.publish_many { { topic = "many", payload = 1 }, { topic = "many", payload = 2 } }
    end, {}, { published_by = "ann" })
    local texts = {}
    for i, query in ipairs(run.queries) do
      texts[i] = query.transaction .. " " .. query.sql
    end
    assert.same({ "1 BEGIN", "1 select 1", "1 COMMIT", "2 BEGIN", "2 ROLLBACK" }, texts)
    local ann = { published_by = "ann" }
    assert.same({
      { topic = "kept", payload = { 1 }, options = ann, at_once = true },
      { topic = "many", payload = 1, options = ann, at_once = true },
      { topic = "many", payload = 2, options = ann, at_once = true },
    }, run.published)
  end)

  it("publishes nothing of a transaction that the handler's end cuts short", function()
    for _, ending in ipairs { "ctx:retry(5)", "tidemill.sleep(600)" } do
      local body = loadstring("local tidemill, ctx = ... return function(tx) tx:publish('lost') " .. ending .. " end")
      local run = testing.run(function(_, ctx) tidemill.transaction(body(tidemill, ctx)) end)
      assert.same({}, run.published)
    end
  end)

  it("may refuse, and may refuse a commit", function()
    testing.query("update orders", function() return nil, { message = "deadlock detected", sqlstate = "40P01" } end)
    assert.matches("testing_spec.lua:%d+: deadlock detected %(SQLSTATE 40P01%)\nstack", testing.run(update).error)
    testing.query("update orders", function() return nil, "plain" end)
    assert.matches("testing_spec.lua:%d+: plain\nstack", testing.run(update).error)
    local tries = 0
    testing.query("^COMMIT$", function()
      tries = tries + 1
      return nil, { message = "could not serialize access", sqlstate = "40001" }
    end)
    local run = testing.run(function(_, ctx) ctx:finish(function(tx) tx:publish "a" end, { retries = 2 }) end)
    assert.same({ "raised", 3, {} }, { run.outcome, tries, run.published })
  end)

  it("may be a commit that perhaps took place, behind which ctx:finish goes on in no case", function()
    local told = { message = "whether the statement took effect is unknown", lost = true, unknown = true }
    testing.query("^COMMIT$", function() return nil, told end)
    local run = testing.run(function(_, ctx)
      ctx:publish "a"
      pcall(ctx.finish, ctx, function(tx) tx:publish "b" end)
      print "never"
    end)
    assert.same({ "raised", "pending", {}, {} }, { run.outcome, run.status, run.published, run.log })
    assert.matches("^whether the statement took effect is unknown\nstack traceback:\n", run.error)
    run = testing.run(function() return { pcall(tidemill.transaction, function() end) } end)
    assert.same({ "done", true }, { run.outcome, run.result[2].unknown })
  end)

  it("publishes nothing of what a savepoint takes back", function()
    local run = testing.run(function()
      tidemill.transaction(function(tx)
        tx:publish "kept"
        tx:query "savepoint a"
        tx:publish "taken.back"
        tidemill.publish "at.once"
        tx:query "rollback to savepoint a"
        tx:publish "kept.too"
      end)
    end)
    local topics = {}
    for i, message in ipairs(run.published) do
      topics[i] = message.topic
    end
    assert.same({ "kept", "at.once", "kept.too" }, topics)
  end)

  it("says what to write for a statement that no stub answers, whatever the handler catches", function()
    local _, err = pcall(function()
      testing.run(function() pcall(update) end)
    end)
    local statement = "update orders set shipped_at = now() where id = $1"
    local told = "testing.run: no stub answers the statement %s: say what it gives by testing.query(\"%s\", {})\nstack "
    assert.truthy(err:find(told:format(statement, statement), 1, true), err)
  end)

  it("refuses an answer that is none", function()
    for _, case in ipairs {
      { { "a", 5 }, "expected a table or a function" },
      { { "a", { rows = 1 } }, '"rows" is unknown: expected a list of rows, with `affected` and `fields`' },
      { { "a", { 5 } }, "row 1: expected a table by column name, found 5" },
      { { "a", { affected = -1 } }, "affected: expected a whole number from 0" },
    } do
      local _, err = pcall(function() testing.query(unpack(case[1], 1, 2)) end)
      assert.matches("^spec/lua/testing_spec.lua:%d+: testing.query: " .. case[2], err)
    end
    testing.query("update", function() return 5 end)
    local _, err = pcall(testing.run, update)
    assert.matches("^testing.run: the stub that answers the statement .*: expected a list of rows, found 5", err)
  end)
end)

describe("testing.http", function()
  local function get()
    return tidemill.http.get "https://a.example/x?key=1"
  end

  it("answers what is asked, the latest stub first, and tells what was asked", function()
    testing.http("a.example", { status = 503 })
    testing.http("POST https://a.example/orders", {
      status = 201, json = { id = 5 }, headers = { etag = "e" }, secs = 2,
    })
    local run = testing.run(function()
      local made = tidemill.http.post("https://a.example/orders", {
        json = { n = 1 }, headers = { ["X-Key"] = "k", accept = { "a", "b" } } })
      return { made.status, made:json().id, made.headers.etag, made.headers["content-type"], get().status }
    end)
    assert.same({ 201, 5, "e", "application/json", 503 }, run.result)
    assert.equal(2, run.elapsed_secs)
    assert.same({
      { method = "POST", url = "https://a.example/orders", body = '{"n":1}', json = { n = 1 },
        headers = { ["x-key"] = "k", accept = { "a", "b" }, ["content-type"] = "application/json" } },
      { method = "GET", url = "https://a.example/x?key=1", headers = {} },
    }, run.requests)
  end)

  it("may be a pattern, and a function that fails at first", function()
    local calls = 0
    testing.http("^GET .*[?]key=%d$", function(request)
      calls = calls + 1
      if calls == 1 then
        return nil, "cannot connect: Connection refused"
      end
      return { body = request.url }
    end)
    assert.matches("^[^\n]*GET https://a.example/x: cannot connect: Connection refused\n", testing.run(get).error)
    assert.equal("done", testing.run(get).outcome)
  end)

  it("says what to write for a request that no stub answers, whatever the handler catches", function()
    local _, err = pcall(function()
      testing.run(function() pcall(get) end)
    end)
    local told = 'testing.run: no stub answers the request GET https://a.example/x?key=1: say what it gives by '
      .. 'testing.http("GET https://a.example/x", { status = 200, json = {} })\nstack traceback:\n'
    assert.truthy(err:find(told, 1, true), err)
    assert.matches("\nstack traceback:\n[^\n]*\n[^\n]*testing_spec.lua:%d+: in function 'handler'", err)
  end)

  it("refuses an answer that is none", function()
    for _, case in ipairs {
      { { "", {} }, "expected a part of METHOD URL" },
      { { "a" }, "expected a table or a function" },
      { { "a", { state = 200 } }, '"state" is unknown, known are body, headers, json, secs, status' },
      { { "a", { status = 99 } }, "status: expected a whole number from 100 to 599, found 99" },
      { { "a", { body = "x", json = 1 } }, "give `body` or `json`, not both" },
      { { "a", { json = { print } } }, "json%[1%]: a function cannot be written" },
    } do
      local _, err = pcall(function() testing.http(unpack(case[1], 1, 2)) end)
      assert.matches("^spec/lua/testing_spec.lua:%d+: testing.http: " .. case[2], err)
    end
    testing.http("a.example", function() return { status = "200" } end)
    local _, err = pcall(testing.run, get)
    assert.matches("^testing.run: the stub that answers the request GET %S+: status: expected a whole number", err)
  end)
end)

describe("a mistake in a spec", function()
  it("is told at the spec's line", function()
    local function noop() end
    for _, case in ipairs {
      { { { handler = noop } }, ".* a module's name; found `handler`, write `handle`" },
      { { 5 }, "a handler is a function, a table with a function `handle`, or a module's name; found 5" },
      { { {} }, "a handler is a function, .* found a table" },
      { { noop, print }, "payload: a function cannot be written" },
      { { noop, {}, 5 }, "options: expected a table or nothing, found 5" },
      { { noop, {}, { attempt = 1 } }, 'options: "attempt" is unknown, known are app, attempts, ' },
      { { noop, {}, { attempts = 0 } }, "options.attempts: expected a whole number from 1 to 32767, found 0" },
      { { noop, {}, { topic = "no topic!" } }, "options.topic: `no topic!` is not a topic" },
      { { noop, {}, { headers = { a = print } } }, "options.headers.a: a function cannot be written" },
      { { noop, {}, { published_by = 5 } }, "options.published_by: expected a text, found 5" },
      { { noop, {}, { timeout_secs = 0 } }, "options.timeout_secs: expected " },
    } do
      local _, err = pcall(function() testing.run(unpack(case[1], 1, 3)) end)
      assert.matches("^spec/lua/testing_spec.lua:%d+: testing.run: " .. case[2], err)
    end
    assert.error_matches(function() testing.publish("", {}) end, "testing.publish: expected a topic")
    assert.error_matches(function() testing.publish("a", 5) end, "testing.publish: expected a table or a function")
    assert.error_matches(function() testing.advance(-1) end, "testing.advance: expected seconds")
  end)

  it("is a handler inside of a handler", function()
    local run = testing.run(function() testing.run(function() end) end)
    assert.matches("testing.run: a handler runs already: one at a time", run.error)
    assert.equal("done", testing.run(function() end).outcome)
  end)
end)

describe("the surroundings of a spec", function()
  it("are the handler's while it runs, and the spec's own before and after", function()
    local before = { print, os.exit, os.setlocale, os.time, debug.getmetatable(_G), string.format }
    local run = testing.run(function()
      print("to the log")
      string.format = nil -- luacheck: ignore 122
      _G.testing_spec_global = true
      os.exit(1)
    end)
    assert.matches("os.exit would end every delivery", run.error)
    assert.same({ "print", "global_written" }, { run.log[1].event, run.log[2].event })
    assert.matches("^spec/lua/testing_spec.lua:%d+$", run.log[2].fields.at)
    assert.same(before, { print, os.exit, os.setlocale, os.time, debug.getmetatable(_G), string.format })
    _G.testing_spec_global = nil
  end)
end)

describe("handlers by name", function()
  local dir

  before_each(function()
    dir = folder.temp "tidemill-testing"
  end)
  after_each(function()
    folder.remove(dir)
  end)

  -- Runs a script in a folder of its own, in plain luajit.
  local function luajit(script)
    local result = process.run {
      argv = { "luajit", "-e", 'local testing = require "tidemill.testing"\n' .. script },
      cwd = dir,
      env = plain.env(),
    }
    assert.equal("", result.stderr)
    return result.stdout
  end

  it("are found in the folder `handlers`, with the modules they share, and forgotten by reset", function()
    folder.write(dir, "handlers/crm/sync.lua", [[
      local shared = require "shared"
      return { max_attempts = 3, handle = function(_, ctx)
        shared.count = shared.count + 1
        return ctx.subscriber .. " " .. shared.count .. " of " .. ctx.max_attempts
      end }]])
    folder.write(dir, "handlers/shared.lua", "return { count = 0 }")
    assert.equal("crm.sync 1 of 3\ncrm.sync 2 of 3\ncrm.sync 1 of 3\n", luajit [[
      print(testing.run("crm.sync").result)
      print(testing.run("crm.sync").result)
      testing.reset()
      print(testing.run("crm.sync").result)
    ]])
  end)

  it("are said to be missing", function()
    assert.equal("testing.run: module `not.here` not found: looked for handlers/not/here.lua and "
      .. "handlers/not/here/init.lua, and in package.path\n", luajit 'print(select(2, pcall(testing.run, "not.here")))')
    folder.write(dir, "handlers/broken.lua", "return {")
    assert.matches("^error loading module 'broken' from file '%./handlers/broken.lua':.*unexpected symbol near", luajit
      'print(select(2, pcall(testing.run, "broken")))')
  end)

  it("work beside handlers that keep coroutine functions in locals", function()
    folder.write(dir, "handlers/kept.lua", [[
      local wrap, tidemill = coroutine.wrap, require "tidemill"
      return function() return wrap(function() tidemill.sleep(1) return "woke" end)() end]])
    assert.equal("woke\n", luajit 'print(testing.run("kept").result)')
  end)

  it("are those of a config, with what it says of them", function()
    folder.write(dir, "config.lua", [[
      return {
        app = "shop", max_attempts = 4, handlers = "src",
        around = function(next, payload, ctx) return "around " .. next(payload, ctx) end,
        subscribe = {
          ["order.paid"] = { "ship", tell = { handler = "ship", timeout_secs = 7 } },
          ["order.sent"] = "ship",
        },
        on_failed = { report = function(dead, ctx) return ctx.event .. " " .. ctx.topic .. " " .. dead.error end },
      }]])
    folder.write(dir, "src/ship.lua", [[
      local t = require "tidemill"
      return { max_attempts = 9, handle = function(_, ctx)
        return ("%s %s %s %d %g"):format(ctx.app, ctx.topic, ctx.subscriber, ctx.max_attempts, ctx.deadline - t.now())
      end }]])
    assert.equal("around shop order.paid tell 9 7\naround shop order.sent ship 9 300\n"
      .. "around shop order.paid tell 3 7\naround failed tidemill.failed:shop late\n", luajit [[
      local config = { config = "config.lua" }
      print(testing.run("tell", {}, config).result)
      print(testing.run("order.sent/ship", {}, config).result)
      print(testing.run("tell", {}, { config = "config.lua", max_attempts = 3 }).result)
      print(testing.run("report", { error = "late" }, config).result)
    ]])
    assert.equal("1 false\n2 false\n", luajit [[
      for i, name in ipairs { "ship", "nothere" } do
        local ok, err = pcall(testing.run, name, {}, { config = "config.lua" })
        assert(err == "testing.run: `ship` may mean several subscriptions: name one of order.paid/ship, "
          .. "order.sent/ship in config.lua"
          or err == "testing.run: there is no subscriber `nothere` in config.lua", err)
        print(i .. " " .. tostring(ok))
      end]])
  end)

  it("are refused with all that is wrong with their config", function()
    folder.write(dir, "config.lua", "return {\n max_attempts = 0, subscribe = { a = 'nothere' },\n}")
    assert.matches("^false\ttesting.run: config.lua:2: max_attempts: expected a whole number .*\n"
      .. "config.lua:2: subscribe.a: module `nothere` not found", luajit [[
      print(pcall(testing.run, "nothere", {}, { config = "config.lua" }))
    ]])
    assert.matches("^false\ttesting.run: nowhere.lua: No such file", luajit [[
      print(pcall(testing.run, "x", {}, { config = "nowhere.lua" }))
    ]])
    assert.matches("^false\ttesting.run: with `config` a handler is a subscriber's name, found a function", luajit [[
      print(pcall(testing.run, print, {}, { config = "config.lua" }))
    ]])
  end)
end)
