-- Reloads: a new generation of executors takes over from the old one. What sets a reload off by
-- itself is in reload_watch_spec.lua; what becomes of lanes and settings in reload_lanes_spec.lua.

local clock = require "spec.support.clock"
local journal = require "spec.support.journal"
local process = require "spec.support.process"
local reloading = require "spec.support.reloading"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local app_with, reload, must_reload = reloading.app, reloading.reload, reloading.must_reload
local NOTE = [[ journal.note(ctx.generation .. " %s") ]]

local function run_one(app)
  journal.publish(app, "t")
  journal.wait_until_finished(app)
end

describe("SIGHUP", function()
  it("lets new handlers take over, under the same worker and lease", function()
    local app = app_with({}, { work = NOTE:format "old" })
    local worker = app:start()
    local id = app.db:value "select id from tidemill.worker"
    run_one(app)
    reloading.write(app, "work", NOTE:format "new")
    must_reload(app, worker)
    run_one(app)
    assert.same({ "1 old", "2 new" }, journal.notes(app))
    assert.equal(id, app.db:value "select id from tidemill.worker")
    assert.equal("2", app.db:value "select generation from tidemill.worker_status")
    assert.truthy(app:must_run("status"):find "2%s+1%s*\n$")
    reloading.wait_for_executors(app, worker, 1)
  end)

  it("reloads what a handler requires", function()
    local app = app_with({}, { work = [[ journal.note(require "lib.words".word) ]] })
    app:write_handler("lib.words", [[ return { word = "old" } ]])
    local worker = app:start()
    run_one(app)
    app:write_handler("lib.words", [[ return { word = "new" } ]])
    must_reload(app, worker)
    run_one(app)
    assert.same({ "old", "new" }, journal.notes(app))
  end)

  it("lets what runs in the old generations finish there, however many there are", function()
    local app = app_with({ executors = 2 }, { work = [[ journal.wait_for("go" .. payload.n)
      journal.note(payload.n .. " by " .. ctx.generation) ]] })
    local worker = app:start()
    for n = 1, 4 do
      journal.publish(app, "t", ('{"n": %d}'):format(n))
      journal.wait_until_begun(app, n)
      must_reload(app, worker)
    end
    -- One executor of each of the four, and two of the fifth.
    reloading.wait_for_executors(app, worker, 6)
    for n = 4, 1, -1 do
      app:write("go" .. n, "")
      reloading.wait_for_executors(app, worker, n + 1)
    end
    journal.wait_until_finished(app)
    assert.same({ "4 by 4", "3 by 3", "2 by 2", "1 by 1" }, journal.notes(app))
    journal.assert_once_each(app, 4)
    assert.equal(4, journal.count(app, "done", "attempts = 1"))
  end)

  it("leaves to an old generation all that its handlers can ask for", function()
    local app = app_with({ subscribe = { t = "work", after = "tell" } }, {
      work = [[
        journal.wait_for "go"
        tidemill.publish("after", { now = true })
        assert(tidemill.query("select 1 as one")[1].one == 1)
        ctx:publish("after", { later = true })
        tidemill.sleep(payload.secs)
      ]],
      tell = "",
    })
    local worker = app:start()
    local id = journal.publish(app, "t", '{"secs": 0}')
    local cancelled = journal.publish(app, "t", '{"secs": 3600}')
    journal.wait_until_begun(app, 2)
    must_reload(app, worker)
    app:write("go", "")
    journal.wait_for_status(app, id, "done")
    app:wait_until(function()
      return journal.count(app, "done", "topic = 'after'") == 3
    end)
    app:must_run("cancel", cancelled)
    -- The old executor ends when the handler that was cancelled has.
    reloading.wait_for_executors(app, worker, 1)
    worker:wait_for "event=message_cancelled"
  end)

  it("keeps the time limit of what runs in an old generation", function()
    local app = app_with({ max_attempts = 1, stall_secs = 1, kill_grace_secs = 0.1 }, {
      work = [[ if payload.n == 1 then while true do end end ]],
    })
    local worker = app:start()
    local id = journal.publish(app, "t", '{"n": 1}')
    journal.wait_until_begun(app, 1)
    must_reload(app, worker)
    assert.truthy(journal.wait_for_status(app, id, "failed").error:find "held the processor")
    run_one(app)
    reloading.wait_for_executors(app, worker, 1)
  end)

  it("many times in a row makes one more reload behind the one under way", function()
    local app = app_with({}, { work = "" })
    local worker = app:start()
    reloading.write(app, "work", "", [[ while not io.open "go" do end ]])
    worker:kill "HUP"
    worker:wait_for "event=reload_begun"
    for _ = 1, 50 do
      worker:kill "HUP"
      clock.sleep(0.002)
    end
    clock.sleep(0.2)
    app:write("go", "")
    worker:wait_for "event=reloaded generation=3"
    reloading.wait_for_executors(app, worker, 1)
    local _, begun = worker:stderr():gsub("event=reload_begun", "")
    assert.equal(2, begun)
  end)
end)

