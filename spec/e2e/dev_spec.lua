-- `tidemill dev`: a private Postgres around the worker. Real servers are made and ended here, and
-- each spec ends with none left.

local lfs = require "lfs"
local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local pg = require "spec.support.pg"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local CONFIG = { subscribe = { ["order.paid"] = "greet" } }
local HANDLERS = { greet = [[return function(order, ctx) ctx:log("greeted", { order = order.id }) end]] }

local function must(...)
  local result = process.run { argv = { ... } }
  assert.equal(0, result.code, result.stderr)
  return (result.stdout:gsub("%s+$", ""))
end

local is_root = must("id", "-u") == "0"

-- An app that has only what dev makes it.
local function new_app(mode)
  local app = tidemill.app { config = CONFIG, handlers = HANDLERS, database = false }
  must("chmod", mode or "755", app.dir)
  return app
end

-- Starts dev and waits until its first screen is whole. Returns the process and the screen.
local function start(app, ...)
  local dev = app:spawn { "dev", setpgid = true, ... }
  dev:wait_for("event=ready", 60)
  return dev, dev:wait_for("(The app .*\n  publish +[^\n]+\n)", 10)
end

-- What a first screen says in the row `name`.
local function row(screen, name)
  return screen:match("\n  " .. name .. " +([^\n]+)\n")
end

local function data_folder(screen)
  return row(screen, "database"):match "^a Postgres of its own in (.*); messages stay there$"
end

-- A connection to the server of a dev, by the conninfo that it shows.
local function connect(screen)
  return pg.connect((row(screen, "look"):match "^psql '(.*)'$"))
end

-- Ctrl-C, as a terminal sends it: to the whole group.
local function interrupt(dev)
  must("kill", "-INT", "--", "-" .. dev.pid)
end

-- The pids of Postgres servers among our descendants.
local function servers()
  local found = {}
  for _, child in ipairs(process.children()) do
    if child.name:find "^postgres" then
      table.insert(found, child.pid)
    end
  end
  return found
end

local function assert_stopped(dev)
  assert.same({ 0 }, { dev:wait(60) })
  assert.same({}, servers())
end

describe("the private server", function()
  it("is where handlers query, in the worker and when they are called", function()
    local app = new_app()
    app:write_handler("greet", [[
      local tidemill = require "tidemill"
      return function(order, ctx)
        tidemill.query "create table if not exists seen (topic text)"
        tidemill.query("insert into seen values ($1)", ctx.topic)
        local rows = tidemill.query "select count(*) as n, current_setting('port') as port from seen"
        ctx:log("seen", { n = rows[1].n })
        return rows[1].n
      end]])
    local dev = start(app)
    app:must_run("publish", "order.paid")
    dev:wait_for "text=seen[^\n]* n=1"
    assert.equal("2\n", app:must_run("call", "greet"))
    interrupt(dev)
    assert_stopped(dev)
  end)
end)

describe("the first screen", function()
  it("shows what is wired to what, and lines that work as they stand", function()
    local app = new_app()
    local dev, screen = start(app)
    assert.equal("once it is stopped: rm -rf " .. app.dir .. "/.tidemill", row(screen, "delete"))
    assert.truthy(screen:find("\nIn another terminal, in this folder:\n", 1, true))
    assert.truthy(screen:find "\n  topic +subscriber +handler\n  order%.paid +greet +greet\n", screen)
    -- Typed where dev was typed.
    local published = process.run { "sh", "-c", row(screen, "publish"), cwd = app.dir }
    assert.equal(0, published.code, published.stderr)
    assert.truthy(published.stdout:find '"topic":"order.paid","delivered":1,', published.stdout)
    dev:wait_for "greeted[^\n]* order=1"
    local looked = process.run {
      "sh", "-c", row(screen, "look") .. " -qAtc 'select topic, subscriber from tidemill.queue_message'", cwd = "/",
    }
    assert.equal("order.paid|greet\n", looked.stdout, looked.stderr)
    interrupt(dev)
    assert_stopped(dev)
  end)
end)

