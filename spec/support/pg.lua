-- libpq through the FFI: what the specs look into the database with, apart from any code of the
-- program.
--
-- Values travel as text both ways: a parameter of nil is NULL, booleans become `t` and `f`, a
-- column that is NULL is nil. A failing statement raises a table with `message`, `sqlstate`,
-- `detail`, `hint`; tostring gives both of the first.

local ffi = require "ffi"
local clock = require "spec.support.clock"

if not pcall(ffi.typeof, "struct spec_pg_notify") then
  ffi.cdef [[
    typedef struct pg_conn PGconn;
    typedef struct pg_result PGresult;
    struct spec_pg_notify { char *relname; int be_pid; char *extra; struct spec_pg_notify *next; };
    PGconn *PQconnectdbParams(const char *const *keywords, const char *const *values, int expand_dbname);
    void PQfinish(PGconn *conn);
    int PQstatus(const PGconn *conn);
    char *PQerrorMessage(const PGconn *conn);
    int PQbackendPID(const PGconn *conn);
    int PQsocket(const PGconn *conn);
    int PQtransactionStatus(const PGconn *conn);
    PGresult *PQexec(PGconn *conn, const char *query);
    PGresult *PQexecParams(PGconn *conn, const char *command, int nParams, const unsigned int *paramTypes,
      const char *const *paramValues, const int *paramLengths, const int *paramFormats, int resultFormat);
    int PQsendQueryParams(PGconn *conn, const char *command, int nParams, const unsigned int *paramTypes,
      const char *const *paramValues, const int *paramLengths, const int *paramFormats, int resultFormat);
    PGresult *PQgetResult(PGconn *conn);
    int PQisBusy(PGconn *conn);
    int PQconsumeInput(PGconn *conn);
    struct spec_pg_notify *PQnotifies(PGconn *conn);
    void PQfreemem(void *ptr);
    int PQresultStatus(const PGresult *res);
    char *PQresultErrorMessage(const PGresult *res);
    char *PQresultErrorField(const PGresult *res, int fieldcode);
    void PQclear(PGresult *res);
    int PQntuples(const PGresult *res);
    int PQnfields(const PGresult *res);
    char *PQfname(const PGresult *res, int field);
    char *PQcmdTuples(PGresult *res);
    int PQgetisnull(const PGresult *res, int row, int field);
    int PQgetlength(const PGresult *res, int row, int field);
    char *PQgetvalue(const PGresult *res, int row, int field);
    typedef void (*PQnoticeProcessor)(void *arg, const char *message);
    PQnoticeProcessor PQsetNoticeProcessor(PGconn *conn, PQnoticeProcessor proc, void *arg);
  ]]
end

local libpq = ffi.load "libpq.so.5"

local CONNECTION_OK = 0
local PGRES_EMPTY_QUERY, PGRES_COMMAND_OK, PGRES_TUPLES_OK = 0, 1, 2
local SQLSTATE, DETAIL, HINT = string.byte "C", string.byte "D", string.byte "H"

-- libpq calls back into Lua for notices, which compiled code may not do.
jit.off(true, true)

local pg = {}

local Error = {}
Error.__index = Error
function Error:__tostring()
  if self.sqlstate then
    return ("%s (SQLSTATE %s)"):format(self.message, self.sqlstate)
  end
  return self.message
end

local function text_or_nil(pointer)
  if pointer ~= nil then
    return ffi.string(pointer)
  end
end

local function trimmed(pointer)
  return (ffi.string(pointer):gsub("%s+$", ""))
end

local Connection = {}
Connection.__index = Connection

local function handle_of(self)
  return self.handle or error("this connection is closed", 3)
end

local function raise_lost(handle)
  error(setmetatable({ message = trimmed(libpq.PQerrorMessage(handle)) }, Error), 0)
end

-- Frees `result`, whatever happens.
local function rows_of(handle, result)
  if result == nil then
    raise_lost(handle)
  end
  local status = libpq.PQresultStatus(result)
  if status ~= PGRES_TUPLES_OK and status ~= PGRES_COMMAND_OK and status ~= PGRES_EMPTY_QUERY then
    local err = setmetatable({
      message = trimmed(libpq.PQresultErrorMessage(result)),
      sqlstate = text_or_nil(libpq.PQresultErrorField(result, SQLSTATE)),
      detail = text_or_nil(libpq.PQresultErrorField(result, DETAIL)),
      hint = text_or_nil(libpq.PQresultErrorField(result, HINT)),
    }, Error)
    libpq.PQclear(result)
    error(err, 0)
  end
  local rows = { affected = tonumber(ffi.string(libpq.PQcmdTuples(result))) or 0, fields = {} }
  for field = 1, libpq.PQnfields(result) do
    rows.fields[field] = ffi.string(libpq.PQfname(result, field - 1))
  end
  for i = 0, libpq.PQntuples(result) - 1 do
    local row = {}
    for field, name in ipairs(rows.fields) do
      if libpq.PQgetisnull(result, i, field - 1) == 0 then
        row[name] = ffi.string(libpq.PQgetvalue(result, i, field - 1), libpq.PQgetlength(result, i, field - 1))
      end
    end
    rows[i + 1] = row
  end
  libpq.PQclear(result)
  return rows
end

