-- The program under test, end to end: a folder with config.lua and handlers, a database of its own,
-- and the binary.
--
--   local app
--   before_each(function()
--     app = tidemill.app {
--       config = { subscribe = { ["order.paid"] = "greet" } },
--       handlers = { greet = "return function(payload, ctx) end" },
--     }
--   end)
--   after_each(tidemill.close_all)
--
-- Specs that use it run inside script/with-postgres. `close` (and `close_all`) also assert that
-- nothing is left behind: no process, no connection to the database.

local lfs = require "lfs"
local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local pg = require "spec.support.pg"
local process = require "spec.support.process"

local tidemill = {}

local function absolute(path)
  return path:sub(1, 1) == "/" and path or lfs.currentdir() .. "/" .. path
end

local build = os.getenv "TIDEMILL_BUILD" or "build/debug"
tidemill.binary = absolute(os.getenv "TIDEMILL_BIN" or build .. "/tidemill")

local App = {}
App.__index = App

local open_apps = {}
local last_number = 0

-- ---- the folder ---------------------------------------------------------------------------------

-- A value of a config table as Lua text. Functions have no text: give such a config as a string.
local function lua_text(value, indent)
  if type(value) == "string" then
    return ("%q"):format(value)
  elseif type(value) == "number" then
    return ("%.17g"):format(value)
  elseif type(value) == "boolean" then
    return tostring(value)
  elseif type(value) ~= "table" then
    error("a config table holds a " .. type(value) .. "; write this config as text", 0)
  end
  local lines = {}
  for i, item in ipairs(value) do
    lines[i] = indent .. "  " .. lua_text(item, indent .. "  ") .. ",\n"
  end
  local listed, keys = #value, {}
  for key in pairs(value) do
    if not (type(key) == "number" and key >= 1 and key <= listed and key % 1 == 0) then
      table.insert(keys, key)
    end
  end
  table.sort(keys, function(a, b)
    return tostring(a) < tostring(b)
  end)
  for _, key in ipairs(keys) do
    table.insert(lines, ("%s  [%s] = %s,\n"):format(indent, lua_text(key), lua_text(value[key], indent .. "  ")))
  end
  return "{\n" .. table.concat(lines) .. indent .. "}"
end

-- Writes config.lua: the text given, or the table given.
function App:write_config(config)
  if type(config) == "table" then
    config = "return " .. lua_text(config, "") .. "\n"
  end
  folder.write(self.dir, "config.lua", config)
end

-- Writes a file of the app's folder, making the folders of its path.
function App:write(path, text)
  return folder.write(self.dir, path, text)
end

-- Writes the handler `name` (dots are folders).
function App:write_handler(name, source)
  self:write("handlers/" .. name:gsub("%.", "/") .. ".lua", source)
end

-- ---- the app ------------------------------------------------------------------------------------

-- Makes an app. `options`: `config` (text, or a table without functions), `handlers` (name →
-- source), `database` (false: none). The result has `dir`, `config_path`, `dsn`, `database` and
-- `db`, a connection of the spec's own.
function tidemill.app(options)
  options = options or {}
  last_number = last_number + 1
  local self = setmetatable({ processes = {}, connections = {} }, App)
  -- Before anything is made, so that close_all also cleans up after an app that failed half way.
  table.insert(open_apps, self)

  self.dir = folder.temp "tidemill-app"
  self.config_path = self.dir .. "/config.lua"
  local config = options.config or {}
  if type(config) == "table" then
    self.schema, self.table = config.schema, config.table
  end
  self.schema = self.schema or options.schema or "tidemill"
  self.table = self.table or options.table or "queue_message"
  lfs.mkdir(self.dir .. "/handlers")
  self:write_config(config)
  for name, source in pairs(options.handlers or {}) do
    self:write_handler(name, source)
  end

  if options.database ~= false then
    self.admin = pg.connect()
    self.database = ("tidemill_spec_%d_%d"):format(self.admin.pid, last_number)
    self.admin:exec(("create database %s template template0"):format(self.database))
    self.dsn = ("host='%s' port=%s user='%s' dbname=%s"):format(
      os.getenv "PGHOST" or "", os.getenv "PGPORT" or "5432", os.getenv "PGUSER" or "postgres", self.database)
    self.db = self:connect()
  end
  return self
