-- ctx:finish: the effects of a handler in the queue's database, and the `done` of its message, happen
-- together and once: whoever dies, whatever is lost.

local cluster = require "spec.support.cluster"
local foreign = require "spec.support.foreign"
local tidemill = require "spec.support.tidemill"

local HEAD = [[
  local tidemill = require "tidemill"
  local ffi = require "ffi"
  pcall(ffi.cdef, "int setenv(const char *name, const char *value, int overwrite);")
  -- The number of this attempt, counted where a rollback does not reach.
  local function begin_try()
    return tidemill.query("insert into try default values returning n")[1].n
  end
  return function(payload, ctx)
]]

local TABLES = [[
  create table try (n serial);
  create table effect (id uuid, note text);
]]

-- An app whose handler `h` of topic `t` is this body, with a table of tries and one of effects.
local function new_app(body, config)
  config = config or {}
  config.subscribe = { t = { "h" } }
  config.executors = config.executors or 1
  config.retry_backoff_secs = 0
  config.poll_secs = 3600
  local app = tidemill.app { config = config, handlers = { h = HEAD .. body .. "\nend" } }
  app.db:exec(TABLES)
  return app
end

local function message(app)
  return app:ledger("topic = 't'")[1]
end

local function wait_for_status(app, status)
  app:wait_until(function()
    return message(app).status == status
  end, 30, "the message is " .. status)
  return message(app)
end

local function notes(app)
  return app.db:value "select coalesce(string_agg(note, ',' order by note), '') from effect"
end

local EFFECT = [[tx:query("insert into effect values ($1, $2)", ctx.message_id, "once")]]

