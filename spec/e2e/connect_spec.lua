-- tidemill.connect in a real luajit process: a producer, a script.

local folder = require "spec.support.folder"
local plain = require "spec.support.plain"
local process = require "spec.support.process"
local sql = require "spec.support.sql"
local tidemill = require "spec.support.tidemill"

-- A luajit process that runs a script, in which `t` is the module and `dsn` the app's database.
local function options_for(app, script, env)
  app:write("script.lua", ("local t, dsn = require 'tidemill', %q\n"):format(app.dsn or "") .. script)
  return { argv = { "luajit", "script.lua" }, cwd = app.dir, env = plain.env { more = env } }
end

local function run(app, script, env)
  local result = process.run(options_for(app, script, env))
  assert.equal(0, result.code, result.stderr)
  return result.stdout
end

describe("tidemill.connect", function()
  after_each(tidemill.close_all)

  it("gives a program the queue", function()
    local app = tidemill.app { config = { subscribe = { ["order.paid"] = "greet" } },
      handlers = { greet = "return function(order, ctx) print('paid', order.id, ctx.published_by) end" } }
    local worker = app:start()
    local out = run(app, [[
      local db = t.connect(dsn)
      local one = db:publish("order.paid", { id = 7 }, { published_by = "a script" })
      assert(one.delivered == 1 and one.topic == "order.paid" and #one.id == 36 and one.duplicate == false)
      local many = db:publish_many { { topic = "order.paid", payload = { id = 8 }, dedupe_key = "k" },
        { topic = "order.paid", payload = { id = 9 } } }
      assert(#many == 2)
      db:transaction(function(tx)
        tx:query("create table written (n int)")
        tx:query("insert into written values ($1)", 1)
        tx:publish("order.paid", { id = 10 })
      end)
      local ok, e = pcall(db.transaction, db, function(tx)
        tx:publish("order.paid", { id = 11 })
        error("no", 0)
      end)
      assert(not ok and e == "no")
      local rows = db:query("select n, $1::jsonb as j, null as x, $2::int8 as i from written", { 1, t.null },
        9007199254740993LL)
      io.write(t.json.encode(rows[1]), " ", rows.affected, " ", table.concat(rows.fields, ","), "\n")
      db:close()
      db:close()
    ]])
    assert.matches('"j":%[1,null%]', out)
    assert.matches('"i":9007199254740993', out)
    assert.matches("} 1 n,j,x,i\n$", out)
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.queue_message where status = 'done'" == "4"
    end, 20, "all were handled")
    assert.matches('text="paid\\t7\\ta script"', worker:stderr())
    app:stop()
  end)

  it("raises at the script's line, with all that the database says", function()
    local app = tidemill.app {}
    app:must_run "migrate"
    local out = run(app, [[
      local db = t.connect(dsn)
      for _, body in ipairs {
        function() db:query("select 1/0") end,
        function() db:query("select $1", print) end,
        function() db:query() end,
        function() db.query("select 1") end,
        function() db:query("select 1; select 2") end,
        function() db:query("begin") end,
        function() db:query("copy (select 1) to stdout") end,
        function() db:publish("not a topic!") end,
        function() db:publish("t", ("x"):rep(2000000)) end,
        function() db:publish_many { { topic = "t", delay = 1 } } end,
        function() db:transaction(function(tx) db:query("select 1") end) end,
        function() db:transaction(function(tx) db:transaction(print) end) end,
        function() db:transaction(function(tx) tx:query("commit") end) end,
        function() db:transaction(function(tx) pcall(tx.query, tx, "select 1/0") end) end,
        function() local kept db:transaction(function(tx) kept = tx end) kept:query("select 1") end,
        function() db:transaction(print, { retry = 1 }) end,
        function() t.connect(7) end,
        function() t.connect(dsn, { schema = "a b" }) end,
        function() t.connect(dsn, { prefix = "x" }) end,
        function() t.connect("host=/nowhere") end,
        function() t.connect("nonsense") end,
        function() t.connect("dbname=a\0 host=b") end,
      } do
        local ok, e = pcall(body)
        io.write(tostring(ok), " ", type(e), " ", tostring(e), "\n")
        assert(db:query("select 1 as v")[1].v == 1)
      end
      db:close()
      print(select(2, pcall(db.query, db, "select 1")))
    ]])
    local lines, expected = {}, {
      "table script.lua:4: division by zero %(SQLSTATE 22012%)",
      "string script.lua:5: db:query: %$1: a function cannot be written as JSON",
      "string script.lua:6: db:query: expected SQL as a text, found nothing",
      "string script.lua:7: call it with a colon, db:query",
      "table script.lua:8: .*one statement at a time",
      "table script.lua:9: this statement begins a transaction, which was rolled back: use db:transaction",
      "table script.lua:10: COPY from or to the client is not possible",
      "string script.lua:11: db:publish: `not a topic!` is not a topic",
      "table script.lua:12: the payload has .*SQLSTATE 22023",
      'string script.lua:13: db:publish_many: item 1: options: "delay" is unknown',
      "string script.lua:14: db:query: inside of a transaction use the functions of its argument",
      "string script.lua:15: db:transaction: a transaction cannot begin inside of another",
      "string script.lua:16: tx:query: this statement would end the transaction",
      "table script.lua:17: the transaction was rolled back, since one of its statements had failed %(SQLSTATE 25P02%)",
      "string script.lua:18: tx:query: this transaction is over",
      'string script.lua:19: db:transaction: options: "retry" is unknown',
      "string script.lua:20: tidemill.connect: expected a text or nothing, found 7",
      "string script.lua:21: tidemill.connect: options.schema: expected a name of letters",
      'string script.lua:22: tidemill.connect: options: "prefix" is unknown',
      "table script.lua:23: .*/nowhere",
      "table script.lua:24: the address of the database cannot be read",
      "string script.lua:25: tidemill.connect: the address of the database holds a zero byte",
    }
    for line in out:gmatch "[^\n]+" do
      table.insert(lines, line)
    end
    for i, pattern in ipairs(expected) do
      assert.matches("^false " .. pattern, lines[i])
    end
    assert.matches("db:query: this connection is closed", lines[#expected + 1])
  end)

  it("says that there is no queue", function()
    local app = tidemill.app {}
    local said = run(app, [[
      local db = t.connect(dsn)
      print(select(2, pcall(db.publish, db, "a")))
      db:query "create schema tidemill"
      print(select(2, pcall(db.publish_many, db, { { topic = "a" } })))
    ]])
    local _, count = said:gsub('there is no queue in schema "tidemill" of this database: `tidemill migrate`', "")
    assert.equal(2, count, said)
  end)

  it("takes the PG* variables, another schema, and a name for the server", function()
    local app = tidemill.app { config = { schema = "other" } }
    app:must_run "migrate"
    local name = run(app, [[
      local db = t.connect(nil, { schema = "other", application_name = "nightly import" })
      db:publish("a")
      io.write(db:query("select current_setting('application_name') as v")[1].v)
    ]], { PGDATABASE = app.database })
    assert.equal("nightly import", name)
    assert.equal("1", app.db:value "select count(*) from other.queue_message")
  end)

  it("makes a connection anew that broke, but not in the middle of a transaction", function()
    local app = tidemill.app {}
    run(app, [[
      local db, killer = t.connect(dsn), t.connect(dsn)
      local function kill()
        killer:query("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
          .. " and application_name = 'tidemill script'")
      end
      db:query("create table item (n int)")
      kill()
      local ok, e = pcall(db.query, db, "insert into item values (1)")
      assert(not ok and e.lost and e.unknown, tostring(e))
      assert(db:query("select count(*) as n from item")[1].n == 0)
      ok, e = pcall(db.transaction, db, function(tx)
        tx:query("insert into item values (2)")
        kill()
        assert(not pcall(tx.query, tx, "insert into item values (3)"))
        local _, after = pcall(tx.query, tx, "insert into item values (4)")
        assert(after.lost and after.sqlstate == "57P01", tostring(after))
      end)
      assert(not ok and e.lost and e.sqlstate == "57P01", tostring(e))
      assert(tostring(e):find "this transaction is over: terminating connection due to administrator", tostring(e))
      assert(db:query("select count(*) as n from item")[1].n == 0)
    ]])
  end)

  it("bounds a result, and leaves nothing running", function()
    local app = tidemill.app {}
    local out = run(app, [[
      local db = t.connect(dsn)
      local ok, e = pcall(db.query, db, "select repeat('x', 1000) from generate_series(1, 100000000)")
      assert(not ok)
      assert(db:query("select 1 as v")[1].v == 1)
      io.write(e.message)
      for _, columns in ipairs { "", "null as a", "null as a, null as b, null as c, null as d" } do
        ok, e = pcall(db.query, db, "select " .. columns .. " from generate_series(1, 20000000)")
        assert(not ok and e.message:find "larger than 67108864 bytes", columns)
      end
      assert(collectgarbage "count" < 100 * 1024)
    ]])
    assert.matches("the result is larger than 67108864 bytes", out)
    app:wait_until(function()
      return app.db:value [[select count(*) from pg_stat_activity
        where query like '%repeat%' and pid <> pg_backend_pid()]] == "0"
    end, 20, "the statement was cancelled")
  end)

  it("retries a transaction when it is asked to", function()
    local app = tidemill.app {}
    app.db:exec "create table item (n int); insert into item values (0)"
    run(app, [[
      local db, other = t.connect(dsn), t.connect(dsn)
      local tries = 0
      db:transaction(function(tx)
        tries = tries + 1
        local n = tx:query("select n from item")[1].n
        if tries == 1 then other:query("update item set n = n + 10") end
        tx:query("update item set n = $1", n + 1)
      end, { isolation = "repeatable read", retries = 1 })
      assert(tries == 2)
    ]])
    assert.equal("11", app.db:value "select n from item")
  end)

  it("closes its connection when it is collected, and when its program ends", function()
    local app = tidemill.app {}
    run(app, [[
      local db = t.connect(dsn)
      for _ = 1, 50 do t.connect(dsn) end
      collectgarbage() collectgarbage()
      local n
      for _ = 1, 200 do
        n = db:query("select count(*) as n from pg_stat_activity where application_name = 'tidemill script'")[1].n
        if n == 1 then break end
        db:query "select pg_sleep(0.02)"
      end
      assert(n == 1, n)
    ]])
  end)

  it("does what docs/programs.md shows", function()
    local app = tidemill.app { config = { subscribe = { ["order.paid"] = "greet" } },
      handlers = { greet = "return function() end" } }
    app:start()
    app.db:exec "create table orders (id int, cents int)"
    local shown = folder.read("docs/programs.md"):match "\n```lua\n(.-)```"
    assert.matches("^greet\t%d+\n$", run(app, shown, { DATABASE_URL = app.dsn }))
    assert.equal("2", app.db:value "select count(*) from tidemill.queue_message where topic = 'order.paid'")
    assert.equal("8,1999", app.db:value "select id || ',' || cents from orders")
    app:stop()
  end)

  it("is not for handlers", function()
    local inside = sql.start()
    assert.matches("^text:1: tidemill.connect: handlers have a database already", inside:fails "t.connect()")
    sql.stop()
  end)
end)
