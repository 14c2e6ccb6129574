-- A hundred handlers that do their worst, among others that do their work, in a real worker: the runtime
-- lives, each is blamed for its own doing and nobody for another's, and nothing is left behind.
--
-- How often a message may be started: as often as `attempts` says, and once more for each time another's
-- crash (or, while it waited, its own) took its executor, which the ledger counts in `crashes`.

local hostile = require "spec.support.hostile"
local journal = require "spec.support.journal"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

local ATTEMPTS = 2
local GOOD = 150 -- of each kind, per group
local LINES = 20 -- of the log, for each message of a script

-- A sanitizer needs much memory itself, catches the signals that are meant to end a process, and sees what is
-- written where nothing belongs before the kernel does. An exit in the middle of it all is full of leaks to it, which
-- it tells by an exit code of its own.
local SANITIZER = os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS"
if SANITIZER then
  for _, group in ipairs(hostile) do
    for i = #group.scripts, 1, -1 do
      local script = group.scripts[i]
      if script.memory or script[1] == "overwrites_its_heap" then
        table.remove(group.scripts, i)
      elseif script[1] == "exits_in_c" then
        script[3] = script[3]:match "^.*exit code "
      end
    end
  end
end

-- What a script finds; it keeps what it needs itself, since a script may break the library.
local WITNESS = [[
local open, assert, clock, format = io.open, assert, os.clock, string.format
local log = assert(open("%s/runs", "a"))
log:setvbuf "no"
local write = log.write
local witness = {}
function witness.begin(ctx)
  assert(write(log, format("begin %%s %%s %%d 1\n", ctx.message_id, ctx.subscriber, ctx.attempts)))
end
function witness.spin(secs)
  local till = clock() + secs
  while clock() < till do end
end
return witness
]]

local HANDLER = [[
local tidemill = require "tidemill"
local ffi = require "ffi"
local witness = require "witness"
local spin = witness.spin
return function(payload, ctx)
  witness.begin(ctx);
  %s
end
]]

local function start(group)
  local subscribe = {
    good = { quick = { timeout_secs = 60 }, patient = { timeout_secs = 60 } },
  }
  local app = tidemill.app {}
  app:write_handler("witness", WITNESS:format(app.dir))
  app:write_handler("quick", HANDLER:format [[
    assert(("%d"):format(5):rep(2) == "55" and type(next({ 1 })) == "number")
    ctx:publish("nobody.asked", { text = table.concat({ "a", "b" }, ",") })]])
  app:write_handler("patient", HANDLER:format [[
    tidemill.sleep(0.2)
    assert(tidemill.json.encode { 1 } == "[1]" and require "tidemill" == tidemill)
    assert(pcall(error) == false and os.time() > 0 and jit.status())
    if payload.n % 10 == 0 then collectgarbage() end]])
  for _, script in ipairs(group.scripts) do
    subscribe["bad." .. script[1]] = script[1]
    app:write_handler(script[1], HANDLER:format(script[2]))
  end
  app:write_config {
    executors = 4, concurrency = 4, poll_secs = 1, subscribe = subscribe, shutdown_secs = 10,
    timeout_secs = 2, stall_secs = 2, kill_grace_secs = 0.3, max_memory_mb = SANITIZER and 0 or 200,
    max_attempts = ATTEMPTS, retry_backoff_secs = 0,
  }
  local sanitizer = SANITIZER and SANITIZER .. ":handle_segv=0:handle_abort=0:handle_sigfpe=0"
  return app, app:start { env = { ASAN_OPTIONS = sanitizer or false }, stdout = "/dev/null" }
end

local function publish_good(app, count)
  app.db:query([[select count(*) from tidemill.publish_many(array['good'],
    array(select jsonb_build_object('n', n) from generate_series(1, $1::int) as n))]], count)
end

