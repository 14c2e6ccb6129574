-- A Postgres server of a spec's own, to be stopped and started at will. For specs that only look,
-- the server of script/with-postgres is enough.
--
--   local server
--   setup(function() server = cluster.new() end)
--   teardown(function() server:close() end)
--   after_each(function() server:close_apps() end)
--
--   local app = server:app { config = …, handlers = … }
--   server:stop "immediate"
--   server:start()

local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local journal = require "spec.support.journal"
local pg = require "spec.support.pg"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

local cluster = {}

local Cluster = {}
Cluster.__index = Cluster

local CONFIG = [[
listen_addresses = ''
unix_socket_directories = '%s'
unix_socket_permissions = 0700
max_connections = 100
shared_buffers = 16MB
fsync = off
timezone = 'UTC'
]]

local STOP_SIGNALS = { smart = "TERM", fast = "INT", immediate = "QUIT" }

local function must(...)
  local result = process.run { argv = { ... }, cwd = "/" }
  if result.code ~= 0 then
    error(("%s: exit code %s\n%s%s"):format(table.concat({ ... }, " "), tostring(result.code), result.stdout,
      result.stderr), 2)
  end
  return result.stdout
end

-- Postgres refuses to run as root: then it runs under the account `postgres`.
local function account_words()
  if must("id", "-u") == "0\n" then
    return { "setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups" }
  end
  return {}
end

local function joined(words, ...)
  local list = { unpack(words) }
  for _, word in ipairs { ... } do
    table.insert(list, word)
  end
  return list
end

-- Makes a server and starts it. Needs the environment of script/with-postgres, for the programs.
function cluster.new()
  local self = setmetatable({ apps = {}, account = account_words() }, Cluster)
  self.bin = assert(os.getenv "TIDEMILL_TEST_PGBIN", "run inside script/with-postgres")
  -- While an app is open, `close` of another does not take this server for a stray process.
  self.guard = tidemill.app { database = false }
  self.dir = folder.temp "tidemill-pg"
  if #self.account > 0 then
    must("chown", "postgres:", self.dir)
  end
  self.data = self.dir .. "/data"
  must(unpack(joined(self.account, self.bin .. "/initdb", "-D", self.data, "-N", "-A", "trust", "-U", "postgres", "-E",
    "UTF8", "--locale=C.UTF-8")))
  local file = assert(io.open(self.data .. "/postgresql.conf", "a"))
  file:write(CONFIG:format(self.dir))
  file:close()
  self:start()
  return self
end

-- The conninfo of a database of this server.
function Cluster:dsn(database)
  return ("host='%s' port=5432 user=postgres dbname=%s"):format(self.dir, database or "postgres")
end

-- Starts the server, and gives the apps new connections in the place of those that broke.
function Cluster:start()
  self.server = process.spawn {
    argv = joined(self.account, self.bin .. "/postgres", "-D", self.data), cwd = "/",
  }
  local probe = clock.wait_until(function()
    if self.server:poll() then
      error("the server has ended:\n" .. self.server:output(), 0)
    end
    local ok, connection = pcall(pg.connect, self:dsn())
    return ok and connection
  end, 30, "the server accepts connections")
  probe:close()
  for _, app in ipairs(self.apps) do
    app.db:close()
    app.db = app:connect()
  end
end

-- Stops the server: "smart", "fast" or "immediate" (as if the power had failed).
function Cluster:stop(mode)
  self.server:kill(STOP_SIGNALS[mode])
  self.server:wait(30)
end

-- An app (see journal.app) with a database of its own on this server.
function Cluster:app(options)
  local app = journal.app { config = options.config, handlers = options.handlers, database = false }
  local name = ("spec_%d"):format(#self.apps + 1)
  local admin = pg.connect(self:dsn())
  admin:exec(("drop database if exists %s with (force)"):format(name))
  admin:exec(("create database %s"):format(name))
  admin:close()
  app.dsn = self:dsn(name)
  app.db = app:connect()
  table.insert(self.apps, app)
  return app
end

-- Closes the apps, starting the server if it is down: an orderly stop needs it.
function Cluster:close_apps()
  if self.server:poll() then
    self:start()
  end
  local apps = self.apps
  self.apps = {}
  for _, app in ipairs(apps) do
    app:close()
  end
end

-- Ends the server and removes it. Asserts that no process is left.
function Cluster:close()
  self:stop "immediate"
  self.guard:close()
  folder.remove(self.dir)
end

return cluster
