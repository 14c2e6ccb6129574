-- tidemill.transaction: what is committed, what is rolled back, and by whom.

local json = require "tidemill.json"
local sql = require "spec.support.sql"

describe("tidemill.transaction", function()
  local run

  -- An executor with a table `item (id int primary key, n int)`.
  local function start(options)
    run = sql.start(options)
    run.db:exec "create table item (id int primary key, n int)"
  end

  local function items()
    return run.db:value "select coalesce(string_agg(id || '=' || n, ',' order by id), '') from item"
  end

  after_each(sql.stop)

  it("commits when its function returns, and returns what that returned", function()
    start()
    assert.same({ 3, 1, false, "three" }, run:lua [[
      local function pack(...)
        return { select("#", ...), (select(1, ...)), select(2, ...) or false, (select(3, ...)) }
      end
      return pack(t.transaction(function(tx)
        tx:query("insert into item values (1, 1)")
        assert(tx:query("select count(*) as n from item")[1].n == 1)
        return 1, nil, "three"
      end))
    ]])
    assert.equal("1=1", items())
    assert.same({ 0 }, run:lua "return { select('#', t.transaction(function() end)) }")
  end)

  it("is one transaction, which others see only when it is committed", function()
    start()
    run.db:query "select pg_advisory_lock(7)"
    local ticket = run:send [[
      t.transaction(function(tx)
        tx:query "insert into item values (1, 1)"
        t.sleep(0.01)
        tx:query "insert into item values (2, 2)"
        tx:query "select pg_advisory_xact_lock(7)"
      end)
      return 1
    ]]
    run:wait_for_lock()
    assert.equal("", items())
    run.db:query "select pg_advisory_unlock(7)"
    run:result(ticket)
    assert.equal("1=1,2=2", items())
  end)

  it("rolls back when its function raises, and raises the same", function()
    start { settings = "sql_connections = 1," }
    for _, raised in ipairs { "'a text'", "{ of = 'mine' }", "nil", "7" } do
      assert.same({ false, true }, run:lua(([[
        local value = %s
        local ok, err = pcall(t.transaction, function(tx)
          tx:query "insert into item values (1, 1)"
          error(value, 0)
        end)
        return { ok, rawequal(err, value) }
      ]]):format(raised)))
    end
    assert.equal("", items())
    run:wait_for_connections(1, "idle")
    assert.equal(0, run:lua "return t.query('select count(*) as n from item')[1].n")
  end)

  it("shows the line and the traceback of where an error was raised first", function()
    start()
    local text = run:fails("local function deep(tx)\n  tx:query 'select 1/0'\nend\n"
      .. "t.transaction(function(tx)\n  deep(tx)\nend)")
    assert.matches("^text:2: division by zero %(SQLSTATE 22012%)\nstack traceback:\n.*text:2: in function 'deep'\n"
      .. ".*text:5: in function", text)
    text = run:fails "t.transaction(function(tx)\n  error 'mine'\nend)"
    assert.matches("^text:2: mine\nstack traceback:\n.*text:2: in function", text)
    -- An error that was caught before has no say in another.
    text = run:fails "pcall(t.transaction, function() error 'first' end)\nerror 'second'"
    assert.matches("^text:2: second\nstack traceback:\n.*text:2: in function", text)
  end)

  it("is over as a whole when one of its statements failed", function()
    start()
    assert.same({ "25P02", "25P02", "text:3" }, run:lua [[
      local seen
      local ok, e = pcall(function()
        t.transaction(function(tx)
          tx:query "insert into item values (1, 1)"
          pcall(tx.query, tx, "select 1/0")
          local _, after = pcall(tx.query, tx, "select 1")
          seen = after.sqlstate
        end)
      end)
      return { seen, e.sqlstate, e.where }
    ]])
    assert.equal("", items())
  end)

  it("has savepoints", function()
    start()
    run:lua [[
      t.transaction(function(tx)
        tx:query "insert into item values (1, 1)"
        tx:query "savepoint before"
        assert(not pcall(tx.query, tx, "select 1/0"))
        tx:query "rollback to savepoint before"
        tx:query "insert into item values (2, 2)"
      end)
      return 1
    ]]
    assert.equal("1=1,2=2", items())
  end)

  it("is not to be ended by a statement", function()
    start { settings = "sql_connections = 1," }
    for _, statement in ipairs {
      "commit", "rollback", "commit and chain", "rollback and chain", "/* a /* b */ */ -- c\n;End work", "abort",
      "prepare transaction 'x'",
    } do
      local text = run:fails(([[t.transaction(function(tx)
        tx:query "insert into item values (1, 1)"
        tx:query(%s)
      end)]]):format(json.encode(statement)))
      assert.matches("^text:3: tx:query: this statement would end the transaction: leave that to the end", text)
      assert.equal("", items(), statement)
    end
    -- Nor by one whose error is swallowed: it was never sent.
    run:lua [[
      t.transaction(function(tx)
        tx:query "insert into item values (1, 1)"
        pcall(tx.query, tx, "commit and chain")
        tx:query "insert into item values (2, 2)"
        pcall(tx.query, tx, "rollback")
      end)
      return 1
    ]]
    assert.equal("1=1,2=2", items())
  end)

  it("notices the end of a transaction that got past", function()
    start { settings = "sql_connections = 1," }
    for statement, left in pairs {
      commit = "1=1", rollback = "", ["commit and chain"] = "1=1", ["rollback and chain"] = "",
    } do
      run.db:exec "truncate item"
      assert.same({ "this statement ended the transaction: leave that to the end of its function", true, true },
        run:lua(([[
          local op = require "tidemill.await".op
          local number = op("begin", "begin")
          op("query", number, "insert into item values (1, 1)", "")
          local _, wrong = op("query", number, %q, "")
          return { wrong.message, op("query", number, "insert into item values (2, 2)", "") == nil,
            op("commit", number) == nil }
        ]]):format(statement)))
      assert.equal(left, items(), statement)
    end
    -- A chained commit of a transaction that had failed.
    assert.matches("^this statement ended", run:lua [[
      local op = require "tidemill.await".op
      local number = op("begin", "begin")
      op("query", number, "select 1/0", "")
      return select(2, op("query", number, "commit and chain", "")).message
    ]])
    run:wait_for_connections(1, "idle")
  end)

  it("refuses what does not belong inside", function()
    start { settings = "sql_connections = 1," }
    for body, expected in pairs {
      ["t.query 'select 1'"] = "text:2: tidemill.query: inside of a transaction use the functions of its argument",
      ["t.transaction(function() end)"] = "text:2: tidemill.transaction: a transaction cannot begin inside of another",
      ["t.publish_many { { topic = 'a' } }"] = "text:2: tidemill.publish_many: inside of a transaction use",
      ["tx.query('select 1')"] = "text:2: tx:query: call it with a colon, tx:query",
      ["tx:query()"] = "text:2: tx:query: expected SQL as a text, found nothing",
      ["tx:query('select $1', print)"] = "text:2: tx:query: %$1: a function cannot be written",
    } do
      local text = run:fails("t.transaction(function(tx)\n" .. body .. "\nend)")
      assert.matches("^" .. expected, text, body)
      assert.equal(1, run:lua "return t.query('select 1 as v')[1].v")
    end
  end)

  it("refuses its argument after its end, and in another delivery", function()
    start { settings = "sql_connections = 3," }
    for _, ending in ipairs { "", "error 'no'" } do
      assert.matches("^text:5: tx:query: this transaction is over", run:fails(([[local kept
        pcall(t.transaction, function(tx) kept = tx
          %s
        end)
        kept:query "select 1"]]):format(ending)))
    end
    run.db:query "select pg_advisory_lock(7)"
    local holder = run:send [[
      t.transaction(function(tx)
        _G.shared = tx
        tx:query "select pg_advisory_xact_lock(7)"
        tx:query "insert into item values (1, 1)"
      end)
      return 1
    ]]
    run:wait_for_lock()
    assert.matches("tx:query: this transaction is over, or belongs to another delivery", run:fails [[
      t.transaction(function(tx) _G.shared:query "delete from item" end)]])
    run.db:query "select pg_advisory_unlock(7)"
    run:result(holder)
    assert.equal("1=1", items())
  end)

  it("checks its arguments", function()
    start()
    for arguments, expected in pairs {
      [""] = "expected a function, found nothing",
      ["print, 7"] = "options: expected a table or nothing, found 7",
      ["print, { isolation = 'snapshot' }"] = 'options.isolation: expected "read committed", "repeatable read" or',
      ["print, { retries = -1 }"] = "options.retries: expected a whole number from 0 to 100",
      ["print, { retries = 1.5 }"] = "options.retries: expected a whole number",
      ["print, { read_only = 1 }"] = "options.read_only: expected true or false, found 1",
      ["print, { retry = 1 }"] = 'options: "retry" is unknown, known are isolation, read_only, retries',
    } do
      assert.matches("^text:1: tidemill.transaction: " .. expected, run:fails(("t.transaction(%s)"):format(arguments)))
    end
  end)

  it("has the isolation and the access that were asked for", function()
    start()
    for options, expected in pairs {
      ["nil"] = "read committed off",
      ["{ isolation = 'read committed' }"] = "read committed off",
      ["{ isolation = 'repeatable read', read_only = false }"] = "repeatable read off",
      ["{ isolation = 'serializable', read_only = true }"] = "serializable on",
    } do
      assert.equal(expected, run:lua(([[return t.transaction(function(tx)
        local row = tx:query [=[select current_setting('transaction_isolation') as i,
          current_setting('transaction_read_only') as r]=] [1]
        return row.i .. " " .. row.r
      end, %s)]]):format(options)), options)
    end
    assert.matches("SQLSTATE 25006", run:fails [[
      t.transaction(function(tx) tx:query "insert into item values (1, 1)" end, { read_only = true })]])
  end)

  it("is tried again after a serialization failure, as often as it was asked to be", function()
    start()
    run.db:exec "insert into item values (1, 0)"
    local add = [[
      local tries = 0
      local ok, e = pcall(t.transaction, function(tx)
        tries = tries + 1
        local n = tx:query("select n from item where id = 1")[1].n
        if tries <= %d then t.query_elsewhere() end
        tx:query("update item set n = $1 where id = 1", n + 1)
      end, { isolation = "repeatable read", retries = %d })
      return { ok, tries, not ok and e.sqlstate or "" }
    ]]
    -- The conflict: somebody else changes the row between the two statements.
    local function conflicting(conflicts, retries)
      local text = add:format(conflicts, retries):gsub("t.query_elsewhere%(%)", [[
        local before = tx:query("select pg_notify('meddle', 'now')")
        t.sleep(0.05)
        _G.meddle(tries)
      ]])
      return text
    end
    -- Another delivery does the meddling, through a connection of its own.
    run:lua [[
      rawset(_G, "wanted", {})
      rawset(_G, "meddle", function(number)
        _G.wanted[number] = true
        while _G.wanted[number] do t.sleep(0.005) end
      end)
      return 1
    ]]
    local meddler = run:send [[
      while not rawget(_G, "enough") do
        local number = next(_G.wanted)
        if number then
          t.query "update item set n = n + 100 where id = 1"
          _G.wanted[number] = nil
        end
        t.sleep(0.005)
      end
      return 1
    ]]
    assert.same({ true, 1, "" }, run:lua(conflicting(0, 0)))
    assert.same({ false, 1, "40001" }, run:lua(conflicting(1, 0)))
    assert.same({ true, 3, "" }, run:lua(conflicting(2, 2)))
    assert.same({ false, 3, "40001" }, run:lua(conflicting(5, 2)))
    run:lua "_G.enough = true return 1"
    run:result(meddler)
    assert.equal("1=602", items())
  end)

  it("gathers by ctx:publish once, however often it is tried", function()
    start { migrate = true }
    local outcome = run.executor:outcome(run:send [[
      local tries = 0
      ctx:publish("before")
      t.transaction(function(tx)
        tries = tries + 1
        ctx:publish("inside", tries)
        if tries < 3 then tx:query "do $$ begin raise exception 'again' using errcode = '40001'; end $$" end
      end, { retries = 2 })
      pcall(t.transaction, function() ctx:publish("raised") error "no" end, { retries = 2 })
    ]])
    assert.equal("done", outcome.kind)
    local topics = {}
    for i, item in ipairs(json.decode(outcome.publications)) do
      topics[i] = item.topic .. json.encode(item.message)
    end
    assert.same({ "before{}", "inside3", "raised{}" }, topics)
  end)

  it("keeps what all transactions and errors share to itself", function()
    start()
    run:lua [[
      pcall(t.transaction, function(tx)
        pcall(function() getmetatable(tx).query = function() return "mine" end end)
        pcall(function() getmetatable(tx).__index = {} end)
        pcall(function() tx.__index.query = function() return "mine" end end)
        assert(not pcall(setmetatable, tx, {}))
        local _, e = pcall(tx.query, tx, "select 1/0")
        pcall(function() getmetatable(e).__tostring = function() return "mine" end end)
        pcall(function() e.__index.hint = "mine" end)
        assert(not pcall(setmetatable, e, {}))
      end)
      return 1
    ]]
    assert.same({ 1, false, "text:2: division by zero (SQLSTATE 22012)" }, run:lua [[
      local row = t.transaction(function(tx) return tx:query("select 1 as v")[1] end)
      local _, e = pcall(t.query, "select 1/0")
      return { row.v, e.hint or false, tostring(e) }
    ]])
  end)

  it("is tried again after a deadlock", function()
    start { settings = "sql_connections = 2," }
    run.db:exec "insert into item values (1, 0), (2, 0)"
    run.db:exec(("alter database %s set deadlock_timeout = '50ms'"):format(run.app.database))
    local text = [[
      local first, second = %d, %d
      local tries = t.transaction(function(tx)
        _G.tries = (rawget(_G, "tries") or 0) + 1
        tx:query("update item set n = n + 1 where id = $1", first)
        _G.held = (rawget(_G, "held") or 0) + 1
        while _G.held < 2 do t.sleep(0.005) end -- both hold their first row
        tx:query("update item set n = n + 1 where id = $1", second)
      end, { retries = 10 })
      return _G.tries
    ]]
    local one, two = run:send(text:format(1, 2)), run:send(text:format(2, 1))
    run:result(one)
    run:result(two)
    assert.equal("1=2,2=2", items())
    assert.is_true(run:lua "return _G.tries" > 2)
  end)

  -- ---- ends that nobody asked for -------------------------------------------------------------

  it("is rolled back when the delivery ends in the middle", function()
    start { settings = "sql_connections = 1, timeout_secs = 0.5," }
    for body, kind in pairs {
      ["ctx:retry(5)"] = "retry",
      ["ctx:snooze(5)"] = "snooze",
      ["ctx:discard()"] = "discard",
      ["t.sleep(60)"] = "raised",
      ["tx:query('select pg_sleep(60)')"] = "raised",
      ["coroutine.yield()"] = "raised",
    } do
      local outcome = run.executor:outcome(run:send(("t.transaction(function(tx)\n"
        .. "tx:query 'insert into item values (1, 1)'\n%s\nend)"):format(body)))
      assert.equal(kind, outcome.kind, body)
      assert.equal(0, run:lua "return t.query('select count(*) as n from item')[1].n", body)
    end
    run:wait_for_connections(0, "idle in transaction")
  end)

  it("is rolled back when its process is killed", function()
    start()
    run:send "t.transaction(function(tx) tx:query 'insert into item values (1, 1)' t.sleep(60) end)"
    run:wait_for_connections(1, "idle in transaction")
    run.executor.process:kill "KILL"
    run.executor:wait()
    run:wait_for_connections(0)
    assert.equal("", items())
  end)

  it("is rolled back when its runtime is gone", function()
    start()
    run:send "t.transaction(function(tx) tx:query 'insert into item values (1, 1)' tx:query 'select pg_sleep(60)' end)"
    run:wait_for_sleep()
    run.executor:hang_up()
    run.executor:wait()
    run:wait_for_connections(0)
    assert.equal("", items())
  end)

  it("says that it is lost when its connection breaks", function()
    start { settings = "sql_connections = 1," }
    local ticket = run:send [[
      local said = {}
      local ok, e = pcall(t.transaction, function(tx)
        tx:query "insert into item values (1, 1)"
        while not rawget(_G, "go") do t.sleep(0.005) end
        for i, call in ipairs { "query", "query", "publish", "publish_many" } do
          local argument = call == "publish" and "t" or call == "query" and "select 2" or { { topic = "t" } }
          local _, inside = pcall(tx[call], tx, argument)
          said[i] = { tostring(inside), inside.sqlstate, inside.lost }
        end
      end)
      return { ok, { tostring(e), e.sqlstate, e.lost }, said }
    ]]
    run:wait_for_connections(1, "idle in transaction")
    run.db:query "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'tidemill handler'"
    run:wait_for_connections(0)
    run:lua "rawset(_G, 'go', true) return 1"
    local result = run:result(ticket)
    local why = "terminating connection due to administrator command"
    local text = why .. " (SQLSTATE 57P01)"
    local after = { "text:7: this transaction is over: " .. text, "57P01", true }
    assert.same({ false, { "text:2: this transaction is over: " .. text, "57P01", true },
      { { "text:7: " .. text, "57P01", true }, after, after, after } }, result)
    assert.equal("", items())
    assert.equal(0, run:lua "return t.query('select count(*) as n from item')[1].n")
  end)

  it("says why the server gave it up while its handler waited", function()
    start { settings = "sql_connections = 1," }
    run.db:exec(("alter database %s set idle_in_transaction_session_timeout = '50ms'"):format(run.app.database))
    local ticket = run:send [[
      local ok, e = pcall(t.transaction, function(tx)
        tx:query "insert into item values (1, 1)"
        rawset(_G, "begun", true)
        while not rawget(_G, "go") do t.sleep(0.005) end
        pcall(tx.query, tx, "select 1")
      end)
      return { ok, e.message, e.sqlstate, e.lost }
    ]]
    run.app:wait_until(function()
      return run:lua "return rawget(_G, 'begun') or false"
    end, 20, "the transaction has begun")
    run:wait_for_connections(0)
    run:lua "rawset(_G, 'go', true) return 1"
    assert.same({ false, "this transaction is over: terminating connection due to idle-in-transaction timeout",
      "25P03", true }, run:result(ticket))
    -- What was said of one has no say in the next.
    assert.matches("^text:1: division by zero", run:fails "t.transaction(function(tx) tx:query 'select 1/0' end)")
  end)

  it("says that it went with a result that was too large", function()
    start { settings = "sql_connections = 1," }
    assert.same({ false, true, "this transaction is over: the result is larger than" }, run:lua [[
      local ok, e = pcall(t.transaction, function(tx)
        tx:query "insert into item values (1, 1)"
        pcall(tx.query, tx, "select repeat('x', 1000) from generate_series(1, 10000000)")
      end)
      return { ok, e.lost, e.message:sub(1, 51) }
    ]])
    assert.equal("", items())
  end)

  it("says that the outcome is unknown when the answer to its commit is lost", function()
    start { settings = "sql_connections = 1," }
    -- The commit waits for a lock, by a constraint that is checked then.
    run.db:exec [[
      create function wait_at_commit() returns trigger language plpgsql as
        $$ begin perform pg_advisory_xact_lock(7); return null; end $$;
      create constraint trigger waits after insert on item deferrable initially deferred
        for each row execute function wait_at_commit()]]
    run.db:query "select pg_advisory_lock(7)"
    local ticket = run:send [[
      local ok, e = pcall(t.transaction, function(tx) tx:query "insert into item values (1, 1)" end)
      return { ok, e.lost, e.unknown, tostring(e) }
    ]]
    run.app:wait_until(function()
      local rows = run:connections()
      return rows[1] and rows[1].query == "COMMIT"
    end, 20, "the commit waits")
    run.db:query "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'tidemill handler'"
    local result = run:result(ticket)
    assert.same({ false, true, true }, { result[1], result[2], result[3] })
    assert.matches("whether the statement took effect is unknown", result[4])
    run.db:query "select pg_advisory_unlock(7)"
  end)

  it("raises what its commit is refused for", function()
    start()
    run.db:exec "alter table item add constraint self foreign key (n) references item deferrable initially deferred"
    assert.matches("^text:1: .*violates foreign key constraint \"self\" %(SQLSTATE 23503%)", run:fails [[
      t.transaction(function(tx) tx:query "insert into item values (1, 5)" end)]])
    assert.equal("", items())
  end)

  -- ---- publishing -----------------------------------------------------------------------------

  it("publishes with it or not at all", function()
    start { migrate = true }
    local published = run:lua [[
      return t.transaction(function(tx)
        local one = tx:publish("a.topic", { n = 1 }, { priority = 3, headers = { h = 1 } })
        local many = tx:publish_many { { topic = "b.topic", payload = 7 }, { topic = "c.topic", published_by = "me" } }
        return { one, many[1], many[2] }
      end)
    ]]
    assert.same({ "a.topic", "b.topic", "c.topic" }, { published[1].topic, published[2].topic, published[3].topic })
    assert.same({ 0, false, 36 }, { published[1].delivered, published[1].duplicate, #published[1].id })
    run:fails "t.transaction(function(tx) tx:publish('d.topic') error 'no' end)"
    local rows = run.app:ledger()
    assert.equal(3, #rows)
    assert.same({ "a.topic", '{"n": 1}', "3", '{"h": 1}' },
      { rows[1].topic, rows[1].payload, rows[1].priority, rows[1].headers })
    assert.equal("me", rows[3].published_by)
  end)

  it("publishes in the name of the message's publisher", function()
    start { migrate = true }
    run.executor:outcome(run:send("t.transaction(function(tx) tx:publish 'a' tx:publish_many { { topic = 'b' } } end)",
      { published_by = "ann" }))
    assert.equal("ann,ann", run.db:value "select string_agg(published_by, ',') from tidemill.queue_message")
  end)

  it("refuses messages that are wrong, naming them", function()
    start { migrate = true }
    for body, expected in pairs {
      ["tx:publish 'not a topic!'"] = "text:2: tx:publish: `not a topic!` is not a topic",
      ["tx:publish('t', print)"] = "text:2: tx:publish: payload: a function cannot",
      ["tx:publish_many { { topic = 't' }, { topic = 't', delay = 1 } }"] =
        'text:2: tx:publish_many: item 2: options: "delay" is unknown',
      ["tx:publish_many 'x'"] = 'text:2: tx:publish_many: expected a list of messages, found "x"',
      ["tx:publish_many { topic = 'x' }"] = 'text:2: tx:publish_many: expected a list of messages, found a table with',
      ["tx:publish('t', ('x'):rep(2000000))"] = "text:2: the payload has .*SQLSTATE 22023",
    } do
      assert.matches("^" .. expected, run:fails("t.transaction(function(tx)\n" .. body .. "\nend)"), body)
    end
    assert.equal(0, #run.app:ledger())
  end)
end)

describe("tidemill.publish_many", function()
  after_each(sql.stop)

  it("publishes a list in one statement, with options of their own, in its order", function()
    local run = sql.start { migrate = true }
    local published = run:lua [[
      local list = {}
      for i = 1, 500 do
        list[i] = { topic = "n." .. i % 7, payload = { n = i }, dedupe_key = "k" .. i, delay_secs = i }
      end
      return { t.publish_many(list), t.publish_many {} }
    ]]
    assert.same({}, published[2])
    assert.equal(500, #published[1])
    for i, result in ipairs(published[1]) do
      assert.equal("n." .. i % 7, result.topic)
    end
    assert.equal("500", run.db:value "select count(*) from tidemill.queue_message")
    assert.equal("1", run.db:value "select count(distinct xmin::text) from tidemill.queue_message")
    -- All or nothing.
    assert.matches("^text:1: .*SQLSTATE", run:fails [[t.publish_many { { topic = "a" }, { topic = "b",
      payload = ("x"):rep(2000000) } }]])
    assert.equal("500", run.db:value "select count(*) from tidemill.queue_message")
  end)

  it("warns once of a topic that nobody subscribes to", function()
    local run = sql.start { migrate = true }
    for _ = 1, 3 do
      run:lua "t.publish_many { { topic = 'nobody' }, { topic = 'nobody' } } return 1"
    end
    local lines = run.executor:log "nobody_subscribes"
    assert.equal(1, #lines)
    assert.matches("published_topic=nobody", lines[1])
  end)

  it("writes the ledger that the config names", function()
    local run = sql.start { migrate = true, config = { schema = "other" }, settings = "schema = 'other'," }
    run:lua "t.publish_many { { topic = 'a' } } t.transaction(function(tx) tx:publish 'b' end) return 1"
    assert.equal("2", run.db:value "select count(*) from other.queue_message")
  end)
end)
