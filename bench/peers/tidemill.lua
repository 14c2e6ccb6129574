#!/usr/bin/env luajit
-- Tidemill behind the protocol of the peers harness:
--
--   tidemill.lua setup | enqueue … | produce … | work …
--
-- The database is PEER_DB, the program TIDEMILL_BIN (build/release/tidemill). Publishing is the SQL
-- functions over libpq. `work` starts the real `tidemill run`; its handler counts in shared memory
-- (tally.lua), which this process reads.
--
-- The gate. The protocol wants a worker that is up and idle until it is told to go, while its
-- messages lie there already. So the adapter keeps a share lock on the row of the subscription: the
-- worker connects, prepares its statements and starts its executors, but the registration of its
-- lanes, which comes before its first claim, waits in the server for that row. At `go` the lock is
-- given up. Nothing of the worker is changed for it; the two transactions that register lanes and
-- worker are part of the time measured.

local here = (arg[0]:match "^(.*)/" or ".")
package.path = here .. "/?.lua;" .. package.path

local posix = require "posix"
local postgres = require "postgres"
local tally = require "tally"

here = posix.absolute(here)
local program = os.getenv "TIDEMILL_BIN" or here .. "/../../build/release/tidemill"
local database = os.getenv "PEER_DB"

local TOPIC = "bench.job"
local MS = 1e6
local REPORT_NS = 10 * MS    -- the protocol: not more often
local REST_NS = 100 * MS     -- how often the tally is looked at when nothing has run for a while
local BUSY_NS = 1000 * MS
local POOL_MOST = 10         -- connections of a producer, as the peers' pools have

-- ---- the protocol -------------------------------------------------------------------------------

local function say(line)
  posix.write(1, line .. "\n")
end

local function numbers(list)
  local texts = {}
  for i, number in ipairs(list) do
    texts[i] = ("%.0f"):format(number)
  end
  return "[" .. table.concat(texts, ",") .. "]"
end

local words, input = {}, ""

-- Takes in what stands in standard input. The end of it means that the runner is gone.
local function read_words()
  local text = posix.read(0)
  if not text then
    error("standard input ended", 0)
  end
  input = input .. text
  input = input:gsub("([^\n]*)\n", function(word)
    words[word] = true
    return ""
  end)
end

local function hear(word)
  while not words[word] do
    posix.readable { 0 }
    read_words()
  end
end

local DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

