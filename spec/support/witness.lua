-- Apps under faults, judged from outside: what handlers did is told by themselves, what became of
-- the rows by triggers. Neither believes the program. checker.lua joins the two.
--
-- Each run of a handler appends a line when it begins and one when it returns, to a file in the
-- app's folder that outlives every process:
--
--   begin ID ATTEMPT RUN EXECUTOR WORKER AT SLOT…
--   end   ID ATTEMPT RUN EXECUTOR WORKER AT
--
-- RUN is unique, EXECUTOR and WORKER are pids, AT is monotonic. From its begin to its end, or to
-- the death of its process, a run holds a lock in one of its message's slots, which the kernel
-- keeps. SLOT… are those in which other runs of the message had theirs.

local ffi = require "ffi"
local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

if not pcall(ffi.typeof, "struct spec_witness_declared") then
  ffi.cdef [[
    struct spec_witness_declared { int unused; };
    int spec_witness_kill(int pid, int signal) __asm__("kill");
  ]]
end

local witness = {}

-- What is found by `require "witness"` in a handler.
local MODULE = [[
local ffi = require "ffi"
local tidemill = require "tidemill"

ffi.cdef [=[
  struct witness_lock { short type, whence; long start, len; int pid; };
  struct witness_time { long secs, nsecs; };
  int witness_getpid(void) __asm__("getpid");
  int witness_getppid(void) __asm__("getppid");
  int witness_open(const char *path, int flags, ...) __asm__("open");
  int witness_close(int fd) __asm__("close");
  int witness_fcntl(int fd, int command, ...) __asm__("fcntl");
  long witness_write(int fd, const void *bytes, size_t len) __asm__("write");
  int witness_clock_gettime(int clock, struct witness_time *at) __asm__("clock_gettime");
]=]

local C = ffi.C
local O_WRONLY, O_CREAT, O_APPEND, O_CLOEXEC = 1, 0x40, 0x400, 0x80000
local F_OFD_GETLK, F_OFD_SETLK, F_WRLCK, F_UNLCK, CLOCK_MONOTONIC = 36, 37, 1, 2, 1
local SLOTS = 4096

local witness = { pid = C.witness_getpid(), worker = C.witness_getppid() }

local function open(path, flags)
  local fd = C.witness_open(path, bit.bor(flags, O_WRONLY, O_CREAT, O_CLOEXEC), ffi.cast("int", 384))
  assert(fd >= 0, "cannot open a file of the witness")
  return fd
end

local runs = open("runs", O_APPEND)

-- Seconds, monotonic.
function witness.now()
  local at = ffi.new "struct witness_time"
  C.witness_clock_gettime(CLOCK_MONOTONIC, at)
  return tonumber(at.secs) + tonumber(at.nsecs) / 1e9
end

-- Waits until the spec makes the file `name`; others run meanwhile.
function witness.wait_for(name)
  while true do
    local file = io.open(name)
    if file then
      return file:close()
    end
    tidemill.sleep(0.01)
  end
end

-- Sleeps for longer than any spec lasts, unless the file `name` is there.
function witness.sleep_unless(name)
  local file = io.open(name)
  if not file then
    return tidemill.sleep(3600)
  end
  file:close()
end

-- Holds the processor until the spec makes the file `name`.
function witness.hold_until(name)
  while true do
    local file = io.open(name)
    if file then
      return file:close()
    end
  end
end

-- Each message has SLOTS bytes of the file `locks`, far beyond its end; a run takes one. The lock
-- belongs to the descriptor: the kernel drops it when the run closes it or its process is gone.
-- Returns the descriptor, and the slots that others have.
local function lock(id, number)
  local digits = id:gsub("-", ""):sub(-12)
  local base = (tonumber(digits:sub(1, 4), 16) * 0x100000000LL + tonumber(digits:sub(5), 16)) * SLOTS
  local fd = open("locks", 0)
  local range = ffi.new("struct witness_lock", { type = F_WRLCK, len = 1 })
  range.start = base + (witness.pid * 64 + number) % SLOTS
  assert(C.witness_fcntl(fd, F_OFD_SETLK, range) == 0, "a slot of the witness is taken")
  local others, from = {}, 0
  while from < SLOTS do
    local found = ffi.new("struct witness_lock", { type = F_WRLCK, len = SLOTS - from })
    found.start = base + from
    assert(C.witness_fcntl(fd, F_OFD_GETLK, found) == 0)
    if found.type == F_UNLCK then
      break
    end
    from = tonumber(found.start - base)
    table.insert(others, " " .. from)
    from = from + 1
  end
  return fd, table.concat(others)
end

local last = 0

local function tell(what, ctx, run, more)
  local line = ("%s %s %d %s %d %d %.6f%s\n"):format(
    what, ctx.message_id, ctx.attempts, run, witness.pid, witness.worker, witness.now(), more)
  assert(C.witness_write(runs, line, #line) == #line)
end

function witness.recorded(handler)
  return function(payload, ctx)
    last = last + 1
    local run = witness.pid .. "." .. last
    local fd, others = lock(ctx.message_id, last)
    tell("begin", ctx, run, others)
    handler(payload, ctx)
    tell("end", ctx, run, "")
    C.witness_close(fd)
  end
end

return witness
]]

local HANDLER = [[
local tidemill = require "tidemill"
local witness = require "witness"
return witness.recorded(function(payload, ctx)
%s
end)
]]

-- Every change of a message's state, as a row of its own that commits with it.
local AUDIT = [[
create schema audit;
create table audit.step (
  n bigint generated always as identity primary key,
  id uuid not null, was text, became text, attempts_were integer, attempts integer,
  claimed_by text, error text, at timestamptz not null default clock_timestamp());
create function audit.note() returns trigger language plpgsql as $$
begin
  insert into audit.step (id, was, became, attempts_were, attempts, claimed_by, error)
  values (coalesce(new.id, old.id), old.status, new.status, old.attempts, new.attempts,
    coalesce(new.claimed_by, old.claimed_by), new.error);
  return null;
end $$;
create trigger noted after insert or delete or update of status, attempts, claimed_by
  on %s for each row execute function audit.note();
]]

local CONFIG = {
  executors = 1, lease_secs = 1, poll_secs = 3600, max_attempts = 50, retry_backoff_secs = 0,
  subscribe = { t = "work" },
}

-- An app whose handler `work`, on topic `t`, has the given body, a function of (payload, ctx) that
-- finds `tidemill` and `witness`. `handlers` are the bodies of further ones. Nothing runs yet, but
-- the ledger is there, with the lane of `work`. `server`: a cluster to use instead of the run's.
function witness.app(options)
  local config = {}
  for _, from in ipairs { CONFIG, options.config or {} } do
    for key, value in pairs(from) do
      config[key] = value
    end
  end
  local app
  if options.server then
    app = tidemill.app { config = config, database = false }
    app.dsn = options.server:dsn()
    app.db = app:connect()
  else
    app = tidemill.app { config = config }
  end
  app.max_attempts = config.max_attempts
  app:write_handler("witness", MODULE)
  app:write_handler("work", HANDLER:format(options.body or ""))
  for name, body in pairs(options.handlers or {}) do
    app:write_handler(name, HANDLER:format(body))
  end
  app:must_run "migrate"
  app.db:exec(AUDIT:format(app:ledger_name()))
  app.db:exec "insert into tidemill.subscription (app, topic, subscriber) values ('app', 't', 'work')"
  return app
end

-- Publishes `count` messages, one by one, with payload {"n": 1} and so on. Returns their ids.
function witness.publish(app, count)
  local ids = {}
  for n = 1, count do
    ids[n] = app.db:value("select (tidemill.publish('t', jsonb_build_object('n', $1::int))).id", n)
  end
  return ids
end

local SLOTS = 4096

-- All runs, in the order of their begin: { id, attempt, run, executor, worker, began, held, ended }.
-- `ended` is nil when the handler did not return; `held` has the earlier runs of its message that
-- were under way, as far as locks tell: their `run` → true.
function witness.runs(app)
  local ok, text = pcall(folder.read, app.dir .. "/runs")
  local list, by_name, by_slot = {}, {}, {}
  for line in (ok and text or ""):gmatch "[^\n]+" do
    local what, id, attempt, name, executor, worker, at, slots =
      line:match "^(%l+) (%S+) (%d+) (%S+) (%d+) (%d+) (%S+)(.*)$"
    if what == "begin" then
      local run = {
        id = id, attempt = tonumber(attempt), run = name, executor = tonumber(executor), worker = tonumber(worker),
        began = tonumber(at), held = {},
      }
      by_slot[id] = by_slot[id] or {}
      for slot in slots:gmatch "%d+" do
        local holder = by_slot[id][tonumber(slot)]
        if holder then
          run.held[holder] = true
        end
      end
      by_slot[id][(run.executor * 64 + tonumber(name:match "%d+$")) % SLOTS] = name
      by_name[name] = run
      table.insert(list, run)
    elseif what == "end" then
      local run = by_name[name]
      run.ended = tonumber(at)
    else
      error("a line of the witness cannot be read: " .. line)
    end
  end
  return list
end

-- How many runs have begun, or returned.
function witness.count(app, ended)
  local count = 0
  for _, run in ipairs(witness.runs(app)) do
    if not ended or run.ended then
      count = count + 1
    end
  end
  return count
end

-- Waits until `count` runs have begun.
function witness.wait_until_begun(app, count)
  app:wait_until(function()
    return witness.count(app) >= count
  end, 60, ("%d runs have begun"):format(count))
end

-- Waits until no message waits or runs.
function witness.wait_until_finished(app, secs)
  app:wait_until(function()
    return not app.db:value "select 1 from tidemill.queue_message where processed_at is null limit 1"
  end, secs or 60, "all messages are finished")
end

-- What to add to a monotonic time to get the server's.
local function server_offset(db)
  local best, offset = math.huge, nil
  for _ = 1, 5 do
    local before = clock.now()
    local server = tonumber(db:value "select extract(epoch from clock_timestamp())")
    local after = clock.now()
    if after - before < best then
      best, offset = after - before, server - (before + after) / 2
    end
  end
  return offset
end

-- Every state each message went through, in order: id → list of { was, became, attempts_were,
-- attempts, claimed_by, error, at }, `at` on the clock of the runs.
function witness.steps(db)
  local offset = server_offset(db)
  local steps = {}
  local rows = db:query [[select id, was, became, attempts_were, attempts, claimed_by, error,
    extract(epoch from at) as at from audit.step order by n]]
  for _, row in ipairs(rows) do
    row.attempts_were, row.attempts = tonumber(row.attempts_were), tonumber(row.attempts)
    row.at = tonumber(row.at) - offset
    steps[row.id] = steps[row.id] or {}
    table.insert(steps[row.id], row)
  end
  return steps
end

-- Whether a process among our descendants is stopped.
function witness.is_stopped(pid)
  for _, child in ipairs(process.children()) do
    if child.pid == pid then
      return child.state == "T"
    end
  end
  return false
end

-- Sends a signal to a process that is not ours to wait for; false when it is gone.
function witness.signal(pid, number)
  return ffi.C.spec_witness_kill(pid, number) == 0
end

return witness
