-- An executor process without a runtime: starts the real one over a socket pair and speaks frames
-- with it, so that a spec sees exactly what a runtime would see.
--
--   local run = executor.start {
--     config = [[return { subscribe = { ["order.paid"] = "greet" } }]],
--     handlers = { greet = "return function(payload, ctx) end" },
--   }
--   local ticket = run:deliver { payload = '{"a": 1}' }
--   assert.equal("done", run:outcome(ticket).kind)
--
-- `executor.stop_all` belongs into after_each.

local ffi = require "ffi"
local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"
local header = require "spec.support.header"
local unit = require "spec.support.unit"

local lib = header.declare("core/config.h", "core/message.h", "core/page.h")

unit.cdef [[
  int socketpair(int domain, int type, int protocol, int pair[2]);
  int memfd_create(const char *name, unsigned int flags);
  int ftruncate(int fd, long length);
  void *mmap(void *address, size_t length, int protection, int flags, int fd, long offset);
  int munmap(void *address, size_t length);
  long recv(int fd, void *buffer, size_t len, int flags);
  long send(int fd, const void *buffer, size_t len, int flags);
  int spec_fcntl(int fd, int command, ...) __asm__("fcntl");
]]

local C = ffi.C

local AF_UNIX, SOCK_STREAM, SOCK_CLOEXEC = 1, 1, 0x80000
local MSG_DONTWAIT, MSG_NOSIGNAL, EAGAIN = 0x40, 0x4000, 11
local F_DUPFD = 0
local PROT_READ, PROT_WRITE, MAP_SHARED = 1, 2, 1
local PAGE_SIZE = 4096

local MODES = { config = lib.MILL_LOAD_CONFIG, handlers = lib.MILL_LOAD_HANDLERS }
local OUTCOMES = {
  [lib.MILL_OUTCOME_DONE] = "done",
  [lib.MILL_OUTCOME_RAISED] = "raised",
  [lib.MILL_OUTCOME_RETRY] = "retry",
  [lib.MILL_OUTCOME_SNOOZE] = "snooze",
  [lib.MILL_OUTCOME_DISCARD] = "discard",
  [lib.MILL_OUTCOME_RETURNED] = "returned",
  [lib.MILL_OUTCOME_FINISHED] = "finished",
}

local executor = {}

local Run = {}
Run.__index = Run

local running = {}

