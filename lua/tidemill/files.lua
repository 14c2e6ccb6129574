-- Which files the user's Lua came from, and where it was looked for in vain: the runtime is told of each,
-- and reloads when one changes.
--
-- Executor process. The search for modules is Lua's own, but for taking notes.

local error, load, tostring = error, load, tostring
local format, gmatch, gsub, insert, open = string.format, string.gmatch, string.gsub, table.insert, io.open
local package, searchpath = package, package.searchpath
local loaders = package.loaders

local host = require "tidemill.host"

local files = {}

-- Where Lua itself looks, which is nobody's app.
local system = {}
for template in gmatch(package.path, "[^;]+") do
  system[template] = true
end

-- A handler may look for ever new modules that are not there.
local NOTES_MOST = 10000

local noted, notes = {}, 0

-- Takes note of a file with this text, nil when it is not there.
function files.note(path, text)
  if not noted[path] and notes < NOTES_MOST then
    noted[path], notes = true, notes + 1
    host.file(path, text)
  end
end

local function note_missing(name)
  local place = gsub(name, "%.", "/")
  for template in gmatch(package.path, "[^;]+") do
    if not system[template] then
      files.note((gsub(template, "%?", (gsub(place, "%%", "%%%%")))), nil)
    end
  end
end

-- The text of a file, or nil and what is wrong.
function files.read(path)
  local file, wrong = open(path, "rb")
  if not file then
    return nil, wrong
  end
  local text
  text, wrong = file:read "*a"
  file:close()
  if not text then
    return nil, format("%s: %s", path, wrong or "cannot be read")
  end
  return text
end

-- In the place of Lua's searcher for modules in Lua: what is noted is what is loaded.
local function search(name)
  local path, tried = searchpath(name, tostring(package.path))
  if not path then
    note_missing(name)
    return tried
  end
  local text, wrong = files.read(path)
  if text then
    files.note(path, text)
    local chunk
    chunk, wrong = load(text, "@" .. path)
    if chunk then
      return chunk
    end
  end
  error(format("error loading module '%s' from file '%s':\n\t%s", name, path, wrong), 0)
end

-- Before Lua's searchers for modules in C.
local function search_c(name)
  local path = searchpath(name, tostring(package.cpath))
  if path and not noted[path] then
    files.note(path, files.read(path))
  end
end

-- Called before anything of the user's runs.
function files.install()
  loaders[2] = search
  insert(loaders, 3, search_c)
end

return files
