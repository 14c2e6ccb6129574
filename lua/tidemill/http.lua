-- `tidemill.http`: requests to HTTP services.
--
--   request{ method, url, … }             one request; returns its reply
--   get, head, post, put, patch, delete (url, options)
--
-- Each waits for its reply as tidemill.sleep does, and raises at the caller's line when there is none. A
-- reply is a table with `status`, `headers`, `body` and `url`; any status is a reply. The request itself is
-- made in C (src/executor/op_http.h), where certificates are verified and sizes limited; here are the
-- arguments, the redirects, and the reply as a table.

local host = require "tidemill.host"
local native = require "tidemill.native"
local argument = require "tidemill.argument"
local await = require "tidemill.await"

-- A handler may have changed the library's tables.
local error, ipairs, pairs, pcall, tostring, type = error, ipairs, pairs, pcall, tostring, type
local rawget, rawset, setmetatable = rawget, rawset, setmetatable
local byte, find, format, gmatch = string.byte, string.find, string.format, string.gmatch
local gsub, lower, match, upper = string.gsub, string.lower, string.match, string.upper
local concat, sort = table.concat, table.sort

local MEBIBYTE = 1024 * 1024

-- Their header is written by the library: another length would be another message.
local OWN_HEADERS = { ["content-length"] = true, ["transfer-encoding"] = true }

-- What is not sent to another host.
local CREDENTIALS = { authorization = true, cookie = true, ["proxy-authorization"] = true }

local REDIRECTS = { [301] = true, [302] = true, [303] = true, [307] = true, [308] = true }

local http = {}

-- ---- URLs -------------------------------------------------------------------------------------------

-- A URL as errors and logs may show it: without password and without what may be a key in its query.
local function shown(url)
  return (gsub(gsub(match(url, "^[^?#]*"), "^(%a[%w+.-]*://)[^/]*@", "%1"), "%c", "?"))
end

local function url_problem(url)
  local wrong = argument.text(url)
  if wrong then
    return wrong
  end
  local bad = find(url, "[%c ]")
  if bad then
    return format("has a blank or a control character at byte %d: percent-encode it", bad)
  end
  local scheme = match(url, "^(%a[%w+.-]*):")
  if not scheme then
    return "expected http:// or https:// and a host, found " .. argument.show(shown(url))
  end
  scheme = lower(scheme)
  if scheme ~= "http" and scheme ~= "https" then
    return format("`%s` is not supported, only http and https are", scheme)
  elseif not find(url, "^%a+://[^/?#]") then
    return "the URL is malformed: it has no host"
  end
end

-- Scheme, host and port in one text, or nil where they cannot be told for certain.
local function origin(url)
  local scheme, authority = match(url, "^(%a+)://([^/?#]*)")
  local name, port = match(gsub(authority or "", "^.*@", ""), "^([%w._-]+):?(%d*)$")
  if not name then
    name, port = match(gsub(authority or "", "^.*@", ""), "^(%[[%x:.]+%]):?(%d*)$")
  end
  if name then
    scheme = lower(scheme)
    return format("%s://%s:%s", scheme, lower(name), port ~= "" and port or scheme == "https" and "443" or "80")
  end
end

local function percent(character)
  return format("%%%02X", byte(character))
end

local function query_text(value)
  local kind = type(value)
  if kind == "string" then
    return value
  elseif kind == "boolean" or kind == "number" or native.is_decimal(value) then
    return (host.encode(value, "query"))
  end
end

