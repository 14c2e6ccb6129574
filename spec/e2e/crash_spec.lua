-- Handlers that take their executor down or hold it up: who answers for it, and that the innocent
-- are not even counted an attempt.

local clock = require "spec.support.clock"
local journal = require "spec.support.journal"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- An app with one handler, `work`, on topic `t`, started. Messages with "innocent" in the payload
-- wait for the file `go`; the others run `body`.
local function start(body, config)
  config = config or {}
  config.subscribe = config.subscribe or { t = "work" }
  local app = journal.app {
    config = config,
    handlers = { work = ('if payload.innocent then return journal.wait_for "go" end\n%s'):format(body) },
  }
  -- A sanitizer would catch the signals that are meant to end a process.
  local sanitizer = (os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS" or "") .. ":handle_segv=0"
  return app, app:start { env = { ASAN_OPTIONS = sanitizer } }
end

local function publish_innocents(app, count)
  app.db:query([[select count(*) from tidemill.publish_many(array['t'],
    array(select jsonb_build_object('innocent', n) from generate_series(1, $1::int) as n))]], count)
end

describe("a handler that kills its executor", function()
  local deaths = {
    { "with SIGKILL", "journal.kill_myself()", "handler crashed its executor (signal 9, SIGKILL)" },
    { "by a bad pointer", [[ require("ffi").cast("int *", 8)[0] = 1 ]],
      "handler crashed its executor (signal 11, SIGSEGV)" },
    { "by abort()", [[ local ffi = require "ffi"; ffi.cdef "void abort(void);"; ffi.C.abort() ]],
      "handler crashed its executor (signal 6, SIGABRT)" },
    { "by _exit()", [[ local ffi = require "ffi"; ffi.cdef "void _exit(int);"; ffi.C._exit(7) ]],
      "handler ended its executor (exit code 7)" },
  }
  for _, death in ipairs(deaths) do
    it(death[1] .. " answers for it, and becomes a dead letter in time", function()
      local app = start(death[2], { max_attempts = 2, retry_backoff_secs = 0 })
      local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed")
      assert.same({ "2", "0" }, { row.attempts, row.crashes })
      assert.equal(death[3], row.error)
      assert.equal(2, #journal.begun(app))
      assert.equal("1", journal.wait_for_status(app, journal.publish(app, "t", '{"innocent": 1}'), "running").attempts)
      app:write("go", "")
      journal.wait_until_finished(app)
    end)
  end

  it("cannot end it by os.exit", function()
    local app = start("os.exit(0)", { max_attempts = 1 })
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    assert.truthy(row.error:find("os.exit would end every delivery", 1, true), row.error)
  end)

  it("gives those that waited beside it back at once, uncounted", function()
    local app = start("journal.kill_myself()", { max_attempts = 1, retry_backoff_secs = 3600 })
    publish_innocents(app, 10)
    journal.wait_until_begun(app, 10)
    local id = journal.publish(app, "t")
    journal.wait_for_status(app, id, "failed")
    app:wait_until(function()
      return #journal.begun(app) == 21
    end, 30, "the innocent run again")
    assert.equal(10, journal.count(app, "running", "attempts = 1 and crashes = 1"))
    app:write("go", "")
    journal.wait_until_finished(app)
    assert.equal(10, journal.count(app, "done", "attempts = 1 and crashes = 1"))
  end)

  it("loses nothing that had been finished before", function()
    local app = start("if payload.n == 200 then journal.kill_myself() end", { max_attempts = 1 })
    journal.publish_many(app, "t", 400)
    journal.wait_until_finished(app)
    assert.equal(399, journal.count(app, "done"))
    assert.equal(1, journal.count(app, "failed"))
    local failed = app:ledger "status = 'failed'"[1]
    assert.equal('{"n": 200}', failed.payload)
    for _, run in ipairs(journal.begun(app)) do
      assert.equal(1, run.attempt)
    end
  end)

  it("while it waits is found out: it runs alone, and answers for itself", function()
    local app = start([[
      os.execute(("(sleep 0.05; kill -9 %d) >/dev/null 2>&1 &"):format(journal.pid))
      tidemill.sleep(60)
    ]], { max_attempts = 2, retry_backoff_secs = 0 })
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed", 60)
    assert.same({ "2", "2" }, { row.attempts, row.crashes })
    assert.equal("handler crashed its executor (signal 9, SIGKILL)", row.error)
    local attempts = {}
    for i, run in ipairs(journal.begun(app)) do
      attempts[i] = run.attempt
    end
    assert.same({ 1, 1, 1, 2 }, attempts)
  end)

  it("does not hold up other subscriptions by those that must run alone", function()
    local app = journal.app {
      config = { concurrency = 4, subscribe = { t = "held", other = "quick" } },
      handlers = { held = [[ journal.wait_for "go" ]], quick = "" },
    }
    app:start()
    app:stop()
    journal.publish_many(app, "t", 20)
    app.db:query "update tidemill.queue_message set crashes = 2"
    app:start()
    journal.wait_until_begun(app, 1)
    for _ = 1, 5 do
      journal.wait_for_status(app, journal.publish(app, "other"), "done")
    end
    assert.equal(6, #journal.begun(app))
    app:write("go", "")
    journal.wait_until_finished(app)
    journal.assert_once_each(app, 25)
  end)
end)

describe("executors killed from outside, again and again", function()
  it("lose no message", function()
    local app = journal.app {
      config = {
        executors = 3, concurrency = 10, batch = 30, max_attempts = 100, retry_backoff_secs = 0,
        subscribe = { t = "work" },
      },
      handlers = { work = "tidemill.sleep(0.05 * math.random())" },
    }
    app:start()
    journal.publish_many(app, "t", 1200)
    for _ = 1, 15 do
      local executors = {}
      for _, child in ipairs(process.children()) do
        if child.name:find "exec" then
          table.insert(executors, child.pid)
        end
      end
      if #executors > 0 then
        process.run { "kill", "-9", tostring(executors[math.random(#executors)]) }
      end
      clock.sleep(0.05)
    end
    journal.wait_until_finished(app, 60)
    assert.equal(1200, journal.count(app, "done"))
    local ended = {}
    for _, run in ipairs(journal.ended(app)) do
      ended[run.id] = true
    end
    local count = 0
    for _ in pairs(ended) do
      count = count + 1
    end
    assert.equal(1200, count)
  end)
end)

describe("a handler that does not let go of the processor", function()
  for _, loop in ipairs {
    { "an endless loop", "while true do end" },
    { "an endless loop inside pcall", "while true do pcall(function() while true do end end) end" },
    { "a C call that does not return", [[ os.execute "exec sleep 600" ]] },
  } do
    it("past its time limit is killed, and alone blamed: " .. loop[1], function()
      local app = start(loop[2], { timeout_secs = 1, kill_grace_secs = 0.2, max_attempts = 1 })
      app:write("go", "")
      local id = journal.publish(app, "t")
      journal.wait_until_begun(app, 1)
      publish_innocents(app, 5)
      local row = journal.wait_for_status(app, id, "failed")
      assert.truthy(row.error:find("handler exceeded its time limit", 1, true), row.error)
      assert.equal("0", row.crashes)
      journal.wait_until_finished(app)
      assert.equal(5, journal.count(app, "done", "attempts = 1"))
      for _, child in ipairs(process.children()) do
        if child.name == "sleep" then
          process.run { "kill", "-9", tostring(child.pid) }
        end
      end
    end)
  end

  it("for longer than stall_secs is killed, whatever its limit", function()
    local app = start("while true do end", { stall_secs = 0.5, kill_grace_secs = 0.1, max_attempts = 1 })
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    assert.truthy(row.error:find("held the processor for more than 0.5 s", 1, true), row.error)
  end)

  it("does not get company while another executor is free", function()
    local app = journal.app {
      config = { executors = 2, subscribe = { t = "hog", quick = "quick" } },
      handlers = { hog = [[ while not io.open "go" do end ]], quick = "" },
    }
    app:start()
    journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    for _ = 1, 20 do
      journal.wait_for_status(app, journal.publish(app, "quick"), "done")
    end
    assert.equal(1, journal.count(app, "running"))
    app:write("go", "")
    journal.wait_until_finished(app)
    journal.assert_once_each(app, 21)
  end)
end)

describe("a handler that waits past its time limit", function()
  it("fails where it stands, and nobody is killed", function()
    local app, worker = start("tidemill.sleep(60)", { timeout_secs = 0.3, kill_grace_secs = 0, max_attempts = 1 })
    publish_innocents(app, 3)
    journal.wait_until_begun(app, 3)
    app:write("go", "")
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    assert.truthy(row.error:find("^handler exceeded its time limit of 0.3 s\nstack traceback:"), row.error)
    assert.is_nil(worker:stderr():find "executor_died")
  end)
end)

describe("a person cancels", function()
  it("a running message: its handler is stopped at its wait", function()
    local app = start("tidemill.sleep(3600)", { shutdown_secs = 3600 })
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    app.db:query("select tidemill.cancel($1)", id)
    app:stop()
    assert.same({ "discarded", "cancelled" }, { journal.row(app, id).status, journal.row(app, id).error })
    assert.equal(0, #journal.ended(app))
  end)
end)

describe("a debug hook that a handler leaves behind", function()
  it("does not reach the next delivery", function()
    local app = journal.app {
      config = { subscribe = { bad = "bad", good = "good" }, executors = 1, max_attempts = 1 },
      handlers = {
        bad = [[ debug.sethook(function() error("the hook") end, "l") ]],
        good = [[ local sum = 0 for i = 1, 100 do sum = sum + i end ]],
      },
    }
    app:start()
    journal.publish(app, "bad")
    for _ = 1, 3 do
      journal.wait_for_status(app, journal.publish(app, "good"), "done")
    end
  end)
end)

-- A time limit that passes while a handler waits is kept by its executor. One that was stopped keeps
-- none, and the runtime is left to notice.
describe("an executor that does not react", function()
  local CONFIG = { stall_secs = 1, kill_grace_secs = 0.2, timeout_secs = 3600 }
  local REASON = "its executor did not react for more than 1 s (stall_secs): it was killed"

  local function config(changes)
    local whole = {}
    for _, from in ipairs { CONFIG, changes or {} } do
      for key, value in pairs(from) do
        whole[key] = value
      end
    end
    return whole
  end

  it("while its handlers wait is killed, and they run elsewhere, uncounted", function()
    local app, worker = start("", config())
    publish_innocents(app, 5)
    journal.wait_until_begun(app, 5)
    process.run { "kill", "-STOP", tostring(journal.begun(app)[1].pid) }
    journal.wait_until_begun(app, 10)
    worker:wait_for(('event=executor_died pid=%%d+ reason="%s" signal=9 deliveries=5'):format(
      (REASON:gsub("%p", "%%%0"))))
    assert.equal(5, journal.count(app, "running", "attempts = 1 and crashes = 1"))
    app:write("go", "")
    journal.wait_until_finished(app)
    assert.equal(5, journal.count(app, "done", "attempts = 1 and crashes = 1"))
  end)

  it("and was idle is killed when it gets something to do, which runs elsewhere", function()
    local app = start("", config())
    local first = journal.publish(app, "t")
    journal.wait_for_status(app, first, "done")
    process.run { "kill", "-STOP", tostring(journal.begun(app)[1].pid) }
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "done")
    assert.same({ "1", "1" }, { row.attempts, row.crashes })
    journal.assert_once_each(app, 2)
  end)

  it("is traced to the message that freezes it, which becomes a dead letter", function()
    local app = start([[
      os.execute(("(sleep 0.05; kill -STOP %d) >/dev/null 2>&1 &"):format(journal.pid))
      tidemill.sleep(3600)
    ]], config { max_attempts = 2, retry_backoff_secs = 0 })
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed", 60)
    assert.same({ "2", "2", REASON }, { row.attempts, row.crashes, row.error })
    local attempts = {}
    for i, run in ipairs(journal.begun(app)) do
      attempts[i] = run.attempt
    end
    assert.same({ 1, 1, 1, 2 }, attempts)
  end)

  it("is none in which handlers only wait, for many times stall_secs", function()
    local app, worker = start("tidemill.sleep(5)", { stall_secs = 0.5, kill_grace_secs = 0.2 })
    for _ = 1, 3 do
      journal.publish(app, "t")
    end
    journal.wait_until_finished(app)
    assert.equal(3, journal.count(app, "done", "attempts = 1 and crashes = 0"))
    assert.is_nil(worker:stderr():find "executor_died")
  end)
end)
