-- Lanes in the database while a worker runs.

local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local function subscriptions(app)
  return tonumber(app.db:value "select count(*) from tidemill.subscription")
end

describe("a subscription that somebody deleted under a worker that runs", function()
  it("is there again after the next renewal, and its messages go on", function()
    local app = journal.app {
      config = { lease_secs = 3, subscribe = { t = { "work", "tell" }, u = "work" } },
      handlers = { work = "", tell = "" },
    }
    local worker = app:start()
    local id = app.db:value "select id from tidemill.worker"
    app.db:exec "delete from tidemill.subscription where topic = 't'"
    worker:wait_for "event=lanes_restored lanes=3"
    assert.equal(3, subscriptions(app))
    journal.publish(app, "t")
    journal.publish(app, "u")
    journal.wait_until_finished(app)
    assert.equal(3, journal.count(app, "done"))
    assert.equal(id, app.db:value "select id from tidemill.worker")
    assert.equal("3", app.db:value [[select count(*) from tidemill.subscription as s
      join tidemill.worker as w on s.lane = any (w.lanes)]])
  end)

  it("gets what waited in it before", function()
    local app = journal.app {
      config = { lease_secs = 2, concurrency = 1, subscribe = { t = "work" } },
      handlers = { work = [[ journal.wait_for "go" ]] },
    }
    local worker = app:start()
    journal.publish_many(app, "t", 5)
    journal.wait_until_begun(app, 1)
    app.db:exec "delete from tidemill.subscription"
    worker:wait_for "event=lanes_restored lanes=1"
    app:write("go", "")
    journal.wait_until_finished(app)
    assert.equal(5, journal.count(app, "done", "attempts = 1"))
    journal.assert_once_each(app, 5)
  end)
end)