-- Appends name=value, or one for each value of a list; returns what is wrong.
local function add_query(parts, name, value)
  if type(value) == "table" and not native.is_decimal(value) then
    for _, item in ipairs(value) do
      local wrong = type(item) == "table" and not native.is_decimal(item) and "a list in a list"
        or add_query(parts, name, item)
      if wrong then
        return wrong
      end
    end
    return
  end
  local text = query_text(value)
  if not text then
    return "expected a text, a number, a boolean or a list of them, found " .. argument.show(value)
  end
  parts[#parts + 1] = gsub(name, "[^%w._~-]", percent) .. "=" .. gsub(text, "[^%w._~-]", percent)
end

-- The names of a table in their order, so that equal tables make equal requests; or nil and what is wrong.
local function sorted_names(values)
  local names = {}
  for name in pairs(values) do
    if type(name) ~= "string" then
      return nil, "expected a table with names as keys, found the key " .. argument.show(name)
    end
    names[#names + 1] = name
  end
  sort(names)
  return names
end

local function with_query(url, query)
  local names, wrong = sorted_names(query)
  if not names then
    return nil, "query: " .. wrong
  end
  local parts = {}
  for _, name in ipairs(names) do
    wrong = add_query(parts, name, query[name])
    if wrong then
      return nil, format("query.%s: %s", name, wrong)
    end
  end
  if #parts == 0 then
    return url
  end
  local before, fragment = match(url, "^([^#]*)(.*)$")
  return before .. (find(before, "?", 1, true) and "&" or "?") .. concat(parts, "&") .. fragment
end

-- ---- headers of a request ---------------------------------------------------------------------------

-- Appends { name, value } to the list; returns what is wrong. Values may be secrets: no error shows one.
local function add_header(list, name, value)
  if type(value) == "number" or native.is_decimal(value) then
    value = host.encode(value, name)
  end
  if type(value) ~= "string" then
    return "expected a text, a number or a list of them, found a " .. type(value)
  end
  local bad = find(value, "[%z\1-\8\10-\31\127]")
  if bad then
    return format("has a control character at byte %d", bad)
  end
  list[#list + 1] = { name, value }
end

-- The headers as a list of { name, value }, and the set of their names in lower case; or nil and what is
-- wrong.
local function header_list(headers)
  local names, wrong = sorted_names(headers)
  if not names then
    return nil, "headers: " .. wrong
  end
  local list, has = {}, {}
  for _, name in ipairs(names) do
    local value = headers[name]
    if not find(name, "^[%w!#$%%&'*+.^_`|~-]+$") then
      return nil, format("headers: %s is no name of a header", argument.show(name))
    elseif OWN_HEADERS[lower(name)] then
      return nil, format("headers: %s is written by the library", name)
    end
    has[lower(name)] = true
    if type(value) == "table" and not native.is_decimal(value) then
      for _, item in ipairs(value) do
        wrong = wrong or add_header(list, name, item)
      end
    else
      wrong = add_header(list, name, value)
    end
    if wrong then
      return nil, format("headers.%s: %s", name, wrong)
    end
  end
  return list, has
end

-- As the op wants them.
local function header_lines(list)
  local lines = {}
  for i, header in ipairs(list) do
    lines[i] = header[1] .. ": " .. header[2] .. "\n"
  end
  return concat(lines)
end

-- ---- arguments ----------------------------------------------------------------------------------------

local function is_limit(value)
  local wrong = argument.secs(value)
  return wrong or (value == 0 and "expected more than 0 seconds") or nil
end

local function is_method(value)
  if type(value) ~= "string" or not find(value, "^%a+$") or #value > 20 then
    return 'expected a method such as "GET", found ' .. argument.show(value)
  elseif find(upper(value), "^CONNECT$") or find(upper(value), "^TRACE$") then
    return argument.show(value) .. " is not supported"
  end
end

local function is_path(value)
  local wrong = argument.text(value)
  return wrong or (find(value, "%z") and "has a zero byte") or nil
end

local OPTIONS = {
  { name = "body", check = argument.optional_text },
  { name = "ca_file", check = is_path },
  { name = "connect_timeout_secs", check = is_limit, default = 10 },
  { name = "follow", check = function(value) return argument.integer(value, 0, 50) end, default = 0 },
  { name = "headers", check = argument.optional_table },
  { name = "json", check = function() end },
  { name = "max_bytes", check = function(value) return argument.integer(value, 0, 1024 * MEBIBYTE) end,
    default = 10 * MEBIBYTE },
  { name = "query", check = argument.optional_table },
  { name = "timeout_secs", check = is_limit, default = 30 },
}

local known = {}
for i, option in ipairs(OPTIONS) do
  known[i] = option.name
  known[option.name] = true
end

-- The options checked, with the defaults of those left out; or nil and what is wrong.
local function checked_options(options)
  local result = {}
  for name in pairs(options) do
    if not known[name] then
      return nil, format("%s is unknown, known are %s", argument.show(name), concat(known, ", "))
    end
  end
  for _, option in ipairs(OPTIONS) do
    local value = options[option.name]
    if value == nil then
      value = option.default
    else
      local wrong = option.check(value)
      if wrong then
        return nil, option.name .. ": " .. wrong
      end
    end
    result[option.name] = value
  end
  return result
end

-- The body as text, `json` written as JSON; or nil, and what is wrong.
local function body_text(method, options, list, has)
  local body = options.body
  if options.json ~= nil then
    if body ~= nil then
      return nil, "give `body` or `json`, not both"
    end
    local wrong
    body, wrong = host.encode(options.json, "json")
    if not body then
      return nil, wrong
    elseif not has["content-type"] then
      list[#list + 1] = { "Content-Type", "application/json" }
    end
  end
  if body and method == "HEAD" then
    return nil, "HEAD has no body"
  end
  return body
end

-- A request ready for the op, or nil and what is wrong with the arguments.
local function prepare(method, url, given)
  local wrong = argument.optional_table(given)
  if wrong then
    return nil, "options: " .. wrong
  end
  wrong = is_method(method)
  if wrong then
    return nil, "method: " .. wrong
  end
  wrong = url_problem(url)
  if wrong then
    return nil, "url: " .. wrong
  end
  local options, list, has, body
  options, wrong = checked_options(given or {})
  if not options then
    return nil, wrong
  end
  if options.query then
    url, wrong = with_query(url, options.query)
    if not url then
      return nil, wrong
    end
  end
  list, has = header_list(options.headers or {})
  if not list then
    return nil, has
  end
  method = upper(method)
  body, wrong = body_text(method, options, list, has)
  if wrong then
    return nil, wrong
  end
  options.method, options.url, options.headers, options.body = method, url, list, body
  return options
end

-- ---- replies ------------------------------------------------------------------------------------------

-- Names are in lower case, and found in any.
local Headers = { __metatable = "headers of a reply" }

function Headers.__index(headers, name)
  return type(name) == "string" and rawget(headers, lower(name)) or nil
end

-- Several of one name are one text with commas; set-cookie, which has commas of its own, is a list.
local function parse_headers(text)
  local headers = setmetatable({}, Headers)
  local last
  for line in gmatch(text, "[^\r\n]+") do
    local name, value = match(line, "^([^%s:]+)[ \t]*:[ \t]*(.-)[ \t]*$")
    name = name and lower(name)
    local before = rawget(headers, name or last)
    if name == "set-cookie" then
      before = before or native.array()
      before[#before + 1] = value
      rawset(headers, name, before)
    elseif name then
      rawset(headers, name, before and before .. ", " .. value or value)
    elseif type(before) == "string" then
      -- A line that goes on, as they did long ago.
      rawset(headers, last, before .. " " .. match(line, "^%s*(.-)%s*$"))
    end
    last = name or last
  end
  return headers
end

-- The metatables are all deliveries', so nobody gets hold of them.
local reply_methods = {}
local Reply = { __index = reply_methods, __metatable = "a reply" }

-- The body as a value; raises when it is no JSON.
function reply_methods:json()
  local ok, value = pcall(native.decode, self.body)
  if not ok then
    error(format("the reply of %s, status %d, is no JSON: %s", shown(self.url), self.status, tostring(value)), 2)
  end
  return value
end

local function make_reply(request, answer)
  return setmetatable({
    status = answer.status,
    headers = parse_headers(answer.headers),
    body = answer.body,
    url = request.url,
  }, Reply)
end

-- ---- redirects ----------------------------------------------------------------------------------------

local function without(list, drop)
  local kept = {}
  for _, header in ipairs(list) do
    if not drop(lower(header[1])) then
      kept[#kept + 1] = header
    end
  end
  return kept
end

-- Change the request into the one that a reply with that status and target asks for; returns why it
-- cannot be. What it is allowed to know stays with its origin.
local function redirect(request, status, target)
  local wrong = url_problem(target)
  if wrong then
    return format("redirected to %s: %s", shown(target), wrong)
  end
  local from, to = origin(request.url), origin(target)
  if from == nil or from ~= to then
    request.headers = without(request.headers, function(name) return CREDENTIALS[name] or name == "host" end)
  elseif not find(target, "^%a+://[^/?#]*@") then
    local login = match(request.url, "^%a+://([^/?#]*@)")
    target = login and gsub(target, "^%a+://", function(scheme) return scheme .. login end) or target
  end
  if (status == 303 and request.method ~= "HEAD") or (status < 303 and request.method == "POST") then
    request.method, request.body = "GET", nil
    request.headers = without(request.headers, function(name) return find(name, "^content%-") end)
  end
  request.url = target
end

-- ---- requests -----------------------------------------------------------------------------------------

local function failure(request, text)
  return format("%s %s: %s", request.method, shown(request.url), text)
end

-- The reply, or nil and why there is none.
local function exchange(request)
  local left = request.timeout_secs
  for followed = 0, request.follow do
    local answer, wrong = await.op("http", request.method, request.url, header_lines(request.headers), request.body,
      request.ca_file, left, request.connect_timeout_secs, request.max_bytes)
    if not answer then
      return nil, failure(request, wrong)
    end
    local target = answer.redirect_url
    if request.follow == 0 or not target or not REDIRECTS[answer.status] then
      return make_reply(request, answer)
    elseif followed == request.follow then
      return nil, failure(request, format("redirected more than %d times (follow)", followed))
    end
    wrong = redirect(request, answer.status, target)
    if wrong then
      return nil, failure(request, wrong)
    end
    left = left - answer.secs
    if left <= 0 then
      return nil, failure(request, format("timed out after %g s, following redirects", request.timeout_secs))
    end
  end
end

local function run(name, method, url, options)
  local request, wrong = prepare(method, url, options)
  if not request then
    return nil, format("tidemill.http.%s: %s", name, wrong)
  end
  return exchange(request)
end

-- The options and `method` ("GET" when it is left out) and `url` in one table.
function http.request(request)
  local wrong = type(request) ~= "table" and "expected a table, found " .. argument.show(request)
  local reply
  if wrong then
    error("tidemill.http.request: " .. wrong, 2)
  end
  local options = {}
  for name, value in pairs(request) do
    if name ~= "method" and name ~= "url" then
      options[name] = value
    end
  end
  reply, wrong = run("request", request.method or "GET", request.url, options)
  if not reply then
    error(wrong, 2)
  end
  return reply
end

for _, name in ipairs { "get", "head", "post", "put", "patch", "delete" } do
  http[name] = function(url, options)
    local reply, wrong = run(name, upper(name), url, options)
    if not reply then
      error(wrong, 2)
    end
    return reply
  end
end

return http
