-- A database in a spec: what the ops query, begin, commit, rollback and finish give
-- (src/executor/op_sql.c), made of stubs. Arguments, transactions and errors are lua/tidemill/sql.lua's own.
--
-- Plain LuaJIT only.

local argument = require "tidemill.argument"
local control = require "tidemill.testing.control"
local native = require "tidemill.native"
local record = require "tidemill.testing.record"
local stubs = require "tidemill.testing.stubs"

local format, match, sub = string.format, string.match, string.sub

-- How much of a statement an error suggests as a stub's text.
local SUGGESTED = 60

local OVER = "this transaction is over, or belongs to another delivery"
local INSIDE = "inside of a transaction use the functions of its argument (tx:query, tx:publish)"
local NESTED = "a transaction cannot begin inside of another: use the one there is, and savepoints"
local ABORTED = {
  query = "current transaction is aborted, commands ignored until end of transaction block",
  commit = "the transaction was rolled back, since one of its statements had failed",
}

local sql = {}

-- ---- answers ------------------------------------------------------------------------------------

-- Returns what is wrong with rows.
function sql.problem(rows)
  if type(rows) ~= "table" then
    return "expected a list of rows, found " .. argument.show(rows)
  end
  for key, row in pairs(rows) do
    if key == "affected" then
      local wrong = argument.integer(row, 0, 2 ^ 53)
      if wrong then
        return "affected: " .. wrong
      end
    elseif key == "fields" then
      if type(row) ~= "table" then
        return "fields: expected a list of names, found " .. argument.show(row)
      end
    elseif type(key) ~= "number" then
      return format("%s is unknown: expected a list of rows, with `affected` and `fields`", argument.show(key))
    elseif type(row) ~= "table" then
      return format("row %d: expected a table by column name, found %s", key, argument.show(row))
    end
  end
end

local function fields_of(rows)
  local names, fields = {}, native.array()
  for _, row in ipairs(rows) do
    for name in pairs(row) do
      names[name] = true
    end
  end
  for name in pairs(names) do
    table.insert(fields, name)
  end
  table.sort(fields)
  return fields
end

