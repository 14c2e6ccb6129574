-- What a person does to messages from a shell: failed list, show, retry, discard; cancel; reschedule.

local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

local UNKNOWN = "0190b6d2-5e7c-7a41-9c3f-2b8d1f6e4a05"

local app
before_each(function()
  app = tidemill.app {
    config = { subscribe = { ["order.paid"] = "greet", ["order.shipped"] = "greet" }, executors = 1 },
    handlers = { greet = "return function() end" },
  }
  app:stop(app:start())
end)
after_each(tidemill.close_all)

-- `count` dead letters of a topic, the n-th failed n minutes ago. Returns their ids, newest first.
local function fail(topic, count)
  local rows = app.db:query([[insert into tidemill.queue_message
    (topic, subscriber, lane, status, attempts, processed_at, error, errors, payload, claimed_by)
    select topic, subscriber, lane, 'failed', 5, now() - i * interval '1 min',
           E'handlers/greet.lua:1: boom ' || i || E'\nstack traceback:\n\tgreet',
           '[{"attempt": 4, "at": "2026-01-01T00:00:00+00:00", "by": "w#4", "error": "the one before"}]',
           jsonb_build_object('n', i), 'w#5'
      from tidemill.subscription, generate_series(1, $2::int) as i where topic = $1
     order by i returning id]], topic, count)
  local ids = {}
  for i = 1, count do
    ids[i] = rows[i].id
  end
  return ids
end

local function status(id)
  return app.db:value("select status from tidemill.queue_message where id = $1", id)
end

local function count(wanted)
  return tonumber(app.db:value("select count(*) from tidemill.queue_message where status = $1", wanted))
end

local function lines(text)
  local list = {}
  for line in text:gmatch "[^\n]+" do
    table.insert(list, line)
  end
  return list
end

-- Asserts on a command that refuses: the exit code and all it says.
local function assert_refused(code, text, result)
  assert.same({ code = code, stdout = "", stderr = "tidemill: " .. text .. "\n" }, result)
end

