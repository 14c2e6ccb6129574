-- Deliveries in an executor: what a handler is given, how each way to end becomes an outcome, and
-- that waiting, limits, cancelling and draining concern one delivery and no other.

local ffi = require "ffi"
local clock = require "spec.support.clock"
local executor = require "spec.support.executor"
local process = require "spec.support.process"
local json = require "tidemill.json"

local function start(body, options)
  return executor.with_handler(body, options)
end

-- The outcome of one delivery to a handler with this body.
local function outcome_of(body, fields)
  return start(body):handle(fields)
end

-- What a handler with this body publishes together with its `done`, decoded.
local function published_by(body, fields)
  local outcome = outcome_of(body, fields)
  assert.equal("done", outcome.kind, outcome.error)
  return outcome.publications and json.decode(outcome.publications)
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

  -- ---- waiting ----------------------------------------------------------------------------------

  describe("lets a handler wait", function()
    it("while a thousand others wait too", function()
      local run = start [[
        _G.count = (rawget(_G, "count") or 0) + 1
        while _G.count < 1000 do tidemill.sleep(0.01) end
      ]]
      local tickets = {}
      for i = 1, 1000 do
        tickets[i] = run:prepare {}
      end
      run:flush()
      for _, ticket in ipairs(tickets) do
        assert.equal("done", run:outcome(ticket).kind)
      end
    end)

    it("in the order the sleeps end, not the one they began in", function()
      local run = start "tidemill.sleep(payload)"
      local long, short = run:deliver { payload = "0.3" }, run:deliver { payload = "0.01" }
      run:outcome(long)
      assert.is_true(run:outcome(short).number < run:outcome(long).number)
    end)

    it("inside of pcall, xpcall, metamethods and iterators", function()
      local outcome = outcome_of [[
        local slow = setmetatable({}, {
          __index = function(_, key) tidemill.sleep(0) return key end,
          __tostring = function() tidemill.sleep(0) return "text" end,
        })
        local ok, value = pcall(function() tidemill.sleep(0) return slow.x end)
        assert(ok and value == "x")
        assert(xpcall(function() tidemill.sleep(0) return true end, print))
        assert(tostring(slow) == "text")
        for i in function(_, i) tidemill.sleep(0) i = (i or 0) + 1 return i < 3 and i or nil end do assert(i) end
        local caught, err = pcall(function() tidemill.sleep(0) error("inside", 0) end)
        assert(not caught and err == "inside")
      ]]
      assert.equal("done", outcome.kind, outcome.error)
    end)

    it("inside of its own coroutines, at any depth, beside their own yields", function()
      local outcome = outcome_of [[
        local function numbers(n)
          return coroutine.wrap(function()
            for i = 1, n do
              tidemill.sleep(0)
              coroutine.yield(i, nil, "third")
            end
          end)
        end
        local outer = coroutine.create(function(a, b)
          assert(a == 1 and b == nil)
          local sum = 0
          for i, none, third in numbers(3) do
            assert(none == nil and third == "third")
            tidemill.sleep(0)
            sum = sum + i
          end
          local back = coroutine.yield(sum)
          tidemill.sleep(0)
          error("end " .. back, 0)
        end)
        local ok, sum = coroutine.resume(outer, 1, nil)
        assert(ok and sum == 6 and coroutine.status(outer) == "suspended")
        local failed, err = coroutine.resume(outer, "back")
        assert(failed == false and err == "end back" and coroutine.status(outer) == "dead")
        assert(select("#", coroutine.resume(coroutine.create(function() return nil, nil end))) == 3)
        local wrapped, message = pcall(coroutine.wrap(function() tidemill.sleep(0) error({ 5 }) end))
        assert(not wrapped and message[1] == 5)
      ]]
      assert.equal("done", outcome.kind, outcome.error)
    end)

    it("and says where it cannot", function()
      for body, op in pairs {
        ["table.sort({ 3, 1, 2 }, function(a, b) tidemill.sleep(0) return a < b end)"] = "sleep",
        ["('x'):gsub('x', function() tidemill.sleep(0) end)"] = "sleep",
        ["('x'):gsub('x', function() tidemill.publish('a') end)"] = "publish",
        ["('x'):gsub('x', coroutine.wrap(function() tidemill.sleep(0) end))"] = "sleep",
        ["('x'):gsub('x', function() coroutine.wrap(function() tidemill.sleep(0) end)() end)"] = "sleep",
      } do
        local outcome = outcome_of(body)
        assert.equal("raised", outcome.kind)
        assert.matches(("^handlers/h.lua:3: `%s` cannot wait inside of a function that C code called"):format(op),
          outcome.error)
      end
      local run = start("require 'late'", { handlers = { late = "require('tidemill').sleep(0)" } })
      assert.matches("handlers/late.lua:1: `sleep` cannot wait inside of", run:handle().error)
    end)

    it("and refuses an argument that is no time", function()
      for argument, found in pairs {
        ["-0.1"] = "%-0.1", ["0/0"] = "%-?nan", ["math.huge"] = "inf", ["'1'"] = '"1"', [""] = "nothing",
        ["{}"] = "a table",
      } do
        assert.matches("^handlers/h.lua:3: tidemill.sleep: expected seconds from 0 to 31622400, found " .. found,
          outcome_of(("tidemill.sleep(%s)"):format(argument)).error)
      end
      local direct = "error(select(2, require('tidemill.await').op('%s')), 0)"
      assert.matches("^there is no op `dance` to wait for", outcome_of(direct:format "dance").error)
      assert.matches("^sleep: expected seconds", outcome_of(direct:format "sleep").error)
    end)

    it("and tells the page who is on the processor", function()
      local run = start [[
        if payload.busy then
          local stop = tidemill.now() + 60
          while tidemill.now() < stop do end
        end
        tidemill.sleep(60)
      ]]
      run:deliver {}
      clock.wait_until(function() return run.page.heap_bytes > 0 end, 10, "the heap's size is told")
      assert.equal(0, tonumber(run.page.ticket))
      local busy = run:deliver { payload = '{"busy": true}' }
      clock.wait_until(function() return tonumber(run.page.ticket) == busy end, 10, "the ticket is told")
      assert.is_true(tonumber(run.page.since_ns) > 0)
    end)

    it("and sends the outcomes of others before a handler holds the processor for long", function()
      local run = start [[
        local stop = tidemill.now() + payload
        while tidemill.now() < stop do end
      ]]
      local first = run:prepare { payload = "0.01" }
      run:prepare { payload = "0.01" }
      local long = run:prepare { payload = "60" }
      run:flush()
      assert.equal("done", run:outcome(first).kind)
      assert.is_nil(run.outcomes[long])
    end)
  end)

  -- ---- limits, cancel, drain --------------------------------------------------------------------

  describe("drops a delivery", function()
    it("past its time limit, with the place where it waits", function()
      local run = start("pcall(tidemill.sleep, 60)\ntidemill.sleep(60)", { settings = "timeout_secs = 0.05," })
      local outcome = run:handle()
      assert.equal("raised", outcome.kind)
      assert.matches("^handler exceeded its time limit of 0.05 s\nstack traceback:\n", outcome.error)
      assert.matches("handlers/h.lua:3: in function", outcome.error)
      assert.no.matches("tidemill.task", outcome.error)
      assert.is_nil(outcome.publications)
    end)

    it("past its limit even when it goes on, returns or ends itself after the error", function()
      for _, after in ipairs {
        "return", "ctx:discard 'x'", "tidemill.sleep(60)", "error 'other'", "tidemill.publish 'x'",
      } do
        local run = start("print(pcall(tidemill.sleep, 60))\nprint 'cleaned up'\n" .. after,
          { settings = "timeout_secs = 0.05," })
        local outcome = run:handle()
        assert.equal("raised", outcome.kind)
        assert.matches("^handler exceeded its time limit of 0.05 s", outcome.error)
        local lines = run:log "print"
        assert.matches("false\\thandler exceeded its time limit of 0.05 s", lines[1])
        assert.matches("cleaned up", lines[2])
        assert.equal(0, #run.requests)
      end
    end)

    it("at its first wait when it held the processor past its limit", function()
      local run = start([[
        local stop = tidemill.now() + 0.1
        while tidemill.now() < stop do end
        tidemill.sleep(60)
      ]], { settings = "timeout_secs = 0.05," })
      assert.matches("^handler exceeded its time limit", run:handle().error)
    end)

    it("by its own lane's limit, and leaves the others", function()
      local run = executor.start {
        config = [[return { timeout_secs = 0.05, subscribe = { t = {
          a = { handler = "h", timeout_secs = 60 }, b = "h" } } }]],
        handlers = { h = "return function() require('tidemill').sleep(0.3) end" },
      }
      local a, b = run:deliver { to = "a" }, run:deliver { to = "b" }
      assert.equal("raised", run:outcome(b).kind)
      assert.equal("done", run:outcome(a).kind)
    end)

    it("that is cancelled, which ends it with discard, and ignores one that is over", function()
      local run = start "pcall(tidemill.sleep, 60) print 'cleanup' tidemill.sleep(60)"
      local ticket, other = run:deliver {}, run:deliver {}
      run:cancel(ticket, "cancelled by ann")
      local outcome = run:outcome(ticket)
      assert.same({ "discard", "cancelled by ann" }, { outcome.kind, outcome.error })
      assert.equal(1, #run:log "print")
      run:cancel(ticket, "again")
      run:cancel(999, "unknown")
      run:cancel(other, nil)
      assert.same({ "discard", "cancelled" }, { run:outcome(other).kind, run:outcome(other).error })
      assert.equal(2, run.outcome_count)
    end)

    it("inside of its own coroutines", function()
      local run = start([[
        local co = coroutine.create(function()
          local ok, err = pcall(tidemill.sleep, 60)
          print("inner", ok, err)
        end)
        coroutine.resume(co)
        tidemill.sleep(60)
      ]])
      local ticket = run:deliver {}
      run:cancel(ticket, "stop")
      assert.equal("discard", run:outcome(ticket).kind)
      assert.matches("inner\\tfalse\\t.*stop", run:log("print")[1])
    end)
  end)

  describe("that drains", function()
    it("finishes what runs, gives back what comes later, says BYE and exits 0", function()
      local run = start "tidemill.sleep(0.1) tidemill.publish('a')"
      local running = run:deliver {}
      run:drain()
      local late = run:deliver {}
      assert.equal("returned", run:outcome(late).kind)
      assert.is_nil(run.outcomes[running])
      run:reply(run:request().request, true, "{}")
      assert.equal("done", run:outcome(running).kind)
      assert.equal(0, (run:wait()))
      run:pump()
      assert.is_true(run.said_bye)
    end)

    it("with nothing to do exits at once", function()
      local run = start ""
      run:drain()
      assert.equal(0, (run:wait()))
      run:pump()
      assert.is_true(run.said_bye)
    end)

    it("writes all of a large backlog before it ends", function()
      local run = start "ctx:publish('a', ('x'):rep(1000000))"
      local tickets = {}
      for i = 1, 20 do
        tickets[i] = run:prepare {}
      end
      run:flush()
      run:drain()
      for _, ticket in ipairs(tickets) do
        assert.equal(1000000 + #'[{"topic":"a","message":""}]', #run:outcome(ticket).publications)
      end
      assert.equal(0, (run:wait()))
      run:pump()
      assert.is_true(run.said_bye)
    end)
  end)

  describe("ends", function()
    it("at once when the runtime is gone, whatever waits", function()
      local run = start "tidemill.sleep(60)"
      for _ = 1, 10 do
        run:deliver {}
      end
      clock.wait_until(function() return run.page.since_ns > 0 end, 10, "the handlers run")
      run:hang_up()
      assert.equal(0, (run:wait()))
    end)

    it("with exit code 1 and a line in the log when a frame makes no sense", function()
      for what, bytes in pairs {
        length = "\255\255\255\255\1\1",
        version = "\2\0\0\0\9\1",
        kind = "\2\0\0\0\1\63",
        body = "\2\0\0\0\1\2",
        direction = "\2\0\0\0\1\66",
      } do
        local run = start ""
        run:send_raw(bytes)
        assert.equal(1, (run:wait()), what)
        assert.matches("level=error event=bad_frame error=", run:log("bad_frame")[1])
      end
    end)

    it("not by SIGINT, SIGTERM, SIGHUP or SIGPIPE", function()
      local run = start "tidemill.sleep(0)"
      for _, name in ipairs { "INT", "TERM", "HUP", "PIPE" } do
        assert.is_true(run.process:kill(name))
        assert.equal("done", run:handle().kind)
      end
    end)
  end)

  it("leaves default signals, no socket and an empty standard input to programs of handlers", function()
    local run = start [[
      local pipe = io.popen("cat; ls -l /proc/self/fd; kill -TERM $$; echo survived")
      print(pipe:read("*a"))
      pipe:close()
    ]]
    assert.equal("done", run:handle().kind)
    local line = run:log("print")[1]
    assert.matches("/dev/null", line)
    assert.no.matches("socket:", line)
    assert.no.matches("survived", line)
  end)

  it("parses frames that arrive in pieces", function()
    local run = start "ctx:discard(payload)"
    local pieces = {}
    for i = 1, 3 do
      run:prepare { payload = ('"piece %d"'):format(i) }
    end
    local bytes = ffi.string(run.output.data, run.output.len)
    run.output.len = 0
    for i = 1, #bytes, 7 do
      table.insert(pieces, bytes:sub(i, i + 6))
    end
    for _, piece in ipairs(pieces) do
      run:send_raw(piece)
    end
    for i = 1, 3 do
      assert.equal("piece " .. i, run:outcome(i).error)
    end
  end)

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
    local about = " message_id=01020304%-0506%-0708%-090a%-0b0c0d0e0f01 topic=t attempt=2 "
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