-- Fresh tables: a handler may change what it gets.
local function result_of(rows)
  local result = { affected = rows.affected or #rows, fields = rows.fields or fields_of(rows) }
  for i, row in ipairs(rows) do
    result[i] = {}
    for name, value in pairs(row) do
      result[i][name] = value
    end
  end
  return result
end

-- What the server says of a statement that fails.
local function failure_of(wrong)
  local failure = {}
  for name, value in pairs(type(wrong) == "table" and wrong or { message = tostring(wrong) }) do
    failure[name] = value
  end
  failure.message = failure.message or "the statement failed"
  return failure
end

local function refused_of(fault)
  return { message = fault, sqlstate = "22023" }
end

-- A statement's result, or nil and what the server says.
local function ask(delivery, text, ...)
  local rows = delivery.stubs:find("query", text)
  if rows == nil then
    local shown = stubs.plain(text)
    return delivery:fail(format("no stub answers the statement %s: say what it gives by testing.query(%q, {})",
      shown, sub(shown, 1, SUGGESTED)))
  elseif type(rows) == "function" then
    local refused
    rows, refused = rows(...)
    if rows == nil and refused ~= nil then
      return nil, failure_of(refused)
    end
  end
  local wrong = sql.problem(rows)
  if wrong then
    return delivery:fail(format("the stub that answers the statement %s: %s", stubs.plain(text), wrong))
  end
  return result_of(rows)
end

local function note(delivery, text, session, ...)
  table.insert(delivery.queries, {
    sql = stubs.plain(text), transaction = session or nil, arguments = { n = select("#", ...), ... },
  })
end

-- BEGIN, COMMIT and ROLLBACK go well, unless a stub says otherwise.
local function command(delivery, text, session)
  note(delivery, text, session)
  local stub = delivery.stubs:find("query", text)
  if type(stub) == "function" then
    local rows, wrong = stub()
    if rows == nil and wrong ~= nil then
      return failure_of(wrong)
    end
  end
end

-- ---- publishing ---------------------------------------------------------------------------------

-- "item" or "many" for the library's own statements of tx:publish, publish_many and their like.
local function publishes(text)
  return match(text, '^select p%.id, .* from "[^"]*"%.publish_(%w+)%(%$1::jsonb%) as p$')
end

local function publish(delivery, kind, session, body)
  local many = kind == "many"
  local messages = many and native.decode_items(body) or { native.decode_items(body) }
  for i, item in ipairs(messages) do
    messages[i] = record.message(item)
    local fault = record.fault(delivery, messages[i])
    if fault then
      return nil, refused_of(many and format("item %d: %s", i, fault) or fault)
    end
  end
  local result = { affected = #messages, fields = native.array { "id", "topic", "delivered", "duplicate" } }
  for i, message in ipairs(messages) do
    local reply, wrong = record.publish(delivery, message, session or nil)
    if not reply then
      return nil, failure_of(wrong)
    end
    result[i] = reply
  end
  return result
end

-- ---- transactions -------------------------------------------------------------------------------

local function in_transaction(delivery, session)
  return delivery.transaction ~= nil and delivery.transaction.session == session
end

-- What was published in it is there only when it is committed.
local function over(delivery, committed)
  local session = delivery.transaction.session
  delivery.transaction = nil
  record.settle(delivery, session, committed)
end
sql.over = over

-- A statement that needs no stub: its result, or nil and what the server says; and whether it was one.
local function ask_control(delivery, text)
  local transaction = delivery.transaction
  local verdict, what = control.judge(transaction, text, #delivery.published)
  if not verdict then
    return nil, nil, false
  elseif verdict == "failed" then
    return nil, what, true
  elseif verdict == "back" then
    transaction.failed = false
    record.undo(delivery, transaction.session, what)
  end
  return { affected = 0, fields = native.array() }, nil, true
end

-- A statement of the handler's own.
local function ask_any(delivery, session, text, ...)
  note(delivery, text, session, ...)
  local rows, wrong, answered = ask_control(delivery, text)
  if answered then
    return rows, wrong
  end
  return ask(delivery, text, ...)
end

function sql.query(delivery, session, text, _, ...)
  local transaction = delivery.transaction
  if session and not in_transaction(delivery, session) then
    return nil, OVER
  elseif not session and transaction then
    return nil, INSIDE
  elseif transaction and transaction.failed and not control.is_way_back(text) then
    return nil, failure_of { message = ABORTED.query, sqlstate = "25P02" }
  end
  local kind = publishes(text)
  local rows, wrong
  if kind then
    rows, wrong = publish(delivery, kind, session, ...)
  else
    rows, wrong = ask_any(delivery, session, text, ...)
  end
  if not rows and transaction and not control.is_empty(text) then
    transaction.failed = true
  end
  return rows, wrong
end

function sql.begin(delivery, text)
  if delivery.transaction then
    return nil, NESTED
  end
  delivery.transactions = delivery.transactions + 1
  local session = delivery.transactions
  local wrong = command(delivery, text, session)
  if wrong then
    return nil, wrong
  end
  delivery.transaction = { session = session, savepoints = {} }
  return session
end

function sql.rollback(delivery, session)
  if not in_transaction(delivery, session) then
    return nil, OVER
  end
  command(delivery, "ROLLBACK", session)
  over(delivery, false)
  return true
end

function sql.commit(delivery, session)
  if not in_transaction(delivery, session) then
    return nil, OVER
  end
  local wrong = command(delivery, "COMMIT", session)
  if not wrong and delivery.transaction.failed then
    wrong = failure_of { message = ABORTED.commit, sqlstate = "25P02" }
  end
  over(delivery, not wrong)
  if wrong then
    return nil, wrong
  end
  return true
end

-- Commits, and the message is done with it: the handler goes on only where that failed for sure. Otherwise it
-- might return, and so have the message marked done.
function sql.finish(delivery, session)
  if not in_transaction(delivery, session) then
    return nil, OVER
  end
  local fault = record.gathered_fault(delivery)
  if fault then
    delivery.transaction.failed = true
    return nil, refused_of(fault)
  end
  local committed, wrong = sql.commit(delivery, session)
  if committed then
    delivery:finish()
  elseif wrong.unknown then
    delivery:finish_raised(wrong.message)
  end
  return committed, wrong
end

return sql
