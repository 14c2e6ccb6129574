-- How a delivery can end otherwise than well, and that one row which cannot be written costs the
-- others nothing.

local journal = require "spec.support.journal"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- An app with one handler, `work`, on topic `t`, started.
local function start(body, config)
  config = config or {}
  config.subscribe = config.subscribe or { t = "work" }
  local app = journal.app { config = config, handlers = { work = body } }
  return app, app:start()
end

-- Waits for the end of a message's first attempt, which must send it back; returns its row.
local function wait_until_back(app, id)
  return app:wait_until(function()
    local row = journal.row(app, id)
    return row.status == "pending" and row.error and row
  end, 30, "the message is pending again")
end

-- Seconds from the moment a message went back until it is due.
local function delay_of(app, id)
  return tonumber(app.db:value(
    "select extract(epoch from available_at - updated_at)::float8 from tidemill.queue_message where id = $1", id))
end

describe("a handler that raises", function()
  it("is run again after the backoff, and the ledger says why", function()
    local app = start([[ error "no such order" ]], { retry_backoff_secs = 40 })
    local id = journal.publish(app, "t")
    local row = wait_until_back(app, id)
    assert.equal("1", row.attempts)
    assert.is_nil(row.claimed_by)
    assert.is_nil(row.processed_at)
    assert.truthy(row.error:find("^[^\n]*work%.lua:4: no such order\nstack traceback:\n\t"), row.error)
    assert.equal(40, delay_of(app, id))
    assert.equal("t", app.db:value([[select jsonb_array_length(errors) = 1 and errors -> 0 ->> 'attempt' = '1'
      and errors -> 0 ->> 'error' like '%no such order%' and (errors -> 0 ->> 'at')::timestamptz <= now()
      and errors -> 0 ->> 'by' like '%#%' from tidemill.queue_message]]))
  end)

  it("waits twice as long after each failure", function()
    local app = start([[ error "again" ]], { retry_backoff_secs = 40, max_attempts = 100 })
    local id = journal.publish(app, "t")
    for attempt, expected in ipairs { 40, 80, 160 } do
      app:wait_until(function()
        return #journal.begun(app) == attempt and journal.row(app, id).status == "pending"
      end)
      assert.equal(expected, delay_of(app, id))
      app.db:query("select tidemill.reschedule($1, now())", id)
    end
  end)

  it("is run again when it is due, without a notification or a poll", function()
    local app = start([[ if ctx.attempts == 1 then error "first" end ]], { notify = false, retry_backoff_secs = 1 })
    journal.publish(app, "t")
    app:stop()
    app:start()
    journal.wait_until_finished(app)
    assert.equal(2, #journal.begun(app))
  end)

  it("keeps the last five errors, and ends as a dead letter", function()
    local app = start([[ error("attempt " .. ctx.attempts) ]], { retry_backoff_secs = 0, max_attempts = 7 })
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    assert.equal("7", row.attempts)
    assert.truthy(row.error:find("attempt 7", 1, true))
    assert.truthy(row.processed_at)
    assert.equal("3 4 5 6 7", app.db:value [[select string_agg(e ->> 'attempt', ' ' order by n)
      from tidemill.queue_message, jsonb_array_elements(errors) with ordinality as x(e, n)]])
    assert.equal("t", app.db:value [[select bool_and(e ->> 'error' like '%attempt ' || (e ->> 'attempt') || '%')
      from tidemill.queue_message, jsonb_array_elements(errors) as e]])
    assert.equal(7, #journal.begun(app))
  end)

  it("is run as often as its own row says", function()
    local app = start([[ error "always" ]], { retry_backoff_secs = 0, max_attempts = 5 })
    local once = journal.publish(app, "t", "{}", "max_attempts => 1")
    local twice = journal.publish(app, "t", "{}", "max_attempts => 2")
    journal.wait_for_status(app, once, "failed")
    journal.wait_for_status(app, twice, "failed")
    assert.equal(1, #journal.begun(app, once))
    assert.equal(2, #journal.begun(app, twice))
  end)

  it("with anything at all leaves a text that Postgres takes", function()
    local raised = {
      { "error()", "the error is nil" },
      { "error(nil)", "the error is nil" },
      { "error(false)", "the error is false" },
      { "error(42)", "42" },
      { "error({ code = 7 })", '{"code":7}' },
      { "error(function() end)", "the error is a function" },
      { "error(setmetatable({}, { __tostring = function() return 'rendered' end }))", "rendered" },
      { "error(setmetatable({}, { __tostring = function() error 'worse' end }))", "__tostring fails" },
      { "error('a\\0b', 0)", "a\239\191\189b" },
      { "error('bad \\255\\254 bytes', 0)", "bad \239\191\189\239\191\189 bytes" },
      { "error('', 0)", "" },
      { "local t = {}; t.t = t; error(t)", "the error is a table" },
      { "local function deep() return deep() + 1 end; deep()", "stack overflow" },
    }
    local chunks = {}
    for i, case in ipairs(raised) do
      chunks[i] = ("function() %s end,"):format(case[1])
    end
    local body = ("local cases = { %s }\ncases[payload.n]()"):format(table.concat(chunks, "\n"))
    local app = start(body, { max_attempts = 1 })
    journal.publish_many(app, "t", #raised)
    journal.wait_until_finished(app)
    for i, case in ipairs(raised) do
      local row = app:ledger("payload ->> 'n' = $1", i)[1]
      assert.equal("failed", row.status)
      assert.truthy(row.error:find(case[2], 1, true), case[1] .. ": " .. row.error)
      assert.truthy(#row.error > 0)
    end
  end)

  it("with a long text is cut on a character, not in one", function()
    local app = start([[ error(("é"):rep(5000), 0) ]], { max_attempts = 1 })
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    assert.equal(4000 + #"…", #row.error)
    assert.equal(("é"):rep(2000) .. "…", row.error)
    assert.equal(("é"):rep(250) .. "…", app.db:value "select errors -> 0 ->> 'error' from tidemill.queue_message")
  end)
end)

describe("a handler says", function()
  it("ctx:retry, and is run again after the time it gave", function()
    local app = start([[ ctx:retry(100, "busy") ]], { retry_backoff_secs = 5 })
    local id = journal.publish(app, "t")
    local row = wait_until_back(app, id)
    assert.same({ "1", "busy" }, { row.attempts, row.error })
    assert.equal(100, delay_of(app, id))
  end)

  it("ctx:retry in its last attempt, and fails", function()
    local app = start([[ ctx:retry(0, "busy") ]], { max_attempts = 3 })
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "failed")
    assert.same({ "3", "busy" }, { row.attempts, row.error })
    assert.equal(3, #journal.begun(app))
  end)

  it("ctx:snooze, and no attempt is counted", function()
    local app = start([[
      journal.note(tostring(ctx.attempts))
      if #io.open("notes"):read "*a" < 8 then ctx:snooze(0) end
    ]], { max_attempts = 1 })
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "done")
    assert.equal("1", row.attempts)
    assert.same({ "1", "1", "1", "1" }, journal.notes(app))
    assert.is_nil(row.errors)
  end)

  it("ctx:snooze, and is due when it said", function()
    local app = start [[ ctx:snooze(1000) ]]
    local id = journal.publish(app, "t")
    journal.wait_until_begun(app, 1)
    local row = journal.wait_for_status(app, id, "pending")
    assert.same({ "0" }, { row.attempts, row.error })
    assert.equal(1000, delay_of(app, id))
  end)

  it("ctx:discard, and the message ends there", function()
    local app = start [[ ctx:discard("the order was cancelled") ]]
    local row = journal.wait_for_status(app, journal.publish(app, "t"), "discarded")
    assert.same({ "1", "the order was cancelled" }, { row.attempts, row.error })
    assert.truthy(row.processed_at)
    assert.equal(1, #journal.begun(app))
  end)
end)

describe("a person's retry", function()
  it("gives a dead letter a new life at once", function()
    local app = start([[ if ctx.attempts == 1 and #io.open("runs"):read "*a" < 100 then error "first" end ]],
      { max_attempts = 1 })
    local id = journal.publish(app, "t")
    journal.wait_for_status(app, id, "failed")
    app.db:query("select tidemill.retry($1)", id)
    local row = journal.wait_for_status(app, id, "done")
    assert.equal("1", row.attempts)
    assert.equal(2, #journal.begun(app))
  end)
end)

-- Handlers wait for the file `go`, so that their outcomes come together; meanwhile the spec does
-- something to one row.
describe("among many outcomes", function()
  local app, worker
  local COUNT = 50

  local function hold(tail)
    app, worker = start([[ journal.wait_for "go" ]] .. (tail or ""), { retry_backoff_secs = 1000 })
    journal.publish_many(app, "t", COUNT)
    journal.wait_until_begun(app, COUNT)
  end

  -- The id of one of them.
  local function one()
    return app.db:value "select id from tidemill.queue_message where payload ->> 'n' = '7'"
  end

  -- Lets the handlers end, and waits until all other messages are written.
  local function release_others(status)
    app:write("go", "")
    app:wait_until(function()
      return journal.count(app, status or "done", "payload ->> 'n' <> '7' and claimed_by is null") == COUNT - 1
    end, 30, "all others are written")
  end

  it("a row that was deleted costs the others nothing", function()
    hold()
    app.db:query("delete from tidemill.queue_message where id = $1", one())
    release_others()
    worker:wait_for "event=lease_lost[^\n]* topic=t"
  end)

  it("a row that somebody has locked is written after the unlock", function()
    for _, case in ipairs { { "", "done" }, { [[ error "failed" ]], "pending" } } do
      hold(case[1])
      local id = one()
      local stranger = app:connect()
      stranger:exec "begin"
      stranger:query("select 1 from tidemill.queue_message where id = $1 for update", id)
      release_others(case[2])
      -- Others go on for as long as the lock is held.
      local after = journal.publish(app, "t")
      app:wait_until(function()
        return journal.row(app, after).status == case[2]
      end)
      assert.equal("running", journal.row(app, id).status)
      stranger:exec "commit"
      assert.equal("1", journal.wait_for_status(app, id, case[2]).attempts)
      assert.equal(1, #journal.begun(app, id))
      assert.is_nil(worker:stderr():find "lease_lost")
      app:close()
    end
  end)

  it("rows that somebody has locked do not delay what handlers publish", function()
    app, worker = start([[
      if payload.n then journal.wait_for "go" else tidemill.publish("after", {}) end
    ]], { concurrency = 300, batch = 300 })
    journal.publish_many(app, "t", 200)
    journal.wait_until_begun(app, 200)
    local stranger = app:connect()
    stranger:exec "begin; select 1 from tidemill.queue_message for update"
    app:write("go", "")
    app:wait_until(function()
      return #journal.ended(app) == 200
    end)
    for i = 1, 20 do
      local id = journal.publish(app, "t")
      journal.wait_for_status(app, id, "done", 5)
      assert.equal(i, journal.count(app, "done", "topic = 'after'"))
    end
    assert.equal(200, journal.count(app, "running"))
    stranger:exec "commit"
    journal.wait_until_finished(app)
    journal.assert_once_each(app, 220)
    assert.is_nil(worker:stderr():find "lease_lost")
  end)

  it("a row that another worker took meanwhile stays as that one left it", function()
    for _, case in ipairs { { "", "done" }, { [[ error "failed" ]], "pending" } } do
      hold(case[1])
      local id = one()
      app.db:query("update tidemill.queue_message set claimed_by = 'another#1', attempts = 2 where id = $1", id)
      release_others(case[2])
      worker:wait_for("event=lease_lost[^\n]* message_id=" .. id:gsub("-", "%%-"))
      local row = journal.row(app, id)
      assert.same({ "running", "another#1", "2" }, { row.status, row.claimed_by, row.attempts })
      assert.is_nil(row.error)
      app:close()
    end
  end)

  it("a row that was cancelled stays discarded", function()
    hold()
    local id = one()
    app.db:query("select tidemill.cancel($1)", id)
    release_others()
    assert.same({ "discarded", "cancelled" }, { journal.row(app, id).status, journal.row(app, id).error })
  end)

  it("a row that a trigger refuses is tried again, and the others go on", function()
    for _, case in ipairs { { "", "done" }, { [[ error "failed" ]], "pending" } } do
      hold(case[1])
      app.db:exec(([[
        create function refuse() returns trigger language plpgsql as 'begin raise ''not today''; end';
        create trigger refuse before update on tidemill.queue_message for each row
          when (old.id = '%s') execute function refuse();
      ]]):format(one()))
      release_others(case[2])
      worker:wait_for "event=outcome_refused[^\n]*not today"
      for _ = 1, 20 do
        local after = journal.publish(app, "t")
        app:wait_until(function()
          return journal.row(app, after).status == case[2] and journal.row(app, after).claimed_by == nil
        end, 5)
      end
      app.db:exec "drop trigger refuse on tidemill.queue_message"
      journal.wait_for_status(app, one(), case[2])
      app:close()
    end
  end)
end)
