-- Executors that use too much memory, or have had their number of deliveries: replaced without losing
-- anything, or killed, and then somebody answers for it.

local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local MEGABYTE = "local function megabyte(n) return ('%09d'):format(n):rep(116509) end\n"

local function pids(app)
  local seen, count = {}, 0
  for _, run in ipairs(journal.begun(app)) do
    if not seen[run.pid] then
      seen[run.pid], count = true, count + 1
    end
  end
  return count
end

local function times(worker, pattern)
  local _, count = worker:stderr():gsub(pattern, "")
  return count
end

describe("an executor far over max_memory_mb", function()
  local KILLED = "handler used far more memory than max_memory_mb = 200 allows: its executor was killed"

  -- About a megabyte each millisecond, and not without end: a mistake here must not eat the machine.
  local BOMB = MEGABYTE .. [[
    local held, clock = {}, os.clock
    for n = 1, 1500 do
      held[n] = megabyte(n)
      local till = clock() + 0.001
      while clock() < till do end
    end
  ]]

  it("is killed; the handler that has the processor answers for it, the others go back uncounted", function()
    local app = journal.app {
      config = { subscribe = { t = "work" }, max_memory_mb = 200, max_attempts = 2, retry_backoff_secs = 0 },
      handlers = { work = 'if payload.innocent then return journal.wait_for "go" end\n' .. BOMB },
    }
    local worker = app:start()
    local innocent = journal.publish(app, "t", '{"innocent": true}')
    journal.wait_until_begun(app, 1)
    local bomb = journal.publish(app, "t")
    local row = journal.wait_for_status(app, bomb, "failed")
    assert.same({ "2", "0", KILLED }, { row.attempts, row.crashes, row.error })
    assert.equal(2, #journal.begun(app, bomb))
    worker:wait_for(('event=executor_died pid=%%d+ reason="%s" signal=9'):format(KILLED))
    app:write("go", "")
    row = journal.wait_for_status(app, innocent, "done")
    assert.equal("1", row.attempts)
    -- It was there when the executor was killed: once for certain, and the second time unless it ran
    -- elsewhere by then.
    assert.truthy(tonumber(row.crashes) >= 1, row.crashes)
  end)

  it("while its handlers wait is killed too: whoever holds the memory is found out", function()
    local app = journal.app {
      config = { subscribe = { t = "work" }, max_memory_mb = 200, max_attempts = 2, retry_backoff_secs = 0 },
      handlers = { work = BOMB:gsub("1500", "450"):gsub("0%.001", "0") .. "tidemill.sleep(3600) return #held" },
    }
    local worker = app:start()
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed", 60)
    assert.same({ "2", KILLED }, { row.attempts, row.error })
    assert.truthy(times(worker, "event=executor_died") >= 2)
    assert.equal(0, #journal.ended(app))
  end)
end)

describe("an executor over max_memory_mb", function()
  it("is replaced by and by, and no delivery notices", function()
    local app = journal.app {
      config = { subscribe = { t = "work" }, max_memory_mb = 200, concurrency = 4, batch = 20 },
      -- What is held is never given back: a quarter of a megabyte each.
      handlers = { work = MEGABYTE .. [[
        held = rawget(_G, "held") or {}
        held[#held + 1] = megabyte(payload.n):sub(1, 262144)
        tidemill.sleep(0.02)
      ]] },
    }
    local worker = app:start()
    local count = 2400
    journal.publish_many(app, "t", count)
    journal.wait_until_finished(app, 90)
    assert.equal(count, journal.count(app, "done", "attempts = 1 and crashes = 0"))
    journal.assert_once_each(app, count)
    worker:wait_for "event=executor_recycled pid=%d+ memory_mb=%d+ max_memory_mb=200"
    assert.truthy(times(worker, "event=executor_recycled") >= 2)
    assert.truthy(pids(app) >= 3, pids(app) .. " executors")
    assert.is_nil(worker:stderr():find "executor_died")
  end)
end)

describe("an executor with max_deliveries behind it", function()
  for _, case in ipairs {
    { "quick", "" },
    { "slow", "tidemill.sleep(0.05 * math.random())" },
  } do
    it("is replaced, though more could be in flight at a time: " .. case[1] .. " handlers", function()
      local app = journal.app {
        config = { subscribe = { t = "work" }, max_deliveries = 10 },
        handlers = { work = case[2] },
      }
      local worker = app:start()
      journal.publish_many(app, "t", 300)
      journal.wait_until_finished(app, 60)
      assert.equal(300, journal.count(app, "done", "attempts = 1 and crashes = 0"))
      journal.assert_once_each(app, 300)
      assert.truthy(pids(app) >= 30, pids(app) .. " executors")
      worker:wait_for "event=executor_recycled pid=%d+ deliveries=10\n"
      assert.is_nil(worker:stderr():find "executor_died")
    end)
  end

  it("and deliveries that last is no reason for ever more processes", function()
    local app = journal.app {
      config = { subscribe = { t = "work" }, max_deliveries = 2, concurrency = 6 },
      handlers = { work = [[ journal.wait_for "go" ]] },
    }
    app:start()
    journal.publish_many(app, "t", 40)
    journal.wait_until_begun(app, 6)
    -- What is published now would be claimed at once, if there were room.
    journal.publish(app, "t")
    app:wait_until(function()
      return app.db:value [[select clock_timestamp() - state_change > interval '1 s' from pg_stat_activity
        where datname = current_database() and application_name = 'tidemill work']] == "t"
    end, 20, "nothing is claimed any more")
    assert.equal(6, journal.count(app, "running"))
    assert.equal(3, pids(app))
    app:write("go", "")
    journal.wait_until_finished(app)
    journal.assert_once_each(app, 41)
  end)
end)
