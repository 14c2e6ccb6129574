-- Notifications that stop coming: the worker notices by itself, makes its listening connection anew
-- and hears again. The poll is an hour away, so nothing else can find what is published.

local journal = require "spec.support.journal"
local process = require "spec.support.process"
local relay = require "spec.support.relay"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- A probe every fifteen seconds that has five to arrive; everything slower is an hour away.
local PROBE_SECS = 40
local SILENT = 'event=database_lost link=listen error="a notification of our own did not arrive"'

local function new_app(config)
  config = config or {}
  config.subscribe = { t = "work" }
  return journal.app { config = config, handlers = { work = "" } }
end

-- The server's end of a connection; nil while there is none.
local function backend_of(app, name)
  return app.db:value([[select pid from pg_stat_activity
    where datname = current_database() and application_name = $1 order by backend_start desc limit 1]],
    "tidemill " .. name)
end

-- A worker may be ready before it listens. The server's end of that, when the last of it is done.
local function wait_for_backend(app)
  return app:wait_until(function()
    return app.db:value [[select pid from pg_stat_activity where datname = current_database()
      and application_name = 'tidemill listen' and state = 'idle' and query ilike 'listen%control%']]
  end, 20, "the worker listens")
end

-- A new connection, and not the one whose backend is `old`.
local function wait_for_new_backend(app, old)
  return app:wait_until(function()
    local backend = backend_of(app, "listen")
    return backend and backend ~= old and backend
  end, 20, "the worker listens on a new connection")
end

-- Nothing is asked for any more by itself: what is published from now on is found by being told.
local function wait_until_quiet(app)
  app:wait_until(function()
    return app.db:value [[select clock_timestamp() - state_change > interval '1 s' from pg_stat_activity
      where datname = current_database() and application_name = 'tidemill work']] == "t"
  end, 20, "the worker claims nothing by itself")
end

local function assert_hears(app)
  for _ = 1, 3 do
    wait_until_quiet(app)
    journal.wait_for_status(app, journal.publish(app, "t"), "done", 10)
  end
end

-- An app whose worker listens through a relay.
local function new_relayed_app()
  local app = new_app()
  local between = relay.start(app)
  app:write_config(([[return { subscribe = { t = "work" }, executors = 1, poll_secs = 3600, listen_database = %q }]]):
    format(between.dsn))
  return app, between
end

local function assert_made_again(app, worker, old, missed)
  worker:wait_for("event=database_reached link=listen", 20)
  wait_for_new_backend(app, old)
  journal.wait_for_status(app, missed, "done", 10)
  assert_hears(app)
  assert.is_nil(worker:stderr():find "link=work")
  assert.is_nil(worker:stderr():find "lease_over")
end

describe("a listening connection", function()
  -- Three at a time, as each takes its probes.
  it("in which nothing arrives any more is found out by a probe and made again; a good one is left alone", function()
    local hung, good = new_app(), new_app()
    local cut, between = new_relayed_app()
    local worker = { hung = hung:start(), cut = cut:start(), good = good:start() }
    local old = {}
    for name, app in pairs { hung = hung, cut = cut, good = good } do
      old[name] = wait_for_backend(app)
    end
    for _, app in ipairs { hung, cut, good } do
      assert_hears(app)
    end
    finally(function()
      process.run { "kill", "-CONT", old.hung }
      between:destroy()
    end)
    local told = good:connect()
    told:exec "listen tidemill_control"
    process.run { "kill", "-STOP", old.hung }
    between:kill "STOP"
    -- Meanwhile messages wait: nobody is told of them.
    local missed = { hung = journal.publish(hung, "t"), cut = journal.publish(cut, "t") }

    worker.hung:wait_for(SILENT, PROBE_SECS)
    worker.cut:wait_for(SILENT, PROBE_SECS)
    between:destroy()
    between = relay.start(cut)
    assert_made_again(hung, worker.hung, old.hung, missed.hung)
    assert_made_again(cut, worker.cut, old.cut, missed.cut)

    local probes = {}
    good:wait_until(function()
      local notification = told:wait_notify(1)
      table.insert(probes, notification and notification.payload:match "^probe (%x+ %d+)$")
      return #probes >= 2
    end, PROBE_SECS, "the good one was probed twice")
    assert.are_not.equal(probes[1], probes[2])
    assert_hears(good)
    assert.equal(old.good, backend_of(good, "listen"))
    assert.is_nil(worker.good:stderr():find "database_lost")
    cut:stop()
  end)

  it("killed by the server is made again, as often as it takes", function()
    local app = new_app()
    local worker = app:start()
    for _ = 1, 3 do
      local old, position = wait_for_backend(app), worker:position()
      app.db:query("select pg_terminate_backend($1::int)", old)
      worker:wait_for('event=database_lost link=listen error="terminating connection due to administrator command" '
        .. "sqlstate=57P01", 10, position)
      wait_for_new_backend(app, old)
      assert_hears(app)
    end
  end)

  it("whose peer is gone is made again when there is one", function()
    local app, between = new_relayed_app()
    local worker = app:start()
    assert_hears(app)
    local old = backend_of(app, "listen")
    finally(function()
      between:destroy()
    end)
    between:destroy()
    worker:wait_for("event=database_lost link=listen", 10)
    app:wait_until(function()
      return not backend_of(app, "listen")
    end, 10, "the server has noticed it too")
    -- There is nothing to connect to, and the other connections work on.
    worker:wait_for("event=database_unreached link=listen", 10)
    local missed = journal.publish(app, "t")
    between = relay.start(app)
    assert_made_again(app, worker, old, missed)
    app:stop()
  end)

  it("that is never answered is given up and tried again", function()
    local app, between = new_relayed_app()
    finally(function()
      between:destroy()
    end)
    between:kill "STOP"
    -- The other connections are there, and the worker works.
    local worker = app:start()
    worker:wait_for('event=database_unreached link=listen error="no connection within 10 s"', 30)
    between:kill "CONT"
    worker:wait_for("event=database_reached link=listen", 20)
    assert_hears(app)
    app:stop()
  end)
end)