local function text_of(value)
  if type(value) == "boolean" then
    return value and "t" or "f"
  elseif type(value) == "number" then
    return ("%.17g"):format(value)
  elseif type(value) == "string" then
    assert(not value:find "%z", "a parameter holds a NUL, which text cannot carry")
    return value
  elseif type(value) == "cdata" then
    return (tostring(value):gsub("U?LL$", ""))
  end
  error("a parameter is a " .. type(value) .. "; give a string, number, boolean or nil", 4)
end

-- The parameters for libpq. The connection keeps the Lua strings that own their bytes until its
-- next statement.
local function parameters(self, ...)
  local count = select("#", ...)
  local values = ffi.new("const char *[?]", math.max(count, 1))
  local owners = {}
  for i = 1, count do
    local value = select(i, ...)
    if value ~= nil then
      owners[i] = text_of(value)
      values[i - 1] = owners[i]
    end
  end
  self.owners = owners
  return count, values
end

-- Whom a notice belongs to: libpq hands back the number given with the callback.
local by_number = setmetatable({}, { __mode = "v" })
local last_number = 0

local on_notice = ffi.cast("PQnoticeProcessor", function(number, message)
  local connection = by_number[tonumber(ffi.cast("intptr_t", number))]
  if connection then
    table.insert(connection.noticed, trimmed(message))
  end
end)

-- Connects, waiting at most 10 s. `conninfo` is a URI or key=value text and defaults to the PG*
-- environment.
function pg.connect(conninfo)
  local pairs_given = {
    { "dbname", conninfo or "" },
    { "fallback_application_name", "tidemill spec" },
    { "connect_timeout", "10" },
    { "client_encoding", "UTF8" },
  }
  local keywords = ffi.new("const char *[?]", #pairs_given + 1)
  local values = ffi.new("const char *[?]", #pairs_given + 1)
  local n = 0
  for _, pair in ipairs(pairs_given) do
    if pair[2] ~= "" then
      keywords[n], values[n] = pair[1], pair[2]
      n = n + 1
    end
  end
  local handle = libpq.PQconnectdbParams(keywords, values, 1)
  if libpq.PQstatus(handle) ~= CONNECTION_OK then
    local message = trimmed(libpq.PQerrorMessage(handle))
    libpq.PQfinish(handle)
    error(setmetatable({ message = message }, Error), 2)
  end
  local self = setmetatable({ handle = ffi.gc(handle, libpq.PQfinish), waiting = {}, noticed = {} }, Connection)
  self.pid = libpq.PQbackendPID(handle)
  last_number = last_number + 1
  by_number[last_number] = self
  libpq.PQsetNoticeProcessor(handle, on_notice, ffi.cast("void *", last_number))
  return self
end

-- One statement with parameters $1…: the rows by column name, with `affected` and `fields`.
function Connection:query(sql, ...)
  local handle = handle_of(self)
  local count, values = parameters(self, ...)
  return rows_of(handle, libpq.PQexecParams(handle, sql, count, nil, values, nil, nil, 0))
end

-- The first column of the first row; nil when there is none.
function Connection:value(sql, ...)
  local rows = self:query(sql, ...)
  return rows[1] and rows[1][rows.fields[1]]
end

-- Several statements in one text, without parameters: the rows of the last.
function Connection:exec(script)
  local handle = handle_of(self)
  return rows_of(handle, libpq.PQexec(handle, script))
end

-- Starts a statement without waiting for it, to see it block on another connection. `receive` ends
-- it.
function Connection:send(sql, ...)
  local handle = handle_of(self)
  local count, values = parameters(self, ...)
  if libpq.PQsendQueryParams(handle, sql, count, nil, values, nil, nil, 0) ~= 1 then
    raise_lost(handle)
  end
end

-- Whether the statement sent is still running.
function Connection:busy()
  local handle = handle_of(self)
  if libpq.PQconsumeInput(handle) ~= 1 then
    raise_lost(handle)
  end
  return libpq.PQisBusy(handle) == 1
end

-- The rows of the statement sent, or its error. Raises when it does not end within `secs` (10).
function Connection:receive(secs)
  local handle = handle_of(self)
  clock.wait_until(function()
    return not self:busy()
  end, secs or 10, "the end of the statement sent")
  local first = libpq.PQgetResult(handle)
  while true do
    local more = libpq.PQgetResult(handle)
    if more == nil then
      break
    end
    libpq.PQclear(more)
  end
  return rows_of(handle, first)
end

local function collect_notifies(self)
  local handle = handle_of(self)
  if libpq.PQconsumeInput(handle) ~= 1 then
    raise_lost(handle)
  end
  while true do
    local notify = libpq.PQnotifies(handle)
    if notify == nil then
      break
    end
    table.insert(self.waiting, {
      channel = ffi.string(notify.relname),
      payload = ffi.string(notify.extra),
      pid = notify.be_pid,
    })
    libpq.PQfreemem(notify)
  end
end

-- All notifications that have arrived and were not handed out yet, each { channel, payload, pid }.
function Connection:notifies()
  collect_notifies(self)
  local list = self.waiting
  self.waiting = {}
  return list
end

-- The next notification, or nil when none arrives within `secs`.
function Connection:wait_notify(secs)
  return clock.poll(function()
    collect_notifies(self)
    return table.remove(self.waiting, 1)
  end, secs)
end

-- The notices and warnings of the server not handed out yet, as texts such as `WARNING:  …`.
function Connection:notices()
  local list = self.noticed
  self.noticed = {}
  return list
end

-- Closing twice is no error.
function Connection:close()
  if self.handle then
    libpq.PQfinish(ffi.gc(self.handle, nil))
    self.handle = nil
  end
end

return pg
