-- Commands around the queue: init, status, drain, reclaim and prune, statements; and that help and
-- docs/commands.md know every command.

local folder = require "spec.support.folder"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local CONFIG = { subscribe = { ["order.paid"] = { "greet", "count" } }, executors = 1 }
local HANDLERS = { greet = "return function() end", count = "return function() end" }

-- With the subscriptions of the config in the database, and no worker.
local function subscribed(options)
  local app = tidemill.app(options or { config = CONFIG, handlers = HANDLERS })
  app:stop(app:start())
  return app
end

-- JSON that a command printed, by an expression over it as `j`.
local function of_json(app, json, expression)
  return app.db:value("select " .. expression .. " from (select $1::jsonb as j) as t", json)
end

-- A row as another producer or a worker of another machine would have left it.
local function insert(app, columns)
  local names, places, values = {}, {}, {}
  for name, value in pairs(columns) do
    table.insert(names, name)
    table.insert(places, "$" .. #names)
    values[#names] = value
  end
  return app.db:value(("insert into tidemill.queue_message (%s) values (%s) returning id"):format(
    table.concat(names, ", "), table.concat(places, ", ")), unpack(values, 1, #names))
end

local function ago(app, interval)
  return app.db:value("select now() - $1::interval", interval)
end

describe("init", function()
  local dir
  before_each(function()
    dir = folder.temp "tidemill-init"
  end)
  after_each(function()
    folder.remove(dir)
  end)

  local function init(...)
    return process.run { argv = { tidemill.binary, "init", ... }, cwd = dir }
  end

  it("writes an app that check finds in order and whose handler can be called", function()
    local result = init "my shop/web"
    assert.equal(0, result.code, result.stderr)
    for _, text in ipairs {
      "wrote my shop/web/config.lua\n", "wrote my shop/web/handlers/hello.lua\n",
      "wrote my shop/web/spec/hello_spec.lua\n", "cd 'my shop/web'\n", " test ", " dev ",
      [[ publish greeting.wanted '{"name": "Ann"}']],
    } do
      assert.truthy(result.stdout:find(text, 1, true), result.stdout)
    end
    local there = dir .. "/my shop/web"
    local check = process.run { argv = { tidemill.binary, "check" }, cwd = there }
    assert.equal(0, check.code, check.stderr)
    assert.truthy(check.stdout:find "\ngreeting%.wanted +hello +hello\n", check.stdout)
    local json = process.run { argv = { tidemill.binary, "check", "--json" }, cwd = there }.stdout
    assert.truthy(json:find('"app":"web"', 1, true), json)
    local call = process.run { argv = { tidemill.binary, "call", "hello", '{"name": "Ann"}' }, cwd = there }
    assert.same({ 0, "null\n" }, { call.code, call.stdout })
    assert.truthy(call.stderr:find("hello, Ann", 1, true), call.stderr)
  end)

  it("is told the command that starts it wherever it was typed", function()
    local relative = "../" .. dir:match "[^/]+$" .. "/program"
    process.run { "ln", "-s", tidemill.binary, dir .. "/program" }
    local result = process.run { argv = { relative, "init", "below" }, cwd = dir }
    local typed = result.stdout:match "\n  (%S+) dev "
    assert.equal("/", typed:sub(1, 1))
    assert.equal(0, process.run { argv = { typed, "check" }, cwd = dir .. "/below" }.code)
  end)

  it("gives the handler messages when it runs", function()
    assert.equal(0, init().code)
    local app = tidemill.app {}
    app.config_path = dir .. "/config.lua"
    app:start():wait_for "event=ready"
    app:must_run("publish", "greeting.wanted", '"text"')
    app.processes[1]:wait_for "hello, world"
  end)

  it("writes what editors need, and keeps the settings they have", function()
    local result = init()
    assert.truthy(result.stdout:find("wrote .luarc.json\n", 1, true), result.stdout)
    assert.truthy(result.stdout:find("\nwrote .luals/, for editors", 1, true), result.stdout)
    local settings = folder.read(dir .. "/.luarc.json")
    assert.truthy(settings:find('"workspace.library": [".luals"', 1, true), settings)
    for _, name in ipairs { "config", "handler", "testing", "tidemill" } do
      local written = folder.read(dir .. "/.luals/" .. name .. ".lua")
      assert.equal(folder.read("lua/tidemill/_meta/" .. name .. ".lua"), written)
    end

    folder.write(dir, "second/.luarc.json", "{}")
    folder.write(dir, "second/.luals/config.lua", "old")
    result = init "second"
    assert.equal(0, result.code, result.stderr)
    assert.truthy(result.stdout:find("kept  second/.luarc.json\n", 1, true), result.stdout)
    assert.equal("{}", folder.read(dir .. "/second/.luarc.json"))
    assert.not_equal("old", folder.read(dir .. "/second/.luals/config.lua"))
  end)

  it("leaves the annotations to a command of their own too", function()
    local result = process.run { argv = { tidemill.binary, "annotations", "deep/down" }, cwd = dir }
    assert.same({ 0, "wrote deep/down/, for editors: annotations for the Lua language server\n" },
      { result.code, result.stdout })
    assert.equal(folder.read "lua/tidemill/_meta/tidemill.lua", folder.read(dir .. "/deep/down/tidemill.lua"))
    folder.write(dir, "file", "")
    result = process.run { argv = { tidemill.binary, "annotations", "file" }, cwd = dir }
    assert.same({ 1, "tidemill: cannot make file/config.lua: Not a directory\n" }, { result.code, result.stderr })
  end)

  it("overwrites nothing, and then writes nothing at all", function()
    folder.write(dir, "config.lua", "return {}")
    local result = init()
    assert.equal(2, result.code)
    assert.equal("", result.stdout)
    assert.equal("tidemill: config.lua is there already, and nothing was written: take another folder, or move "
      .. "it away\n", result.stderr)
    assert.is_false(pcall(folder.read, dir .. "/handlers/hello.lua"))

    folder.write(dir, "handlers/hello.lua", "mine")
    assert.equal("tidemill: ./config.lua and ./handlers/hello.lua are there already, and nothing was written: take "
      .. "another folder, or move them away\n", init("./").stderr)
    assert.equal("mine", folder.read(dir .. "/handlers/hello.lua"))
    assert.equal("return {}", folder.read(dir .. "/config.lua"))
  end)

  it("says why a folder cannot be made", function()
    folder.write(dir, "file", "")
    local result = init "file/below"
    assert.equal(1, result.code)
    assert.equal("tidemill: cannot make the folder file/below: Not a directory\n", result.stderr)
    assert.equal(2, init("").code)
  end)
end)

describe("status", function()
  it("shows lanes nobody serves first, then those that wait longest, and the workers", function()
    local app = subscribed()
    app.db:exec [[insert into tidemill.subscription (app, topic, subscriber)
      values ('other', 'a.idle', 'x'), ('other', 'z.late', 'x')]]
    insert(app, { topic = "order.paid", subscriber = "count", status = "running", claimed_by = "w#1",
      claimed_at = ago(app, "1 s"),
      lane = app.db:value "select lane from tidemill.subscription where subscriber = 'count'" })
    local late = app.db:value "select lane from tidemill.subscription where topic = 'z.late'"
    insert(app, { topic = "z.late", subscriber = "x", lane = late, available_at = ago(app, "2 h 5 min") })
    insert(app, { topic = "z.late", subscriber = "x", lane = late, available_at = ago(app, "-1 h") })
    insert(app, { topic = "strange", subscriber = "nobody" })
    app.db:query([[insert into tidemill.worker (id, app, host, pid, lease_secs, lease_until, lanes)
      select 'w', 'app', 'far.example', 77, 300, now() - interval '20 s', '{}'
      union all select 'v', 'app', 'near.example', 78, 300, now() + interval '1 hour', array_agg(lane)
        from tidemill.subscription where app = 'app']])

    local lines = {}
    for line in app:must_run("status"):gmatch "[^\n]+" do
      table.insert(lines, line)
    end
    assert.truthy(lines[1]:find("/" .. app.database .. ', schema "tidemill" at version ', 1, true), lines[1])
    local rows = {}
    for i = 2, #lines do
      rows[i - 1] = (lines[i]:gsub(" +", " "))
    end
    assert.equal("topic subscriber waiting due since scheduled running failed workers", rows[1])
    assert.equal("z.late x 1 2 h 05 m 1 0 0 0 unserved", rows[2])
    assert.truthy(rows[3]:find "^strange nobody 1 %d+ m?s 0 0 0 0 not subscribed$", rows[3])
    assert.equal("a.idle x 0 - 0 0 0 0 unserved", rows[4])
    assert.equal("order.paid count 0 - 0 1 0 1", rows[5])
    assert.equal("order.paid greet 0 - 0 0 0 1", rows[6])
    assert.equal("worker app host pid lease left generation lanes", rows[7])
    assert.truthy(rows[8]:find "^v app near%.example 78 %d+ m %d%d s 1 2$" or
      rows[8]:find "^v app near%.example 78 1 h 00 m 1 2$", rows[8])
    assert.truthy(rows[9]:find "^w app far%.example 77 over for 2%d s 1 0$", rows[9])
    assert.equal(9, #rows)
  end)

  it("prints the same as JSON", function()
    local app = subscribed()
    local worker = app:start()
    app:must_run("publish", "order.paid", "--delay", "600")
    local json = app:must_run("status", "--json")
    assert.equal("order.paid/count 1 1|order.paid/greet 1 1", of_json(app, json, [[(select string_agg(
      concat_ws(' ', (l ->> 'topic') || '/' || (l ->> 'subscriber'), l ->> 'scheduled', l ->> 'workers'), '|'
      order by l ->> 'subscriber') from jsonb_array_elements(j -> 'lanes') as l)]]))
    assert.equal("app t " .. worker.pid, of_json(app, json, [[concat_ws(' ', j #>> '{workers,0,app}',
      (j #>> '{workers,0,lease_left_secs}')::float8 between 1 and 300, j #>> '{workers,0,pid}')]]))
    assert.equal("tidemill", of_json(app, json, "j ->> 'schema'"))
  end)

  it("is told what to do where there is nothing, and finds nothing where there is no queue", function()
    local app = tidemill.app { config = CONFIG, handlers = HANDLERS }
    local result = app:run "status"
    assert.equal(1, result.code)
    assert.equal("", result.stdout)
    assert.truthy(result.stderr:find(
      '^tidemill: this database has no queue in schema "tidemill", or one older than this program '
        .. '%(relation "[^\n]*" is missing%): run `tidemill migrate`\n$'),
      result.stderr)
    app:must_run "migrate"
    local stdout = app:must_run "status"
    assert.truthy(stdout:find("no subscriptions yet", 1, true) and stdout:find("no worker is there", 1, true), stdout)
  end)

  it("needs no more than a reader's grants", function()
    local app = subscribed()
    local role = app.database .. "_reader"
    app.admin:exec("create role " .. role .. " login")
    app.db:query("select tidemill.grant_to($1, 'reader')", role)
    local dsn = app.dsn:gsub("user='[^']*'", "user='" .. role .. "'")
    local function as_reader(...)
      return process.run { argv = { tidemill.binary, "--database", dsn, ... }, cwd = "/" }
    end
    for _, command in ipairs { { "status" }, { "status", "--json" }, { "failed", "list" } } do
      local result = as_reader(unpack(command))
      assert.equal(0, result.code, result.stderr)
    end
    local refused = as_reader("failed", "retry", "--all")
    assert.equal(1, refused.code)
    assert.truthy(refused.stderr:find "^tidemill: permission denied [^\n]*grant_to[^\n]*\n$", refused.stderr)
    app.db:exec("drop owned by " .. role)
    app.admin:exec("drop role " .. role)
  end)

  it("watches until it is interrupted, and survives a server that ends its connection", function()
    local app = subscribed()
    local watch = app:spawn("status", "--watch", "--json")
    watch:wait_for "}\n"
    local from = watch:position()
    app.admin:query([[select pg_terminate_backend(pid) from pg_stat_activity
      where datname = $1 and application_name = 'tidemill status']], app.database)
    watch:wait_for("tidemill: [^\n]+\n", 30, from)
    watch:wait_for("}\n", 30, watch:position())
    watch:kill "INT"
    assert.same({ 0 }, { watch:wait() })
    for line in watch:stdout():gmatch "[^\n]+" do
      assert.equal("object", of_json(app, line, "jsonb_typeof(j)"))
    end
  end)

  it("finds the database of a dev that runs in the folder", function()
    local app = tidemill.app { config = CONFIG, handlers = HANDLERS, database = false }
    process.run { "chmod", "755", app.dir }
    local dev = app:spawn { "dev", setpgid = true }
    dev:wait_for("event=ready", 60)
    app:must_run("publish", "order.paid")
    assert.truthy(app:must_run("status"):find "order%.paid +greet ")
    assert.truthy(app:must_run("failed", "list"):find "no message has failed")
    app:must_run "drain"
    process.run { "kill", "-INT", "--", "-" .. dev.pid }
    assert.same({ 0 }, { dev:wait(60) })
  end)
end)

describe("drain", function()
  local function count(app, status)
    return tonumber(app.db:value("select count(*) from tidemill.queue_message where status = $1", status))
  end

  it("works until nothing is waiting, and ends by itself", function()
    local app = subscribed()
    app.db:exec [[select count(*) from tidemill.publish_many(array['order.paid'],
      array(select '{}'::jsonb from generate_series(1, 300)))]]
    app:must_run("publish", "order.paid", "--delay", "600")
    app:must_run "drain"
    assert.same({ 600, 2 }, { count(app, "done"), count(app, "pending") })
    assert.equal("0", app.db:value "select count(*) from tidemill.worker")
    app:must_run "drain"
    assert.same({ 600, 2 }, { count(app, "done"), count(app, "pending") })
  end)

  it("waits for what runs, and ends well though a handler fails", function()
    local app = subscribed {
      config = { subscribe = { a = { "slow", "bad" } }, retry_backoff_secs = 600, executors = 1 },
      handlers = {
        slow = [[return function() require("tidemill").sleep(0.5) end]],
        bad = [[return function() error("no") end]],
      },
    }
    app:must_run("publish", "a")
    app:must_run "drain"
    local rows = app.db:query "select subscriber, status, attempts from tidemill.queue_message order by subscriber"
    assert.same({
      { subscriber = "bad", status = "pending", attempts = "1" },
      { subscriber = "slow", status = "done", attempts = "1" },
    }, { rows[1], rows[2] })
  end)

  it("works for one topic when told so", function()
    local app = subscribed {
      config = { subscribe = { a = "greet", b = "greet" }, executors = 1 }, handlers = HANDLERS,
    }
    app:must_run("publish", "a")
    app:must_run("publish", "b")
    app:must_run("drain", "--topic", "b")
    assert.same({ "a" }, { app:ledger("status = 'pending'")[1].topic })
    assert.same({ "b" }, { app:ledger("status = 'done'")[1].topic })
    local result = app:run("drain", "--topic", "c")
    assert.equal(2, result.code)
    assert.truthy(result.stderr:find "^tidemill: `%-%-topic` is `c`, and the config has no such subscription")
  end)

  it("fails when it is stopped before, and when there is no database", function()
    local app = subscribed {
      config = { subscribe = { a = "slow" }, executors = 1 },
      handlers = { slow = [[return function(_, ctx) ctx:log("began") require("tidemill").sleep(1) end]] },
    }
    app:must_run("publish", "a")
    local drain = app:spawn "drain"
    drain:wait_for "began"
    drain:kill "TERM"
    assert.same({ 1 }, { drain:wait() })
    assert.truthy(drain:stderr():find("tidemill: stopped before everything was done\n", 1, true), drain:stderr())

    local result = process.run { tidemill.binary, "drain", "-c", app.config_path, "--database", "host=/nowhere" }
    assert.equal(1, result.code)
    assert.truthy(result.stderr:find "^tidemill: [^\n]*/nowhere[^\n]*\n$", result.stderr)
  end)
end)

describe("reclaim", function()
  -- `n` messages held by `holder`, the first `spent` of them out of attempts.
  local function hold(app, holder, n, spent)
    app.db:query([[insert into tidemill.queue_message
        (topic, subscriber, lane, status, attempts, claimed_at, claimed_by)
      select s.topic, s.subscriber, s.lane, 'running', case when i <= $3::int then 5 else 1 end,
             now() - interval '1 hour', $1 || '#' || i
        from tidemill.subscription as s, generate_series(1, $2::int) as i where s.subscriber = 'greet']],
      holder, n, spent)
  end

  it("takes back all that dead and unknown workers hold, and says how many", function()
    local app = subscribed()
    app.db:exec [[insert into tidemill.worker (id, app, lease_secs, lease_until)
      values ('dead', 'app', 300, now() - interval '1 s'), ('alive', 'app', 300, now() + interval '1 hour')]]
    hold(app, "dead", 1203, 2)
    hold(app, "gone", 3, 1)
    hold(app, "alive", 4, 4)
    local listener = app:connect()
    listener:exec "listen tidemill_queue"
    assert.equal("1203 messages pending again, 3 out of attempts and failed; 1 dead worker removed\n",
      app:must_run "reclaim")
    local rows = app.db:query [[select status, attempts, count(*) from tidemill.queue_message
      group by 1, 2 order by 1, 2]]
    assert.same({
      { status = "failed", attempts = "5", count = "3" }, { status = "pending", attempts = "1", count = "1203" },
      { status = "running", attempts = "5", count = "4" },
    }, { rows[1], rows[2], rows[3] })
    assert.equal("order.paid", listener:wait_notify(5).payload)
    assert.equal("alive", app.db:value "select id from tidemill.worker")
    assert.equal('{"returned":0,"failed":0,"workers":0}\n', app:must_run("reclaim", "--json"))
  end)

  it("does so whatever isolation level the database has", function()
    local app = subscribed()
    app.admin:exec(("alter database %s set default_transaction_isolation = 'serializable'"):format(app.database))
    app.admin:exec(("alter database %s set default_transaction_read_only = on"):format(app.database))
    hold(app, "gone", 2, 0)
    assert.truthy(app:must_run("reclaim"):find "^2 messages pending again, 0 ")
  end)
end)

describe("prune", function()
  it("deletes what is past its retention, batch by batch, and no dead letter", function()
    local app = subscribed()
    app.db:exec [[insert into tidemill.queue_message (topic, subscriber, lane, status, processed_at, error)
      select s.topic, s.subscriber, s.lane, case when i % 3 = 0 then 'discarded' else 'done' end,
             now() - interval '25 hours', case when i % 3 = 0 then 'cancelled' end
        from tidemill.subscription as s, generate_series(1, 900) as i
      union all
      select s.topic, s.subscriber, s.lane, 'done', now() - interval '23 hours', null from tidemill.subscription as s
      union all
      select s.topic, s.subscriber, s.lane, 'failed', now() - interval '99 days', 'why'
        from tidemill.subscription as s]]
    assert.equal("1800 finished messages deleted\n", app:must_run "prune")
    assert.same({ "2", "2" }, {
      app.db:value "select count(*) from tidemill.queue_message where status = 'done'",
      app.db:value "select count(*) from tidemill.queue_message where status = 'failed'",
    })
    assert.equal('{"pruned":0}\n', app:must_run("prune", "--json"))
  end)
end)

describe("statements", function()
  it("prints SQL that the server can prepare, with the config's names", function()
    local app = tidemill.app { config = { schema = "other", table = "ledger", prefix = "pre" } }
    app:must_run "migrate"
    local names = {}
    for line in app:must_run("statements"):gmatch "[^\n]+" do
      local name, sql = line:match "^([%w_]+)\t(.+)$"
      assert.truthy(name, line)
      assert.is_nil(sql:find("{%a+}"), sql)
      names[name] = (sql:gsub("\\(.)", { n = "\n", t = "\t", ["\\"] = "\\" }))
      app.db:exec(("prepare spec_%s as %s"):format(name, names[name]))
    end
    for _, name in ipairs { "pin", "claim", "settle_done", "renew", "prune" } do
      assert.truthy(names[name], name)
    end
    assert.truthy(names.claim:find('"other"."ledger"', 1, true), names.claim)
    assert.truthy(names.notify:find("pre_queue", 1, true), names.notify)
  end)

  it("prints the default names where there is no config", function()
    local result = process.run { tidemill.binary, "statements", cwd = "/" }
    assert.equal(0, result.code, result.stderr)
    assert.truthy(result.stdout:find('\nclaim\t[^\n]*"tidemill"."queue_message"'), result.stdout)
  end)
end)

describe("commands of two words", function()
  local function run(...)
    return process.run { argv = { tidemill.binary, ... }, cwd = "/" }
  end

  it("are listed by their first", function()
    local help = run("help", "failed")
    assert.equal(0, help.code)
    assert.same(help, run("failed", "--help"))
    for _, word in ipairs { "list", "show", "retry", "discard" } do
      assert.truthy(help.stdout:find("\n  failed " .. word .. " ", 1, true), help.stdout)
    end
    assert.is_nil(help.stdout:find "\n  publish ")
    assert.equal(run("help", "failed", "retry").stdout, run("failed", "retry", "--help").stdout)
  end)

  it("end with 2 when the second is missing or wrong", function()
    for words, text in pairs {
      [{ "failed" }] = "`failed` is the first word of several commands: `tidemill failed --help` lists them",
      [{ "failed", "lst" }] = "there is no command `failed lst`: did you mean `failed list`?",
      [{ "failed", "frobnicate" }] = "there is no command `failed frobnicate`: `tidemill failed --help` lists them",
      [{ "faild", "list" }] = "there is no command `faild`: did you mean `failed`?",
      [{ "failed", "list", "more" }] = "`more` is one word too many: tidemill failed list "
        .. "[--topic TOPIC] [--limit N] [--json]",
      [{ "failed", "show" }] = "something is missing: tidemill failed show ID [--json]",
    } do
      assert.same({ code = 2, stdout = "", stderr = "tidemill: " .. text .. "\n" }, run(unpack(words)))
    end
  end)
end)

describe("docs/commands.md", function()
  it("has each command with its options, and no other", function()
    local text = folder.read "docs/commands.md"
    local listed = {}
    for heading in text:gmatch "\n### ([^\n]+)" do
      for command in heading:gmatch "`([%l ]*%l)" do
        listed[command] = true
      end
    end
    local overview = process.run { tidemill.binary, "--help" }.stdout:match "\ncommands:\n(.-)\n\n"
    for name in ("\n" .. overview):gmatch "\n  (%l+ ?%l*)  " do
      name = name:match "^(.-) *$"
      assert.truthy(listed[name], name .. " has no section")
      listed[name] = nil
      local words = { tidemill.binary, "help" }
      for word in name:gmatch "%l+" do
        table.insert(words, word)
      end
      local options = process.run(words).stdout:match "\noptions:\n(.-)\n\n" or ""
      local begin = text:find("\n### [^\n]*`" .. name .. "%f[^%l]")
      local section = text:sub(begin, text:find("\n##", begin + 1, true))
      for option in options:gmatch "%-%-[%l-]+" do
        assert.truthy(section:find(option, 1, true), name .. " " .. option)
      end
    end
    assert.same({}, listed)
  end)
end)
