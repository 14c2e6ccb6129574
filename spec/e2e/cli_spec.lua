-- The command line: help, mistakes, exit codes, and what each command prints.

local folder = require "spec.support.folder"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local CONFIG = { subscribe = { ["order.paid"] = { "greet", "count" } } }
local HANDLERS = { greet = "return function() end", count = "return { handle = function() end, max_attempts = 9 }" }

-- An app without a database of its own: nothing here reaches one.
local function offline(config, handlers)
  return tidemill.app { config = config or CONFIG, handlers = handlers or HANDLERS, database = false }
end

-- The program alone, in a folder without a config and without PG* variables.
local function run(...)
  local words = { tidemill.binary, ... }
  return process.run { argv = words, cwd = "/", env = { PGHOST = "/nowhere" } }
end

-- Asserts on a command that refuses: the exit code, and one line on standard error only.
local function assert_refused(code, text, result)
  assert.equal("", result.stdout)
  assert.equal("tidemill: " .. text .. "\n", result.stderr)
  assert.equal(code, result.code)
end

describe("help", function()
  it("lists the commands and the options that all have", function()
    local result = run "--help"
    assert.equal(0, result.code)
    assert.equal("", result.stderr)
    for _, word in ipairs { "dev", "run", "check", "migrate", "publish", "version", "--config", "--database" } do
      assert.truthy(result.stdout:find("\n  " .. word, 1, true) or result.stdout:find(word .. " ", 1, true), word)
    end
    assert.is_nil(result.stdout:find "executor")
  end)

  it("says the same however it is asked about a command", function()
    local asked = run("help", "publish")
    assert.equal(0, asked.code)
    assert.truthy(asked.stdout:find("--dedupe-key KEY", 1, true))
    assert.equal(asked.stdout, run("publish", "--help").stdout)
    assert.equal(asked.stdout, run("-h", "publish", "some.topic").stdout)
  end)

  it("is the answer to no command at all, as a mistake", function()
    local result = run()
    assert.equal(2, result.code)
    assert.equal("", result.stdout)
    assert.equal(run("--help").stdout, result.stderr)
  end)
end)

describe("a mistake on the command line", function()
  local cases = {
    { { "pubilsh" }, "there is no command `pubilsh`: did you mean `publish`?" },
    { { "frobnicate" }, "there is no command `frobnicate`: `tidemill --help` lists them" },
    { { "help", "migrat" }, "there is no command `migrat`: did you mean `migrate`?" },
    { { "publish", "t", "--dely", "3" }, "there is no option `--dely`: did you mean `--delay`?" },
    { { "run", "--databse=x" }, "there is no option `--databse=x`: did you mean `--database`?" },
    { { "--only", "x" }, "there is no option `--only`: `tidemill --help` lists them" },
    { { "publish", "t", "-5" }, "there is no option `-5`: `tidemill publish --help` lists them; "
      .. "what begins with `-` but is none goes behind `--`" },
    { { "publish" }, "something is missing: tidemill publish TOPIC [JSON or -] [option…]" },
    { { "publish", "t", "{}", "more" }, "`more` is one word too many: tidemill publish TOPIC [JSON or -] [option…]" },
    { { "check", "--json=yes" }, "`--json` takes no value" },
    { { "publish", "t", "--delay" }, "`--delay` needs a value: --delay SECONDS" },
    { { "check", "--log-level", "loud" }, "`--log-level` is `loud`: use one of debug, info, warn, error" },
    { { "check", "--log-format=xml" }, "`--log-format` is `xml`: use one of text, json, terminal" },
    { { "run", "--database", "" }, "`--database` is empty: leave it out to use the config's" },
  }
  for _, case in ipairs(cases) do
    it("ends with 2: " .. table.concat(case[1], " "), function()
      assert_refused(2, case[2], run(unpack(case[1])))
    end)
  end

  it("in a variable of the environment ends with 2, too", function()
    for _, case in ipairs {
      { "TIDEMILL_LOG_LEVEL", "loud", "debug, info, warn, error" },
      { "TIDEMILL_LOG_FORMAT", "xml", "text, json, terminal" },
    } do
      local name, value, known = unpack(case)
      assert_refused(2, ("`%s` is `%s`: use one of %s"):format(name, value, known),
        process.run { tidemill.binary, "help", env = { [name] = value } })
      assert.equal(0, process.run({ tidemill.binary, "help", env = { [name] = "" } }).code)
    end
  end)

  it("says where to go when there is no config", function()
    for _, command in ipairs { "check", "run", "dev" } do
      assert_refused(2, "there is no config.lua: go to the folder of your app, or name its config with -c FILE",
        run(command))
    end
    for _, words in ipairs { { "publish", "t" }, { "migrate" } } do
      assert_refused(2, "there is no config.lua here, and no database is named: go to the folder of your app, "
        .. "or use -c FILE or --database DSN", run(unpack(words)))
    end
  end)
end)

