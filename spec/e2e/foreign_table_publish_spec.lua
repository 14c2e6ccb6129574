-- Publishing from handlers into a table of another program, where no SQL function of ours exists.

local foreign = require "spec.support.foreign"
local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- An app whose handler `work` runs this body on topic `t`, started. It subscribes to `one` once and to
-- `two` twice.
local function start_publisher(body, config)
  config = config or {}
  config.subscribe = { t = "work", one = "first", two = { "first", "second" } }
  config.max_attempts = config.max_attempts or 1
  local app = foreign.app { config = config, handlers = { work = body, first = "", second = "" } }
  app:start()
  return app
end

local function run(app, payload, status)
  return foreign.wait_for_status(app, foreign.insert(app, "t", "work", payload), status or "done")
end

local function published(app)
  return app:ledger "topic <> 't'"
end

describe("publishing into a foreign table", function()
  it("writes a row for each subscriber of the config, announces them, and answers", function()
    local app = start_publisher [[
      journal.note(tidemill.json.encode(tidemill.publish(" two ", { a = { 1, tidemill.null } }, { delay_secs = 60 })))
      ctx:publish("one", nil, { published_by = "bob" })
    ]]
    local listener = app:connect()
    listener:exec "listen shop_queue"
    run(app)
    local rows = app:ledger "topic = 'two'"
    assert.equal(2, #rows)
    local by_subscriber = {}
    for _, row in ipairs(rows) do
      by_subscriber[row.subscriber] = row
      assert.same({ "pending", '{"a": [1, null]}', "0", "ann" },
        { row.status, row.payload, row.attempts, row.published_by })
      assert.equal("7", row.id:sub(15, 15))
    end
    assert.equal("2", app.db:value [[select count(*) from other.queue_message
      where topic = 'two' and available_at = created_at + interval '60 s' and updated_at = created_at]])
    assert.equal("t", app.db:value([[select $1::jsonb =
      jsonb_build_object('id', $2::text, 'topic', 'two', 'delivered', 2, 'duplicate', false)]],
      journal.notes(app)[1], by_subscriber.first.id))
    app:wait_until(function()
      return foreign.count(app, "topic = 'one' and status = 'done' and published_by = 'bob' and payload = '{}'") == 1
    end, 10, "what was published with the message's done is run")
    local heard = {}
    for _ = 1, 3 do
      table.insert(heard, listener:wait_notify(5).payload)
    end
    table.sort(heard)
    assert.same({ "one", "t", "two" }, heard)
  end)

  it("records what nobody wants as done, with a warning and no notification", function()
    local app = start_publisher "ctx:publish('nobody', { a = 1 })"
    local listener = app:connect()
    listener:exec "listen shop_queue"
    run(app)
    local row = published(app)[1]
    assert.same({ "done", "", '{"a": 1}', "0" }, { row.status, row.subscriber, row.payload, row.attempts })
    assert.is_not_nil(row.processed_at)
    app.processes[1]:wait_for "event=nobody_subscribes published_topic=nobody"
    assert.equal("t", listener:wait_notify(5).payload)
    assert.is_nil(listener:wait_notify(0.2))
  end)

  it("with the message's done happens when it is done, and not before", function()
    local app = start_publisher("ctx:publish('one') if ctx.attempts < 3 then error 'not yet' end",
      { max_attempts = 3, retry_backoff_secs = 0 })
    run(app)
    assert.equal(1, #published(app))
    app = start_publisher("ctx:publish('one') error 'never'")
    run(app, "{}", "failed")
    assert.equal(0, #published(app))
  end)

  it("says what the table has no column for", function()
    local app = start_publisher "ctx:publish('one') ctx:publish('one', {}, payload)"
    for options, name in pairs {
      ['{"priority": 1}'] = "priority", ['{"dedupe_key": "k"}'] = "dedupe_key",
      ['{"max_attempts": 2}'] = "max_attempts", ['{"headers": {"a": 1}}'] = "headers",
    } do
      local row = run(app, options, "failed")
      assert.equal(('what the handler published was refused: item 2: `%s` is not available: '
        .. 'the table "queue_message" has no column for it'):format(name), row.error)
    end
    assert.equal(0, #published(app))
  end)

  it("says so to a handler that publishes at once, too", function()
    local app = start_publisher([[
      payload.message = payload.number and tidemill.decimal(payload.number) or payload.message
      tidemill.publish(payload.topic, payload.message, payload.options)
    ]], { max_payload_bytes = 1000 })
    for payload, expected in pairs {
      ['{"topic": "one", "options": {"priority": 1}}'] =
        '`priority` is not available: the table "queue_message" has no column for it',
      [('{"topic": "one", "message": "%s"}'):format(("x"):rep(990))] = true,
      [('{"topic": "one", "message": {"%s": 1}}'):format(("x"):rep(900))] = false,
      ['{"topic": "one", "message": "\\u0001"}'] = false,
      ['{"topic": "one", "number": "1e999999"}'] = "not JSON: value overflows numeric format",
      ['{"topic": "one", "options": {"at": "2030-02-31T00:00:00Z"}}'] = "date/time field value out of range",
    } do
      local row = run(app, payload, expected and "failed" or "done")
      if type(expected) == "string" then
        assert.truthy(row.error:find(expected, 1, true), row.error)
      end
    end
    assert.equal(2, #published(app))
  end)

  it("measures the payload as the database prints it", function()
    local app = start_publisher("tidemill.publish('one', ('x'):rep(payload))", { max_payload_bytes = 1000 })
    run(app, "998")
    local row = run(app, "999", "failed")
    assert.truthy(row.error:find("the payload has 1001 bytes as text, at most 1000 are allowed (`max_payload_bytes`)",
      1, true), row.error)
    assert.equal(1, #published(app))
  end)
end)
