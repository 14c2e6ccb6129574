-- In which order, how many at a time, and that no lane starves another.

local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- Publishes messages in one transaction, in this order: { name, options }.
local function publish_named(app, list)
  app.db:exec "begin"
  for _, item in ipairs(list) do
    journal.publish(app, "t", ('{"name": "%s"}'):format(item[1]), item[2])
  end
  app.db:exec "commit"
end

local MIXED = {
  { "plain 1" },
  { "last", "priority => 9" },
  { "first", "priority => -9" },
  { "plain 2" },
  { "early 1", "priority => -1" },
  { "early 2", "priority => -1" },
  { "plain 3" },
  { "never", "priority => -9, delay => '1 hour'" },
}
local EXPECTED = { "first", "early 1", "early 2", "plain 1", "plain 2", "plain 3", "last" }

describe("the order in a lane", function()
  it("is priority, due time, then the order of publishing, with one slot", function()
    local app = journal.app {
      config = { subscribe = { t = { work = { handler = "work", concurrency = 1 } } } },
      handlers = {
        work = [[ if payload.name == "hold" then journal.wait_for "go" else journal.note(payload.name) end ]],
      },
    }
    app:start()
    journal.publish(app, "t", '{"name": "hold"}')
    journal.wait_until_begun(app, 1)
    publish_named(app, MIXED)
    app:write("go", "")
    app:wait_until(function()
      return journal.count(app, "done") == 8
    end)
    assert.same(EXPECTED, journal.notes(app))
  end)

  it("is kept within one claim of many", function()
    local app = journal.app {
      config = { subscribe = { t = "work" } },
      handlers = { work = "journal.note(payload.name)" },
    }
    app:start()
    publish_named(app, MIXED)
    journal.wait_until_begun(app, 7)
    assert.same(EXPECTED, journal.notes(app))
  end)

  it("follows the due time before the order of publishing", function()
    local app = journal.app {
      config = { subscribe = { t = "work" } },
      handlers = { work = "journal.note(payload.name)" },
    }
    app:start():kill "STOP"
    publish_named(app, { { "second" }, { "third" }, { "first" } })
    app.db:query [[update tidemill.queue_message set available_at = now() - interval '1 minute'
      where payload ->> 'name' = 'first']]
    app.processes[1]:kill "CONT"
    journal.wait_until_begun(app, 3)
    assert.same({ "first", "second", "third" }, journal.notes(app))
  end)
end)

describe("a lane's concurrency", function()
  it("is the most of it that run at a time, while other lanes go on", function()
    local app = journal.app {
      config = {
        subscribe = { limited = { work = { handler = "work", concurrency = 3 } }, free = "other" },
      },
      handlers = { work = [[ journal.wait_for "go" ]], other = "" },
    }
    app:start()
    journal.publish_many(app, "limited", 10)
    journal.wait_until_begun(app, 3)
    for _ = 1, 3 do
      journal.wait_for_status(app, journal.publish(app, "free"), "done")
    end
    assert.equal(3, journal.count(app, "running", "topic = 'limited'"))
    assert.equal(7, journal.count(app, "pending", "topic = 'limited' and attempts = 0"))
    app:write("go", "")
    journal.wait_until_finished(app)
    journal.assert_once_each(app, 13)
  end)
end)

describe("a lane with thousands waiting", function()
  it("does not keep another from starting within two claims", function()
    local app = journal.app {
      config = { concurrency = 8, batch = 8, subscribe = { deep = "slow", other = "held" }, shutdown_secs = 0.1 },
      handlers = { slow = "tidemill.sleep(0.2)", held = [[ journal.wait_for "go" ]] },
    }
    app:start()
    journal.publish_many(app, "deep", 20000)
    app:wait_until(function()
      return journal.count(app, "done") >= 16
    end)
    local last_claim = [[select max(split_part(claimed_by, '#', 2)::int) from tidemill.queue_message
      where processed_at is null and status = 'running']]
    for round = 1, 3 do
      local id = journal.publish(app, "other")
      local seen = tonumber(app.db:value(last_claim))
      local row = journal.wait_for_status(app, id, "running")
      local taken = tonumber(row.claimed_by:match "#(%d+)$")
      assert.truthy(taken <= seen + 2,
        ("round %d: claim %d took it, %d was the last before"):format(round, taken, seen))
    end
    app:write("go", "")
  end)
end)

describe("a message whose publisher commits late", function()
  local function new_app(body, config)
    config.subscribe = { t = "work" }
    local app = journal.app { config = config, handlers = { work = body } }
    app:start()
    return app
  end

  it("is found although later ones were claimed before", function()
    local app = new_app("", {})
    local late = app:connect()
    for _ = 1, 3 do
      late:exec "begin"
      local id = late:value "select (tidemill.publish('t')).id"
      for _ = 1, 5 do
        journal.publish_many(app, "t", 20)
        journal.wait_until_finished(app)
      end
      late:exec "commit"
      journal.wait_for_status(app, id, "done")
    end
  end)

  it("is found in its turn while thousands wait", function()
    local app = new_app("tidemill.sleep(0.02)", { concurrency = 10, batch = 10, shutdown_secs = 1 })
    local late = app:connect()
    late:exec "begin"
    local id = late:value "select (tidemill.publish('t', notify => false)).id"
    journal.publish_many(app, "t", 5000)
    journal.wait_until_begun(app, 100)
    late:exec "commit"
    journal.wait_for_status(app, id, "done")
    local waiting = journal.count(app, "pending")
    assert.truthy(waiting > 2000, waiting .. " still wait")
  end)
end)
