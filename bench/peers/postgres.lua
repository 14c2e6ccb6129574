-- A pool of connections to Postgres that send prepared statements and wait for many at once: what a
-- publisher in any language does, over libpq.

local ffi = require "ffi"
local posix = require "posix"

ffi.cdef [[
  typedef struct pg_conn PGconn;
  typedef struct pg_result PGresult;
  PGconn *PQconnectdb(const char *conninfo);
  void PQfinish(PGconn *conn);
  int PQstatus(const PGconn *conn);
  char *PQerrorMessage(const PGconn *conn);
  int PQsocket(const PGconn *conn);
  PGresult *PQexec(PGconn *conn, const char *query);
  PGresult *PQprepare(PGconn *conn, const char *name, const char *query, int count, const unsigned int *types);
  int PQsendQueryPrepared(PGconn *conn, const char *name, int count, const char *const *values, const int *lengths,
    const int *formats, int result_format);
  int PQconsumeInput(PGconn *conn);
  int PQisBusy(PGconn *conn);
  PGresult *PQgetResult(PGconn *conn);
  int PQresultStatus(const PGresult *result);
  void PQclear(PGresult *result);
  int PQntuples(const PGresult *result);
  int PQgetisnull(const PGresult *result, int row, int column);
  char *PQgetvalue(const PGresult *result, int row, int column);
]]

local libpq = ffi.load "libpq.so.5"

local CONNECTION_OK, PGRES_COMMAND_OK, PGRES_TUPLES_OK = 0, 1, 2

local postgres = {}

local Connection = {}
Connection.__index = Connection

function postgres.connect(address)
  local handle = libpq.PQconnectdb(address)
  local self = setmetatable({ handle = ffi.gc(handle, libpq.PQfinish) }, Connection)
  if libpq.PQstatus(handle) ~= CONNECTION_OK then
    self:fail()
  end
  self.fd = libpq.PQsocket(handle)
  return self
end

function Connection:fail()
  error(ffi.string(libpq.PQerrorMessage(self.handle)), 0)
end

-- Raises where the statement failed; the first value of its first row, nil without one.
function Connection:take(result)
  local status = libpq.PQresultStatus(result)
  if status ~= PGRES_COMMAND_OK and status ~= PGRES_TUPLES_OK then
    self:fail()
  end
  local value
  if libpq.PQntuples(result) > 0 and libpq.PQgetisnull(result, 0, 0) == 0 then
    value = ffi.string(libpq.PQgetvalue(result, 0, 0))
  end
  libpq.PQclear(result)
  return value
end

-- Runs a text of statements and waits.
function Connection:exec(sql)
  return self:take(libpq.PQexec(self.handle, sql))
end

function Connection:close()
  libpq.PQfinish(ffi.gc(self.handle, nil))
  self.handle = nil
end

-- ---- a pool -------------------------------------------------------------------------------------

local Pool = {}
Pool.__index = Pool

-- `size` connections that have prepared `sql`.
function postgres.pool(address, size, sql)
  local self = setmetatable({ idle = {}, busy = {}, busy_fds = {} }, Pool)
  for i = 1, size do
    local connection = postgres.connect(address)
    connection:take(libpq.PQprepare(connection.handle, "publish", sql, 0, nil))
    self.idle[size + 1 - i] = connection
  end
  return self
end

local values = ffi.new "const char *[2]"

-- Sends the statement with two texts; `on_answer(tag)` is called from `wait`. False when all
-- connections are busy.
function Pool:send(first, second, tag)
  local connection = table.remove(self.idle)
  if not connection then
    return false
  end
  values[0], values[1] = first, second
  if libpq.PQsendQueryPrepared(connection.handle, "publish", 2, values, nil, nil, 0) ~= 1 then
    connection:fail()
  end
  connection.tag = tag
  self.busy[connection.fd] = connection
  table.insert(self.busy_fds, connection.fd)
  return true
end

function Pool:in_flight()
  return #self.busy_fds
end

-- Waits for answers, `ns` at most, and calls `on_answer(tag)` for each.
function Pool:wait(ns, on_answer)
  local ready = posix.readable(self.busy_fds, ns)
  for i = #self.busy_fds, 1, -1 do
    local fd = self.busy_fds[i]
    if ready[fd] then
      local connection = self.busy[fd]
      if libpq.PQconsumeInput(connection.handle) ~= 1 then
        connection:fail()
      end
      if libpq.PQisBusy(connection.handle) == 0 then
        on_answer(connection.tag)
        local result = libpq.PQgetResult(connection.handle)
        while result ~= nil do
          connection:take(result)
          result = libpq.PQgetResult(connection.handle)
        end
        self.busy[fd] = nil
        table.remove(self.busy_fds, i)
        table.insert(self.idle, connection)
      end
    end
  end
end

return postgres
