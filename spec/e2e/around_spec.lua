-- Middleware (`around`) and options beside `handle`: what runs in which order, what a wait, an error or
-- an ending does inside of it, and what is said of mistakes.

local executor = require "spec.support.executor"
local tidemill = require "spec.support.tidemill"

-- The lines of LOAD_ERROR.
local function problems(options)
  local run = executor.load(options)
  assert.is_nil(run.manifest)
  local lines = {}
  for line in run.load_error:gmatch "[^\n]+" do
    table.insert(lines, line)
  end
  return lines
end

-- A module of middleware that appends its name before and after.
local function tracing(name)
  return ([[
    return function(next, payload, ctx)
      payload.trace = (payload.trace or "") .. "<%s"
      local result = next(payload, ctx)
      payload.trace = payload.trace .. ">"
      return result
    end]]):format(name)
end

-- What a delivery's handler leaves in payload.trace, seen by the outermost middleware.
local function trace_of(run, fields)
  local outcome = run:handle(fields)
  return outcome.error
end

local SHOW = "function(next, payload, ctx) next(payload, ctx) ctx:discard(payload.trace) end"

describe("middleware", function()
  after_each(executor.stop_all)

  it("runs around every handler: the app's outside, then the subscription's, then the module's", function()
    local run = executor.start {
      config = ([[return { around = { %s, "app1", "app2" }, subscribe = { t = {
        "plain",
        "rich",
        full = { handler = "rich", around = "sub" },
        inline = { handler = function(p) p.trace = p.trace .. "!" end, around = { "sub", "app1" } },
      } } }]]):format(SHOW),
      handlers = {
        app1 = tracing "app1", app2 = tracing "app2", sub = tracing "sub", own = tracing "own",
        plain = "return function(p) p.trace = p.trace .. '!' end",
        rich = "return { around = { 'own' }, handle = function(p) p.trace = p.trace .. '!' end }",
      },
    }
    assert.equal("<app1<app2!>>", trace_of(run, { to = "plain" }))
    assert.equal("<app1<app2<own!>>>", trace_of(run, { to = "rich" }))
    assert.equal("<app1<app2<sub<own!>>>>", trace_of(run, { to = "full" }))
    assert.equal("<app1<app2<sub<app1!>>>>", trace_of(run, { to = "inline" }))
  end)

  it("may be one function, in the config or beside `handle`, and sees what the handler returns", function()
    local run = executor.start {
      config = [[return { around = function(next, payload, ctx) return { got = next(payload, ctx) } end,
        subscribe = { t = "h" } }]],
      handlers = { h = [[return {
        around = function(next, payload, ctx) return next({ n = payload.n + 1 }, ctx) end,
        handle = function(payload) return payload.n end,
      }]] },
    }
    assert.equal('{"got":6}', run:handle({ payload = '{"n": 5}', wants_result = true }).result)
  end)

  it("may wait, and the handler inside of it may", function()
    local run = executor.start {
      config = [[
        local tidemill = require "tidemill"
        return { around = function(next, payload, ctx)
          tidemill.sleep(0.01)
          local ok, wrong = pcall(next, payload, ctx)
          tidemill.sleep(0.01)
          ctx:discard(tostring(ok) .. " " .. tostring(wrong))
        end, subscribe = { t = "h" } }]],
      handlers = { h = [[local tidemill = require "tidemill"
        return function(payload)
          tidemill.sleep(0.01)
          if payload.raise then error("no stock", 0) end
        end]] },
    }
    assert.equal("true nil", run:handle().error)
    assert.equal("false no stock", run:handle({ payload = '{"raise": true}' }).error)
  end)

  it("cannot hold back what ends a delivery inside of it", function()
    local run = executor.start {
      config = [[return { around = function(next, payload, ctx)
          pcall(next, payload, ctx)
          error "went on"
        end, subscribe = { t = "h" } }]],
      handlers = { h = "return function(_, ctx) ctx:retry(7, 'busy') end" },
    }
    local outcome = run:handle()
    assert.same({ "retry", 7, "busy" }, { outcome.kind, outcome.delay_secs, outcome.error })
  end)

  it("ends the delivery by itself when it does not call next", function()
    local run = executor.start {
      config = [[return { around = function(next, payload, ctx)
          if payload.skip then return ctx:snooze(9) end
          return next(payload, ctx)
        end, subscribe = { t = "h" } }]],
      handlers = { h = "return function() end" },
    }
    local outcome = run:handle { payload = '{"skip": 1}' }
    assert.same({ "snooze", 9 }, { outcome.kind, outcome.delay_secs })
    assert.equal("done", run:handle().kind)
  end)

  it("leaves the handler's place and frames in the traceback of its error, and none of the program's own", function()
    local run = executor.start {
      config = [[return { around = { "tail", "timing" }, subscribe = { t = "h" } }]],
      handlers = {
        tail = "return function(next, payload, ctx) return next(payload, ctx) end",
        timing = "return function(next, payload, ctx)\n  local result = next(payload, ctx)\n  return result\nend",
        h = "local function deep() error('no stock') end\nreturn function()\n  deep()\n  return 1\nend",
      },
    }
    local text = run:handle().error
    assert.matches("^handlers/h.lua:1: no stock\nstack traceback:\n", text)
    assert.matches("\n\thandlers/h.lua:1: in function 'deep'\n", text)
    assert.matches("\n\thandlers/h.lua:3: in function", text)
    assert.matches("\n\thandlers/timing.lua:2: in function", text)
    assert.no.matches("tidemill%.", text)
  end)

  it("may call next again: the handler runs again, in the same attempt", function()
    local run = executor.start {
      config = [[return { around = function(next, payload, ctx)
          local ok = pcall(next, payload, ctx)
          if not ok then return next(payload, ctx) end
        end, subscribe = { t = "h" } }]],
      handlers = { h = [[local runs = 0
        return function(payload, ctx)
          runs = runs + 1
          if runs == 1 then error "first" end
          ctx:discard("run " .. runs .. " attempt " .. ctx.attempts)
        end]] },
    }
    assert.equal("run 2 attempt 1", run:handle().error)
  end)

  it("that forgets the ctx is told so, at its own line", function()
    local run = executor.start {
      config = "return { subscribe = { t = 'h' },\naround = function(next, payload)\n  local r = next(payload)\n"
        .. "return r end }",
      handlers = { h = "return function() end" },
    }
    assert.matches("^config.lua:3: next%(payload, ctx%): the ctx is missing\n", run:handle().error)
  end)

  it("of the app wraps what `tidemill call` calls, subscribed or not", function()
    local app = tidemill.app {
      database = false,
      config = [[return { around = function(next, payload, ctx) return { around = next(payload, ctx) } end }]],
      handlers = { h = "return function(payload) return payload end" },
    }
    assert.equal('{"around":[5]}', (app:must_run("call", "h", "[5]"):gsub("%s", "")))
    tidemill.close_all()
  end)

  it("that is wrong is reported with file, line and path", function()
    assert.same({
      "config.lua:2: around.name: unknown key: `around` is a function, a module's name or a list of them",
      "config.lua:2: around[2]: expected a function or a module's name, found 5",
      "config.lua:4: subscribe.t.a.around: expected a function or a module's name, found true",
      "config.lua:5: subscribe.t.b.around: module `gone` not found: looked for handlers/gone.lua and "
        .. "handlers/gone/init.lua, and in package.path and package.cpath",
      "handlers/own.lua:2: around: expected a function or a module's name, found 7",
      "handlers/shapeless.lua: `around` names it, so it must return a function; found a table",
      "handlers/broken.lua:2: no luck",
    }, problems {
      config = [[return {
  around = { "good", 5, name = "good" },
  subscribe = { t = {
    a = { handler = "good", around = true },
    b = { handler = "good", around = "gone" },
    "own",
    c = { handler = "good", around = "shapeless" },
    d = { handler = "good", around = { "broken" } },
  } } }]],
      handlers = {
        good = "return function() end",
        own = "return { handle = function() end,\n  around = 7 }",
        shapeless = "return {}",
        broken = "\nerror 'no luck'",
      },
    })
  end)

  it("is checked, but not loaded, when only the config is asked for", function()
    local run = executor.load { mode = "config",
      config = "return { around = { 'absent' }, subscribe = { t = { a = { around = 'absent' } } } }" }
    assert.equal(1, #run.manifest.lanes)
    run = executor.load { mode = "config", config = "return { around = 5 }" }
    assert.equal("config.lua:1: around: expected a function or a module's name, found 5", run.load_error)
  end)
end)

describe("options beside `handle`", function()
  after_each(executor.stop_all)

  it("give way to the subscription's, and go before the app's", function()
    local run = executor.start {
      config = [[return { max_attempts = 2, timeout_secs = 3, retry_backoff_secs = 4, retry_jitter = 0.1,
        subscribe = { t = { "m", n = { handler = "m", timeout_secs = 30, concurrency = 5 } } } }]],
      handlers = { m = [[return { handle = function() end, timeout_secs = 20, retry_backoff_secs = 40,
        concurrency = 6, _note = "x", helper = function() end, cache = {} }]] },
    }
    local m, n = run.manifest.lanes[1].options, run.manifest.lanes[2].options
    assert.same({ 2, 20, 40, 0.1, 6 },
      { m.max_attempts, m.timeout_secs, m.retry_backoff_secs, m.retry_jitter, m.concurrency })
    assert.same({ 2, 30, 40, 0.1, 5 },
      { n.max_attempts, n.timeout_secs, n.retry_backoff_secs, n.retry_jitter, n.concurrency })
  end)

  it("that are unknown or wrong are reported by file and line, unless the subscription has them", function()
    assert.same({
      "handlers/m.lua:3: concurency: unknown key, did you mean `concurrency`?",
      "handlers/m.lua:4: max_attempts: expected a whole number from 1 to 32767 (attempts), found 0",
      "handlers/m.lua:5: poll_secs: unknown key",
    }, problems {
      config = "return { subscribe = { t = { m = { timeout_secs = 5 } } } }",
      handlers = { m = [[return {
  handle = function() end,
  concurency = 3,
  max_attempts = 0,
  poll_secs = 5,
  timeout_secs = "never looked at",
}]] },
    })
  end)
end)
