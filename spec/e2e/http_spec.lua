-- tidemill.http: what is sent, what comes back, redirects, connections, and many requests at a time. How
-- it fails is in http_failure_spec.lua.

local executor = require "spec.support.executor"
local folder = require "spec.support.folder"
local http_server = require "spec.support.http_server"
local json = require "tidemill.json"

-- A handler that makes the requests of its payload, a list of arguments to tidemill.http.request, one after
-- the other, and returns the replies.
local REQUESTS = [[
  local replies = tidemill.array()
  for i, request in ipairs(payload) do
    local reply = tidemill.http.request(request)
    replies[i] = { status = reply.status, headers = reply.headers, body = reply.body, url = reply.url }
  end
  return replies
]]

describe("tidemill.http", function()
  local server

  before_each(function()
    server = http_server.start { one = "plain", two = "plain" }
  end)

  after_each(function()
    http_server.stop_all()
    executor.stop_all()
  end)

  local function url(path)
    return server:url("one", path)
  end

  -- Runs the body of a handler, in which `base` is the server's URL; returns what it returned.
  local function run_body(body, payload)
    local run = executor.with_handler(("local base = %q\n%s"):format(server:url("one", ""), body),
      { env = http_server.ENV })
    local outcome = run:handle { payload = payload, wants_result = true }
    assert.equal("done", outcome.kind, outcome.error)
    return json.decode(outcome.result)
  end

  -- The replies to several requests of one delivery.
  local function replies_to(...)
    return run_body(REQUESTS, json.encode { ... })
  end

  -- What the server saw of a request to /echo.
  local function seen(request)
    request.url = request.url or url "/echo"
    local reply = replies_to(request)[1]
    assert.equal(200, reply.status)
    return json.decode(reply.body)
  end

  -- ---- requests -----------------------------------------------------------------------------------

  it("sends each method, with its function or by request", function()
    for _, method in ipairs { "get", "post", "put", "patch", "delete" } do
      local result = run_body(([[
        local reply = tidemill.http.%s(base .. "/echo?a=b")
        return { reply:json(), tidemill.http.request({ url = base .. "/echo?a=b", method = %q }):json() }
      ]]):format(method, method))
      for i = 1, 2 do
        assert.equal(method:upper(), result[i].method)
        assert.equal("/echo?a=b", result[i].path)
        assert.equal("", result[i].body)
        -- Those that are used to have a body say that it is empty; the others have none.
        assert.same((method == "get" or method == "delete") and { nil } or { "0" },
          { (result[i].headers["content-length"] or {})[1] })
        assert.is_nil(result[i].headers["content-type"])
      end
    end
    assert.equal("OPTIONS", seen({ method = "options" }).method)
    assert.equal("GET", seen({}).method)
    assert.same({ 200, "", "" }, run_body [[
      local reply = tidemill.http.head(base .. "/bytes")
      return { reply.status, reply.body, tonumber(reply.headers["content-length"]) == 768 and "" or "length" }
    ]])
  end)

  it("names itself, and asks for nothing else", function()
    local headers = seen({}).headers
    assert.matches("^tidemill/%d", headers["user-agent"][1])
    headers["user-agent"] = nil
    assert.same({ host = { "localhost:" .. server.ports.one }, accept = { "*/*" },
      ["accept-encoding"] = { "gzip, deflate" } }, headers)
  end)

  it("keeps no cookie and reads no .netrc", function()
    local home = folder.temp "tidemill-home"
    folder.write(home, ".netrc", "machine localhost login ann password secret\ndefault login ann password secret\n")
    local env = { HOME = home }
    for name, value in pairs(http_server.ENV) do
      env[name] = value
    end
    local run = executor.with_handler([[
      tidemill.http.get(payload .. "/headers")
      return tidemill.http.get(payload .. "/echo"):json().headers
    ]], { env = env })
    local result = run:handle({ payload = json.encode(server:url("one", "")), wants_result = true }).result
    local headers = json.decode(result)
    assert.truthy(headers.host)
    assert.is_nil(headers.cookie or headers.authorization)
    folder.remove(home)
  end)

  it("sends the headers of the handler: texts, numbers, lists, none, and its own in place of ours", function()
    local headers = seen({
      method = "POST",
      body = "x",
      headers = {
        ["X-Text"] = "a: b, c", ["X-Number"] = 15000000000, ["X-Decimal"] = json.decimal "1e400",
        ["X-List"] = { "a", 2 }, ["X-Empty"] = "", ["X-Tab"] = "a\tb", ["X-Utf8"] = "ä",
        ["user-AGENT"] = "mine", ["Content-Type"] = "text/plain", Host = "elsewhere",
      },
    }).headers
    assert.same({ "a: b, c" }, headers["x-text"])
    assert.same({ "15000000000" }, headers["x-number"])
    assert.same({ "1e400" }, headers["x-decimal"])
    assert.same({ "a", "2" }, headers["x-list"])
    assert.same({ "" }, headers["x-empty"])
    assert.same({ "a\tb" }, headers["x-tab"])
    assert.same({ "mine" }, headers["user-agent"])
    assert.same({ "text/plain" }, headers["content-type"])
    assert.same({ "elsewhere" }, headers.host)
  end)

  it("sends json as our JSON, with its content type unless another is given", function()
    local request = seen { method = "POST", json = { json.decimal "12345678901234567890", json.array(), json.null } }
    assert.same({ "application/json" }, request.headers["content-type"])
    assert.equal("[12345678901234567890,[],null]", request.body)
    request = seen { method = "PUT", json = "text", headers = { ["content-type"] = "application/problem+json" } }
    assert.same({ "application/problem+json" }, request.headers["content-type"])
    assert.equal('"text"', request.body)
    assert.equal("null", seen({ method = "PATCH", json = json.null }).body)
    -- A GET may have one.
    assert.same({ "GET", "[1]" }, { seen({ json = { 1 } }).method, seen({ json = { 1 } }).body })
  end)

  it("sends a query: names in order, values of every kind, lists, and what the URL has already", function()
    assert.equal("/echo?a=1&b=x%20y%26%3D&c%2F=true&d=1e400&e=1&e=2&%C3%A4=%01", seen({
      query = { a = 1, b = "x y&=", ["c/"] = true, d = json.decimal "1e400", e = { 1, "2" }, ["ä"] = "\1" },
    }).path)
    assert.equal("/echo?x=y&a=1", seen({ url = url "/echo?x=y#here", query = { a = 1 } }).path)
    assert.equal("/echo", seen({ query = {} }).path)
  end)

  it("carries every byte both ways, and large bodies", function()
    assert.same({ true, true, true }, run_body [[
      local bytes = {}
      for i = 0, 255 do bytes[i + 1] = string.char(i) end
      local all = table.concat(bytes):rep(3)
      local large = all:rep(6000)
      return {
        tidemill.http.get(base .. "/bytes").body == all,
        tidemill.http.post(base .. "/mirror", { body = all }).body == all,
        tidemill.http.put(base .. "/mirror", { body = large }).body == large,
      }
    ]])
  end)

  -- ---- replies ------------------------------------------------------------------------------------

  it("returns any status", function()
    for _, status in ipairs { 200, 201, 204, 304, 400, 404, 429, 500, 503, 999 } do
      local reply = replies_to({ url = url("/status?is=" .. status) })[1]
      assert.equal(status, reply.status)
      assert.equal("7", reply.headers["retry-after"])
      assert.equal((status == 204 or status == 304) and "" or "said", reply.body)
      assert.equal(url("/status?is=" .. status), reply.url)
    end
  end)

  it("returns headers by names in any case, several of a name joined, set-cookie as a list", function()
    assert.same({
      ["x-mixed-case"] = "one", ["x-twice"] = "a, b", ["x-empty"] = "", ["x-folded"] = "first second",
      ["set-cookie"] = { "a=1; Path=/", "b=2, c" }, ["content-length"] = "0",
    }, replies_to({ url = url "/headers" })[1].headers)
    assert.same({ "one", "one", "one", json.null, json.null }, run_body [[
      local headers = tidemill.http.get(base .. "/headers").headers
      return { headers["X-Mixed-Case"], headers["x-mixed-case"], headers["X-MIXED-CASE"],
        headers.missing or tidemill.null, headers[1] or tidemill.null }
    ]])
  end)

  it("leaves out what came before the reply and after it", function()
    local early, chunked = unpack(replies_to({ url = url "/early" }, { url = url "/chunked" }))
    assert.same({ 200, "late" }, { early.status, early.body })
    assert.is_nil(early.headers["x-early"] or early.headers.link)
    assert.equal("hello, world", chunked.body)
    assert.is_nil(chunked.headers["x-trailer"])
  end)

  it("unpacks gzip and deflate", function()
    for i, reply in ipairs(replies_to({ url = url "/gzip" }, { url = url "/deflate" })) do
      assert.equal(("packed "):rep(1000), reply.body, i)
    end
  end)

  it("decodes a JSON reply without loss, and says what is no JSON", function()
    assert.same({ json.decimal "12345678901234567890", json.null, json.array() }, run_body [=[
      return tidemill.http.get(base .. "/json", { query = { text = "[12345678901234567890, null, []]" } }):json()
    ]=])
    local wrong = run_body [[
      local reply = tidemill.http.get(base .. "/json?key=secret", { query = { text = "[1," } })
      return select(2, pcall(function() local value = reply:json() return value end))
    ]]
    assert.matches("^handlers/h.lua:5: the reply of http://localhost:%d+/json, status 200, is no JSON: .*byte", wrong)
  end)

  it("waits inside of pcall and of the handler's own coroutines, and says where it cannot", function()
    assert.same({ "a", "b", "c" }, run_body [[
      local function get(say)
        return tidemill.http.get(base .. "/slow", { query = { secs = 0.01, say = say } }).body
      end
      local _, a = pcall(get, "a")
      local inner = coroutine.wrap(function()
        coroutine.yield(get "b")
        return get "c"
      end)
      return { a, inner(), inner() }
    ]])
    assert.matches("^handlers/h.lua:5: GET http://%S+: `http` cannot wait inside of a function that C code", run_body [[
      local ok, text = pcall(string.gsub, "x", "x", function()
        tidemill.http.get(base)
      end)
      return text
    ]])
  end)

  -- ---- redirects ----------------------------------------------------------------------------------

  describe("follows redirects", function()
    it("only when it is asked to, and at most so many", function()
      local here, there = url "/redirect?left=3", url "/echo"
      local replies = replies_to({ url = here }, { url = here, follow = 3 })
      assert.same({ 302, "/redirect?left=2", here }, { replies[1].status, replies[1].headers.location, replies[1].url })
      assert.same({ 200, there }, { replies[2].status, replies[2].url })
      assert.matches("^handlers/h.lua:%d+: GET http://localhost:%d+/redirect: redirected more than 2 times %(follow%)",
        run_body(([[return select(2, pcall(function()
          local reply = tidemill.http.get(%q, { follow = 2 })
          return reply
        end))]]):format(here)))
      assert.matches("/circle: redirected more than 50 times", run_body(
        [[return select(2, pcall(tidemill.http.get, base .. "/circle", { follow = 50 }))]]))
    end)

    it("with the method and body that the status asks for", function()
      for _, case in ipairs {
        { 301, "POST", "GET", "" }, { 302, "POST", "GET", "" }, { 303, "POST", "GET", "" }, { 303, "PUT", "GET", "" },
        { 301, "PUT", "PUT", "data" }, { 307, "POST", "POST", "data" }, { 308, "PATCH", "PATCH", "data" },
      } do
        local status, method, expected, body = unpack(case)
        local request = seen {
          method = method, url = url("/redirect-to?url=/echo&status=" .. status), follow = 1, body = "data",
          headers = { ["content-type"] = "text/plain", ["x-kept"] = "1" },
        }
        assert.same({ expected, body, "1" }, { request.method, request.body, request.headers["x-kept"][1] }, status)
        assert.equal(body ~= "" or nil, request.headers["content-type"] and true)
      end
      assert.equal(200, replies_to({ method = "HEAD", url = url "/redirect-to?url=/echo&status=303", follow = 1 })[1]
        .status)
    end)

    it("to another host, or another port of the same, without what authorizes", function()
      local secrets = {
        Authorization = "Bearer s", cookie = "a=1", ["Proxy-Authorization"] = "p", ["X-Other"] = "kept",
      }
      local function headers_at(target)
        return seen({ url = url("/redirect-to?url=" .. target), follow = 1, headers = secrets }).headers
      end
      local kept = headers_at "/echo"
      assert.same({ { "Bearer s" }, { "a=1" } }, { kept.authorization, kept.cookie })
      for _, target in ipairs {
        server:url("two", "/echo"), ("http://127.0.0.1:%s/echo"):format(server.ports.one),
      } do
        local headers = headers_at(target)
        assert.same({ { "kept" } }, { headers["x-other"], headers.authorization or headers.cookie
          or headers["proxy-authorization"] }, target)
      end
    end)

    it("with the login of its URL on the same host only", function()
      local with_login = url("/redirect-to?url="):gsub("//", "//ann:secret@", 1)
      assert.same({ "Basic YW5uOnNlY3JldA==" }, seen({ url = with_login .. "/echo", follow = 1 }).headers.authorization)
      assert.is_nil(seen({ url = with_login .. server:url("two", "/echo"), follow = 1 }).headers.authorization)
    end)

    it("never to anything but http and https", function()
      for _, target in ipairs { "file:///etc/passwd", "ftp://localhost/x", "gopher://localhost/x", "dict://x/" } do
        local text = run_body(([[return select(2, pcall(tidemill.http.get, %q, { follow = 5 }))]])
          :format(url("/redirect-to?url=" .. target)))
        assert.matches("redirected to " .. target:gsub("%p", "%%%0") .. ": `%a+` is not supported", text)
      end
    end)
  end)

  -- ---- connections --------------------------------------------------------------------------------

  it("uses a connection again, in other deliveries too", function()
    local run = executor.with_handler("return tidemill.http.post(payload, { body = 'x' }).status",
      { env = http_server.ENV })
    for _ = 1, 20 do
      assert.equal("200", run:handle({ payload = json.encode(url "/echo"), wants_result = true }).result)
    end
    assert.equal(1, server:count "accepted one")
    run:handle { payload = json.encode(server:url("two", "/echo")) }
    assert.equal(1, server:count "accepted two")
  end)

  it("sends a request again when the server had closed the connection it was sent on", function()
    local run = executor.with_handler("return tidemill.http.get(payload).status", { env = http_server.ENV })
    local function get()
      return run:handle({ payload = json.encode(url "/echo"), wants_result = true }).result
    end
    assert.equal("200", get())
    server:stop()
    server = http_server.start { one = server.ports.one }
    server.kinds.one = "plain"
    assert.equal("200", get())
    assert.equal(1, server:count "accepted one")
  end)

  it("has five hundred requests under way in one executor", function()
    local run = executor.with_handler("return tidemill.http.get(payload).body", { env = http_server.ENV })
    local tickets = {}
    for i = 1, 500 do
      tickets[i] = run:prepare { payload = json.encode(url("/gate?say=" .. i)), wants_result = true }
    end
    run:flush()
    -- Each is answered only when all have arrived.
    server:wait_for_many("request one GET /gate", 500)
    assert.equal("done", run:handle({ payload = json.encode(url "/open") }).kind)
    for i, ticket in ipairs(tickets) do
      assert.equal(('"%d"'):format(i), run:outcome(ticket).result)
    end
  end)

  it("waits for a descriptor rather than fail when there are few", function()
    local run = executor.with_handler("return tidemill.http.get(payload).body",
      { env = http_server.ENV, descriptors = 64 })
    local tickets = {}
    for i = 1, 100 do
      tickets[i] = run:prepare { payload = json.encode(url("/slow?secs=0.01&say=" .. i)), wants_result = true }
    end
    run:flush()
    for i, ticket in ipairs(tickets) do
      assert.equal(('"%d"'):format(i), run:outcome(ticket).result)
    end
  end)

  it("leaves none of its descriptors to programs that handlers start", function()
    local run = executor.with_handler([[
      if payload.hang then tidemill.http.get(payload.hang) end
      local pipe = io.popen "ls -l /proc/self/fd"
      local list = pipe:read "*a"
      pipe:close()
      return list
    ]], { env = http_server.ENV })
    run:deliver { payload = json.encode { hang = url "/hang" } }
    server:wait_for "hanging"
    assert.no.matches("socket:", run:handle({ wants_result = true }).result)
  end)
end)
