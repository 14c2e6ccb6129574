-- Fences between the handlers of a process: what one of them changes of what all share is pointed out,
-- with its place, and undone when it gives the processor back. So it can neither break another handler
-- nor get the blame for one.
--
-- The functions of a library move into a table behind it, where `__index` finds them; then whatever is
-- written to the library is new to it, and seen by `__newindex`. To look a function up so costs an
-- interpreter some nanoseconds and compiled code nothing.
--
-- Executor process, installed once, before config.lua runs. What config.lua and modules change while they
-- are loaded is meant for all, and stays.

local host = require "tidemill.host"
local environment = require "tidemill.environment"
local log = require "tidemill.log"
local native = require "tidemill.native"
local render = require "tidemill.render"
local tidemill = require "tidemill"

local error, next, pcall, rawget, rawset, setmetatable, tostring, type =
  error, next, pcall, rawget, rawset, setmetatable, tostring, type
local get_metatable, set_metatable = debug.getmetatable, debug.setmetatable
local collectgarbage, jit = collectgarbage, jit
local package, G = package, _G
local format = string.format
local EMFILE, ENFILE = 24, 23

local fences = {}

-- luacheck: ignore 122 (the library is changed on purpose)

-- ---- what is undone -----------------------------------------------------------------------------

-- What was changed, and the function that sets it back to what it was before the first change.
local undo = {}

local function undo_later(what, fn)
  if not undo[what] then
    undo[what] = fn
    host.bend()
  end
end

-- Called when a handler that has changed something gives the processor back.
function fences.mend()
  for what, fn in next, undo do
    pcall(fn)
    undo[what] = nil
  end
end

local function warn_of_change(name)
  environment.warn_event("library_changed", "all handlers of this process share it"
    .. (host.running() and ": undone when this one gives the processor back" or ""), name)
end

-- ---- libraries ----------------------------------------------------------------------------------

-- Watches a table's names, all or those that `is_watched` says.
local function watch(path, library, is_watched)
  local base = {}
  for name, value in next, library do
    if not is_watched or is_watched(name, value) then
      base[name] = value
    end
  end
  for name in next, base do
    rawset(library, name, nil)
  end
  local metatable = get_metatable(library) or {}
  local beyond = rawget(metatable, "__newindex")
  metatable.__index = base
  function metatable.__newindex(_, name, value)
    if base[name] == nil then
      if beyond then
        return beyond(library, name, value)
      end
      warn_of_change(path .. tostring(name))
      base[name] = value
    elseif host.running() then
      warn_of_change(path .. name)
      rawset(library, name, value)
      undo_later(path .. name, function()
        rawset(library, name, nil)
      end)
    else
      -- load.lua itself sets the path, at its place in each load.
      if library ~= package then
        warn_of_change(path .. name)
      end
      base[name] = value
    end
  end
  -- Who asks for the metatable gets a table of no meaning; who sets another is refused.
  metatable.__metatable = {}
  set_metatable(library, metatable)
end

local LIBRARIES = { "string", "table", "math", "os", "io", "coroutine", "debug", "package" }

-- Other globals are looked for by rawget, to see which Lua this is.
local UNWATCHED = {
  _G = true, _VERSION = true, arg = true, bit = true, gcinfo = true, getfenv = true, jit = true, loadstring = true,
  module = true, newproxy = true, setfenv = true, unpack = true,
}

local function watch_libraries()
  for _, name in next, LIBRARIES do
    watch(name .. ".", G[name])
  end
  for name, value in next, tidemill do
    if type(value) == "table" and get_metatable(value) == nil then
      watch("tidemill." .. name .. ".", value)
    end
  end
  watch("tidemill.", tidemill)
  watch("", G, function(name)
    return not UNWATCHED[name]
  end)
end

-- ---- metatables that all share ------------------------------------------------------------------

-- A __newindex that writes to `metatable`, which all values of a kind have.
local function writer(kind, metatable)
  return function(_, name, value)
    local what = format("the metatable of %s, %s", kind, tostring(name))
    warn_of_change(what)
    if host.running() then
      local before = rawget(metatable, name)
      undo_later(what, function()
        rawset(metatable, name, before)
      end)
    end
    rawset(metatable, name, value)
  end
end

-- Whoever asks for the metatable of strings gets `guard`, and writes through it.
local function watch_strings()
  local metatable = get_metatable ""
  local guard = setmetatable({}, { __index = metatable, __newindex = writer("strings", metatable) })
  metatable.__metatable = guard
  return guard
end

-- The arrays of all payloads have one metatable.
local function watch_arrays()
  local metatable = native.array_mt
  setmetatable(metatable, { __newindex = writer("JSON arrays", metatable) })
end

local OWN = { table = true, userdata = true, cdata = true }

local function replace_debug(debug)
  local guard = watch_strings()
  local shared = { [G] = "_G", [tidemill] = "tidemill" }
  for _, name in next, LIBRARIES do
    shared[G[name]] = name
  end
  function debug.getmetatable(value)
    if type(value) == "string" then
      return guard
    end
    return get_metatable(value)
  end
  function debug.setmetatable(value, metatable)
    if not OWN[type(value)] or shared[value] ~= nil then
      local what = format("the metatable of %s", shared[value] or type(value) .. "s")
      warn_of_change(what)
      if host.running() then
        local before = get_metatable(value)
        undo_later(what, function()
          set_metatable(value, before)
        end)
      end
    end
    return set_metatable(value, metatable)
  end
  function debug.getregistry()
    error("debug.getregistry: the registry holds what every delivery of this process needs", 2)
  end
