-- What a handler finds around it in a spec: the modules of its app, and, while it runs, the standard library
-- as lua/tidemill/environment.lua changes it. Afterwards all is as the spec had it.
--
-- Plain LuaJIT only.

local app = require "tidemill.testing.app"
local await = require "tidemill.await"
local environment = require "tidemill.environment"
local host = require "tidemill.host"

local rawset, next = rawset, next

local surroundings = {}

-- For good, since a handler's module may keep them in locals when it is loaded. Outside of a run they are what
-- they were.
-- luacheck: push ignore 122
coroutine.resume = await.resume
coroutine.wrap = await.wrap
-- luacheck: pop

-- ---- the standard library -----------------------------------------------------------------------

local LIBRARIES = { _G, string, table, math, os, io, coroutine, debug }

local function copy(map)
  local copied = {}
  for key, value in next, map do
    copied[key] = value
  end
  return copied
end

-- Sets back what was there; what is new in _G stays, as a module that a handler required may have set it.
local function put_back(library, before)
  for key in next, copy(library) do
    if before[key] == nil and library ~= _G then
      rawset(library, key, nil)
    end
  end
  for key, value in next, before do
    rawset(library, key, value)
  end
end

-- The clock of the operating system, as the handler sees it.
local function virtual_clock()
  local time, date = os.time, os.date
  -- luacheck: push ignore 122
  os.time = function(...)
    if select("#", ...) == 0 then
      return math.floor(host.now())
    end
    return time(...)
  end
  os.date = function(format, at)
    return date(format, at or math.floor(host.now()))
  end
  -- luacheck: pop
end

-- Puts the surroundings of a handler in place. Returns a function that puts the spec's own back.
function surroundings.enter()
  local before = {}
  for i, library in ipairs(LIBRARIES) do
    before[i] = copy(library)
  end
  local metatable = debug.getmetatable(_G)
  local newindex = metatable and rawget(metatable, "__newindex")
  local raw_setmetatable = debug.setmetatable
  environment.install()
  virtual_clock()
  return function()
    for i, library in ipairs(LIBRARIES) do
      put_back(library, before[i])
    end
    if metatable then
      rawset(metatable, "__newindex", newindex)
    end
    raw_setmetatable(_G, metatable)
  end
end

-- ---- modules ------------------------------------------------------------------------------------

local FOLDER = "./handlers/?.lua;./handlers/?/init.lua"

local loaded = {} -- names of modules of the app

-- Calls `fn`, and notes which modules were loaded from `path` meanwhile. Returns what it returned; raises what it
-- raised.
local function noting(path, fn, ...)
  local before = copy(package.loaded)
  local ok, result, wrong = pcall(fn, ...)
  for name in next, package.loaded do
    if before[name] == nil and package.searchpath(name, path or package.path) then
      loaded[name] = true
    end
  end
  if not ok then
    error(result, 0)
  end
  return result, wrong
end

-- The module of that name, or nil and why there is none. One that cannot be loaded raises what require raises.
function surroundings.load(name)
  if not package.path:find(FOLDER, 1, true) then
    package.path = FOLDER .. ";" .. package.path
  end
  local there = package.loaded[name] ~= nil or package.preload[name] or package.searchpath(name, package.path)
  if not there then
    local path = name:gsub("%.", "/")
    return nil, ("module `%s` not found: looked for handlers/%s.lua and handlers/%s/init.lua, and in package.path")
      :format(name, path, path)
  end
  return noting(FOLDER, require, name)
end

local apps = {} -- lanes by the config's path

-- The subscriptions of a config; or nil and what is wrong with it.
function surroundings.app(path)
  if not apps[path] then
    local lanes, problems = noting(nil, app.load, path)
    if not lanes then
      return nil, problems
    end
    apps[path] = lanes
  end
  return apps[path]
end

function surroundings.forget()
  for name in pairs(loaded) do
    package.loaded[name] = nil
  end
  loaded, apps = {}, {}
end

return surroundings