end

-- One more connection to the app's database, closed with the app. `extra` is added to the DSN.
function App:connect(extra)
  local connection = pg.connect(self.dsn .. " " .. (extra or ""))
  table.insert(self.connections, connection)
  return connection
end

-- The arguments of the program: `words` with the config and the database behind them (before a
-- `--`).
local function command_line(self, words)
  local argv, at = { tidemill.binary }, #words + 1
  for i, word in ipairs(words) do
    if word == "--" then
      at = i
      break
    end
  end
  for i = 1, at - 1 do
    table.insert(argv, words[i])
  end
  table.insert(argv, "-c")
  table.insert(argv, self.config_path)
  if self.dsn then
    table.insert(argv, "--database")
    table.insert(argv, self.dsn)
  end
  for i = at, #words do
    table.insert(argv, words[i])
  end
  return argv
end

-- The options of a call such as run("publish", "t", "{}") or run { "publish", "t", "-", stdin =
-- "{}" }.
local function call_options(self, first, ...)
  local given = type(first) == "table" and first or { first, ... }
  local options = {}
  for key, value in pairs(given) do
    if type(key) == "string" then
      options[key] = value
    end
  end
  options.cwd = options.cwd or self.dir
  options.argv = command_line(self, given)
  return options
end

-- Runs a command of the program to its end: { code, signal, stdout, stderr }. Takes words, or one
-- table of words with the options of `process.run` in it.
function App:run(...)
  return process.run(call_options(self, ...))
end

-- As `run`, and raises with both outputs when the exit code is not 0. Returns the standard output.
function App:must_run(...)
  local result = self:run(...)
  if result.code ~= 0 then
    error(("exit code %s, signal %s\n--- standard output:\n%s\n--- standard error:\n%s"):format(
      tostring(result.code), tostring(result.signal), result.stdout, result.stderr), 2)
  end
  return result.stdout
end

-- Starts a command that stays, without waiting for anything.
function App:spawn(...)
  local started = process.spawn(call_options(self, ...))
  table.insert(self.processes, started)
  return started
end

-- Starts `tidemill run` with further words and options, and waits until it logs `event=ready`.
-- Returns the process.
function App:start(options)
  options = options or {}
  table.insert(options, 1, "run")
  local started = self:spawn(options)
  started:wait_for("event=ready", 30)
  return started
end

-- Stops one worker, or all in the order of their start: SIGTERM, and exit code 0 is expected within
-- 40 s.
function App:stop(which)
  for _, started in ipairs(which and { which } or self.processes) do
    if which or not started.ended then
      started:kill "TERM"
      local code, signal = started:wait(40)
      if code ~= 0 then
        error(("%s: an orderly stop ended with exit code %s, signal %s\n%s"):format(
          started.command, tostring(code), tostring(signal), started:output()), 2)
      end
    end
  end
end

-- ---- looking ------------------------------------------------------------------------------------

local function quoted(name)
  return '"' .. name:gsub('"', '""') .. '"'
end

-- The ledger's name in SQL.
function App:ledger_name()
  return quoted(self.schema) .. "." .. quoted(self.table)
end

-- The rows of the ledger, all columns as text, in the order of `seq` (or of `app.order`, where the
-- table has no such column); `where` is SQL with parameters $1….
function App:ledger(where, ...)
  return self.db:query(("select * from %s where %s order by %s"):format(
    self:ledger_name(), where or "true", self.order or "seq"), ...)
end

