-- tidemill.testing tells the truth: the same handlers are run by the real executor and by it, and must end the
-- same way, with the same errors and tracebacks, publish the same messages, log the same texts and return the
-- same values.

local executor = require "spec.support.executor"
local http_server = require "spec.support.http_server"
local tidemill = require "spec.support.tidemill"
local testing = require "tidemill.testing"
local json = require "tidemill.json"
local native = require "tidemill.native"

local url -- of the service

-- Each case is the body of a handler, and what is special about its message: `payload` and `headers` as JSON,
-- `attempts`, `max_attempts`, `priority`, `published_by`, `timeout_secs`. `like`: what the error holds, where the
-- whole of it depends on how much stack there is. `stub`: says in a spec what a real service or database
-- says to the executor; URL in a body is where that service is. `around`: the middleware
-- beside the handler. `in_sql`: it publishes by SQL.
local CASES = {
  -- ---- what it is given
  { "returns nothing", "" },
  { "returns a value", "return { 1, 'two', { three = 3 } }" },
  { "returns false", "return false" },
  { "returns an empty array", "return tidemill.array()" },
  { "returns the payload", "return payload",
    payload = '{"b": [], "a": {}, "n": null, "d": 12345678901234567890, "x": 0.1}' },
  { "gets null", "return { payload == tidemill.null, type(payload) }", payload = "null" },
  { "gets a text", "return payload .. '!'", payload = '"é\\n\\u0001"' },
  { "gets a number", "return payload + 1", payload = "41.5" },
  { "gets a decimal", "return { tostring(payload), tidemill.json.is_decimal(payload) }", payload = "1e400" },
  { "gets true", "return not payload", payload = "true" },
  { "gets nested arrays", "return { #payload, payload[2][1][1] }", payload = '[1, [["x"]], []]' },
  { "gets a context", [[
      local fields = {}
      for name, value in pairs(ctx) do fields[name] = value end
      fields.deadline, fields.raw = math.floor(fields.deadline - tidemill.now() + 0.5), nil
      return fields]],
    attempts = 3, max_attempts = 7, priority = -2, published_by = "ann", headers = '{"trace": "t1", "list": []}' },
  { "gets no headers", "return { ctx.headers == nil, ctx.published_by }" },
  { "finds no field of its own in ctx", "ctx.mark = 1 return rawget(ctx, 'mark')" },

  -- ---- raising
  { "raises a text", [[
      local function deep() error("no stock") end
      local function middle() deep() return 1 end
      middle() return 1]] },
  { "raises a text without a place", "error('plain', 0)" },
  { "raises a number", "error(42)" },
  { "raises nil", "error(nil)" },
  { "raises false", "error(false)" },
  { "raises a table", "error({ items = { 'a', { 5 } } })" },
  { "raises a table that is no JSON", "error({ fn = print })" },
  { "raises a function", "error(print)" },
  { "raises null", "error(tidemill.null)" },
  { "raises an object", "error(setmetatable({}, { __tostring = function() return 'my own' end }))" },
  { "raises an object that cannot tell", "error(setmetatable({}, { __tostring = function() error 'again' end }))" },
  { "raises an object that waits", "error(setmetatable({}, { __tostring = function() tidemill.sleep(1) end }))" },
  { "raises a long text", "error(('é'):rep(20000), 0)" },
  { "raises long bytes", "error(('\\128'):rep(20000), 0)" },
  { "raises by assert", "assert(false, 'not so')" },
  { "indexes nil", "return payload.a.b" },
  { "calls nil", "payload.nothing()" },
  { "raises on its last attempt", "error('last', 0)", attempts = 5 },
  { "raises behind a wait", "tidemill.sleep(0) error('after', 0)" },
  { "raises in a coroutine", "coroutine.wrap(function() tidemill.sleep(0) error('inner', 0) end)()" },
  { "raises in a coroutine with a place", "coroutine.wrap(function() error('inner') end)()" },
  { "catches an error", "return { pcall(error, 'caught', 0) }" },
  { "runs out of stack", "local function f() return 1 + f() end f()", like = "stack overflow" },

  -- ---- ending the delivery
  { "retries", "ctx:retry(2.5, 'busy')" },
  { "retries without a reason", "return ctx:retry(0)" },
  { "retries where pcall would catch it", "pcall(ctx.retry, ctx, 2, 'busy') error 'went on'" },
  { "retries on its last attempt", "ctx:retry(9, 'busy')", attempts = 5 },
  { "snoozes", "ctx:snooze(60)" },
  { "snoozes in a coroutine", "coroutine.wrap(function() ctx:snooze(60) end)() error 'went on'" },
  { "discards", "ctx:discard('late')" },
  { "discards without a reason", "ctx:discard()" },
  { "discards inside of xpcall", "xpcall(function() ctx:discard('late') end, print) error 'went on'" },
  { "retries without a time", "ctx:retry()" },
  { "retries with a text for a time", "ctx:retry('5')" },
  { "retries with a table for a reason", "ctx:retry(1, {})" },
  { "snoozes for too long", "ctx:snooze(math.huge)" },
  { "discards with a number", "ctx:discard(5)" },
  { "discards by a dot", "ctx.discard('x')" },
  { "discards inside of sort", "table.sort({ 3, 1, 2 }, function() ctx:discard() end)" },
  { "yields by itself", "coroutine.yield(1)" },
  { "yields nothing by itself", "coroutine.yield()" },
  { "waits for an op that does not exist", "error(select(2, require('tidemill.await').op('dance')), 0)" },

  -- ---- waiting
  { "sleeps", "tidemill.sleep(0.01) return 'rested'" },
  { "sleeps for no time", "tidemill.sleep(-1)" },
  { "sleeps inside of gsub", "('x'):gsub('x', function() tidemill.sleep(0) end)" },
  { "sleeps in a coroutine inside of gsub",
    "('x'):gsub('x', function() coroutine.wrap(function() tidemill.sleep(0) end)() end)" },
  { "waits inside of pcall, metamethods and iterators", [[
      local slow = setmetatable({}, { __index = function(_, key) tidemill.sleep(0) return key end })
      local list = { pcall(function() tidemill.sleep(0) return slow.x end) }
      local function below_three(_, i) tidemill.sleep(0) i = (i or 0) + 1 return i < 3 and i or nil end
      for i in below_three do list[#list + 1] = i end
      return list]] },
  { "waits in coroutines, beside their own yields", [[
      local outer = coroutine.create(function(a)
        local inner = coroutine.wrap(function() tidemill.sleep(0) coroutine.yield(1) tidemill.sleep(0) return 2 end)
        local sum = a + inner()
        local back = coroutine.yield(sum)
        error("end " .. back .. inner(), 0)
      end)
      return { { coroutine.resume(outer, 5) }, { coroutine.resume(outer, "b") }, coroutine.status(outer) }]] },
  { "exceeds its limit", "tidemill.sleep(60)", timeout_secs = 0.05 },
  { "exceeds its limit deep down", "local function nap() tidemill.sleep(60) return 1 end nap() return 1",
    timeout_secs = 0.05 },
  { "exceeds its limit and goes on", [[
      ctx:publish("a")
      ctx:log(tostring(select(2, pcall(tidemill.sleep, 60))))
      ctx:log("cleaned up")
      tidemill.publish("b")
      ctx:log("never")]], timeout_secs = 0.05 },
  { "exceeds its limit in a coroutine", "coroutine.wrap(function() tidemill.sleep(60) end)()", timeout_secs = 0.05 },
  { "exceeds its limit and returns", "pcall(tidemill.sleep, 60) return 1", timeout_secs = 0.05 },

  -- ---- publishing
  { "publishes with done", [[
      ctx:publish("a.b", { x = 1 })
      ctx:publish(" c ")
      tidemill.sleep(0)
      ctx:publish("d", tidemill.null)
      ctx:publish("e", "text")]] },
  { "carries who published it and the headers on", [[
      ctx:publish("a")
      ctx:publish("b", {}, { published_by = "bob", headers = { other = 1 } })
      tidemill.publish("c")
      tidemill.publish("d", {}, { published_by = "bob" })]], published_by = "ann", headers = '{"trace": "t1"}' },
  { "publishes with every option", [[
      ctx:publish("a", {}, { at = "2030-01-01T00:00:00Z", dedupe_key = "k", max_attempts = 3,
        on_duplicate = "replace", priority = -9 })
      ctx:publish("b", nil, { at = 1700000000.25 })
      tidemill.publish("c", nil, { delay_secs = 1.5 })]] },
  { "publishes and raises", "ctx:publish('a') tidemill.publish('b') error('x', 0)" },
  { "publishes and retries", "ctx:publish('a') tidemill.publish('b') ctx:retry(1)" },
  { "publishes and discards", "ctx:publish('a') tidemill.publish('b') ctx:discard()" },
  { "publishes at once and looks at the reply", [[
      local reply = tidemill.publish("a", payload)
      return { #reply.id, reply.topic, reply.delivered, reply.duplicate }]] },
  { "publishes decimals and arrays as they came", "ctx:publish('a', payload) tidemill.publish('b', payload)",
    payload = '[12345678901234567890, [], {}, null]' },
  { "publishes what is nested as deep as it may be", [[
      local deep = {}
      local inner = deep
      for _ = 1, 999 do inner[1] = {} inner = inner[1] end
      ctx:publish("a", deep)
      tidemill.publish("b", deep)]] },
  { "publishes what is nested deeper", [[
      local deep = {}
      for _ = 1, 1000 do deep = { deep } end
      tidemill.publish("b", deep)]] },
  { "publishes to no topic", "ctx:publish()" },
  { "publishes to what is no topic", "tidemill.publish('not a topic!')" },
  { "publishes a function", "ctx:publish('a', print)" },
  { "publishes NaN", "tidemill.publish('a', { b = { 1, { c = 0/0 } } })" },
  { "publishes with an unknown option", "ctx:publish('a', {}, { delay = 5 })" },
  { "publishes with both times", "tidemill.publish('a', {}, { delay_secs = 1, at = 5 })" },
  { "publishes with a time without a zone", "ctx:publish('a', {}, { at = '2030-01-01T08:00' })" },
  { "publishes with a list for headers", "ctx:publish('a', {}, { headers = { 1 } })" },
  { "publishes inside of gsub", "('x'):gsub('x', function() tidemill.publish('a') end)" },
  { "publishes too much with done", [[
      local megabyte = ("x"):rep(1024 * 1024)
      for _ = 1, 70 do ctx:publish("a", megabyte) end]] },

  -- ---- the surroundings
  { "logs", [[
      print("two words", 5, nil, true)
      ctx:log("charged", { amount = 5, who = "ann", list = { 1 } })
      tidemill.log.warn("careful")
      tidemill.log.error(5)]] },
  { "logs with wrong fields", "tidemill.log.info('x', 5)" },
  { "logs by ctx with wrong fields", "ctx:log('x', 5)" },
  { "exits", "os.exit(3)" },
  { "sets the locale",
    "return { os.setlocale(), os.setlocale('C', 'numeric'), os.setlocale('de_DE.UTF-8') == nil }" },
  { "writes a global", "_G.testing_case = 1 return rawget(_G, 'testing_case')" },
  { "encodes what is no JSON", "tidemill.json.encode(print)" },
  { "decodes what is no JSON", "tidemill.json.decode('{')" },
  -- ---- HTTP
  { "gets a reply", [[
      local reply = tidemill.http.get("URL/json", { query = { text = "[1, {}]" } })
      return { reply.status, reply.body, reply:json(), reply.headers["Content-TYPE"], reply.url }]],
    stub = function()
      testing.http("GET " .. url .. "/json?text=%5B1%2C%20%7B%7D%5D", {
        body = "[1, {}]", headers = { ["Content-Type"] = "application/json" } })
    end },
  { "posts a body", [[
      local reply = tidemill.http.post("URL/mirror", { body = "a\0b" })
      return { reply.status, reply.body == "a\0b" }]],
    stub = function()
      testing.http("POST " .. url .. "/mirror", function(request) return { body = request.body } end)
    end },
  { "puts JSON", [[
      return tidemill.http.put("URL/mirror", { json = { a = { payload.none } } }):json()]],
    stub = function()
      testing.http("PUT " .. url .. "/mirror", function(request) return { json = request.json } end)
    end },
  { "gets a status that is no success", [[
      local reply = tidemill.http.request { method = "delete", url = "URL/status?is=429" }
      if reply.status == 429 then ctx:retry(tonumber(reply.headers["retry-after"]), reply.body) end]],
    stub = function()
      testing.http("DELETE .*is=429$", { status = 429, body = "said", headers = { ["Retry-After"] = 7 } })
    end },
  { "finds its headers", [[
      local headers = tidemill.http.get("URL/headers").headers
      return { headers["x-mixed-case"], headers["X-Twice"], headers["set-cookie"], headers.none == nil }]],
    stub = function()
      testing.http("/headers", { headers = {
        ["X-Mixed-Case"] = "one", ["x-twice"] = { "a", "b" }, ["Set-Cookie"] = { "a=1; Path=/", "b=2, c" } } })
    end },
  { "follows redirects", [[
      local reply = tidemill.http.get("URL/redirect?left=2", { follow = 5 })
      return { reply.status, reply.url }]],
    stub = function()
      testing.http("left=2", { status = 302, headers = { Location = "/redirect?left=1" } })
      testing.http("left=1", { status = 302, headers = { Location = "/echo" } })
      testing.http("/echo", {})
    end },
  { "follows no redirect", [[
      local reply = tidemill.http.get("URL/redirect?left=1")
      return { reply.status, reply.body, reply.headers.location, reply.url }]],
    stub = function()
      testing.http("left=1", { status = 302, body = "moved", headers = { location = "/echo" } })
    end },
  { "is led in a circle", "tidemill.http.get('URL/circle', { follow = 3 })",
    stub = function() testing.http("/circle", { status = 302, headers = { location = "/circle" } }) end },
  { "reads JSON where there is none", "tidemill.http.get('URL/status?is=200'):json()",
    stub = function() testing.http("is=200", { body = "said" }) end },
  { "gets too large a body", "tidemill.http.get('URL/bytes', { max_bytes = 10 })",
    stub = function() testing.http("/bytes", { body = ("x"):rep(768) }) end },
  { "waits too long for a reply", "return { pcall(tidemill.http.get, 'URL/hang', { timeout_secs = 1 }) }",
    stub = function() testing.http("/hang", { secs = 600 }) end },
  { "exceeds its limit during a request", "tidemill.http.get('URL/hang')", timeout_secs = 0.2,
    stub = function() testing.http("/hang", { secs = 20 }) end },
  { "finds nobody there", "tidemill.http.get('http://localhost:1/')",
    stub = function() testing.http(":1/", function() return nil, "cannot connect: Connection refused" end) end },
  { "gets no URL", "tidemill.http.get(5)" },
  { "gets from another scheme", "tidemill.http.get('ftp://example.org')" },
  { "gets with an unknown option", "tidemill.http.get('URL', { timeout = 5 })" },
  { "posts two bodies", "tidemill.http.post('URL', { body = 'a', json = 1 })" },
  { "posts what is no JSON", "tidemill.http.post('URL', { json = { print } })" },
  { "sends a bad header", "tidemill.http.get('URL', { headers = { ['a b'] = 'c' } })" },
  { "requests without a table", "tidemill.http.request('URL')" },
  { "requests inside of sort", "table.sort({ 3, 1, 2 }, function() tidemill.http.get('URL/echo') end)" },

  -- ---- SQL
  { "queries", [[
      local rows = tidemill.query("select $1::int + 1 as n, $2::text as t, null as none, '[1]'::jsonb as j", 1, "x")
      return { rows[1], #rows, rows.affected, rows.fields }]],
    stub = function()
      testing.query("select $1::int + 1 as n", function(n, t)
        return { { n = n + 1, t = t, j = { 1 } }, fields = { "n", "t", "none", "j" } }
      end)
    end },
  { "finds no row", "local rows = tidemill.query('select from item where false') return { #rows, rows.affected }",
    stub = function() testing.query("select from item", {}) end },
  { "updates", "return tidemill.query('update item set name = $1 where id < 3', payload.name).affected",
    stub = function() testing.query("update item set name", { affected = 2 }) end },
  { "breaks a constraint", "tidemill.query('insert into item values (1)')",
    stub = function()
      testing.query("insert into item", function()
        return nil, { message = 'duplicate key value violates unique constraint "item_pkey"', sqlstate = "23505" }
      end)
    end },
  { "looks at what the database says", [[
      local ok, err = pcall(tidemill.query, "insert into item values (1)")
      return { ok, err.sqlstate, err.constraint, tostring(err) }]],
    stub = function()
      testing.query("insert into item", function()
        return nil, { message = 'duplicate key value violates unique constraint "item_pkey"', sqlstate = "23505",
          constraint = "item_pkey" }
      end)
    end },
  { "queries nothing", "tidemill.query()" },
  { "queries with a function", "tidemill.query('select $1', print)" },
  { "queries with what is no JSON", "tidemill.query('select $1', 'x', { a = { 0/0 } })" },
  { "queries inside of sort", "table.sort({ 3, 1, 2 }, function() tidemill.query('select 1') end)" },
  { "exceeds its limit in a statement", "tidemill.query('select pg_sleep(600)')", timeout_secs = 0.2,
    stub = function() testing.query("pg_sleep", function() testing.advance(600) return {} end) end },
  { "commits", [[
      return tidemill.transaction(function(tx)
        tx:query("insert into item values ($1)", 100 + tidemill.now() % 1)
        return tx:query("select 2 as two")[1].two, "more"
      end)]],
    stub = function()
      testing.query("insert into item", { affected = 1 })
      testing.query("select 2", { { two = 2 } })
    end },
  { "raises inside of a transaction", [[
      tidemill.transaction(function(tx)
        local function deep() error("no stock") end
        deep() return 1
      end)]] },
  { "raises a table inside of a transaction", "tidemill.transaction(function() error({ 'a' }) end)" },
  { "breaks a constraint inside of a transaction", [[
      tidemill.transaction(function(tx) tx:query("insert into item values (1)") end)]],
    stub = function()
      testing.query("insert into item", function()
        return nil, { message = 'duplicate key value violates unique constraint "item_pkey"', sqlstate = "23505" }
      end)
    end },
  { "goes on after an error inside of a transaction", [[
      local seen = {}
      local ok, err = pcall(tidemill.transaction, function(tx)
        pcall(tx.query, tx, "insert into item values (1)")
        seen[1] = tostring(select(2, pcall(tx.query, tx, "select 1")))
      end)
      return { seen, ok, tostring(err) }]],
    stub = function()
      testing.query("insert into item", function() return nil, { message = "no", sqlstate = "23505" } end)
      testing.query("select 1", {})
    end },
  { "goes back to a savepoint after an error", [[
      return tidemill.transaction(function(tx)
        local made = tx:query "savepoint a"
        pcall(tx.query, tx, "insert into item values (1)")
        local said = tostring(select(2, pcall(tx.query, tx, "select 1")))
        tx:query "rollback to savepoint a"
        pcall(tx.query, tx, "insert into item values (1)")
        tx:query "-- again\n ROLLBACK /* all */ WORK TO A;"
        tx:query "release savepoint a"
        return { said, made.affected, #made, #made.fields, tx:query("select 2 as two")[1].two }
      end)]],
    stub = function()
      testing.query("^.*$", {})
      testing.query("insert into item", function() return nil, { message = "no", sqlstate = "23505" } end)
      testing.query("select 2", { { two = 2 } })
    end },
  { "goes back to a savepoint that is none", [[
      local said = {}
      pcall(tidemill.transaction, function(tx)
        tx:query 'savepoint "A"'
        said[1] = tostring(select(2, pcall(tx.query, tx, "rollback to a")))
        tx:query 'rollback to "A"'
        tx:query "savepoint b"
        tx:query "release b"
        said[2] = tostring(select(2, pcall(tx.query, tx, "release savepoint b")))
        said[3] = tostring(select(2, pcall(tx.query, tx, "savepoint c")))
      end)
      said[4] = tostring(select(2, pcall(tidemill.query, "savepoint a")))
      said[5] = tostring(select(2, pcall(tidemill.query, "rollback to savepoint a")))
      said[6] = tostring(select(2, pcall(tidemill.query, "release a")))
      return said]] },
  { "forgets savepoints behind the one it goes back to", [[
      tidemill.transaction(function(tx)
        tx:query "savepoint a"
        tx:query "savepoint b"
        tx:query "rollback to a"
        tx:query "rollback to b"
      end)]] },
  { "publishes, and goes back to a savepoint before that", [[
      return tidemill.transaction(function(tx)
        tx:query "savepoint a"
        tx:publish "lonely"
        tx:query "rollback to a"
        return #tx:query "select 1"
      end)]], in_sql = true, stub = function() testing.query("select 1", { {} }) end },
  { "begins a transaction by a statement", "tidemill.query('begin')" },
  { "starts a transaction by a statement", "tidemill.query('/* so */ START  TRANSACTION read only')" },
  { "begins by a statement inside of a transaction",
    "return tidemill.transaction(function(tx) return #tx:query('begin') end)" },
  { "ends a transaction by a statement", "tidemill.transaction(function(tx) tx:query('commit') end)" },
  { "queries an empty text", "tidemill.query('')" },
  { "queries a comment", "tidemill.query(' -- nothing\\n /* at all */ ;')" },
  { "queries an empty text inside of a transaction", "tidemill.transaction(function(tx) tx:query('') end)" },
  { "queries an empty text and commits", [[
      local said = {}
      said[1] = pcall(tidemill.transaction, function(tx)
        said[2] = tostring(select(2, pcall(tx.query, tx, "")))
        said[3] = #tx:query "select 1"
      end)
      return said]], stub = function() testing.query("select 1", { {} }) end },
  { "begins a transaction inside of another",
    "tidemill.transaction(function() tidemill.transaction(function() end) end)" },
  { "queries beside its transaction", "tidemill.transaction(function() tidemill.query('select 1') end)" },
  { "keeps a transaction", [[
      local kept
      tidemill.transaction(function(tx) kept = tx end)
      kept:query("select 1")]] },
  { "queries a transaction by a dot", "tidemill.transaction(function(tx) tx.query('select 1') end)" },
  { "begins a transaction without a function", "tidemill.transaction()" },
  { "begins a transaction with an unknown option", "tidemill.transaction(print, { level = 1 })" },
  { "begins a transaction of a wrong kind", "tidemill.transaction(print, { isolation = 'none' })" },
  { "waits inside of a transaction", [[
      return tidemill.transaction(function(tx) tidemill.sleep(0) return tx:query("select 2 as two")[1].two end)]],
    stub = function() testing.query("select 2", { { two = 2 } }) end },
  { "tries a transaction again", [[
      local tries = 0
      return tidemill.transaction(function(tx)
        tries = tries + 1
        if tries < 3 then tx:query("do $$ begin raise exception 'again' using errcode = '40001'; end $$") end
        return tries
      end, { retries = 5, isolation = "serializable" })]],
    stub = function()
      testing.query("raise exception", function() return nil, { message = "again", sqlstate = "40001" } end)
    end },
  { "publishes in a transaction", [[
      return tidemill.transaction(function(tx)
        local one = tx:publish("lonely", { 1 })
        local many = tx:publish_many { { topic = "lonely" }, { topic = "lonely", payload = 5, priority = 1 } }
        return { one.topic, one.delivered, one.duplicate, #many, many[2].topic, many.affected == nil }
      end)]], in_sql = true, stub = function() testing.publish("lonely", { delivered = 0 }) end },
  { "publishes many", [[
      local many = tidemill.publish_many { { topic = "lonely" }, { topic = "lonely", payload = 5, priority = 1 } }
      return { #many, many[1].topic, many[1].delivered }]],
    in_sql = true, stub = function() testing.publish("lonely", { delivered = 0 }) end },
  { "publishes many wrongly", "tidemill.publish_many { { topic = 'a' }, { topic = 'a', delay = 1 } }" },
  { "publishes many that are no list", "tidemill.publish_many { topic = 'a' }" },
  { "publishes to no topic in a transaction", "tidemill.transaction(function(tx) tx:publish() end)" },
  { "finishes", [[
      ctx:publish("before")
      ctx:finish(function(tx)
        tx:query("select 1")
        ctx:publish("inside")
      end)
      error "went on"]], finishes = true, stub = function() testing.query("select 1", {}) end },
  { "fails to finish", [[
      ctx:publish("before")
      local ok, err = pcall(ctx.finish, ctx, function(tx)
        ctx:publish("inside")
        tx:publish("in the transaction")
        error("no", 0)
      end)
      return { ok, err }]], in_sql = true },
  { "raises where it would finish", "ctx:publish('a') ctx:finish(function() error 'no' end)" },
  { "finishes without a function", "ctx:finish()" },
  { "finishes by a dot", "ctx.finish(function() end)" },

  -- ---- middleware
  { "runs inside of middleware", "return { payload.n + 1 }", payload = '{"n": 1}',
    around = [[function(next, payload, ctx)
      ctx:log("before")
      payload.n = payload.n + 10
      local result = next(payload, ctx)
      tidemill.sleep(0)
      result[2] = ctx.attempts
      return result
    end]] },
  { "raises through middleware", "local function deep() error('no') end deep() return 1",
    around = "function(next, payload, ctx) local result = next(payload, ctx) return result end" },
  { "raises into middleware that catches it", "error('no', 0)",
    around = "function(next, payload, ctx) return { pcall(next, payload, ctx) } end" },
  { "retries through middleware", "ctx:retry(7, 'busy')",
    around = "function(next, payload, ctx) pcall(next, payload, ctx) error 'went on' end" },
  { "is left out by middleware", "error 'called'",
    around = "function(_, _, ctx) ctx:publish('a') return 'instead' end" },
  { "is called without a ctx by middleware", "return 1",
    around = "function(next, payload) local result = next(payload) return result end" },
  { "exceeds its limit in middleware", "return 1", timeout_secs = 0.05,
    around = "function(next, payload, ctx) tidemill.sleep(60) return next(payload, ctx) end" },

  { "connects by itself", "tidemill.connect()" },
  { "finds its libraries", "return { type(require 'ffi'), type(require 'bit'), type(require('cjson').encode) }" },
}

-- ---- both runs ----------------------------------------------------------------------------------

local ID = "01020304-0506-7708-890a-0b0c0d0e0f10"
local ID_BYTES = "\1\2\3\4\5\6\119\8\137\10\11\12\13\14\15\16"

local function name_of(i)
  return ("case_%03d"):format(i)
end

local function text_of(case)
  local handle = "function(payload, ctx)\n" .. case[2]:gsub("URL", url) .. "\nend\n"
  if case.around then
    handle = ("{ around = %s,\nhandle = %s }"):format(case.around, handle)
  end
  return 'local tidemill = require "tidemill"\nreturn ' .. handle
end

local function decoded(text)
  return text and native.decode_items(text) or json.array()
end

-- What the executor makes of a case, in the form that `tested` gives.
local function executed(run, i, case)
  local before = #run.process:stderr()
  local ticket = run:deliver {
    to = name_of(i), id = ID_BYTES, payload = case.payload, headers = case.headers, attempts = case.attempts,
    max_attempts = case.max_attempts, priority = case.priority, published_by = case.published_by,
    created_at = 1700000000123456LL, wants_result = true,
  }
  local at_once = {}
  while true do
    run:wait_for(function() return run.requests[1] or run.outcomes[ticket] end, "an outcome")
    local request = table.remove(run.requests, 1)
    if not request then
      break
    end
    local message = native.decode_items(request.body)
    message.published_by = message.published_by or (request.published_by ~= "" and request.published_by or nil)
    table.insert(at_once, message)
    run:reply(request.request, true, ('{"id":"%s","topic":"%s","delivered":1,"duplicate":false}'):format(
      ID, message.topic))
  end
  local outcome = run.outcomes[ticket]
  outcome.kind = outcome.kind == "finished" and "done" or outcome.kind
  local log = {}
  for line in run.process:stderr():sub(before + 1):gmatch "[^\n]+" do
    local event, text = line:match "event=(%w+) message_id=.- attempt=%d+ text=(.*)$"
    if event == "log" or event == "print" then
      table.insert(log, event .. " " .. (text:match '^"(.-)"' or text:match "^%S+"))
    end
  end
  local result
  if outcome.result then
    result = json.decode(outcome.result)
  end
  return {
    outcome = outcome.kind, error = outcome.error, delay_secs = outcome.delay_secs,
    with_done = decoded(outcome.publications), at_once = at_once, log = log,
    result = result,
  }
end

local function as_items(published, at_once)
  local items = json.array()
  for _, message in ipairs(published) do
    if (message.at_once or false) == at_once then
      local item = message.options
      item.op, item.topic, item.message = at_once and "publish" or nil, message.topic, message.payload
      table.insert(items, item)
    end
  end
  return items
end

local function tested(i, case)
  testing.reset()
  if case.stub then
    case.stub()
  end
  local handler = assert(loadstring(text_of(case), "@handlers/" .. name_of(i) .. ".lua"))()
  local run = testing.run(handler, case.payload and json.decode(case.payload), {
    topic = "t", subscriber = name_of(i), app = "app", message_id = ID, created_at = "2023-11-14T22:13:20.123456Z",
    headers = case.headers and json.decode(case.headers), attempts = case.attempts, max_attempts = case.max_attempts,
    priority = case.priority, published_by = case.published_by, timeout_secs = case.timeout_secs,
  })
  local log = {}
  for _, line in ipairs(run.log) do
    if line.event == "log" or line.event == "print" then
      table.insert(log, line.event .. " " .. line.text:gsub("\t", "\\t"))
    end
  end
  local result -- ctx:finish returns nothing, not even null
  if run.outcome == "done" and not case.finishes then
    result = json.null
    if run.result ~= nil then
      result = json.decode(json.encode(run.result))
    end
  end
  return {
    outcome = run.outcome, error = run.error, delay_secs = run.delay_secs or 0,
    with_done = as_items(run.published, false), at_once = as_items(run.published, true), log = log,
    result = result,
  }
end

describe("tidemill.testing agrees with the executor about a handler that", function()
  local run

  setup(function()
    url = http_server.start({ service = "plain" }):url("service", "")
    local app = tidemill.app {}
    app:must_run "migrate"
    app.db:exec "create table item (id numeric primary key, name text); insert into item values (1), (2)"
    local handlers, lanes = {}, {}
    for i, case in ipairs(CASES) do
      handlers[name_of(i)] = text_of(case)
      table.insert(lanes, ("%s = { timeout_secs = %g },"):format(name_of(i), case.timeout_secs or 300))
    end
    run = executor.start {
      config = ("return { subscribe = { t = {\n%s\n} } }"):format(table.concat(lanes, "\n")), handlers = handlers,
      env = http_server.ENV, database = app.dsn,
    }
  end)
  teardown(function()
    http_server.stop_all()
    executor.stop_all()
    tidemill.close_all()
  end)

  assert(#CASES >= 40)

  for i, case in ipairs(CASES) do
    it(case[1], function()
      local real, mine = executed(run, i, case), tested(i, case)
      if case.like then
        assert.matches(case.like, real.error)
        assert.matches(case.like, mine.error)
        real.error, mine.error = nil, nil
      end
      if case.in_sql then
        -- What is published in a transaction is the database's, and no request.
        mine.at_once = real.at_once
      end
      assert.same(real, mine)
    end)
  end

  it("waits, without a word of how the library does that in its tracebacks", function()
    for i, case in ipairs(CASES) do
      if case[1]:find "^exceeds its limit" then
        assert.falsy((executed(run, i, case).error or ""):find("raw_", 1, true), case[1])
      end
    end
  end)
end)
