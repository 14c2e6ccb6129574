-- What live workers do for all from time to time: finished rows are pruned by their own lane's rule,
-- lanes that nobody declares are removed, what waits in such a lane finds another or fails, and rows
-- written by hand get a lane.
--
-- That something is left alone is shown by something of the same sweep that was not.

local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- With a lease of two seconds the sweeps come about every second.
local function new_app(subscribe, config)
  config = config or {}
  config.subscribe = subscribe
  config.lease_secs = 2
  return journal.app { config = config, handlers = { work = "", other = "" } }
end

-- The same app with another config, or another app, on the same database: start a worker by it.
local function beside(app, subscribe, name)
  local second = journal.app {
    config = { app = name, subscribe = subscribe, lease_secs = 2 },
    handlers = { work = "", other = "" },
    database = false,
  }
  second.dsn = app.dsn
  return second
end

local function lane(app, topic, subscriber)
  return app.db:value("select lane from tidemill.subscription where topic = $1 and subscriber = $2", topic, subscriber)
end

-- A lane that nobody declares, of an app that may not even exist.
local function insert_lane(app, owner, topic, subscriber, retain_hours)
  return app.db:value([[insert into tidemill.subscription (app, topic, subscriber, retain_hours, updated_at)
    values ($1, $2, $3, $4, now() - interval '1 h') returning lane]], owner, topic, subscriber, retain_hours or 24)
end

describe("prune", function()
  -- Finished rows `hours` ago; the payload says whether they are to go.
  local function insert(app, in_lane, status, hours, goes, why)
    return app.db:value([[insert into tidemill.queue_message
      (topic, subscriber, lane, status, available_at, processed_at, error, payload)
      select coalesce(s.topic, 'gone'), coalesce(s.subscriber, ''), l.lane, $2, now() - $3::float8 * interval '1 h',
        now() - $3::float8 * interval '1 h', $5, jsonb_build_object('goes', $4::boolean)
      from (select $1::integer) as l (lane) left join tidemill.subscription as s on s.lane = l.lane
      returning id]], in_lane, status, hours, goes, why)
  end

  -- For each status that is pruned, a row on either side of the lane's limit.
  local function insert_around(app, in_lane, limit_hours)
    for _, kind in ipairs { { "done" }, { "discarded" }, { "discarded", "no longer wanted" } } do
      insert(app, in_lane, kind[1], limit_hours - 0.1, false, kind[2])
      insert(app, in_lane, kind[1], limit_hours + 0.1, true, kind[2])
    end
  end

  it("follows each lane's own rule, whoever does it; dead letters stay", function()
    -- Its own default would keep for five hours.
    local app = new_app({
      t = {
        brief = { handler = "work", retain_hours = 3 },
        long = { handler = "work", retain_hours = 1000 },
        ever = { handler = "work", retain_hours = 0 },
        usual = { handler = "work" },
      },
    }, { retain_hours = 5 })
    app:start()
    app:stop()
    insert_around(app, lane(app, "t", "brief"), 3)
    insert_around(app, lane(app, "t", "long"), 1000)
    insert_around(app, lane(app, "t", "usual"), 5)
    -- Other apps' lanes, of which the worker knows nothing.
    insert_around(app, insert_lane(app, "shop", "theirs", "brief", 2), 2)
    insert_around(app, insert_lane(app, "shop", "theirs", "long", 500), 500)
    -- A day for what has no lane, and for what is left of one that was removed.
    insert_around(app, nil, 24)
    insert_around(app, 4711, 24)
    for _, kept_for_ever in ipairs { lane(app, "t", "ever"), insert_lane(app, "shop", "theirs", "ever", 0) } do
      for _, status in ipairs { "done", "discarded" } do
        insert(app, kept_for_ever, status, 100000, false)
        insert(app, kept_for_ever, status, 100000, false, "a reason")
      end
    end
    for _, at in ipairs { lane(app, "t", "brief"), lane(app, "t", "ever"), 4711 } do
      insert(app, at, "failed", 100000, false, "boom")
    end
    local waiting = app.db:value([[insert into tidemill.queue_message
      (topic, subscriber, lane, available_at, created_at, payload)
      values ('t', 'brief', $1, now() + interval '1 h', now() - interval '1 year', '{"goes": false}')
      returning id]], lane(app, "t", "brief"))
    local kept = app.db:value "select count(*) from tidemill.queue_message where payload = '{\"goes\": false}'"
    app:start()
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.queue_message where payload = '{\"goes\": true}'" == "0"
    end, 20, "what is too old is gone")
    assert.equal(kept, app.db:value "select count(*) from tidemill.queue_message")
    assert.equal("pending", journal.row(app, waiting).status)
  end)

  it("of what was published to nobody waits a day", function()
    local app = new_app { t = "work" }
    app:start()
    local ids = {}
    for i = 1, 2 do
      ids[i] = journal.publish(app, "nobody")
      assert.equal("done", journal.row(app, ids[i]).status)
    end
    app.db:query("update tidemill.queue_message set processed_at = now() - interval '25 h' where id = $1", ids[1])
    app.db:query("update tidemill.queue_message set processed_at = now() - interval '23 h' where id = $1", ids[2])
    app:wait_until(function()
      return not journal.row(app, ids[1])
    end, 20, "the older one is gone")
    assert.truthy(journal.row(app, ids[2]))
  end)

  it("follows the rule that was last deployed", function()
    local app = new_app { t = { work = { handler = "work", retain_hours = 100 } } }
    app:start()
    local id = journal.publish(app, "t")
    journal.wait_for_status(app, id, "done")
    app.db:query("update tidemill.queue_message set processed_at = now() - interval '10 h' where id = $1", id)
    app:stop()
    app:write_config([[return { subscribe = { t = { work = { handler = "work", retain_hours = 9 } } },
      executors = 1, poll_secs = 3600, lease_secs = 2 }]])
    app:start()
    app:wait_until(function()
      return not journal.row(app, id)
    end, 20, "the message is gone")
  end)
