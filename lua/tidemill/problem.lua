-- What is wrong with a config or a module, as text for people: where it is, in one line.
--
-- Pure Lua.

-- A module that is loaded may change the library's tables, and a later one have a problem.
local ipairs, type = ipairs, type
local find, format, gsub, match, sub = string.find, string.format, string.gsub, string.match, string.sub
local concat = table.concat

local problem = {}

-- A message is one line, whatever was raised.
function problem.one_line(text)
  return (gsub(text, "%s*\n%s*", " "))
end

-- `subscribe["order.paid"].crm_sync[2]`
function problem.path(keys)
  local parts = {}
  for i, key in ipairs(keys) do
    if type(key) == "number" then
      parts[i] = format("[%d]", key)
    elseif find(key, "^[%a_][%w_]*$") then
      parts[i] = (i > 1 and "." or "") .. key
    else
      parts[i] = format("[%q]", key)
    end
  end
  return concat(parts)
end

-- LuaJIT shortens a long path inside of its messages.
function problem.with_whole_path(message, path)
  local tail, rest = match(message, "^%.%.%.(.-)(:%d+: .*)$")
  if tail and sub(path, -#tail) == tail then
    return path .. rest
  end
  return message
end

-- Whether a message begins with its place.
function problem.has_place(message)
  return find(message, "^[^\n]-:%d+: ") ~= nil
end

-- What require says, for people: a syntax error by its own place, a missing module by the files that
-- were looked for. Also whether it is the required module itself that is missing. `path` is the module's
-- file, where there is one.
function problem.of_require(message, folder, path)
  message = path and problem.with_whole_path(message, path) or message
  local inner = match(message, "^error loading module '.-' from file '.-':%s*(.*)$")
  if inner then
    message = path and problem.with_whole_path(inner, path) or inner
  end
  local before, missing = match(message, "^(.-)module '([^\n]-)' not found:\n")
  if missing then
    local name = gsub(missing, "%.", "/")
    return format("%smodule `%s` not found: looked for %s/%s.lua and %s/%s/init.lua, and in package.path and "
      .. "package.cpath", before, missing, folder, name, folder, name), before == ""
  end
  return message, false
end

return problem