describe("options of all commands", function()
  it("stand before or behind the command", function()
    local app = offline()
    local before = process.run { tidemill.binary, "-c", app.config_path, "check" }
    assert.equal(0, before.code)
    for _, words in ipairs {
      { "check", "--config=" .. app.config_path }, { "-c" .. app.config_path, "check" },
      { "check", "--config", app.config_path },
    } do
      assert.same(before, process.run { tidemill.binary, unpack(words) })
    end
  end)
end)

describe("check", function()
  it("lists what is wired to what", function()
    local stdout = offline():must_run "check"
    assert.truthy(stdout:find "^topic +subscriber +handler\norder%.paid +count +count\norder%.paid +greet +greet\n\n")
    assert.truthy(stdout:find 'config%.lua is good: app "app", 2 subscriptions, all handlers load\n$')
  end)

  it("prints JSON that Postgres reads, options of the module included", function()
    local app = tidemill.app { config = CONFIG, handlers = HANDLERS }
    local json = app:must_run("check", "--json")
    local rows = app.db:query([[select s ->> 'topic' as topic, s ->> 'subscriber' as subscriber,
      s ->> 'handler' as handler, s ->> 'max_attempts' as max_attempts, s ->> 'retain_hours' as retain_hours
      from jsonb_array_elements($1::jsonb -> 'subscriptions') as s]], json)
    assert.same({
      { topic = "order.paid", subscriber = "count", handler = "count", max_attempts = "9", retain_hours = "24" },
      { topic = "order.paid", subscriber = "greet", handler = "greet", max_attempts = "5", retain_hours = "24" },
    }, { rows[1], rows[2] })
    assert.equal("app", app.db:value("select $1::jsonb ->> 'app'", json))
  end)

  it("tells each mistake of the config with its line, and ends with 2", function()
    local app = offline [[
return {
  poll_sec = 3,
  lease_secs = "long",
  subscribe = { ["order.paid"] = "nothere" },
}
]]
    local result = app:run "check"
    assert.equal(2, result.code)
    assert.equal("", result.stdout)
    local path = app.config_path:gsub("%p", "%%%0")
    local lines = {}
    for line in result.stderr:gmatch "[^\n]+" do
      table.insert(lines, line)
    end
    assert.equal(3, #lines, result.stderr)
    assert.truthy(lines[1]:find("^tidemill: " .. path .. ":2: poll_sec: .*poll_secs"), lines[1])
    assert.truthy(lines[2]:find("^tidemill: " .. path .. ":3: lease_secs: .*whole number"), lines[2])
    assert.truthy(lines[3]:find("^tidemill: " .. path .. ":4: .*nothere"), lines[3])
  end)

  it("tells file and line of a handler that does not load", function()
    local app = offline({ subscribe = { a = "broken" } }, { broken = "local x = 1\nreturn function( end" })
    local result = app:run "check"
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "handlers/broken%.lua:2: ", result.stderr)
    -- The config alone is in order, so a runtime would begin; the handlers are not its business.
    app:write_handler("broken", "return function() end")
    assert.equal(0, app:run("check").code)
  end)

  it("refuses an address of a database that cannot be read, and does not show it", function()
    for _, key in ipairs { "database", "listen_database" } do
      local app = offline { [key] = "hunter2", database = key ~= "database" and "host=/nowhere" or "hunter2" }
      local result = app:run "check"
      assert.equal(2, result.code)
      local said = "config.lua: " .. key .. ": the address of the database cannot be read"
      assert.truthy(result.stderr:find(said, 1, true), result.stderr)
      assert.is_nil(result.stderr:find "hunter2")
      app:write_config {}
      assert.truthy(app:must_run("check"):find 'is good: app "app", which subscribes to nothing\n$')
    end
  end)

  it("says after a while that a config still loads", function()
    local app = offline "local function wait() while true do end end wait()"
    local checking = process.spawn { tidemill.binary, "check", "-c", app.config_path }
    checking:wait_for("event=still_loading config=" .. app.config_path:gsub("%p", "%%%0") .. " limit_secs=60", 30)
    checking:kill "TERM"
    checking:wait()
  end)

  it("says so when a config ends its process", function()
    local app = offline [[require("ffi").cast("int *", 0)[0] = 1]]
    -- A sanitizer turns the signal into an exit code of its own.
    local result = app:run { "check", env = { ASAN_OPTIONS = "handle_segv=0" } }
    assert.equal(2, result.code)
    assert.equal(("tidemill: %s ended its process while it was loaded: signal 11 (Segmentation fault)\n"):format(
      app.config_path), result.stderr)
  end)

  it("keeps what a config prints apart from its own output", function()
    local app = offline [[io.stdout:write("noise\n") io.stderr:write("noise\n") return {}]]
    local result = app:run("check", "--json")
    assert.equal('{"app":"app","subscriptions":[]}\n', result.stdout)
    assert.equal(0, result.code)
  end)
end)

