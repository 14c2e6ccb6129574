-- What the worker's log says of messages: who published to nobody, when a retry comes, what to do about a
-- dead letter, how an executor died.

local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local function lines_of(worker, event)
  local lines = {}
  for line in worker:stderr():gmatch "[^\n]+" do
    if line:find(" event=" .. event .. " ", 1, true) then
      table.insert(lines, line)
    end
  end
  return lines
end

local function finish(app, count)
  app:wait_until(function()
    return app.db:value("select count(*) from tidemill.queue_message where topic = 'a'"
      .. " and status in ('done', 'failed')") == tostring(count)
  end, 30, "the messages of the spec are finished")
end

describe("the log", function()
  -- A service manager, a container and a shell's `|` all give the program a pipe.
  for _, words in ipairs { { "drain" }, { "call", "h" } } do
    it("tells what a handler says in `" .. words[1] .. "` when it goes to a pipe, too", function()
      local app = tidemill.app {
        config = { executors = 1, subscribe = { a = "h" } },
        handlers = {
          h = [[
            return function(payload, ctx)
              print "printed"
              ctx:log "logged"
              io.stderr:write "written"
            end]],
        },
      }
      app:must_run "drain" -- declares the subscription
      app.db:value "select tidemill.publish('a')"
      local argv = { "sh", "-c", '"$@" 2>&1 | cat', "sh", tidemill.binary, unpack(words) }
      for _, word in ipairs { "-c", app.config_path, "--database", app.dsn } do
        table.insert(argv, word)
      end
      argv.cwd = app.dir
      local output = process.run(argv).stdout
      for _, text in ipairs { "printed", "logged", "written" } do
        assert.is_truthy(output:find(text, 1, true), output)
      end
    end)
  end
end)

describe("the log at a terminal", function()
  it("is laid out for reading, and cannot command the terminal", function()
    local app = tidemill.app {
      config = { executors = 1, max_attempts = 1, subscribe = { a = "h" } },
      handlers = {
        h = [[
          return function(payload, ctx)
            ctx:log("packed \27[2J", { order = 7, note = "two\nlines" })
            error "no stock"
          end]],
      },
    }
    app:must_run "drain"
    local id = app.db:value "select id from tidemill.publish('a')"
    -- A terminal of its own, which nobody looks at.
    local command = ("'%s' drain -c '%s' --database \"%s\""):format(tidemill.binary, app.config_path, app.dsn)
    local output = process.run { "script", "-qec", command, "/dev/null", cwd = app.dir }.stdout:gsub("\r", "")
    id = id:gsub("%-", "%%-")
    assert.matches("\n%d%d:%d%d:%d%d packed \\u001b%[2J topic=a subscriber=h attempt=1 order=7 message_id=" .. id
      .. "\n    note: two\n    lines\n", output)
    assert.matches("\n%d%d:%d%d:%d%d error message_failed topic=a subscriber=h [^\n]* message_id=" .. id
      .. "\n    error: [^\n]*h.lua:3: no stock\n    stack traceback:\n", output)
    assert.is_nil(output:find("time=", 1, true))
  end)
end)

