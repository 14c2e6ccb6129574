-- SQL of handlers through a pgbouncer that hands each transaction to another connection: nothing may be
-- prepared there, or relied upon in the session.

local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local pg = require "spec.support.pg"
local process = require "spec.support.process"
local sql = require "spec.support.sql"
local tidemill = require "spec.support.tidemill"

local CONFIG = [[
[databases]
* = host=%s port=%s user=postgres
[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = %s
auth_type = any
pool_mode = transaction
default_pool_size = 2
]]

-- pgbouncer refuses to run as root, as Postgres does.
local function account_words()
  if process.run({ argv = { "id", "-u" }, cwd = "/" }).stdout == "0\n" then
    return { "setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups" }
  end
  return {}
end

describe("SQL through a transaction pooler", function()
  local run, bouncer, dir, pooled

  local function start(options)
    local app = tidemill.app {}
    app:must_run "migrate"
    dir = folder.temp "tidemill-bouncer"
    local argv = account_words()
    if #argv > 0 then
      process.run { argv = { "chown", "postgres:", dir }, cwd = "/" }
    end
    folder.write(dir, "pgbouncer.ini", CONFIG:format(os.getenv "PGHOST", os.getenv "PGPORT", dir))
    for _, word in ipairs { "pgbouncer", dir .. "/pgbouncer.ini" } do
      table.insert(argv, word)
    end
    bouncer = process.spawn { argv = argv, cwd = "/" }
    pooled = ("host='%s' port=6432 user=postgres dbname=%s"):format(dir, app.database)
    clock.wait_until(function()
      local ok, connection = pcall(pg.connect, pooled)
      if ok then
        connection:close()
      end
      return ok
    end, 20, function()
      return "pgbouncer accepts connections\n" .. bouncer:output()
    end)
    options = options or {}
    options.app, options.dsn = app, pooled
    run = sql.start(options)
  end

  after_each(function()
    run.executor:hang_up()
    run.executor:wait()
    bouncer:kill "TERM"
    bouncer:kill "KILL"
    bouncer:wait(10)
    sql.stop()
    folder.remove(dir)
  end)

  it("repeats statements, many at a time", function()
    start { settings = "sql_connections = 8, concurrency = 100," }
    run.db:exec "create table item (id int)"
    local tickets = {}
    for i = 1, 60 do
      tickets[i] = run:send(([[
        for _ = 1, 5 do
          assert(t.query("select $1::int + 1 as v", %d)[1].v == %d)
          t.query("insert into item values ($1)", %d)
        end
        return 1
      ]]):format(i, i + 1, i))
    end
    for _, ticket in ipairs(tickets) do
      run:result(ticket)
    end
    assert.equal("300,60", run.db:value "select count(*) || ',' || count(distinct id) from item")
    -- Of the server's connections none has anything that was prepared there.
    for _ = 1, 4 do
      assert.equal(0, run:lua "return t.query('select count(*) as n from pg_prepared_statements')[1].n")
    end
  end)

  it("has transactions, and rolls back what a delivery leaves", function()
    start()
    run.db:exec "create table item (id int)"
    run:lua [[
      t.transaction(function(tx)
        tx:query("insert into item values (1)")
        tx:publish("a.topic")
      end)
      assert(not pcall(t.transaction, function(tx)
        tx:query("insert into item values (2)")
        error "no"
      end))
      return 1
    ]]
    assert.equal("retry", run.executor:outcome(run:send [[
      t.transaction(function(tx) tx:query("insert into item values (3)") ctx:retry(1) end)]]).kind)
    assert.equal(1, run:lua "return t.query('select count(*) as n from item')[1].n")
    assert.equal("1", run.db:value "select count(*) from tidemill.queue_message")
  end)

  it("cancels a statement at the time limit", function()
    start { settings = "timeout_secs = 0.3," }
    assert.equal("raised", run.executor:outcome(run:send "t.query 'select pg_sleep(600)' return 1").kind)
    run.app:wait_until(function()
      return run.db:value "select count(*) from pg_stat_activity where wait_event = 'PgSleep'" == "0"
    end, 20, "the statement has ended on the server")
    assert.equal(1, run:lua "return t.query('select 1 as v')[1].v")
  end)
end)