describe("the private server", function()
  it("is found by a publish from another process, and by its folder alone", function()
    local app = new_app()
    local dev = start(app)
    local result = process.run { tidemill.binary, "publish", "order.paid", '{"id": 7}', cwd = app.dir }
    assert.equal(0, result.code, result.stderr)
    dev:wait_for "greeted[^\n]* order=7"
    assert.truthy(app:must_run("migrate"):find "nothing to do")
    assert.truthy(app:must_run("version"):find "\nPostgres +%d+%.%d+\n")
  end)

  it("listens on a socket that is closed to others, and on no TCP port", function()
    local app = new_app()
    local _, screen = start(app)
    local db = connect(screen)
    assert.equal("", db:value "show listen_addresses")
    assert.equal("0700", db:value "show unix_socket_permissions")
    assert.equal("on", db:value "show fsync")
    assert.equal("UTF8", db:value "show server_encoding")
    local socket_folder = db:value "show unix_socket_directories":gsub('"', "")
    assert.equal("700", must("stat", "-c", "%a", socket_folder))
    db:close()
  end)

  it("keeps its messages, and leaves no process behind, from one dev to the next", function()
    local app = new_app()
    local dev, screen = start(app)
    local data = data_folder(screen)
    app:must_run("publish", "order.paid", "--delay", "3600", '{"id": 11}')
    interrupt(dev)
    assert_stopped(dev)

    local again, second = start(app)
    assert.equal(data, data_folder(second))
    local db = connect(second)
    assert.equal("1", db:value "select count(*) from tidemill.queue_message where payload ->> 'id' = '11'")
    db:close()
    again:kill "TERM"
    assert_stopped(again)
  end)

  it("is not made a second time for a folder in use", function()
    local app = new_app()
    local dev = start(app)
    local second = app:run "dev"
    assert.equal(2, second.code)
    assert.equal(("tidemill: `tidemill dev` already runs here (pid %d): stop it, or use another folder\n"):format(
      dev.pid), second.stderr)
    assert.is_false(dev:poll())
  end)

  it("is taken over when dev was killed, with its messages", function()
    local app = new_app()
    local dev = start(app)
    app:must_run("publish", "order.paid", "--delay", "3600")
    dev:kill "KILL"
    dev:wait()
    local left = servers()
    assert.truthy(#left > 0)

    local again, screen = start(app)
    local pid = tonumber((again:wait_for "event=devdb_taken_over pid=(%d+)"))
    assert.equal(left[1], pid)
    local db = connect(screen)
    assert.equal("1", db:value "select count(*) from tidemill.queue_message where status = 'pending'")
    db:close()
    interrupt(again)
    assert_stopped(again)
  end)

  it("recovers when it was killed too", function()
    local app = new_app()
    local dev, screen = start(app)
    app:must_run("publish", "order.paid", "--delay", "3600")
    local postmaster = must("head", "-n", "1", data_folder(screen) .. "/postmaster.pid")
    dev:kill "KILL"
    must("kill", "-KILL", postmaster)
    dev:wait()

    local again, second = start(app)
    local db = connect(second)
    assert.equal("1", db:value "select count(*) from tidemill.queue_message where status = 'pending'")
    db:close()
    interrupt(again)
    assert_stopped(again)
  end)

  it("starts although the number in its pid file belongs to another process by now", function()
    local app = new_app()
    local dev, screen = start(app)
    local data = data_folder(screen)
    interrupt(dev)
    assert_stopped(dev)
    local other = process.spawn { "sleep", "600" }
    local lines = ("%d\n%s\n1\n5432\n%s\n\n0\nready\n"):format(other.pid, data, data)
    folder.write(data, "postmaster.pid", lines)
    must("chown", "--reference=" .. data, data .. "/postmaster.pid")
    folder.write(data, ".s.PGSQL.5432.lock", lines)
    must("chown", "--reference=" .. data, data .. "/.s.PGSQL.5432.lock")

    local again = start(app)
    assert.is_false(other:poll())
    other:destroy()
    interrupt(again)
    assert_stopped(again)
  end)

  it("is made anew after dev was killed while making it", function()
    local app = new_app()
    local dev = app:spawn "dev"
    dev:wait_for "event=devdb_create"
    clock.wait_until(function()
      for name in lfs.dir(app.dir .. "/.tidemill") do
        if name:find "^new%-" then
          return true
        end
      end
    end, 30, "a folder that is being made")
    dev:kill "KILL"
    dev:wait()
    local again = start(app)
    for name in lfs.dir(app.dir .. "/.tidemill") do
      assert.is_nil(name:find "^new%-")
    end
    interrupt(again)
    assert_stopped(again)
  end)

  it("is not left behind by a Ctrl-C while it is being made", function()
    local app = new_app()
    local dev = app:spawn { "dev", setpgid = true }
    dev:wait_for "event=devdb_create"
    interrupt(dev)
    assert_stopped(dev)
    for name in lfs.dir(app.dir .. "/.tidemill") do
      assert.is_nil(name:find "^new%-")
    end
  end)

  it("says what is wrong when it does not start", function()
    local app = new_app()
    local dev, screen = start(app)
    local data = data_folder(screen)
    interrupt(dev)
    assert_stopped(dev)

    local conf = data .. "/postgresql.conf"
    local good = folder.read(conf)
    folder.write(data, "postgresql.conf", good .. "\nno_such_setting = 1\n")
    local result = app:run "dev"
    assert.equal(1, result.code)
    assert.truthy(result.stderr:find 'tidemill: Postgres ended at its start with exit code 1: [^\n]*contains errors '
      .. "%(see [^\n]*/%.tidemill/postgres%.log%)\n", result.stderr)
    folder.write(data, "postgresql.conf", good)

    folder.write(data, "PG_VERSION", "11\n")
    result = app:run "dev"
    assert.equal(1, result.code)
    assert.truthy(result.stderr:find "was made by Postgres 11: [^\n]*install the package postgresql%-11, or remove ",
      result.stderr)
    assert.same({}, servers())
  end)

  it("works in folders whose paths are long or strange", function()
    local app = new_app()
    local strange = app.dir .. "/" .. ("long"):rep(30) .. "/it's, \"odd\" and \\"
    must("mkdir", "-p", strange)
    must("cp", "-r", app.config_path, app.dir .. "/handlers", strange)
    local dev = process.spawn { tidemill.binary, "dev", cwd = strange }
    dev:wait_for("event=ready", 60)
    local screen = dev:wait_for "(The app .*\n  publish +[^\n]+\n)"
    local socket_folder = row(screen, "look"):match "host=(%S+)"
    assert.truthy(socket_folder:find "^/tmp/tidemill%-", socket_folder)
    assert.equal("700", must("stat", "-c", "%a", socket_folder))
    local published = process.run { "sh", "-c", row(screen, "publish"), cwd = strange }
    assert.equal(0, published.code, published.stderr)
    dev:kill "TERM"
    assert_stopped(dev)
    assert.is_nil(lfs.attributes(socket_folder))
    -- And it works again.
    local again = process.spawn { tidemill.binary, "dev", cwd = strange }
    again:wait_for("event=ready", 60)
    again:kill "TERM"
    assert_stopped(again)
  end)

  for name, shown in pairs {
    ["with space"] = "a blank", ["it's"] = "an apostrophe", ["back\\slash"] = "a backslash",
  } do
    it("works in a folder with " .. shown .. " in its name", function()
      local app = new_app()
      local dir = app.dir .. "/" .. name
      must("mkdir", dir)
      must("cp", "-r", app.config_path, app.dir .. "/handlers", dir)
      local dev = process.spawn { tidemill.binary, "dev", cwd = dir }
      dev:wait_for("event=ready", 60)
      local screen = dev:wait_for "(The app .*\n  publish +[^\n]+\n)"
      assert.equal(dir .. "/.tidemill/pg", data_folder(screen))
      local published = process.run { "sh", "-c", row(screen, "publish"), cwd = dir }
      assert.equal(0, published.code, published.stderr)
      dev:wait_for "greeted[^\n]* order=1"
      local looked = process.run {
        "sh", "-c", row(screen, "look") .. " -qAtc 'select count(*) from tidemill.queue_message'", cwd = "/",
      }
      assert.equal("1\n", looked.stdout, looked.stderr)
      dev:kill "TERM"
      assert_stopped(dev)
    end)
  end

  it("is found by run, too", function()
    local app = new_app()
    local dev = start(app)
    local worker = app:spawn "run"
    worker:wait_for "event=ready[^\n]*/%.tidemill/pg:5432/tidemill"
    app:stop(worker)
    app:stop(dev)
    assert.same({}, servers())
    local alone = process.spawn { tidemill.binary, "run", cwd = app.dir, env = { PGHOST = "/nowhere" } }
    alone:wait_for('event=database_unreached error="no database is named in the config, no `tidemill dev` runs '
      .. "there, and by the PG%* variables: [^\n]*/nowhere")
    alone:kill "TERM"
    assert.same({ 0 }, { alone:wait() })
  end)

  it("gives what a killed dev was at to the next one at once", function()
    local app = tidemill.app {
      config = { subscribe = { a = "slow" }, retry_backoff_secs = 0 },
      handlers = { slow = [[return function(_, ctx)
        ctx:log("began")
        if ctx.attempts == 1 then require("tidemill").sleep(600) end
      end]] },
      database = false,
    }
    must("chmod", "755", app.dir)
    local dev = start(app)
    app:must_run("publish", "a")
    dev:wait_for "began"
    dev:kill "KILL"
    dev:wait()
    local again = start(app)
    again:wait_for "event=killed_workers_buried workers=1 messages=1"
    again:wait_for("attempt=2[^\n]*began", 10)
    interrupt(again)
    assert_stopped(again)
  end)

  it("is started again when it was killed while dev runs", function()
    local app = new_app()
    local dev, screen = start(app)
    for round = 1, 2 do
      local position = dev:position()
      must("kill", "-KILL", must("head", "-n", "1", data_folder(screen) .. "/postmaster.pid"))
      dev:wait_for("event=database_ended", 10, position)
      dev:wait_for("event=database_restarted", 30, position)
      app:must_run("publish", "order.paid", ('{"id": %d}'):format(40 + round))
      dev:wait_for(("greeted[^\n]* order=%d"):format(40 + round), 30)
    end
    interrupt(dev)
    assert_stopped(dev)
  end)

  it("ends with 1 when it cannot be started again", function()
    local app = new_app()
    local dev, screen = start(app)
    folder.write(data_folder(screen), "postgresql.conf", "no_such_setting = 1\n")
    must("kill", "-KILL", must("head", "-n", "1", data_folder(screen) .. "/postmaster.pid"))
    assert.same({ 1 }, { dev:wait(30) })
    assert.truthy(dev:stderr():find(
      "tidemill: Postgres ended by itself and does not start again: [^\n]*postgres%.log%)\n"), dev:stderr())
    assert.same({}, servers())
  end)

  it("ends with dev, with 1, when its folder is removed", function()
    local app = new_app()
    local dev = start(app)
    -- The server still writes: what it makes anew while we remove is in the way.
    clock.wait_until(function()
      return process.run({ "rm", "-rf", app.dir .. "/.tidemill" }).code == 0
    end, 10, "the folder's end")
    assert.same({ 1 }, { dev:wait(30) })
    assert.truthy(dev:stderr():find("tidemill: [^\n]*/%.tidemill was removed while `tidemill dev` ran, and the "
      .. "database with it: start `tidemill dev` again for an empty one\n"), dev:stderr())
    assert.same({}, servers())
  end)

  it("is not made where the database is named", function()
    local app = tidemill.app { config = CONFIG, handlers = HANDLERS }
    local dev = app:spawn "dev"
    dev:wait_for "event=ready"
    local screen = dev:wait_for "(The app .*\n  publish +[^\n]+\n)"
    assert.truthy(row(screen, "database"):find(app.database .. ", named by --database; no server was started", 1, true))
    local published = process.run { "sh", "-c", row(screen, "publish"), cwd = "/" }
    assert.truthy(published.stdout:find '"delivered":1', published.stderr)
    assert.same({}, servers())
    assert.is_nil(lfs.attributes(app.dir .. "/.tidemill"))
  end)
end)

describe("--sample", function()
  it("publishes the messages beside the config once all runs", function()
    local app = new_app()
    app:write("sample.jsonl", '{"topic": "order.paid", "message": {"id": 21}}\n\n{"topic": "order.paid"}\n')
    local dev = start(app, "--sample")
    dev:wait_for 'event=sample_published messages=2 hint="each start with %-%-sample publishes them again"'
    dev:wait_for "greeted[^\n]* order=21"
  end)

  it("has its first message in the first screen, asked for or not", function()
    local app = new_app()
    app:write("sample.jsonl", '\n{"message": {"a": [1, "}\\""], "topic": "no"}, "topic":"order.paid"}\n'
      .. '{"topic": "t"}\n')
    local dev, screen = start(app)
    assert.truthy(row(screen, "publish"):find([[ order.paid '{"a": [1, "}\""], "topic": "no"}']], 1, true), screen)
    assert.is_nil(row(screen, "sample"))
    local published = process.run { "sh", "-c", row(screen, "publish"), cwd = app.dir }
    assert.equal(0, published.code, published.stderr)
    interrupt(dev)
    assert_stopped(dev)
    app:write("sample.jsonl", '{"topic":')
    local again, second = start(app)
    assert.truthy(row(second, "publish"):find([[ order.paid '{"id": 1}']], 1, true), second)
    interrupt(again)
    assert_stopped(again)
  end)

  it("is a mistake without such a file, or with a bad line in it", function()
    local app = new_app()
    local result = app:run("dev", "--sample")
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "/sample%.jsonl: No such file or directory", result.stderr)
    app:write("sample.jsonl", '{"topic": "order.paid"}\n{"topic": \n')
    result = app:run("dev", "--sample")
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "/sample%.jsonl:2: this is not JSON: line 2, column 1: a value is expected",
      result.stderr)
    assert.is_nil(lfs.attributes(app.dir .. "/.tidemill"))
  end)

  it("of this repository works: the sample app handles all of it", function()
    local app = new_app()
    must("cp", "-r", "config.lua", "sample.jsonl", "handlers", app.dir)
    local dev, screen = start(app, "--sample")
    local db = connect(screen)
    clock.wait_until(function()
      return db:value [[select count(*) = 0 and (select count(*) from tidemill.queue_message) >= 11
        from tidemill.queue_message where status in ('pending', 'running')]] == "t"
    end, 90, function()
      return dev:output()
    end)
    assert.equal("0", db:value "select count(*) from tidemill.queue_message where status = 'discarded'")
    db:close()
    interrupt(dev)
    assert_stopped(dev)
  end)