local function base64(bytes)
  local out = {}
  for i = 1, #bytes, 3 do
    local a, b, c = bytes:byte(i, i + 2)
    local group = a * 65536 + (b or 0) * 256 + (c or 0)
    for place = 3, 0, -1 do
      local digit = math.floor(group / 64 ^ place) % 64 + 1
      out[#out + 1] = DIGITS:sub(digit, digit)
    end
  end
  local missing = -#bytes % 3
  for i = 0, missing - 1 do
    out[#out - i] = "="
  end
  return table.concat(out)
end

local function read_options()
  local options = {}
  for i = 2, #arg, 2 do
    local name = arg[i]:match "^%-%-([%w_]+)$"
    if not name or not arg[i + 1] then
      error("options are --name value; found " .. arg[i], 0)
    end
    options[name] = tonumber(arg[i + 1]) or arg[i + 1]
  end
  return options
end

-- ---- publishing ---------------------------------------------------------------------------------

local PUBLISH = "select id from tidemill.publish($1, $2::jsonb)"
local PUBLISH_MANY = "select id from tidemill.publish_many(array[$1], $2::jsonb[])"

local function payload(id, pad)
  if pad then
    return ('{"id": %d, "pad": "%s"}'):format(id, ("x"):rep(pad))
  end
  return ('{"id": %d}'):format(id)
end

-- A jsonb[] as Postgres reads it.
local function payloads(first, count, pad)
  local list = {}
  for i = 1, count do
    list[i] = payload(first + i - 1, pad):gsub('"', '\\"')
  end
  return '{"' .. table.concat(list, '","') .. '"}'
end

-- Sends `calls` calls, each as soon as a connection is free; `second(i)` makes what call i publishes.
local function send_all(pool, calls, second)
  local next_call = 0
  local function on_answer() end
  while next_call < calls or pool:in_flight() > 0 do
    while next_call < calls and pool:send(TOPIC, second(next_call), nil) do
      next_call = next_call + 1
    end
    pool:wait(nil, on_answer)
  end
end

local commands = {}

function commands.enqueue(o)
  local n, batch, bulk = o.n, o.batch or 1000, o.mode == "bulk"
  local pool = postgres.pool(database, o.inflight or 1, bulk and PUBLISH_MANY or PUBLISH)
  say '{"ev":"ready"}'
  hear "go"
  local t0 = posix.now()
  if bulk then
    send_all(pool, math.ceil(n / batch), function(i)
      return payloads(i * batch, math.min(batch, n - i * batch), o.pad)
    end)
  else
    send_all(pool, n, function(i)
      return payload(i, o.pad)
    end)
  end
  say(('{"ev":"done","t0":%.0f,"t1":%.0f}'):format(t0, posix.now()))
  hear "exit"
end

-- On a fixed schedule: a slow answer does not push the later messages back. Those that find all
-- connections busy wait their turn, counted from when they were due.
function commands.produce(o)
  local n, every = o.n, (o.every or 10) * MS
  local pool = postgres.pool(database, POOL_MOST, PUBLISH)
  local called, answered = {}, {}
  local function on_answer(i)
    answered[i] = posix.now()
  end
  say '{"ev":"ready"}'
  hear "go"
  local start = posix.now()
  local due, sent = 0, 0 -- how many
  while sent < n or pool:in_flight() > 0 do
    local now = posix.now()
    while due < n and start + due * every <= now do
      due = due + 1
      called[due] = posix.now()
    end
    while sent < due and pool:send(TOPIC, payload(sent, o.pad), sent + 1) do
      sent = sent + 1
    end
    pool:wait(due < n and start + due * every - posix.now() or nil, on_answer)
  end
  say(('{"ev":"done","t0":%s,"t1":%s}'):format(numbers(called), numbers(answered)))
  hear "exit"
end

-- ---- the program --------------------------------------------------------------------------------

local function start(words_of_command, address)
  local argv = { "setpriv", "--pdeathsig", "TERM", program }
  for _, word in ipairs(words_of_command) do
    table.insert(argv, word)
  end
  for _, word in ipairs { "--config", here .. "/config.lua", "--database", address } do
    table.insert(argv, word)
  end
  posix.set_environment("TIDEMILL_BENCH_FOLDER", here)
  return posix.spawn(argv)
end

function commands.setup()
  local child = start({ "migrate" }, database)
  local output = {}
  repeat
    posix.readable { child.fd }
    local text = posix.read(child.fd)
    table.insert(output, text)
  until not text
  while not child:has_ended() do
    posix.readable({}, 1 * MS)
  end
  if child.code ~= 0 then
    error(("%s migrate ended with %d\n%s"):format(program, child.code, table.concat(output)), 0)
  end
  local connection = postgres.connect(database)
  connection:exec(("insert into tidemill.subscription (app, topic, subscriber) values ('bench', '%s', 'hit')")
    :format(TOPIC))
  -- From the end of the order, where the last ones are.
  say([[{"ev":"setup","tables":["tidemill.queue_message"],"remaining":"select exists (select from (]] ..
    [[select from tidemill.queue_message where processed_at is null ]] ..
    [[order by lane desc, priority desc, available_at desc, seq desc limit 1) as unfinished) as more"}]])
end

-- ---- work ---------------------------------------------------------------------------------------

local profiles = {
  fast = { executors = 1, concurrency = 1000, batch = 500 },
  default = {},
}

local KEYS = { "executors", "concurrency", "batch" }

local function apply_settings(o)
  local profile = profiles[o.profile or "fast"] or error("there is no profile " .. o.profile, 0)
  local shown = {}
  for _, key in ipairs(KEYS) do
    local value = o[key] or profile[key]
    if value then
      posix.set_environment("TIDEMILL_BENCH_" .. key:upper(), value)
      table.insert(shown, ('"%s":%d'):format(key, value))
    end
  end
  if o.sleep then
    posix.set_environment("TIDEMILL_BENCH_SLEEP_SECS", o.sleep / 1000)
  end
  return "{" .. table.concat(shown, ",") .. "}"
end

-- Closes the gate. Share locks do not exclude each other: each of several adapters has its own.
local function close_gate()
  local connection = postgres.connect(database)
  connection:exec "begin; select 1 from tidemill.subscription for share"
  return connection
end

-- All connections of the worker have one name, by which they are found.
local function worker_name()
  return ("tidemill_bench_%d"):format(posix.pid())
end

local Worker = {}
Worker.__index = Worker

local function start_worker(o)
  local self = setmetatable({ tally = tally.new(o.n), log = "" }, Worker)
  posix.set_environment("TIDEMILL_BENCH_N", o.n)
  posix.set_environment("TIDEMILL_BENCH_TALLY", self.tally.path)
  self.child = start({ "run" }, database .. (database:find "?" and "&" or "?") .. "application_name=" .. worker_name())
  return self
end

-- Takes in the worker's log and the runner's words; waits `ns` at most.
function Worker:turn(ns)
  local fds = { 0 }
  if not self.log_ended then
    fds[2] = self.child.fd
  end
  local ready = posix.readable(fds, ns)
  if ready[0] then
    read_words()
  end
  if ready[self.child.fd] then
    local text = posix.read(self.child.fd)
    self.log_ended = not text
    self.log = (self.log .. (text or "")):sub(-20000)
    for line in (text or ""):gmatch "[^\n]+" do
      if line:find "level=warn" or line:find "level=error" then
        io.stderr:write(line, "\n")
      end
    end
  end
  if self.child:has_ended() and not words.stop then
    error(("the worker ended with %d\n%s"):format(self.child.code, self.log), 0)
  end
end

function Worker:hear(word)
  while not words[word] do
    self:turn(REST_NS)
  end
end

-- Until one connection of the worker stands at the gate and no other does anything.
function Worker:wait_until_idle()
  local connection = postgres.connect(database)
  local question = ([[select coalesce(bool_or(wait_event_type = 'Lock'), false)
      and count(*) filter (where state = 'active') = 1
    from pg_stat_activity where application_name = '%s']]):format(worker_name())
  repeat
    self:turn(REPORT_NS)
  until connection:exec(question) == "t"
  connection:close()
end

-- Tells how far it is until the runner says `stop`.
function Worker:report()
  local told, ran_at = -1, posix.now()
  while not words.stop do
    local now, ran = posix.now(), self.tally:ran()
    if ran ~= told then
      told, ran_at = ran, now
      say(('{"ev":"ran","n":%d}'):format(ran))
    end
    self:turn(now - ran_at < BUSY_NS and REPORT_NS or REST_NS)
  end
end

function Worker:stop()
  self.child:signal(posix.TERM)
  while not self.child:has_ended() do
    self:turn(10 * MS)
  end
  if self.child.code ~= 0 then
    error(("the worker ended with %d after SIGTERM\n%s"):format(self.child.code, self.log), 0)
  end
end

function commands.work(o)
  local settings = apply_settings(o)
  local gate = close_gate()
  local worker = start_worker(o)
  local ok, wrong = pcall(function()
    worker:wait_until_idle()
    say(('{"ev":"ready","settings":%s}'):format(settings))
    worker:hear "go"
    gate:exec "commit"
    worker:report()
    worker:stop()
    local first, last = worker.tally:span()
    say(('{"ev":"stopped","ran":%d,"first":%.0f,"last":%.0f,"counts":"%s"%s}'):format(worker.tally:ran(), first, last,
      base64(worker.tally:counted()), o.starts and ',"starts":' .. numbers(worker.tally:started()) or ""))
    hear "exit"
  end)
  if not ok then
    worker.child:signal(posix.KILL)
    error(wrong, 0)
  end
end

-- ---- main ---------------------------------------------------------------------------------------

local command = commands[arg[1]]
if not command or not database then
  io.stderr:write "usage: PEER_DB=postgresql://… tidemill.lua setup|enqueue|produce|work [--name value …]\n"
  os.exit(2)
end
local ok, wrong = pcall(function()
  command(read_options())
end)
if not ok then
  io.stderr:write("tidemill.lua ", arg[1], ": ", tostring(wrong), "\n")
  os.exit(1)
end
