-- Starts programs and watches them: output into files, exit codes and signals, descendants.
--
-- Programs are started by posix_spawn, so nothing of this Lua state runs in the child. This process
-- makes itself the reaper of orphans: whatever a program leaves behind becomes our child and
-- `assert_none_left` finds it.

local ffi = require "ffi"
local lfs = require "lfs"
local clock = require "spec.support.clock"

if not pcall(ffi.typeof, "struct spec_spawn_attr") then
  ffi.cdef [[
    extern char **environ;
    /* Room for the C library's opaque types, larger than they are. */
    struct spec_spawn_attr { long room[128]; };
    struct spec_spawn_actions { long room[64]; };
    struct spec_sigset { unsigned long words[16]; };
    int posix_spawnattr_init(struct spec_spawn_attr *attr);
    int posix_spawnattr_destroy(struct spec_spawn_attr *attr);
    int posix_spawnattr_setflags(struct spec_spawn_attr *attr, short flags);
    int posix_spawnattr_setpgroup(struct spec_spawn_attr *attr, int pgroup);
    int posix_spawnattr_setsigmask(struct spec_spawn_attr *attr, const struct spec_sigset *mask);
    int posix_spawnattr_setsigdefault(struct spec_spawn_attr *attr, const struct spec_sigset *set);
    int posix_spawn_file_actions_init(struct spec_spawn_actions *actions);
    int posix_spawn_file_actions_destroy(struct spec_spawn_actions *actions);
    int posix_spawn_file_actions_adddup2(struct spec_spawn_actions *actions, int fd, int newfd);
    int posix_spawn_file_actions_addchdir_np(struct spec_spawn_actions *actions, const char *path);
    int posix_spawnp(int *pid, const char *file, const struct spec_spawn_actions *actions,
      const struct spec_spawn_attr *attr, char *const argv[], char *const envp[]);
    int spec_sigfillset(struct spec_sigset *set) __asm__("sigfillset");
    int spec_waitpid(int pid, int *status, int options) __asm__("waitpid");
    int spec_kill(int pid, int signal) __asm__("kill");
    int spec_prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d) __asm__("prctl");
    int spec_open(const char *path, int flags, ...) __asm__("open");
    int spec_close(int fd) __asm__("close");
    long spec_pread(int fd, void *buffer, size_t len, long offset) __asm__("pread");
    long spec_write(int fd, const void *bytes, size_t len) __asm__("write");
    long spec_lseek(int fd, long offset, int whence) __asm__("lseek");
    int spec_mkostemp(char *pattern, int flags) __asm__("mkostemp");
    int spec_getpid(void) __asm__("getpid");
    char *spec_strerror(int code) __asm__("strerror");
  ]]
end

local C = ffi.C

-- Linux, as found in every 64-bit architecture's headers.
local O_RDONLY, O_RDWR, O_CREAT, O_APPEND, O_CLOEXEC = 0, 2, 0x40, 0x400, 0x80000
local SETPGROUP, SETSIGDEF, SETSIGMASK = 0x02, 0x04, 0x08
local WNOHANG = 1
local PR_SET_CHILD_SUBREAPER = 36
local SEEK_SET, SEEK_END = 0, 2
local SIGNALS = {
  HUP = 1, INT = 2, QUIT = 3, ABRT = 6, KILL = 9, USR1 = 10, SEGV = 11, USR2 = 12, PIPE = 13, TERM = 15, CONT = 18,
  STOP = 19,
}

local process = {}

-- By pid: what was spawned and not reaped. Outlives a reload of this module, or another file's
-- stray would be ours.
local registry = debug.getregistry()
registry["tidemill.spec.unreaped"] = registry["tidemill.spec.unreaped"] or {}
local unreaped = registry["tidemill.spec.unreaped"]

C.spec_prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

local function system_error(what, code)
  return ("%s: %s"):format(what, ffi.string(C.spec_strerror(code or ffi.errno())))
end

-- ---- files --------------------------------------------------------------------------------------

