-- SQL for handlers and for programs of your own: statements, transactions, and what is published in
-- them.
--
-- An engine is what carries it out: the executor's ops (lua/tidemill/init.lua), or a connection of a
-- plain program (lua/tidemill/connection.lua). It has
--
--   query(session, text, arguments, …)  rows, or nil and why not; `session` is nil outside of a transaction.
--                                     The arguments come encoded, and behind that as they were given
--   begin(text)                       a session, or nil and why not
--   commit(session), rollback(session)
--   publisher()                       who publishes where nobody says so, or nil
--   schema                            of our functions
--   refusal                           why they cannot be used; nil: they can
--   begin_anew()                      a transaction is tried again; may be left out
--
-- Why not is a text (a mistake of the caller) or a table (what the database said).

local native = require "tidemill.native"
local argument = require "tidemill.argument"
local publication = require "tidemill.publication"
local render = require "tidemill.render"

-- A handler may have changed the library's tables.
local error, getmetatable, ipairs, pairs, rawget = error, getmetatable, ipairs, pairs, rawget
local select, setmetatable, type = select, setmetatable, type
local unpack, xpcall = unpack, xpcall
local getinfo, is_own = debug.getinfo, render.is_own
local concat, find, format = table.concat, string.find, string.format
local encode, ends_transaction = native.arguments, native.ends_transaction

local MAX_RETRIES = 100

local sql = {}

-- ---- errors -------------------------------------------------------------------------------------

-- What the database said: message, sqlstate, detail, hint, constraint, schema, table, column; `lost`
-- when the connection broke, `unknown` when nobody knows whether it took effect; `where`, the line.
-- The metatable is all deliveries', so nobody gets hold of it.
local Failure = { __metatable = "an error of the database" }

function Failure:__tostring()
  local text = format("%s%s", self.where and self.where .. ": " or "", self.message)
  if self.sqlstate then
    text = format("%s (SQLSTATE %s)", text, self.sqlstate)
  end
  return self.hint and format("%s; %s", text, self.hint) or text
end

-- The line of the first Lua function from `level` on that is not the library's.
local function place(level)
  for at = level + 1, level + 20 do
    local info = getinfo(at, "Sl")
    if not info then
      return nil
    elseif info.currentline > 0 and not is_own(info.short_src) then
      return format("%s:%d", info.short_src, info.currentline)
    end
  end
end

-- Raises why not at `level`, counted as for error.
local function raise(name, wrong, level)
  if type(wrong) == "table" then
    wrong.where = place(level + 1)
    error(setmetatable(wrong, Failure), 0)
  end
  error(format("%s: %s", name, wrong), level + 1)
end
sql.raise = raise

-- ---- statements ---------------------------------------------------------------------------------

local function ask(engine, session, text, ...)
  if type(text) ~= "string" then
    return nil, "expected SQL as a text, found " .. argument.show(text)
  elseif find(text, "\0", 1, true) then
    return nil, "the SQL text holds a zero byte"
  end
  local arguments, wrong = encode(...)
  if not arguments then
    return nil, wrong
  end
  return engine.query(session, text, arguments, ...)
end

-- One statement with arguments $1 …: rows, or nil and why not.
sql.ask = ask

-- ---- publishing ---------------------------------------------------------------------------------

local RESULT = "select p.id, p.topic, p.delivered, p.duplicate from "

-- No such function, no such schema.
local ABSENT = { ["42883"] = true, ["3F000"] = true }

-- Calls a function of our schema with JSON: its rows, or nil and why not.
local function ask_queue(engine, session, name, json)
  local rows, wrong = ask(engine, session, format('%s"%s".%s($1::jsonb) as p', RESULT, engine.schema, name), json)
  if not rows and type(wrong) == "table" and ABSENT[wrong.sqlstate] then
    wrong.hint = format('there is no queue in schema "%s" of this database: `tidemill migrate` makes one',
      engine.schema)
  end
  return rows, wrong
end

local function carried_of(engine)
  return { published_by = engine.publisher() }
end

-- One message, in the transaction of `session`: its result, or nil and why not.
function sql.publish(engine, session, topic, payload, options)
  if engine.refusal then
    return nil, engine.refusal
  end
  local item, wrong = publication.encode(nil, topic, payload, options, carried_of(engine))
  if not item then
    return nil, wrong
  end
  local rows
  rows, wrong = ask_queue(engine, session, "publish_item", item)
  if not rows then
    return nil, wrong
  end
  return rows[1]
end

-- An item of publish_many: topic, payload, and options beside them.
local function encode_item(item, carried)
  if type(item) ~= "table" then
    return nil, "expected a table with `topic`, `payload` and options, found " .. argument.show(item)
  end
  local options = {}
  for name, value in pairs(item) do
    if name ~= "topic" and name ~= "payload" then
      options[name] = value
    end
  end
  return publication.encode(nil, item.topic, item.payload, options, carried)
end

-- A list of messages, in one statement: the results in its order, or nil and why not.
function sql.publish_many(engine, session, list)
  if type(list) ~= "table" then
    return nil, "expected a list of messages, found " .. argument.show(list)
  elseif engine.refusal then
    return nil, engine.refusal
  end
  local items, carried = {}, carried_of(engine)
  for i, item in ipairs(list) do
    local json, wrong = encode_item(item, carried)
    if not json then
      return nil, format("item %d: %s", i, wrong)
    end
    items[i] = json
  end
  for key in pairs(list) do
    if type(key) ~= "number" or key % 1 ~= 0 or key < 1 or key > #items then
      return nil, format("expected a list of messages, found a table with the key %s", argument.show(key))
    end
  end
  if #items == 0 then
    return {}
  end
  local rows, wrong = ask_queue(engine, session, "publish_many", "[" .. concat(items, ",") .. "]")
  if not rows then
    return nil, wrong
  end
  rows.affected, rows.fields = nil, nil
  return rows