describe("migrate", function()
  it("makes the schema, and then finds nothing to do", function()
    local app = tidemill.app { config = CONFIG }
    assert.truthy(app:must_run("migrate"):find 'schema "tidemill" was made, at version %d+\n$')
    assert.truthy(app:must_run("migrate"):find 'schema "tidemill" is at version %d+, nothing to do\n$')
    assert.equal("0", app.db:value "select count(*) from tidemill.queue_message")
  end)

  it("goes to a version and on from there", function()
    local app = tidemill.app { config = { schema = "other" } }
    assert.truthy(app:must_run("migrate", "--to", "1"):find 'schema "other" was made, at version 1\n$')
    assert.truthy(app:must_run("migrate"):find 'schema "other" went from version 1 to %d+\n$')
  end)

  it("prints SQL that makes the schema, without a database", function()
    local app = tidemill.app { config = { schema = "printed" } }
    local sql = app:must_run { "migrate", "--print", "--database", "host=/nowhere" }
    app.db:exec(sql)
    assert.truthy(app:must_run("migrate"):find "nothing to do")
  end)

  it("works on a database that is named, without a config", function()
    local app = tidemill.app {}
    local result = process.run { tidemill.binary, "migrate", "--database", app.dsn, cwd = "/" }
    assert.equal(0, result.code, result.stderr)
    assert.truthy(result.stdout:find 'schema "tidemill" was made')
  end)

  it("refuses a version that there is not with 2, and an unreached database with 1", function()
    local app = tidemill.app {}
    local result = app:run("migrate", "--to", "999")
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "^tidemill: `%-%-to` is `999`: use a whole number from 1 to %d+\n$", result.stderr)
    result = process.run { tidemill.binary, "migrate", "-c", app.config_path, "--database", "host=/nowhere" }
    assert.equal(1, result.code)
    assert.truthy(result.stderr:find "^tidemill: [^\n]*/nowhere[^\n]*\n$", result.stderr)
  end)
end)

