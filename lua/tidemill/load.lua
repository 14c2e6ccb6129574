-- From config.lua to settings and lanes, and to the handlers themselves.
--
-- The rules of single values are in C (`api`, from src/executor/load.c); this file knows the shapes
-- config.lua may have. All problems are collected, each a line that says where: a config with three
-- mistakes is mended in one go.
--
-- Executor process; runs once.

-- config.lua and modules may do what they like to the library before this file has read what they returned.
local ipairs, load, pairs, rawget = ipairs, load, pairs, rawget
local require, setmetatable, type, unpack, xpcall = require, setmetatable, type, unpack, xpcall
local byte, find, format, gsub, match, sub =
  string.byte, string.find, string.format, string.gsub, string.match, string.sub
local insert, sort = table.insert, table.sort
local getinfo, huge, package, searchpath = debug.getinfo, math.huge, package, package.searchpath

local host = require "tidemill.host"
local argument = require "tidemill.argument"
local files = require "tidemill.files"
local middleware = require "tidemill.middleware"
local problem = require "tidemill.problem"
local render = require "tidemill.render"
local source = require "tidemill.source"

local SIGNATURE = byte "\27"

-- How the topic of an app's dead letters begins; sql/0004_on_failed.sql looks for it.
local FAILED, FAILED_PATTERN = "tidemill.failed:", "tidemill%.failed:"

-- What was there before anything of the user's: a handler of such a name would never be looked for.
local LIBRARIES = {}
for name in pairs(package.loaded) do
  LIBRARIES[name] = true
end

-- Everything one load works on.
local Loading = {}
Loading.__index = Loading

-- ---- problems -----------------------------------------------------------------------------------

