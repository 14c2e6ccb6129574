-- One delivery of a spec: what src/executor/task.c does in an executor, with a clock that only moves
-- when the handler waits, and with stubs in the place of ops.
--
-- The coroutine runs lua/tidemill/task.lua and waits through lua/tidemill/await.lua as it does in an
-- executor; this file is the half that resumes it. Plain LuaJIT only.

local host = require "tidemill.host"
local task = require "tidemill.task"
local json = require "tidemill.json"
local native = require "tidemill.native"
local ops = require "tidemill.testing.ops"
local record = require "tidemill.testing.record"
local sql = require "tidemill.testing.sql"
local render = require "tidemill.render"

-- The originals: a spec's surroundings replace them.
local create, resume, status = coroutine.create, coroutine.resume, coroutine.status
local date, floor, format = os.date, math.floor, string.format

-- As in src/executor/task.c and task_host.c.
local ERROR_BYTES = 16 * 1024
local PUBLISHED_BYTES = 64 * 1024 * 1024
local LEVELS = { [0] = "debug", "info", "warn", "error" }
local WHY = {
  retry = "the handler asked for a retry",
  discard = "the handler discarded the message",
}

-- The error of an attempt, no longer than an executor tells it.
local function cut(text)
  if #text <= ERROR_BYTES then
    return text
  end
  local at = ERROR_BYTES
  while at > ERROR_BYTES - 4 and text:byte(at + 1) >= 128 and text:byte(at + 1) < 192 do
    at = at - 1
  end
  return text:sub(1, at > ERROR_BYTES - 4 and at or ERROR_BYTES)
end

local Delivery = {}
Delivery.__index = Delivery

-- ---- what lua/tidemill/ asks of the delivery that runs, through tidemill.host -----------------------

-- Seconds since 1970 as `2026-01-31T23:59:59.123456Z`.
local function time_text(secs)
  return date("!%Y-%m-%dT%H:%M:%S", floor(secs)) .. format(".%06dZ", floor(secs % 1 * 1e6))
end

-- The delivery that starts, in the order lua/tidemill/task.lua takes it.
function Delivery:take()
  local message = self.message
  return message.message_id, message.attempts, message.max_attempts, message.priority,
    message.created_at or time_text(self.now), message.published_by, self.deadline, message.raw,
    json.decode(message.raw), message.headers and json.decode(message.headers) or nil, false
end

-- The result of the wait that has just ended, or nil and why it failed.
function Delivery:outcome()
  local answer = self.answer
  if not answer then
    error "nothing was waited for"
  elseif answer.wrong then
    return nil, answer.wrong
  end
  return answer.value
end

-- Keeps what is published together with `done`. Returns nothing, or what is wrong.
function Delivery:gather(item)
  if self.gathered_bytes + #item > PUBLISHED_BYTES then
    return format("one delivery cannot publish more than %d bytes", PUBLISHED_BYTES)
  end
  self.gathered_bytes = self.gathered_bytes + #item + 1
  record.gather(self, record.message(native.decode_items(item)))
end