end)

-- Who runs dev, and where. Only root can try these.
if is_root then
  describe("root", function()
    it("keeps the data in the folder when the server's account can reach it", function()
      local app = new_app "755"
      local dev, screen = start(app)
      assert.equal(app.dir .. "/.tidemill/pg", data_folder(screen))
      assert.equal("postgres 700", must("stat", "-c", "%U %a", data_folder(screen)))
      assert.equal("root 711", must("stat", "-c", "%U %a", app.dir .. "/.tidemill"))
      interrupt(dev)
      assert_stopped(dev)
    end)

    it("has the data in a closed folder of its own when it cannot", function()
      local app = new_app "700"
      local dev, screen = start(app)
      local data = data_folder(screen)
      local outer = data:match "^(/var/tmp/tidemill%-%w+)/pg$"
      assert.truthy(outer, data)
      assert.equal("postgres 700", must("stat", "-c", "%U %a", outer))
      assert.equal(("data %s\n"):format(outer), folder.read(app.dir .. "/.tidemill/where"))
      assert.equal(("once it is stopped: rm -rf %s/.tidemill %s"):format(app.dir, outer), row(screen, "delete"))
      app:must_run("publish", "order.paid", '{"id": 3}')
      dev:wait_for "greeted[^\n]* order=3"
      interrupt(dev)
      assert_stopped(dev)

      local again, second = start(app)
      assert.equal(data, data_folder(second))
      interrupt(again)
      assert_stopped(again)

      -- What somebody else could have put in its place is not used.
      folder.remove(outer)
      assert(lfs.mkdir(outer))
      local refused = app:run "dev"
      assert.equal(1, refused.code)
      assert.truthy(refused.stderr:find(outer .. ", which ", 1, true), refused.stderr)
      folder.remove(outer)
      must("ln", "-s", app.dir, outer)
      assert.equal(1, app:run("dev").code)
      os.remove(outer)

      -- A cleaner of /var/tmp is no reason never to start again.
      local fresh, third = start(app)
      fresh:wait_for "level=warn event=devdb_gone"
      assert.not_equal(data, data_folder(third))
      interrupt(fresh)
      assert_stopped(fresh)
      folder.remove((data_folder(third):gsub("/pg$", "")))
    end)
  end)

  describe("root", function()
    it("is told where the rest lies when .tidemill is removed while dev runs", function()
      local app = new_app "700"
      local dev, screen = start(app)
      local outer = data_folder(screen):gsub("/pg$", "")
      folder.remove(app.dir .. "/.tidemill")
      assert.same({ 1 }, { dev:wait(30) })
      assert.truthy(dev:stderr():find(("tidemill: %s/.tidemill was removed while `tidemill dev` ran; what is left of "
        .. "its database, in %s, can be removed, too\n"):format(app.dir, outer), 1, true), dev:stderr())
      assert.same({}, servers())
      folder.remove(outer)
    end)
  end)

  describe("an ordinary user", function()
    -- The binary where that user can reach it, and a folder that is theirs alone.
    local function as_nobody(app)
      must("cp", tidemill.binary, app.dir .. "/tidemill")
      must("chown", "-R", "nobody", app.dir)
      return { "runuser", "-u", "nobody", "--", app.dir .. "/tidemill" }
    end

    it("has all of it in the folder, closed to others", function()
      local app = new_app "700"
      local argv = as_nobody(app)
      table.insert(argv, "dev")
      local dev = process.spawn { argv = argv, cwd = app.dir, env = { HOME = app.dir } }
      dev:wait_for("event=ready", 60)
      local screen = dev:wait_for "(The app .*\n  publish +[^\n]+\n)"
      assert.equal(app.dir .. "/.tidemill/pg", data_folder(screen))
      assert.equal("nobody 700", must("stat", "-c", "%U %a", app.dir .. "/.tidemill"))
      local published = process.run {
        "runuser", "-u", "nobody", "--", "sh", "-c", row(screen, "publish"), cwd = app.dir,
      }
      assert.truthy(published.stdout:find '"delivered":1', published.stderr)
      dev:wait_for "greeted[^\n]* order=1"
      local looked = process.run { "runuser", "-u", "nobody", "--", "sh", "-c",
        row(screen, "look") .. " -qAtc 'select count(*) from tidemill.queue_message'", cwd = "/" }
      assert.equal("1\n", looked.stdout, looked.stderr)
      -- Somebody else is told why dev's database is not used.
      must("chmod", "755", app.dir)
      local other = process.run {
        "runuser", "-u", "daemon", "--", app.dir .. "/tidemill", "publish", "order.paid", cwd = app.dir,
        env = { PGHOST = "/nowhere", PGUSER = "x" },
      }
      assert.equal(1, other.code)
      assert.truthy(other.stderr:find(("tidemill: no database is named in the config, this account may not look into "
        .. "%s/.tidemill, where the `tidemill dev` of the account nobody has its database, and by the PG* variables: ")
        :format(app.dir), 1, true), other.stderr)
      -- runuser hands the signal on.
      dev:kill "TERM"
      dev:wait(60)
      clock.wait_until(function() return #servers() == 0 end, 60, "the end of the server")

      -- Root is not to take over what belongs to somebody else.
      local refused = process.run { tidemill.binary, "dev", cwd = app.dir }
      assert.equal(1, refused.code)
      assert.truthy(refused.stderr:find "%.tidemill belongs to the account nobody: ", refused.stderr)
    end)
  end)
end
