-- Statements that a database in a spec understands by itself, whatever the stubs say: what begins a
-- transaction, savepoints, and a text without a statement.
--
-- Those that end a transaction never come here, lua/tidemill/sql.lua refuses them. Plain LuaJIT only.

local format, gsub, lower, match, sub = string.format, string.gsub, string.lower, string.match, string.sub

local BEGINS = "this statement begins a transaction, which was rolled back: use tidemill.transaction"
local NOTHING = "there is no statement in this SQL text"

local control = {}

local function without_blanks(text)
  local rest = text
  repeat
    text = rest
    rest = gsub(text, "^[%s;]+", "")
    rest = gsub(rest, "^%-%-[^\n]*", "")
    rest = gsub(rest, "^/%*.-%*/", "")
  until rest == text
  return text
end

-- The next word and what follows it. What stands in quotes is a word as it is.
local function take(text)
  text = without_blanks(text)
  local word, rest = match(text, '^"([^"]+)"(.*)$')
  if word then
    return word, rest
  end
  word, rest = match(text, "^([%w_$\128-\255]+)(.*)$")
  if word then
    return lower(word), rest
  end
  return sub(text, 1, 1), sub(text, 2)
end

-- What begins a transaction by words.
local function begins(first, second)
  return first == "begin" or (first == "start" and second == "transaction")
end

-- Whether there is nothing but blanks and comments.
function control.is_empty(text)
  return without_blanks(text) == ""
end

-- What a text is about: "empty", "begin", "savepoint", "release" or "rollback" and the savepoint's name; or nil.
local function kind_of(text)
  if control.is_empty(text) then
    return "empty"
  end
  local first, rest = take(text)
  local second, third = take(rest)
  if begins(first, second) then
    return "begin"
  elseif first == "savepoint" then
    return first, second
  elseif first == "release" then
    return first, second == "savepoint" and take(third) or second
  elseif first == "rollback" then
    if second == "work" or second == "transaction" then
      second, third = take(third)
    end
    local name, more = take(third)
    if second == "to" then
      return first, name == "savepoint" and take(more) or name
    end
  end
end

local function find(savepoints, name)
  for i = #savepoints, 1, -1 do
    if savepoints[i].name == name then
      return i
    end
  end
end

local function forget(savepoints, from)
  for i = #savepoints, from, -1 do
    savepoints[i] = nil
  end
end

local function outside(name)
  return { message = format("%s can only be used in transaction blocks", name), sqlstate = "25P01" }
end

local function missing(name)
  return { message = format('savepoint "%s" does not exist', name), sqlstate = "3B001" }
end

-- What such a statement comes to in `transaction`, or outside of one where that is nil. Returns nothing where it
-- is none of these; "failed" and what the server says; "done"; or "back" and the mark that the savepoint was
-- made with.
function control.judge(transaction, text, mark)
  local kind, name = kind_of(text)
  if kind == nil then
    return nil
  elseif kind == "empty" then
    return "failed", { message = NOTHING }
  elseif kind == "begin" then
    if transaction then
      return "done"
    end
    return "failed", { message = BEGINS }
  elseif not transaction then
    return "failed", outside(kind == "savepoint" and "SAVEPOINT" or kind == "release" and "RELEASE SAVEPOINT"
      or "ROLLBACK TO SAVEPOINT")
  end
  local savepoints = transaction.savepoints
  if kind == "savepoint" then
    savepoints[#savepoints + 1] = { name = name, mark = mark }
    return "done"
  end
  local at = find(savepoints, name)
  if not at then
    return "failed", missing(name)
  elseif kind == "release" then
    forget(savepoints, at)
    return "done"
  end
  forget(savepoints, at + 1)
  return "back", savepoints[at].mark
end

-- Whether a transaction in which a statement has failed takes this one.
function control.is_way_back(text)
  local kind = kind_of(text)
  return kind == "rollback" or kind == "empty"
end

return control
