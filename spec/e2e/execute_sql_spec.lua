-- execute: the JSON request surface, as a program that speaks JSON uses it.

local schema = require "spec.support.schema"
local json = require "tidemill.json"

local ledger = schema.new()

setup(function()
  ledger:open()
end)
teardown(function()
  ledger:close()
end)
before_each(function()
  ledger:clear()
  ledger:subscribe("a", "s")
end)
after_each(function()
  ledger:close_connections()
end)

-- The answer to a request given as text, decoded.
local function answer(request, published_by)
  return json.decode(ledger.db:value("select tidemill.execute($1::text, $2)", request, published_by))
end

local function refusal(request, published_by)
  local message, sqlstate = ledger:refused("select tidemill.execute($1::text, $2)", request, published_by)
  assert.equal("22023", sqlstate, message)
  assert.equal(0, #ledger:rows())
  return message
end

describe("execute", function()
  it("publishes, and answers with id, topic, delivered and duplicate", function()
    ledger:subscribe("a", "t")
    local result = answer('{"op": "publish", "topic": " a ", "message": {"n": 1}, "priority": 2, "delay_secs": 60}')
    local rows = ledger:rows("available_at = created_at + '60 s'")
    assert.same({ id = rows[1].id, topic = "a", delivered = 2, duplicate = false }, result)
    for _, row in ipairs(rows) do
      assert.same({ '{"n": 1}', "2", "pending" }, { row.payload, row.priority, row.status })
    end
  end)

  it("takes `publish` for the op and {} for the message where they are left out", function()
    answer '{"topic": "a"}'
    answer '{"op": null, "topic": "a"}'
    assert.same({ "{}", "{}" }, schema.column(ledger:rows(), "payload"))
  end)

  it("knows a message by either name, and null is one", function()
    answer '{"topic": "a", "message": null}'
    answer '{"topic": "a", "payload": [1]}'
    assert.same({ "null", "[1]" }, schema.column(ledger:rows(), "payload"))
  end)

  it("reports a duplicate, and a topic that nobody wants", function()
    local first = answer '{"topic": "a", "dedupe_key": "k"}'
    assert.same({ id = first.id, topic = "a", delivered = 0, duplicate = true },
      answer '{"topic": "a", "dedupe_key": "k"}')
    local nobody = answer '{"topic": "b"}'
    assert.same({ 0, false, "done", "" }, { nobody.delivered, nobody.duplicate,
      ledger:rows("topic = 'b'")[1].status, ledger:rows("topic = 'b'")[1].subscriber })
  end)

  it("announces what it published", function()
    assert.same({ "a" }, ledger:notified(function()
      answer '{"topic": "a"}'
    end))
  end)

  it("takes jsonb too, and a bare literal for text", function()
    assert.equal("a", json.decode(ledger.db:value [[select tidemill.execute('{"topic": "a"}'::jsonb)]]).topic)
    assert.equal("a", json.decode(ledger.db:value [[select tidemill.execute('{"topic": "a"}')]]).topic)
    assert.equal("not JSON: Token \"nonsense\" is invalid.", (ledger:refused "select tidemill.execute('nonsense')"))
  end)

  it("refuses what is no JSON, saying why", function()
    for request, reason in pairs {
      ["nonsense"] = 'not JSON: Token "nonsense" is invalid.',
      [""] = "not JSON: The input string ended unexpectedly.",
      ['{"topic": "a"'] = "not JSON: The input string ended unexpectedly.",
      ['{"topic": "a", "message": "\\u0000"}'] = "not JSON: \\u0000 cannot be converted to text.",
      ['{"topic": "a", "message": 1e999999}'] = "not JSON: value overflows numeric format",
    } do
      assert.equal(reason, refusal(request))
    end
    local deep = ("["):rep(100000) .. ("]"):rep(100000)
    assert.equal("not JSON: stack depth limit exceeded", (refusal('{"topic": "a", "message": ' .. deep .. "}")))
  end)

  it("refuses what is no request, naming the fault", function()
    for request, reason in pairs {
      ["{}"] = "`topic` is required",
      ['{"op": "publish", "topic": null}'] = "`topic` is required",
      ['{"topic": 5}'] = "`topic` is a JSON number: it must be a string",
      ['{"op": "consume", "topic": "a"}'] = "`consume` is not a queue operation; expected `publish`",
      ['{"op": "consume"}'] = "`consume` is not a queue operation; expected `publish`",
      ['{"op": 7, "topic": "a"}'] = "`7` is not a queue operation; expected `publish`",
      ['{"op": "", "topic": "a"}'] = "`` is not a queue operation; expected `publish`",
      ['{"topic": "not a topic!"}'] =
        "`not a topic!` is not a topic: use letters, digits, `.`, `_`, `-` or `:`",
      ["[]"] = "a JSON array is not a message: give an object with `topic`",
      ['"publish"'] = "a JSON string is not a message: give an object with `topic`",
      ["null"] = "a JSON null is not a message: give an object with `topic`",
      ['{"topic": "a", "message": 1, "payload": 2}'] = "`message` and `payload` are two names of one thing: give one",
      ['{"topic": "a", "priority": 10}'] = "`priority` is 10: it must be between -9 (first) and 9 (last)",
    } do
      assert.equal(reason, refusal(request))
    end
    assert.equal("a JSON null is not a message: give an object with `topic`", refusal(nil))
    assert.matches("^`delay` is not an option: known are `topic`", refusal '{"topic": "a", "delay": 5}')
    assert.matches("^`" .. ("x"):rep(100) .. "` is not a queue operation",
      refusal('{"op": "' .. ("x"):rep(500) .. '"}'))
  end)

  it("records the argument as the publisher, then the request's own, then the session's user", function()
    answer('{"topic": "a"}', "mia")
    answer '{"topic": "a", "published_by": "eve"}'
    answer '{"topic": "a", "published_by": null}'
    assert.same({ "mia", "eve", ledger.db:value "select session_user" }, schema.column(ledger:rows(), "published_by"))
  end)

  it("lets no request name another publisher than the argument", function()
    assert.equal("`published_by` is given for all already: leave it out here",
      refusal('{"topic": "a", "published_by": "eve"}', "mia"))
  end)

  it("is part of the caller's transaction", function()
    ledger.db:exec "begin"
    answer '{"topic": "a"}'
    ledger.db:exec "rollback"
    assert.equal(0, #ledger:rows())
  end)
end)
