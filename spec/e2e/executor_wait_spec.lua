-- Waiting in an executor: where a handler may wait, and that limits, cancelling, draining and the end of
-- the runtime concern the deliveries they should and no other.

local ffi = require "ffi"
local clock = require "spec.support.clock"
local executor = require "spec.support.executor"

local start = executor.with_handler

-- The outcome of one delivery to a handler with this body.
local function outcome_of(body, fields)
  return executor.with_handler(body):handle(fields)
end

local function resident_kb(pid)
  local file = assert(io.open(("/proc/%d/status"):format(pid)))
  local text = file:read "*a"
  file:close()
  return tonumber(text:match "VmRSS:%s*(%d+) kB")
end

describe("an executor", function()
  after_each(executor.stop_all)

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

    it("while a thousand sleep, and needs less than 60 MB for them", function()
      local run = start('ctx:log("asleep") tidemill.sleep(600)', { settings = "timeout_secs = 700," })
      for i = 1, 1000 do
        run:prepare { payload = ('{"number": %d, "text": %q}'):format(i, ("x"):rep(1000)) }
      end
      run:flush()
      run:wait_for(function()
        return select(2, run.process:stderr():gsub("asleep", "")) == 1000
      end, "all to sleep")
      -- A build with sanitizers keeps what was freed.
      if not os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS" then
        assert.is_true(resident_kb(run.process.pid) < 60 * 1024)
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

    it("and sends the outcomes of others before one gets the processor that may hold it for long", function()
      local run = executor.start {
        config = [[return { subscribe = { t = { "quick", "slow" } } }]],
        handlers = {
          quick = "return function() end",
          slow = [[
            local tidemill = require "tidemill"
            return function(secs)
              local stop = tidemill.now() + secs
              while tidemill.now() < stop do end
            end]],
        },
      }
      run:handle { to = "quick" }
      run:handle { to = "slow", payload = "0.01" }
      local first = run:prepare { to = "quick" }
      local second = run:prepare { to = "quick" }
      local long = run:prepare { to = "slow", payload = "60" }
      run:flush()
      assert.equal("done", run:outcome(first).kind)
      assert.equal("done", run:outcome(second).kind)
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
end)
