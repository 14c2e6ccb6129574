-- What the adapter needs of the system and Lua does not have: a clock, shared memory, waiting on
-- several files at once, starting a program. Linux, through LuaJIT's FFI; values as the headers of
-- its 64-bit architectures have them.

local ffi = require "ffi"

ffi.cdef [[
  struct bench_timespec { long tv_sec; long tv_nsec; };
  struct bench_pollfd { int fd; short events; short revents; };
  /* Room for the C library's opaque type, larger than it is. */
  struct bench_spawn_actions { long room[64]; };
  extern char **environ;
  int clock_gettime(int clock, struct bench_timespec *at);
  int ppoll(struct bench_pollfd *fds, unsigned long count, const struct bench_timespec *wait, const void *mask);
  long read(int fd, void *buffer, size_t len);
  long write(int fd, const void *bytes, size_t len);
  int close(int fd);
  int open(const char *path, int flags, ...);
  int flock(int fd, int operation);
  int memfd_create(const char *name, unsigned int flags);
  int ftruncate(int fd, long len);
  void *mmap(void *address, size_t len, int protection, int flags, int fd, long offset);
  int getpid(void);
  int kill(int pid, int signal);
  int waitpid(int pid, int *status, int options);
  int pipe2(int ends[2], int flags);
  char *realpath(const char *path, char *resolved);
  void free(void *pointer);
  int setenv(const char *name, const char *value, int overwrite);
  int posix_spawn_file_actions_init(struct bench_spawn_actions *actions);
  int posix_spawn_file_actions_destroy(struct bench_spawn_actions *actions);
  int posix_spawn_file_actions_adddup2(struct bench_spawn_actions *actions, int fd, int newfd);
  int posix_spawnp(int *pid, const char *file, const struct bench_spawn_actions *actions, const void *attr,
    char *const argv[], char *const envp[]);
  char *strerror(int code);
]]

local C = ffi.C

local CLOCK_MONOTONIC = 1
local POLLIN = 1
local O_RDWR, O_CLOEXEC = 2, 0x80000
local PROT_READ_WRITE, MAP_SHARED, MAP_NORESERVE, MFD_CLOEXEC = 3, 1, 0x4000, 1
local LOCK_EX, LOCK_UN = 2, 8
local WNOHANG = 1
local EINTR = 4

local posix = { TERM = 15, KILL = 9 }

local function fail(what, code)
  error(("%s: %s"):format(what, ffi.string(C.strerror(code or ffi.errno()))), 0)
end

-- ---- time ---------------------------------------------------------------------------------------

local at = ffi.new "struct bench_timespec"

-- Nanoseconds of CLOCK_MONOTONIC, the same for all processes; exact, as a double holds 104 days.
function posix.now()
  C.clock_gettime(CLOCK_MONOTONIC, at)
  return tonumber(at.tv_sec) * 1e9 + tonumber(at.tv_nsec)
end

-- ---- files --------------------------------------------------------------------------------------

