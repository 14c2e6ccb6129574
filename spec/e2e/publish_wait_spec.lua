-- A dedupe key that a stranger's open transaction has published: whoever publishes it too must wait for
-- that transaction, and nobody else may. All handlers of a worker share one connection for publishing.

local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- `same` publishes the key, `other` without a key; what they publish is held at `sink`, so that the key
-- stays taken. Both tell when they ask and when they are answered.
local function start(same)
  local app = journal.app {
    config = { subscribe = { same = "same", other = "other", sink = "sink" }, max_attempts = 1 },
    handlers = {
      same = same,
      other = [[ tidemill.publish("sink", { by = "other" }); journal.note "other answered" ]],
      sink = [[ journal.wait_for "go" ]],
    },
  }
  return app, app:start()
end

local PUBLISHES = [[
  journal.note "same asks"
  tidemill.publish("sink", { by = "same" }, { dedupe_key = "k" })
  journal.note "same answered"
]]

-- A stranger's transaction with the key, still open.
local function open_transaction(app)
  local stranger = app:connect()
  stranger:exec "begin; select tidemill.publish('sink', '{\"by\": \"stranger\"}', dedupe_key => 'k')"
  return stranger
end

local function count_notes(app, text)
  local count = 0
  for _, note in ipairs(journal.notes(app)) do
    count = count + (note == text and 1 or 0)
  end
  return count
end

-- Publishes `count` messages that ask for the key, and waits until the database was asked for it.
local function publish_same(app, count)
  local since = app.db:value "select clock_timestamp()"
  journal.publish_many(app, "same", count)
  app:wait_until(function()
    return #journal.begun(app) >= count
  end, 10, "the handlers have begun")
  app:wait_until(function()
    return app.db:value([[select 1 from pg_stat_activity where datname = current_database()
      and application_name = 'tidemill publish' and query_start > $1::timestamptz]], since)
  end, 10, "the key was asked for")
end

local function publish_others(app, count)
  local before = count_notes(app, "other answered")
  for i = 1, count do
    journal.publish(app, "other")
    app:wait_until(function()
      return count_notes(app, "other answered") == before + i
    end, 10, "another publish has gone through")
  end
end

-- Whose messages with the key are unfinished.
local function holders(app)
  local list = {}
  for i, row in ipairs(app:ledger "dedupe_key = 'k' and processed_at is null") do
    list[i] = row.payload:match '"by": "(%a+)"'
  end
  return list
end

local function index_of(list, text)
  for i, item in ipairs(list) do
    if item == text then
      return i
    end
  end
end

describe("a dedupe key in a stranger's open transaction", function()
  it("holds up the handlers that publish it, and no others", function()
    local app = start(PUBLISHES)
    local stranger = open_transaction(app)
    publish_same(app, 1)
    publish_others(app, 3)
    stranger:exec "commit"
    app:wait_until(function()
      return count_notes(app, "same answered") == 1
    end, 10, "the one that waited is answered")
    local notes = journal.notes(app)
    assert.truthy(index_of(notes, "other answered") < index_of(notes, "same answered"), table.concat(notes, ", "))
    -- The stranger's was there first.
    assert.same({ "stranger" }, holders(app))
    app:write("go", "")
    journal.wait_until_finished(app)
    assert.equal(1, journal.count(app, "done", "dedupe_key = 'k'"))
    assert.equal(3, journal.count(app, "done", "topic = 'sink' and dedupe_key is null"))
    assert.equal(0, journal.count(app, "failed"))
  end)

  it("is taken by the first of many that waited, when it is rolled back", function()
    local app = start(PUBLISHES)
    local stranger = open_transaction(app)
    publish_same(app, 30)
    publish_others(app, 3)
    stranger:exec "rollback"
    app:wait_until(function()
      return count_notes(app, "same answered") == 30
    end, 10, "all that waited are answered")
    assert.same({ "same" }, holders(app))
    app:write("go", "")
    journal.wait_until_finished(app)
    assert.equal(1, journal.count(app, "done", "dedupe_key = 'k'"))
    journal.assert_once_each(app, 30 + 3 + 4)
  end)

  it("is waited for some seconds, and then it is said what was waited for", function()
    local app = start(PUBLISHES)
    open_transaction(app)
    publish_same(app, 3)
    app:wait_until(function()
      publish_others(app, 1)
      return journal.count(app, "failed") == 3
    end, 30, "those that waited have failed")
    for _, row in ipairs(app:ledger "status = 'failed'") do
      assert.truthy(row.error:find("another transaction, still open after 5 s, publishes the same dedupe key or has "
        .. "locked the table: try again", 1, true), row.error)
    end
    assert.equal(0, count_notes(app, "same answered"))
    app:write("go", "")
  end)

  it("holds up the end of a message whose handler publishes it by ctx, for as long as it takes", function()
    local app, worker = start [[ journal.note "same asks"; ctx:publish("sink", { by = "same" }, { dedupe_key = "k" }) ]]
    local stranger = open_transaction(app)
    publish_same(app, 10)
    publish_others(app, 3)
    assert.equal(10, journal.count(app, "running", "topic = 'same'"))
    stranger:exec "commit"
    app:wait_until(function()
      return journal.count(app, "done", "topic = 'same' and attempts = 1") == 10
    end, 20, "those that waited are done")
    app:write("go", "")
    journal.wait_until_finished(app)
    assert.equal(1, journal.count(app, "done", "dedupe_key = 'k'"))
    journal.assert_once_each(app, 10 + 3 + 4)
    assert.is_nil(worker:stderr():find "outcome_refused")
  end)
end)

describe("a locked table", function()
  it("makes publishes wait; when it is free again all go through", function()
    local app = start [[ journal.wait_for "publish"; tidemill.publish("sink", { by = "same" }) ]]
    journal.publish_many(app, "same", 5)
    journal.wait_until_begun(app, 5)
    local stranger = app:connect()
    local since = app.db:value "select clock_timestamp()"
    stranger:exec "begin; lock table tidemill.subscription in access exclusive mode"
    app:write("publish", "")
    app:wait_until(function()
      return app.db:value([[select 1 from pg_stat_activity where datname = current_database()
        and application_name = 'tidemill publish' and query_start > $1::timestamptz]], since)
    end, 10, "the handlers have tried to publish")
    assert.equal(5, journal.count(app, "running"))
    stranger:exec "commit"
    app:write("go", "")
    journal.wait_until_finished(app)
    assert.equal(5, journal.count(app, "done", "topic = 'sink'"))
    journal.assert_once_each(app, 10)
  end)
end)