-- Polls until `fn` returns something true and returns that; raises after `secs` (30) with the
-- ledger and the workers' logs, `what` saying what did not happen.
function App:wait_until(fn, secs, what)
  return clock.wait_until(fn, secs or 30, function()
    return (type(what) == "function" and what() or what or "(no description)") .. "\n" .. self:describe()
  end)
end

-- The state for a failing spec's reader.
function App:describe()
  local lines = {}
  local ok, rows = pcall(self.ledger, self)
  for i, row in ipairs(ok and rows or {}) do
    if i > 20 then
      table.insert(lines, ("… %d rows in all"):format(#rows))
      break
    end
    table.insert(lines, ("%s %s %s/%s attempts=%s claimed_by=%s error=%s"):format(
      row.id, row.status, row.topic, row.subscriber, row.attempts, row.claimed_by, row.error))
  end
  if not ok then
    table.insert(lines, "the ledger cannot be read: " .. tostring(rows))
  end
  for _, started in ipairs(self.processes) do
    table.insert(lines, started.command .. "\n" .. started:output())
  end
  return table.concat(lines, "\n")
end

-- ---- the end ------------------------------------------------------------------------------------

-- Connections to the app's database that are not the spec's own.
local function stray_connections(self)
  return self.admin:query(
    [[select pid, application_name, state, query from pg_stat_activity
      where datname = $1 and backend_type = 'client backend']], self.database)
end

-- Stops what runs, asserts that nothing is left, and drops the database and the folder. Everything
-- is done even when a part fails; the failures are raised at the end. Closing twice is no error.
-- Programs that a spec started by itself (process.spawn) must have ended before. What a stopped
-- program leaves has `grace_secs` (5) to go.
function App:close(grace_secs)
  if self.closed then
    return
  end
  self.closed = true
  local failures = {}
  local function step(fn)
    local ok, err = pcall(fn)
    if not ok then
      table.insert(failures, tostring(err))
    end
  end

  for _, started in ipairs(self.processes) do
    -- One whose end the spec has waited for is the spec's own affair.
    if not started.ended then
      step(function()
        if started:poll() then
          error(("%s ended by itself: exit code %s, signal %s\n%s"):format(
            started.command, tostring(started.code), tostring(started.signal), started:output()), 0)
        end
        self:stop(started)
      end)
    end
    step(function()
      started:destroy()
    end)
  end
  -- While another app is open, what still runs may be its own.
  if #open_apps == 1 then
    step(function()
      process.assert_none_left(grace_secs)
    end)
  end
  for _, connection in ipairs(self.connections) do
    step(function()
      connection:close()
    end)
  end
  if self.admin then
    step(function()
      local rows
      local gone = clock.poll(function()
        rows = stray_connections(self)
        return #rows == 0
      end, grace_secs or 5)
      if not gone then
        local lines = {}
        for i, row in ipairs(rows) do
          lines[i] = ("%s, %s: %s"):format(row.application_name, row.state, row.query)
        end
        error("connections left to the database:\n  " .. table.concat(lines, "\n  "), 0)
      end
    end)
    step(function()
      self.admin:exec(("drop database if exists %s with (force)"):format(self.database))
    end)
    step(function()
      self.admin:close()
    end)
  end
  if self.dir then
    step(function()
      folder.remove(self.dir)
    end)
  end
  for i, app in ipairs(open_apps) do
    if app == self then
      table.remove(open_apps, i)
      break
    end
  end
  if #failures > 0 then
    error(table.concat(failures, "\n"), 2)
  end
end

-- Closes every app that is open, for after_each.
function tidemill.close_all()
  local failures = {}
  while #open_apps > 0 do
    local ok, err = pcall(App.close, open_apps[#open_apps])
    if not ok then
      table.insert(failures, tostring(err))
    end
  end
  if #failures > 0 then
    error(table.concat(failures, "\n"), 0)
  end
end

return tidemill
