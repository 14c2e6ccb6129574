-- docs/handlers.md: every handler it shows loads, and what it says of them is so. README.md: its app runs.

local folder = require "spec.support.folder"
local http_server = require "spec.support.http_server"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

after_each(function()
  http_server.stop_all()
  tidemill.close_all()
end)

-- The ```lua blocks, by what the first line says they are: `handlers` (name → source) and `shared` (modules of
-- handlers in a folder of their own) of `-- handlers/….lua`, `specs` (path → source) of `-- spec/….lua`.
local function shown()
  local handlers, shared, specs = {}, {}, {}
  for block in folder.read("docs/handlers.md"):gmatch "\n```lua\n(.-\n)```" do
    local path = block:match "^%-%- (%S+)%.lua\n"
    assert(path, "a block of docs/handlers.md does not name its file:\n" .. block)
    local name = path:match "^handlers/([%w_/]+)$"
    local kind = not name and specs or name:find "/" and shared or handlers
    assert(name or path:find "^spec/[%w_]+_spec$", "of no folder: " .. path)
    name = name and name:gsub("/", ".") or path .. ".lua"
    assert(not kind[name], path .. " is shown twice")
    kind[name] = block
  end
  return handlers, shared, specs
end

-- Variables of a process that asks a service of the spec.
local function with_service(env)
  for name, value in pairs(http_server.ENV) do
    env[name] = value
  end
  return env
end

-- An app with all of them, each handler subscribed to a topic of its own name.
local function app_with_all(options)
  local handlers, shared, specs = shown()
  local subscribe = {}
  for name in pairs(handlers) do
    subscribe[name] = name
  end
  options.config = { subscribe = subscribe }
  options.handlers = handlers
  local app = tidemill.app(options)
  for name, text in pairs(shared) do
    app:write_handler(name, text)
  end
  for path, text in pairs(specs) do
    app:write(path, text)
  end
  return app, handlers, specs
end

describe("docs/handlers.md", function()
  it("shows handlers that load", function()
    local app, handlers = app_with_all { database = false }
    local stdout, count = app:must_run("check"), 0
    for name in pairs(handlers) do
      assert.truthy(stdout:find(name, 1, true), stdout)
      count = count + 1
    end
    assert.is_true(count >= 12)
    -- The options beside `handle` count.
    local json = app:must_run("check", "--json")
    assert.truthy(json:find('"handler":"sync_crm","max_attempts":8,"retry_backoff_secs":30', 1, true), json)
  end)

  it("shows handlers that do what it says when they are called", function()
    local app = app_with_all { database = false }
    local function call(name, payload, code)
      local result = app:run("call", name, payload)
      assert.equal(code, result.code, result.stderr)
      return result
    end

    assert.truthy(call("fulfil_order", '{"id": 7}', 0).stderr:find('"topic":"order.shipped"', 1, true))
    assert.truthy(call("fulfil_order", "[]", 1).stderr:find("discarded the message: an order without an id", 1, true))
    assert.truthy(call("import_feed", '{"state": "closed"}', 1).stderr:find("discarded", 1, true))
    assert.truthy(call("import_feed", '{"state": "busy"}', 1).stderr:find("again in 60 s: the feed is busy", 1, true))
    assert.truthy(call("import_feed", '{"state": "early"}', 1).stderr:find("put the message off for 3600 s", 1, true))
    assert.truthy(call("import_feed", '{"name": "a"}', 0).stderr:find("attempt_left=4", 1, true))

    -- Nulls, an empty array, and a number that a Lua number cannot carry.
    local result = call("total", '{"items": [], "number": 12345678901234567890}', 0)
    assert.truthy(result.stdout:find('"lines":[]', 1, true) and result.stdout:find('"number":12345678901234567890', 1,
      true), result.stdout)
    assert.truthy(result.stderr:find("over=true", 1, true), result.stderr)
    result = call("total", '{"items": [{"sku": "a", "note": null}], "number": 5}', 0)
    assert.truthy(result.stdout:find('"note":"none"', 1, true), result.stdout)
    assert.truthy(result.stderr:find("over=false", 1, true), result.stderr)

    local _, steps = call("fan_out", '{"steps": 3}', 0).stderr:gsub("text=step", "")
    assert.equal(3, steps)
    call("send_mail", "{}", 0)
    call("sync_crm", '{"id": 1}', 0)
    assert.truthy(call("report_error", '{"topic": "t", "subscriber": "s", "attempts": 5, "error": "a\\nb"}', 0)
      .stderr:find('text="t/s gave up after 5 attempts: a"', 1, true))
  end)

  it("shows middleware that runs around a handler", function()
    local app = tidemill.app { database = false, handlers = (shown()),
      config = 'return { around = "timed", subscribe = { t = { f = function(p) return p.n + 1 end } } }' }
    local result = app:run("call", "f", '{"n": 1}')
    assert.same({ 0, "2\n" }, { result.code, result.stdout })
    assert.truthy(result.stderr:find("text=timed secs=", 1, true), result.stderr)
    result = app:run("call", "f", "{}")
    assert.equal(1, result.code)
    assert.truthy(result.stderr:find("arithmetic on field 'n'", 1, true), result.stderr)
  end)

  it("shows specs that pass", function()
    local app, _, specs = app_with_all { database = false }
    assert.is_true(next(specs) ~= nil)
    local result = process.run { argv = { tidemill.binary, "-c", app.config_path, "test" } }
    assert.equal(0, result.code, result.stdout .. result.stderr)
    assert.truthy(result.stdout:find("0 failures / 0 errors / 0 pending", 1, true), result.stdout)
  end)

  it("shows a handler that calls an HTTP service", function()
    local server = http_server.start { service = "plain" }
    local app = app_with_all { database = false }
    local env = with_service { SHIPPING_URL = server:url("service", ""), SHIPPING_TOKEN = "t" }
    for order, case in pairs {
      ['"a"'] = { 0, [[^.*"topic":"order.shipped",.*"tracking":"[%x-]+ Bearer t"]] },
      ["429"] = { 1, "again in 7 s: the service is busy" },
      ["503"] = { 1, "again in 60 s: the service is busy" },
      ["422"] = { 1, "discarded the message: the service refuses the order: no" },
      ["500"] = { 1, "the service said 500: no" },
    } do
      local result = app:run { "call", "ship_order", ('{"id": %s}'):format(order), env = env }
      assert.equal(case[1], result.code, result.stderr)
      assert.matches(case[2], result.stderr)
    end
  end)

  it("shows handlers that publish, in a queue", function()
    local app = app_with_all {}
    local worker = app:start()
    app:must_run("publish", "sign_up", '{"mail": "ann@example.org", "day": "2030-01-31"}')
    app:must_run("publish", "fulfil_order", '{"id": 7}')
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.queue_message where status = 'done'" == "6"
    end, 30, "both messages and what they published are done")
    local rows = app.db:query [[select topic, published_by, headers::text as headers from tidemill.queue_message
      where subscriber = '' order by topic]]
    local seen = {}
    for i, row in ipairs(rows) do
      seen[i] = row.topic .. " " .. (row.topic == "survey.wanted" and row.published_by .. row.headers or "")
    end
    assert.same({ "digest.wanted ", "mail.wanted ", "order.shipped ", 'survey.wanted sign_up{"campaign": "welcome"}' },
      seen)
    -- The line of the log as it is shown.
    assert.matches("event=log message_id=%S+ topic=fulfil_order subscriber=fulfil_order attempt=1 text=packed "
      .. "order=7\n", worker:stderr())
  end)
end)

describe("docs/handlers.md", function()
  it("shows handlers that work in the database", function()
    local app = app_with_all {}
    app.db:exec [[
      create table orders (id int primary key, shipped_at timestamptz, parcel jsonb, customer text);
      create table users (mail text constraint one_mail primary key);
      create table account (id int primary key, cents int8);
      create table page (name text primary key, visits int default 0);
      insert into orders values (7, null, null, 'ann');
      insert into users values ('ann@example.org');
      insert into account values (1, 500), (2, 0);
      insert into page values ('home')]]
    local worker = app:start()
    for topic, payload in pairs {
      mark_shipped = '{"id": 7, "sizes": []}',
      add_user = '{"mail": "ann@example.org"}',
      move_money = '{"from": 1, "to": 2, "cents": 200}',
      count_visit = '{"page": "home"}',
      invite = '{"guests": ["a", "b"]}',
    } do
      app:must_run("publish", topic, payload)
    end
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.queue_message where status in ('done', 'discarded')" == "10"
    end, 30, "the messages and what they published are finished")
    assert.equal('{"gift": null, "sizes": []}', app.db:value "select parcel from orders")
    assert.equal("there is such a user: one_mail", app:ledger("topic = 'add_user'")[1].error)
    assert.equal("300,200", app.db:value "select string_agg(cents::text, ',' order by id) from account")
    assert.equal("1", app.db:value "select visits from page")
    assert.equal("mail.wanted,mail.wanted,money.moved,order.shipped,visit.counted", app.db:value [[
      select string_agg(topic, ',' order by topic) from tidemill.queue_message where subscriber = '']])
    assert.truthy(worker:stderr():find("text=moved left=300", 1, true), worker:stderr())
  end)
end)

describe("docs/handlers.md", function()
  it("shows a handler for production that goes on where it was cut short", function()
    local server = http_server.start { bank = "plain" }
    local app = app_with_all {}
    app.db:exec [[
      create table orders (id int primary key, charge text, cents int, refund text);
      insert into orders values (7, 'c-1', 500, null), (8, 'c-2', 500, 'r-0');
      create function not_yet() returns trigger language plpgsql as 'begin raise exception ''not yet''; end';
      create trigger not_yet before update on orders for each row execute function not_yet()]]
    app:start { env = with_service { BANK_URL = server:url("bank", "") } }
    app:must_run("publish", "refund_order", '{"id": 7}')
    app:must_run("publish", "refund_order", '{"id": 8}')
    -- The bank has paid, and the database refuses to know.
    server:wait_for "refunded c%-1"
    app:wait_until(function()
      return app:ledger("topic = 'refund_order' and error like '%not yet%'")[1] ~= nil
    end, 30, "the first attempt has failed")
    app.db:exec "drop trigger not_yet on orders; update tidemill.queue_message set available_at = now()"
    app:wait_until(function()
      return app.db:value "select refund from orders where id = 7" ~= nil
    end, 30, "the second one refunds it")
    local id = app:ledger("topic = 'refund_order' and attempts = 2")[1].id
    assert.equal("r-" .. id, app.db:value "select refund from orders where id = 7")
    assert.equal(2, server:count "refunded")
    assert.equal('{"id": 7, "cents": 500}', app.db:value [[
      select string_agg(payload::text, '') from tidemill.queue_message where topic = 'order.refunded']])
  end)
end)

describe("README.md", function()
  it("shows an app that is whole: what it publishes has a subscriber", function()
    local app = tidemill.app {}
    local files = 0
    for block, path in folder.read("README.md"):gmatch "\n```lua\n(%-%- (%S+)\n.-)```" do
      app:write(path, block)
      files = files + 1
    end
    assert.equal(2, files)
    local worker = app:start()
    app:must_run("publish", "order.paid", '{"id": 1}')
    worker:wait_for 'topic=order.shipped subscriber=tell attempt=1 text="on its way" order=1'
    app:stop()
    assert.is_nil(worker:stderr():find("level=warn", 1, true), worker:stderr())
  end)
end)
