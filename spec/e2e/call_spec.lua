-- call: one handler, once, without the queue; and the frames it is made of.

local executor = require "spec.support.executor"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- An app without a database. `body` is that of the handler `main`.
local function app_with(body, config)
  return tidemill.app {
    config = config or { subscribe = { ["order.paid"] = { "main" } } },
    handlers = { main = ("return function(payload, ctx)\n%s\nend\n"):format(body) },
    database = false,
  }
end

local function call(body, ...)
  return app_with(body):run("call", "main", ...)
end

describe("call", function()
  it("prints what the handler returns as JSON, and null for nothing", function()
    for body, printed in pairs {
      ["return { 1, 2.5, 'é', { a = payload[1] } }"] = '[1,2.5,"é",{"a":true}]',
      ["return payload"] = '[true,[],{},12345678901234567890,null]',
      ["return"] = "null",
      [""] = "null",
      ["return nil, 'more'"] = "null",
      ["return false"] = "false",
      ["return require('tidemill').null"] = "null",
      ["return ('x'):rep(3) .. '\"'"] = '"xxx\\""',
    } do
      local result = call(body, '[true, [], {}, 12345678901234567890, null]')
      assert.same({ code = 0, stdout = printed .. "\n", stderr = "" }, result, body)
    end
  end)

  it("gives the handler the context of a first attempt", function()
    local result = call [[
      local t = require "tidemill"
      t.sleep(0.01)
      return { ctx.topic, ctx.subscriber, ctx.attempts, ctx.max_attempts, ctx.published_by, #ctx.message_id, ctx.raw,
        ctx.created_at > "2020", ctx.deadline > t.now() }]]
    assert.equal('["order.paid","main",1,5,"tidemill call",36,"{}",true,true]\n', result.stdout, result.stderr)
  end)

  it("reads the message from standard input, however long", function()
    local app = app_with "return #payload"
    local result = app:run { "call", "main", "-", stdin = '"' .. ("x"):rep(3000000) .. '"' }
    assert.equal("3000000\n", result.stdout, result.stderr)
  end)

  it("puts log and print on standard error only", function()
    local result = call [[print("printed") ctx:log("logged") io.stdout:write("written\n") return 1]]
    assert.equal("1\n", result.stdout)
    for _, word in ipairs { "printed", "logged", "written" } do
      assert.truthy(result.stderr:find(word, 1, true), result.stderr)
    end
  end)

  it("ends with 1 when the handler raises, with the traceback", function()
    local result = call "local function inner() error('boom') end\ninner()"
    assert.same({ 1, "" }, { result.code, result.stdout })
    assert.truthy(result.stderr:find "^tidemill: %S*handlers/main%.lua:2: boom\nstack traceback:\n.*main%.lua:3:",
      result.stderr)
  end)

  it("ends with 1 when the result cannot be written", function()
    for _, value in ipairs { "print", "{ f = print }", "0/0" } do
      local result = call("return " .. value)
      assert.same({ 1, "" }, { result.code, result.stdout }, value)
      assert.truthy(result.stderr:find "^tidemill: what the handler returned cannot be written as JSON: result",
        result.stderr)
    end
  end)

  it("ends with 1 and the reason when the handler ends the delivery", function()
    for body, said in pairs {
      ["ctx:retry(5, 'busy')"] = "the handler asked to be tried again in 5 s: busy",
      ["ctx:snooze(2.5)"] = "the handler put the message off for 2.5 s",
      ["ctx:discard('no use')"] = "the handler discarded the message: no use",
    } do
      assert.same({ code = 1, stdout = "", stderr = "tidemill: " .. said .. "\n" }, call(body), body)
    end
  end)

  it("publishes nothing, and shows what would have been", function()
    local result = call [[ctx:publish("b", { 1 }) ctx:publish("c") return "ok"]]
    assert.equal('"ok"\n', result.stdout)
    assert.equal('tidemill: published nothing, there is no queue here: [{"topic":"b","message":[1],'
      .. '"published_by":"tidemill call"},{"topic":"c","message":{},"published_by":"tidemill call"}]\n', result.stderr)

    result = call [[
      local ok, err = pcall(require("tidemill").publish, "b", {})
      return { ok, err }]]
    assert.truthy(result.stdout:find "^%[false,\"[^\n]*nothing can be published here: this handler is called without "
      .. "a queue\"%]\n$", result.stdout)
  end)

  it("stops a handler at its time limit, whether it waits or not", function()
    for body, told in pairs {
      ["require('tidemill').sleep(600)"] = "handler exceeded its time limit of 0.2 s\nstack traceback:",
      ["while true do end"] = "handler exceeded its time limit of 0.2 s\n",
    } do
      local app = app_with(body, { subscribe = { a = "main" }, timeout_secs = 0.2, kill_grace_secs = 0.2 })
      local result = app:run("call", "main")
      assert.same({ 1, "" }, { result.code, result.stdout }, body)
      assert.truthy(result.stderr:find("tidemill: " .. told, 1, true), result.stderr)
    end
  end)

  it("says how a handler ended its process", function()
    local app = app_with [[require("ffi").cast("int *", 0)[0] = 1]]
    -- A sanitizer turns the signal into an exit code of its own.
    local result = app:run { "call", "main", env = { ASAN_OPTIONS = "handle_segv=0" } }
    assert.same({
      code = 1, stdout = "", stderr = "tidemill: handler crashed its executor (signal 11 (Segmentation fault))\n",
    }, result)
  end)

  it("leaves no process behind when it is interrupted", function()
    local app = app_with [[ctx:log("began") while true do end]]
    local running = process.spawn { tidemill.binary, "call", "main", "-c", app.config_path }
    running:wait_for "began"
    running:kill "INT"
    assert.same({ nil, 2 }, { running:wait() })
  end)
end)

