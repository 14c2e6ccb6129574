-- `tidemill migrate`: making a schema, bringing it up to date, and refusing what it cannot do.

local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local process = require "spec.support.process"
local schema = require "spec.support.schema"
local tidemill = require "spec.support.tidemill"

local app
local newest = #schema.files()

local function new_app(config, options)
  options = options or {}
  config.app = config.app or "shop"
  options.config = config
  app = tidemill.app(options)
  return app
end

after_each(tidemill.close_all)

local function version_of(name)
  return tonumber(app.db:value(('select max(version) from "%s".migration'):format(name or "tidemill")))
end

-- Runs `migrate` in another database or as another role.
local function run_on(dsn)
  return process.run {
    argv = { tidemill.binary, "migrate", "-c", app.config_path, "--database", dsn },
    cwd = app.dir,
  }
end

-- Runs `migrate`, which must fail: its one line of error. Nothing may be left half done.
local function refused(...)
  local result = app:run("migrate", ...)
  assert.not_equal(0, result.code)
  assert.equal("", result.stdout)
  return result.stderr
end

local function assert_says(text, stderr)
  assert.truthy(stderr:find(text, 1, true), stderr)
  assert.equal(1, select(2, stderr:gsub("\n", "")), stderr)
end

describe("migrate", function()
  it("makes the schema, and a second time finds nothing to do", function()
    new_app {}
    app:must_run "migrate"
    assert.equal(newest, version_of())
    assert.same(schema.files(),
      schema.column(app.db:query "select name from tidemill.migration order by version", "name"))
    app.db:query "insert into tidemill.subscription (app, topic, subscriber) values ('shop', 'a', 's')"
    app.db:query "select tidemill.publish('a')"
    local before = app.db:query "select version, applied_at from tidemill.migration order by version"
    app:must_run "migrate"
    assert.same(before, app.db:query "select version, applied_at from tidemill.migration order by version")
    assert.equal(1, #app:ledger())
  end)

  it("uses the names of the config, quoted", function()
    new_app { schema = "Select", table = "Order", prefix = "user" }
    app:must_run "migrate"
    app.db:query [[insert into "Select".subscription (app, topic, subscriber) values ('shop', 'a', 's')]]
    local listener = app:connect()
    listener:exec "listen user_queue"
    assert.equal("1", app.db:query([[select * from "Select".publish('a', dedupe_key => 'k')]])[1].delivered)
    assert.equal("a", listener:wait_notify(10).payload)
    local id = app.db:value [[select id from "Select"."Order"]]
    assert.equal("t", app.db:value([[select changed from "Select".cancel($1)]], id))
    assert.equal("0", app.db:value [[select waiting from "Select".lane_status]])
  end)

  it("takes the longest names", function()
    local long = ("x"):rep(63)
    new_app { schema = long, table = long, prefix = long:sub(1, 50) }
    app:must_run "migrate"
    app.db:query(("insert into %s.subscription (app, topic, subscriber) values ('shop', 'a', 's')"):format(long))
    assert.equal("1", app.db:query(("select * from %s.publish('a')"):format(long))[1].delivered)
  end)

  it("writes the settings that the functions follow, each time they differ", function()
    new_app { prefix = "one", max_payload_bytes = 5000, notify = false }
    app:must_run "migrate"
    local sql = "select prefix, max_payload_bytes, notify from tidemill.setting"
    assert.same({ prefix = "one", max_payload_bytes = "5000", notify = "f" }, app.db:query(sql)[1])
    app:write_config { app = "shop", prefix = "two" }
    app:must_run "migrate"
    assert.same({ prefix = "two", max_payload_bytes = "1048576", notify = "t" }, app.db:query(sql)[1])
  end)

  it("goes up in steps with --to, and never back", function()
    new_app {}
    app:must_run("migrate", "--to", "1")
    assert.equal(1, version_of())
    assert.equal("0", app.db:value "select count(*) from pg_proc where proname = 'publish'")
    app:must_run "migrate"
    assert.equal(newest, version_of())
    assert_says(("is at version %d already: there is no way back to 1"):format(newest), refused("--to", "1"))
    assert.equal(newest, version_of())
  end)

  it("once for several at the same time", function()
    new_app {}
    local started = {}
    for i = 1, 4 do
      started[i] = app:spawn "migrate"
    end
    for _, one in ipairs(started) do
      local code = one:wait(30)
      assert.equal(0, code, one:output())
    end
    assert.equal(newest, version_of())
  end)

  it("waits for another one, longer than any statement may take, and finds what that made", function()
    new_app {}
    local other = app:connect()
    other:exec "begin; select pg_advisory_xact_lock(hashtextextended('tidemill schema tidemill', 0))"
    app.db:exec(("alter database %s set statement_timeout = '500ms'"):format(app.database))
    local started = app:spawn "migrate"
    app:wait_until(function()
      return app.db:value "select count(*) from pg_locks where locktype = 'advisory' and not granted" == "1"
    end, 20, "the migration waits")
    clock.sleep(1)
    other:exec "create schema tidemill; commit"
    assert.equal(0, (started:wait(30)), started:output())
    assert.equal(newest, version_of())
  end)

  it("leaves nothing behind when a file fails half way", function()
    new_app {}
    app.db:exec [[
      create schema tidemill;
      create function tidemill.cancel(id uuid) returns boolean language sql as 'select true';
    ]]
    assert_says("0003_operations.sql: ", refused())
    assert.equal("0", app.db:value "select count(*) from pg_class where relnamespace = 'tidemill'::regnamespace")
  end)

  it("minds no setting of the role or the database", function()
    new_app {}
    app.db:exec(([[
      create schema trap;
      create function trap.now() returns timestamptz language plpgsql as $$ begin raise exception 'trapped'; end $$;
      create function trap.length(text) returns integer language plpgsql as $$ begin raise exception 'trapped'; end $$;
      alter database DB set search_path = trap, pg_catalog;
      alter database DB set default_transaction_isolation = 'serializable';
      alter database DB set default_transaction_read_only = on;
      alter database DB set standard_conforming_strings = off;
      alter database DB set client_encoding = 'LATIN1';
      alter database DB set "DateStyle" = 'German';
    ]]):gsub("DB", app.database))
    app:must_run "migrate"
    app:must_run "migrate"
    local plain = app:connect "options='-c default_transaction_read_only=off'"
    plain:query "insert into tidemill.subscription (app, topic, subscriber) values ('shop', 'a', 's')"
    assert.equal("1", plain:query("select * from tidemill.publish('a', delay => '1 s')")[1].delivered)
    assert.equal("`a b` is not a topic: use letters, digits, `.`, `_`, `-` or `:`",
      (schema.refused(plain, "select tidemill.publish('a b')")))
  end)
end)

describe("migrate refuses", function()
  it("a schema that is newer than the program", function()
    new_app {}
    app:must_run "migrate"
    app.db:query("insert into tidemill.migration (version, name, checksum) values ($1, 'later.sql', '')", newest + 1)
    assert_says(('schema "tidemill" is at version %d, this program knows %d: install a newer tidemill')
      :format(newest + 1, newest), refused())
  end)

  it("a schema that was made from other files", function()
    new_app {}
    app:must_run "migrate"
    app.db:query "update tidemill.migration set checksum = '0123' where version = 2"
    assert_says('schema "tidemill" was made from another 0002_publish.sql than this program carries', refused())
  end)

  it("a list of versions with a gap", function()
    new_app {}
    app:must_run "migrate"
    app.db:query "delete from tidemill.migration where version = 2"
    assert_says(('table "tidemill"."migration" has %d rows for version %d'):format(newest - 1, newest), refused())
  end)

  for _, thing in ipairs {
    "create table tidemill.queue_message (id integer)",
    "create view tidemill.worker as select 1",
    "create sequence tidemill.message_seq",
    "create table tidemill.migration (version integer, name text, checksum text, applied_at timestamptz)",
  } do
    it(("another program's thing in the way: %s"):format(thing), function()
      new_app {}
      app.db:exec("create schema tidemill; " .. thing)
      local name = thing:match "tidemill%.(%w+_?%w*)"
      assert_says(('schema "tidemill" holds a "%s" that Tidemill did not make'):format(name), refused())
      assert.equal("1", app.db:value [[select count(*) from pg_class
        where relnamespace = 'tidemill'::regnamespace and relkind in ('r', 'v', 'S')]])
    end)
  end

  it("another name of the table than the schema was made with", function()
    new_app {}
    app:must_run "migrate"
    app:write_config { app = "shop", table = "other" }
    assert_says('schema "tidemill" has no table "other": its ledger is "queue_message"', refused())
  end)

  for _, key in ipairs { "schema", "table", "prefix" } do
    it(("a %s that is no plain name"):format(key), function()
      new_app { [key] = 'a"; drop table x; --' }
      assert.truthy(refused():find(key, 1, true))
    end)
  end

  it("the name of one of its own tables for the ledger", function()
    new_app { table = "worker" }
    assert_says("table: `worker` is the name of another table of Tidemill", refused())
  end)

  it("a version that it does not know", function()
    new_app {}
    assert.truthy(refused("--to", tostring(newest + 1)):find "%-%-to")
  end)

  it("a database that is not encoded in UTF8", function()
    new_app {}
    local name = app.database .. "_latin"
    app.admin:exec(("create database %s template template0 encoding 'LATIN1' locale 'C'"):format(name))
    local result = run_on((app.dsn:gsub("dbname=%S+", "dbname=" .. name)))
    app.admin:exec("drop database " .. name)
    assert.not_equal(0, result.code)
    assert_says("the database is not encoded in UTF8, which Tidemill needs", result.stderr)
  end)

  it("to wait for ever for a table that is in use", function()
    new_app {}
    app:must_run("migrate", "--to", "1")
    local busy = app:connect()
    busy:exec "begin; lock table tidemill.setting in access exclusive mode"
    assert_says('a table of schema "tidemill" is in use: try again when it is less busy', refused())
    busy:exec "rollback"
    assert.equal(1, version_of())
    app:must_run "migrate"
  end)

  it("a server that is not there, naming no part of the password", function()
    new_app({}, { database = false })
    for _, dsn in ipairs {
      "host=/nowhere user=u password=hunter2 dbname=d",
      "host=/nowhere user=u password=hun ter2 dbname=d",
      "postgresql://u:hun@ter2@127.0.0.1:1/d",
      "postgresql://u:hun/ter2@127.0.0.1:1/d",
      "postgresql://u:hunter2@127.0.0.1:1/d?nonsense=1",
      "postgresql://u:hunter2@127.0.0.1:1/d",
    } do
      local result = run_on(dsn)
      assert.not_equal(0, result.code)
      assert.is_nil((result.stderr .. result.stdout):find("ter2", 1, true), result.stderr)
      assert.is_nil((result.stderr .. result.stdout):find("hun", 1, true), result.stderr)
      assert.is_true(#result.stderr > 20)
    end
  end)
end)

describe("migrate needs", function()
  local role

  before_each(function()
    new_app {}
    role = "tidemill_spec_owner_" .. app.db.pid
    app.db:exec(("create role %s login"):format(role))
  end)

  local drop_role = function()
    app.db:exec(("drop owned by %s cascade; drop role %s"):format(role, role))
  end

  -- `migrate` as that role.
  local function run_as_role()
    return run_on((app.dsn:gsub("user='[^']*'", "user='" .. role .. "'")))
  end

  it("no right on the database where the schema is there and the role's own", function()
    finally(drop_role)
    app.db:exec(("create schema tidemill authorization %s"):format(role))
    local result = run_as_role()
    assert.equal(0, result.code, result.stderr)
    assert.equal(role, app.db:value "select tableowner from pg_tables where tablename = 'queue_message'")
    app.db:query "insert into tidemill.subscription (app, topic, subscriber) values ('shop', 'a', 's')"
    assert.equal("1", app.db:query("select * from tidemill.publish('a')")[1].delivered)
  end)

  it("CREATE on the database for a new schema, and says so", function()
    finally(drop_role)
    local result = run_as_role()
    assert.not_equal(0, result.code)
    assert_says('creating schema "tidemill": permission denied for database ' .. app.database, result.stderr)
  end)

  it("no more than a worker's duty when there is nothing to do", function()
    finally(drop_role)
    app:must_run "migrate"
    app.db:query("select tidemill.grant_to($1, 'worker')", role)
    local result = run_as_role()
    assert.equal(0, result.code, result.stderr)
    -- A setting that differs is another matter.
    app:write_config { app = "shop", prefix = "other" }
    result = run_as_role()
    assert.not_equal(0, result.code)
    assert_says("writing prefix, max_payload_bytes and notify into schema", result.stderr)
    assert.equal("tidemill", app.db:value "select prefix from tidemill.setting")
  end)
end)

describe("migrate --print", function()
  it("prints what psql can run, without a database", function()
    new_app { schema = "Printed", prefix = "shop", max_payload_bytes = 777 }
    local sql = app:must_run("migrate", "--print")
    assert.is_nil(sql:find "{schema}")
    assert.is_nil(sql:find "{table}")
    assert.is_nil(sql:find "{prefix}")
    local path = folder.write(app.dir, "schema.sql", sql)
    local result = process.run { argv = { "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", app.dsn, "-f", path } }
    assert.equal(0, result.code, result.stderr)
    assert.equal(newest, version_of "Printed")
    assert.same({ prefix = "shop", max_payload_bytes = "777" },
      app.db:query([[select prefix, max_payload_bytes from "Printed".setting]])[1])
    -- The program knows it as its own.
    app:must_run "migrate"
    assert.equal(newest, version_of "Printed")
  end)
end)

describe("a worker with migrate = false", function()
  local function run_worker()
    local result = app:run("run")
    assert.not_equal(0, result.code)
    return result.stderr
  end

  before_each(function()
    new_app { migrate = false }
  end)

  it("asks for `tidemill migrate` where there is nothing", function()
    assert_says('there is no table "tidemill"."queue_message": run `tidemill migrate`', run_worker())
    assert.equal("0", app.db:value "select count(*) from pg_namespace where nspname = 'tidemill'")
  end)

  it("asks for `tidemill migrate` where the schema is older", function()
    app:must_run("migrate", "--to", "1")
    assert_says(('schema "tidemill" is at version 1, this program needs %d: run `tidemill migrate`'):format(newest),
      run_worker())
    assert.equal(1, version_of())
  end)

  it("refuses a newer schema", function()
    app:must_run "migrate"
    app.db:query("insert into tidemill.migration (version, name, checksum) values ($1, 'later.sql', '')", newest + 1)
    assert_says(("is at version %d, this program knows %d"):format(newest + 1, newest), run_worker())
  end)

  it("refuses a table that is no queue", function()
    app.db:exec "create schema tidemill; create table tidemill.queue_message (id uuid, topic text)"
    assert_says('table "tidemill"."queue_message" has not the columns of a queue', run_worker())
  end)
end)
