-- A minute of random faults: workers, executors, connections and the server are killed, stopped and
-- started again while messages are published and handled. Then the faults end, everything must
-- drain, and the checker proves the contract.
--
-- TIDEMILL_SWEEP_SECS is how long (60), TIDEMILL_SWEEP_SEED the seed, which is printed. The same
-- seed gives the same faults at the same times; what they hit depends on the machine.
-- TIDEMILL_SWEEP_LOGS is a folder to keep the workers' logs in.

local ffi = require "ffi"
local checker = require "spec.support.checker"
local clock = require "spec.support.clock"
local cluster = require "spec.support.cluster"
local pg = require "spec.support.pg"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"
local witness = require "spec.support.witness"

local SECS = tonumber(os.getenv "TIDEMILL_SWEEP_SECS") or 60
local RATE = 120 -- published per second
local KILL, TERM, STOP, CONT = 9, 15, 19, 18

local LOGS = os.getenv "TIDEMILL_SWEEP_LOGS"

local LEASES = { 2, 3, 3 }

-- Some publish another message, which must then be there exactly once, however often they ran.
local BODY = [[
  if payload.child then
    ctx:publish("child", { parent = payload.n })
  end
  if payload.busy then
    local till = witness.now() + payload.secs
    while witness.now() < till do end
  else
    tidemill.sleep(payload.secs)
  end
]]

-- A server that takes its time, so that faults find statements under way.
local SLOW = [[
  create function audit.linger() returns trigger language plpgsql as
    $$ begin perform pg_sleep(random() * 0.02); return null; end $$;
  create trigger lingers after update on tidemill.queue_message
    for each statement execute function audit.linger();
]]

-- ---- the scene ----------------------------------------------------------------------------------

local server, app, workers, published, windows, random
-- Which faults there were, and when, for whoever reads a failing sweep.
local told
-- The server's absence: `from`, while it lasts, and when it is to end (`till`) or has ended.
local down

-- A number from `least` to `most`.
local function between(least, most)
  return least + (most - least) * random()
end

-- A generator of our own: what busted or a support module draws must not change the faults.
local function generator(seed)
  local state = ffi.new("uint64_t", seed) * 2862933555777941757ULL + 3037000493ULL
  return function()
    state = state * 6364136223846793005ULL + 1442695040888963407ULL
    return tonumber(bit.band(bit.rshift(state, 33), 0x7fffffffULL)) / 2147483648
  end
end

local function start_worker(worker)
  local argv = { tidemill.binary, "run", "-c", worker.config, "--database", app.dsn }
  worker.starts = worker.starts + 1
  local log = LOGS and ("%s/worker%d.%d"):format(LOGS, worker.number, worker.starts)
  worker.process = process.spawn { argv = argv, cwd = app.dir, stderr = log }
  worker.start_at, worker.stopped_from, worker.ending, worker.hasty = nil, nil, nil, nil
end

local function is_running(worker)
  return worker.process ~= nil and not worker.process:poll()
end

-- Free for a fault: it runs, and none is under way.
local function is_free(worker)
  return is_running(worker) and not worker.stopped_from and not worker.ending
end

-- ---- publishing ---------------------------------------------------------------------------------

-- One connection that is made again when it is lost; nil while there is none.
local function connection()
  if not published.db then
    local ok, db = pcall(pg.connect, server:dsn())
    published.db = ok and db or nil
  end
  return published.db
end

-- Most are quick; a few outlast a lease, so that some are at work when it ends.
local function draw_payload(n)
  local kind = random()
  local secs = kind < 0.01 and between(2, 5) or kind < 0.1 and between(0.2, 1) or between(0.005, 0.15)
  local busy, child = kind > 0.95, random() < 0.2
  return ('{"n": %d, "secs": %.4f, "busy": %s, "child": %s}'):format(
    n, busy and math.min(secs, 0.03) or secs, busy, child)
end

local function publish_one()
  local n = published.count + 1
  local payload = draw_payload(n)
  local db = connection()
  if not db then
    return
  end
  published.count = n
  local ok, id = pcall(db.value, db, "select (tidemill.publish('t', $1::jsonb)).id", payload)
  if ok then
    table.insert(published.ids, id)
  else
    -- It may have committed all the same.
    published.unknown[n] = true
    db:close()
    published.db = nil
  end
end

-- ---- faults -------------------------------------------------------------------------------------

