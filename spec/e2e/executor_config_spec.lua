-- config.lua and the handlers' modules as an executor loads them: every shape a subscription may
-- have, and what is said about each mistake.

local executor = require "spec.support.executor"

-- The lines of LOAD_ERROR for a config.
local function problems(config, options)
  options = options or {}
  options.config = config
  local run = executor.load(options)
  assert.is_nil(run.manifest)
  local lines = {}
  for line in run.load_error:gmatch "[^\n]+" do
    table.insert(lines, line)
  end
  return lines
end

local function manifest(config, options)
  options = options or {}
  options.config = config
  return executor.start(options).manifest
end

-- `topic subscriber handler` of each lane.
local function lanes(found)
  local list = {}
  for i, lane in ipairs(found.lanes) do
    list[i] = ("%s %s %s"):format(lane.topic, lane.subscriber, lane.handler)
  end
  return list
end

local HANDLER = "return function() end"

describe("an executor that loads config.lua", function()
  after_each(executor.stop_all)

  describe("settings", function()
    it("have defaults", function()
      local found = manifest "return {}"
      assert.equal("app", found.settings.app)
      assert.is_nil(found.settings.database)
      assert.equal("handlers", found.settings.handlers)
      assert.equal(30, found.settings.poll_secs)
      assert.is_true(found.settings.migrate)
      assert.equal(5, found.settings.lane.max_attempts)
      assert.same({}, found.lanes)
    end)

    it("are taken from the table, with the ordinary libraries at hand", function()
      local found = manifest([[
        local name = os.getenv "SPEC_DATABASE"
        return { app = "shop", database = name, batch = 10 * 2, poll_secs = 0.5, migrate = false, max_attempts = 9 }
      ]], { env = { SPEC_DATABASE = "host=/nowhere" } })
      assert.equal("shop", found.settings.app)
      assert.equal("host=/nowhere", found.settings.database)
      assert.equal(20, found.settings.batch)
      assert.equal(0.5, found.settings.poll_secs)
      assert.is_false(found.settings.migrate)
      assert.equal(9, found.settings.lane.max_attempts)
    end)

    it("that are unknown are refused with the line and the key that was meant", function()
      assert.same({ "config.lua:3: poll_sec: unknown key, did you mean `poll_secs`?" },
        problems "return {\n  batch = 5,\n  poll_sec = 3,\n}")
      assert.same({ "config.lua:1: zzz: unknown key" }, problems "return { zzz = 3 }")
      assert.same({ "config.lua:1: app: expected UTF-8 text" }, problems 'return { app = "\\xff" }')
    end)

    it("that are wrong are all reported at once, in the order of the lines", function()
      assert.same({
        "config.lua:2: poll_secs: expected a number from 0.1 to 86400 (seconds), found \"soon\"",
        "config.lua:3: batch: expected a whole number from 1 to 10000 (messages), found 1.5",
        "config.lua:4: migrate: expected true or false, found \"no\"",
        "config.lua:5: schema: `1x` is not a name: use letters, digits and `_`, at most 63, no digit first",
        "config.lua:6: app: expected a text of 1 to 100 bytes, found a table",
      }, problems [[return {
  poll_secs = "soon",
  batch = 1.5,
  ["migrate"] = "no",
  schema = '1x',
  app = {},
}]])
    end)

    it("are found in the text past comments, strings and deeper keys of the same name", function()
      assert.same({ "config.lua:8: max_attempts: expected a whole number from 1 to 32767 (attempts), found 0" },
        problems([==[-- max_attempts = 1
--[[ max_attempts = 2 ]]
local text = [[
max_attempts = 3
]]
return {
  subscribe = { t = { h = { handler = "h", max_attempts = 4 } } },
  max_attempts = text and 0,
}]==], { handlers = { h = HANDLER } }))
    end)

    it("that no line writes are reported without one", function()
      assert.same({ "config.lua: poll_sec: unknown key, did you mean `poll_secs`?" },
        problems "local config = {} config['poll_' .. 'sec'] = 1 return config")
    end)

    it("have names", function()
      assert.same({ "config.lua: [1]: unknown key: settings have names" }, problems "return { 5 }")
      assert.same({ "config.lua: a key is a name, found true" }, problems "return { [true] = 5 }")
    end)
  end)

  describe("as a file", function()
    it("that is missing is said to be", function()
      assert.same({ "none.lua: No such file or directory" }, problems("", { path = "none.lua" }))
    end)

    it("that is a folder is said to be no file", function()
      assert.same({ "handlers: Is a directory" },
        problems("", { path = "handlers", handlers = { x = "" } }))
    end)

    it("keeps the path as the user gave it", function()
      local run = executor.load { files = { ["app/config.lua"] = "return { x1 = 1 }" }, path = "./app/config.lua" }
      assert.equal("./app/config.lua:1: x1: unknown key", run.load_error)
    end)

    it("keeps a path whole that is too long for LuaJIT's messages", function()
      local dir = ("d"):rep(70)
      local path = dir .. "/config.lua"
      local run = executor.load { files = { [path] = "\nreturn = 1" }, path = path }
      assert.equal(path .. ":2: unexpected symbol near '='", run.load_error)
    end)

    it("with a syntax error is reported by its line", function()
      assert.same({ "config.lua:2: unexpected symbol near '='" }, problems "return {\n  = 'x'")
    end)

    it("that raises is reported by its line, whatever it raises", function()
      assert.same({ "config.lua:2: attempt to index global 'nothing' (a nil value)" },
        problems "\nlocal x = nothing.more return {}")
      assert.same({ "config.lua: the error is a table: {\"code\":5}" }, problems "error { code = 5 }")
      assert.same({ "config.lua: the error is nil" }, problems "error()")
      assert.same({ "config.lua: two lines" }, problems "error('two\\n  lines', 0)")
    end)

    it("must return a table", function()
      assert.same({ "config.lua: must return a table, found nothing" }, problems "local x = 1")
      assert.same({ "config.lua: must return a table, found \"x\"" }, problems "return 'x'")
    end)

    it("may not be bytecode", function()
      local bytecode = string.dump(function() return {} end)
      assert.same({ "config.lua: this is compiled bytecode, give the source text" }, problems(bytecode))
    end)

    it("cannot wait, publish or exit", function()
      assert.same({
        "config.lua:1: `sleep` works only while a handler runs, not while config.lua and modules are loaded",
      }, problems "require('tidemill').sleep(1) return {}")
      assert.same({
        "config.lua:1: `publish` works only while a handler runs, not while config.lua and modules are loaded",
      }, problems "require('tidemill').publish('a') return {}")
      assert.same({
        "config.lua:1: `sleep` works only while a handler runs, not while config.lua and modules are loaded",
      }, problems "coroutine.wrap(function() require('tidemill').sleep(1) end)() return {}")
      assert.matches("^config.lua:1: os.exit would end", problems("os.exit(0)")[1])
    end)
  end)

  describe("subscriptions", function()
    local handlers = { a = HANDLER, b = HANDLER, ["crm.sync"] = HANDLER }

    it("may be a name, a list, a map, or a mixture", function()
      local found = manifest([[return { subscribe = {
        ["one"] = "a",
        ["two"] = { "b", "a" },
        ["three"] = { "a", named = "crm.sync", fn = function() end,
                      full = { handler = "b", max_attempts = 8 } },
        ["none"] = {},
        [" padded\t"] = "a",
      } }]], { handlers = handlers })
      assert.same({
        "one a a",
        "padded a a",
        "three a a",
        "three fn function at config.lua:4",
        "three full b",
        "three named crm.sync",
        "two a a",
        "two b b",
      }, lanes(found))
      assert.equal(8, found.lanes[5].options.max_attempts)
    end)

    it("have the module of the subscriber's name where a table of options names none", function()
      local config = [[return { subscribe = { made = { a = { max_attempts = 3 }, ["crm.sync"] = {} } } }]]
      local found = manifest(config, { handlers = handlers })
      assert.same({ "made a a", "made crm.sync crm.sync" }, lanes(found))
      assert.equal(3, found.lanes[1].options.max_attempts)
      assert.same({ "made a a", "made crm.sync crm.sync" }, lanes(manifest(config, { mode = "config" })))
      assert.same({
        "config.lua:1: subscribe.made.absent: module `absent` not found: looked for handlers/absent.lua and "
          .. "handlers/absent/init.lua, and in package.path and package.cpath",
      }, problems("return { subscribe = { made = { absent = { max_attempts = 3 } } } }", { handlers = handlers }))
    end)

    it("take options of their own over the module's, and those over the app's", function()
      local found = manifest([[return {
        max_attempts = 2, timeout_secs = 3, retain_hours = 4, concurrency = 7,
        subscribe = { t = { "m", n = { handler = "m", timeout_secs = 30, concurrency = 5 } } },
      }]], { handlers = {
        m = [[return { handle = function() end, timeout_secs = 20, retain_hours = 40,
          _note = "x", help = function() end }]],
      } })
      local m, n = found.lanes[1].options, found.lanes[2].options
      assert.same({ 2, 20, 40, 0 }, { m.max_attempts, m.timeout_secs, m.retain_hours, m.concurrency })
      assert.same({ 2, 30, 40, 5 }, { n.max_attempts, n.timeout_secs, n.retain_hours, n.concurrency })
    end)

    it("give the same manifest in every process", function()
      local config = [[return { subscribe = { a = { "b", "a", x = "a", y = "b" }, b = "a", c = "b", d = "a" } }]]
      local first, second = manifest(config, { handlers = handlers }), manifest(config, { handlers = handlers })
      assert.equal(first.digest, second.digest)
    end)

    it("are listed without loading modules when only the config is asked for", function()
      local found = manifest([[return { subscribe = { t = { "absent", f = function() end } } }]], { mode = "config" })
      assert.same({ "t absent absent", "t f function at config.lua:1" }, lanes(found))
    end)

    it("of a wrong shape are all reported", function()
      local rule = ": use letters, digits, `.`, `_`, `-` or `:`"
      assert.same({
        [[config.lua:2: subscribe["order paid"]: `order paid` is not a topic]] .. rule,
        [[config.lua:3: subscribe.fn: a function needs a name to subscribe by: { NAME = function … }]],
        [[config.lua:4: subscribe.number: expected a module's name or a table, found 5]],
        [[config.lua:5: subscribe.list[2]: a list holds modules' names, found a function; ]]
          .. "with a name before it: NAME = …",
        [[config.lua:6: subscribe.bad.x: expected a module's name, a function or a table of options, found 7]],
        [[config.lua:7: subscribe.bare.a.handler: `handler` must be a module's name or a function, found 7]],
        [[config.lua:8: subscribe.name["b d"]: `b d` is not a subscriber's name]] .. rule,
        [[config.lua:9: subscribe.twice.a: `a` subscribes to `twice` twice]],
        [[config.lua:10: subscribe.unnamed.handler: options belong to a subscriber, write its name before: ]]
          .. "NAME = { handler = … }",
      }, problems([[return { subscribe = {
  ["order paid"] = "a",
  fn = function() end,
  number = 5,
  list = { "a", function() end },
  bad = { x = 7 },
  bare = { a = { handler = 7, max_attempts = 3 } },
  name = { ["b d"] = "a" },
  twice = { "a", a = "b" },
  unnamed = { handler = "a", max_attempts = 3 },
} }]], { handlers = handlers }))
    end)

    it("with wrong options are reported by the option's line", function()
      assert.same({
        [[config.lua:4: subscribe["t.x"].n.max_attempts: expected a whole number from 1 to 32767 (attempts), found 0]],
        [[config.lua:5: subscribe["t.x"].n.timeout_sec: unknown key, did you mean `timeout_secs`?]],
        [[config.lua:6: subscribe["t.x"].n.batch: unknown key]],
      }, problems([[return { max_attempts = 3, subscribe = {
  ["t.x"] = {
    n = { handler = "a",
      max_attempts = 0,
      timeout_sec = 1,
      batch = 5,
    },
  },
} }]], { handlers = handlers }))
    end)

    it("must be a table with topics as keys", function()
      assert.same({ "config.lua:1: subscribe: expected a table of topics, found \"a\"" },
        problems "return { subscribe = 'a' }")
      assert.same({ "config.lua:1: subscribe[1]: a topic must stand before it: [\"TOPIC\"] = …" },
        problems "return { subscribe = { 'a' } }")
    end)
  end)

  describe("modules", function()
    it("are looked for in the handlers' folder beside the config, packages and folders too", function()
      local found = manifest([[return { handlers = "src/jobs/", subscribe = { t = { "a.b", "p" } } }]], { files = {
        ["src/jobs/a/b.lua"] = HANDLER,
        ["src/jobs/p/init.lua"] = HANDLER,
      } })
      assert.same({ "t a.b a.b", "t p p" }, lanes(found))
    end)

    it("that are missing are reported with the files that were looked for, one line each", function()
      assert.same({
        "config.lua:2: subscribe.t[1]: module `gone` not found: looked for handlers/gone.lua and "
          .. "handlers/gone/init.lua, and in package.path and package.cpath",
        "config.lua:3: subscribe.u[\"x.y\"]: module `also.gone` not found: looked for handlers/also/gone.lua and "
          .. "handlers/also/gone/init.lua, and in package.path and package.cpath",
      }, problems [[return { subscribe = {
  t = { "gone" },
  u = { ["x.y"] = "also.gone" },
} }]])
    end)

    it("that require a missing one are reported at that line", function()
      assert.same({
        "handlers/a.lua:2: module `lib.db` not found: looked for handlers/lib/db.lua and handlers/lib/db/init.lua, "
          .. "and in package.path and package.cpath",
      }, problems("return { subscribe = { t = 'a' } }", {
        handlers = { a = "\nlocal db = require 'lib.db'\n" .. HANDLER },
      }))
    end)

    it("with mistakes are all reported by file and line", function()
      assert.same({
        "handlers/raises.lua:2: attempt to call global 'nothing' (a nil value)",
        "handlers/syntax.lua:2: unexpected symbol near '}'",
        "handlers/empty.lua: must return a function, or a table with a function `handle`; found nothing",
        "handlers/number.lua: must return a function, or a table with a function `handle`; found 5",
        "handlers/tableless.lua: must return a function, or a table with a function `handle`; found a table without it",
        "handlers/option.lua:3: max_atempts: unknown key, did you mean `max_attempts`?",
        "handlers/short.lua:2: timeout: unknown key, did you mean `timeout_secs`?",
        "handlers/misnamed.lua: must return a function, or a table with a function `handle`; found `handler`, "
          .. "write `handle`",
        "handlers/waits.lua:1: `sleep` works only while a handler runs, not while config.lua and modules are loaded",
        "handlers/thrown.lua: the error is a table: {\"a\":1}",
      }, problems([[return { subscribe = {
        t1 = "raises", t2 = "syntax", t3 = "empty", t4 = "number", t5 = "tableless", t6 = "option", t7 = "waits",
        t6b = "short", t6c = "misnamed", t8 = "thrown", t9 = "raises" } }]], { handlers = {
        raises = "\nnothing()",
        syntax = "\n}",
        empty = "",
        number = "return 5",
        tableless = "return { run = function() end }",
        option = "return {\n  handle = function() end,\n  max_atempts = 3,\n}",
        short = "return { handle = function() end,\n  timeout = 3 }",
        misnamed = "return { handler = function() end }",
        waits = "require('tidemill').sleep(1)",
        thrown = "error({ a = 1 })",
      } }))
    end)

    it("are loaded once, however many subscriptions name them", function()
      local run = executor.start {
        config = "return { subscribe = { a = 'm', b = 'm', c = { x = 'm' } } }",
        handlers = { m = "print 'loading m' return function() end" },
      }
      assert.equal(1, #run:log "print")
    end)

    it("may use the whole library, cjson included", function()
      local run = executor.start {
        config = "return { subscribe = { a = 'm' } }",
        handlers = { m = [[
          local tidemill, cjson = require "tidemill", require "cjson"
          assert(cjson.decode("[1]")[1] == 1)
          assert(tidemill.json.encode { 1 } == "[1]" and tidemill.null ~= nil)
          assert(cjson.null == tidemill.null)
          assert(#tidemill.uuid() == 36 and tidemill.now() > 1e9)
          assert(jit.status() and require "ffi" and require "bit")
          return function() end
        ]] },
      }
      assert.equal(1, #run.manifest.lanes)
    end)
  end)

  it("warns once of each global that is written, with its place", function()
    local run = executor.start {
      config = "return { subscribe = { t = 'm' } }",
      handlers = { m = "counter = 1\ncounter = 2\nlocal x = unknown\n"
        .. "return function()\n  late = 1 late = nil late = 2 end" },
    }
    assert.equal("done", run:handle().kind)
    local lines = run:log "global_written"
    assert.equal(2, #lines)
    assert.matches("name=counter at=handlers/m.lua:1$", lines[1])
    assert.matches("level=warn .*name=late at=handlers/m.lua:5$", lines[2])
  end)

  it("answers a second LOAD, or a DELIVER for no handler, by ending with exit code 1", function()
    local run = executor.start { config = "return {}" }
    run:send_load("handlers", "config.lua")
    assert.equal(1, (run:wait()))
    assert.equal(1, #run:log "bad_frame")
    run = executor.start { config = "return {}" }
    run:deliver { lane = 0 }
    assert.equal(1, (run:wait()))
    run = executor.start { config = "return { subscribe = { t = { f = function() end } } }", mode = "config" }
    run:deliver { lane = 0 }
    assert.equal(1, (run:wait()))
  end)

  it("stays after a problem until the runtime hangs up or drains it", function()
    local run = executor.load { config = "return 5" }
    assert.is_false(run.process:poll())
    run:hang_up()
    assert.equal(0, (run:wait()))
    run = executor.load { config = "return 5" }
    run:drain()
    assert.equal(0, (run:wait()))
  end)
end)

describe("the files an executor came from", function()
  after_each(executor.stop_all)

  local function digests(run)
    local list = {}
    for _, file in ipairs(run.files) do
      assert.is_nil(list[file.path], file.path .. " is told twice")
      list[file.path] = tostring(file.digest)
    end
    return list
  end

  local function start(options)
    options.config = options.config or [[
      package.path = "shared/?.lua;" .. package.path
      return { subscribe = { t = "work" } }
    ]]
    options.handlers = options.handlers or {
      work = [[ require "words" pcall(require, "not.there") return function() pcall(require, "later") end ]],
    }
    options.files = options.files or { ["shared/words.lua"] = "return 1", ["shared/later.lua"] = "return 2" }
    return executor.load(options)
  end

  it("are told with what they hold, and those that were looked for in vain", function()
    local run = start {}
    local told = digests(run)
    for _, path in ipairs { "config.lua", "handlers/work.lua", "shared/words.lua" } do
      assert.truthy(told[path] and told[path] ~= "0ULL", path)
    end
    for _, path in ipairs { "handlers/not/there.lua", "handlers/not/there/init.lua", "shared/not/there.lua" } do
      assert.equal("0ULL", told[path], path)
    end
    assert.is_nil(told["shared/later.lua"])
    run:handle()
    assert.truthy(digests(run)["shared/later.lua"])
  end)

  it("are told when they do not load, too", function()
    local run = start { handlers = { work = [[ require "words" ]] }, files = { ["shared/words.lua"] = "return +" } }
    assert.truthy(run.load_error:find("shared/words.lua:1: ", 1, true), run.load_error)
    assert.truthy(digests(run)["shared/words.lua"] ~= "0ULL")
  end)

  it("make the manifest another when one of them changes, and the same when they are the same", function()
    local first, same = start {}, start {}
    local other = start { files = { ["shared/words.lua"] = "return 3", ["shared/later.lua"] = "return 2" } }
    assert.equal(first.manifest.digest, same.manifest.digest)
    assert.is_true(first.manifest.digest ~= other.manifest.digest)
    assert.same(digests(first), digests(same))
  end)
end)