end

-- ---- transactions -------------------------------------------------------------------------------

-- What a `tx` finds its methods in is all deliveries', so nobody gets hold of that.
local SEAL = {}
local methods = {}
local Transaction = { __index = methods, __metatable = SEAL }

-- Why a transaction that went with its connection is over: what was said when that was noticed.
local function loss_of(self)
  local loss = self.loss
  return { message = "this transaction is over: " .. loss.message, sqlstate = loss.sqlstate, lost = true }
end

local function remember_loss(self, wrong)
  if type(wrong) == "table" and wrong.lost and not self.loss then
    self.loss = { message = wrong.message, sqlstate = wrong.sqlstate }
  end
end

local function misuse(self)
  if type(self) ~= "table" or getmetatable(self) ~= SEAL then
    return "call it with a colon, tx:query(…)"
  elseif self.loss then
    return loss_of(self)
  elseif self.over then
    return "this transaction is over"
  end
end

function methods:query(text, ...)
  local wrong = misuse(self)
  local rows
  if not wrong and type(text) == "string" and ends_transaction(text) then
    wrong = "this statement would end the transaction: leave that to the end of its function"
  elseif not wrong then
    rows, wrong = ask(self.engine, self.session, text, ...)
  end
  if not rows then
    remember_loss(self, wrong)
    raise("tx:query", wrong, 2)
  end
  return rows
end

function methods:publish(topic, payload, options)
  local wrong = misuse(self)
  local published
  if not wrong then
    published, wrong = sql.publish(self.engine, self.session, topic, payload, options)
  end
  if not published then
    remember_loss(self, wrong)
    raise("tx:publish", wrong, 2)
  end
  return published
end

function methods:publish_many(list)
  local wrong = misuse(self)
  local published
  if not wrong then
    published, wrong = sql.publish_many(self.engine, self.session, list)
  end
  if not published then
    remember_loss(self, wrong)
    raise("tx:publish_many", wrong, 2)
  end
  return published
end

local ISOLATION = {
  ["read committed"] = true, ["repeatable read"] = true, serializable = true,
}

local OPTIONS = {
  isolation = function(value)
    if not ISOLATION[value] then
      return 'expected "read committed", "repeatable read" or "serializable", found ' .. argument.show(value)
    end
  end,
  read_only = function(value)
    if type(value) ~= "boolean" then
      return "expected true or false, found " .. argument.show(value)
    end
  end,
  retries = function(value)
    return argument.integer(value, 0, MAX_RETRIES)
  end,
}

-- The text that begins a transaction, or nil and why there is none.
local function begin_text(fn, options, isolation)
  if type(fn) ~= "function" then
    return nil, "expected a function, found " .. argument.show(fn)
  end
  local wrong = argument.optional_table(options)
  if wrong then
    return nil, "options: " .. wrong
  end
  for name, value in pairs(options or {}) do
    if not OPTIONS[name] then
      return nil, format("options: %s is unknown, known are isolation, read_only, retries", argument.show(name))
    end
    wrong = OPTIONS[name](value)
    if wrong then
      return nil, format("options.%s: %s", name, wrong)
    end
  end
  isolation = options and options.isolation or isolation
  local text = "BEGIN" .. (isolation and " ISOLATION LEVEL " .. isolation:upper() or "")
  if options and options.read_only ~= nil then
    text = text .. (options.read_only and " READ ONLY" or " READ WRITE")
  end
  return text
end

local RETRIED = { ["40001"] = true, ["40P01"] = true }

local function is_retried(cause)
  return type(cause) == "table" and RETRIED[rawget(cause, "sqlstate")] or false
end

local function pack(...)
  return { n = select("#", ...), ... }
end

-- Once: true and a pack of what the function returned; or false, why not, and whether that was
-- raised by the function.
local function attempt(engine, text, fn, commit)
  local session, wrong = engine.begin(text)
  if not session then
    return false, wrong, false
  end
  local tx = setmetatable({ engine = engine, session = session }, Transaction)
  local results = pack(xpcall(fn, render.remember, tx))
  tx.over = true
  if not results[1] then
    engine.rollback(session)
    return false, results[2], true
  end
  local committed
  if tx.loss then
    wrong = loss_of(tx)
  else
    committed, wrong = commit(session)
  end
  if not committed then
    engine.rollback(session)
    return false, wrong, false
  end
  return true, results
end

-- Calls `fn` with a transaction that is committed when it returns, and rolled back when it raises.
-- Returns what it returned. `isolation` is that of options that name none. To be called as the last
-- thing of a function of the library (a tail call), so that errors are raised at the user's line.
function sql.transaction(engine, name, fn, options, commit, isolation)
  local text, refused = begin_text(fn, options, isolation)
  if not text then
    raise(name, refused, 2)
  end
  local retries = options and options.retries or 0
  for tries = 0, retries do
    local ok, cause, raised = attempt(engine, text, fn, commit)
    if ok then
      return unpack(cause, 2, cause.n)
    elseif tries == retries or not is_retried(cause) then
      if raised then
        error(cause, 0)
      end
      raise(name, cause, 2)
    elseif engine.begin_anew then
      engine.begin_anew()
    end
  end
end

return sql