function Loading:add(line, text)
  text = problem.one_line(text)
  if not self.known[text] then
    self.known[text] = true
    insert(self.problems, { line = line or huge, text = text, number = #self.problems })
  end
end

-- A problem of the file `path` with this source text, at a path of keys; a number among them is a
-- place in a list.
function Loading:report_in(path, text, keys, wrong)
  local names = {}
  for _, key in ipairs(keys) do
    if type(key) == "string" then
      insert(names, key)
    end
  end
  local line = #names > 0 and source.line(text, names) or nil
  local where = line and format("%s:%d", path, line) or path
  self:add(path == self.path and line or nil, #keys > 0
    and format("%s: %s: %s", where, problem.path(keys), wrong)
    or format("%s: %s", where, wrong))
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
  sort(self.problems, function(a, b)
    if a.line ~= b.line then
      return a.line < b.line
    end
    return a.number < b.number
  end)
  local list = {}
  for i, found in ipairs(self.problems) do
    list[i] = found.text
  end
  return list
end

-- The keys of a table: places of its list in their order, then names in theirs. Others are reported.
function Loading:sorted_keys(map, keys, report)
  local places, names = {}, {}
  for key in pairs(map) do
    if type(key) == "string" then
      insert(names, key)
    elseif type(key) == "number" and key >= 1 and key % 1 == 0 then
      insert(places, key)
    else
      report = report or self.reporter
      report(keys, format("a key is a name, found %s", argument.show(key)))
    end
  end
  sort(places)
  sort(names)
  return places, names
end

-- ---- files --------------------------------------------------------------------------------------

-- Puts the folder of handlers on package.path, in the place of the one put there before.
function Loading:search_in(folder)
  folder = gsub(folder, "(.)/+$", "%1")
  if sub(folder, 1, 1) ~= "/" then
    folder = self.dir .. folder
  end
  local entry = folder .. "/?.lua;" .. folder .. "/?/init.lua;"
  local path = package.path
  if self.entry then
    local first, last = find(path, self.entry, 1, true)
    if first then
      path = sub(path, 1, first - 1) .. sub(path, last + 1)
    end
  end
  package.path = entry .. path
  self.entry = entry
  self.folder = folder
end

-- The config's table, or nil when there is none.
function Loading:evaluate()
  local text, wrong = files.read(self.path)
  files.note(self.path, text)
  if not text then
    self:add(nil, wrong)
    return nil
  end
  self.source = text
  if byte(text) == SIGNATURE then
    self:report({}, "this is compiled bytecode, give the source text")
    return nil
  end
  local chunk
  chunk, wrong = load(text, "@" .. self.path, "t")
  if not chunk then
    self:add(nil, problem.with_whole_path(wrong, self.path))
    return nil
  end
  local ok, config = xpcall(chunk, render.value)
  if not ok then
    local message = problem.with_whole_path(config, self.path)
    self:add(nil, problem.has_place(message) and message or self.path .. ": " .. message)
    return nil
  end
  if type(config) ~= "table" then
    self:report({}, format("must return a table, found %s", argument.show(config)))
    return nil
  end
  return config
end

-- Requires a module of the user's, once. Returns { value, path, source }; nil when it has problems,
-- which are reported then; `report` is told of one that is not there.
function Loading:required(name, keys, report)
  local loaded = self.files[name]
  if loaded ~= nil then
    return loaded or nil
  end
  self.files[name] = false
  local path = searchpath(name, package.path)
  if path and LIBRARIES[name] then
    self:add(nil, format("%s: `%s` is the name of a library that is loaded already: rename this handler", path, name))
    return nil
  end
  local ok, result = xpcall(require, render.value, name)
  if not ok then
    local message, absent = problem.of_require(result, self.folder, path)
    if absent or not path then
      self.files[name] = nil -- each subscription to it is a problem of its own
      report(keys, message)
    else
      self:add(nil, problem.has_place(message) and message or path .. ": " .. message)
    end
    return nil
  end
  local found = { value = result, path = path or "module `" .. name .. "`", source = path and files.read(path) or "" }
  self.files[name] = found
  return found
end

-- What a module returned, as an error shows it.
local function shown_result(value)
  return value == true and "nothing" or argument.show(value)
end

-- The same of one without a `handle`. `handler` is what a subscription calls it.
local function without_handle(value)
  if type(value) ~= "table" then
    return shown_result(value)
  end
  return type(rawget(value, "handler")) == "function" and "`handler`, write `handle`" or "a table without it"
end

-- Loads a handler's module, once. Returns { handle, options, around, path, source }, or nil.
function Loading:module(name, keys)
  if self.modules[name] then
    return self.modules[name]
  end
  local file = self:required(name, keys, self.reporter)
  if not file then
    return nil
  end
  local result = file.value
  local found = { path = file.path, source = file.source, options = {}, around = {} }
  if type(result) == "function" then
    found.handle = result
  elseif type(result) == "table" and type(rawget(result, "handle")) == "function" then
    found.handle = result.handle
    found.options = result
    found.around = self:around(rawget(result, "around"), { "around" }, function(...)
      self:report_in(file.path, file.source, ...)
    end)
  else
    self:add(nil, format("%s: must return a function, or a table with a function `handle`; found %s", found.path,
      without_handle(result)))
    return nil
  end
  self.modules[name] = found
  return found
end

-- ---- around -------------------------------------------------------------------------------------

-- One function of middleware: as it is, or what the module of that name returns. Nil where there is
-- none, and where modules are not loaded.
function Loading:middleware(value, keys, report)
  if type(value) == "function" then
    return value
  elseif type(value) ~= "string" then
    report(keys, format("expected a function or a module's name, found %s", argument.show(value)))
  elseif self.with_handlers then
    local file = self:required(value, keys, report)
    if file and type(file.value) == "function" then
      return file.value
    elseif file then
      self:add(nil, format("%s: `around` names it, so it must return a function; found %s", file.path,
        shown_result(file.value)))
    end
  end
end

-- `around`: one function of middleware, or a list of them. Returns a list. `report` is told what is
-- wrong at which keys.
function Loading:around(value, keys, report)
  local list = {}
  if type(value) ~= "table" then
    if value ~= nil then
      list[1] = self:middleware(value, keys, report)
    end
    return list
  end
  local places, names = self:sorted_keys(value, keys, report)
  if names[1] then
    report(below(keys, names[1]), "unknown key: `around` is a function, a module's name or a list of them")
  end
  for _, place in ipairs(places) do
    insert(list, (self:middleware(value[place], below(keys, place), report)))
  end
  return list
end

-- ---- subscribe ----------------------------------------------------------------------------------

local function label_of(fn)
  local info = getinfo(fn, "S")
  if info.what == "C" then
    return "function"
  end
  return format("function at %s:%d", gsub(info.source, "^[@=]", ""), info.linedefined)
end

-- The options beside a module's `handle`. What a module keeps there for itself (functions, tables,
-- names with an underscore before) is its own affair; anything else is an option or a mistake.
function Loading:module_options(lane, module, given)
  local names = {}
  for name, value in pairs(module.options) do
    if type(name) == "string" and name ~= "handle" and name ~= "around" and sub(name, 1, 1) ~= "_" then
      if type(value) ~= "function" and type(value) ~= "table" then
        insert(names, name)
      end
    end
  end
  sort(names)
  for _, name in ipairs(names) do
    if given[name] == nil then
      local wrong = self.api.lane_option(lane, name, module.options[name])
      if wrong then
        self:report_in(module.path, module.source, { name }, wrong)
      end
    end
  end
end

-- The keys of a subscription that are no options.
local STRUCTURE = { handler = true, around = true }

-- One subscriber of a topic. `handler` is a module's name or a function, `options` the table it stood
-- in.
function Loading:subscription(topic, subscriber, handler, options, keys)
  local label = type(handler) == "string" and handler or label_of(handler)
  local lane, counted = self.api.lane(topic, subscriber, label)
  if not lane then
    self:report(keys, counted)
    return
  end
  -- Outermost first.
  local around = { unpack(self.app_around) }
  for _, fn in ipairs(self:around(rawget(options, "around"), below(keys, "around"), self.reporter)) do
    insert(around, fn)
  end
  local handle = handler
  if type(handler) == "string" then
    local module = self.with_handlers and self:module(handler, keys)
    handle = module and module.handle
    if module then
      self:module_options(lane, module, options)
      for _, fn in ipairs(module.around) do
        insert(around, fn)
      end
    end
  end
  local places, names = self:sorted_keys(options, keys)
  if places[1] then
    self:report(below(keys, places[1]), "unknown key: options have names")
  end
  for _, name in ipairs(names) do
    local wrong = not STRUCTURE[name] and self.api.lane_option(lane, name, options[name])
    if wrong then
      self:report(below(keys, name), wrong)
    end
  end
  self.lanes[counted] = self.lanes[counted] or {}
  self.lanes[counted][subscriber] = {
    handler = middleware.compose(handle, around),
    topic = counted,
    subscriber = subscriber,
    generation = self.generation,
    event = self.event,
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
        format("`handler` must be a module's name or a function, found %s", argument.show(handler)))
    end
  else
    self:report(keys, format("expected a module's name, a function or a table of options, found %s",
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
      or format("expected a module's name or a table, found %s", argument.show(value)))
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
      self:report(below(keys, place), format("a list holds modules' names, found %s; with a name before it: NAME = …",
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
    self:report(keys, format("expected a table of topics, found %s", argument.show(subscribe)))
    return
  end
  local places, topics = self:sorted_keys(subscribe, keys)
  if places[1] then
    self:report(below(keys, places[1]), 'a topic must stand before it: ["TOPIC"] = …')
  end
  for _, topic in ipairs(topics) do
    if find(topic, "^%s*" .. FAILED_PATTERN) then
      self:report(below(keys, topic), "this topic is for dead letters: name their handler in `on_failed`")
    else
      self:topic(topic, subscribe[topic], below(keys, topic))
    end
  end
end

-- ---- on_failed ----------------------------------------------------------------------------------

-- The topic of an app's dead letters. A character that no topic may have is written as its number.
local function failed_topic(app)
  return FAILED .. gsub(app, "[^%w._-]", function(character)
    return format(":%02x", byte(character))
  end)
end

-- Who is told of dead letters: as the subscribers of a topic, or one function.
function Loading:on_failed(value)
  local keys = { "on_failed" }
  local topic = failed_topic(self.api.text "app")
  if not host.topic(topic) then
    self:report(keys, "`app` is too long a name for it: its characters other than letters, digits, `.`, `_` and `-` "
      .. "count three times, and at most 184 are allowed")
    return
  end
  if type(value) == "function" then
    value = { on_failed = value }
  end
  self.event = "failed"
  self:topic(topic, value, keys)
  self.event = "message"
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
  if not searchpath(name, package.path) then
    self:add(nil, format("there is no handler `%s`: no subscriber of %s has that name, and there is no %s/%s.lua",
      name, self.path, self.folder, (gsub(name, "%.", "/"))))
    return
  end
  self:subscription("call", name, name, {}, {})
end

-- ---- the whole ----------------------------------------------------------------------------------

-- Keys that this file reads by itself.
local SHAPES = { around = true, on_failed = true, subscribe = true }

function Loading:settings(config)
  local places, names = self:sorted_keys(config, {})
  if places[1] then
    self:report({ places[1] }, "unknown key: settings have names")
  end
  for _, name in ipairs(names) do
    local wrong = not SHAPES[name] and self.api.setting(name, config[name])
    if wrong then
      self:report({ name }, wrong)
    end
  end
end

local function run(self)
  if find(self.dir, "[?;]") then
    self:add(nil, format("%s: Lua's package.path does not allow `?` and `;` in the folder's name", self.path))
    return
  end
  self:search_in(self.api.text "handlers")
  local config = self:evaluate()
  if not config then
    return
  end
  self:settings(config)
  self:search_in(self.api.text "handlers")
  self.app_around = self:around(config.around, { "around" }, self.reporter)
  if config.subscribe ~= nil then
    self:subscribe(config.subscribe)
  end
  if config.on_failed ~= nil then
    self:on_failed(config.on_failed)
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
    dir = match(path, "^(.*/)") or "",
    source = "",
    with_handlers = with_handlers,
    generation = generation,
    called = with_handlers and called,
    event = "message",
    files = {},
    modules = {},
    lanes = {},
    problems = {},
    known = {},
  }, Loading)
  function self.reporter(...)
    self:report(...)
  end
  run(self)
  if #self.problems > 0 then
    return nil, self:problem_list()
  end
  return self.lanes
end

return loader
