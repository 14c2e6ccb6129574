-- A database with the schema of sql/ and without the program, for the specs of the SQL itself.
--
--   local ledger = schema.new()
--   setup(function() ledger:open() end)
--   teardown(function() ledger:close() end)
--   before_each(function() ledger:clear() end)
--   after_each(function() ledger:close_connections() end)

local lfs = require "lfs"
local folder = require "spec.support.folder"
local pg = require "spec.support.pg"
local tidemill = require "spec.support.tidemill"

local schema = {}

-- The files of sql/ in the order of their numbers.
function schema.files()
  local names = {}
  for name in lfs.dir "sql" do
    if name:match "^%d+_.*%.sql$" then
      table.insert(names, name)
    end
  end
  table.sort(names)
  return names
end

-- The text of one file with its placeholders filled in. `options`: schema, table, prefix.
function schema.text(name, options)
  options = options or {}
  local values = {
    ["{schema}"] = ('"%s"'):format(options.schema or "tidemill"),
    ["{table}"] = ('"%s"'):format(options.table or "queue_message"),
    ["{prefix}"] = options.prefix or "tidemill",
  }
  return (folder.read("sql/" .. name):gsub("{%a+}", values))
end

-- Makes the schema on a connection, in one transaction.
function schema.install(db, options)
  local script = {
    "begin; set local search_path = pg_catalog, pg_temp;",
    ('create schema "%s";'):format(options and options.schema or "tidemill"),
  }
  for _, name in ipairs(schema.files()) do
    table.insert(script, schema.text(name, options))
  end
  table.insert(script, "commit;")
  db:exec(table.concat(script, "\n"))
end

-- The values of one column of rows, in their order.
function schema.column(rows, name)
  local values = {}
  for i, row in ipairs(rows) do
    values[i] = row[name]
  end
  return values
end

-- ---- one database for a spec file ---------------------------------------------------------------

local Ledger = {}
Ledger.__index = Ledger

function schema.new()
  return setmetatable({ opened = {} }, Ledger)
end

function Ledger:open()
  self.app = tidemill.app {}
  self.db = self.app.db
  schema.install(self.db)
end

function Ledger:close()
  self.app:close()
end

-- Everything as it was after `open`.
function Ledger:clear()
  self.db:exec [[
    truncate tidemill.queue_message, tidemill.subscription, tidemill.worker restart identity;
    update tidemill.setting set prefix = 'tidemill', max_payload_bytes = 1048576, notify = true;
  ]]
  self.db:notices()
end

-- A further connection, until close_connections. `extra` is added to the DSN.
function Ledger:connect(extra)
  local connection = pg.connect(self.app.dsn .. " " .. (extra or ""))
  table.insert(self.opened, connection)
  return connection
end

function Ledger:close_connections()
  for _, connection in ipairs(self.opened) do
    connection:close()
  end
  self.opened = {}
end

-- Registers a subscription and returns its lane.
function Ledger:subscribe(topic, subscriber)
  return tonumber(self.db:value(
    "insert into tidemill.subscription (app, topic, subscriber) values ('shop', $1, $2) returning lane",
    topic, subscriber))
end

-- Rows of the ledger in the order of `seq`; `where` is SQL.
function Ledger:rows(where)
  return self.db:query(("select * from tidemill.queue_message where %s order by seq"):format(where or "true"))
end

-- The first row of a statement.
function Ledger:first(sql, ...)
  return self.db:query(sql, ...)[1]
end

-- The error of a statement, which must fail: the first line of its text, and its SQLSTATE.
function Ledger:refused(sql, ...)
  return schema.refused(self.db, sql, ...)
end

function schema.refused(connection, sql, ...)
  local ok, err = pcall(connection.query, connection, sql, ...)
  if ok then
    error("was not refused: " .. sql, 2)
  end
  return err.message:match "^ERROR:%s+([^\n]*)", err.sqlstate
end

-- The payloads of the notifications that `fn` causes on a channel. A marker of our own comes last.
function Ledger:notified(fn, channel)
  channel = channel or "tidemill_queue"
  local listener = self:connect()
  listener:exec("listen " .. channel)
  fn()
  self.db:query("select pg_notify($1, 'the end')", channel)
  local payloads = {}
  while true do
    local notify = listener:wait_notify(10) or error("the marker did not arrive", 2)
    if notify.payload == "the end" then
      return payloads
    end
    table.insert(payloads, notify.payload)
  end
end

-- Waits until the statement sent on a connection waits for a lock.
function Ledger:wait_until_blocked(connection)
  self.app:wait_until(function()
    return self.db:value("select wait_event_type from pg_stat_activity where pid = $1", connection.pid) == "Lock"
  end, 10, "the statement waits for a lock")
end

return schema
