-- From config.lua to settings and lanes, and to the handlers themselves.
--
-- The rules of single values are in C (`api`, from src/executor/load.c); this file knows the shapes
-- config.lua may have. All problems are collected, each a line that says where: a config with three
-- mistakes is mended in one go.
--
-- Executor process; runs once.

-- config.lua may do what it likes to the globals before this file has read what it returned.
local ipairs, load, pairs, rawget = ipairs, load, pairs, rawget
local require, setmetatable, type, unpack, xpcall = require, setmetatable, type, unpack, xpcall

local host = require "tidemill.host"
local argument = require "tidemill.argument"
local render = require "tidemill.render"
local source = require "tidemill.source"

local SIGNATURE = ("\27"):byte()

-- What was there before anything of the user's: a handler of such a name would never be looked for.
local LIBRARIES = {}
for name in pairs(package.loaded) do
  LIBRARIES[name] = true
end

-- Everything one load works on.
local Loading = {}
Loading.__index = Loading

-- ---- problems -----------------------------------------------------------------------------------

local function read_file(path)
  local file, wrong = io.open(path, "rb")
  if not file then
    return nil, wrong
  end
  local text
  text, wrong = file:read "*a"
  file:close()
  if not text then
    return nil, ("%s: %s"):format(path, wrong or "cannot be read")
  end
  return text
end

-- A message is one line, whatever was raised.
local function one_line(text)
  return (text:gsub("%s*\n%s*", " "))
end

-- `subscribe["order.paid"].crm_sync[2]`
local function shown_path(keys)
  local parts = {}
  for i, key in ipairs(keys) do
    if type(key) == "number" then
      parts[i] = ("[%d]"):format(key)
    elseif key:find "^[%a_][%w_]*$" then
      parts[i] = (i > 1 and "." or "") .. key
    else
      parts[i] = ("[%q]"):format(key)
    end
  end
  return table.concat(parts)
end