local function any_worker()
  local list = {}
  for _, worker in ipairs(workers) do
    if is_free(worker) then
      table.insert(list, worker)
    end
  end
  return list[1 + math.floor(random() * #list)]
end

-- Each takes the time in the sweep and returns what it hit, or nil when there was nothing to hit.
local faults = {}

function faults.kill_runtime(now)
  local worker = any_worker()
  if worker then
    worker.process:kill "KILL"
    worker.start_at = now + between(0, 1.5)
    return worker.process.pid
  end
end

-- Whether it came as far as having executors: before that its one child reads the configuration.
local function is_ready(worker)
  return worker.process:stderr():find("event=ready", 1, true) ~= nil
end

function faults.kill_executor()
  local worker = any_worker()
  local list = worker and is_ready(worker) and process.children(worker.process.pid) or {}
  local executor = list[1 + math.floor(random() * #list)]
  return executor and witness.signal(executor.pid, KILL) and executor.pid
end

local function stop_for(now, secs)
  local worker = any_worker()
  if worker then
    worker.stopped_from, worker.continue_at = clock.now(), now + secs
    worker.process:kill(STOP)
    return ("%d for %.3f s"):format(worker.process.pid, secs)
  end
end

function faults.stop_briefly(now)
  return stop_for(now, between(0.1, 0.7))
end

function faults.stop_beyond_lease(now)
  return stop_for(now, between(3.2, 5))
end

function faults.restart_runtime()
  local worker = any_worker()
  if worker then
    worker.ending = clock.now()
    worker.process:kill "TERM"
    return worker.process.pid
  end
end

function faults.end_hastily()
  local worker = any_worker()
  if worker then
    worker.ending, worker.hasty = clock.now(), true
    worker.process:kill "TERM"
    clock.sleep(between(0, 0.1))
    worker.process:kill "TERM"
    return worker.process.pid
  end
end

-- Any of them, the publisher's too.
function faults.cut_connection()
  local db = connection()
  local ok, cut = pcall(function()
    return db and db:query([[select application_name, pg_terminate_backend(pid) from pg_stat_activity
      where backend_type = 'client backend' order by random() limit 1]])[1].application_name
  end)
  return ok and cut or db and "its own"
end

function faults.crash_server(now)
  if not down.from then
    local secs = random() < 0.3 and between(2, 4) or between(0, 1)
    down.from, down.till = clock.now(), now + secs
    server:stop "immediate"
    return ("for %.3f s"):format(secs)
  end
end

-- How often, in parts of their sum.
local WEIGHTS = {
  { "kill_runtime", 6 }, { "kill_executor", 8 }, { "stop_briefly", 3 }, { "stop_beyond_lease", 3 },
  { "restart_runtime", 4 }, { "end_hastily", 2 }, { "cut_connection", 6 }, { "crash_server", 2 },
}

local function draw_fault()
  local sum = 0
  for _, weight in ipairs(WEIGHTS) do
    sum = sum + weight[2]
  end
  local at = random() * sum
  for _, weight in ipairs(WEIGHTS) do
    at = at - weight[2]
    if at < 0 then
      return weight[1]
    end
  end
end

-- ---- their ends ---------------------------------------------------------------------------------

local function continue_worker(worker)
  worker.process:kill(CONT)
  table.insert(windows, { worker = worker.process.pid, from = worker.stopped_from, to = clock.now() })
  worker.stopped_from = nil
end

-- An orderly stop ends with 0, a hasty one with 3 or, when nothing was left to do, with 0. With 1
-- when there was no server to write to; and before the program minds signals, the signal ends it.
local function check_end(worker)
  local code, signal = worker.process.code, worker.process.signal
  if worker.ending then
    local unreached = down.from or (down.ended or 0) > worker.ending
    local expected = code == 0 or code == 3 and worker.hasty or code == 1 and unreached
      or signal == TERM and not is_ready(worker)
    assert(expected,
      ("a stop ended with exit code %s, signal %s\n%s"):format(code, signal, worker.process:stderr()))
    worker.start_at = 0
  elseif not worker.start_at then
    error(("a worker ended by itself: exit code %s, signal %s\n%s"):format(code, signal, worker.process:stderr()), 0)
  end
  worker.process = nil
end

local function look_after_server(now)
  if down.from and now >= down.till then
    server:start()
    down.ended = clock.now()
    table.insert(windows, { from = down.from, to = down.ended })
    down.from = nil
  end
end

local function look_after_workers(now)
  for _, worker in ipairs(workers) do
    if worker.stopped_from and now >= worker.continue_at then
      continue_worker(worker)
    end
    if worker.process and worker.process:poll() then
      check_end(worker)
    end
    if not worker.process and now >= worker.start_at then
      start_worker(worker)
    end
  end
end

-- ---- the sweep ----------------------------------------------------------------------------------

local function sweep(secs)
  local began = clock.now()
  local next_fault = 1
  while true do
    local now = clock.now() - began
    if now >= secs then
      return now
    end
    while published.count < now * RATE and connection() do
      publish_one()
    end
    if now >= next_fault then
      next_fault = next_fault + 1
      local name = next_fault == math.ceil(secs / 3) and "crash_server" or draw_fault()
      local hit = faults[name](now)
      if hit then
        table.insert(told, ("%.3f %s %s"):format(clock.now(), name, hit))
      end
    end
    look_after_server(now)
    look_after_workers(now)
    clock.sleep(0.005)
  end
end

-- No more faults: what is stopped goes on, what is down comes back.
local function recover(now)
  for _, worker in ipairs(workers) do
    worker.continue_at, worker.start_at = 0, worker.start_at and 0
  end
  down.till = 0
  clock.wait_until(function()
    look_after_server(now)
    look_after_workers(now)
    return connection() ~= nil
  end, 60, "the server is back")
end

local function drained()
  local db = connection()
  local ok, left = pcall(function()
    return db:value "select count(*) from tidemill.queue_message where processed_at is null"
  end)
  if not ok and db then
    db:close()
    published.db = nil
  end
  return ok and left == "0"
end

local function describe_workers()
  local lines = {}
  for i, worker in ipairs(workers) do
    lines[i] = worker.process and worker.process:stderr():sub(-3000) or "(not running)"
  end
  return table.concat(lines, "\n")
end

local function stop_workers()
  for _, worker in ipairs(workers) do
    worker.process:kill "TERM"
  end
  for _, worker in ipairs(workers) do
    assert.same({ 0 }, { worker.process:wait(60) }, worker.process:stderr():sub(-3000))
  end
end

-- What a handler published is there exactly when its message is done, and once.
local function assert_children(db)
  local odd = db:query [[
    select coalesce(p.n, c.n) as n, coalesce(p.wanted, false) as wanted, coalesce(c.count, 0) as count
    from (select payload ->> 'n' as n, (payload -> 'child')::boolean as wanted
      from tidemill.queue_message where topic = 't') as p
    full join (select payload ->> 'parent' as n, count(*) from tidemill.queue_message
      where topic = 'child' group by payload ->> 'parent') as c on c.n = p.n
    where coalesce(c.count, 0) <> coalesce(p.wanted, false)::integer]]
  assert.same({}, { unpack(odd) })
end

local function summary(figures, seed)
  local counts, kinds = {}, {}
  for _, line in ipairs(told) do
    local name = line:match "^%S+ ([%l_]+)"
    counts[name] = (counts[name] or 0) + 1
  end
  for name, count in pairs(counts) do
    table.insert(kinds, ("%s %d"):format(name, count))
  end
  table.sort(kinds)
  return ("sweep of seed %d: %d messages, %d runs, %d overlaps (all excused), %d refunds, %d reclaims, "
    .. "at most %d attempts; %s"):format(seed, figures.messages, figures.runs, figures.overlaps, figures.refunds,
      figures.reclaims, figures.attempts, table.concat(kinds, ", "))
end

describe("a sweep of random faults", function()
  before_each(function()
    published = { ids = {}, unknown = {}, count = 0 }
    windows, told, workers, down = {}, {}, {}, {}
    server = cluster.new()
    app = witness.app {
      server = server, body = BODY, handlers = { child = "" },
      config = {
        subscribe = { t = "work", child = "child" },
        executors = 2, concurrency = 16, batch = 20, poll_secs = 2, shutdown_secs = 5,
      },
    }
    app.db:exec(SLOW)
    app.db:close()
    local config = io.open(app.config_path):read "*a"
    for i, lease in ipairs(LEASES) do
      local name = ("worker%d.lua"):format(i)
      app:write(name, (config:gsub('%["lease_secs"%] = %d+', '["lease_secs"] = ' .. lease)))
      workers[i] = { number = i, config = app.dir .. "/" .. name, start_at = 0, starts = 0 }
    end
  end)

  after_each(function()
    if published.db then
      published.db:close()
    end
    for _, worker in ipairs(workers) do
      if worker.process then
        worker.process:destroy()
      end
    end
    server:close()
    tidemill.close_all()
  end)

  it("loses nothing, and runs nothing twice at a time", function()
    local seed = tonumber(os.getenv "TIDEMILL_SWEEP_SEED") or os.time() % 1000000
    random = generator(seed)
    print(("TIDEMILL_SWEEP_SEED=%d TIDEMILL_SWEEP_SECS=%d"):format(seed, SECS))
    recover(sweep(SECS))
    clock.wait_until(function()
      look_after_workers(math.huge)
      return drained()
    end, 90, function()
      return "all messages are finished\n" .. describe_workers()
    end)
    look_after_workers(math.huge)
    stop_workers()
    local db = connection()
    local ok, figures = pcall(checker.prove, {
      committed = published.ids,
      rows = db:query "select *, payload ->> 'n' as n, payload ->> 'parent' as parent from tidemill.queue_message",
      runs = witness.runs(app), steps = witness.steps(db), windows = windows,
      lease_secs = math.min(unpack(LEASES)), max_attempts = app.max_attempts,
      is_unknown = function(row)
        return published.unknown[tonumber(row.n)] or row.parent
      end,
    })
    assert(ok, tostring(figures) .. "\n" .. table.concat(told, "\n"))
    assert_children(db)
    print(summary(figures, seed))
    assert.is_true(#published.ids > SECS * RATE / 3, #published.ids .. " messages are too few")
    assert.equal("0", db:value "select count(*) from tidemill.worker where lease_until > now()")
  end)
end)
