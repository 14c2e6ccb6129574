-- HTTP services in a spec: what the op `http` gives (src/executor/op_http.c), made of a stub's answer. Its
-- arguments, redirects and replies are lua/tidemill/http.lua's own, as in an executor.
--
-- Plain LuaJIT only.

local argument = require "tidemill.argument"
local host = require "tidemill.host"
local json = require "tidemill.json"

local concat, format, gmatch, lower, match = table.concat, string.format, string.gmatch, string.lower, string.match

-- What a stub may say of a reply.
local FIELDS = {
  status = function(value) return argument.integer(value, 100, 599) end,
  headers = argument.optional_table,
  body = argument.optional_text,
  json = function() end,
  secs = argument.secs,
}

-- Returns what is wrong with a reply.
local function problem(reply)
  if type(reply) ~= "table" then
    return "expected a table, found " .. argument.show(reply)
  end
  for name, value in pairs(reply) do
    if not FIELDS[name] then
      return format("%s is unknown, known are body, headers, json, secs, status", argument.show(name))
    end
    local wrong = FIELDS[name](value)
    if wrong then
      return name .. ": " .. wrong
    end
  end
  if reply.body ~= nil and reply.json ~= nil then
    return "give `body` or `json`, not both"
  elseif reply.json ~= nil then
    return (select(2, host.encode(reply.json, "json")))
  end
end

-- `name: value` lines as a table by lower-case names; a name that comes twice has a list.
local function read_headers(lines)
  local headers = {}
  for name, value in gmatch(lines, "([^\n:]+): ([^\n]*)\n") do
    name = lower(name)
    local before = headers[name]
    if type(before) == "table" then
      table.insert(before, value)
    else
      headers[name] = before and { before, value } or value
    end
  end
  return headers
end

local function write_headers(headers)
  local lines = {}
  for name, value in pairs(headers) do
    for _, each in ipairs(type(value) == "table" and value or { value }) do
      lines[#lines + 1] = format("%s: %s\r\n", name, tostring(each))
    end
  end
  return concat(lines)
end

local function header(headers, wanted)
  for name, value in pairs(headers) do
    if lower(name) == wanted then
      return value
    end
  end
end

-- Where a Location leads from there.
local function resolve(url, target)
  local scheme, origin, path = match(url, "^(%a+:)(//[^/?#]*)([^?#]*)")
  if match(target, "^%a[%w+.-]*:") then
    return target
  elseif match(target, "^//") then
    return scheme .. target
  elseif match(target, "^/") then
    return scheme .. origin .. target
  end
  return scheme .. origin .. (match(path, "^.*/") or "/") .. target
end

-- What the op gives for a reply, or nil and the error.
local function answer_of(delivery, url, reply, limits)
  local secs = reply.secs or 0
  if secs > limits.timeout_secs then
    delivery.now = delivery.now + limits.timeout_secs
    return nil, format("timed out after %g s, waiting for the reply", limits.timeout_secs)
  end
  delivery.now = delivery.now + secs
  local headers, body = reply.headers or {}, reply.body or ""
  if reply.json ~= nil then
    body = host.encode(reply.json, "json")
    if not header(headers, "content-type") then
      headers = { ["content-type"] = "application/json" }
      for name, value in pairs(reply.headers or {}) do
        headers[name] = value
      end
    end
  end
  if #body > limits.max_bytes then
    return nil, format("the reply's body has more than %d bytes (max_bytes)", limits.max_bytes)
  end
  local status, location = reply.status or 200, header(headers, "location")
  return {
    status = status, headers = write_headers(headers), body = body, secs = secs,
    redirect_url = status >= 300 and status < 400 and location and resolve(url, location) or nil,
  }
end

local http = { problem = problem }

-- The op.
function http.request(delivery, method, url, lines, body, _, timeout_secs, _, max_bytes)
  local request = { method = method, url = url, headers = read_headers(lines), body = body }
  if body and match(request.headers["content-type"] or "", "^application/json") then
    local ok, value = pcall(json.decode, body)
    request.json = ok and value or nil
  end
  table.insert(delivery.requests, request)
  local asked = method .. " " .. url
  local reply = delivery.stubs:find("http", asked)
  if reply == nil then
    return delivery:fail(format("no stub answers the request %s: say what it gives by "
      .. "testing.http(%q, { status = 200, json = {} })", asked, match(asked, "^[^?]*")))
  elseif type(reply) == "function" then
    local refused
    reply, refused = reply(request)
    if reply == nil and refused ~= nil then
      return nil, tostring(refused)
    end
  end
  local wrong = problem(reply)
  if wrong then
    return delivery:fail(format("the stub that answers the request %s: %s", asked, wrong))
  end
  return answer_of(delivery, url, reply, { timeout_secs = timeout_secs, max_bytes = max_bytes })
end

return http
