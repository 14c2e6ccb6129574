-- The harness itself: what every other spec trusts in.

local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local pg = require "spec.support.pg"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

local function sh(script, options)
  options = options or {}
  options.argv = { "sh", "-c", script }
  return options
end

describe("the connection to Postgres", function()
  local db

  before_each(function()
    db = pg.connect()
  end)

  after_each(function()
    db:close()
  end)

  it("returns rows by column name, as text, with NULL as nil", function()
    local rows = db:query([[select $1::text as word, $2::int + 1 as n, $3::text as none, $4::bool as flag
      union all select 'second', 2, null, false order by n desc]], "first", 41, nil, true)
    assert.same({ word = "first", n = "42", flag = "t" }, rows[1])
    assert.same({ word = "second", n = "2", flag = "f" }, rows[2])
    assert.same({ "word", "n", "none", "flag" }, rows.fields)
    assert.equal(2, #rows)
  end)

  it("counts the rows a statement touched", function()
    db:exec "create temp table t (n int); insert into t select generate_series(1, 5)"
    assert.equal(3, db:query("delete from t where n > $1", 2).affected)
    assert.equal("2", db:value "select count(*) from t")
    assert.is_nil(db:value "select n from t where n > 100")
  end)

  it("carries numbers exactly and text with quotes", function()
    assert.equal("9007199254740991", db:value("select $1::bigint", 2 ^ 53 - 1))
    assert.equal("9223372036854775807", db:value("select $1::bigint", 9223372036854775807LL))
    assert.equal("it's $1 \\ \"so\"", db:value("select $1::text", "it's $1 \\ \"so\""))
    assert.error_matches(function()
      db:query("select $1::text", "a\0b")
    end, "NUL")
  end)

  it("raises the server's message with its SQLSTATE, and goes on", function()
    local ok, err = pcall(db.query, db, "select 1 / $1::int", 0)
    assert.is_false(ok)
    assert.equal("22012", err.sqlstate)
    assert.equal("ERROR:  division by zero (SQLSTATE 22012)", tostring(err))
    assert.equal("1", db:value "select 1")
  end)

  it("raises an error in any statement of a script", function()
    assert.error_matches(function()
      db:exec "create temp table u (n int); insert into u values ('x'); select 1"
    end, "22P02")
  end)

  it("raises when there is no server to connect to", function()
    assert.error_matches(function()
      pg.connect "host=/nowhere"
    end, "/nowhere")
  end)

  it("refuses to be used after close", function()
    local other = pg.connect()
    other:close()
    other:close()
    assert.error_matches(function()
      other:query "select 1"
    end, "closed")
  end)

  it("receives notifications of another session in their order", function()
    local other = pg.connect()
    db:exec "listen harness"
    other:exec "notify harness, 'one'; notify harness, 'two'"
    local first = db:wait_notify(10)
    assert.same({ channel = "harness", payload = "one", pid = other.pid }, first)
    assert.equal("two", db:wait_notify(10).payload)
    assert.is_nil(db:wait_notify(0))
    other:exec "notify harness, 'three'"
    other:close()
    assert.equal("three", db:wait_notify(10).payload)
    assert.same({}, db:notifies())
  end)

  it("keeps the server's warnings", function()
    db:exec "do $$ begin raise warning 'look out: %', 7; end $$"
    assert.same({ "WARNING:  look out: 7" }, db:notices())
    assert.same({}, db:notices())
  end)

  it("shows a statement that waits for another session", function()
    local other = pg.connect()
    db:exec "select pg_advisory_lock(4711)"
    other:send("select pg_advisory_lock($1::int), 'got it' as word", 4711)
    clock.wait_until(function()
      return db:value("select wait_event_type = 'Lock' from pg_stat_activity where pid = $1", other.pid) == "t"
    end, 10, "the second session waits")
    assert.is_true(other:busy())
    db:exec "select pg_advisory_unlock(4711)"
    assert.equal("got it", other:receive()[1].word)
    other:send "select 1 / 0"
    assert.error_matches(function()
      other:receive()
    end, "22012")
    other:close()
  end)
end)

describe("a process", function()
  after_each(function()
    process.assert_none_left()
  end)

  it("hands over its input, its outputs and its exit code", function()
    local result = process.run(sh("cat; echo problem >&2; exit 3", { stdin = "some\0text\n" }))
    assert.same({ code = 3, stdout = "some\0text\n", stderr = "problem\n" }, result)
  end)

  it("reads nothing when it is given no input", function()
    assert.same({ code = 0, stdout = "", stderr = "" }, process.run { "cat" })
  end)

  it("tells the signal that ended it", function()
    local sleeper = process.spawn { "sleep", "100" }
    assert.is_false(sleeper:poll())
    assert.is_true(sleeper:kill "TERM")
    local code, signal = sleeper:wait(10)
    assert.is_nil(code)
    assert.equal(15, signal)
    assert.is_false(sleeper:kill "TERM")
    assert.equal(6, process.run(sh "kill -ABRT $$").signal)
  end)

  it("runs in the folder and with the environment given", function()
    local dir = folder.temp()
    local result = process.run(sh('pwd; echo "$HARNESS_SPEC-${PGHOST-unset}-${HOME+set}"', {
      cwd = dir,
      env = { HARNESS_SPEC = "a b", PGHOST = false },
    }))
    folder.remove(dir)
    assert.equal(dir .. "\na b-unset-set\n", result.stdout)
  end)

  it("writes to a file when told to", function()
    local dir = folder.temp()
    local result = process.run(sh("echo text", { stdout = dir .. "/out" }))
    local text = folder.read(dir .. "/out")
    folder.remove(dir)
    assert.equal("text\n", text)
    assert.equal("text\n", result.stdout)
  end)

  it("cannot be started from a program that does not exist", function()
    assert.error_matches(function()
      process.spawn { "/no/such/program" }
    end, "cannot start /no/such/program: No such file")
  end)

  it("gets default signals, whatever this process ignores", function()
    -- The signals 1 to 31; the C library keeps two more for itself.
    local function masks(argv)
      local text = process.run(argv).stdout
      local function mask(name)
        return bit.band(tonumber(text:match(name .. ":%s*%x*(%x%x%x%x%x%x%x%x)\n"), 16), 0x7fffffff)
      end
      return { ignored = mask "SigIgn", blocked = mask "SigBlk" }
    end
    assert.same({ ignored = 0, blocked = 0 }, masks { "cat", "/proc/self/status" })
    assert.same({ ignored = 0x5000, blocked = 0 }, masks(sh "trap '' PIPE TERM; exec cat /proc/self/status"))
  end)

  it("is waited for by a text of either output", function()
    local talker = process.spawn(sh "echo first; echo port=7070 >&2; echo port=8080 >&2; exec sleep 100")
    assert.equal("first", talker:wait_for("first", 10))
    assert.equal("7070", talker:wait_for("port=(%d+)", 10))
    assert.equal("8080", talker:wait_for("port=(8%d+)", 10))
    assert.has_error(function()
      talker:wait_for("first", 0, talker:position())
    end)
    talker:kill "KILL"
    talker:wait(10)
  end)

  it("that ends without the text raises at once, with both outputs", function()
    local started = clock.now()
    local quiet = process.spawn(sh "echo some output; echo some error >&2; exit 4")
    local ok, err = pcall(quiet.wait_for, quiet, "ready", 300)
    assert.is_false(ok)
    assert.matches('did not print "ready"', err)
    assert.matches("ended with exit code 4", err)
    assert.matches("some output", err)
    assert.matches("some error", err)
    assert.is_true(clock.now() - started < 300)
  end)

  it("that outlives its time limit is killed and reported", function()
    assert.error_matches(function()
      process.run { "sleep", "100", timeout = 0 }
    end, "sleep 100 .* did not end")
    assert.same({}, process.children())
  end)

  it("shows its descendants", function()
    local parent = process.spawn(sh "sleep 100 & sh -c 'sleep 100 & echo ready; wait' & wait")
    parent:wait_for("ready", 10)
    local names
    -- A child bears the shell's name until it has become `sleep`.
    clock.poll(function()
      names = {}
      for _, child in ipairs(process.children(parent.pid)) do
        table.insert(names, child.name)
      end
      table.sort(names)
      return table.concat(names, " ") == "sh sleep sleep"
    end, 10)
    assert.same({ "sh", "sleep", "sleep" }, names)
    for _, child in ipairs(process.children(parent.pid)) do
      assert.is_true(process.alive(child.pid))
      process.run { "kill", tostring(child.pid) }
    end
    parent:wait(10)
  end)

  it("left running is reported and ended", function()
    local stray = process.spawn { "sleep", "100" }
    assert.error_matches(function()
      process.assert_none_left()
    end, "sleep 100")
    assert.is_false(process.alive(stray.pid))
    process.assert_none_left()
  end)

  it("orphaned by its parent is reported and ended", function()
    local result = process.run(sh "sleep 100 & echo $!")
    local pid = tonumber(result.stdout)
    assert.is_true(process.alive(pid))
    assert.error_matches(function()
      process.assert_none_left(0)
    end, "sleep, an orphan")
    assert.is_false(process.alive(pid))
  end)
end)

describe("an app", function()
  local binary = tidemill.binary
  local dir

  -- A stand-in for the program: prints how it was called, then does as told.
  local function stand_in(script)
    folder.write(dir, "program", "#!/bin/sh\n" .. script)
    process.run { "chmod", "+x", dir .. "/program" }
    tidemill.binary = dir .. "/program"
  end

  before_each(function()
    dir = folder.temp()
  end)

  after_each(function()
    tidemill.binary = binary
    folder.remove(dir)
    tidemill.close_all()
  end)

  it("gives a folder with config and handlers, and an empty database", function()
    local app = tidemill.app {
      config = {
        app = "shop", concurrency = 3,
        subscribe = {
          ["order.paid"] = { "one", "crm.two", named = { handler = "one", rate = { 100, per_secs = 60 } } },
        },
      },
      handlers = { one = "return 1", ["crm.two"] = "return 2" },
    }
    assert.same({
      app = "shop", concurrency = 3,
      subscribe = {
        ["order.paid"] = { "one", "crm.two", named = { handler = "one", rate = { 100, per_secs = 60 } } },
      },
    }, dofile(app.config_path))
    assert.equal(1, dofile(app.dir .. "/handlers/one.lua"))
    assert.equal(2, dofile(app.dir .. "/handlers/crm/two.lua"))
    assert.equal(app.database, app.db:value "select current_database()")
    local place, database = app.dir, app.database
    app:close()
    assert.is_nil(require("lfs").attributes(place))
    local db = pg.connect()
    assert.equal("0", db:value("select count(*) from pg_database where datname = $1", database))
    db:close()
  end)

  it("runs the program on its config and database", function()
    stand_in 'for word; do echo "<$word>"; done; exit 5'
    local app = tidemill.app()
    local expected = ("<publish>\n<t>\n<-c>\n<%s>\n<--database>\n<%s>\n"):format(app.config_path, app.dsn)
    assert.same({ code = 5, stdout = expected, stderr = "" }, app:run("publish", "t"))
    assert.same({ code = 5, stdout = expected .. "<-->\n<-1>\n", stderr = "" }, app:run { "publish", "t", "--", "-1" })
    assert.error_matches(function()
      app:must_run "check"
    end, "exit code 5")
    assert.equal(app.database, app:connect():value "select current_database()")
  end)

  it("starts and stops a worker", function()
    stand_in 'trap "exit 0" TERM; echo "level=info event=ready" >&2; while :; do sleep 0.01; done'
    local app = tidemill.app { database = false }
    local worker = app:start()
    assert.is_false(worker:poll())
    app:stop()
    assert.equal(0, worker.code)
    app:close()
  end)

  it("reports a worker that died, one that left a process, and one that stops badly", function()
    stand_in 'trap "exit 0" TERM; echo event=ready >&2; while :; do sleep 0.01; [ ! -e die ] || exit 9; done'
    local app = tidemill.app { database = false }
    local worker = app:start()
    app:write("die", "")
    clock.wait_until(function()
      return not process.alive(worker.pid)
    end, 10, "the worker's end")
    assert.error_matches(function()
      app:close()
    end, "ended by itself: exit code 9")

    stand_in 'sleep 100 & trap "exit 0" TERM; echo event=ready >&2; while :; do sleep 0.01; done'
    app = tidemill.app { database = false }
    app:start()
    assert.error_matches(function()
      app:close(0)
    end, "sleep, an orphan")

    stand_in 'trap "exit 1" TERM; echo event=ready >&2; while :; do sleep 0.01; done'
    app = tidemill.app { database = false }
    app:start()
    assert.error_matches(function()
      app:close()
    end, "orderly stop ended with exit code 1")
  end)

  it("reports a connection left to its database, and drops that all the same", function()
    local app = tidemill.app()
    local database = app.database
    local stray = pg.connect(app.dsn)
    assert.error_matches(function()
      app:close(0)
    end, "connections left to the database:\n  tidemill spec, idle")
    local db = pg.connect()
    assert.equal("0", db:value("select count(*) from pg_database where datname = $1", database))
    db:close()
    stray:close()
  end)

  it("shows the ledger in the order of seq", function()
    local app = tidemill.app { config = { schema = "Odd name" } }
    app.db:exec [[create schema "Odd name"; create table "Odd name".queue_message (seq int, topic text);
      insert into "Odd name".queue_message values (2, 'b'), (1, 'a'), (3, 'c')]]
    local rows = app:ledger("topic <> $1", "c")
    assert.same({ { seq = "1", topic = "a" }, { seq = "2", topic = "b" } }, { rows[1], rows[2] })
    assert.equal(2, #rows)
    assert.error_matches(function()
      app:wait_until(function() end, 0, "the moon")
    end, "did not happen within 0 s: the moon")
  end)
end)
