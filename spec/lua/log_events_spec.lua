-- The table of log events in docs/operations.md against the source: each event is there with its level, and
-- none is there that the program does not write.

local folder = require "spec.support.folder"

local HEADING = "## Every event of the log"

-- Files below src and lua whose names end so.
local function files(suffix)
  local list = {}
  local pipe = assert(io.popen(("find src lua -name '*%s' | sort"):format(suffix)))
  for path in pipe:lines() do
    list[#list + 1] = path
  end
  pipe:close()
  assert(#list > 0)
  return list
end

-- The argument that begins at `from`: up to the comma or the parenthesis that ends it.
local function argument_at(text, from)
  local depth, quoted = 0, false
  for at = from, #text do
    local sign = text:sub(at, at)
    if sign == '"' then
      quoted = not quoted
    elseif not quoted and sign:find "[%(%[{]" then
      depth = depth + 1
    elseif not quoted and sign:find "[%)%]},;]" then
      if depth == 0 then
        return text:sub(from, at - 1)
      elseif sign ~= "," and sign ~= ";" then
        depth = depth - 1
      end
    end
  end
  return ""
end

local function add(events, name, level)
  events[name] = events[name] or {}
  events[name][level] = true
end

-- The events a C text writes: the texts in the argument behind a level.
local function events_of_c(text, events)
  text = text:gsub("/%*.-%*/", " ")
  for level, from in text:gmatch "MILL_LOG_(%u+),()" do
    for name in argument_at(text, from):gmatch '"([%l_]+)"' do
      add(events, name, level:lower())
    end
  end
end

-- event → set of levels
local function events_of_source()
  local events = {}
  for _, suffix in ipairs { ".c", ".h" } do
    for _, path in ipairs(files(suffix)) do
      events_of_c(folder.read(path), events)
    end
  end
  for _, path in ipairs(files ".lua") do
    local text = folder.read(path)
    for name in text:gmatch 'warn_event%("([%l_]+)"' do
      add(events, name, "warn")
    end
    for level, name in text:gmatch 'host%.log%(([%w_.]+), "([%l_]+)"' do
      add(events, name, level:match "LEVELS%.(%l+)" or "any")
    end
  end
  return events
end

local function level_of(set)
  local names = {}
  for name in pairs(set) do
    names[#names + 1] = name
  end
  table.sort(names)
  return table.concat(names, ", ")
end

-- What is wrong with a documentation.
local function complaints(text, events)
  local _, from = text:find(HEADING .. "\n", 1, true)
  local section = (text:sub(from or #text + 1) .. "\n## "):match "^(.-)\n## "
  local list, documented = {}, {}
  for name, level, meaning in section:gmatch "\n| `([%l_]+)` | ([^|]+) | ([^\n]*) |%f[\n%z]" do
    if documented[name] then
      list[#list + 1] = name .. ": is there twice"
    elseif not events[name] then
      list[#list + 1] = name .. ": no such event is written"
    elseif level ~= level_of(events[name]) then
      list[#list + 1] = ("%s: the level is %s"):format(name, level_of(events[name]))
    elseif #meaning < 10 then
      list[#list + 1] = name .. ": nothing is said"
    end
    documented[name] = true
  end
  for name, levels in pairs(events) do
    if not documented[name] then
      list[#list + 1] = ("%s (%s): is not documented"):format(name, level_of(levels))
    end
  end
  table.sort(list)
  return list
end

describe("the events of the log", function()
  local events = events_of_source()

  it("are found in the source, whoever writes them", function()
    for name, level in pairs {
      message_failed = "error", message_reclaimed = "warn", database_lost = "warn", database_unreached = "warn",
      log = "any", print = "info", global_written = "warn", executor_died = "error", lua_panic = "error",
    } do
      assert.equal(level, events[name] and level_of(events[name]), name)
    end
  end)

  it("are all in docs/operations.md, each with its level", function()
    assert.same({}, complaints(folder.read "docs/operations.md", events))
  end)

  it("are missed there when a row goes, comes or differs", function()
    local text = folder.read "docs/operations.md"
    local function of(pattern, with)
      local changed, count = text:gsub(pattern, with)
      assert.is_true(count >= 1)
      return complaints(changed, events)
    end
    assert.same({ "message_failed (error): is not documented" }, of("\n| `message_failed` [^\n]*", ""))
    assert.same({ "no_such: no such event is written", "stopped (info): is not documented" },
      of("\n| `stopped` |", "\n| `no_such` |"))
    assert.same({ "stopped: the level is info" }, of("\n| `stopped` | info |", "\n| `stopped` | warn |"))
  end)
end)
