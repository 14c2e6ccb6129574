-- The connections behind tidemill.query: how many there are and how long, who waits for one, what a time
-- limit and a dead process leave, an outage, and which database it is.

local cluster = require "spec.support.cluster"
local executor = require "spec.support.executor"
local sql = require "spec.support.sql"
local tidemill = require "spec.support.tidemill"

describe("the connections of handlers", function()
  after_each(sql.stop)

  it("are made when one is wanted, shared, and closed when they are idle", function()
    local run = sql.start { settings = "sql_idle_secs = 0.2," }
    run:lua "t.sleep(0.01) return 1"
    assert.equal(0, #run:connections())
    local pids = run:lua [[
      local pids = {}
      for i = 1, 5 do pids[i] = t.query("select pg_backend_pid() as v")[1].v end
      return pids
    ]]
    for i = 2, 5 do
      assert.equal(pids[1], pids[i])
    end
    run:wait_for_connections(0)
    assert.are_not.equal(pids[1], run:lua "return t.query('select pg_backend_pid() as v')[1].v")
  end)

  it("serve hundreds of handlers, and are never more than sql_connections", function()
    local run = sql.start { settings = "sql_connections = 3, concurrency = 1000," }
    run.db:exec "create table seen (n int)"
    local tickets = {}
    for i = 1, 400 do
      tickets[i] = run:send(([[
        local n = t.query("select count(*) as n from pg_stat_activity where application_name = 'tidemill handler'")[1].n
        t.query("insert into seen select $1 from pg_sleep(0.002)", n)
        return %d
      ]]):format(i))
    end
    for i, ticket in ipairs(tickets) do
      assert.equal(i, run:result(ticket))
    end
    assert.same({ "400", "3" }, {
      run.db:value "select count(*) from seen", run.db:value "select max(n) from seen" })
    run:wait_for_connections(3)
  end)

  it("are had in the order of asking", function()
    local run = sql.start { settings = "sql_connections = 1," }
    run.db:exec "create table line (seq serial, name text)"
    run.db:query "select pg_advisory_lock(1)"
    local holder = run:send "t.query 'select pg_advisory_xact_lock(1)' return 0"
    run:wait_for_lock()
    local tickets = {}
    for i = 1, 10 do
      tickets[i] = run:send(("t.query('insert into line (name) values ($1)', 'n%d') return 0"):format(i))
    end
    assert.equal("0", run.db:value "select count(*) from line")
    run.db:query "select pg_advisory_unlock(1)"
    run:result(holder)
    local expected = {}
    for i, ticket in ipairs(tickets) do
      run:result(ticket)
      expected[i] = "n" .. i
    end
    assert.equal(table.concat(expected, ","), run.db:value "select string_agg(name, ',' order by seq) from line")
  end)

  it("are not kept from others by a handler that stopped waiting", function()
    local run = sql.start { settings = "sql_connections = 1," }
    run.db:query "select pg_advisory_lock(1)"
    local holder = run:send "t.query 'select pg_advisory_xact_lock(1)' return 'held'"
    run:wait_for_lock()
    local gone = run:send "t.query 'select 1' return 'never'"
    local patient = run:send "return t.query('select 1 as v')[1].v"
    run.executor:cancel(gone, "enough")
    assert.equal("discard", run.executor:outcome(gone).kind)
    run.db:query "select pg_advisory_unlock(1)"
    assert.equal("held", run:result(holder))
    assert.equal(1, run:result(patient))
  end)

  it("are closed, and their statement cancelled, where the time limit passes", function()
    local run = sql.start { settings = "sql_connections = 1, timeout_secs = 0.3," }
    local outcome = run.executor:outcome(run:send "t.query 'select pg_sleep(600)' return 1")
    assert.equal("raised", outcome.kind)
    assert.matches("^handler exceeded its time limit of 0.3 s\nstack traceback:.*text:1:", outcome.error)
    run:wait_for_connections(0, "active")
    -- The next handler has a connection of its own, and its statement is not cancelled.
    for _ = 1, 20 do
      assert.same({ 1 }, run:lua "return { t.query('select 1 as v from pg_sleep(0.005)')[1].v }")
    end
    run:wait_for_connections(1)
  end)

  it("are closed, and their statement cancelled, where a person cancels the message", function()
    local run = sql.start()
    local ticket = run:send "t.query 'select pg_sleep(600)' return 1"
    run:wait_for_sleep()
    run.executor:cancel(ticket, "cancelled")
    assert.equal("discard", run.executor:outcome(ticket).kind)
    run:wait_for_connections(0)
  end)

  it("do not go on working when their process was killed", function()
    local run = sql.start { settings = "sql_connections = 1," }
    -- Also on a connection that was reset in between.
    run:send "t.query [[set work_mem = '7MB']] t.query 'select pg_sleep(600)' return 1"
    run:wait_for_sleep()
    run.executor.process:kill "KILL"
    run.executor:wait()
    run:wait_for_connections(0)
  end)

  it("are made anew after the server has ended them", function()
    local run = sql.start { settings = "sql_connections = 1," }
    local ask = "return t.query('select pg_backend_pid() as v')[1].v"
    local pid = run:lua(ask)
    local terminate = [[select pg_terminate_backend(pid) from pg_stat_activity
      where application_name = 'tidemill handler']]
    run.db:query(terminate)
    run:wait_for_connections(0)
    assert.are_not.equal(pid, run:lua(ask))

    -- In the middle of a statement: an error that says so, and the next one is fine.
    local ticket = run:send [[
      local _, e = pcall(t.query, "select pg_sleep(600)")
      return { e.sqlstate, e.lost, e.unknown, e.message }
    ]]
    run:wait_for_sleep()
    run.db:query(terminate)
    assert.same({ "57P01", true, true, "terminating connection due to administrator command "
      .. "(whether the statement took effect is unknown)" }, run:result(ticket))
    assert.equal("number", type(run:lua(ask)))
  end)

  it("work where the database only cannot be reached for a while", function()
    local server = cluster.new()
    local run
    finally(function()
      if run then
        run.executor:hang_up()
        run.executor:wait()
      end
      server:close_apps()
      server:close()
    end)
    local app = server:app { config = {}, handlers = {} }
    run = sql.start { app = app, settings = "sql_connections = 2," }
    local ask = "return t.query('select 1 as v')[1].v"
    assert.equal(1, run:lua(ask))
    local in_flight = run:send "t.query 'select pg_sleep(600)' return 1"
    run:wait_for_sleep()
    server:stop "immediate"
    local text = run.executor:outcome(in_flight).error
    assert.is_true(text:find("the connection to the database was lost: ", 1, true) ~= nil
      or text:find("SQLSTATE 57P0", 1, true) ~= nil, text)
    assert.matches("^text:1: the database cannot be reached: ", run:fails(ask))
    server:start()
    run.db = app.db
    assert.equal(1, run:lua(ask))
  end)
end)

describe("the database of handlers", function()
  after_each(sql.stop)

  local HANDLER = [[
    local tidemill = require "tidemill"
    return function() return tidemill.query("select current_database() as v")[1].v end
  ]]

  it("is the one of --database, for call too", function()
    local app = tidemill.app { config = { subscribe = { t = { "h" } }, database = "host=/nowhere" },
      handlers = { h = HANDLER } }
    assert.equal(('"%s"\n'):format(app.database), app:must_run("call", "h"))
  end)

  it("is looked for on each of several hosts", function()
    local app = tidemill.app { config = {} }
    local run = sql.start { app = app, dsn = ("host='/nowhere,%s' port=5432,%s user=postgres dbname=%s"):format(
      os.getenv "PGHOST", os.getenv "PGPORT", app.database) }
    assert.equal(app.database, run:lua "return t.query('select current_database() as v')[1].v")
  end)

  it("is otherwise that of the config, and then that of the PG* variables", function()
    local app = tidemill.app { config = {} }
    local handlers = { h = HANDLER }
    local configured = executor.load {
      config = ("return { database = %q, subscribe = { t = 'h' } }"):format(app.dsn), handlers = handlers }
    assert.equal(('"%s"'):format(app.database), configured:handle({ wants_result = true }).result)
    local bare = executor.load {
      config = "return { subscribe = { t = 'h' } }", handlers = handlers, env = { PGDATABASE = app.database } }
    assert.equal(('"%s"'):format(app.database), bare:handle({ wants_result = true }).result)
  end)

  it("is the runtime's", function()
    local app = tidemill.app { config = { subscribe = { t = { "h" } }, database = "host=/nowhere" }, handlers = { h = [[
      local tidemill = require "tidemill"
      return function() tidemill.query "create table found (n int)" end
    ]] } }
    app:start()
    app:must_run("publish", "t")
    app:wait_until(function()
      return app.db:value "select to_regclass('found') is not null" == "t"
    end, 20, "the handler has found the database")
    app:stop()
  end)
end)
