-- Dedupe keys of rows that no publish function wrote: written by hand, or left in a lane that is
-- gone. One whose key is taken waits for its turn, and holds up nothing else.

local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- An app whose handler on topic `t` waits for the file that the payload names, if any.
local function start(config)
  config = config or {}
  config.subscribe = { t = "work" }
  local app = journal.app {
    config = config,
    handlers = { work = "if payload.file then journal.wait_for(payload.file) end" },
  }
  app:start()
  return app
end

local function insert(connection, key, payload, columns)
  return connection:value(([[insert into tidemill.queue_message (topic, subscriber, dedupe_key, payload%s)
    values ('t', 'work', $1, $2::jsonb%s) returning id]]):format(
      columns and ", " .. columns[1] or "", columns and ", " .. columns[2] or ""), key, payload or "{}")
end

local function wait_for(app, ids, status)
  for _, id in ipairs(ids) do
    journal.wait_for_status(app, id, status)
  end
end

-- Waits until the worker has given a lane to a row that came later, so that every row before it had
-- its chance.
local function wait_for_a_sweep(app)
  wait_for(app, { insert(app.db) }, "done")
end

describe("a row written by hand", function()
  it("waits for the message that has its dedupe key, and then runs; others do not wait", function()
    local app = start()
    local first = journal.publish(app, "t", '{"file": "go"}', "dedupe_key => 'k'")
    journal.wait_for_status(app, first, "running")
    local same = { insert(app.db, "k"), insert(app.db, "k") }
    wait_for(app, { insert(app.db, "other"), insert(app.db) }, "done")
    for _ = 1, 2 do
      wait_for_a_sweep(app)
      for _, id in ipairs(same) do
        local row = journal.row(app, id)
        assert.same({ "pending", "0" }, { row.status, row.attempts })
        assert.is_nil(row.lane)
      end
    end
    app:write("go", "")
    wait_for(app, { first, same[1], same[2] }, "done")
    journal.assert_once_each(app, 7)
  end)

  it("is one of several with one key: they run one after the other, the oldest first", function()
    local app = start()
    app.db:exec "begin"
    local ids = {}
    for i = 1, 3 do
      ids[i] = insert(app.db, "k", ('{"file": "go%d"}'):format(i))
    end
    local other = insert(app.db, "other")
    app.db:exec "commit"
    for i = 1, 3 do
      journal.wait_for_status(app, ids[i], "running")
      wait_for_a_sweep(app)
      assert.equal(1, journal.count(app, "running"))
      assert.equal(3 - i, journal.count(app, "pending", "lane is null"))
      app:write("go" .. i, "")
    end
    wait_for(app, { ids[3], other }, "done")
  end)

  it("with a key that an open transaction has published waits for its end; leases are renewed meanwhile", function()
    local app = start { lease_secs = 1 }
    local publisher = app:connect()
    publisher:exec "begin"
    local published = publisher:value "select (tidemill.publish('t', dedupe_key => 'k')).id"
    local same, other = insert(app.db, "k"), insert(app.db, "other")
    wait_for(app, { other }, "done")
    local began = app.db:value "select max(lease_until) from tidemill.worker"
    app:wait_until(function()
      return app.db:value(
        "select min(lease_until) > $1::timestamptz + interval '3 s' from tidemill.worker", began) == "t"
    end, 30, "the lease is renewed for three seconds")
    wait_for_a_sweep(app)
    assert.equal("pending", journal.row(app, same).status)
    publisher:exec "commit"
    wait_for(app, { published, same }, "done")
    assert.is_nil(app.processes[1]:stderr():find "sweep_refused")
    journal.assert_once_each(app, #journal.begun(app))
  end)

  it("runs beside a failed one with its key, which cannot be retried meanwhile", function()
    local app = start()
    local failed = journal.publish(app, "t", nil, "dedupe_key => 'k', available_at => now() + interval '1 h'")
    app.db:query([[update tidemill.queue_message set status = 'failed', error = 'boom', processed_at = now()
      where id = $1]], failed)
    local held = insert(app.db, "k", '{"file": "go"}')
    local waiting = insert(app.db, "k")
    journal.wait_for_status(app, held, "running")
    local refused = app.db:query("select * from tidemill.retry($1)", failed)[1]
    assert.same({ changed = "f", message = ("message %s stays failed: another one with the dedupe key `k` "
      .. "is unfinished"):format(failed) }, refused)
    app:write("go", "")
    wait_for(app, { held, waiting }, "done")
    assert.equal("t", app.db:query("select * from tidemill.retry($1)", failed)[1].changed)
    wait_for(app, { failed }, "done")
  end)

  it("waits for one with its key that a person retried", function()
    local app = start { lease_secs = 1 }
    local retried = journal.publish(app, "t", '{"file": "go"}', "dedupe_key => 'k', delay => '1 h'")
    app.db:query([[update tidemill.queue_message set status = 'failed', error = 'boom', processed_at = now()
      where id = $1]], retried)
    app.db:exec "begin"
    local late = insert(app.db, "k")
    assert.equal("t", app.db:query("select * from tidemill.retry($1)", retried)[1].changed)
    app.db:exec "commit"
    journal.wait_for_status(app, retried, "running")
    wait_for_a_sweep(app)
    assert.equal("pending", journal.row(app, late).status)
    app:write("go", "")
    wait_for(app, { retried, late }, "done")
  end)
end)

describe("a message in a lane that is gone", function()
  local LEFT = { "lane, updated_at", "4711, now() - interval '1 h'" }

  it("waits for the one that has its dedupe key in the new lane; others are taken over at once", function()
    local app = start { lease_secs = 1 }
    local first = journal.publish(app, "t", '{"file": "go"}', "dedupe_key => 'k'")
    journal.wait_for_status(app, first, "running")
    local same = insert(app.db, "k", "{}", LEFT)
    local others = { insert(app.db, "other", "{}", LEFT), insert(app.db, nil, "{}", LEFT) }
    wait_for(app, others, "done")
    wait_for(app, { insert(app.db, "more", "{}", LEFT) }, "done")
    local row = journal.row(app, same)
    assert.same({ "pending", "4711" }, { row.status, row.lane })
    app:write("go", "")
    wait_for(app, { first, same }, "done")
    assert.is_nil(app.processes[1]:stderr():find "sweep_refused")
  end)

  it("is taken over one after the other where two lanes that are gone have one key", function()
    local app = start { lease_secs = 1 }
    app.db:exec "begin"
    local ids = {
      insert(app.db, "k", '{"file": "go"}', LEFT),
      insert(app.db, "k", "{}", { "lane, updated_at", "4712, now() - interval '1 h'" }),
    }
    local other = insert(app.db, "other", "{}", LEFT)
    app.db:exec "commit"
    wait_for(app, { other }, "done")
    journal.wait_for_status(app, ids[1], "running")
    wait_for(app, { insert(app.db, "more", "{}", LEFT) }, "done")
    assert.equal("pending", journal.row(app, ids[2]).status)
    app:write("go", "")
    wait_for(app, ids, "done")
    assert.is_nil(app.processes[1]:stderr():find "sweep_refused")
  end)
end)
