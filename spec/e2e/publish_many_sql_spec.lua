-- tidemill.publish_many in both its forms. No program takes part.

local schema = require "spec.support.schema"

local ledger = schema.new()

setup(function()
  ledger:open()
end)
teardown(function()
  ledger:close()
end)
before_each(function()
  ledger:clear()
end)
after_each(function()
  ledger:close_connections()
end)

local function assert_refused(message, sql, ...)
  local text, sqlstate = ledger:refused(sql, ...)
  assert.equal(message, text)
  assert.equal("22023", sqlstate)
end

describe("publish_many with arrays", function()
  before_each(function()
    ledger:subscribe("a", "s")
    ledger:subscribe("b", "one")
    ledger:subscribe("b", "two")
  end)

  it("answers in the order of the payloads, and writes in it", function()
    local result = ledger.db:query [[select * from tidemill.publish_many('{b,nobody," a ",b}'::text[], '{1,2,3,4}')]]
    local seen = {}
    for i, one in ipairs(result) do
      local payload = ledger.db:value("select payload from tidemill.queue_message where id = $1", one.id)
      seen[i] = { one.topic, one.delivered, one.duplicate, payload }
    end
    assert.same({
      { "b", "2", "f", "1" }, { "nobody", "0", "f", "2" }, { "a", "1", "f", "3" }, { "b", "2", "f", "4" },
    }, seen)
    local written = {}
    for i, row in ipairs(ledger:rows()) do
      written[i] = row.payload .. row.subscriber
    end
    assert.same({ "1one", "1two", "2", "3s", "4one", "4two" }, written)
  end)

  it("writes the same rows as publish does", function()
    ledger.db:query [[select tidemill.publish('b', '{"a": 1}', available_at => now() + '1 h', priority => 2,
      max_attempts => 3, published_by => 'ann', headers => '{"t": 1}')]]
    ledger.db:query [[select * from tidemill.publish_many('{b}'::text[], array['{"a": 1}'::jsonb],
      array[now() + '1 h'], '{2}', null, 'keep', '{3}', 'ann', array['{"t": 1}'::jsonb])]]
    ledger.db:query "select tidemill.publish('nobody')"
    ledger.db:query "select tidemill.publish('a')"
    ledger.db:query "select * from tidemill.publish_many('{nobody,a}'::text[], array[null, null]::jsonb[])"
    local all = ledger:rows()
    assert.equal(8, #all)
    for _, pair in ipairs { { 1, 3 }, { 2, 4 }, { 5, 7 }, { 6, 8 } } do
      local one, two = all[pair[1]], all[pair[2]]
      for _, name in ipairs { "topic", "subscriber", "lane", "status", "payload", "priority", "max_attempts",
        "published_by", "headers", "attempts", "error", "errors" } do
        assert.equal(one[name], two[name], name)
      end
      assert.equal(one.processed_at == nil, two.processed_at == nil)
    end
    assert.equal(4, #ledger:rows "available_at = created_at + '1 h'")
    assert.equal(4, #ledger:rows "available_at = created_at")
  end)

  it("serves all payloads with one topic", function()
    assert.equal(3, #ledger.db:query "select * from tidemill.publish_many('{a}'::text[], '{1,2,3}')")
    assert.equal(3, #ledger:rows "topic = 'a'")
  end)

  it("does nothing for no payloads", function()
    assert.equal(0, #ledger.db:query "select * from tidemill.publish_many('{a}'::text[], '{}')")
    assert.equal(0, #ledger.db:query "select * from tidemill.publish_many('{}'::text[], '{}')")
    assert.equal(0, #ledger:rows())
  end)

  it("takes NULL elements as the defaults", function()
    ledger.db:query [[select * from tidemill.publish_many('{a,a}'::text[], array[null, '1']::jsonb[],
      array[null, now() + '1 h'], '{null,5}', '{null,k}', 'keep', '{null,7}', null, array[null, '{}']::jsonb[])]]
    local one, two = unpack(ledger:rows())
    assert.same({ "{}", "0" }, { one.payload, one.priority })
    for _, name in ipairs { "dedupe_key", "max_attempts", "headers" } do
      assert.is_nil(one[name], name)
    end
    assert.same({ "1", "5", "k", "7", "{}" },
      { two.payload, two.priority, two.dedupe_key, two.max_attempts, two.headers })
  end)

  it("does not care where an array begins", function()
    assert.equal(2, #ledger.db:query "select * from tidemill.publish_many('[5:5]={a}'::text[], '[0:1]={1,2}')")
  end)

  it("announces each topic once", function()
    local payloads = ledger:notified(function()
      ledger.db:query "select * from tidemill.publish_many('{a,b,a,b,nobody}'::text[], '{1,2,3,4,5}')"
    end)
    table.sort(payloads)
    assert.same({ "a", "b" }, payloads)
  end)

  it("warns once about a topic that nobody wants", function()
    ledger.db:query "select * from tidemill.publish_many('{nobody}'::text[], '{1,2,3}')"
    local notices = ledger.db:notices()
    assert.equal(1, #notices)
    assert.truthy(notices[1]:find "`nobody`")
  end)

  local faults = {
    ["'{a,b,c d,e f}'::text[], '{1,2,3,4}'"] =
      "item 3: `c d` is not a topic: use letters, digits, `.`, `_`, `-` or `:`",
    ["'{a,null}'::text[], '{1,2}'"] = "item 2: `topic` is required",
    ["'{a}'::text[], '{1,2}', priorities => '{0,10}'"] =
      "item 2: `priority` is 10: it must be between -9 (first) and 9 (last)",
    ["'{a}'::text[], '{1}', dedupe_keys => '{\"\"}'"] =
      "item 1: `dedupe_key` is empty: leave it out, or give 1 to 500 characters",
    ["'{a}'::text[], '{1,2}', max_attempts => '{1,0}'"] = "item 2: `max_attempts` is 0: it must be between 1 and 32767",
    ["'{a}'::text[], '{1,2}', available_ats => '{now,infinity}'"] =
      "item 2: `available_at` is infinity: it must be within 100 years from now",
    ["'{a}'::text[], '{1,2}', headers => array[null, '1']::jsonb[]"] =
      "item 2: `headers` is a JSON number: it must be an object",
    ["'{a}'::text[], '{123,1234}'"] =
      "item 2: the payload has 4 bytes as text, at most 3 are allowed (`max_payload_bytes`)",
    ["'{a,b}'::text[], '{1,2,3}'"] =
      "`topics` has 2 elements and `payloads` 3: give one topic for all, or one for each payload",
    ["'{}'::text[], '{1}'"] =
      "`topics` has 0 elements and `payloads` 1: give one topic for all, or one for each payload",
    ["'{a}'::text[], '{1,2}', priorities => '{1}'"] =
      "`priorities` has 1 elements and `payloads` 2: give one for each payload, or leave it out",
    ["'{a}'::text[], '{1,2}', headers => '{null,null,null}'"] =
      "`headers` has 3 elements and `payloads` 2: give one for each payload, or leave it out",
    ["'{a}'::text[], '{{1,2},{3,4}}'"] = "`payloads` has 2 dimensions: it must be a plain array",
    ["'{a}'::text[], null"] = "`payloads` is required",
    ["null::text[], '{1}'"] = "`topics` is required",
    ["'{a}'::text[], '{1}', on_duplicate => 'drop'"] = "`on_duplicate` is `drop`: it must be `keep` or `replace`",
  }
  for arguments, message in pairs(faults) do
    it(("refuses %s, saying what is wrong and where"):format(arguments), function()
      ledger.db:exec "update tidemill.setting set max_payload_bytes = 3"
      assert_refused(message, ("select * from tidemill.publish_many(%s)"):format(arguments))
      assert.equal(0, #ledger:rows())
    end)
  end

  it("minds dedupe keys, also those of items before", function()
    ledger.db:query "select tidemill.publish('a', '0', dedupe_key => 'x')"
    local result = ledger.db:query [[select * from tidemill.publish_many('{a,a,a,b,a}'::text[], '{1,2,3,4,5}',
      dedupe_keys => '{x,y,y,y,null}')]]
    assert.same({ "0", "1", "0", "2", "1" }, schema.column(result, "delivered"))
    assert.same({ "t", "f", "t", "f", "f" }, schema.column(result, "duplicate"))
    assert.equal(result[2].id, result[3].id)
    assert.same({ "0", "2", "4", "4", "5" }, schema.column(ledger:rows(), "payload"))
  end)

  it("replaces by dedupe key, the last item winning", function()
    ledger.db:query [[select * from tidemill.publish_many('{a}'::text[], '{1,2,3}', dedupe_keys => '{k,k,k}',
      on_duplicate => 'replace')]]
    assert.same({ "3" }, schema.column(ledger:rows(), "payload"))
  end)

  it("says nothing about a topic of which all were duplicates", function()
    ledger.db:query "select tidemill.publish('a', dedupe_key => 'k')"
    assert.same({ "b" }, ledger:notified(function()
      ledger.db:query "select * from tidemill.publish_many('{a,b}'::text[], '{1,2}', dedupe_keys => '{k,k}')"
    end))
  end)

  it("takes thousands at once, in order", function()
    assert.same({ n = "5000", ids = "5000", delivered = "5000" }, ledger:first [[
      with payload as (select array_agg(to_jsonb(i) order by i) as list from generate_series(1, 5000) as i)
      select count(*) as n, count(distinct p.id) as ids, sum(p.delivered) as delivered
        from payload, tidemill.publish_many('{a}'::text[], payload.list) as p]])
    assert.equal("t", ledger.db:value [[select bool_and(payload = to_jsonb(place)) from
      (select payload, row_number() over (order by seq) as place from tidemill.queue_message) as m]])
  end)
end)

describe("publish_many with a JSON array", function()
  before_each(function()
    ledger:subscribe("a", "s")
    ledger:subscribe("b", "s")
  end)

  local function publish(json, extra)
    return ledger.db:query(("select * from tidemill.publish_many($1::jsonb%s)"):format(extra or ""), json)
  end

  it("publishes each item with its own options", function()
    local result = publish [[ [
      {"topic": "b", "message": {"n": 1}},
      {"topic": " a ", "payload": [2], "priority": -3, "max_attempts": 2, "headers": {"h": 1}, "published_by": "ann"},
      {"topic": "a", "message": null, "delay_secs": 90.5},
      {"topic": "a", "at": "2099-01-31T08:00:00+01:00"},
      {"topic": "a", "priority": null, "dedupe_key": "k"},
      {"topic": "a", "dedupe_key": "k", "message": 6},
      {"topic": "a", "dedupe_key": "k", "on_duplicate": "replace", "message": 7}
    ] ]]
    assert.same({ "b", "a", "a", "a", "a", "a", "a" }, schema.column(result, "topic"))
    assert.same({ "f", "f", "f", "f", "f", "t", "t" }, schema.column(result, "duplicate"))
    local all = ledger:rows()
    assert.same({ '{"n": 1}', "[2]", "null", "{}", "7" }, schema.column(all, "payload"))
    assert.equal(ledger.db:value "select session_user", all[1].published_by)
    assert.same({ "-3", "2", '{"h": 1}', "ann" },
      { all[2].priority, all[2].max_attempts, all[2].headers, all[2].published_by })
    assert.equal(1, #ledger:rows "available_at = created_at + '90.5 s'")
    assert.equal(1, #ledger:rows "available_at = '2099-01-31 07:00:00+00'")
  end)

  it("publishes all in the name given, and lets no item take another", function()
    publish('[{"topic": "a"}]', ", published_by => 'mia'")
    assert.equal("mia", ledger:rows()[1].published_by)
    assert_refused("item 2: `published_by` is given for all already: leave it out here",
      "select * from tidemill.publish_many($1::jsonb, published_by => 'mia')",
      '[{"topic": "a"}, {"topic": "a", "published_by": "eve"}]')
  end)

  it("announces each topic once", function()
    local payloads = ledger:notified(function()
      publish '[{"topic": "a"}, {"topic": "b"}, {"topic": "a"}]'
    end)
    table.sort(payloads)
    assert.same({ "a", "b" }, payloads)
  end)

  it("does nothing for no items", function()
    assert.equal(0, #publish "[]")
  end)

  local no_array = '`items` must be a JSON array of objects such as {"topic": "order.paid", "message": {}}'
  local faults = {
    ["{}"] = no_array,
    ["null"] = no_array,
    ['[{"topic": "a"}, {"message": 1}]'] = "item 2: `topic` is required",
    ['[{"topic": "a"}, {"topic": null}]'] = "item 2: `topic` is required",
    ['[{"topic": 1}]'] = "item 1: `topic` is a JSON number: it must be a string",
    ['[{"topic": "a"}, {"topic": "a b"}]'] =
      "item 2: `a b` is not a topic: use letters, digits, `.`, `_`, `-` or `:`",
    ['["a"]'] = "item 1: a JSON string is not a message: give an object with `topic`",
    ['[{"topic": "a", "dealy_secs": 1}]'] = "item 1: `dealy_secs` is not an option: known are `topic`, `message` "
      .. "(or `payload`), `delay_secs`, `at`, `priority`, `dedupe_key`, `on_duplicate`, `max_attempts`, "
      .. "`published_by` and `headers`",
    ['[{"topic": "a", "message": 1, "payload": 1}]'] =
      "item 1: `message` and `payload` are two names of one thing: give one",
    ['[{"topic": "a", "priority": "1"}]'] = "item 1: `priority` is a JSON string: it must be a number",
    ['[{"topic": "a", "priority": 1.5}]'] = "item 1: `priority` is 1.5: it must be a whole number",
    ['[{"topic": "a", "priority": 12}]'] = "item 1: `priority` is 12: it must be between -9 (first) and 9 (last)",
    ['[{"topic": "a", "priority": 99999999999999}]'] = "item 1: `priority` is 99999999999999: that is out of range",
    ['[{"topic": "a", "max_attempts": 40000}]'] =
      "item 1: `max_attempts` is 40000: it must be between 1 and 32767",
    ['[{"topic": "a", "delay_secs": -1}]'] =
      "item 1: `delay_secs` is -1: it must be between 0 and 3153600000 (100 years)",
    ['[{"topic": "a", "delay_secs": 1, "at": "2030-01-01T00:00:00Z"}]'] =
      "item 1: give `delay_secs` or `at`, not both",
    ['[{"topic": "a", "at": "tomorrow"}]'] =
      "item 1: `at` is `tomorrow`: give a time with its zone, such as 2030-01-31T08:00:00Z",
    ['[{"topic": "a", "at": "2030-01-31T08:00:00"}]'] =
      "item 1: `at` is `2030-01-31T08:00:00`: give a time with its zone, such as 2030-01-31T08:00:00Z",
    ['[{"topic": "a", "at": "2030-02-31T08:00:00Z"}]'] =
      "item 1: `at` is `2030-02-31T08:00:00Z`: there is no such time",
    ['[{"topic": "a", "on_duplicate": "x"}]'] = "item 1: `on_duplicate` is `x`: it must be `keep` or `replace`",
    ['[{"topic": "a", "headers": []}]'] = "item 1: `headers` is a JSON array: it must be an object",
  }
  for json, message in pairs(faults) do
    it(("refuses %s, saying what is wrong and where"):format(json), function()
      assert_refused(message, "select * from tidemill.publish_many($1::jsonb)", json)
      assert.equal(0, #ledger:rows())
    end)
  end
end)

describe("publish_item", function()
  before_each(function()
    ledger:subscribe("a", "s")
  end)

  it("publishes one JSON object with its options", function()
    local result = ledger:first([[select * from tidemill.publish_item($1::jsonb)]], [[{"topic": " a ", "message": [1],
      "delay_secs": 60, "priority": 3, "max_attempts": 2, "dedupe_key": "k", "headers": {"h": 1}}]])
    local row = ledger:rows("available_at = created_at + '60 s'")[1]
    assert.same({ id = row.id, topic = "a", delivered = "1", duplicate = "f" }, result)
    assert.same({ "[1]", "3", "2", "k", '{"h": 1}', ledger.db:value "select session_user" },
      { row.payload, row.priority, row.max_attempts, row.dedupe_key, row.headers, row.published_by })
    result = ledger:first([[select * from tidemill.publish_item($1::jsonb, 'mia')]],
      [[{"topic": "a", "payload": null, "dedupe_key": "k", "on_duplicate": "replace"}]])
    assert.equal("t", result.duplicate)
    assert.same({ "null", "mia" }, { ledger:rows()[1].payload, ledger:rows()[1].published_by })
  end)

  it("announces it, or not", function()
    assert.same({ "a" }, ledger:notified(function()
      ledger.db:query [[select tidemill.publish_item('{"topic": "a"}')]]
      ledger.db:query [[select tidemill.publish_item('{"topic": "a"}', notify => false)]]
    end))
  end)

  it("says what is wrong without counting", function()
    for json, message in pairs {
      ["{}"] = "`topic` is required",
      ["7"] = "a JSON number is not a message: give an object with `topic`",
      ['{"topic": "a b"}'] = "`a b` is not a topic: use letters, digits, `.`, `_`, `-` or `:`",
      ['{"topic": "a", "priority": 1.5}'] = "`priority` is 1.5: it must be a whole number",
      ['{"topic": "a", "at": "2030-02-31T08:00:00Z"}'] = "`at` is `2030-02-31T08:00:00Z`: there is no such time",
    } do
      assert_refused(message, "select tidemill.publish_item($1::jsonb)", json)
    end
    assert_refused("a JSON null is not a message: give an object with `topic`", "select tidemill.publish_item(null)")
    assert_refused("`published_by` is given for all already: leave it out here",
      "select tidemill.publish_item($1::jsonb, 'mia')", '{"topic": "a", "published_by": "eve"}')
    assert.equal(0, #ledger:rows())
  end)
end)
