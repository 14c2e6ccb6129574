-- Publishing from a handler: with the message's own `done` by ctx:publish, at once by tidemill.publish.

local executor = require "spec.support.executor"
local json = require "tidemill.json"

local start = executor.with_handler

-- The outcome of one delivery to a handler with this body.
local function outcome_of(body, fields)
  return executor.with_handler(body):handle(fields)
end

-- What a handler with this body publishes together with its `done`, decoded.
local function published_by(body, fields)
  local outcome = outcome_of(body, fields)
  assert.equal("done", outcome.kind, outcome.error)
  return outcome.publications and json.decode(outcome.publications)
end

describe("a handler", function()
  after_each(executor.stop_all)

  -- ---- publishing -------------------------------------------------------------------------------

  describe("publishes", function()
    it("with the message's done what ctx:publish gathered, in its order", function()
      assert.same({
        { topic = "a.b", message = { x = 1 } },
        { topic = "c", message = {} },
        { topic = "d", message = json.null },
        { topic = "e", message = "text" },
      }, published_by [[
        ctx:publish("a.b", { x = 1 })
        ctx:publish(" c ")
        tidemill.sleep(0)
        ctx:publish("d", tidemill.null)
        ctx:publish("e", "text")
      ]])
    end)

    it("with published_by and headers carried on, unless told otherwise", function()
      assert.same({
        { topic = "a", message = {}, published_by = "ann", headers = { trace = "t1", list = json.array {} } },
        { topic = "b", message = {}, published_by = "bob", headers = { other = 1 } },
      }, published_by([[
        ctx:publish("a")
        ctx:publish("b", {}, { published_by = "bob", headers = { other = 1 } })
      ]], { published_by = "ann", headers = '{"trace": "t1", "list": []}' }))
    end)

    it("with every option", function()
      assert.same({ {
        topic = "a", message = {}, at = "2030-01-01T00:00:00Z", dedupe_key = "k", max_attempts = 3,
        on_duplicate = "replace", priority = -9,
      }, {
        topic = "b", message = {}, at = "2023-11-14T22:13:20.250000Z",
      }, {
        topic = "c", message = {}, delay_secs = 1.5,
      } }, published_by [[
        ctx:publish("a", {}, { at = "2030-01-01T00:00:00Z", dedupe_key = "k", max_attempts = 3,
          on_duplicate = "replace", priority = -9 })
        ctx:publish("b", nil, { at = 1700000000.25 })
        ctx:publish("c", nil, { delay_secs = 1.5 })
      ]])
    end)

    it("nothing when the attempt fails or is ended otherwise", function()
      for _, ending in ipairs { "error 'x'", "ctx:retry(1)", "ctx:snooze(1)", "ctx:discard()" } do
        local run = start("if payload.first then ctx:publish('a') " .. ending .. " end")
        assert.is_nil(run:handle({ payload = '{"first": true}' }).publications)
        assert.is_nil(run:handle().publications)
      end
    end)

    it("nothing wrong: each mistake raises at the handler's line and names itself", function()
      for arguments, expected in pairs {
        [""] = "topic: expected a text, found nothing",
        ["5"] = "topic: expected a text, found 5",
        ["'not a topic!'"] = "`not a topic!` is not a topic: use letters",
        ["'a', print"] = "payload: a function cannot be written",
        ["'a', { b = { 1, { c = 0/0 } } }"] = "payload.b%[2%].c: ",
        ["'a', {}, 5"] = "options: expected a table or nothing, found 5",
        ["'a', {}, { delay = 5 }"] = "options: \"delay\" is unknown, known are at, dedupe_key, delay_secs, ",
        ["'a', {}, { delay_secs = -1 }"] = "options.delay_secs: expected seconds from 0 to 3153600000, found %-1",
        ["'a', {}, { delay_secs = 1, at = 5 }"] = "options: give `at` or `delay_secs`, not both",
        ["'a', {}, { at = {} }"] = "options.at: expected a time with its zone, such as .* found a table",
        ["'a', {}, { at = '2030-01-01T08:00' }"] = "options.at: expected a time with its zone, such as ",
        ["'a', {}, { at = -1 }"] = "options.at: expected a number from 0 to 253402300799, found %-1",
        ["'a', {}, { priority = 10 }"] = "options.priority: expected a whole number from %-9 to 9, found 10",
        ["'a', {}, { priority = 1.5 }"] = "options.priority: expected a whole number from %-9 to 9, found 1.5",
        ["'a', {}, { max_attempts = 0 }"] = "options.max_attempts: expected a whole number from 1 to 32767, found 0",
        ["'a', {}, { dedupe_key = '' }"] = "options.dedupe_key: expected a text, found \"\"",
        ["'a', {}, { on_duplicate = 'drop' }"] = 'options.on_duplicate: expected "keep" or "replace", found "drop"',
        ["'a', {}, { dedupe_key = ('é'):rep(501) }"] = "options.dedupe_key: has 501 characters, at most 500 are",
        ["'a', {}, { published_by = 5 }"] = "options.published_by: expected a text, found 5",
        ["'a', {}, { headers = 'x' }"] = "options.headers: expected a table, found \"x\"",
        ["'a', {}, { headers = { 1 } }"] = "options.headers: expected a table with names as keys, found a list",
        ["'a', {}, { headers = { f = ('x'):rep(65536) } }"] = "options.headers: has 65544 bytes as JSON, at most 65536",
        ["'a', {}, { headers = { f = print } }"] = "options.headers.f: a function cannot be written",
      } do
        local colon = outcome_of(("ctx:publish(%s)"):format(arguments))
        assert.equal("raised", colon.kind)
        assert.matches("^handlers/h.lua:3: ctx:publish: " .. expected, colon.error)
        local plain = outcome_of(("tidemill.publish(%s)"):format(arguments))
        assert.matches("^handlers/h.lua:3: tidemill.publish: " .. expected, plain.error)
      end
    end)

    it("at once by tidemill.publish: a request, and its reply as a table", function()
      local run = start [[
        local reply = tidemill.publish("a.b", { x = tidemill.null }, { priority = 1 })
        ctx:discard(tidemill.json.encode { reply.id, reply.topic, reply.delivered, reply.duplicate })
      ]]
      local ticket = run:deliver { published_by = "ann" }
      local request = run:request()
      assert.equal(ticket, request.ticket)
      assert.equal("ann", request.published_by)
      assert.same({ op = "publish", topic = "a.b", message = { x = json.null }, priority = 1 },
        json.decode(request.body))
      run:reply(request.request, true, '{"id": "i", "topic": "a.b", "delivered": 2, "duplicate": false}')
      assert.equal('["i","a.b",2,false]', run:outcome(ticket).error)
    end)

    it("under the message's published_by, or under the one that the handler names", function()
      local run = start "tidemill.publish('a', {}, payload)"
      for options, by in pairs { ["{}"] = "ann", ['{"published_by": "bob"}'] = false } do
        local ticket = run:deliver { published_by = "ann", payload = options }
        local request = run:request()
        assert.equal(by or nil, request.published_by)
        assert.equal(not by and "bob" or nil, json.decode(request.body).published_by)
        run:reply(request.request, true, "{}")
        assert.equal("done", run:outcome(ticket).kind)
      end
    end)

    it("and raises the reply's error at the handler's line, to be caught or not", function()
      local run = start [[
        if payload.catch then ctx:discard(select(2, pcall(tidemill.publish, "a"))) end
        tidemill.publish "a"
      ]]
      local ticket = run:deliver {}
      run:reply(run:request().request, false, "the database refused it")
      assert.matches("^handlers/h.lua:4: the database refused it\nstack traceback", run:outcome(ticket).error)
      ticket = run:deliver { payload = '{"catch": true}' }
      run:reply(run:request().request, false, "no \255\0 text")
      assert.equal("no \255\0 text", run:outcome(ticket).error)
      ticket = run:deliver {}
      run:reply(run:request().request, true, "no JSON")
      assert.matches("publish: the reply cannot be read", run:outcome(ticket).error)
    end)

    it("from many deliveries at a time, each with its own reply", function()
      local run = start "ctx:discard(tidemill.publish('a', payload).id)"
      local tickets, numbers = {}, {}
      for i = 1, 100 do
        tickets[i] = run:prepare { payload = tostring(i) }
        numbers[tickets[i]] = i
      end
      run:flush()
      local requests = {}
      for i = 1, 100 do
        requests[i] = run:request()
      end
      for i = 100, 1, -1 do
        run:reply(requests[i].request, true, ('{"id": "%d"}'):format(json.decode(requests[i].body).message))
      end
      for _, ticket in ipairs(tickets) do
        assert.equal(tostring(numbers[ticket]), run:outcome(ticket).error)
      end
    end)

    it("and drops the reply of a delivery that is over, or that nobody asked for", function()
      local run = start("ctx:discard(tidemill.publish('a').id)", { settings = "timeout_secs = 0.2," })
      local ticket = run:deliver {}
      local request = run:request()
      assert.matches("^handler exceeded", run:outcome(ticket).error)
      local other = run:deliver {}
      local second = run:request()
      run:reply(request.request, true, '{"id": "late"}')
      run:reply(12345, true, "{}")
      run:reply(second.request, true, '{"id": "own"}')
      run:reply(second.request, true, '{"id": "twice"}')
      assert.equal("own", run:outcome(other).error)
    end)
  end)
end)
