-- LuaJIT programs that are no executors: how they find the library of this tree, or of another place.
--
-- LuaJIT was not built with the sanitizer that the library may be built with: then its run-time library is
-- preloaded, as it is for the specs themselves. What LuaJIT leaves unfreed at its end is no finding.

local lfs = require "lfs"

local plain = {}

local function absolute(path)
  return path:sub(1, 1) == "/" and path or lfs.currentdir() .. "/" .. path
end

-- Changes of the environment, as process.run takes them. `lua` is the folder of the modules and `native` that of
-- tidemill/native.so: this tree's and its build's where nothing is said. `more` has changes besides.
function plain.env(options)
  options = options or {}
  local lua = options.lua or absolute "lua"
  local native = options.native or absolute(os.getenv "TIDEMILL_BUILD" or "build/debug") .. "/lua"
  local env = {
    LUA_PATH = ("%s/?.lua;%s/?/init.lua;;"):format(lua, lua),
    LUA_CPATH = native .. "/?.so;;",
  }
  if os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS" then
    env.LD_PRELOAD = os.getenv "LD_PRELOAD"
    env.ASAN_OPTIONS = "detect_leaks=0"
  end
  for name, value in pairs(options.more or {}) do
    env[name] = value
  end
  return env
end

return plain