describe("publish", function()
  local app
  before_each(function()
    app = tidemill.app { config = CONFIG, handlers = HANDLERS }
  end)

  -- With the subscriptions of the config in the database, and no worker that takes what is published.
  local function subscribed()
    app:stop(app:start())
  end

  it("prints what became of the message on one line", function()
    subscribed()
    local id = app:must_run("publish", "order.paid", '{"id": 1}')
      :match '^{"id":"([%x-]+)","topic":"order.paid","delivered":2,"duplicate":false}\n$'
    local rows = app:ledger()
    assert.equal(2, #rows)
    assert.equal(rows[1].id, id)
    assert.equal('{"id": 1}', rows[1].payload)
    assert.equal("pending", rows[1].status)
  end)

  it("hands its options on", function()
    subscribed()
    app:must_run("publish", " order.paid ", "--delay", "600", "--priority", "-3", "--dedupe-key", "k",
      "--max-attempts=2", "--by", "someone")
    local row = app:ledger("subscriber = 'greet'")[1]
    assert.same({ "order.paid", "{}", "-3", "k", "2", "someone" },
      { row.topic, row.payload, row.priority, row.dedupe_key, row.max_attempts, row.published_by })
    assert.equal("t", app.db:value [[select bool_and(available_at between created_at + interval '599 s'
      and created_at + interval '601 s') from tidemill.queue_message]])
    local again = app:must_run("publish", "order.paid", "--dedupe-key", "k")
    assert.truthy(again:find('"id":"' .. row.id, 1, true) or again:find '"delivered":0', again)
    assert.truthy(again:find('"duplicate":true', 1, true), again)

    app:must_run("publish", "order.paid", "--at", "2099-01-31T08:00:00.5+01:00")
    assert.equal("2", app.db:value [[select count(*) from tidemill.queue_message
      where available_at = '2099-01-31 07:00:00.5Z']])
  end)

  it("takes the longest delay that it says it takes", function()
    subscribed()
    app:must_run("publish", "order.paid", "--delay", "3153600000")
  end)

  it("takes the message from standard input, and any JSON value", function()
    subscribed()
    local long = '"' .. ("x"):rep(200000) .. '"'
    for _, json in ipairs { '[1, 2, "\\u00e9\\ud83d\\ude00"]', "null", " 1e3 ", long, '{"a": {"b": [true, false]}}' } do
      app:must_run { "publish", "order.paid", "-", stdin = json }
      assert.equal("t", app.db:value([[select payload = $1::jsonb from tidemill.queue_message
        order by seq desc limit 1]], json), json:sub(1, 40))
    end
    app:must_run("publish", "order.paid", "--", "-5")
    assert.equal("-5", app.db:value "select payload from tidemill.queue_message order by seq desc limit 1")
  end)

  it("warns when nobody subscribes, and that is no failure", function()
    app:must_run "migrate"
    local result = app:run("publish", "no.such")
    assert.equal(0, result.code)
    assert.truthy(result.stdout:find '"topic":"no.such","delivered":0,"duplicate":false}\n$')
    assert.equal("tidemill: warning: nobody subscribes to `no.such`: the message is recorded as done, no handler "
      .. "will see it\n", result.stderr)
  end)

  it("says what to do where there is no queue", function()
    assert_refused(1, 'this database has no queue in schema "tidemill": run `tidemill migrate`',
      app:run("publish", "order.paid"))
    app:must_run("migrate", "--to", "1")
    assert_refused(1, 'this database has no queue in schema "tidemill", or one older than this program '
      .. "(function tidemill.publish is missing): run `tidemill migrate`", app:run("publish", "order.paid"))
  end)

  it("ends with 1 when the database cannot be reached, and says which it tried", function()
    local result = process.run {
      tidemill.binary, "publish", "t", "-c", app.config_path,
      env = { PGHOST = "/nowhere" },
    }
    assert.equal(1, result.code)
    assert.truthy(result.stderr:find "^tidemill: no database is named in the config, no `tidemill dev` runs there, "
      .. "and by the PG%* variables: [^\n]*/nowhere[^\n]*\n$", result.stderr)
  end)

  it("shows no password when the address is wrong", function()
    local result = process.run {
      tidemill.binary, "publish", "t", "--database", "postgresql://me:hunter2@host:port/x",
    }
    assert.equal(2, result.code)
    assert.is_nil(result.stderr:find "hunter2")
  end)

  local refused = {
    { { "order paid" },
      "`order paid` is not a topic: use letters, digits, `.`, `_`, `-` or `:`" },
    { { "t", '{"a":}' }, "this is not JSON: line 1, column 6: a value is expected" },
    { { "t", "" }, "this is not JSON: line 1, column 1: a value is expected" },
    { { "t", '{\n  "é": 1,\n  "b" 2}' }, "this is not JSON: line 3, column 7: `:` is expected" },
    { { "t", "[1, 2" }, "this is not JSON: line 1, column 6: `,` or `]` is expected" },
    { { "t", "{'a': 1}" }, "this is not JSON: line 1, column 2: a name in double quotes is expected" },
    { { "t", "{} {}" }, "this is not JSON: line 1, column 4: something follows the value" },
    { { "t", "01" }, "this is not JSON: line 1, column 2: a number is malformed" },
    { { "t", "[1.]" }, "this is not JSON: line 1, column 4: a number is malformed" },
    { { "t", '"\\x"' }, "this is not JSON: line 1, column 2: an escape that JSON does not know" },
    { { "t", '"\\u12"' }, "this is not JSON: line 1, column 2: `\\u` needs four hexadecimal digits" },
    { { "t", '"a\\u0000"' }, "this is not JSON: line 1, column 3: Postgres stores no `\\u0000`" },
    { { "t", '"\\ud800"' }, "this is not JSON: line 1, column 2: half of a surrogate pair" },
    { { "t", '"\255"' }, "this is not JSON: line 1, column 2: bytes that are no UTF-8" },
    { { "t", '"a\nb"' },
      "this is not JSON: line 1, column 3: a control character in a string: write it as an escape" },
    { { "t", ("["):rep(1001) }, "this is not JSON: line 1, column 1001: nested deeper than 1000" },
    { { "t", "--priority", "10" }, "`--priority` is `10`: use a whole number from -9 to 9" },
    { { "t", "--priority", "1.5" }, "`--priority` is `1.5`: use a whole number from -9 to 9" },
    { { "t", "--delay", "soon" }, "`--delay` is `soon`: use a number from 0 to 3153600000" },
    { { "t", "--delay", "nan" }, "`--delay` is `nan`: use a number from 0 to 3153600000" },
    { { "t", "--delay", "3160000000" }, "`--delay` is `3160000000`: use a number from 0 to 3153600000" },
    { { "t", "--at", "tomorrow" },
      "`--at` is `tomorrow`: give a time with its zone, such as 2030-01-31T08:00:00Z" },
    { { "t", "--at", "2030-01-31T08:00:00Z", "--delay", "1" }, "give `--delay` or `--at`, not both" },
  }
  for _, case in ipairs(refused) do
    it("refuses with 2, before it looks for a database: " .. case[2], function()
      assert_refused(2, case[2], run("publish", unpack(case[1])))
    end)
  end

  it("refuses with 2 what only the server can tell", function()
    app:must_run "migrate"
    local result = app:run("publish", "order.paid", "--at", "2030-02-30T08:00:00Z")
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "2030%-02%-30", result.stderr)
    app:write_config { max_payload_bytes = 10 }
    app:must_run "migrate"
    result = app:run("publish", "order.paid", '"more than ten bytes"')
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "max_payload_bytes" or result.stderr:find "bytes", result.stderr)
  end)