describe("ctx:finish", function()
  after_each(tidemill.close_all)

  it("writes what its function does and the done in one transaction, and ends the delivery", function()
    local app = new_app([[
      ctx:publish("after", { by = "ctx" })
      local ok = pcall(ctx.finish, ctx, function(tx)
        ]] .. EFFECT .. [[
        tx:publish("after", { by = "tx" })
        ctx:publish("after", { by = "ctx inside" })
        return "of no interest"
      end)
      print("never", ok)
    ]])
    local worker = app:start()
    app:must_run("publish", "t", "{}", "--by", "ann")
    local row = wait_for_status(app, "done")
    assert.same({ "1", nil, nil, nil }, { row.attempts, row.error, row.claimed_by, row.claimed_at })
    assert.is_truthy(row.processed_at)
    assert.equal("once", notes(app))
    assert.equal("1", app.db:value [[select count(distinct xmin::text) from (
      select xmin from effect union all select xmin from tidemill.queue_message) as x]])
    assert.equal("ctx,ctx inside,tx", app.db:value [[select string_agg(payload ->> 'by', ',' order by payload ->> 'by')
      from tidemill.queue_message where topic = 'after' and published_by = 'ann']])
    app:stop()
    assert.is_nil(worker:stderr():find("never", 1, true))
    assert.matches("event=nobody_subscribes published_topic=after message_id=%S+ topic=t subscriber=h", worker:stderr())
  end)

  it("leaves nothing of a function that raises, and the attempt has failed", function()
    local app = new_app([[
      local n = begin_try()
      ctx:publish("before")
      ctx:finish(function(tx)
        ]] .. EFFECT .. [[
        ctx:publish("inside")
        if n < 3 then error("no " .. n) end
      end)
    ]])
    app:start()
    app:must_run("publish", "t")
    local row = wait_for_status(app, "done")
    assert.equal("3", row.attempts)
    assert.matches("no 1.*no 2", row.errors)
    assert.equal("once", notes(app))
    assert.equal("before,inside", app.db:value [[select string_agg(topic, ',' order by topic)
      from tidemill.queue_message where topic <> 't']])
    app:stop()
  end)

  it("has its effects once where its function tries to commit them before", function()
    for _, statement in ipairs { "commit", "commit and chain", "rollback and chain" } do
      local body = ([[
        local n = begin_try()
        ctx:finish(function(tx)
          ]] .. EFFECT .. [[
          if n < 3 then tx:query "%s" end
          if n == 3 then
            pcall(tx.query, tx, "%s")
            error "no"
          end
          pcall(tx.query, tx, "%s")
        end)
      ]]):gsub("%%s", statement)
      local app = new_app(body)
      app:start()
      app:must_run("publish", "t")
      assert.equal("4", wait_for_status(app, "done").attempts, statement)
      assert.equal("once", notes(app))
      app:stop()
    end
  end)

  it("says why its connection was lost to who catches that", function()
    local app = new_app([[
      local n = begin_try()
      local ok, err = pcall(ctx.finish, ctx, function(tx)
        ]] .. EFFECT .. [[
        if n == 1 then
          pcall(tx.query, tx, "select pg_terminate_backend(pg_backend_pid())")
        end
      end)
      error(tostring(ok) .. " " .. err.sqlstate .. " " .. tostring(err.lost) .. " " .. err.message, 0)
    ]])
    app:start()
    app:must_run("publish", "t")
    local row = wait_for_status(app, "done")
    assert.equal("2", row.attempts)
    assert.matches("false 57P01 true this transaction is over: terminating connection due to administrator command",
      row.errors)
    assert.equal("once", notes(app))
    app:stop()
  end)

  it("lets a handler go on that catches what was raised", function()
    local app = new_app([[
      ctx:publish("before")
      local ok, err = pcall(ctx.finish, ctx, function(tx)
        ]] .. EFFECT .. [[
        ctx:publish("inside")
        tx:query "select 1/0"
      end)
      tidemill.query("insert into effect values ($1, $2)", ctx.message_id, tostring(ok) .. err.sqlstate)
      ctx:publish("behind")
    ]])
    app:start()
    app:must_run("publish", "t")
    wait_for_status(app, "done")
    assert.equal("false22012", notes(app))
    assert.equal("before,behind", app.db:value [[select string_agg(topic, ',' order by topic)
      from tidemill.queue_message where topic <> 't']])
    app:stop()
  end)

  it("is refused as a whole with what it publishes or defers", function()
    local app = new_app([[
      local n = begin_try()
      if n == 1 then ctx:publish("big", ("x"):rep(2000000)) end
      ctx:finish(function(tx)
        ]] .. EFFECT .. [[
        if n == 2 then tx:query "insert into child values (7)" end
      end)
    ]], { max_attempts = 3 })
    app.db:exec [[create table parent (id int primary key);
      create table child (id int constraint has_parent references parent deferrable initially deferred)]]
    app:start()
    app:must_run("publish", "t")
    local row = wait_for_status(app, "done")
    assert.equal("3", row.attempts)
    assert.matches("max_payload_bytes.*has_parent.*SQLSTATE 23503", row.errors)
    assert.equal("once", notes(app))
    app:stop()
  end)

  it("takes the options of a transaction", function()
    local app = new_app([[
      ctx:finish(function(tx)
        local row = tx:query("select current_setting('transaction_isolation') as v")[1]
        tx:query("insert into effect values ($1, $2)", ctx.message_id, row.v)
      end, payload.isolation and { isolation = payload.isolation } or nil)
    ]])
    app:start()
    app:must_run("publish", "t", '{"isolation": "serializable"}')
    app:must_run("publish", "t", "{}")
    app:wait_until(function()
      return notes(app) == "read committed,serializable"
    end, 20, "both have finished")
    app:stop()
  end)

  it("begins anew when it is asked to, and publishes once all the same", function()
    local app = new_app([[
      local tries = 0
      ctx:publish("before")
      ctx:finish(function(tx)
        tries = tries + 1
        ]] .. EFFECT .. [[
        ctx:publish("inside", tries)
        tx:publish("with", tries)
        if tries < 3 then tx:query "do $$ begin raise exception 'again' using errcode = '40001'; end $$" end
      end, { retries = 2 })
    ]])
    app:start()
    app:must_run("publish", "t")
    assert.equal("1", wait_for_status(app, "done").attempts)
    assert.equal("once", notes(app))
    assert.equal("before {},inside 3,with 3", app.db:value [[
      select string_agg(topic || ' ' || payload, ',' order by topic) from tidemill.queue_message where topic <> 't']])
    app:stop()
  end)

  it("checks its arguments", function()
    local app = new_app([[
      local said = {}
      for i, arguments in ipairs { {}, { 7 }, { print, 7 }, { print, { retry = 1 } } } do
        said[i] = select(2, pcall(ctx.finish, ctx, unpack(arguments)))
      end
      said[5] = select(2, pcall(ctx.finish))
      return said
    ]])
    local said = app:must_run("call", "h")
    assert.matches('ctx:finish: expected a function, found nothing".*expected a function, found 7"', said)
    assert.matches('options: expected a table or nothing, found 7".*"retry\\\\*" is unknown', said)
    assert.matches("ctx:finish: call it with a colon, ctx:finish", said)
  end)

  it("commits by itself in call, where there is no message", function()
    local app = new_app([[
      ctx:publish("after")
      ctx:finish(function(tx) ]] .. EFFECT .. [[ end)
    ]])
    local result = app:run("call", "h")
    assert.same({ 0, "null\n" }, { result.code, result.stdout })
    assert.matches('published nothing, there is no queue here: .*"topic":"after"', result.stderr)
    assert.equal("once", notes(app))
  end)

  it("counts for drain, and holds with many at a time", function()
    local app = new_app([[ctx:finish(function(tx) ]] .. EFFECT .. [[ end)]], { executors = 2, sql_connections = 3 })
    app:must_run "migrate"
    app:run("drain") -- registers the subscription
    app.db:query "select tidemill.publish_many(array['t'], array(select to_jsonb(i) from generate_series(1, 300) as i))"
    app:must_run "drain"
    assert.equal("300", app.db:value "select count(*) from tidemill.queue_message where status = 'done'")
    assert.equal("300,300", app.db:value "select count(*) || ',' || count(distinct id) from effect")
  end)

  -- ---- who dies, and when ---------------------------------------------------------------------

  for _, case in ipairs {
    { "before the done is written", "finish_begin", tries = 2 },
    { "before the commit", "finish_settled", tries = 2 },
    { "after the commit", "finish_committed", tries = 1 },
    { "before the runtime heard of it", "frames_begin", tries = 1 },
  } do
    local when, point, tries = case[1], case[2], case.tries
    it("happens once when the executor is killed " .. when, function()
      local app = new_app(([[
        local n = begin_try()
        ctx:finish(function(tx)
          %s
          if n == 1 then ffi.C.setenv("TIDEMILL_KILL_AT", "%s", 1) end
        end)
      ]]):format(EFFECT, point))
      app:start()
      app:must_run("publish", "t")
      wait_for_status(app, "done")
      app:wait_until(function()
        return app.processes[1]:stderr():find("event=executor_died", 1, true)
      end, 20, "the executor was killed")
      -- Whatever the runtime writes about it comes to nothing.
      app:stop()
      assert.equal("done", message(app).status)
      assert.same({ "once", tostring(tries) }, { notes(app), app.db:value "select count(*) from try" })
    end)
  end

  it("happens once when the whole worker is killed after the commit", function()
    local app = new_app([[
      begin_try()
      ctx:finish(function(tx) ]] .. EFFECT .. [[ end)
    ]], { lease_secs = 2 })
    local worker = app:start()
    app.db:exec [[
      create function wait_at_commit() returns trigger language plpgsql as
        $$ begin perform pg_advisory_xact_lock(7); return null; end $$;
      create constraint trigger waits after insert on effect deferrable initially deferred
        for each row execute function wait_at_commit()]]
    app.db:query "select pg_advisory_lock(7)"
    app:must_run("publish", "t")
    app:wait_until(function()
      return app.db:value [[select count(*) from pg_stat_activity
        where query = 'COMMIT' and wait_event = 'advisory']] == "1"
    end, 20, "the commit waits")
    worker:kill "KILL"
    worker:wait(10)
    app.db:query "select pg_advisory_unlock(7)"
    local second = app:start()
    wait_for_status(app, "done")
    app:stop(second)
    assert.equal("once", notes(app))
  end)

  -- ---- who has the message --------------------------------------------------------------------

  it("rolls back when the lease was lost, and says so", function()
    local app = new_app([[
      begin_try()
      local ok = pcall(ctx.finish, ctx, function(tx)
        ]] .. EFFECT .. [[
        tx:query "select pg_advisory_xact_lock(7)"
      end)
      print("never", ok)
    ]])
    local worker = app:start()
    app.db:query "select pg_advisory_lock(7)"
    app:must_run("publish", "t")
    app:wait_until(function()
      return app.db:value "select count(*) from pg_stat_activity where wait_event = 'advisory'" == "1"
    end, 20, "the handler waits")
    app.db:query "update tidemill.queue_message set claimed_by = 'somebody#1'"
    app.db:query "select pg_advisory_unlock(7)"
    worker:wait_for("event=lease_lost", 20)
    assert.matches("event=lease_lost message_id=%S+ topic=t subscriber=h attempt=1", worker:stderr())
    local row = message(app)
    assert.same({ "running", "somebody#1", nil }, { row.status, row.claimed_by, row.error })
    assert.equal("", notes(app))
    app.db:query "update tidemill.queue_message set status = 'done', processed_at = now()"
    app:stop()
    assert.is_nil(worker:stderr():find("never", 1, true))
    assert.equal("1", app.db:value "select count(*) from try")
  end)

  it("fails where its own statements change the message's row", function()
    for statement, undo in pairs {
      ["select tidemill.cancel($1::uuid)"] = "",
      ["delete from tidemill.queue_message where id = $1::uuid"] = "",
      ["select $1::text"] = "drop trigger never on tidemill.queue_message",
    } do
      local body = ([[
        local n = begin_try()
        ctx:publish("before")
        local ok = pcall(ctx.finish, ctx, function(tx)
          ]] .. EFFECT .. [[
          if n < 3 then tx:query(%q, ctx.message_id) end
        end)
        print("never", ok)
      ]]):gsub("%%q", function() return ("%q"):format(statement) end)
      local app = new_app(body)
      local worker = app:start()
      if undo ~= "" then
        app.db:exec [[create function nothing() returns trigger language plpgsql as $$ begin return null; end $$;
          create trigger never before update on tidemill.queue_message for each row
            when (new.status = 'done' and old.attempts < 3) execute function nothing()]]
      end
      app:must_run("publish", "t")
      local row = wait_for_status(app, "done")
      assert.equal("3", row.attempts, statement)
      assert.matches("ctx:finish: the message was not there to be marked done: a statement", row.errors)
      assert.equal("once", notes(app))
      assert.equal("1", app.db:value "select count(*) from tidemill.queue_message where topic = 'before'")
      if undo ~= "" then
        app.db:exec(undo)
      end
      app:stop()
      assert.is_nil(worker:stderr():find("never", 1, true))
    end
  end)

  it("rolls back when a person cancelled the message", function()
    local app = new_app([[
      ctx:finish(function(tx)
        ]] .. EFFECT .. [[
        tx:query "select pg_advisory_xact_lock(7)"
      end)
    ]])
    local worker = app:start()
    app.db:query "select pg_advisory_lock(7)"
    app:must_run("publish", "t")
    app:wait_until(function()
      return app.db:value "select count(*) from pg_stat_activity where wait_event = 'advisory'" == "1"
    end, 20, "the handler waits")
    app:must_run("cancel", message(app).id)
    worker:wait_for("event=message_cancelled", 20)
    assert.equal("discarded", message(app).status)
    assert.equal("", notes(app))
    app.db:query "select pg_advisory_unlock(7)"
    app:stop()
    assert.equal("", notes(app))
  end)

  it("waits for who has the row locked, and then finds it", function()
    local app = new_app([[ctx:finish(function(tx) ]] .. EFFECT .. [[ end)]])
    app:start()
    local holder = app:connect()
    -- The effect waits until the row is locked.
    app.db:exec [[create function lock_out() returns trigger language plpgsql as
      $$ begin perform pg_advisory_xact_lock_shared(8); return null; end $$;
      create trigger locks after insert on effect for each row execute function lock_out()]]
    app.db:query "select pg_advisory_lock(8)"
    app:must_run("publish", "t")
    app:wait_until(function()
      return app.db:value "select count(*) from pg_stat_activity where wait_event = 'advisory'" == "1"
    end, 20, "the handler waits")
    holder:exec "begin"
    holder:query "select 1 from tidemill.queue_message for update"
    app.db:query "select pg_advisory_unlock(8)"
    app:wait_until(function()
      return app.db:value [[select count(*) from pg_stat_activity where wait_event in ('transactionid', 'tuple')
        and application_name = 'tidemill handler']] == "1"
    end, 20, "the handler waits for the row")
    holder:exec "commit"
    wait_for_status(app, "done")
    assert.equal("once", notes(app))
    app:stop()
  end)

  -- ---- an answer that is lost -----------------------------------------------------------------

  it("starts again when its commit was cut off before it took place", function()
    local app = new_app([[
      local n = begin_try()
      pcall(ctx.finish, ctx, function(tx)
        tx:query("insert into effect values ($1, $2)", ctx.message_id, "try " .. n)
      end)
      print("never")
    ]])
    local worker = app:start()
    app.db:exec [[
      create function wait_at_commit() returns trigger language plpgsql as
        $$ begin perform pg_advisory_xact_lock(7); return null; end $$;
      create constraint trigger waits after insert on effect deferrable initially deferred
        for each row execute function wait_at_commit()]]
    app.db:query "select pg_advisory_lock(7)"
    app:must_run("publish", "t")
    app:wait_until(function()
      return app.db:value [[select count(*) from pg_stat_activity
        where query = 'COMMIT' and wait_event = 'advisory']] == "1"
    end, 20, "the commit waits")
    app.db:query [[select pg_terminate_backend(pid) from pg_stat_activity
      where query = 'COMMIT' and wait_event = 'advisory']]
    app.db:query "select pg_advisory_unlock(7)"
    local row = wait_for_status(app, "done")
    assert.equal("2", row.attempts)
    assert.matches("whether the statement took effect is unknown", row.errors)
    assert.equal("try 2", notes(app))
    app:stop()
    -- Not resumed: it might have returned, and the message would be done without its effects.
    assert.is_nil(worker:stderr():find("never", 1, true))
  end)

  it("stays done when its commit took place and the answer was lost", function()
    local server = cluster.new()
    finally(function()
      server:close_apps()
      server:close()
    end)
    local app = server:app { config = {}, handlers = {} }
    app:write_config { subscribe = { t = { "h" } }, executors = 1, retry_backoff_secs = 0 }
    app:write_handler("h", HEAD .. [[
      begin_try()
      pcall(ctx.finish, ctx, function(tx)
        ]] .. EFFECT .. [[
        tx:query "set local synchronous_commit = 'on'"
      end)
      print("never")
    end]])
    app.db:exec(TABLES)
    -- A commit then waits for a standby that never comes, when it has taken place already.
    app.db:exec(("alter database %s set synchronous_commit = 'local'"):format(app.db:value "select current_database()"))
    app.db:exec "alter system set synchronous_standby_names = 'nobody'"
    app.db:exec "select pg_reload_conf()"
    local worker = app:start()
    app:must_run("publish", "t")
    app:wait_until(function()
      return app.db:value "select count(*) from pg_stat_activity where wait_event = 'SyncRep'" == "1"
    end, 20, "the commit waits for the standby")
    app.db:query "select pg_terminate_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'"
    wait_for_status(app, "done")
    worker:wait_for("event=lease_lost", 20)
    app:stop()
    assert.same({ "done", "1", nil }, { message(app).status, message(app).attempts, message(app).error })
    assert.same({ "once", "1" }, { notes(app), app.db:value "select count(*) from try" })
    assert.is_nil(worker:stderr():find("never", 1, true))
  end)

  -- ---- another program's table ----------------------------------------------------------------

  it("works on another program's table, but for publishing", function()
    local app = foreign.app {
      config = { subscribe = { t = "work" }, max_attempts = 1 },
      handlers = { work = [[
        if payload.publish then ctx:publish("t2") end
        ctx:finish(function(tx)
          tx:query("insert into effect values ($1, $2)", ctx.message_id, "once")
          if payload.many then tx:publish("t2") end
        end)]] },
    }
    app.db:exec(TABLES)
    app:start()
    foreign.wait_for_status(app, foreign.insert(app, "t", "work", "{}"), "done")
    assert.equal("once", notes(app))
    local row = foreign.wait_for_status(app, foreign.insert(app, "t", "work", '{"publish": true}'), "failed")
    assert.matches("ctx:publish and ctx:finish together need a table of our own", row.error)
    row = foreign.wait_for_status(app, foreign.insert(app, "t", "work", '{"many": true}'), "failed")
    assert.matches("tx:publish: this table is another program's and has no function for it", row.error)
    assert.equal("once", notes(app))
    app:stop()
  end)
end)