describe("a reload that fails", function()
  local cases = {
    ["a syntax error"] = { "local x = = 1", "handlers/work.lua:1: unexpected symbol near '='" },
    ["an error while loading"] = { "\nerror 'no'", "handlers/work.lua:2: no" },
    ["an empty file"] = { "", "handlers/work.lua: must return a function" },
    ["half a file"] = { "return function(payload, ctx)\n  ctx:log('x'\n",
      "handlers/work.lua:3: '%)' expected %(to close '%(' at line 2%) near '<eof>'" },
    ["a process that ends"] = { "require 'ffi'.C.abort()", "an executor ended while it loaded .-SIGABRT" },
  }
  for name, case in pairs(cases) do
    it("keeps the old generation, and says where: " .. name, function()
      local app = app_with({ executors = 2 }, { work = NOTE:format "old" })
      if name == "a process that ends" then
        case[1] = "require 'ffi'.cdef 'void abort(void);' " .. case[1]
      end
      local worker = app:start()
      local good = reloading.read(app, "work")
      app:write_handler("work", case[1])
      local ok, line = reload(app, worker)
      assert.is_nil(ok)
      assert.truthy(line:find(case[2]), line)
      assert.truthy(line:find "generation=2 .*still_serving=1")
      run_one(app)
      assert.equal("1", app.db:value "select generation from tidemill.worker")
      app:write_handler("work", good)
      must_reload(app, worker)
      run_one(app)
      assert.same({ "1 old", "2 old" }, journal.notes(app))
      reloading.wait_for_executors(app, worker, 2)
    end)
  end

  it("keeps the old generation when config.lua is broken or names a handler that is not there", function()
    local app = app_with({}, { work = NOTE:format "old" })
    local worker = app:start()
    for text, wrong in pairs {
      ["return {"] = "config.lua:1: ",
      [""] = "config.lua: must return a table",
      ["return { batch = 0, subscribe = { t = 'work' } }"] = "config.lua:1: batch: expected a whole number",
      ["return { subscribe = { t = 'gone' } }"] = "config.lua:1: subscribe.t: module `gone` not found",
    } do
      app:write_config(text)
      local ok, line = reload(app, worker)
      assert.is_nil(ok)
      assert.truthy(line:find(wrong, 1, true), line)
    end
    os.remove(app.config_path)
    local _, line = reload(app, worker)
    assert.truthy(line:find("config.lua: No such file or directory", 1, true), line)
    run_one(app)
    assert.same({ "1 old" }, journal.notes(app))
  end)

  it("gives up a file that loads for ever", function()
    local app = app_with({}, { work = NOTE:format "old" })
    local worker = app:start()
    app:write_handler("work", "while true do end")
    local from = worker:position()
    worker:kill "HUP"
    worker:wait_for("event=reload_begun", 30, from)
    run_one(app)
    local line = worker:wait_for("event=reload_failed([^\n]*)", 120, from)
    assert.truthy(line:find("has not loaded within 60 s", 1, true), line)
    reloading.wait_for_executors(app, worker, 1)
    run_one(app)
    assert.same({ "1 old", "1 old" }, journal.notes(app))
  end)

  it("gives up a file that eats memory while it is loaded", function()
    -- A build with sanitizers needs more than any limit that can be eaten up soon.
    if os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS" then
      return
    end
    local app = reloading.app({ max_memory_mb = 64 }, { work = "" })
    local worker = app:start()
    app:write_handler("work", [[
      local eaten = {}
      for i = 1, 1e9 do eaten[i] = ("x"):rep(1000) .. i end
    ]])
    local ok, line = reloading.reload(app, worker)
    assert.is_nil(ok)
    assert.matches("still_serving=1 ", line)
    assert.matches('error="config and handlers need far more memory than max_memory_mb = 64 allows', line)
    journal.publish(app, "t")
    journal.wait_until_finished(app)
  end)

  it("says so when each executor gets another config", function()
    local app = app_with({ executors = 3 }, { work = "" })
    local worker = app:start()
    app:write_config [[
      local pid = require("ffi").C.getpid()
      return { watch = false, executors = 3, batch = pid % 9000 + 1, subscribe = { t = "work" } }
    ]]
    local text = reloading.text(app.config_path)
    app:write_config("require('ffi').cdef 'int getpid(void);'\n" .. text)
    app:write_handler("journal", reloading.text(app.dir .. "/handlers/journal.lua"):gsub("int getpid%(void%); ", ""))
    local ok, line = reload(app, worker)
    assert.is_nil(ok)
    assert.truthy(line:find("config.lua comes out differently in each executor", 1, true), line)
    run_one(app)
  end)
end)