describe("the handler of a call", function()
  local function app_of_many()
    return tidemill.app {
      config = { subscribe = {
        a = { one = { handler = "deep.mod" }, two = { handler = "show" } },
        b = { one = { handler = "show", max_attempts = 9 } },
      } },
      handlers = {
        ["deep.mod"] = "return function(_, ctx) return 'deep ' .. ctx.topic end",
        show = "return function(_, ctx) return ctx.topic .. ' ' .. ctx.subscriber .. ' ' .. ctx.max_attempts end",
        spare = [[return {
          handle = function(_, ctx) return ctx.topic .. ' ' .. ctx.max_attempts end, max_attempts = 3,
        }]],
        broken = "return 42",
      },
      database = false,
    }
  end

  it("is found by subscriber, by topic and subscriber, or by module", function()
    local app = app_of_many()
    for name, printed in pairs {
      two = '"a two 5"', ["a/one"] = '"deep a"', ["b/one"] = '"b one 9"', ["deep.mod"] = '"deep a"',
      spare = '"call 3"',
    } do
      assert.same({ code = 0, stdout = printed .. "\n", stderr = "" }, app:run("call", name), name)
    end
  end)

  it("is asked for again where the name means several", function()
    local app = app_of_many()
    assert.same({
      code = 2, stdout = "", stderr = "tidemill: `one` may mean several subscriptions: name one of a/one, b/one\n",
    }, app:run("call", "one"))
    assert.same({
      code = 2, stdout = "", stderr = "tidemill: `show` may mean several subscriptions: name one of a/two, b/one\n",
    }, app:run("call", "show"))
  end)

  it("is told to be unknown, or broken", function()
    local app = app_of_many()
    for name, told in pairs {
      nothere = "there is no handler `nothere`: no subscriber of [^\n]+ has that name, and there is no "
        .. "[^\n]*handlers/nothere%.lua\n$",
      ["a/three"] = "there is no handler `a/three`: `tidemill check` lists the subscriptions, write SUBSCRIBER or "
        .. "TOPIC/SUBSCRIBER\n$",
      broken = "[^\n]*broken%.lua: must return a function[^\n]*\n$",
    } do
      local result = app:run("call", name)
      assert.same({ 2, "" }, { result.code, result.stdout }, name)
      assert.truthy(result.stderr:find("^tidemill: " .. told), result.stderr)
    end
  end)

  it("is not looked for before the message is in order", function()
    local app = app_of_many()
    assert.same({
      code = 2, stdout = "",
      stderr = "tidemill: this is not JSON: line 1, column 2: a name in double quotes is expected\n",
    }, app:run("call", "nothere", "{a}"))
    local nowhere = process.run { tidemill.binary, "call", "x", cwd = "/" }
    assert.same({
      code = 2, stdout = "",
      stderr = "tidemill: there is no config.lua: go to the folder of your app, or name its config with -c FILE\n",
    }, nowhere)
  end)

  it("may be a function of the config", function()
    local app = tidemill.app {
      config = [[return { subscribe = { a = { inline = function(payload) return payload.n + 1 end } } }]],
      database = false,
    }
    assert.equal("3\n", app:run("call", "inline", '{"n": 2}').stdout)
  end)
end)

describe("a delivery", function()
  after_each(executor.stop_all)

  it("brings its result only where that is wanted", function()
    local run = executor.with_handler "if payload.fail then error('no') end return { n = payload.n }"
    local wanted = run:handle { payload = '{"n": 7}', wants_result = true }
    assert.same({ "done", '{"n":7}' }, { wanted.kind, wanted.result })
    local plain = run:handle { payload = '{"n": 7}' }
    assert.same({ "done" }, { plain.kind, plain.result })
    local failed = run:handle { payload = '{"fail": true}', wants_result = true }
    assert.same({ "raised" }, { failed.kind, failed.result })
    -- The coroutine is used again, and nothing of the last result is left in it.
    assert.is_nil(run:handle({ payload = "{}" }).result)
  end)

  it("may be for a module that no subscription names", function()
    local handlers = { x = "return function() end", spare = "return function() return 1 end" }
    local config = [[return { subscribe = { a = "x" } }]]
    local run = executor.start { config = config, handlers = handlers, call = "spare" }
    assert.equal(2, #run.manifest.lanes)
    assert.equal("1", run:handle({ to = "spare", wants_result = true }).result)
    -- One that a subscription names needs no other.
    assert.equal(1, #executor.start({ config = config, handlers = handlers, call = "x" }).manifest.lanes)
    local refused = executor.load { config = config, handlers = handlers, call = "nothere" }
    assert.truthy(refused.load_error:find("there is no handler `nothere`", 1, true), refused.load_error)
  end)
end)
