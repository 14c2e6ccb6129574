-- A program that stands between the program under test and Postgres, so that a spec can cut their
-- connections or hold them silent: killed, both ends find their peer gone; stopped (SIGSTOP), the
-- connections stay open and nothing passes.
--
--   local relay = require "spec.support.relay"
--   local between = relay.start(app)        -- a process; `between.dsn` leads through it
--   between:kill "STOP"
--
-- As a program: luajit spec/support/relay.lua LISTEN_PATH SERVER_PATH, both unix sockets.

local ffi = require "ffi"

if not pcall(ffi.typeof, "struct spec_relay_address") then
  ffi.cdef [[
    struct spec_relay_address { unsigned short family; char path[108]; };
    struct spec_relay_poll { int fd; short events; short revents; };
    int spec_relay_socket(int domain, int type, int protocol) __asm__("socket");
    int spec_relay_bind(int fd, const struct spec_relay_address *address, unsigned len) __asm__("bind");
    int spec_relay_listen(int fd, int backlog) __asm__("listen");
    int spec_relay_accept(int fd, void *address, void *len) __asm__("accept");
    int spec_relay_connect(int fd, const struct spec_relay_address *address, unsigned len) __asm__("connect");
    int spec_relay_poll(struct spec_relay_poll *list, unsigned long count, int timeout) __asm__("poll");
    long spec_relay_read(int fd, void *bytes, size_t len) __asm__("read");
    long spec_relay_write(int fd, const void *bytes, size_t len) __asm__("write");
    int spec_relay_close(int fd) __asm__("close");
    int spec_relay_prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d)
      __asm__("prctl");
  ]]
end

local C = ffi.C
local AF_UNIX, SOCK_STREAM, POLLIN, PR_SET_PDEATHSIG, SIGKILL = 1, 1, 1, 1, 9
local READ_SIZE = 65536

-- ---- the program --------------------------------------------------------------------------------

local function open_socket(path)
  local address = ffi.new("struct spec_relay_address", { family = AF_UNIX, path = path })
  return C.spec_relay_socket(AF_UNIX, SOCK_STREAM, 0), address, ffi.sizeof(address)
end

local function listen(path)
  local fd, address, size = open_socket(path)
  assert(C.spec_relay_bind(fd, address, size) == 0 and C.spec_relay_listen(fd, 16) == 0, "cannot listen on " .. path)
  return fd
end

-- All of it: what waits for the other end is held back by the kernel meanwhile.
local function write_all(fd, bytes, len)
  local written = 0
  while written < len do
    local n = tonumber(C.spec_relay_write(fd, bytes + written, len - written))
    if n <= 0 then
      return false
    end
    written = written + n
  end
  return true
end

local function run(listen_path, server_path)
  -- Nobody else would end it when the specs are killed.
  C.spec_relay_prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
  local listener = listen(listen_path)
  local bytes = ffi.new("char[?]", READ_SIZE)
  local other = {} -- each end's other end
  print "listening"
  io.stdout:flush()
  while true do
    local fds = { listener }
    for fd in pairs(other) do
      table.insert(fds, fd)
    end
    local list = ffi.new("struct spec_relay_poll[?]", #fds)
    for i, fd in ipairs(fds) do
      list[i - 1].fd, list[i - 1].events = fd, POLLIN
    end
    C.spec_relay_poll(list, #fds, -1)
    for i, fd in ipairs(fds) do
      local ready = list[i - 1].revents ~= 0
      if ready and fd == listener then
        local client = C.spec_relay_accept(listener, nil, nil)
        local server, address, size = open_socket(server_path)
        if C.spec_relay_connect(server, address, size) == 0 then
          other[client], other[server] = server, client
        else
          C.spec_relay_close(client)
          C.spec_relay_close(server)
        end
      elseif ready and other[fd] then
        local n = tonumber(C.spec_relay_read(fd, bytes, READ_SIZE))
        if n <= 0 or not write_all(other[fd], bytes, n) then
          C.spec_relay_close(fd)
          C.spec_relay_close(other[fd])
          other[other[fd]], other[fd] = nil, nil
        end
      end
    end
  end
end

if arg and arg[0] and arg[0]:find "relay%.lua$" then
  return run(arg[1], arg[2])
end

-- ---- the module ---------------------------------------------------------------------------------

local process = require "spec.support.process"

local relay = {}

-- Starts a relay between an app and the server of script/with-postgres; the app's `close` ends it.
-- It may be started anew, at the same address, when it has ended.
function relay.start(app)
  local path = app.dir .. "/.s.PGSQL.1"
  local server = ("%s/.s.PGSQL.%s"):format(os.getenv "PGHOST", os.getenv "PGPORT" or "5432")
  os.remove(path)
  local started = process.spawn { "luajit", "spec/support/relay.lua", path, server }
  started.dsn = ("host='%s' port=1 user='%s' dbname=%s"):format(app.dir, os.getenv "PGUSER" or "postgres", app.database)
  started:wait_for "listening"
  return started
end

return relay