describe("failed list", function()
  it("shows the newest first, one line each", function()
    local paid, shipped = fail("order.paid", 3), fail("order.shipped", 1)
    local list = lines(app:must_run("failed", "list", "--limit", "3"))
    assert.truthy(list[1]:find "^id +topic +subscriber +attempts +failed +error$", list[1])
    local first = { [list[2]:match "^%S+"] = true, [list[3]:match "^%S+"] = true }
    assert.same({ [paid[1]] = true, [shipped[1]] = true }, first)
    assert.truthy(list[4]:find("^" .. paid[2]:gsub("%-", "%%-")
      .. "  order%.paid +greet +5  %d+%-%d%d%-%d%dT%d%d:%d%d:%d%dZ  handlers/greet%.lua:1: boom 2$"), list[4])
    assert.equal("there are more: --limit N shows the last N", list[5])
    assert.equal(5, #list)
    assert.equal(2, #lines(app:must_run("failed", "list", "--topic", "order.shipped")))
    assert.equal("no message of topic `other` has failed\n", app:must_run("failed", "list", "--topic", "other"))
  end)

  it("prints a JSON array, without payloads", function()
    assert.equal("[]\n", app:must_run("failed", "list", "--json"))
    local ids = fail("order.paid", 3)
    local json = app:must_run("failed", "list", "--json", "--limit", "2")
    local rows = app.db:query([[select m ->> 'id' as id, m ->> 'error' as error, m ? 'payload' as payload
      from jsonb_array_elements($1::jsonb) as m]], json)
    assert.equal(2, #rows)
    assert.equal(ids[1], rows[1].id)
    assert.equal("f", rows[1].payload)
    assert.equal("handlers/greet.lua:1: boom 1\nstack traceback:\n\tgreet", rows[1].error)
  end)

  it("lets nothing that a message holds reach the terminal as a command", function()
    fail("order.paid", 1)
    app.db:exec [[update tidemill.queue_message set error = E'red \x1b[31m \u009b5m\rline' || repeat('é', 200)]]
    local list = lines(app:must_run("failed", "list"))
    assert.truthy(list[2]:find("red \\x1b[31m \\x9b5m line" .. ("é"):rep(20), 1, true), list[2])
    assert.truthy(list[2]:find "…$", list[2])
    local shown = app:must_run("failed", "show", list[2]:match "^%S+")
    assert.truthy(shown:find("red \\x1b[31m \\x9b5m\\x0dline", 1, true), shown)
  end)

  it("refuses a limit that makes no sense", function()
    assert_refused(2, "`--limit` is `0`: use a whole number from 1 to 10000", app:run("failed", "list", "--limit", "0"))
  end)
end)

describe("failed show", function()
  it("shows every column, with payload and past errors laid out", function()
    local id = fail("order.paid", 1)[1]
    app.db:query([[update tidemill.queue_message
      set dedupe_key = 'k', headers = '{"trace": "t"}', error = error || E'\nlast' where id = $1]], id)
    local shown = app:must_run("failed", "show", id)
    assert.matches("^id +%S+\ntopic +order.paid\nsubscriber +[^\n]+\nstatus +failed\nattempts +%d+\nerror ", shown)
    for _, row in ipairs(app.db:query [[select column_name as name from information_schema.columns
      where table_schema = 'tidemill' and table_name = 'queue_message'
        and column_name not in ('claimed_at', 'max_attempts', 'published_by', 'ordering_key')]]) do
      assert.truthy(("\n" .. shown):find("\n" .. row.name .. "  ", 1, true), row.name .. " in\n" .. shown)
    end
    assert.truthy(shown:find('\npayload       {\n                  "n": 1\n              }\n', 1, true), shown)
    assert.truthy(shown:find("\nerror         handlers/greet.lua:1: boom 1\n              stack traceback:\n"
      .. "                greet\n              last\n", 1, true), shown)
    assert.truthy(shown:find("\nerrors        attempt 4, 2026-01-01T00:00:00+00:00, by w#4\n"
      .. "              the one before\n", 1, true), shown)
  end)

  it("prints the whole row as JSON, and shows scalars as they are", function()
    local id = fail("order.paid", 1)[1]
    local json = app:must_run("failed", "show", id, "--json")
    assert.equal("1", app.db:value("select $1::jsonb #>> '{payload,n}'", json))
    for payload, text in pairs { ["null"] = "null", ['"a b"'] = '"a b"', ["1.50"] = "1.50" } do
      app.db:query("update tidemill.queue_message set payload = $1::jsonb", payload)
      assert.truthy(app:must_run("failed", "show", id):find("\npayload       " .. text .. "\n", 1, true), payload)
    end
  end)

  it("says so when there is no such message, or no such id", function()
    assert_refused(1, "there is no message " .. UNKNOWN, app:run("failed", "show", UNKNOWN))
    for _, id in ipairs { "12", "", UNKNOWN .. "0", UNKNOWN:gsub("%-", "") } do
      assert_refused(2, ("`%s` is not the id of a message: one looks like %s"):format(id, UNKNOWN),
        app:run("failed", "show", id))
    end
  end)
end)

describe("failed retry", function()
  it("says what became of each id, and ends with 1 when one stays as it was", function()
    local ids = fail("order.paid", 3)
    assert.equal(("message %s is pending again\nmessage %s is pending again\n"):format(ids[2], ids[1]),
      app:must_run("failed", "retry", ids[2], ids[1]))
    local result = app:run("failed", "retry", ids[1], ids[3]:upper(), UNKNOWN)
    assert.equal(1, result.code)
    assert.equal(("message %s is pending again\n"):format(ids[3]), result.stdout)
    assert.equal(("tidemill: message %s is pending: only a failed or discarded one can be retried\n"
      .. "tidemill: there is no message %s\n"):format(ids[1], UNKNOWN), result.stderr)
    assert.equal(0, count "failed")
    result = app:run("failed", "retry", "--json", ids[1])
    assert.same({ 1, '{"changed":0,"unchanged":1}\n' }, { result.code, result.stdout })
  end)

  it("checks all ids before it changes anything", function()
    local ids = fail("order.paid", 1)
    local result = app:run("failed", "retry", ids[1], "x")
    assert.equal(2, result.code)
    assert.equal("failed", status(ids[1]))
  end)

  it("takes many ids, a topic, or all", function()
    local ids = fail("order.paid", 250)
    local result = app:must_run("failed", "retry", "--json", unpack(ids))
    assert.equal('{"changed":250,"unchanged":0}\n', result)
    fail("order.paid", 205)
    fail("order.shipped", 2)
    assert.equal("retried 205 messages\n", app:must_run("failed", "retry", "--topic", "order.paid"))
    assert.equal(2, count "failed")
    assert.equal("retried 2 messages\n", app:must_run("failed", "retry", "--all"))
    assert.equal("no message has failed\n", app:must_run("failed", "retry", "--all"))
    assert.equal("no message of topic `x` has failed\n", app:must_run("failed", "retry", "--topic", "x"))
  end)

  it("looks at each message once, also at those that cannot be retried", function()
    fail("order.paid", 150)
    -- All of them wait for one key, which only one can have.
    app.db:exec "update tidemill.queue_message set dedupe_key = 'k'"
    local result = app:run("failed", "retry", "--all")
    assert.equal(1, result.code)
    assert.equal("retried 1 message, left 149 as they were\n", result.stdout)
    local told = lines(result.stderr)
    assert.equal(20, #told)
    assert.truthy(told[1]:find "stays failed: another one with the dedupe key `k` is unfinished$", told[1])
    assert.same({ 1, 149 }, { count "pending", count "failed" })
  end)

  it("does so whatever isolation level the database has", function()
    fail("order.paid", 3)
    app.admin:exec(("alter database %s set default_transaction_isolation = 'serializable'"):format(app.database))
    assert.equal("retried 3 messages\n", app:must_run("failed", "retry", "--all"))
  end)

  it("wants to know which, and only one way", function()
    local id = fail("order.paid", 1)[1]
    local which = "say which messages: their ids, `--topic` or `--all`"
    assert_refused(2, which, app:run("failed", "retry"))
    assert_refused(2, which, app:run("failed", "discard"))
    for _, words in ipairs { { id, "--all" }, { "--topic", "order.paid", "--all" }, { id, "--topic", "order.paid" } } do
      assert_refused(2, which .. ", only one of these", app:run("failed", "retry", unpack(words)))
    end
    assert.equal("failed", status(id))
  end)

  it("has its messages handled", function()
    local id = fail("order.paid", 1)[1]
    app:must_run("failed", "retry", id)
    app:must_run "drain"
    assert.equal("done", status(id))
  end)
end)

describe("failed discard", function()
  it("keeps the reason, and leaves alone what has not failed", function()
    local ids = fail("order.paid", 2)
    assert.equal(("message %s is discarded\n"):format(ids[1]),
      app:must_run("failed", "discard", ids[1], "--why", "a test order"))
    local row = app:ledger("id = $1", ids[1])[1]
    assert.same({ "discarded", "a test order" }, { row.status, row.error })
    app:must_run("failed", "retry", ids[2])
    local result = app:run("failed", "discard", ids[2])
    assert_refused(1, ("message %s is pending: only a failed one can be discarded; cancel it instead"):format(ids[2]),
      result)
  end)

  it("takes a topic or all", function()
    fail("order.paid", 101)
    fail("order.shipped", 2)
    assert.equal("discarded 2 messages\n", app:must_run("failed", "discard", "--topic", "order.shipped"))
    assert.equal('{"changed":101,"unchanged":0}\n',
      app:must_run("failed", "discard", "--all", "--json", "--why", "old"))
    assert.equal("101", app.db:value "select count(*) from tidemill.queue_message where error = 'old'")
    assert.equal(0, count "failed")
  end)
end)

describe("cancel", function()
  it("discards what waits, by its id", function()
    local id = app:must_run("publish", "order.paid"):match '"id":"([^"]+)"'
    assert.equal(("message %s is discarded\n"):format(id), app:must_run("cancel", id))
    assert.equal("discarded", status(id))
    assert_refused(1, ("message %s is discarded: only a pending or running one can be cancelled"):format(id),
      app:run("cancel", id))
    assert_refused(1, "there is no message " .. UNKNOWN, app:run("cancel", UNKNOWN))
  end)

  it("discards what has a dedupe key, of one topic or of all", function()
    app:must_run("publish", "order.paid", "--dedupe-key", "it's 7")
    app:must_run("publish", "order.shipped", "--dedupe-key", "it's 7")
    app:must_run("publish", "order.paid", "--dedupe-key", "other")
    assert_refused(1, "no unfinished message of topic `x` has the dedupe key `it's 7`",
      app:run("cancel", "--dedupe-key", "it's 7", "--topic", "x"))
    assert.equal(1, #lines(app:must_run("cancel", "--dedupe-key", "it's 7", "--topic", "order.paid")))
    assert.equal(1, #lines(app:must_run("cancel", "--dedupe-key", "it's 7")))
    assert_refused(1, "no unfinished message has the dedupe key `it's 7`", app:run("cancel", "--dedupe-key", "it's 7"))
    assert.same({ 1, 2 }, { count "pending", count "discarded" })
  end)

  it("tells a running handler to stop", function()
    app:write_handler("greet", [[return function(_, ctx) ctx:log("began") require("tidemill").sleep(600) end]])
    local worker = app:start()
    local id = app:must_run("publish", "order.paid"):match '"id":"([^"]+)"'
    worker:wait_for "began"
    assert.equal(("message %s is discarded; its handler, which was running, is told to stop\n"):format(id),
      app:must_run("cancel", id))
    -- Nothing is left to wait for.
    app:stop(worker)
    assert.equal("discarded", status(id))
  end)

  it("wants to know which, and only one way", function()
    assert_refused(2, "say which message: its id or `--dedupe-key`", app:run "cancel")
    assert_refused(2, "say which message: its id or `--dedupe-key`, only one of these",
      app:run("cancel", UNKNOWN, "--dedupe-key", "k"))
    assert_refused(2, "`--topic` goes with `--dedupe-key`: an id is of one topic anyway",
      app:run("cancel", UNKNOWN, "--topic", "t"))
    assert_refused(2, "`x` is not the id of a message: one looks like " .. UNKNOWN, app:run("cancel", "x"))
  end)
end)

describe("reschedule", function()
  it("changes when a message is due", function()
    local id = app:must_run("publish", "order.paid"):match '"id":"([^"]+)"'
    assert.equal(("message %s is due at 2100-01-31 07:00:00 UTC\n"):format(id),
      app:must_run("reschedule", id, "--at", "2100-01-31T08:00:00+01:00"))
    assert.equal("t", app.db:value "select available_at = '2100-01-31 07:00:00Z' from tidemill.queue_message")
    app:must_run("reschedule", id, "--at", "2001-01-01T00:00:00Z")
    assert.equal("t", app.db:value "select available_at <= now() from tidemill.queue_message")
    app:must_run("cancel", id)
    assert_refused(1, ("message %s is discarded: only a pending one can be rescheduled"):format(id),
      app:run("reschedule", id, "--at", "2100-01-31T08:00:00Z"))
    assert_refused(1, "there is no message " .. UNKNOWN, app:run("reschedule", UNKNOWN, "--at", "2100-01-31T08:00:00Z"))
  end)

  it("takes a time with its zone only", function()
    assert_refused(2, "`--at TIME` is missing: when is it to be due?", app:run("reschedule", UNKNOWN))
    for _, at in ipairs { "tomorrow", "2100-01-31", "2100-01-31T08:00:00" } do
      assert_refused(2, ("`--at` is `%s`: give a time with its zone, such as 2030-01-31T08:00:00Z"):format(at),
        app:run("reschedule", UNKNOWN, "--at", at))
    end
    local result = app:run("reschedule", UNKNOWN, "--at", "2900-01-31T08:00:00Z")
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "it must be within 100 years from now\n$", result.stderr)
  end)
end)

describe("a database that cannot be reached", function()
  it("ends each of these with 1, and says which it tried", function()
    for _, words in ipairs {
      { "status" }, { "failed", "list" }, { "failed", "show", UNKNOWN }, { "failed", "retry", "--all" },
      { "failed", "discard", UNKNOWN }, { "cancel", UNKNOWN },
      { "reschedule", UNKNOWN, "--at", "2100-01-31T08:00:00Z" }, { "reclaim" }, { "prune" },
    } do
      local argv = { tidemill.binary, unpack(words) }
      for _, word in ipairs { "-c", app.config_path, "--database", "host=/nowhere" } do
        table.insert(argv, word)
      end
      local result = process.run { argv = argv }
      assert.same({ 1, "" }, { result.code, result.stdout }, table.concat(words, " "))
      assert.truthy(result.stderr:find "^tidemill: [^\n]*/nowhere[^\n]*\n$", result.stderr)
    end
  end)
end)