-- A file without a name, closed when it is collected.
local function nameless_file(text)
  local pattern = (os.getenv "TMPDIR" or "/tmp") .. "/tidemill-spec-XXXXXX"
  local path = ffi.new("char[?]", #pattern + 1, pattern)
  local fd = C.spec_mkostemp(path, bit.bor(O_APPEND, O_CLOEXEC))
  if fd < 0 then
    error(system_error("cannot make a file like " .. pattern), 3)
  end
  os.remove(ffi.string(path))
  local written = 0
  while text and written < #text do
    local n = C.spec_write(fd, text:sub(written + 1), #text - written)
    if n < 0 then
      error(system_error "cannot write the standard input of a program", 3)
    end
    written = written + tonumber(n)
  end
  C.spec_lseek(fd, 0, SEEK_SET)
  return { fd = fd, guard = ffi.gc(ffi.new "char[1]", function() C.spec_close(fd) end) }
end

local function named_file(path, flags)
  local fd = C.spec_open(path, bit.bor(flags, O_CLOEXEC), ffi.cast("int", 384))
  if fd < 0 then
    error(system_error("cannot open " .. path), 3)
  end
  return { fd = fd, guard = ffi.gc(ffi.new "char[1]", function() C.spec_close(fd) end) }
end

local function text_of(file)
  local len = tonumber(C.spec_lseek(file.fd, 0, SEEK_END))
  if len <= 0 then
    return ""
  end
  local buffer = ffi.new("char[?]", len)
  local got = 0
  while got < len do
    local n = tonumber(C.spec_pread(file.fd, buffer + got, len - got, got))
    if n <= 0 then
      break
    end
    got = got + n
  end
  return ffi.string(buffer, got)
end

-- ---- starting -----------------------------------------------------------------------------------

-- A NULL-terminated array of C strings; `owners` keeps the bytes alive.
local function string_array(list)
  local array = ffi.new("char *[?]", #list + 1)
  local owners = {}
  for i, text in ipairs(list) do
    owners[i] = ffi.new("char[?]", #text + 1, text)
    array[i - 1] = owners[i]
  end
  return array, owners
end

-- The environment of a child: ours, changed by `changes` (name → text, or false to leave it out).
local function environment(changes)
  local values, order = {}, {}
  local function set(name, value)
    if values[name] == nil then
      table.insert(order, name)
    end
    values[name] = value
  end
  local i = 0
  while C.environ[i] ~= nil do
    local name, value = ffi.string(C.environ[i]):match "^([^=]+)=(.*)$"
    if name then
      set(name, value)
    end
    i = i + 1
  end
  -- A sanitizer's run-time library preloaded for the specs themselves is no business of the
  -- programs they start.
  set("LD_PRELOAD", false)
  local options = os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS"
  if options then
    set("ASAN_OPTIONS", options)
  end
  for name, value in pairs(changes or {}) do
    set(name, value and tostring(value))
  end
  local list = {}
  for _, name in ipairs(order) do
    if values[name] then
      table.insert(list, name .. "=" .. values[name])
    end
  end
  return list
end

local Process = {}
Process.__index = Process

-- Starts a program. `options`: `argv` (or the list part of the table itself), `env` (changes),
-- `cwd`, `stdin` (text; none by default), `stdout` and `stderr` (a path to write to instead of
-- capturing), `setpgid` (its own process group). Raises when the program cannot be started.
function process.spawn(options)
  local argv = options.argv or options
  local stdin = options.stdin and nameless_file(options.stdin) or named_file("/dev/null", O_RDONLY)
  local stdout = options.stdout and named_file(options.stdout, bit.bor(O_RDWR, O_CREAT, O_APPEND)) or nameless_file()
  local stderr = options.stderr and named_file(options.stderr, bit.bor(O_RDWR, O_CREAT, O_APPEND)) or nameless_file()

  local actions = ffi.new "struct spec_spawn_actions"
  C.posix_spawn_file_actions_init(actions)
  C.posix_spawn_file_actions_adddup2(actions, stdin.fd, 0)
  C.posix_spawn_file_actions_adddup2(actions, stdout.fd, 1)
  C.posix_spawn_file_actions_adddup2(actions, stderr.fd, 2)
  if options.cwd then
    C.posix_spawn_file_actions_addchdir_np(actions, options.cwd)
  end

  -- The program must see default signals, whatever the shell or CI that runs the specs ignores.
  local attr = ffi.new "struct spec_spawn_attr"
  local flags = bit.bor(SETSIGDEF, SETSIGMASK)
  C.posix_spawnattr_init(attr)
  if options.setpgid then
    flags = bit.bor(flags, SETPGROUP)
    C.posix_spawnattr_setpgroup(attr, 0)
  end
  local all = ffi.new "struct spec_sigset"
  C.spec_sigfillset(all)
  C.posix_spawnattr_setsigdefault(attr, all)
  C.posix_spawnattr_setsigmask(attr, ffi.new "struct spec_sigset")
  C.posix_spawnattr_setflags(attr, flags)

  local words = {}
  for i, word in ipairs(argv) do
    words[i] = tostring(word)
  end
  local arguments, argument_bytes = string_array(words)
  local env, env_bytes = string_array(environment(options.env))
  local pid = ffi.new "int[1]"
  local code = C.posix_spawnp(pid, words[1], actions, attr, arguments, env)
  C.posix_spawn_file_actions_destroy(actions)
  C.posix_spawnattr_destroy(attr)
  if code ~= 0 then
    error(system_error("cannot start " .. words[1], code), 2)
  end
  local self = setmetatable({
    pid = pid[0],
    command = table.concat(words, " "),
    files = { stdout = stdout, stderr = stderr },
    -- The program reads its input from the open file, the arrays were copied by the kernel.
    kept = { stdin, argument_bytes, env_bytes },
  }, Process)
  unreaped[self.pid] = self
  return self
end

-- ---- watching -----------------------------------------------------------------------------------

local function note_end(self, status)
  local signal = bit.band(status, 0x7f)
  if signal == 0 then
    self.code = bit.band(bit.rshift(status, 8), 0xff)
  else
    self.signal = signal
  end
  self.ended = true
  unreaped[self.pid] = nil
end

-- Whether the program has ended; reaps it. Then `.code` (nil when a signal ended it) and `.signal`
-- are set.
function Process:poll()
  if not self.ended then
    local status = ffi.new "int[1]"
    if C.spec_waitpid(self.pid, status, WNOHANG) == self.pid then
      note_end(self, status[0])
    end
  end
  return self.ended or false
end

-- Waits for the end, at most `secs` (30): exit code and signal, one of them nil. Raises when the
-- program still runs then, and leaves it running.
function Process:wait(secs)
  local ended = clock.poll(function()
    return self:poll()
  end, secs or 30)
  if not ended then
    error(("%s (pid %d) did not end within %g s\n%s"):format(self.command, self.pid, secs or 30, self:output()), 2)
  end
  return self.code, self.signal
end

-- Sends a signal, a number or a name such as "TERM". False when the program has ended.
function Process:kill(signal)
  if self:poll() then
    return false
  end
  local number = type(signal) == "number" and signal or SIGNALS[signal or "TERM"]
  if not number then
    error("no such signal: " .. tostring(signal), 2)
  end
  return C.spec_kill(self.pid, number) == 0
end

function Process:stdout()
  return text_of(self.files.stdout)
end

function Process:stderr()
  return text_of(self.files.stderr)
end

-- Both outputs, for a message to whoever reads a failing spec.
function Process:output()
  return ("--- standard output:\n%s\n--- standard error:\n%s"):format(self:stdout(), self:stderr())
end

-- Waits until either output matches the Lua pattern, at most `secs` (30); returns what the pattern
-- captures. Raises on a timeout, and at once when the program has ended without the text. `from` is
-- a mark by `position`.
function Process:wait_for(pattern, secs, from)
  from = from or { stdout = 1, stderr = 1 }
  local found
  local function look()
    -- The end is noted before the outputs are read: what was written before it is then in them.
    local ended = self:poll()
    found = { self:stderr():match(pattern, from.stderr) }
    if #found == 0 then
      found = { self:stdout():match(pattern, from.stdout) }
    end
    return #found > 0 or ended
  end
  clock.poll(look, secs or 30)
  if #found > 0 then
    return unpack(found)
  end
  local state = "still runs"
  if self.ended then
    state = self.signal and "was ended by signal " .. self.signal or "ended with exit code " .. self.code
  end
  error(("%s (pid %d) did not print %q within %g s; it %s\n%s"):format(
    self.command, self.pid, pattern, secs or 30, state, self:output()), 2)
end

-- Where the outputs end now, for `wait_for` to look only at what comes later.
function Process:position()
  return { stdout = #self:stdout() + 1, stderr = #self:stderr() + 1 }
end

-- Ends the program, whatever its state, and reaps it.
function Process:destroy()
  if not self:poll() then
    C.spec_kill(self.pid, SIGNALS.KILL)
    self:wait(10)
  end
end

-- Runs a program to its end, at most `timeout` seconds (30; then it is killed and an error raised).
-- Options as `spawn`. Returns { code, signal, stdout, stderr }.
function process.run(options)
  local self = process.spawn(options)
  local ok, err = pcall(self.wait, self, options.timeout)
  if not ok then
    self:destroy()
    error(err, 2)
  end
  return { code = self.code, signal = self.signal, stdout = self:stdout(), stderr = self:stderr() }
end

-- ---- descendants --------------------------------------------------------------------------------

-- pid → { parent, state, name } of every process of the machine that can be seen.
local function snapshot()
  local seen = {}
  for entry in lfs.dir "/proc" do
    local pid = tonumber(entry)
    local file = pid and io.open("/proc/" .. pid .. "/stat")
    if file then
      local text = file:read "*a" or ""
      file:close()
      -- The name is in parentheses and may hold any byte, `)` and blanks included.
      local name, state, parent = text:match "^%d+ %((.*)%) (%S) (%d+)"
      if name then
        seen[pid] = { pid = pid, name = name, state = state, parent = tonumber(parent) }
      end
    end
  end
  return seen
end

-- Whether a process with that pid exists and is no zombie.
function process.alive(pid)
  local found = snapshot()[pid]
  return found ~= nil and found.state ~= "Z"
end

-- All descendants of `pid` that run, each { pid, name, state, parent }; by default of this process.
-- Zombies are left out.
function process.children(pid)
  pid = pid or C.spec_getpid()
  local seen = snapshot()
  local list = {}
  for _, candidate in pairs(seen) do
    local at = candidate
    while at and at.parent ~= pid do
      at = seen[at.parent]
    end
    if at and candidate.state ~= "Z" then
      table.insert(list, candidate)
    end
  end
  table.sort(list, function(a, b)
    return a.pid < b.pid
  end)
  return list
end

-- Reaps orphans that became ours and have ended; the programs of the registry are left to their
-- `poll`.
local function reap_orphans()
  local own = C.spec_getpid()
  for pid, found in pairs(snapshot()) do
    if found.parent == own and found.state == "Z" and not unreaped[pid] then
      C.spec_waitpid(pid, nil, WNOHANG)
    end
  end
end

-- Raises when a program that was spawned is not reaped, or when anything that one of them started
-- still runs after `secs` (5). Everything found is killed first, so that the next spec starts
-- clean.
function process.assert_none_left(secs)
  local strays = {}
  for _, self in pairs(unreaped) do
    if not self:poll() then
      table.insert(strays, ("pid %d: %s"):format(self.pid, self.command))
      self:destroy()
    end
  end
  local left
  clock.poll(function()
    reap_orphans()
    left = process.children()
    return #left == 0
  end, secs or 5)
  for _, child in ipairs(left) do
    table.insert(strays, ("pid %d: %s, an orphan"):format(child.pid, child.name))
    C.spec_kill(child.pid, SIGNALS.KILL)
  end
  if #strays > 0 then
    clock.poll(function()
      reap_orphans()
      return #process.children() == 0
    end, 5)
    error("processes left running:\n  " .. table.concat(strays, "\n  "), 2)
  end
end

return process
