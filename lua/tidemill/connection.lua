-- tidemill.connect: the queue's database for programs of your own, producers and scripts.
--
--   local db = tidemill.connect("postgresql://user@host/name")
--   db:publish("order.paid", { id = 7 })
--   db:close()
--
-- The same functions as in a handler, on one connection, which block the program until the answer is
-- there. One that broke is made anew when it is asked next, outside of a transaction.
--
-- Plain LuaJIT only: in an executor it would hold up every other delivery.

local host = require "tidemill.host"
local native = require "tidemill.native"
local argument = require "tidemill.argument"
local sql = require "tidemill.sql"

local find, format, match = string.find, string.format, string.match

local NONE = ""

-- The engine of one connection, see sql.lua.
local Engine = {}
Engine.__index = Engine

-- A connection that works, or nil and why there is none.
local function ready(self)
  if self.closed then
    return nil, "this connection is closed"
  elseif self.handle and not self.handle:is_lost() then
    return self.handle
  elseif self.handle then
    self.handle:close()
  end
  local wrong
  self.handle, wrong = native.connect(self.dsn, self.application)
  return self.handle, wrong
end

local function query_alone(self, text, arguments)
  if self.session then
    return nil, "inside of a transaction use the functions of its argument (tx:query, tx:publish)"
  end
  local handle, wrong = ready(self)
  if not handle then
    return nil, wrong
  end
  local rows
  rows, wrong = handle:ask(text, arguments, true)
  if rows and handle:in_transaction() then
    handle:ask("ROLLBACK", NONE)
    return nil, { message = "this statement begins a transaction, which was rolled back: use db:transaction" }
  elseif not rows then
    return nil, wrong
  end
  return rows
end

function Engine:query(session, text, arguments)
  if session == nil then
    return query_alone(self, text, arguments)
  elseif self.session ~= session then
    return nil, "this transaction is over"
  end
  local rows, wrong = self.handle:ask(text, arguments)
  if not self.handle:in_transaction() then
    self.session = nil
    if rows then
      return nil, { message = "this statement ended the transaction: leave that to the end of its function" }
    end
  end
  if not rows then
    return nil, wrong
  end
  return rows
end

function Engine:begin(text)
  if self.session then
    return nil, "a transaction cannot begin inside of another: use the one there is, and savepoints"
  end
  local handle, wrong = ready(self)
  if not handle then
    return nil, wrong
  end
  local rows
  rows, wrong = handle:ask(text, NONE)
  if not rows then
    return nil, wrong
  end
  self.session = {}
  return self.session
end

local function finish(self, session, command)
  if self.session ~= session then
    return nil, "this transaction is over"
  end
  self.session = nil
  local rows, tag = self.handle:ask(command, NONE, command == "COMMIT")
  if rows and tag ~= command then
    return nil, {
      message = "the transaction was rolled back, since one of its statements had failed", sqlstate = "25P02",
    }
  end
  return rows, tag
end

function Engine:commit(session)
  return finish(self, session, "COMMIT")
end

function Engine:rollback(session)
  return finish(self, session, "ROLLBACK")
end

function Engine.publisher() end

-- ---- connections --------------------------------------------------------------------------------

local engines = setmetatable({}, { __mode = "k" })

local Connection = {}
Connection.__index = Connection

-- The functions of an engine as sql.lua calls them, without self.
local function bound(engine)
  local functions = { schema = engine.schema, publisher = Engine.publisher }
  for _, name in ipairs { "query", "begin", "commit", "rollback" } do
    functions[name] = function(...)
      return engine[name](engine, ...)
    end
  end
  return functions
end

local function engine_of(self, name)
  local engine = engines[self]
  if not engine then
    error(format("call it with a colon, db:%s(…)", name), 3)
  end
  return engine.bound
end

-- One SQL statement with the arguments $1 …: its rows.
function Connection:query(text, ...)
  local rows, wrong = sql.ask(engine_of(self, "query"), nil, text, ...)
  if not rows then
    sql.raise("db:query", wrong, 2)
  end
  return rows
end

-- Publishes one message, in a transaction of its own.
function Connection:publish(topic, payload, options)
  local published, wrong = sql.publish(engine_of(self, "publish"), nil, topic, payload, options)
  if not published then
    sql.raise("db:publish", wrong, 2)
  end
  return published
end

-- Publishes a list of messages in one statement.
function Connection:publish_many(list)
  local published, wrong = sql.publish_many(engine_of(self, "publish_many"), nil, list)
  if not published then
    sql.raise("db:publish_many", wrong, 2)
  end
  return published
end

-- Calls `fn(tx)` in a transaction, as tidemill.transaction does.
function Connection:transaction(fn, options)
  local engine = engine_of(self, "transaction")
  return sql.transaction(engine, "db:transaction", fn, options, engine.commit)
end

-- Closes it; a transaction that is open is rolled back. Closing twice is no error.
function Connection:close()
  engine_of(self, "close")
  local engine = engines[self]
  engine.closed = true
  if engine.handle then
    engine.handle:close()
  end
end

local OPTIONS = {
  schema = function(value)
    if type(value) ~= "string" or #value > 63 or not match(value, "^[%a_][%w_]*$") then
      return "expected a name of letters, digits and _, found " .. argument.show(value)
    end
  end,
  application_name = argument.text,
}

local function options_problem(dsn, options)
  local wrong = argument.optional_text(dsn)
  if wrong then
    return wrong
  elseif dsn and find(dsn, "\0", 1, true) then
    return "the address of the database holds a zero byte"
  end
  wrong = argument.optional_table(options)
  if wrong then
    return "options: " .. wrong
  end
  for name, value in pairs(options or {}) do
    if not OPTIONS[name] then
      return format("options: %s is unknown, known are application_name, schema", argument.show(name))
    end
    wrong = OPTIONS[name](value)
    if wrong then
      return format("options.%s: %s", name, wrong)
    end
  end
end

-- Connects to the database that `dsn` names (a libpq URI or conninfo; nothing: the PG* variables), and
-- returns the connection. `options`: `schema` of the queue (tidemill), `application_name`.
local function connect(dsn, options)
  local wrong = (not host.plain or host.running())
    and "handlers have a database already, use tidemill.query and tidemill.publish"
    or options_problem(dsn, options)
  if wrong then
    sql.raise("tidemill.connect", wrong, 2)
  end
  local engine = setmetatable({
    dsn = dsn,
    application = options and options.application_name or "tidemill script",
    schema = options and options.schema or "tidemill",
  }, Engine)
  engine.bound = bound(engine)
  local handle
  handle, wrong = ready(engine)
  if not handle then
    sql.raise("tidemill.connect", wrong, 2)
  end
  local connection = setmetatable({}, Connection)
  engines[connection] = engine
  return connection
end

return { connect = connect }