function Loading:add(line, text)
  text = one_line(text)
  if not self.known[text] then
    self.known[text] = true
    table.insert(self.problems, { line = line or math.huge, text = text, number = #self.problems })
  end
end

-- A problem of the file `path` with this source text, at a path of keys; a number among them is a
-- place in a list.
function Loading:report_in(path, text, keys, wrong)
  local names = {}
  for _, key in ipairs(keys) do
    if type(key) == "string" then
      table.insert(names, key)
    end
  end
  local line = #names > 0 and source.line(text, names) or nil
  local where = line and ("%s:%d"):format(path, line) or path
  self:add(path == self.path and line or nil, #keys > 0
    and ("%s: %s: %s"):format(where, shown_path(keys), wrong)
    or ("%s: %s"):format(where, wrong))
end

function Loading:report(keys, wrong)
  self:report_in(self.path, self.source, keys, wrong)
end

-- `keys` and more of them.
local function below(keys, ...)
  local list = { unpack(keys) }
  for _, key in ipairs { ... } do
    list[#list + 1] = key
  end
  return list
end

-- The problems as text: those of config.lua in the order of its lines, then those of other files.
function Loading:problem_list()
  table.sort(self.problems, function(a, b)
    if a.line ~= b.line then
      return a.line < b.line
    end
    return a.number < b.number
  end)
  local list = {}
  for i, problem in ipairs(self.problems) do
    list[i] = problem.text
  end
  return list
end

-- The keys of a table: places of its list in their order, then names in theirs. Others are reported.
function Loading:sorted_keys(map, keys)
  local places, names = {}, {}
  for key in pairs(map) do
    if type(key) == "string" then
      table.insert(names, key)
    elseif type(key) == "number" and key >= 1 and key % 1 == 0 then
      table.insert(places, key)
    else
      self:report(keys, ("a key is a name, found %s"):format(argument.show(key)))
    end
  end
  table.sort(places)
  table.sort(names)
  return places, names
end

-- ---- files --------------------------------------------------------------------------------------

-- LuaJIT shortens a long path inside of its messages.
local function with_whole_path(message, path)
  local tail, rest = message:match "^%.%.%.(.-)(:%d+: .*)$"
  if tail and path:sub(-#tail) == tail then
    return path .. rest
  end
  return message
end

-- Puts the folder of handlers on package.path, in the place of the one put there before.
function Loading:search_in(folder)
  folder = folder:gsub("(.)/+$", "%1")
  if folder:sub(1, 1) ~= "/" then
    folder = self.dir .. folder
  end
  local entry = folder .. "/?.lua;" .. folder .. "/?/init.lua;"
  local path = package.path
  if self.entry then
    local first, last = path:find(self.entry, 1, true)
    if first then
      path = path:sub(1, first - 1) .. path:sub(last + 1)
    end
  end
  package.path = entry .. path
  self.entry = entry
  self.folder = folder
end

-- The config's table, or nil when there is none.
function Loading:evaluate()
  local text, wrong = read_file(self.path)
  if not text then
    self:add(nil, wrong)
    return nil
  end
  self.source = text
  if text:byte() == SIGNATURE then
    self:report({}, "this is compiled bytecode, give the source text")
    return nil
  end
  local chunk
  chunk, wrong = load(text, "@" .. self.path, "t")
  if not chunk then
    self:add(nil, with_whole_path(wrong, self.path))
    return nil
  end
  local ok, config = xpcall(chunk, render.value)
  if not ok then
    local message = with_whole_path(config, self.path)
    self:add(nil, message:find("^[^\n]-:%d+: ") and message or self.path .. ": " .. message)
    return nil
  end
  if type(config) ~= "table" then
    self:report({}, ("must return a table, found %s"):format(argument.show(config)))
    return nil
  end
  return config
end

-- What require says, for people: a syntax error by its own place, a missing module by the files that
-- were looked for.
function Loading:require_problem(message)
  local inner = message:match "^error loading module '.-' from file '.-':%s*(.*)$"
  if inner then
    message = inner
  end
  local before, missing = message:match "^(.-)module '([^\n]-)' not found:\n"
  if missing then
    local name = missing:gsub("%.", "/")
    return ("%smodule `%s` not found: looked for %s/%s.lua and %s/%s/init.lua, and in package.path and package.cpath")
      :format(before, missing, self.folder, name, self.folder, name), before == ""
  end
  return message, false
end

-- Loads a handler's module, once. Returns { handle, options, path, source }; nil when it has
-- problems, which are reported then.
function Loading:module(name, keys)
  local loaded = self.modules[name]
  if loaded ~= nil then
    return loaded or nil
  end
  self.modules[name] = false
  local path = package.searchpath(name, package.path)
  if path and LIBRARIES[name] then
    self:add(nil, ("%s: `%s` is the name of a library that is loaded already: rename this handler"):format(path, name))
    return nil
  end
  local ok, result = xpcall(require, render.value, name)
  if not ok then
    local message, absent = self:require_problem(path and with_whole_path(result, path) or result)
    if absent or not path then
      self.modules[name] = nil -- each subscription to it is a problem of its own
      self:report(keys, message)
    else
      self:add(nil, message:find("^[^\n]-:%d+: ") and message or path .. ": " .. message)
    end
    return nil
  end
  local found = { path = path or "module `" .. name .. "`", source = path and read_file(path) or "", options = {} }
  if type(result) == "function" then
    found.handle = result
  elseif type(result) == "table" and type(rawget(result, "handle")) == "function" then
    found.handle = result.handle
    found.options = result
  else
    local what = result == true and "nothing" or argument.show(result)
    if type(result) == "table" then
      what = "a table without it"
    end
    self:add(nil, ("%s: must return a function, or a table with a function `handle`; found %s"):format(
      found.path, what))
    return nil
  end
  self.modules[name] = found
  return found
end

-- ---- subscribe ----------------------------------------------------------------------------------

local function label_of(fn)
  local info = debug.getinfo(fn, "S")
  if info.what == "C" then
    return "function"
  end
  return ("function at %s:%d"):format(info.source:gsub("^[@=]", ""), info.linedefined)
end

-- The options beside a module's `handle`. What a module keeps there for itself (functions, tables,
-- names with an underscore before) is its own affair; anything else is an option or a mistake.
function Loading:module_options(lane, module, given)
  local names = {}
  for name, value in pairs(module.options) do
    if type(name) == "string" and name ~= "handle" and name:sub(1, 1) ~= "_" then
      if type(value) ~= "function" and type(value) ~= "table" then
        table.insert(names, name)
      end
    end
  end
  table.sort(names)
  for _, name in ipairs(names) do
    if given[name] == nil then
      local wrong = self.api.lane_option(lane, name, module.options[name])
      if wrong then
        self:report_in(module.path, module.source, { name }, wrong)
      end
    end
  end
end

-- One subscriber of a topic. `handler` is a module's name or a function, `options` the table it stood
-- in.
function Loading:subscription(topic, subscriber, handler, options, keys)
  local label = type(handler) == "string" and handler or label_of(handler)
  local lane, counted = self.api.lane(topic, subscriber, label)
  if not lane then
    self:report(keys, counted)
    return
  end
  local handle = handler
  if type(handler) == "string" then
    local module = self.with_handlers and self:module(handler, keys)
    handle = module and module.handle
    if module then
      self:module_options(lane, module, options)
    end
  end
  local places, names = self:sorted_keys(options, keys)
  if places[1] then
    self:report(below(keys, places[1]), "unknown key: options have names")
  end
  for _, name in ipairs(names) do
    local wrong = name ~= "handler" and self.api.lane_option(lane, name, options[name])
    if wrong then
      self:report(below(keys, name), wrong)
    end
  end
  self.lanes[counted] = self.lanes[counted] or {}
  self.lanes[counted][subscriber] = {
    handler = handle,
    topic = counted,
    subscriber = subscriber,
    generation = self.generation,
  }
end

-- name = "module" | function | { handler = …, options }; without `handler`, the module `name`
function Loading:named(topic, subscriber, value, keys)
  local kind = type(value)
  if kind == "string" or kind == "function" then
    self:subscription(topic, subscriber, value, {}, keys)
  elseif kind == "table" then
    local handler = rawget(value, "handler")
    if handler == nil then
      handler = subscriber
    end
    if type(handler) == "string" or type(handler) == "function" then
      self:subscription(topic, subscriber, handler, value, keys)
    else
      self:report(below(keys, "handler"),
        ("`handler` must be a module's name or a function, found %s"):format(argument.show(handler)))
    end
  else
    self:report(keys, ("expected a module's name, a function or a table of options, found %s"):format(
      argument.show(value)))
  end
end

-- "name" | { "a", "b", name = … }
function Loading:topic(topic, value, keys)
  local trimmed, wrong = host.topic(topic)
  if not trimmed then
    self:report(keys, wrong)
    return
  end
  if type(value) == "string" then
    self:subscription(topic, value, value, {}, keys)
    return
  elseif type(value) ~= "table" then
    self:report(keys, type(value) == "function"
      and "a function needs a name to subscribe by: { NAME = function … }"
      or ("expected a module's name or a table, found %s"):format(argument.show(value)))
    return
  end
  if value.handler ~= nil then
    self:report(below(keys, "handler"), "options belong to a subscriber, write its name before: NAME = { handler = … }")
    return
  end
  local places, names = self:sorted_keys(value, keys)
  for _, place in ipairs(places) do
    local entry = value[place]
    if type(entry) == "string" then
      self:subscription(topic, entry, entry, {}, below(keys, place))
    else
      self:report(below(keys, place), ("a list holds modules' names, found %s; with a name before it: NAME = …"):format(
        argument.show(entry)))
    end
  end
  for _, name in ipairs(names) do
    self:named(topic, name, value[name], below(keys, name))
  end
end

function Loading:subscribe(subscribe)
  local keys = { "subscribe" }
  if type(subscribe) ~= "table" then
    self:report(keys, ("expected a table of topics, found %s"):format(argument.show(subscribe)))
    return
  end
  local places, topics = self:sorted_keys(subscribe, keys)
  if places[1] then
    self:report(below(keys, places[1]), 'a topic must stand before it: ["TOPIC"] = …')
  end
  for _, topic in ipairs(topics) do
    self:topic(topic, subscribe[topic], below(keys, topic))
  end
end

-- ---- call ---------------------------------------------------------------------------------------

-- One module is to be called by its name. Where no subscription has it, it gets one of its own, whose
-- topic is `call`.
function Loading:callable(name)
  for _, subscribers in pairs(self.lanes) do
    if subscribers[name] then
      return
    end
  end
  if self.modules[name] ~= nil then
    return
  end
  if not package.searchpath(name, package.path) then
    self:add(nil, ("there is no handler `%s`: no subscriber of %s has that name, and there is no %s/%s.lua"):format(
      name, self.path, self.folder, name:gsub("%.", "/")))
    return
  end
  self:subscription("call", name, name, {}, {})
end

-- ---- the whole ----------------------------------------------------------------------------------

function Loading:settings(config)
  local places, names = self:sorted_keys(config, {})
  if places[1] then
    self:report({ places[1] }, "unknown key: settings have names")
  end
  for _, name in ipairs(names) do
    local wrong = name ~= "subscribe" and self.api.setting(name, config[name])
    if wrong then
      self:report({ name }, wrong)
    end
  end
end

local function run(self)
  if self.dir:find "[?;]" then
    self:add(nil, ("%s: Lua's package.path does not allow `?` and `;` in the folder's name"):format(self.path))
    return
  end
  self:search_in(self.api.text "handlers")
  local config = self:evaluate()
  if not config then
    return
  end
  self:settings(config)
  self:search_in(self.api.text "handlers")
  if config.subscribe ~= nil then
    self:subscribe(config.subscribe)
  end
  if self.called then
    self:callable(self.called)
  end
  local app = self.api.text "app"
  for _, subscribers in pairs(self.lanes) do
    for _, lane in pairs(subscribers) do
      lane.app = app
    end
  end
end

local loader = {}

-- Loads the config at `path`, as the user named it. Returns a table topic → subscriber → lane, or nil
-- and the list of problems. `called`, which may be nil: a name that must be a subscriber's or a module's.
function loader.run(api, path, with_handlers, generation, called)
  local self = setmetatable({
    api = api,
    path = path,
    dir = path:match "^(.*/)" or "",
    source = "",
    with_handlers = with_handlers,
    generation = generation,
    called = with_handlers and called,
    modules = {},
    lanes = {},
    problems = {},
    known = {},
  }, Loading)
  run(self)
  if #self.problems > 0 then
    return nil, self:problem_list()
  end
  return self.lanes
end

return loader