-- Scripts among good messages, in parts, so that each meets others.
local function publish(app, group)
  for i, script in ipairs(group.scripts) do
    journal.publish(app, "bad." .. script[1])
    if i % 5 == 0 then
      publish_good(app, math.floor(GOOD * 5 / #group.scripts))
    end
  end
  publish_good(app, GOOD)
end

local function says_one_of(error, expected)
  for _, text in ipairs(type(expected) == "table" and expected or { expected }) do
    if error:find(text, 1, true) then
      return true
    end
  end
  return false
end

-- What is wrong with how a script's message ended, as text, or nil.
local function complaint(script, row, starts)
  local name, expected = script[1], script[3]
  local status = script.discarded and "discarded" or expected and "failed" or "done"
  local attempts, crashes = tonumber(row.attempts), tonumber(row.crashes)
  if row.status ~= status then
    return ("%s is %s, not %s: %s"):format(name, row.status, status, row.error)
  elseif attempts ~= (status == "failed" and ATTEMPTS or 1) then
    return ("%s was counted %d attempts: %s"):format(name, attempts, row.error)
  elseif starts < attempts or starts > attempts + crashes then
    return ("%s was started %d times, %d attempts, %d crashes"):format(name, starts, attempts, crashes)
  elseif expected and not says_one_of(row.error, expected) then
    return ("%s has the error %q"):format(name, row.error:sub(1, 300))
  end
end

local function complaints(app, group)
  local starts, list, rows = {}, {}, {}
  for _, run in ipairs(journal.begun(app)) do
    starts[run.id] = (starts[run.id] or 0) + 1
  end
  for _, row in ipairs(app:ledger "topic like 'bad.%'") do
    rows[row.topic] = row
  end
  for _, script in ipairs(group.scripts) do
    local row = rows["bad." .. script[1]]
    list[#list + 1] = complaint(script, row, starts[row.id] or 0)
  end
  for _, row in ipairs(app:ledger "topic = 'good'") do
    local started, crashes = starts[row.id] or 0, tonumber(row.crashes)
    if row.status ~= "done" or row.attempts ~= "1" or started < 1 or started > 1 + crashes then
      table.insert(list, ("%s %s is %s: %d starts, %s attempts, %d crashes: %s"):format(row.subscriber, row.payload,
        row.status, started, row.attempts, crashes, row.error))
    end
  end
  return list
end

describe("among the good, handlers that", function()
  after_each(tidemill.close_all)

  local scripts = 0
  for _, group in ipairs(hostile) do
    scripts = scripts + #group.scripts
    it(group.title .. " cost nobody else anything", function()
      local app, worker = start(group)
      publish(app, group)
      journal.wait_until_finished(app, 150)
      local good = app:ledger "topic = 'good'"
      assert.is_true(#good >= 2 * GOOD)
      assert.same({}, complaints(app, group))
      -- The runtime lives, ends in order, and has nothing left; close_all looks for strays.
      app:stop()
      local _, lines = worker:stderr():gsub("\n", "")
      assert.is_true(lines < 200 + LINES * #group.scripts, lines .. " lines of log")
      assert.is_nil(worker:stderr():find "lua_panic")
    end)
  end

  it("are a hundred", function()
    assert.is_true(scripts >= 100)
  end)
end)

describe("a handler that floods an output nobody reads", function()
  after_each(tidemill.close_all)

  -- The worker shares both outputs with its executors.
  for _, output in ipairs { "stdout", "stderr" } do
    it("is held up by it alone: " .. output, function()
      local app = tidemill.app {
        config = { executors = 2, poll_secs = 1, subscribe = { flood = "flood", t = "work" }, timeout_secs = 2,
          stall_secs = 2, kill_grace_secs = 0.3, max_attempts = 1 },
        handlers = {
          flood = ("return function() while true do io.%s:write(('x'):rep(1e5)) end end"):format(output),
          work = "return function() end",
        },
      }
      -- A pipe with a reader that never reads.
      process.run { "mkfifo", app.dir .. "/output" }
      app:must_run "migrate"
      app:spawn { "run", [output] = app.dir .. "/output" }
      app:wait_until(function()
        return app.db:value "select count(*) from tidemill.worker" == "1"
      end, 30, "the worker is there")
      local flood = journal.publish(app, "flood")
      for _ = 1, 20 do
        journal.wait_for_status(app, journal.publish(app, "t"), "done")
      end
      assert.truthy(journal.wait_for_status(app, flood, "failed").error:find("the processor", 1, true))
      app:stop()
    end)
  end
end)