local function span(text)
  if text == nil then
    return { nil, 0 }
  end
  return { text, #text }
end

local function span_text(value)
  if value.data ~= nil then
    return ffi.string(value.data, value.len)
  end
end

local function c_text(pointer)
  if pointer ~= nil then
    return ffi.string(pointer)
  end
end

-- ---- frames -------------------------------------------------------------------------------------

local function lane_options(options)
  return {
    max_attempts = tonumber(options.max_attempts),
    retry_backoff_secs = tonumber(options.retry_backoff_secs),
    retry_jitter = options.retry_jitter,
    timeout_secs = options.timeout_secs,
    retain_hours = tonumber(options.retain_hours),
    concurrency = tonumber(options.concurrency),
  }
end

local function read_manifest(body, err)
  local manifest = ffi.new "struct mill_manifest"
  if lib.mill_manifest_read(body, manifest, err) ~= 0 then
    error(ffi.string(err.message), 0)
  end
  local settings = manifest.settings
  local result = {
    digest = lib.mill_manifest_digest(manifest),
    settings = {
      app = c_text(settings.app), database = c_text(settings.database), schema = c_text(settings.schema),
      handlers = c_text(settings.handlers), poll_secs = settings.poll_secs, batch = tonumber(settings.batch),
      migrate = settings.migrate, notify = settings.notify, lane = lane_options(settings.lane),
    },
    lanes = {},
  }
  for i = 0, tonumber(manifest.lane_count) - 1 do
    local lane = manifest.lanes[i]
    result.lanes[i + 1] = {
      topic = c_text(lane.topic), subscriber = c_text(lane.subscriber), handler = c_text(lane.handler),
      options = lane_options(lane.options),
    }
  end
  lib.mill_manifest_free(manifest)
  return result
end

local readers = {
  [lib.MILL_FRAME_MANIFEST] = function(self, body, err)
    self.manifest = read_manifest(body, err)
  end,
  [lib.MILL_FRAME_LOAD_ERROR] = function(self, body, err)
    local text = ffi.new "struct mill_span"
    assert(lib.mill_load_error_read(body, text, err) == 0)
    self.load_error = span_text(text)
  end,
  [lib.MILL_FRAME_OUTCOME] = function(self, body, err)
    local outcome = ffi.new "struct mill_outcome"
    assert(lib.mill_outcome_read(body, outcome, err) == 0)
    local ticket = tonumber(outcome.ticket)
    assert(not self.outcomes[ticket], "a second outcome of one delivery")
    self.outcome_count = self.outcome_count + 1
    self.outcomes[ticket] = {
      number = self.outcome_count,
      kind = OUTCOMES[tonumber(outcome.kind)],
      delay_secs = outcome.delay_secs,
      error = span_text(outcome.error),
      publications = span_text(outcome.publications),
      result = span_text(outcome.result),
    }
  end,
  [lib.MILL_FRAME_REQUEST] = function(self, body, err)
    local request = ffi.new "struct mill_request"
    assert(lib.mill_request_read(body, request, err) == 0)
    table.insert(self.requests, {
      request = request.request,
      ticket = tonumber(request.ticket),
      body = span_text(request.body),
      published_by = span_text(request.published_by),
    })
  end,
  [lib.MILL_FRAME_FILE] = function(self, body, err)
    local file = ffi.new "struct mill_file"
    assert(lib.mill_file_read(body, file, err) == 0)
    table.insert(self.files, { path = span_text(file.path), digest = file.digest })
  end,
  [lib.MILL_FRAME_BYE] = function(self)
    self.said_bye = true
  end,
}

local function parse(self)
  local frame, err = ffi.new "struct mill_frame", ffi.new "struct mill_err"
  local at = 0
  while true do
    local size = tonumber(lib.mill_frame_parse(self.input.data + at, self.input.len - at, frame, err))
    if size == 0 then
      break
    elseif size < 0 then
      error("the executor sent no frame: " .. ffi.string(err.message), 0)
    end
    local reader = assert(readers[tonumber(frame.type)], "the executor sent a frame of an unknown type")
    reader(self, frame.body, err)
    at = at + size
  end
  lib.mill_buffer_consume(self.input, at)
end

-- Reads what has arrived, without waiting.
function Run:pump()
  while self.fd do
    local n = tonumber(C.recv(self.fd, self.chunk, ffi.sizeof(self.chunk), MSG_DONTWAIT))
    if n < 0 then
      if ffi.errno() ~= EAGAIN then
        self.ended = true
      end
      break
    elseif n == 0 then
      self.ended = true
      break
    end
    lib.mill_buffer_bytes(self.input, self.chunk, n)
    parse(self)
  end
end

-- Polls until `fn` returns something true; raises after 10 s, or when the executor ends before.
function Run:wait_for(fn, what)
  local got
  clock.wait_until(function()
    self:pump()
    got = fn()
    return got or self.ended
  end, 10, function()
    return what .. "\n" .. self.process:output()
  end)
  if not got then
    error(("the executor ended before %s\n%s"):format(what, self.process:output()), 3)
  end
  return got
end

-- Sends the bytes gathered in `self.output`, reading meanwhile so that neither side waits for the
-- other.
function Run:flush()
  local at, len = 0, tonumber(self.output.len)
  clock.wait_until(function()
    while at < len do
      local n = tonumber(C.send(self.fd, self.output.data + at, len - at, MSG_DONTWAIT + MSG_NOSIGNAL))
      if n < 0 then
        if ffi.errno() ~= EAGAIN then
          error("the executor's socket is closed\n" .. self.process:output(), 0)
        end
        self:pump()
        return false
      end
      at = at + n
    end
    return true
  end, 10, "the executor reads what it is sent")
  self.output.len = 0
end

-- Sends bytes as they are.
function Run:send_raw(bytes)
  lib.mill_buffer_bytes(self.output, bytes, #bytes)
  self:flush()
end

-- Sends a frame of any type with any body.
function Run:send_frame(kind, body)
  local at = lib.mill_frame_begin(self.output, kind)
  lib.mill_buffer_bytes(self.output, body or "", #(body or ""))
  lib.mill_frame_end(self.output, at)
  self:flush()
end

-- ---- what a runtime does ------------------------------------------------------------------------

function Run:send_load(mode, path, call)
  local load = ffi.new("struct mill_load", MODES[mode], self.generation, span(path), span(call),
    span(self.database))
  lib.mill_load_write(self.output, load)
  self:flush()
end

-- The index of a lane by its topic and subscriber, or by the subscriber alone.
function Run:lane(subscriber, topic)
  for i, lane in ipairs(self.manifest.lanes) do
    if lane.subscriber == subscriber and (not topic or lane.topic == topic) then
      return i - 1
    end
  end
  error("no lane of " .. subscriber, 2)
end

-- Adds a DELIVER frame to what is sent with the next flush. All fields have a default; `to` is the
-- subscriber's name instead of `lane`. Returns the ticket.
function Run:prepare(fields)
  self.tickets = self.tickets + 1
  local deliver = ffi.new "struct mill_deliver"
  deliver.ticket = fields.ticket or self.tickets
  deliver.lane = fields.lane or (fields.to and self:lane(fields.to)) or 0
  ffi.copy(deliver.id, fields.id or ("\1\2\3\4\5\6\7\8\9\10\11\12\13\14\15" .. string.char(self.tickets % 256)), 16)
  deliver.attempts = fields.attempts or 1
  deliver.max_attempts = fields.max_attempts or 5
  deliver.priority = fields.priority or 0
  deliver.created_at = fields.created_at or 1700000000123456LL
  deliver.published_by = span(fields.published_by or "")
  deliver.headers = span(fields.headers)
  deliver.payload = span(fields.payload or "{}")
  deliver.wants_result = fields.wants_result or false
  deliver.fence = span(fields.fence)
  lib.mill_deliver_write(self.output, deliver)
  return tonumber(deliver.ticket)
end

function Run:deliver(fields)
  local ticket = self:prepare(fields or {})
  self:flush()
  return ticket
end

-- The outcome of a delivery, as soon as it is there.
function Run:outcome(ticket)
  return self:wait_for(function()
    return self.outcomes[ticket]
  end, "an outcome of ticket " .. ticket)
end

-- Delivers and returns the outcome.
function Run:handle(fields)
  return self:outcome(self:deliver(fields))
end

function Run:cancel(ticket, reason)
  lib.mill_cancel_write(self.output, ffi.new("struct mill_cancel", ticket, span(reason)))
  self:flush()
end

-- The next REQUEST.
function Run:request()
  self:wait_for(function()
    return self.requests[1]
  end, "a request")
  return table.remove(self.requests, 1)
end

function Run:reply(request, ok, body)
  lib.mill_reply_write(self.output, ffi.new("struct mill_reply", request, ok, span(body)))
  self:flush()
end

function Run:drain()
  self:send_frame(lib.MILL_FRAME_DRAIN)
end

-- Closes the runtime's end of the socket.
function Run:hang_up()
  if self.fd then
    C.spec_close(self.fd)
    self.fd = nil
  end
end

-- Waits for the process's end: exit code and signal.
function Run:wait()
  return self.process:wait(10)
end

-- The lines of the log with this event.
function Run:log(event)
  local lines = {}
  for line in self.process:stderr():gmatch "[^\n]+" do
    if line:find(" event=" .. event, 1, true) then
      table.insert(lines, line)
    end
  end
  return lines
end

-- ---- the process --------------------------------------------------------------------------------

local function system(result, what)
  if result == -1 or result == ffi.cast("void *", -1) then
    error(what .. " failed, errno " .. ffi.errno(), 3)
  end
  return result
end

-- The executor's two descriptors, and ours. Those of the executor are numbers above 9, and are not
-- closed on exec: the shell that starts it puts them in their place.
local function make_descriptors()
  local pair = ffi.new "int[2]"
  system(C.socketpair(AF_UNIX, SOCK_STREAM + SOCK_CLOEXEC, 0, pair), "socketpair")
  local memory = system(C.memfd_create("tidemill-spec-page", 1), "memfd_create")
  system(C.ftruncate(memory, PAGE_SIZE), "ftruncate")
  local page = system(C.mmap(nil, PAGE_SIZE, PROT_READ + PROT_WRITE, MAP_SHARED, memory, 0), "mmap")
  local theirs = system(C.spec_fcntl(pair[1], F_DUPFD, ffi.cast("int", 10)), "fcntl")
  local their_page = system(C.spec_fcntl(memory, F_DUPFD, ffi.cast("int", 10)), "fcntl")
  C.spec_close(pair[1])
  C.spec_close(memory)
  return pair[0], page, theirs, their_page
end

-- Starts an executor without a LOAD. `options.env` as for process.spawn; `options.memory_kb` limits
-- its address space, which a build with sanitizers cannot bear; `options.descriptors` the number of
-- its open files; `options.open` lists descriptors that whoever starts it has left open.
function executor.spawn(options)
  local dir = folder.temp "tidemill-executor"
  local fd, page, theirs, their_page = make_descriptors()
  local script = ('exec "$0" executor "$1" 3<&%d 4<&%d %d<&- %d<&-'):format(theirs, their_page, theirs, their_page)
  for _, number in ipairs(options.open or {}) do
    script = ("exec %d</etc/hostname; "):format(number) .. script
  end
  if options.memory_kb then
    script = ("ulimit -v %d; "):format(options.memory_kb) .. script
  end
  if options.descriptors then
    script = ("ulimit -n %d; "):format(options.descriptors) .. script
  end
  local started = process.spawn {
    argv = { "bash", "-c", script, tidemill.binary, C.spec_getpid() },
    cwd = dir,
    env = options.env,
    setpgid = true,
  }
  C.spec_close(theirs)
  C.spec_close(their_page)
  local self = setmetatable({
    dir = dir,
    fd = fd,
    memory = page,
    page = ffi.cast("struct mill_page *", page),
    process = started,
    input = ffi.gc(ffi.new "struct mill_buffer", lib.mill_buffer_free),
    output = ffi.gc(ffi.new "struct mill_buffer", lib.mill_buffer_free),
    chunk = ffi.new "char[65536]",
    generation = options.generation or 1,
    database = options.database,
    tickets = 0,
    outcome_count = 0,
    outcomes = {},
    requests = {},
    files = {},
  }, Run)
  table.insert(running, self)
  return self
end

-- Starts an executor, writes config.lua and the handlers, sends LOAD and waits for the answer: then
-- `manifest` or `load_error` is set. `options`: `config` (text), `handlers` (name → source, dots are
-- folders), `files` (path → text), `mode` ("handlers" by default, or "config"), `path` (of the config
-- in LOAD), `call` (likewise), `generation`, and what `spawn` takes.
function executor.load(options)
  local self = executor.spawn(options)
  folder.write(self.dir, "config.lua", options.config or "return {}")
  for name, text in pairs(options.handlers or {}) do
    folder.write(self.dir, "handlers/" .. name:gsub("%.", "/") .. ".lua", text)
  end
  for path, text in pairs(options.files or {}) do
    folder.write(self.dir, path, text)
  end
  self:send_load(options.mode or "handlers", options.path or "config.lua", options.call)
  self:wait_for(function()
    return self.manifest or self.load_error
  end, "an answer to LOAD")
  return self
end

-- As `load`, and raises when the config or a handler has a problem.
function executor.start(options)
  local self = executor.load(options)
  if self.load_error then
    error("LOAD_ERROR: " .. self.load_error, 2)
  end
  return self
end

-- An executor with one handler, given as the body of `function(payload, ctx)`.
function executor.with_handler(body, options)
  options = options or {}
  options.config = options.config or ([[return { %s subscribe = { ["t"] = "h" } }]]):format(options.settings or "")
  options.handlers = options.handlers or {}
  options.handlers.h = ('local tidemill = require "tidemill"\nreturn function(payload, ctx)\n%s\nend\n'):format(body)
  return executor.start(options)
end

-- Ends every executor of this spec and removes its files.
function executor.stop_all()
  for _, self in ipairs(running) do
    self:hang_up()
    self.process:destroy()
    C.munmap(self.memory, PAGE_SIZE)
    folder.remove(self.dir)
  end
  running = {}
  process.assert_none_left()
end

return executor
