-- What a spec says the world answers: for each kind of question a list of stubs, the latest first.
--
-- Plain LuaJIT only.

local find, format, gsub = string.find, string.format, string.gsub

local Stubs = {}
Stubs.__index = Stubs

-- Runs of white space count as one blank, so that a statement may be broken into lines.
local function plain(text)
  return (gsub(gsub(gsub(text, "%s+", " "), "^ ", ""), " $", ""))
end

-- Whether `asked` is meant: it contains the text, or the text matches it as a Lua pattern.
local function means(what, asked)
  if find(asked, what, 1, true) then
    return true
  end
  local ok, found = pcall(find, asked, what)
  return ok and found ~= nil
end

-- Returns what is wrong with the arguments.
function Stubs:add(kind, what, reply, expected)
  if type(what) ~= "string" or what == "" then
    return format("expected %s, found a %s", expected, type(what))
  elseif type(reply) ~= "table" and type(reply) ~= "function" then
    return format("expected a table or a function as the answer, found a %s", type(reply))
  end
  table.insert(self[kind], 1, { what = plain(what), reply = reply })
end

-- The reply for a question, or nil. `reply` is a table or a function.
function Stubs:find(kind, asked)
  asked = plain(asked)
  for _, stub in ipairs(self[kind]) do
    if means(stub.what, asked) then
      return stub.reply
    end
  end
end

local stubs = { plain = plain }

function stubs.new()
  return setmetatable({ query = {}, http = {}, publish = {} }, Stubs)
end

return stubs
