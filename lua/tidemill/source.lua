-- Where a key of a table is written in a Lua source text, so that an error about config.lua can name
-- the line.
--
-- Pure Lua. A text is looked at, never run: a key that is computed is not found.

local source = {}

-- The end of what starts at `at` and is of no interest: white space, comments.
local function skip(text, at)
  while true do
    local _, stop = text:find("^%s+", at)
    if not stop then
      local equals = text:match("^%-%-%[(=*)%[", at)
      if equals then
        _, stop = text:find("]" .. equals .. "]", at, true)
        stop = stop or #text
      else
        _, stop = text:find("^%-%-[^\n]*", at)
      end
    end
    if not stop then
      return at
    end
    at = stop + 1
  end
end

-- A string that starts at `at`: its text as written, and its end.
local function read_string(text, at)
  local equals = text:match("^%[(=*)%[", at)
  if equals then
    local first = at + #equals + 2
    local last, stop = text:find("]" .. equals .. "]", first, true)
    return text:sub(first, (last or #text + 1) - 1), stop or #text
  end
  local quote = text:match("^[\"']", at)
  if quote then
    local stop = at + 1
    while stop <= #text and text:sub(stop, stop) ~= quote do
      stop = stop + (text:sub(stop, stop) == "\\" and 2 or 1)
    end
    return text:sub(at + 1, stop - 1), stop
  end
end

-- The tokens of a text: { text, kind ("name", "string" or "sign"), at, depth } with the number of
-- braces around it.
local function tokenize(text)
  local tokens, depth, at = {}, 0, skip(text, 1)
  while at <= #text do
    local kind, content, stop = "string", read_string(text, at)
    if not content then
      kind, content = "name", text:match("^[%a_][%w_]*", at)
      if not content then
        kind, content = "sign", text:match("^%.?%d[%w.]*", at) or text:match("^[=~<>]=", at) or text:sub(at, at)
      end
      stop = at + #content - 1
    end
    if kind == "sign" and content == "}" then
      depth = depth - 1
    end
    tokens[#tokens + 1] = { text = content, kind = kind, at = at, depth = depth }
    if kind == "sign" and content == "{" then
      depth = depth + 1
    end
    at = skip(text, stop + 1)
  end
  return tokens
end

-- Whether token `i` writes the key: `key =`, or the key as a string.
local function writes(tokens, i, key)
  local token, following = tokens[i], tokens[i + 1]
  if token.text ~= key then
    return false
  end
  return token.kind == "string" or (token.kind == "name" and following ~= nil and following.text == "=")
end

-- The token that writes `key` in the least braces, among tokens `from` to `to`.
local function find(tokens, key, from, to)
  local best
  for i = from, to do
    if writes(tokens, i, key) and (not best or tokens[i].depth < tokens[best].depth) then
      best = i
    end
  end
  return best
end

-- The first and last token of the table that is written as the value of key `at`: none, and the range
-- is empty.
local function value_of(tokens, at)
  local open = at + 1
  while tokens[open] and (tokens[open].text == "]" or tokens[open].text == "=") do
    open = open + 1
  end
  if not tokens[open] or tokens[open].text ~= "{" then
    return 1, 0
  end
  local close = open + 1
  while tokens[close] and tokens[close].depth > tokens[open].depth do
    close = close + 1
  end
  return open + 1, math.min(close, #tokens)
end

-- The line where the last key of `keys` is written, each inside of the one before; nil when it is not
-- found.
function source.line(text, keys)
  local tokens = tokenize(text)
  local at, found = 0, nil
  for _, key in ipairs(keys) do
    local first, last = value_of(tokens, at)
    found = find(tokens, key, first, last)
      or find(tokens, key, at + 1, #tokens)
      or find(tokens, key, 1, #tokens)
    at = found or at
  end
  if not found then
    return nil
  end
  local _, breaks = text:sub(1, tokens[found].at):gsub("\n", "")
  return breaks + 1
end

return source
