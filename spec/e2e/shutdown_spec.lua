-- Orderly and hasty ends of a worker.

local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local journal = require "spec.support.journal"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local function new_app(config, body)
  config = config or {}
  config.subscribe = { t = "work" }
  return journal.app { config = config, handlers = { work = body or [[ journal.wait_for "go" ]] } }
end

local function workers(app)
  return tonumber(app.db:value "select count(*) from tidemill.worker")
end

for _, signal in ipairs { "TERM", "INT" } do
  describe("SIG" .. signal, function()
    it("ends an idle worker with 0, and its row is gone", function()
      local app = new_app()
      local worker = app:start()
      assert.equal(1, workers(app))
      worker:kill(signal)
      assert.same({ 0 }, { worker:wait() })
      assert.equal(0, workers(app))
    end)
  end)
end

describe("an orderly stop", function()
  it("waits for the handlers that run, and begins none", function()
    local app = new_app({ concurrency = 2, shutdown_secs = 3600 })
    local worker = app:start()
    journal.publish_many(app, "t", 5)
    journal.wait_until_begun(app, 2)
    worker:kill "TERM"
    worker:wait_for "event=stopping"
    journal.publish(app, "t")
    app:write("go", "")
    assert.same({ 0 }, { worker:wait() })
    assert.equal(2, journal.count(app, "done", "attempts = 1"))
    assert.equal(4, journal.count(app, "pending", "attempts = 0 and claimed_by is null"))
    assert.equal(2, #journal.begun(app))
    assert.equal(0, workers(app))
  end)

  it("gives back what shutdown_secs did not suffice for, uncounted", function()
    for _, body in ipairs { "tidemill.sleep(3600)", "while true do end" } do
      local app = new_app({ shutdown_secs = 0.3 }, body)
      local worker = app:start()
      journal.publish_many(app, "t", 3)
      journal.wait_until_begun(app, 1)
      worker:kill "TERM"
      assert.same({ 0 }, { worker:wait() })
      assert.equal(3, journal.count(app, "pending", "attempts = 0 and crashes = 0 and error is null"))
      assert.equal(0, workers(app))
      app:close()
    end
  end)

  it("tells other workers of what it gives back", function()
    local app = new_app({ shutdown_secs = 0.1, concurrency = 1 }, [[
      if #io.open("runs"):read "*a" < 100 then tidemill.sleep(3600) end
    ]])
    local first = app:start()
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    app:start()
    first:kill "TERM"
    assert.same({ 0 }, { first:wait() })
    assert.equal("1", journal.wait_for_status(app, id, "done").attempts)
    assert.equal(2, #journal.begun(app))
  end)

  it("writes what its handlers finished while the stop began", function()
    local app = new_app({ concurrency = 500, batch = 500 }, "tidemill.sleep(0.2)")
    local worker = app:start()
    journal.publish_many(app, "t", 500)
    journal.wait_until_begun(app, 500)
    worker:kill "TERM"
    assert.same({ 0 }, { worker:wait() })
    assert.equal(500, journal.count(app, "done"))
    journal.assert_once_each(app, 500)
  end)
end)

describe("a rolling restart", function()
  it("loses nothing and runs nothing twice", function()
    local app = new_app({ concurrency = 8, batch = 8, shutdown_secs = 60 }, "tidemill.sleep(0.02)")
    local old = { app:start(), app:start() }
    journal.publish_many(app, "t", 1500)
    for i = 1, 4 do
      journal.wait_until_begun(app, #journal.begun(app) + 100)
      old[2 + i] = app:start()
      old[i]:kill "TERM"
      assert.same({ 0 }, { old[i]:wait() })
    end
    journal.wait_until_finished(app)
    assert.equal(1500, journal.count(app, "done", "attempts = 1 and crashes = 0"))
    journal.assert_once_each(app, 1500)
  end)
end)

describe("a second signal", function()
  it("ends the worker at once with 3, and what ran is given back", function()
    local app = new_app({ shutdown_secs = 3600 }, "tidemill.sleep(3600)")
    local worker = app:start()
    journal.publish_many(app, "t", 3)
    journal.wait_until_begun(app, 3)
    worker:kill "TERM"
    worker:wait_for "event=stopping"
    clock.sleep(0.05)
    worker:kill "INT"
    assert.same({ 3 }, { worker:wait(10) })
    assert.equal(3, journal.count(app, "pending", "attempts = 0 and crashes = 0"))
    assert.equal(0, workers(app))
  end)
end)

-- Whether a process has a handler of its own for SIGTERM.
local function minds_sigterm(pid)
  local caught = folder.read("/proc/" .. pid .. "/status"):match "SigCgt:%s*%x*(%x%x%x%x)\n"
  return bit.band(tonumber(caught, 16), 0x4000) ~= 0
end

describe("a stop while starting", function()
  it("ends with 0 at any moment, and leaves nothing", function()
    local app = new_app()
    app:must_run "migrate"
    local orderly = 0
    for i = 0, 19 do
      local worker = app:spawn "run"
      clock.sleep(i * 0.008)
      local minded = minds_sigterm(worker.pid)
      worker:kill "TERM"
      local code, signal = worker:wait(10)
      -- Before the program has set up its handlers, the signal itself ends it.
      assert.truthy(code == 0 or (not minded and signal == 15),
        ("after %d ms: %s %s"):format(i * 8, tostring(code), tostring(signal)))
      orderly = orderly + (code == 0 and 1 or 0)
    end
    assert.truthy(orderly > 0)
    assert.equal(0, workers(app))
    process.assert_none_left()
  end)

  it("ends with 0 while the handlers are still loading", function()
    local app = new_app()
    app:must_run "migrate"
    app:write_handler("work", "while true do end")
    local worker = app:spawn "run"
    app:wait_until(function()
      return #process.children() >= 2
    end)
    clock.sleep(0.3)
    worker:kill "TERM"
    assert.same({ 0 }, { worker:wait(10) })
    assert.equal(0, workers(app))
  end)
end)

describe("the signals of a terminal", function()
  it("reach the executors too, which leave the stop to the worker", function()
    local app = new_app({ shutdown_secs = 3600 })
    local worker = app:start { setpgid = true }
    journal.publish_many(app, "t", 3)
    journal.wait_until_begun(app, 3)
    process.run { "kill", "-INT", "--", "-" .. worker.pid }
    worker:wait_for "event=stopping"
    app:write("go", "")
    assert.same({ 0 }, { worker:wait() })
    assert.equal(3, journal.count(app, "done"))
  end)
end)

describe("an output that nobody takes", function()
  -- Starts a worker behind a shell that arranges its outputs; the pid of `exec` is the worker's.
  local function start_behind(app, arrangement)
    local script = ("exec %s run -c %s --database \"%s\" %s"):format(
      tidemill.binary, app.config_path, app.dsn, arrangement)
    local worker = process.spawn { "sh", "-c", script, cwd = app.dir }
    app:wait_until(function()
      return pcall(workers, app) and workers(app) == 1
    end)
    return worker
  end

  local function assert_works(app, worker)
    journal.publish_many(app, "t", 300)
    app:wait_until(function()
      return journal.count(app, "failed") == 300
    end)
    worker:kill "TERM"
    assert.same({ 0 }, { worker:wait() })
  end

  for _, case in ipairs {
    { "closed", ">&- 2>&-" },
    { "a full device", ">/dev/full 2>/dev/full" },
    { "a pipe that nobody reads", ">&2 2>blocked" },
  } do
    it("does not stop the work: " .. case[1], function()
      local app = new_app({ max_attempts = 1 }, [[ print(("x"):rep(3000)) error(("y"):rep(3000)) ]])
      process.run { "mkfifo", app.dir .. "/blocked" }
      -- Holds the pipe open for reading, and never reads.
      local reader = process.spawn { "sh", "-c", "exec sleep 3600 <blocked", cwd = app.dir }
      local worker = start_behind(app, case[2])
      assert_works(app, worker)
      reader:destroy()
    end)
  end
end)