-- The descriptors of the list `fds` that can be read (or whose other end is closed), as a set. Waits
-- `ns` at most, for ever without.
function posix.readable(fds, ns)
  local list = ffi.new("struct bench_pollfd[?]", #fds)
  for i, fd in ipairs(fds) do
    list[i - 1].fd, list[i - 1].events = fd, POLLIN
  end
  local wait
  if ns then
    ns = math.max(ns, 0)
    wait = ffi.new("struct bench_timespec", math.floor(ns / 1e9), ns % 1e9)
  end
  local ready = {}
  if C.ppoll(list, #fds, wait, nil) < 0 then
    if ffi.errno() ~= EINTR then
      fail "ppoll"
    end
    return ready
  end
  for i, fd in ipairs(fds) do
    ready[fd] = list[i - 1].revents ~= 0
  end
  return ready
end

local chunk = ffi.new "char[65536]"

-- What is there now, of a descriptor that `readable` named; nil at its end.
function posix.read(fd)
  local n = tonumber(C.read(fd, chunk, ffi.sizeof(chunk)))
  if n > 0 then
    return ffi.string(chunk, n)
  elseif n < 0 and ffi.errno() == EINTR then
    return ""
  end
end

-- `path` from the root on, without links; it must exist.
function posix.absolute(path)
  local resolved = C.realpath(path, nil)
  if resolved == nil then
    fail(path)
  end
  local text = ffi.string(resolved)
  C.free(resolved)
  return text
end

-- All of `text`, waiting where it must.
function posix.write(fd, text)
  local bytes, left = ffi.cast("const char *", text), #text
  while left > 0 do
    local n = tonumber(C.write(fd, bytes, left))
    if n < 0 and ffi.errno() ~= EINTR then
      fail "write"
    end
    n = math.max(n, 0)
    bytes, left = bytes + n, left - n
  end
end

-- ---- shared memory ------------------------------------------------------------------------------

local function map(fd, len)
  local address = C.mmap(nil, len, PROT_READ_WRITE, bit.bor(MAP_SHARED, MAP_NORESERVE), fd, 0)
  if ffi.cast("intptr_t", address) == -1 then
    fail "mmap"
  end
  return address
end

-- Zeroed memory that other processes of this user can map by the path returned, for as long as this
-- process lives.
function posix.shared_memory(len)
  local fd = C.memfd_create("tidemill bench", MFD_CLOEXEC)
  if fd < 0 or C.ftruncate(fd, len) ~= 0 then
    fail "memfd_create"
  end
  return map(fd, len), ("/proc/%d/fd/%d"):format(C.getpid(), fd)
end

-- Maps such memory of another process and calls `fn(address)` while no other process is doing the
-- same.
function posix.map_locked(path, len, fn)
  local fd = C.open(path, bit.bor(O_RDWR, O_CLOEXEC))
  if fd < 0 then
    fail("open " .. path)
  end
  local address = map(fd, len)
  if C.flock(fd, LOCK_EX) ~= 0 then
    fail "flock"
  end
  fn(address)
  C.flock(fd, LOCK_UN)
  C.close(fd)
  return address
end

function posix.pid()
  return C.getpid()
end

-- ---- programs -----------------------------------------------------------------------------------

function posix.set_environment(name, value)
  C.setenv(name, tostring(value), 1)
end

local Child = {}
Child.__index = Child

-- Starts a program, without any input; what it prints on either output can be read from `fd`.
function posix.spawn(argv)
  local ends = ffi.new "int[2]"
  if C.pipe2(ends, O_CLOEXEC) ~= 0 then
    fail "pipe2"
  end
  local null = C.open("/dev/null", bit.bor(O_RDWR, O_CLOEXEC))
  local actions = ffi.new "struct bench_spawn_actions"
  C.posix_spawn_file_actions_init(actions)
  C.posix_spawn_file_actions_adddup2(actions, null, 0)
  C.posix_spawn_file_actions_adddup2(actions, ends[1], 1)
  C.posix_spawn_file_actions_adddup2(actions, ends[1], 2)
  local words, owners = ffi.new("char *[?]", #argv + 1), {}
  for i, word in ipairs(argv) do
    owners[i] = ffi.new("char[?]", #word + 1, word)
    words[i - 1] = owners[i]
  end
  local pid = ffi.new "int[1]"
  local code = C.posix_spawnp(pid, argv[1], actions, nil, words, C.environ)
  C.posix_spawn_file_actions_destroy(actions)
  C.close(null)
  C.close(ends[1])
  if code ~= 0 then
    fail("cannot start " .. argv[1], code)
  end
  return setmetatable({ pid = pid[0], fd = ends[0] }, Child)
end

function Child:signal(number)
  if not self.ended then
    C.kill(self.pid, number)
  end
end

-- Whether it has ended; then `code` is its exit code, or 128 and the signal's number.
function Child:has_ended()
  local status = ffi.new "int[1]"
  if not self.ended and C.waitpid(self.pid, status, WNOHANG) == self.pid then
    local signal = bit.band(status[0], 0x7f)
    self.ended = true
    self.code = signal ~= 0 and 128 + signal or bit.band(bit.rshift(status[0], 8), 0xff)
  end
  return self.ended or false
end

return posix