end)

describe("a lane", function()
  it("that its app no longer declares is removed; those of other apps and of apps that are down stay", function()
    local app = new_app { t = { "work", "other" } }
    app:start()
    app:stop()
    local shop = beside(app, { s = "work" }, "shop")
    app:write_config [[return { subscribe = { t = "work" }, executors = 1, poll_secs = 3600, lease_secs = 2 }]]
    -- Of three apps: one that never had a worker, one whose worker died long ago, one that is down.
    insert_lane(app, "never", "n", "work")
    insert_lane(app, "dead", "d", "work")
    app.db:query [[insert into tidemill.worker (id, app, lease_secs, lease_until, lanes)
      values ('old', 'dead', 2, now() - interval '1 h', '{}')]]
    local shop_worker = shop:start()
    -- While nobody of `app` is there, its lanes stay, though another sweeps and removes its own.
    local undeclared = insert_lane(app, "shop", "s", "given up")
    shop_worker:wait_for 'event=lane_removed topic=s subscriber="given up"'
    assert.is_nil(app.db:value("select 1 from tidemill.subscription where lane = $1", undeclared))
    assert.truthy(lane(app, "t", "work"))
    assert.truthy(lane(app, "t", "other"))

    app:start()
    app:wait_until(function()
      return not lane(app, "t", "other")
    end, 20, "the lane is removed")
    local left = {}
    for _, row in ipairs(app.db:query "select topic, subscriber from tidemill.subscription order by 1, 2") do
      table.insert(left, row.topic .. "/" .. row.subscriber)
    end
    assert.same({ "d/work", "n/work", "s/work", "t/work" }, left)
    -- Which of the two workers did it, nobody knows.
    local logs = shop_worker:stderr() .. app.processes[2]:stderr()
    local _, times = logs:gsub("event=lane_removed topic=t subscriber=other", "")
    assert.equal(1, times)
  end)

  it("stays while two configs of one app are deployed, and goes with its last worker", function()
    local app = new_app { t = { "work", "other" } }
    local old = app:start()
    local newer = beside(app, { t = "work", u = "other" })
    newer:start()
    insert_lane(app, "app", "t", "given up")
    app:wait_until(function()
      return not lane(app, "t", "given up")
    end, 20, "the lane that neither declares is removed")
    for _, pair in ipairs { { "t", "work" }, { "t", "other" }, { "u", "other" } } do
      assert.truthy(lane(app, pair[1], pair[2]), table.concat(pair, "/"))
    end
    assert.equal("2", app.db:value "select delivered from tidemill.publish('t')")
    app:stop(old)
    app:wait_until(function()
      return not lane(app, "t", "other")
    end, 20, "the lane goes with the old worker")
    assert.truthy(lane(app, "t", "work"))
    assert.truthy(lane(app, "u", "other"))
    assert.equal("1", app.db:value "select delivered from tidemill.publish('t')")
    newer:stop()
  end)
end)