describe("an executor that dies while the disk is broken", function()
  local function kill_executors(worker)
    for _, child in ipairs(process.children(worker.pid)) do
      process.run { "kill", "-9", child.pid }
    end
  end

  it("leaves the work to the others, and is said once", function()
    local app = app_with({ executors = 2 }, { work = NOTE:format "old" })
    local worker = app:start()
    reloading.wait_until_loaded(app, worker, 2)
    local good = reloading.read(app, "work")
    app:write_handler("work", "return 5")
    process.run { "kill", "-9", process.children(worker.pid)[1].pid }
    worker:wait_for "event=load_failed generation=1 executors_left=1[^\n]*work.lua: must return a function"
    for _ = 1, 5 do
      run_one(app)
      clock.sleep(0.2)
    end
    local _, said = worker:stderr():gsub("event=load_failed", "")
    assert.equal(1, said)
    app:write_handler("work", good)
    reloading.wait_for_executors(app, worker, 2)
    run_one(app)
    assert.equal("1 old", journal.notes(app)[6])
  end)

  it("and all others with it: the work goes on as soon as the disk is good", function()
    local app = app_with({ executors = 2 }, { work = NOTE:format "old" })
    local worker = app:start()
    reloading.wait_until_loaded(app, worker, 2)
    app:write_handler("work", "return 5")
    kill_executors(worker)
    -- Said once: perhaps before the second death was noticed.
    worker:wait_for "event=load_failed generation=1 executors_left=[01]"
    worker:wait_for "event=executor_died.*event=executor_died"
    journal.publish(app, "t")
    -- What is on disk then is another generation.
    reloading.write(app, "work", NOTE:format "new")
    journal.wait_until_finished(app)
    local _, said = worker:stderr():gsub("event=load_failed", "")
    assert.equal(1, said)
    reloading.wait_for_executors(app, worker, 2)
  end)

  it("is replaced by what the disk holds, which is a reload when the config differs", function()
    local app = app_with({ executors = 2 }, { work = NOTE:format "old" })
    local worker = app:start()
    reloading.wait_until_loaded(app, worker, 2)
    reloading.write(app, "work", NOTE:format "new")
    reloading.set(app, { executors = 2, batch = 7 })
    process.run { "kill", "-9", process.children(worker.pid)[1].pid }
    worker:wait_for "event=reloaded generation=2"
    run_one(app)
    assert.same({ "2 new" }, journal.notes(app))
    reloading.wait_for_executors(app, worker, 2)
  end)

  it("does not stop one that is due to be recycled", function()
    local app = app_with({ max_deliveries = 5 }, { work = "" })
    local worker = app:start()
    app:write_handler("work", "return 5")
    journal.publish_many(app, "t", 40)
    journal.wait_until_finished(app)
    assert.equal(40, journal.count(app, "done", "attempts = 1"))
    worker:wait_for "event=load_failed generation=1 executors_left=1"
    reloading.wait_for_executors(app, worker, 1)
  end)
end)

