-- Deliveries in an executor: what a handler is given, how each way to end becomes an outcome, and what
-- it finds around it.

local executor = require "spec.support.executor"
local process = require "spec.support.process"
local json = require "tidemill.json"

local start = executor.with_handler

-- The outcome of one delivery to a handler with this body.
local function outcome_of(body, fields)
  return executor.with_handler(body):handle(fields)
end

describe("an executor", function()
  after_each(executor.stop_all)

  -- ---- what a handler is given ------------------------------------------------------------------

  describe("gives a handler", function()
    it("the payload, whatever JSON it is", function()
      local run = start [[
        local kind = payload == tidemill.null and "null" or type(payload)
        ctx:discard(kind .. " " .. tidemill.json.encode(payload))
      ]]
      for payload, expected in pairs {
        ['{"a": [1, 2.5, "x"], "b": {}}'] = "table ",
        ["[]"] = "table []",
        ["{}"] = "table {}",
        ["null"] = "null null",
        ["true"] = "boolean true",
        ["0.1"] = "number 0.1",
        ["12345678901234567890"] = "userdata 12345678901234567890",
        ['"text \\u00e9\\n"'] = 'string "text é\\n"',
      } do
        local outcome = run:handle { payload = payload }
        assert.equal("discard", outcome.kind, outcome.error)
        assert.equal(expected, outcome.error:sub(1, #expected))
      end
    end)

    it("the payload of a megabyte", function()
      local text = ("x"):rep(1024 * 1024)
      local run = start [[ assert(#payload == 1024 * 1024 and ctx.raw == '"' .. payload .. '"') ]]
      local outcome = run:handle { payload = '"' .. text .. '"' }
      assert.equal("done", outcome.kind, outcome.error)
    end)

    it("the context's fields", function()
      local outcome = outcome_of([[
        local fields = {}
        for name, value in pairs(ctx) do fields[name] = value end
        fields.deadline = math.floor(fields.deadline - tidemill.now() + 0.5)
        ctx:discard(tidemill.json.encode(fields))
      ]], {
        id = "\1\146\0\171\205\239\117\52\166\120\0\0\0\0\0\255", attempts = 3, max_attempts = 7, priority = -2,
        created_at = 1769903999000042LL, published_by = "ann", headers = '{"trace": "t1"}', payload = "[1, 2]",
      })
      assert.same({
        event = "message", topic = "t", subscriber = "h", app = "app", generation = 1,
        message_id = "019200ab-cdef-7534-a678-0000000000ff", attempts = 3, max_attempts = 7, priority = -2,
        created_at = "2026-01-31T23:59:59.000042Z", published_by = "ann", principal_id = "ann",
        headers = { trace = "t1" }, deadline = 300, raw = "[1, 2]",
      }, json.decode(outcome.error))
    end)

    it("a context without headers where there are none", function()
      assert.equal("done", outcome_of("assert(ctx.headers == nil and ctx.published_by == '')").kind)
    end)

    it("a context and a payload of its own", function()
      local run = start [[
        assert(ctx.mark == nil and payload.mark == nil)
        ctx.mark, payload.mark = true, true
      ]]
      for _ = 1, 3 do
        local outcome = run:handle()
        assert.equal("done", outcome.kind, outcome.error)
      end
    end)

    it("its own lane's handler", function()
      local run = executor.start {
        config = [[return { subscribe = {
          t = { "b", "a", z = function(_, ctx) ctx:discard("inline " .. ctx.subscriber) end }, s = "a" } }]],
        handlers = {
          a = "return function(_, ctx) ctx:discard('a for ' .. ctx.topic) end",
          b = "return { handle = function(_, ctx) ctx:discard 'b' end }",
        },
      }
      local errors = {}
      for lane = 0, 3 do
        errors[lane] = run:handle({ lane = lane }).error
      end
      assert.same({ [0] = "a for s", "a for t", "b", "inline z" }, errors)
    end)
  end)

  -- ---- how a delivery ends ----------------------------------------------------------------------

  describe("answers", function()
    it("done when the handler returns, whatever it returns", function()
      for _, value in ipairs { "", "return nil, 'error'", "return false", "return 1, 2, 3" } do
        local outcome = outcome_of(value)
        assert.equal("done", outcome.kind)
        assert.is_nil(outcome.error)
        assert.is_nil(outcome.publications)
      end
    end)

    it("raised with the handler's traceback, and nothing of the program's own", function()
      local outcome = outcome_of [[
        local function deep() error("no stock") end
        local function middle() deep() return 1 end
        middle() return 1
      ]]
      assert.equal("raised", outcome.kind)
      assert.equal(table.concat({
        "handlers/h.lua:3: no stock",
        "stack traceback:",
        "\t[C]: in function 'error'",
        "\thandlers/h.lua:3: in function 'deep'",
        "\thandlers/h.lua:4: in function 'middle'",
        "\thandlers/h.lua:5: in function 'handler'",
      }, "\n"), outcome.error)
    end)

    it("raised whatever kind of value is raised", function()
      for raised, expected in pairs {
        ["'text'"] = "handlers/h.lua:3: text\n",
        ["'text', 0"] = "text\n",
        ["42"] = "handlers/h.lua:3: 42\n",
        ["nil"] = "the error is nil\n",
        ["false"] = "the error is false\n",
        ["{}"] = "the error is a table: {}\n",
        ["{ code = 5, items = { 'a' } }"] = "the error is a table: {",
        ["{ fn = print }"] = "the error is a table\n",
        ["{ ('x'):rep(5000) }"] = "the error is a table: [\"xxxx",
        ["print"] = "the error is a function\n",
        ["coroutine.create(print)"] = "the error is a thread\n",
        ["io.stdout"] = "file (0x",
        ["tidemill.null"] = "null\n",
        ["require('ffi').new('int[2]')"] = "cdata<int [2]>: 0x",
        ["setmetatable({}, { __tostring = function() return 'my own' end })"] = "my own\n",
        ["setmetatable({}, { __tostring = function() error 'again' end })"] =
          "the error is a table whose __tostring fails\n",
        ["setmetatable({}, { __tostring = function() return {} end })"] =
          "the error is a table whose __tostring fails\n",
        ["setmetatable({}, { __tostring = function() tidemill.sleep(1) end })"] =
          "the error is a table whose __tostring fails\n",
        ["setmetatable({}, { __index = function() error 'index' end })"] = "the error is a table: {}\n",
        ["'nul \\0 and \\255', 0"] = "nul \0 and \255\n",
      } do
        local outcome = outcome_of(("error(%s)"):format(raised))
        assert.equal("raised", outcome.kind)
        assert.equal(expected, outcome.error:sub(1, #expected), raised)
        assert.is_true(#outcome.error < 3000, raised)
      end
    end)

    it("raised for a runaway recursion, and goes on", function()
      local run = start [[
        if payload.deep then
          local function f() return 1 + f() end
          f()
        end
      ]]
      for _ = 1, 3 do
        local outcome = run:handle { payload = '{"deep": true}' }
        assert.equal("raised", outcome.kind)
        -- With the place and a traceback when there is stack left to find them.
        assert.matches("stack overflow", outcome.error)
        assert.equal("done", run:handle().kind)
      end
    end)

    it("raised when memory runs out, and goes on with what the handler held given back", function()
      if os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS" then
        return pending "the address space of a sanitizer's build cannot be limited"
      end
      local run = start([[
        local list = {}
        while payload.hungry do list[#list + 1] = ("x"):rep(1000) .. #list end
      ]], { memory_kb = 400000 })
      for _ = 1, 3 do
        local outcome = run:handle { payload = '{"hungry": true}' }
        assert.equal("raised", outcome.kind)
        assert.equal("not enough memory", outcome.error)
        assert.equal("done", run:handle().kind)
      end
    end)

    it("raised with an error that is cut when it is huge", function()
      local outcome = outcome_of "error(('é'):rep(1000000), 0)"
      assert.equal(16 * 1024, #outcome.error)
      assert.equal("é", outcome.error:sub(-2))
      outcome = outcome_of "error(('\\128'):rep(1000000), 0)"
      assert.equal(16 * 1024, #outcome.error)
    end)

    it("retry, snooze and discard by a yield that no pcall catches", function()
      local outcome = outcome_of "pcall(ctx.retry, ctx, 2.5, 'busy') error 'went on'"
      assert.same({ "retry", 2.5, "busy" }, { outcome.kind, outcome.delay_secs, outcome.error })
      outcome = outcome_of "ctx:retry(0)"
      assert.same({ "retry", 0, "the handler asked for a retry" }, { outcome.kind, outcome.delay_secs, outcome.error })
      outcome = outcome_of "coroutine.wrap(function() ctx:snooze(60) end)() error 'went on'"
      assert.same({ "snooze", 60 }, { outcome.kind, outcome.delay_secs })
      assert.is_nil(outcome.error)
      outcome = outcome_of "xpcall(function() ctx:discard('late') end, print) error 'went on'"
      assert.same({ "discard", "late" }, { outcome.kind, outcome.error })
      outcome = outcome_of "ctx:discard()"
      assert.same({ "discard", "the handler discarded the message" }, { outcome.kind, outcome.error })
    end)

    it("raised when an ending is asked for wrongly, at the handler's line", function()
      for body, expected in pairs {
        ["ctx:retry()"] = "ctx:retry: expected seconds from 0 to 31622400, found nothing",
        ["ctx:retry(-1)"] = "ctx:retry: expected seconds from 0 to 31622400, found %-1",
        ["ctx:retry(0/0)"] = "ctx:retry: expected seconds from 0 to 31622400, found %-?nan",
        ["ctx:snooze(math.huge)"] = "ctx:snooze: expected seconds from 0 to 31622400, found inf",
        ["ctx:snooze('5')"] = "ctx:snooze: expected seconds from 0 to 31622400, found \"5\"",
        ["ctx:retry(1, {})"] = "ctx:retry: expected a text or nothing, found a table",
        ["ctx:discard(5)"] = "ctx:discard: expected a text or nothing, found 5",
        ["ctx.discard('x')"] = "ctx:discard: call it with a colon, ctx:discard%(…%)",
        ["table.sort({ 3, 1, 2 }, function() ctx:discard() end)"] = "ctx:discard: `discard` cannot wait inside",
      } do
        local outcome = outcome_of(body)
        assert.equal("raised", outcome.kind)
        assert.matches("^handlers/h.lua:3: " .. expected, outcome.error)
      end
    end)

    it("each of many deliveries exactly once", function()
      local run = start [[
        if payload % 3 == 0 then error "third" end
        if payload % 3 == 1 then tidemill.sleep(0) end
      ]]
      local tickets = {}
      for i = 1, 2000 do
        tickets[i] = run:prepare { payload = tostring(i) }
      end
      run:flush()
      for i, ticket in ipairs(tickets) do
        assert.equal(i % 3 == 0 and "raised" or "done", run:outcome(ticket).kind)
      end
      assert.equal(2000, run.outcome_count)
    end)

    it("raised when the handler yields by itself", function()
      local outcome = outcome_of "coroutine.yield(1)"
      assert.equal("raised", outcome.kind)
      assert.matches("^coroutine.yield outside of a coroutine of the handler's own\nstack traceback:\n", outcome.error)
      assert.matches("handlers/h.lua:3: in function", outcome.error)
      assert.no.matches("tidemill.task", outcome.error)
    end)
  end)

  -- ---- the library's surroundings ---------------------------------------------------------------

  it("writes what a handler prints or logs as lines that name the message", function()
    local run = start [[
      print("two words", 5, nil, true)
      ctx:log("charged", {
        amount = 1234567, ratio = 0.25, who = "a b", list = { 1 }, topic = "mine", ["odd key"] = true,
      })
      tidemill.log.warn("careful")
      tidemill.log.debug("hidden")
      tidemill.log.error(5)
    ]]
    local outcome = run:handle { attempts = 2 }
    assert.equal("done", outcome.kind, outcome.error)
    local about = " message_id=01020304%-0506%-0708%-090a%-0b0c0d0e0f01 topic=t subscriber=h attempt=2 "
    assert.matches('level=info event=print' .. about .. 'text="two words\\t5\\tnil\\ttrue"$', run:log("print")[1])
    local lines = run:log "log"
    assert.equal(3, #lines)
    assert.matches('level=info event=log' .. about
      .. 'text=charged amount=1234567 list=%[1%] odd_key=true ratio=0.25 topic_=mine who="a b"$', lines[1])
    assert.matches("level=warn event=log" .. about .. "text=careful$", lines[2])
    assert.matches("level=error event=log" .. about .. "text=5$", lines[3])
    assert.equal("", run.process:stdout())
  end)

  it("refuses fields that are no table, and writes no more than 32 of them", function()
    assert.matches("^handlers/h.lua:3: tidemill.log.info: fields: expected a table or nothing, found 5",
      outcome_of("tidemill.log.info('x', 5)").error)
    assert.matches("^handlers/h.lua:3: ctx:log: fields: ", outcome_of("ctx:log('x', 5)").error)
    local run = start "local t = {} for i = 10, 99 do t['f' .. i] = i end ctx:log('many', t)"
    assert.equal("done", run:handle().kind)
    local _, fields = run:log("log")[1]:gsub(" f%d+=", "")
    assert.equal(32, fields)
  end)

  it("leaves io.write to standard output alone", function()
    local run = start "io.write 'plain' io.flush()"
    assert.equal("done", run:handle().kind)
    assert.equal("plain", run.process:stdout())
  end)

  it("makes os.exit an error of the handler that calls it", function()
    local run = start "if payload.exit then os.exit(3) end"
    assert.matches("^handlers/h.lua:3: os.exit would end every delivery", run:handle({ payload = '{"exit": 1}' }).error)
    assert.equal("done", run:handle().kind)
  end)

  it("keeps the locale", function()
    local outcome = outcome_of [[
      assert(os.setlocale() == "C" and os.setlocale("C", "numeric") == "C")
      assert(os.setlocale("de_DE.UTF-8") == nil)
    ]]
    assert.equal("done", outcome.kind, outcome.error)
  end)

  it("refuses a context that outlived its delivery", function()
    local run = start [[
      local kept = rawget(_G, "kept")
      _G.kept = ctx
      if kept then kept:publish("a") end
    ]]
    assert.equal("done", run:handle().kind)
    assert.matches("^handlers/h.lua:5: ctx:publish: this ctx belongs to a delivery that is not running",
      run:handle().error)
  end)

  it("survives handlers that break the library's tables", function()
    local run = start [[
      if payload.spoil then
        for _, name in ipairs { "pcall", "error", "xpcall", "type", "tostring", "setmetatable", "select" } do
          _G[name] = nil
        end
        string.format, table.concat, coroutine.yield, debug.traceback = nil, nil, nil, nil
      end
      tidemill.sleep(0)
      ctx:publish("a", { 1 })
    ]]
    local spoilt = run:handle { payload = '{"spoil": true}' }
    assert.equal("done", spoilt.kind, spoilt.error)
    local outcome = run:handle()
    assert.equal("done", outcome.kind, outcome.error)
    assert.equal('[{"topic":"a","message":[1]}]', outcome.publications)
  end)

  it("does not grow with the deliveries it has handled", function()
    local run = start [[
      if payload == 1 then error "x" end
      if payload == 2 then ctx:retry(1) end
      if payload == 3 then tidemill.sleep(0) end
      if payload == 4 then ctx:publish("a", { ("x"):rep(100) }) end
      if payload == 5 then collectgarbage() end
    ]]
    local function round()
      for i = 1, 3000 do
        run:prepare { payload = tostring(i % 5) }
      end
      run:flush()
      run:outcome(run.tickets)
      run:handle { payload = "5" }
      return tonumber(run.page.heap_bytes)
    end
    round()
    local before = round()
    for _ = 1, 5 do
      round()
    end
    assert.is_true(round() < before * 1.5)
  end)

  it("is a child that leaves nothing behind", function()
    local run = start "tidemill.sleep(60)"
    run:deliver {}
    run:hang_up()
    run:wait()
    process.assert_none_left()
  end)
end)