describe("what waits in a lane that is gone", function()
  -- Old enough: a message may be on its way for as long as a deploy takes.
  local function leave_behind(app, in_lane, topic, subscriber)
    return app.db:value([[insert into tidemill.queue_message (lane, topic, subscriber, updated_at)
      values ($1, $2, $3, now() - interval '1 h') returning id]], in_lane, topic, subscriber)
  end

  local function text(topic, subscriber)
    return ("`%s` is subscribed to `%s` but no such handler is loaded"):format(subscriber, topic)
  end

  it("fails where live workers serve its topic, and waits where nobody does", function()
    local app = new_app { t = { "work", "other" } }
    app:start()
    app:stop()
    local removed = lane(app, "t", "other")
    journal.publish(app, "t")
    journal.publish(app, "t", nil, "delay => '1 h'")
    app.db:exec "update tidemill.queue_message set updated_at = now() - interval '1 h'"
    app:write_config [[return { subscribe = { t = "work" }, executors = 1, poll_secs = 3600, lease_secs = 2 }]]
    local stays = {
      leave_behind(app, nil, "unserved", "work"), leave_behind(app, 4711, "unserved", "work"),
      -- A lane that exists, though nobody serves it now.
      leave_behind(app, insert_lane(app, "shop", "s", "work"), "s", "work"),
      -- Published to nobody, as it seems; a subscriber may yet come.
      leave_behind(app, nil, "t", ""),
    }
    local goes = { leave_behind(app, nil, "t", "ghost"), leave_behind(app, 4711, "t", "ghost") }
    local worker = app:start()
    for _, id in ipairs(goes) do
      local row = journal.wait_for_status(app, id, "failed", 20)
      assert.same({ text("t", "ghost"), "0" }, { row.error, row.attempts })
      assert.truthy(row.processed_at)
    end
    -- Both of what was published for the pair that is gone, the one that was not due too.
    app:wait_until(function()
      return journal.count(app, "failed", "subscriber = 'other'") == 2
    end, 20, "what waited in the removed lane has failed")
    for _, row in ipairs(app:ledger "subscriber = 'other'") do
      assert.same({ text("t", "other"), removed }, { row.error, row.lane })
    end
    worker:wait_for(("event=message_failed message_id=%%x[^\n]* topic=t subscriber=other[^\n]* error=\"%s"):format(
      text("t", "other"):gsub("%p", "%%%0")))
    for _, id in ipairs(stays) do
      assert.equal("pending", journal.row(app, id).status)
    end
    -- The other subscriber has lost nothing.
    assert.equal(1, journal.count(app, "done", "subscriber = 'work' and topic = 't'"))
    assert.equal(1, journal.count(app, "pending", "subscriber = 'work' and topic = 't'"))

    -- A dead letter like any other: with its handler back, it gets a new life in the pair's new lane.
    app:stop()
    app:write_config [[return { subscribe = { t = { "work", "other" } }, executors = 1, poll_secs = 3600 }]]
    app:start()
    local lost = app:ledger "subscriber = 'other' and available_at <= now()"[1].id
    assert.equal("t", app.db:query("select * from tidemill.retry($1)", lost)[1].changed)
    assert.equal(lane(app, "t", "other"), journal.wait_for_status(app, lost, "done").lane)
    assert.are_not.equal(removed, lane(app, "t", "other"))
    assert.equal(1, #journal.begun(app, lost))
  end)

  it("goes to the lane that its pair has now, and runs", function()
    local app = new_app { t = { "work", "other" } }
    app:start()
    local ids = {
      leave_behind(app, 4711, "t", "work"), leave_behind(app, 4711, "t", "other"), leave_behind(app, 4712, "t", "work"),
    }
    for _, id in ipairs(ids) do
      local row = journal.wait_for_status(app, id, "done", 20)
      assert.equal(lane(app, "t", row.subscriber), row.lane)
      assert.equal("1", row.attempts)
    end
    journal.assert_once_each(app, 3)
  end)

  it("and runs is let finish by its worker", function()
    local app = journal.app {
      config = { subscribe = { t = "work" }, lease_secs = 2 },
      handlers = { work = [[ journal.wait_for "go" ]] },
    }
    app:start()
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    app.db:query("update tidemill.queue_message set lane = 4711, updated_at = now() - interval '1 h' where id = $1", id)
    local ghost = leave_behind(app, 4711, "t", "ghost")
    journal.wait_for_status(app, ghost, "failed", 20)
    assert.equal("running", journal.row(app, id).status)
    app:write("go", "")
    assert.equal("1", journal.wait_for_status(app, id, "done").attempts)
    journal.assert_once_each(app, 1)
  end)
end)

describe("a row written by hand", function()
  it("gets the lane of its pair within seconds, whoever's pair it is", function()
    -- Nothing but the stamp comes so soon with this lease.
    local app = journal.app { config = { subscribe = { t = "work" }, lease_secs = 300 }, handlers = { work = "" } }
    app:start()
    local theirs = insert_lane(app, "shop", "s", "work")
    app.db:exec [[insert into tidemill.queue_message (topic, subscriber) values ('t', 'work'), ('s', 'work'),
      ('t', 'ghost')]]
    app:wait_until(function()
      return journal.count(app, "done", "topic = 't' and subscriber = 'work' and attempts = 1") == 1
        and journal.count(app, "pending", "topic = 's' and lane = " .. theirs) == 1
    end, 10, "both have the lane of their pair")
    assert.equal(1, journal.count(app, "pending", "subscriber = 'ghost' and lane is null"))
    -- With a few thousand at once it does not take longer.
    app.db:exec [[insert into tidemill.queue_message (topic, subscriber)
      select 't', 'work' from generate_series(1, 3000)]]
    app:wait_until(function()
      return journal.count(app, "done", "subscriber = 'work'") == 3001
    end, 30, "all have run")
  end)
end)