end)

describe("version", function()
  it("tells the program, its libraries and the server it reaches", function()
    local app = tidemill.app { config = CONFIG }
    local stdout = app:must_run "version"
    for _, name in ipairs { "tidemill", "LuaJIT", "libuv", "libpq", "Postgres" } do
      assert.truthy(stdout:find("%f[%w]" .. name .. " +%d+%."), name .. "\n" .. stdout)
    end
  end)

  it("tells what it can where there is no config and no server", function()
    local result = run "--version"
    assert.equal(0, result.code)
    assert.truthy(result.stdout:find "^tidemill +%d+%.%d+%.%d+\n")
    assert.is_nil(result.stdout:find "Postgres")
    local app = offline()
    local unreached = process.run { tidemill.binary, "version", "-c", app.config_path, "--database", "host=/nowhere" }
    assert.equal(0, unreached.code)
    assert.truthy(unreached.stdout:find "\nPostgres +not reached: [^\n]*/nowhere")
  end)
end)

describe("run", function()
  it("ends with 2 when the config or a handler is at fault", function()
    local app = tidemill.app { config = "return { lease = 3 }" }
    local result = app:run "run"
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "config%.lua:1: lease: ", result.stderr)

    app:write_config { subscribe = { a = "broken" } }
    app:write_handler("broken", "return 42")
    result = app:run "run"
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "broken", result.stderr)
  end)

  it("ends with 2 when --only names no subscription", function()
    local app = offline()
    for _, only in ipairs { "order", "order.paid/nobody", "order.paid/greet/more", "greet" } do
      local result = app:run("run", "--only", only)
      assert.equal(2, result.code)
      assert.truthy(result.stderr:find("^tidemill: `%-%-only` is `" .. only:gsub("%p", "%%%0")), result.stderr)
    end
  end)

  it("ends with 1 when the schema is newer than the program", function()
    local app = tidemill.app { config = CONFIG, handlers = HANDLERS }
    app:must_run "migrate"
    app.db:exec "insert into tidemill.migration (version, name, checksum) values (99, '0099_future.sql', '')"
    for _, migrate in ipairs { true, false } do
      app:write_config { migrate = migrate }
      local result = app:run "run"
      assert.equal(1, result.code)
      assert.truthy(result.stderr:find "tidemill: [^\n]*version 99[^\n]*install a newer tidemill\n$", result.stderr)
    end
  end)

  for _, signal in ipairs { "TERM", "INT" } do
    it("goes on trying while there is no database, and ends with 0 on SIG" .. signal, function()
      local app = offline()
      local worker = process.spawn {
        tidemill.binary, "run", "-c", app.config_path, "--database", "host=/nowhere",
      }
      assert.truthy(worker:wait_for "level=warn event=database_unreached error=[^\n]*/nowhere")
      -- Still there after what would kill it.
      worker:kill "HUP"
      worker:wait_for "event=signal_ignored signal=SIGHUP"
      assert.is_false(worker:poll())
      worker:kill(signal)
      assert.same({ 0 }, { worker:wait() })
      assert.truthy(worker:stderr():find("event=signal signal=SIG" .. signal .. "\n[^\n]*event=stopped exit_code=0\n$"),
        worker:stderr())
      -- The same trouble is said once in a while, not at every try.
      local _, said = worker:stderr():gsub("event=database_unreached", "")
      assert.equal(1, said)
    end)
  end

  it("begins when the database that was missing is there", function()
    local app = tidemill.app { config = CONFIG, handlers = HANDLERS }
    local late = app.database .. "_late"
    local dsn = app.dsn:gsub("dbname=%S+", "dbname=" .. late)
    local worker = process.spawn { tidemill.binary, "run", "-c", app.config_path, "--database", dsn }
    worker:wait_for("event=database_unreached[^\n]*" .. late)
    app.admin:exec("create database " .. late)
    worker:wait_for("event=ready app=app lanes=2 executors=%d+ database=%S+/" .. late)
    worker:kill "TERM"
    assert.same({ 0 }, { worker:wait() })
    app.admin:exec(("drop database %s"):format(late))
  end)

  it("ends with 3 when a second signal comes while handlers still run", function()
    local app = tidemill.app {
      config = { subscribe = { a = "slow" } },
      handlers = { slow = [[return function(_, ctx) ctx:log("began") require("tidemill").sleep(600) end]] },
    }
    local worker = app:start()
    app:must_run("publish", "a")
    worker:wait_for "began"
    worker:kill "TERM"
    worker:wait_for "event=signal signal=SIGTERM"
    assert.is_false(worker:poll())
    worker:kill "INT"
    assert.same({ 3 }, { worker:wait() })
    local row = app:ledger()[1]
    assert.same({ "pending", "0" }, { row.status, row.attempts })
  end)

  it("logs JSON when told to, its executors too", function()
    local app = tidemill.app {
      config = { subscribe = { a = "speak" }, executors = 1 },
      handlers = { speak = [[return function(payload, ctx) ctx:log("spoke") end]] },
    }
    local worker = app:spawn("run", "--log-format", "json")
    worker:wait_for '"event":"ready"'
    app:must_run("publish", "a")
    worker:wait_for '"spoke"'
    app:stop(worker)
    for line in worker:stderr():gmatch "[^\n]+" do
      assert.equal("object", app.db:value("select jsonb_typeof($1::jsonb)", line), line)
    end
  end)