end

-- ---- the process's own state --------------------------------------------------------------------

local function replace_collectgarbage()
  function G.collectgarbage(option, argument)
    if host.running() then
      if option == "stop" then
        undo_later("stop", function()
          collectgarbage "restart"
        end)
      elseif option == "setpause" or option == "setstepmul" then
        local before = collectgarbage(option, argument)
        undo_later(option, function()
          collectgarbage(option, before)
        end)
        return before
      end
    end
    return collectgarbage(option, argument)
  end
end

-- 0 is the coroutine, which runs other deliveries later. A tail call, as a number means a caller.
local function replace_setfenv()
  local setfenv = G.setfenv
  function G.setfenv(target, globals)
    if target == 0 and host.running() then
      error("setfenv(0, …) would change the globals of other deliveries", 2)
    end
    return setfenv(target, globals)
  end
end

-- Without a function they mean the whole process. A tail call, as `true` means the caller.
local function replace_jit()
  local switch = { on = jit.on, off = jit.off }
  local status, start = jit.status, jit.opt.start
  for name, fn in next, switch do
    jit[name] = function(which, ...)
      if which == nil and host.running() then
        undo_later("jit", status() and switch.on or switch.off)
      end
      return fn(which, ...)
    end
  end
  function jit.opt.start(...)
    if host.running() then
      error("jit.opt.start would change how every handler of this process is compiled: call it where the module is "
        .. "loaded", 2)
    end
    return start(...)
  end
end

-- Files that were left open are closed when they are collected, which may be late: a handler that opens
-- thousands is not to cost the next one its file.
local function close_forgotten()
  collectgarbage() -- calls their finalizers
  collectgarbage()
end

local function with_room(open)
  return function(name, mode)
    if type(name) ~= "string" then
      return open(name, mode) -- raises, at the caller's line
    end
    local file, wrong, code = open(name, mode)
    if file == nil and (code == EMFILE or code == ENFILE) then
      if host.running() then
        undo_later("open files", close_forgotten)
      end
      close_forgotten()
      return open(name, mode)
    end
    return file, wrong, code
  end
end

-- The program behind each pipe of io.popen, as long as the pipe is open.
local programs = setmetatable({}, { __mode = "k" })

-- To close a pipe waits for its program. Where that is left to the collector, it would hold up whoever
-- happens to run then; so the program is ended first.
local function end_forgotten_programs(io)
  local popen, kind = with_room(io.popen), io.type
  local metatable = get_metatable(io.stdout)
  local close = metatable.__gc
  function io.popen(...)
    local pipe, wrong, code = popen(...)
    if pipe then
      local pid = host.newest_child()
      programs[pipe] = pid > 1 and pid or nil
    end
    return pipe, wrong, code
  end
  function metatable.__gc(file)
    local pid = programs[file]
    if pid and kind(file) == "file" then
      host.end_child(pid)
    end
    return close(file)
  end
end

local function replace_io(io)
  io.open = with_room(io.open)
  end_forgotten_programs(io)
  for name, standard in next, { input = io.stdin, output = io.stdout } do
    local redirect = io[name]
    io[name] = function(file)
      if file ~= nil and host.running() then
        local before = redirect()
        undo_later("io." .. name, function()
          -- It may be closed by now.
          if not pcall(redirect, before) then
            redirect(standard)
          end
        end)
      end
      return redirect(file)
    end
  end
end

-- What a finalizer raises would reach whoever runs when it is called.
local quiet = setmetatable({}, { __mode = "k" })

local function quiet_finalizer(finalizer)
  if type(finalizer) ~= "function" then
    return finalizer
  end
  if not quiet[finalizer] then
    quiet[finalizer] = function(object)
      local ok, wrong = pcall(finalizer, object)
      if not ok then
        log.warn_event("finalizer_failed", "what a handler left for the collector raised", "error",
          render.value(wrong))
      end
    end
  end
  return quiet[finalizer]
end

-- Userdata whose metatable a handler fills in.
local function replace_newproxy()
  local newproxy = G.newproxy
  local meta = {
    __newindex = function(metatable, name, value)
      rawset(metatable, name, name == "__gc" and quiet_finalizer(value) or value)
    end,
  }
  function G.newproxy(like)
    local proxy = newproxy(like)
    if like == true then
      setmetatable(get_metatable(proxy), meta)
    end
    return proxy
  end
end

local function replace_ffi(ffi)
  local gc, metatype = ffi.gc, ffi.metatype
  function ffi.gc(object, finalizer)
    return gc(object, quiet_finalizer(finalizer))
  end
  function ffi.metatype(kind, metatable)
    if type(metatable) == "table" and rawget(metatable, "__gc") ~= nil then
      rawset(metatable, "__gc", quiet_finalizer(rawget(metatable, "__gc")))
    end
    return metatype(kind, metatable)
  end
end

-- Whoever empties package.loaded, to load a module again, gets ours as they are.
local function keep_modules()
  for name, module in next, package.loaded do
    package.preload[name] = function()
      return module
    end
  end
end

function fences.install()
  watch_arrays()
  replace_newproxy()
  replace_ffi(require "ffi")
  keep_modules()
  replace_debug(debug)
  replace_collectgarbage()
  replace_setfenv()
  replace_jit()
  replace_io(io)
  watch_libraries()
end

-- When all is loaded: what a module switched off for a moment may have stayed off.
function fences.loaded()
  if not collectgarbage "isrunning" then
    collectgarbage "restart"
  end
end

return fences
