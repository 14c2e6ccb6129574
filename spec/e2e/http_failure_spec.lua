-- How a request of tidemill.http fails: wrong arguments, the network, TLS, time and size; that each says what
-- it was, and that what a delivery leaves behind is aborted.

local executor = require "spec.support.executor"
local folder = require "spec.support.folder"
local http_server = require "spec.support.http_server"
local json = require "tidemill.json"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

-- Makes one request after the other, the payload's list of arguments to tidemill.http.request, and returns
-- of each its status, or the error.
local REQUESTS = [[
  local results = tidemill.array()
  for i, request in ipairs(payload) do
    local ok, reply = pcall(function()
      local reply = tidemill.http.request(request)
      return reply
    end)
    results[i] = ok and reply.status or reply
  end
  return results
]]

describe("tidemill.http", function()
  local server, certificates

  setup(function()
    certificates = http_server.certificates()
  end)

  teardown(function()
    certificates.remove()
  end)

  after_each(function()
    http_server.stop_all()
    executor.stop_all()
  end)

  local function start_server()
    server = http_server.start {
      plain = "plain", silent = "silent", full = "full", good = "tls:" .. certificates.good,
      expired = "tls:" .. certificates.expired, stranger = "tls:" .. certificates.stranger,
      self_signed = "tls:" .. certificates.self,
    }
  end

  local function start_executor(body, options)
    options = options or {}
    options.env = http_server.ENV
    return executor.with_handler(body, options)
  end

  -- Status or error of each request.
  local function results_of(...)
    local run = start_executor(REQUESTS)
    local outcome = run:handle { payload = json.encode { ... }, wants_result = true }
    assert.equal("done", outcome.kind, outcome.error)
    return json.decode(outcome.result)
  end

  -- Each case is a request and the pattern of its error behind method and URL, or a status.
  local function check(cases)
    local requests = {}
    for i, case in ipairs(cases) do
      requests[i] = case[1]
    end
    for i, result in ipairs(results_of(unpack(requests))) do
      local request, expected = unpack(cases[i])
      if type(expected) == "number" then
        assert.equal(expected, result)
      else
        local shown = request.url:gsub("%?.*", ""):gsub("%p", "%%%0")
        assert.matches("^handlers/h.lua:%d+: " .. (request.method or "GET") .. " " .. shown .. ": " .. expected, result)
      end
    end
  end

  -- ---- arguments ----------------------------------------------------------------------------------

  it("refuses wrong arguments at the handler's line, before anything is sent", function()
    local run = start_executor "assert(loadstring(payload, '=call'))()"
    for arguments, expected in pairs {
      [""] = "url: expected a text, found nothing",
      ["5"] = "url: expected a text, found 5",
      ["'localhost/x'"] = 'url: expected http:// or https:// and a host, found "localhost/x"',
      ["'file:///etc/passwd'"] = "url: `file` is not supported, only http and https are",
      ["'ftp://localhost/'"] = "url: `ftp` is not supported",
      ["'http:///x'"] = "url: the URL is malformed: it has no host",
      ["'http://localhost/a b'"] = "url: has a blank or a control character at byte 19",
      ["'http://localhost/\\r\\nX: y'"] = "url: has a blank or a control character at byte 18",
      ["'http://localhost/\\0'"] = "url: has a blank or a control character at byte 18",
      ["'http://a/', 5"] = "options: expected a table or nothing, found 5",
      ["'http://a/', { timeout = 5 }"] = '"timeout" is unknown, known are body, ca_file, connect_timeout_secs, ',
      ["'http://a/', { timeout_secs = 0 }"] = "timeout_secs: expected more than 0 seconds",
      ["'http://a/', { timeout_secs = '5' }"] = 'timeout_secs: expected seconds from 0 to 31622400, found "5"',
      ["'http://a/', { connect_timeout_secs = 0/0 }"] = "connect_timeout_secs: expected seconds",
      ["'http://a/', { follow = true }"] = "follow: expected a whole number from 0 to 50, found true",
      ["'http://a/', { max_bytes = -1 }"] = "max_bytes: expected a whole number from 0 to 1073741824, found %-1",
      ["'http://a/', { ca_file = '' }"] = 'ca_file: expected a text, found ""',
      ["'http://a/', { body = {} }"] = "body: expected a text or nothing, found a table",
      ["'http://a/', { body = '', json = {} }"] = "give `body` or `json`, not both",
      ["'http://a/', { json = print }"] = "json: a function cannot be written",
      ["'http://a/', { query = { 1 } }"] = "query: expected a table with names as keys, found the key 1",
      ["'http://a/', { query = { a = { {} } } }"] = "query.a: a list in a list",
      ["'http://a/', { query = { a = print } }"] = "query.a: expected a text, a number, a boolean or a list of them",
      ["'http://a/', { headers = 5 }"] = "headers: expected a table or nothing, found 5",
      ["'http://a/', { headers = { 'a: b' } }"] = "headers: expected a table with names as keys, found the key 1",
      ["'http://a/', { headers = { ['a b'] = '' } }"] = 'headers: "a b" is no name of a header',
      ["'http://a/', { headers = { ['a:'] = '' } }"] = 'headers: "a:" is no name of a header',
      ["'http://a/', { headers = { ['a\\n'] = '' } }"] = "headers: .* is no name of a header",
      ["'http://a/', { headers = { a = 'b\\r\\nc: d' } }"] = "headers.a: has a control character at byte 2",
      ["'http://a/', { headers = { a = '\\0' } }"] = "headers.a: has a control character at byte 1",
      ["'http://a/', { headers = { a = { 'x', 'b\\nc' } } }"] = "headers.a: has a control character at byte 2",
      ["'http://a/', { headers = { a = true } }"] = "headers.a: expected a text, a number or a list of them, found a b",
      ["'http://a/', { headers = { ['Content-Length'] = 5 } }"] = "headers: Content%-Length is written by the library",
    } do
      local outcome = run:handle { payload = json.encode("require('tidemill').http.get(" .. arguments .. ")") }
      assert.equal("raised", outcome.kind, arguments)
      assert.matches("^call:1: tidemill.http.get: " .. expected, outcome.error)
    end
    for arguments, expected in pairs {
      ["5"] = "expected a table, found 5",
      ["{ url = 'http://a/', method = 'G T' }"] = 'method: expected a method such as "GET", found "G T"',
      ["{ url = 'http://a/', method = 'connect' }"] = 'method: "connect" is not supported',
      ["{ url = 'http://a/', method = 'HEAD', body = 'x' }"] = "HEAD has no body",
    } do
      local outcome = run:handle { payload = json.encode("require('tidemill').http.request(" .. arguments .. ")") }
      assert.matches("^call:1: tidemill.http.request: " .. expected, outcome.error)
    end
  end)

  it("bears whatever a handler passes to the op itself", function()
    local run = start_executor [[
      local await = require "tidemill.await"
      local function op(...)
        local ok, wrong = await.op("http", ...)
        assert(ok == nil)
        return wrong
      end
      assert(op():find "argument is wrong")
      assert(op({}, {}, {}, {}, {}, {}, {}, {}):find "argument is wrong")
      assert(op("GET", "http://localhost/\0", "", nil, nil, 1, 1, 1):find "argument is wrong")
      assert(op("GET", "http://localhost/", "", nil, nil, 1, 1, 0/0):find "argument is wrong")
      assert(op("GET", "http://localhost/", "a: b", nil, nil, 1, 1, 1):find "header cannot be sent")
      assert(op("GET", "http://localhost/", "\n", nil, nil, 1, 1, 1):find "header cannot be sent")
      assert(op("GET", "http://localhost/", "a: b\rc: d\n", nil, nil, 1, 1, 1):find "header cannot be sent")
      assert(op("GET", "file:///etc/passwd", "", nil, nil, 1, 1, 1):find "only HTTP is spoken")
      assert(op("GET", "http://local host/", "", nil, nil, 1, 1, 1):find "malformed")
    ]]
    local outcome = run:handle()
    assert.equal("done", outcome.kind, outcome.error)
  end)

  -- ---- the network --------------------------------------------------------------------------------

  it("says what went wrong on the way", function()
    start_server()
    local function plain(path)
      return { url = server:url("plain", path) }
    end
    check {
      { { url = "http://no-such-host.invalid/" }, "the host's name cannot be resolved" },
      { { url = "http://localhost:1/x?key=secret", method = "PUT" }, "cannot connect: Connection refused" },
      { plain "/nothing", "the server closed the connection without a reply" },
      { plain "/garbage", "only HTTP is spoken here: Received HTTP/0.9" },
      { plain "/cut", "the connection ended before the reply did: .*91 bytes remaining" },
      { plain "/reset", "the connection broke while the reply was read: .*[Rr]eset" },
      { plain "/not-gzip", "the reply cannot be decompressed" },
      { { url = "https://localhost:" .. server.ports.plain }, "the TLS handshake failed: .*wrong version" },
      { plain "/echo", 200 },
    }
  end)

  it("does not show what is secret in a URL", function()
    local text = results_of({ url = "http://ann:password@localhost:1/path?key=secret#x" })[1]
    assert.matches("GET http://localhost:1/path: cannot connect", text)
    assert.no.matches("password", text)
    assert.no.matches("secret", text)
  end)

  it("takes the proxy of the environment, and says when that one is gone", function()
    start_server()
    local run = executor.with_handler(REQUESTS, { env = { http_proxy = server:url("plain", ""), no_proxy = false } })
    local request = { { url = "http://elsewhere.invalid/echo" } }
    assert.equal("[200]", run:handle({ payload = json.encode(request), wants_result = true }).result)
    assert.equal(1, server:count "request plain GET http://elsewhere.invalid/echo")
    run = executor.with_handler(REQUESTS, { env = { http_proxy = "http://no-such-proxy.invalid:1", no_proxy = false } })
    assert.matches("the proxy's name cannot be resolved",
      run:handle({ payload = json.encode(request), wants_result = true }).result)
  end)

  -- ---- TLS ----------------------------------------------------------------------------------------

  it("verifies the server's certificate", function()
    start_server()
    local function get(name, ca_file)
      return { url = server:url(name, "/echo"), ca_file = ca_file }
    end
    local refused = "the server's certificate is refused: "
    check {
      { get("good", certificates.ca), 200 },
      { { url = server:url("good", "/echo"):gsub("localhost", "127.0.0.1"), ca_file = certificates.ca }, 200 },
      { get("good"), refused .. ".*local issuer certificate" },
      { get("good", certificates.other_ca), refused .. ".*local issuer certificate" },
      { get("self_signed"), refused .. ".*self%-signed" },
      { get("self_signed", certificates.ca), refused .. ".*self%-signed" },
      { get("expired", certificates.ca), refused .. ".*expired" },
      { get("stranger", certificates.ca), refused .. ".*localhost" },
      { get("good", "/no/such/file.pem"), "the file of certificates cannot be read: .*/no/such/file.pem" },
      -- A connection that was trusted by one file serves no request that names another.
      { get("good", certificates.ca), 200 },
      { get("good", certificates.other_ca), refused },
    }
    assert.equal(0, server:count "request expired" + server:count "request stranger" + server:count "request self")
  end)

  it("uses a connection with TLS again", function()
    start_server()
    local get = { url = server:url("good", "/echo"), ca_file = certificates.ca }
    assert.same({ 200, 200, 200 }, results_of(get, get, get))
    assert.equal(1, server:count "accepted good")
  end)

  -- ---- time ---------------------------------------------------------------------------------------

  it("ends by its own limits, and says what it was doing", function()
    start_server()
    check {
      { { url = server:url("full"), connect_timeout_secs = 0.1 }, "timed out after 0.1 s, connecting" },
      { { url = server:url("full"), timeout_secs = 0.1 }, "timed out after 0.1 s, connecting" },
      { { url = "https://localhost:" .. server.ports.silent, connect_timeout_secs = 0.1 },
        "timed out after 0.1 s, in the TLS handshake" },
      { { url = server:url("silent"), timeout_secs = 0.1 }, "timed out after 0.1 s, waiting for the reply" },
      { { url = server:url("silent"), timeout_secs = 0.1, method = "POST", body = ("x"):rep(900000):rep(10) },
        "timed out after 0.1 s, sending the request" },
      { { url = server:url("plain", "/hang"), timeout_secs = 0.1 }, "timed out after 0.1 s, waiting for the reply" },
      { { url = server:url("plain", "/drip"), timeout_secs = 0.2 }, "timed out after 0.2 s, reading the reply" },
      { { url = server:url("plain", "/drip-header"), timeout_secs = 0.2 }, "timed out after 0.2 s, reading the reply" },
    }
    for _, path in ipairs { "/hang", "/drip", "/drip%-header" } do
      server:wait_for("closed " .. path .. "\n")
    end
  end)

  it("ends in its time while it waits for a free connection", function()
    start_server()
    local run = start_executor("tidemill.http.request(payload)", { descriptors = 64 })
    local tickets = {}
    for i = 1, 32 do
      tickets[i] = run:prepare { payload = json.encode { url = server:url("plain", "/hang"), timeout_secs = 600 } }
    end
    run:flush()
    server:wait_for_many("hanging", 32)
    assert.matches("timed out after 0.1 s, waiting for a free connection", run:handle({
      payload = json.encode { url = server:url("plain", "/echo"), timeout_secs = 0.1 },
    }).error)
    -- And goes on as soon as there is one.
    local ticket = run:deliver { payload = json.encode { url = server:url("plain", "/echo"), timeout_secs = 600 } }
    run:cancel(tickets[1])
    assert.equal("done", run:outcome(ticket).kind)
  end)

  it("does not stand still while a name is looked up for long", function()
    local dir = folder.temp "tidemill-resolver"
    folder.write(dir, "resolver.c", [[
      #include <unistd.h>
      int getaddrinfo(const char *name, const char *service, const void *hints, void **found)
      {
        (void)name, (void)service, (void)hints, (void)found;
        sleep(600);
        return -2;
      }
    ]])
    assert.equal(0, process.run({ "cc", "-shared", "-fPIC", "-o", "resolver.so", "resolver.c", cwd = dir }).code)
    local run = executor.with_handler("if payload.url then tidemill.http.request(payload) end", {
      env = {
        LD_PRELOAD = dir .. "/resolver.so", http_proxy = false, all_proxy = false,
        ASAN_OPTIONS = (os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS" or "") .. ":verify_asan_link_order=0",
      },
    })
    local ticket = run:deliver { payload = '{"url": "http://slow.example/", "timeout_secs": 600}' }
    assert.matches("timed out after 0.1 s, looking up the host",
      run:handle({ payload = '{"url": "http://slow.example/", "connect_timeout_secs": 0.1}' }).error)
    run:cancel(ticket)
    assert.equal("discard", run:outcome(ticket).kind)
    assert.equal("done", run:handle().kind)
    run:deliver { payload = '{"url": "http://slow.example/"}' }
    run:handle()
    run:hang_up()
    run:wait()
    folder.remove(dir)
  end)

  it("counts redirects against the same limit", function()
    start_server()
    local url = server:url("plain", "/redirect-to?url=/slow%3fsecs=0.4")
    assert.matches("timed out after 0.%d+ s, waiting for the reply",
      results_of({ url = url, follow = 1, timeout_secs = 0.2 })[1])
  end)

  -- ---- size ---------------------------------------------------------------------------------------

  it("stops a reply that is too large, early", function()
    start_server()
    local function get(path, max_bytes)
      return { url = server:url("plain", path), max_bytes = max_bytes }
    end
    check {
      { get("/large"), "the reply's body has more than 10485760 bytes %(max_bytes%)" },
      { get("/large-chunked", 1000), "the reply's body has more than 1000 bytes %(max_bytes%)" },
      { get("/bomb"), "the reply's body has more than 10485760 bytes %(max_bytes%)" },
      { get("/gzip", 6999), "the reply's body has more than 6999 bytes" },
      { get("/gzip", 7000), 200 },
      { get("/exactly?bytes=1000", 1000), 200 },
      { get("/exactly?bytes=1001", 1000), "the reply's body has more than 1000 bytes" },
      { get("/exactly?bytes=0", 0), 200 },
      { get("/large-header"), "the reply's header has more than 262144 bytes" },
      { { url = server:url("plain", "/exactly?bytes=2000"), method = "HEAD", max_bytes = 10 }, 200 },
    }
    -- Of the gigabyte that was announced hardly anything was sent.
    server:wait_for_many("flooded", 3)
    for sent in server.process:stdout():gmatch "flooded (%d+)" do
      assert.is_true(tonumber(sent) < 64 * 1024 * 1024, sent)
    end
  end)

  -- ---- the end of a delivery ----------------------------------------------------------------------

  it("is aborted at once when the delivery's time is over, when it is cancelled, and when the runtime goes", function()
    start_server()
    local body = "tidemill.http.get(payload, { timeout_secs = 600 })"
    local payload = json.encode(server:url("plain", "/hang"))
    local run = start_executor(body, { settings = "timeout_secs = 0.2," })
    local outcome = run:handle { payload = payload }
    assert.matches("^handler exceeded its time limit of 0.2 s\nstack traceback:.*handlers/h.lua:3: in", outcome.error)
    server:wait_for_many("closed /hang", 1)

    run = start_executor(body)
    local ticket = run:deliver { payload = payload }
    server:wait_for_many("hanging", 2)
    run:cancel(ticket, "enough")
    assert.equal("discard", run:outcome(ticket).kind)
    server:wait_for_many("closed /hang", 2)
    -- The executor is as good as before.
    assert.equal("done", run:handle({ payload = json.encode(server:url("plain", "/echo")) }).kind)

    run:deliver { payload = payload }
    server:wait_for_many("hanging", 3)
    run:hang_up()
    assert.equal(0, (run:wait()))
    server:wait_for_many("closed /hang", 3)
  end)

  it("is aborted while it connects, shakes hands, sends, waits and reads", function()
    start_server()
    local run = start_executor "tidemill.http.request(payload)"
    local tickets = {}
    for i, request in ipairs {
      { url = server:url("full") }, { url = "https://localhost:" .. server.ports.silent },
      { url = server:url("silent"), method = "POST", body = ("x"):rep(900000):rep(10) }, { url = server:url("silent") },
      { url = server:url("plain", "/drip") }, { url = server:url("plain", "/drip-header") },
      { url = "http://no-such-host.invalid" },
    } do
      tickets[i] = run:prepare { payload = json.encode(request) }
    end
    run:flush()
    server:wait_for_many("request plain GET /drip", 2)
    for _, ticket in ipairs(tickets) do
      run:cancel(ticket)
    end
    for i, ticket in ipairs(tickets) do
      assert.equal(i == #tickets and run:outcome(ticket).kind or "discard", run:outcome(ticket).kind)
    end
    server:wait_for_many("closed /drip", 2)
    run:drain()
    assert.equal(0, (run:wait()))
  end)

  it("is finished before a drained executor goes", function()
    start_server()
    local run = start_executor "return tidemill.http.get(payload).body"
    local ticket = run:deliver { payload = json.encode(server:url("plain", "/gate?say=late")), wants_result = true }
    server:wait_for "request plain GET /gate"
    run:drain()
    run:wait_for(function() return true end, "nothing")
    assert.equal("done", start_executor("tidemill.http.get(payload)"):handle(
      { payload = json.encode(server:url("plain", "/open")) }).kind)
    assert.equal('"late"', run:outcome(ticket).result)
    assert.equal(0, (run:wait()))
  end)
end)

describe("a worker", function()
  after_each(function()
    http_server.stop_all()
    tidemill.close_all()
  end)

  it("runs handlers that call a service: done, retried, cancelled", function()
    local server = http_server.start { plain = "plain" }
    local app = tidemill.app {
      config = { poll_secs = 3600, subscribe = { call = "call" } },
      handlers = {
        call = [[
          local tidemill = require "tidemill"
          return function(payload, ctx)
            local reply = tidemill.http.post(payload.url, {
              json = payload, headers = { ["Idempotency-Key"] = ctx.message_id }, timeout_secs = 250,
            })
            if reply.status == 429 then
              return ctx:retry(tonumber(reply.headers["retry-after"]), "busy")
            end
            assert(reply:json().headers["idempotency-key"][1] == ctx.message_id)
            ctx:publish("called", { port = reply:json().port })
          end]],
      },
    }
    app:start { env = http_server.ENV }
    app:must_run("publish", "call", json.encode { url = server:url("plain", "/echo") })
    app:must_run("publish", "call", json.encode { url = server:url("plain", "/status?is=429") })
    app:must_run("publish", "call", json.encode { url = server:url("plain", "/hang") })
    server:wait_for "hanging"
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.queue_message where topic = 'called'" == "1"
        and app.db:value "select count(*) from tidemill.queue_message where error like '%busy%'" == "1"
    end, 30, "two of the calls have ended")
    local id = app.db:value "select id from tidemill.queue_message where payload->>'url' like '%hang'"
    app:must_run("cancel", id)
    server:wait_for "closed /hang"
    app:wait_until(function()
      return app.db:value("select status from tidemill.queue_message where id = $1", id) == "discarded"
    end, 30, "the call that hung is discarded")
  end)
end)
