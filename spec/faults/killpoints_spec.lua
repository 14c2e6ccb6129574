-- Processes killed at chosen moments of a message's life, and a server that goes down in the middle
-- of a statement: whoever is left, or started again, finishes everything, and the checker proves
-- that nothing was lost, nothing ran twice at a time and no attempt was miscounted.
--
-- The moments are the kill points of core/killpoint.h, compiled into debug builds.

local checker = require "spec.support.checker"
local clock = require "spec.support.clock"
local cluster = require "spec.support.cluster"
local folder = require "spec.support.folder"
local pg = require "spec.support.pg"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"
local witness = require "spec.support.witness"

setup(function()
  assert(folder.read(tidemill.binary):find("TIDEMILL_KILL_AT", 1, true),
    tidemill.binary .. " has no kill points: test a debug or sanitizer build")
end)

after_each(tidemill.close_all)

local KILL = 9

-- Everything is finished and proven. `expect`: figures that are known beforehand.
-- `windows`: as the checker's; without them no overlap is excused.
local function prove(app, ids, expect, windows)
  witness.wait_until_finished(app)
  local figures = checker.prove {
    committed = ids, rows = app:ledger(), runs = witness.runs(app), steps = witness.steps(app.db),
    max_attempts = app.max_attempts, windows = windows or {}, lease_secs = 1,
  }
  assert.equal(#ids, figures.messages)
  for name, value in pairs(expect or {}) do
    assert.equal(value, figures[name], name)
  end
end

-- Starts a worker that dies at a kill point.
local function start_doomed(app, point)
  return app:spawn { "run", env = { TIDEMILL_KILL_AT = point } }
end

local function wait_for_death(app, worker, point)
  app:wait_until(function()
    return worker:poll()
  end, 60, "the worker passes the kill point " .. point)
  assert.equal(KILL, worker.signal, worker:output())
end

local function wait_until_forgotten(app, workers)
  app:wait_until(function()
    return tonumber(app.db:value "select count(*) from tidemill.worker") == workers
  end, 30, "the dead worker is forgotten")
end

-- ---- the runtime --------------------------------------------------------------------------------

local FEW = { batch = 5, concurrency = 10 }

describe("a runtime killed", function()
  -- `expect` is what must come out, where it does not depend on the moment.
  local first = {
    { "before its first claim", "claim_begin:1", { reclaims = 0, runs = 30 } },
    { "when its first claim is written, before it knows", "claim_answered:1", { reclaims = 5, runs = 30 } },
    { "after it handed out the first deliveries", "deliveries_sent:1" },
    { "before its first outcomes are sent", "settle_begin:1" },
    { "when its first outcomes are written, before it knows", "settle_answered:1" },
  }
  for _, case in ipairs(first) do
    it(case[1] .. " gets its messages back when it is started again", function()
      local app = witness.app { config = FEW, body = "tidemill.sleep(0.01)" }
      local ids = witness.publish(app, 30)
      wait_for_death(app, start_doomed(app, case[2]), case[2])
      app:start()
      prove(app, ids, case[3])
      wait_until_forgotten(app, 1)
    end)
  end

  local later = {
    { "before a later claim", "claim_begin:7" },
    { "when a later claim is written", "claim_answered:6" },
    { "after it handed out deliveries again and again", "deliveries_sent:30" },
    { "before later outcomes are sent", "settle_begin:8" },
    { "when later outcomes are written", "settle_answered:9" },
  }
  for _, case in ipairs(later) do
    it(case[1] .. " is survived by another beside it", function()
      local app = witness.app { config = FEW, body = "tidemill.sleep(0.02)" }
      app:start()
      local doomed = start_doomed(app, case[2])
      local ids = {}
      app:wait_until(function()
        for _, id in ipairs(witness.publish(app, 5)) do
          table.insert(ids, id)
        end
        clock.sleep(0.01)
        return doomed:poll()
      end, 60, "the worker passes the kill point " .. case[2])
      assert.equal(KILL, doomed.signal, doomed:output())
      prove(app, ids)
      wait_until_forgotten(app, 1)
    end)
  end

  -- Only messages that run alone wait in a runtime without having been started.
  for _, point in ipairs { "release:1", "release:3" } do
    it("while it gives back what it has not started: " .. point, function()
      local app = witness.app { config = FEW, body = 'witness.wait_for "go"' }
      local ids = witness.publish(app, 5)
      app.db:exec "update tidemill.queue_message set crashes = 2"
      local doomed = start_doomed(app, point)
      witness.wait_until_begun(app, 1)
      doomed:kill "TERM"
      wait_for_death(app, doomed, point)
      app:write("go", "")
      app:start()
      prove(app, ids, { reclaims = 5, refunds = 0, runs = 6 })
    end)
  end

  for _, case in ipairs {
    { "idle", 0, { reclaims = 0, runs = 0 } },
    { "after its last handlers have ended", 8, { reclaims = 0, runs = 8 } },
  } do
    it("in the moment it says goodbye, " .. case[1], function()
      local app = witness.app { body = 'witness.wait_for "go"' }
      local doomed = start_doomed(app, "leaving")
      doomed:wait_for "event=ready"
      local ids = witness.publish(app, case[2])
      witness.wait_until_begun(app, case[2])
      doomed:kill "TERM"
      doomed:wait_for "event=stopping"
      app:write("go", "")
      wait_for_death(app, doomed, "leaving")
      app:start()
      prove(app, ids, case[3])
      wait_until_forgotten(app, 1)
    end)
  end
end)

-- ---- a runtime that was thought dead ------------------------------------------------------------

-- It was stopped in the middle of what it did, until its messages were another's. Going on, it does
-- the rest.
describe("a runtime stopped beyond its lease", function()
  local function wait_until_stopped(app, worker, point)
    app:wait_until(function()
      return witness.is_stopped(worker.pid)
    end, 30, "the worker passes the point " .. point)
  end

  for _, case in ipairs {
    { "before a claim", "claim_begin" },
    { "when a claim is answered", "claim_answered" },
    { "after it handed out deliveries", "deliveries_sent" },
    { "before outcomes are sent", "settle_begin" },
    { "when outcomes are answered", "settle_answered" },
  } do
    it(case[1] .. " harms nothing when it goes on", function()
      local app = witness.app {
        -- The other's runs are still under way when the first goes on.
        body = 'if ctx.attempts > 1 then witness.wait_for "go" else tidemill.sleep(0.1) end',
      }
      local ids = witness.publish(app, 10)
      local first = app:spawn { "run", env = { TIDEMILL_STOP_AT = case[2] } }
      wait_until_stopped(app, first, case[2])
      local from = clock.now()
      app:start()
      app:wait_until(function()
        return app.db:value([[select 1 having not exists (select from tidemill.queue_message
          where status = 'pending' or claimed_by ~ ('-' || $1::text || '-[^-]*$'))]], first.pid) == "1"
      end, 30, "the other has taken all messages")
      wait_until_forgotten(app, 1)
      first:kill "CONT"
      local to = clock.now()
      first:wait_for "event=lease_over.*event=registered"
      -- What it still had to say, it has said.
      clock.sleep(0.2)
      app:write("go", "")
      prove(app, ids, nil, { { worker = first.pid, from = from, to = to } })
    end)
  end

  it("claims in its old name, and the claim is reclaimed", function()
    local app = witness.app {}
    local first = app:spawn { "run", env = { TIDEMILL_STOP_AT = "claim_begin" } }
    wait_until_stopped(app, first, "claim_begin")
    local second = app:start()
    wait_until_forgotten(app, 1)
    app:stop(second)
    local ids = witness.publish(app, 5)
    first:kill "CONT"
    prove(app, ids, { reclaims = 5, runs = 5 })
  end)
end)

-- ---- an executor --------------------------------------------------------------------------------

describe("an executor killed from outside", function()
  it("while a handler is on the processor: that one has spent an attempt", function()
    local app = witness.app {
      body = [[
        if payload.n == 3 then witness.hold_until "go" else witness.wait_for "go" end
      ]],
      config = { lease_secs = 300 },
    }
    app:start()
    local ids = witness.publish(app, 3)
    witness.wait_until_begun(app, 3)
    witness.signal(witness.runs(app)[1].executor, KILL)
    witness.wait_until_begun(app, 6)
    app:write("go", "")
    prove(app, ids, { attempts = 2, refunds = 2, reclaims = 0, runs = 6 })
    local blamed = app:ledger("id = $1", ids[3])[1]
    assert.same({ "2", "0" }, { blamed.attempts, blamed.crashes })
    assert.equal("handler crashed its executor (signal 9, SIGKILL)",
      app.db:value("select errors -> 0 ->> 'error' from tidemill.queue_message where id = $1", ids[3]))
  end)

  it("while handlers wait: nobody has spent anything", function()
    -- Asleep, and not now and then on the processor to look.
    local app = witness.app { body = 'witness.sleep_unless "go"', config = { lease_secs = 300 } }
    app:start()
    local ids = witness.publish(app, 10)
    witness.wait_until_begun(app, 10)
    app:write("go", "")
    witness.signal(witness.runs(app)[1].executor, KILL)
    prove(app, ids, { attempts = 1, refunds = 10, reclaims = 0, runs = 20 })
  end)

  -- Frame 1 is the manifest. Each executor dies so, one after the other.
  it("right after it sent an outcome: the outcome counts", function()
    local app = witness.app { config = { lease_secs = 300, concurrency = 1 } }
    local ids = witness.publish(app, 4)
    local worker = start_doomed(app, "frames_sent:2")
    worker:wait_for "event=ready"
    -- With the outcome there is room for the next message, which may be handed to the dead and come back.
    prove(app, ids, { attempts = 1, reclaims = 0, runs = 4 })
  end)

  -- The runtime learns of all deaths at a time. One that comes while it is at work on what another
  -- executor sent is told of before the runtime has looked for what this one sent.
  it("right after it sent an outcome, beside another that does the same: both count", function()
    local app = witness.app {
      config = { lease_secs = 300, executors = 2, concurrency = 1 },
      body = 'witness.wait_for("go" .. payload.n)',
    }
    local ids = witness.publish(app, 2)
    local worker = app:spawn {
      "run", env = { TIDEMILL_KILL_AT = "frames_sent:2", TIDEMILL_STOP_AT = "outcome_taken" },
    }
    witness.wait_until_begun(app, 2)
    local executors = {}
    for _, run in ipairs(witness.runs(app)) do
      executors[run.id] = run.executor
    end
    local function end_handler(n)
      app:write("go" .. n, "")
      app:wait_until(function()
        return not process.alive(executors[ids[n]])
      end, 30, "the executor has sent its outcome and died")
    end
    local function wait_until_stopped()
      app:wait_until(function()
        return witness.is_stopped(worker.pid)
      end, 30, "the runtime is stopped")
    end
    worker:kill "STOP"
    wait_until_stopped()
    end_handler(1)
    -- It finds both the outcome and the death, and stops at the outcome.
    worker:kill "CONT"
    wait_until_stopped()
    end_handler(2)
    worker:kill "CONT"
    prove(app, ids, { attempts = 1, refunds = 0, reclaims = 0, runs = 2 })
  end)

  it("right before it sends an outcome: the message runs again", function()
    local app = witness.app { config = { lease_secs = 300, concurrency = 1 } }
    local ids = witness.publish(app, 4)
    local worker = start_doomed(app, "frames_begin:3")
    worker:wait_for "event=ready"
    witness.wait_until_finished(app)
    local again = #witness.runs(app) - 4
    assert.is_true(again >= 2, ("%d messages ran again"):format(again))
    prove(app, ids, { reclaims = 0 })
  end)
end)

-- ---- a lease that cannot be renewed -------------------------------------------------------------

describe("a worker cut off from the database", function()
  -- A role of its own, that is then shut out.
  local role

  after_each(function()
    tidemill.close_all()
    local admin = pg.connect()
    admin:exec("drop role if exists " .. role)
    admin:close()
  end)

  -- The checker excuses no overlap here.
  local function prove_stopped(prepare)
    local app = witness.app {
      body = 'witness.wait_for "go"', config = { lease_secs = 3, shutdown_secs = 3600 },
    }
    role = app.database .. "_cut_off"
    app.db:exec(("create role %s superuser login"):format(role))
    local dsn = app.dsn
    app.dsn = dsn .. " user=" .. role
    local cut_off = app:start()
    app.dsn = dsn
    local ids = witness.publish(app, 3)
    witness.wait_until_begun(app, 3)
    app:start()
    prepare(cut_off)
    app.db:exec(("alter role %s nologin"):format(role))
    app.db:query("select pg_terminate_backend(pid) from pg_stat_activity where usename = $1", role)
    cut_off:wait_for "event=lease_over"
    witness.wait_until_begun(app, 6)
    app.db:exec(("alter role %s login"):format(role))
    app:write("go", "")
    prove(app, ids, { reclaims = 3, runs = 6 })
    return cut_off
  end

  it("has stopped its handlers when others start them", function()
    prove_stopped(function() end)
  end)

  it("has stopped its handlers even while it waits for them to end", function()
    local cut_off = prove_stopped(function(worker)
      worker:kill "TERM"
      worker:wait_for "event=stopping"
    end)
    assert.same({ 0 }, { cut_off:wait() })
  end)
end)

-- ---- the server ---------------------------------------------------------------------------------

describe("Postgres stopped at once and started again", function()
  local server, app

  before_each(function()
    server = cluster.new()
    -- Leases outlive the server's absence, so that nothing but the answers is lost.
    app = witness.app {
      server = server, config = { lease_secs = 60, batch = 5, concurrency = 10 }, body = 'witness.wait_for "go"',
    }
  end)

  -- The worker says goodbye while there is a server.
  after_each(function()
    local ok, err = pcall(app.stop, app)
    for _, started in ipairs(app.processes) do
      started:destroy()
    end
    server:close()
    assert(ok, err)
  end)

  local function restart()
    server:start()
    app.db:close()
    app.db = app:connect()
  end

  local function crash_and_restart()
    server:stop "immediate"
    restart()
  end

  -- Makes the statement that sets this status wait, with its work done, but not committed. Once: a
  -- table that is not logged is empty after the crash.
  local function delay(status)
    app.db:exec(([[
      create unlogged table audit.patience as select 3600 as secs;
      create function audit.delay() returns trigger language plpgsql as
        $$ begin perform pg_sleep(secs) from audit.patience; return null; end $$;
      create constraint trigger delayed after update on tidemill.queue_message deferrable initially deferred
        for each row when (new.status = '%s') execute function audit.delay();
    ]]):format(status))
  end

  local function wait_until_asleep(event)
    app:wait_until(function()
      return app.db:value("select 1 from pg_stat_activity where wait_event = $1", event)
    end, 30, "a statement waits for " .. event)
  end

  local function set_standby(name)
    local file = assert(io.open(server.data .. "/postgresql.conf", "a"))
    assert(file:write(("synchronous_standby_names = '%s'\n"):format(name)))
    assert(file:close())
  end

  -- A commit that waits for a standby there is none of: it is written, and nobody is told.
  local function hold_answers()
    set_standby "nobody"
    server.server:kill "HUP"
    app:wait_until(function()
      return app.db:value "show synchronous_standby_names" == "nobody"
    end, 30, "the setting is read")
  end

  it("while a claim is under way: nothing was claimed", function()
    local ids = witness.publish(app, 5)
    delay "running"
    app:start()
    wait_until_asleep "PgSleep"
    crash_and_restart()
    app:write("go", "")
    prove(app, ids, { attempts = 1, refunds = 0, reclaims = 0, runs = 5 })
  end)

  it("while a claim has been written and not answered: it is undone, uncounted", function()
    local worker = app:start()
    hold_answers()
    app.db:exec "begin; set local synchronous_commit = local"
    local ids = witness.publish(app, 5)
    app.db:exec "commit"
    wait_until_asleep "SyncRep"
    set_standby ""
    crash_and_restart()
    worker:wait_for "event=claim_undone"
    app:write("go", "")
    prove(app, ids, { attempts = 1, refunds = 5, reclaims = 0, runs = 5 })
  end)

  it("while handlers run: they go on, and their outcomes are written afterwards", function()
    app:start()
    local ids = witness.publish(app, 10)
    witness.wait_until_begun(app, 10)
    server:stop "immediate"
    app:write("go", "")
    clock.wait_until(function()
      return witness.count(app, "ended") == 10
    end, 30, "the handlers return while there is no server")
    restart()
    prove(app, ids, { attempts = 1, refunds = 0, reclaims = 0, runs = 10 })
  end)

  it("while outcomes are under way: they are written again", function()
    app:start()
    local ids = witness.publish(app, 5)
    witness.wait_until_begun(app, 5)
    delay "done"
    app:write("go", "")
    wait_until_asleep "PgSleep"
    crash_and_restart()
    prove(app, ids, { attempts = 1, refunds = 0, reclaims = 0, runs = 5 })
  end)

  it("while outcomes have been written and not answered: they count once", function()
    local worker = app:start()
    local ids = witness.publish(app, 5)
    witness.wait_until_begun(app, 5)
    hold_answers()
    app:write("go", "")
    wait_until_asleep "SyncRep"
    set_standby ""
    crash_and_restart()
    prove(app, ids, { attempts = 1, refunds = 0, reclaims = 0, runs = 5 })
    -- Nobody knows whose `done` that was: it is said, and nothing is changed.
    worker:wait_for "event=outcome_unknown"
  end)
end)