describe("tidemill reload", function()
  it("asks the workers of the app, and says how many", function()
    local app = app_with({}, { work = NOTE:format "old" })
    local first, second = app:start(), app:start()
    local other = app:run { "reload", "--app", "other" }
    assert.same({ 1, "tidemill: no worker of app `other` is alive\n" }, { other.code, other.stderr })
    assert.equal('{"workers":0}\n', app:run({ "reload", "--app", "other", "--json" }).stdout)
    reloading.write(app, "work", NOTE:format "new")
    assert.truthy(app:must_run("reload"):find "^asked 2 workers of app `app` to reload")
    for _, worker in ipairs { first, second } do
      worker:wait_for 'event=reload_begun generation=2 reason="tidemill reload"'
      worker:wait_for "event=reloaded generation=2"
    end
    assert.equal('{"workers":2}\n', app:must_run("reload", "--json"))
    first:wait_for "event=reloaded generation=3"
    second:wait_for "event=reloaded generation=3"
    run_one(app)
    assert.same({ "3 new" }, journal.notes(app))
  end)

  it("says that workers do not listen where notifications are off", function()
    local app = app_with({ notify = false }, { work = "" })
    app:must_run "migrate"
    local result = app:run "reload"
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "send each a SIGHUP")
  end)
end)

describe("in the middle of a reload", function()
  -- A worker whose next generation is still loading.
  local function loading(config, body)
    local app = app_with(config, { work = body or [[ journal.wait_for "go" ]] })
    local worker = app:start()
    local good = reloading.read(app, "work")
    app:write_handler("work", "while true do end")
    local from = worker:position()
    worker:kill "HUP"
    worker:wait_for("event=reload_begun", 30, from)
    return app, worker, good
  end

  it("a stop ends all, and waits for what runs", function()
    local app, worker = loading()
    journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    reloading.wait_for_executors(app, worker, 2)
    worker:kill "TERM"
    worker:wait_for "event=stopping"
    app:write("go", "")
    assert.same({ 0 }, { worker:wait() })
    assert.equal(1, journal.count(app, "done", "attempts = 1"))
    assert.equal("0", app.db:value "select count(*) from tidemill.worker")
    process.assert_none_left()
  end)

  it("a stop ends also while the database is to be told of the new lanes", function()
    local app = app_with({ lease_secs = 60 }, { work = "" })
    local worker = app:start()
    local locker = app:connect()
    locker:exec "begin; lock table tidemill.subscription in access exclusive mode"
    reloading.set(app, { lease_secs = 60, batch = 9 })
    worker:kill "HUP"
    worker:wait_for "event=reload_begun"
    reloading.wait_for_executors(app, worker, 2)
    app:wait_until(function()
      return app.db:value "select 1 from pg_locks where not granted limit 1"
    end)
    worker:kill "TERM"
    worker:wait_for "event=stopping"
    locker:exec "rollback"
    assert.same({ 0 }, { worker:wait() })
    process.assert_none_left()
  end)

  it("a second signal ends at once, and what ran is given back", function()
    local app, worker = loading({ shutdown_secs = 3600 })
    journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    worker:kill "TERM"
    worker:wait_for "event=stopping"
    clock.sleep(0.05)
    worker:kill "TERM"
    assert.same({ 3 }, { worker:wait() })
    assert.equal(1, journal.count(app, "pending", "attempts = 0"))
    process.assert_none_left()
  end)

  it("a lost lease begins a new life, in which the reload goes on", function()
    local app = app_with({ lease_secs = 2 }, { work = NOTE:format "old" })
    app:write_handler("slow", [[
      while not io.open "loaded" do end
    ]])
    local worker = app:start()
    local old = app.db:value "select id from tidemill.worker"
    reloading.write(app, "work", NOTE:format "new", [[ require "slow" ]])
    worker:kill "HUP"
    worker:wait_for "event=reload_begun"
    app.db:exec "update tidemill.worker set lease_until = '-infinity'"
    worker:wait_for "event=lease_over.*event=registered"
    app:write("loaded", "")
    worker:wait_for "event=reloaded generation=2"
    assert.are_not.equal(old, app.db:value "select id from tidemill.worker where lease_until > now()")
    run_one(app)
    assert.same({ "2 new" }, journal.notes(app))
  end)

  it("a drain ends when its work is done", function()
    local app = app_with({}, { work = [[ journal.wait_for "go" ]] })
    app:must_run "migrate"
    local first = app:start()
    app:stop(first)
    journal.publish_many(app, "t", 5)
    local draining = app:spawn "drain"
    journal.wait_until_begun(app, 5)
    draining:kill "HUP"
    draining:wait_for "event=reload_begun"
    app:write("go", "")
    assert.same({ 0 }, { draining:wait() })
    assert.equal(5, journal.count(app, "done", "attempts = 1"))
  end)
end)