end)

describe("an executor started by hand", function()
  it("refuses, and harms nothing", function()
    local result = run "executor"
    assert.equal(1, result.code)
    assert.truthy(result.stderr:find "^tidemill: an executor is started by the program itself only", result.stderr)
    assert.equal(2, run("executor", "12x").code)
    -- Somebody else's child.
    assert.equal(1, run("executor", "1").code)
  end)
end)

describe("what is documented", function()
  it("is what the program knows", function()
    local result = process.run { "script/check-docs", tidemill.binary }
    assert.same({ code = 0, stdout = "", stderr = "" }, result)
  end)

  it("is held against a documentation that differs", function()
    local app = offline()
    app:write("docs/configuration.md", (folder.read "docs/configuration.md"
      :gsub("Default: `300`%. Also", "Default: `30`. Also"):gsub("### `batch`", "### `batches`")))
    app:write("config.lua", (folder.read "config.lua":gsub("poll_secs = 30", "poll_secs = 31")))
    local script = folder.read "script/check-docs"
    app:write("check-docs", script)
    local result = process.run { "luajit", "check-docs", tidemill.binary, cwd = app.dir }
    assert.equal(1, result.code)
    for _, text in ipairs { "timeout_secs", "`batch` has no section", "`batches` is no key", "poll_secs = 31" } do
      assert.truthy(result.stdout:find(text, 1, true) or text == "timeout_secs" and
        result.stdout:find("Default: `300`", 1, true), text .. "\n" .. result.stdout)
    end
  end)
end)