-- A mark of what was gathered so far, and back to it.
function Delivery:mark()
  return { count = #self.published, bytes = self.gathered_bytes }
end

function Delivery:rewind(mark)
  self.gathered_bytes = mark.bytes
  record.rewind(self, mark.count)
end

-- A line of the log: text, and name, value, name, value …
function Delivery:write(level, event, text, ...)
  local fields = {}
  for i = 1, select("#", ...), 2 do
    fields[select(i, ...)] = select(i + 1, ...)
  end
  table.insert(self.log, { level = LEVELS[level], event = event, text = text, fields = fields })
end

-- ---- running ----------------------------------------------------------------------------------------

-- Something is wrong with the spec, not with the handler: testing.run raises it.
function Delivery:fail(text)
  self.broken = { text = render.waiting(self.co, text) }
end

-- An op has ended the delivery: the handler is not to be resumed.
function Delivery:finish()
  self.ended = { outcome = "done" }
end

-- So it has, and not well.
function Delivery:finish_raised(text)
  self.ended = { outcome = "raised", error = cut(render.waiting(self.co, text)) }
end

-- Gives the processor to the handler. Returns what coroutine.resume returns.
function Delivery:turn(...)
  host.delivery = self
  local function left(...)
    host.delivery = nil
    self.answer = nil
    return ...
  end
  return left(resume(self.co, ...))
end

local function finish(self, outcome, text, delay_secs)
  self.ended = { outcome = outcome, error = text, delay_secs = delay_secs }
end

-- Ends a delivery that waits: the error is raised at its wait, and what comes of that changes nothing.
local function drop(self, outcome, text)
  local shown = render.waiting(self.co, text)
  self.answer = { wrong = text }
  self:turn()
  finish(self, outcome, cut(shown))
end

-- The coroutine's main function returned, or failed itself.
local function finish_dead(self, ok, text)
  if not ok then
    text = type(text) == "string" and text or "the handler raised an error that has no text"
  end
  local fault = not text and record.gathered_fault(self)
  if text then
    finish(self, "raised", cut(text))
  elseif fault then
    finish(self, "raised", "what the handler published was refused: " .. fault)
  else
    finish(self, "done")
  end
end

-- ctx:retry, ctx:snooze, ctx:discard.
local function finish_asked(self, name, secs, why)
  if name == "snooze" then
    finish(self, "snooze", nil, secs)
  elseif name == "retry" then
    finish(self, "retry", cut(why or WHY.retry), secs)
  else
    finish(self, "discard", cut(why or WHY.discard))
  end
end

-- The handler waits: has the op answered, and lets its time pass. Returns whether it goes on.
local function answer(self, name, ...)
  local op = ops[name]
  if not op then
    self.answer = { wrong = format("there is no op `%s` to wait for", name) }
    return true
  end
  local ok, value, wrong = pcall(op, self, ...)
  if not ok then
    -- A stub raised: whatever it is, most likely a failed assertion, it is the spec's.
    self.broken = self.broken or { value = value }
  end
  if self.broken or self.ended then
    return false
  end
  if self.now > self.deadline then
    self.now = self.deadline
    drop(self, "raised", format("handler exceeded its time limit of %g s", self.timeout_secs))
    return false
  end
  self.answer = { value = value, wrong = wrong }
  return true
end

local function step(self, ok, first, ...)
  if status(self.co) == "dead" then
    finish_dead(self, ok, first)
  elseif first ~= host.wait or type((...)) ~= "string" then
    finish(self, "raised", cut(render.waiting(self.co,
      "coroutine.yield outside of a coroutine of the handler's own")))
  elseif WHY[...] or (...) == "snooze" then
    finish_asked(self, ...)
  elseif answer(self, ...) then
    return step(self, self:turn())
  end
end

-- Runs to the end. Returns how it ended: { outcome, error, delay_secs }; or nil where the spec is at fault,
-- and `broken` says how.
function Delivery:run(lane)
  self.co = create(task.main)
  step(self, self:turn(lane))
  if self.broken then
    return nil
  end
  if self.transaction then
    sql.over(self, false)
  end
  self.published = record.result(self, self.ended.outcome == "done")
  return self.ended
end

local delivery = {}

-- `message`: message_id, attempts, max_attempts, priority, created_at or nil, published_by, raw, headers as
-- JSON or nil. `now` is when it starts, `timeout_secs` how long it may take; `stubs` answers its ops.
function delivery.new(message, now, timeout_secs, stubs)
  return setmetatable({
    message = message,
    message_id = message.message_id,
    now = now,
    timeout_secs = timeout_secs,
    deadline = now + timeout_secs,
    stubs = stubs,
    published = {},
    gathered_bytes = 0,
    queries = {},
    transactions = 0,
    requests = {},
    log = {},
  }, Delivery)
end

return delivery