describe("a message that runs alone", function()
  it("is not disturbed by a reload", function()
    local app = app_with({ max_attempts = 3 }, { work = [[ journal.wait_for("go" .. payload.n) ]] })
    local worker = app:start()
    journal.publish(app, "t", '{"n": 1}')
    journal.wait_until_begun(app, 1)
    app.db:exec "update tidemill.queue_message set crashes = 2"
    -- The first claim did not know it; killed innocently it comes back, to run alone.
    process.run { "kill", "-9", journal.begun(app)[1].pid }
    journal.wait_until_begun(app, 2)
    must_reload(app, worker)
    journal.publish(app, "t", '{"n": 2}')
    app:write("go2", "")
    app:write("go1", "")
    journal.wait_until_finished(app)
    assert.equal(2, journal.count(app, "done"))
    reloading.wait_for_executors(app, worker, 1)
  end)
end)

describe("two hundred reloads in a row under load", function()
  it("lose nothing, leave no process behind, and the runtime does not grow", function()
    local app = app_with({ executors = 2, concurrency = 16, retry_backoff_secs = 0 }, {
      work = [[ tidemill.sleep(0.005) ]],
    })
    local worker = app:start()
    local publisher = process.spawn { "sh", "-c", [[
      while [ ! -e published ]; do
        "$0" -q "$1" -c "select count(*) from tidemill.publish_many(array['t'],
          array(select jsonb_build_object('n', n) from generate_series(1, 20) as n))" >/dev/null || exit 1
        sleep 0.05
      done
    ]], (process.run { "pg_config", "--bindir" }).stdout:match "%S+" .. "/psql", app.dsn, cwd = app.dir }
    local function memory_kb()
      return tonumber(reloading.text(("/proc/%d/status"):format(worker.pid)):match "VmRSS:%s+(%d+)")
    end
    local at_first
    for n = 1, 200 do
      reloading.write(app, "work", [[ tidemill.sleep(0.005) ]] .. ("\n"):rep(n % 7))
      must_reload(app, worker)
      if n == 40 then
        at_first = memory_kb()
      end
    end
    app:write("published", "")
    assert.same({ 0 }, { publisher:wait() })
    journal.wait_until_finished(app, 60)
    local total = tonumber(app.db:value "select count(*) from tidemill.queue_message")
    assert.truthy(total > 200)
    assert.equal(total, journal.count(app, "done", "attempts = 1 and crashes = 0"))
    journal.assert_once_each(app, total)
    assert.equal("201", app.db:value "select generation from tidemill.worker")
    reloading.wait_for_executors(app, worker, 2)
    -- A sanitizer keeps for a while what was freed, and looks for leaks by itself at the end.
    if not os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS" then
      assert.truthy(memory_kb() < at_first + 2048, ("%d kB after 40, %d kB after 200"):format(at_first, memory_kb()))
    end
    assert.is_nil(worker:stderr():find "level=error")
  end)
end)