describe("the log of a worker", function()
  it("names who published to nobody, a topic once, and no raw notice", function()
    local app = tidemill.app {
      config = { subscribe = { a = "h" } },
      handlers = {
        h = [[
          local tidemill = require "tidemill"
          return function(payload, ctx)
            ctx:publish("lost.one")
            ctx:publish("lost.two")
            ctx:publish("lost.one")
            assert(tidemill.publish("lost.now").delivered == 0)
          end]],
      },
    }
    local worker = app:start()
    for _ = 1, 5 do
      app:must_run("publish", "a", "{}")
    end
    finish(app, 5)
    app:stop()
    local seen = {}
    for _, line in ipairs(lines_of(worker, "nobody_subscribes")) do
      local published, id = line:match("^time=%S+ level=warn event=nobody_subscribes published_topic=(%S+) "
        .. "message_id=(%S+) topic=a subscriber=h skipped=0$")
      assert(published, line)
      assert.equal("1", app.db:value("select count(*) from tidemill.queue_message where topic = 'a' and id = $1::uuid",
        id))
      table.insert(seen, published)
    end
    table.sort(seen)
    assert.same({ "lost.now", "lost.one", "lost.two" }, seen)
    assert.same({}, lines_of(worker, "server_notice"))
    assert.equal("20", app.db:value "select count(*) from tidemill.queue_message where topic like 'lost.%'")
  end)

  it("has nothing to say of a duplicate", function()
    local app = tidemill.app {
      config = { subscribe = { a = "h", b = "slow" } },
      handlers = {
        h = [[return function(_, ctx)
          require("tidemill").publish("b", {}, { dedupe_key = "k", delay_secs = 3600 })
          ctx:publish("b", {}, { dedupe_key = "k" })
        end]],
        slow = "return function() end",
      },
    }
    local worker = app:start()
    app:must_run("publish", "a", "{}")
    app:must_run("publish", "a", "{}")
    finish(app, 2)
    app:stop()
    assert.same({}, lines_of(worker, "nobody_subscribes"))
  end)

  it("says what was done and how long it took, when it is asked for that much", function()
    local app = tidemill.app {
      config = { subscribe = { a = "h" } },
      handlers = { h = 'return function(_, ctx) require "tidemill".sleep(0.2) ctx:log "slept" end' },
    }
    local worker = app:start { "--log-level", "debug" }
    app:must_run("publish", "a", "{}")
    finish(app, 1)
    app:stop()
    local secs = lines_of(worker, "message_done")[1]:match " topic=a subscriber=h attempt=1 max_attempts=5 secs=(%S+)$"
    assert.is_true(tonumber(secs) >= 0.2)
  end)

  it("says when a retry comes and what to do about a dead letter", function()
    local app = tidemill.app {
      config = { subscribe = { a = { h = { handler = "h", max_attempts = 2 } } } },
      handlers = {
        h = [[return function(_, ctx)
          if ctx.attempts == 1 then ctx:retry(0.25, "busy") end
          error("for good", 0)
        end]],
      },
    }
    local worker = app:start()
    app:must_run("publish", "a", "{}")
    finish(app, 1)
    app:stop()
    assert.matches(" subscriber=h attempt=1 max_attempts=2 secs=%d[%d.e-]* retry_in_secs=0%.25 error=busy$",
      lines_of(worker, "message_retried")[1])
    local failed = lines_of(worker, "message_failed")[1]
    local id = failed:match "message_id=(%S+)"
    assert.truthy(failed:find(("hint=\"a dead letter: `tidemill failed show %s`, then `tidemill failed retry %s`\" "
      .. "error=\"for good"):format(id, id), 1, true), failed)
    -- The commands are there.
    assert.truthy(app:must_run("failed", "show", id):find("for good", 1, true))
    app:must_run("failed", "retry", id)
  end)

  it("says by which signal an executor died, or with which code it ended", function()
    for body, expected in pairs {
      ['require("ffi").C.raise(9)'] = " signal=9 deliveries=1$",
      ['require("ffi").C._exit(3)'] = " exit_code=3 deliveries=1$",
    } do
      local app = tidemill.app {
        config = { executors = 1, max_attempts = 1, subscribe = { a = "h" } },
        handlers = {
          h = ('require("ffi").cdef "int raise(int); void _exit(int);"\nreturn function() %s end'):format(body),
        },
      }
      local worker = app:start()
      app:must_run("publish", "a", "{}")
      finish(app, 1)
      app:stop()
      local lines = lines_of(worker, "executor_died")
      assert.equal(1, #lines)
      assert.matches(expected, lines[1])
      assert.is_nil(lines[1]:find(expected:find "signal" and "exit_code" or "signal=", 1, true), lines[1])
      app:close()
    end
  end)
end)
