-- tidemill.publish as SQL callers see it. No program takes part.

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

describe("what is installed", function()
  -- A switched off kind of plan counts as very expensive, which makes Postgres compile it at each call.
  it("is never compiled where it switches plans off", function()
    assert.equal("0", ledger.db:value [[select count(*) from pg_proc
      where proconfig && '{enable_seqscan=off}' and not proconfig @> '{jit=off}']])
  end)
end)

describe("publish", function()
  it("writes one pending row for the subscriber and says what it wrote", function()
    local lane = ledger:subscribe("order.paid", "fulfil")
    local result = ledger:first("select * from tidemill.publish('order.paid', '{\"id\": 7}')")
    local all = ledger:rows()
    assert.equal(1, #all)
    local row = all[1]
    assert.same({ id = row.id, topic = "order.paid", delivered = "1", duplicate = "f" }, result)
    assert.equal(lane, tonumber(row.lane))
    assert.same({ "order.paid", "fulfil", "pending", '{"id": 7}', "0", "0", "0" },
      { row.topic, row.subscriber, row.status, row.payload, row.attempts, row.priority, row.crashes })
    for _, name in ipairs { "claimed_at", "claimed_by", "processed_at", "error", "errors", "max_attempts", "dedupe_key",
      "ordering_key", "headers" } do
      assert.is_nil(row[name], name)
    end
  end)

  it("dates the rows of a transaction alike", function()
    ledger:subscribe("a", "s")
    ledger.db:exec "begin; select tidemill.publish('a'); select pg_sleep(0.01); select tidemill.publish('a')"
    local same = ledger.db:value [[select bool_and(available_at = now() and created_at = now() and updated_at = now())
      from tidemill.queue_message]]
    ledger.db:exec "commit"
    assert.equal("t", same)
  end)

  it("writes a row for each subscriber, in the order of their lanes", function()
    local lanes = { ledger:subscribe("a", "one"), ledger:subscribe("a", "two"), ledger:subscribe("a", "three") }
    ledger:subscribe("b", "other")
    local result = ledger:first "select * from tidemill.publish('a')"
    local all = ledger:rows()
    assert.same({ "one", "two", "three" }, schema.column(all, "subscriber"))
    for i, row in ipairs(all) do
      assert.equal(lanes[i], tonumber(row.lane))
    end
    assert.equal("3", result.delivered)
    assert.equal(all[1].id, result.id)
  end)

  it("records a topic that nobody wants as done, with a warning and no notification", function()
    local result
    assert.same({}, ledger:notified(function()
      result = ledger:first "select * from tidemill.publish('order.piad', '[1]')"
    end))
    local all = ledger:rows()
    assert.equal(1, #all)
    assert.same({ id = all[1].id, topic = "order.piad", delivered = "0", duplicate = "f" }, result)
    assert.same({ "done", "", "[1]" }, { all[1].status, all[1].subscriber, all[1].payload })
    assert.is_nil(all[1].lane)
    assert.is_not_nil(all[1].processed_at)
    local notices = ledger.db:notices()
    assert.equal(1, #notices)
    assert.truthy(notices[1]:find "^WARNING: .*`order.piad`")
  end)

  it("notes who publishes: the session's user, or as told", function()
    ledger:subscribe("a", "s")
    ledger.db:query "select tidemill.publish('a')"
    ledger.db:query "select tidemill.publish('a', published_by => 'mia')"
    ledger.db:query "select tidemill.publish('a', published_by => '')"
    assert.same({ ledger.db:value "select session_user", "mia", "" }, schema.column(ledger:rows(), "published_by"))
  end)

  it("takes part in the caller's transaction", function()
    ledger:subscribe("a", "s")
    local other = ledger:connect()
    assert.same({}, ledger:notified(function()
      other:exec "begin; select tidemill.publish('a')"
      assert.equal(0, #ledger:rows())
      other:exec "rollback"
    end))
    assert.equal(0, #ledger:rows())
    other:exec "begin; select tidemill.publish('a'); commit"
    assert.equal(1, #ledger:rows())
  end)

  it("works from a trigger", function()
    ledger:subscribe("order.created", "s")
    ledger.db:exec [[
      create table public.orders (id integer);
      create function public.announce() returns trigger language plpgsql as
        $$ begin perform tidemill.publish('order.created', to_jsonb(new)); return null; end $$;
      create trigger announce after insert on public.orders for each row execute function public.announce();
      insert into public.orders values (1), (2);
    ]]
    local payloads = schema.column(ledger:rows(), "payload")
    ledger.db:exec "drop table public.orders; drop function public.announce()"
    assert.same({ '{"id": 1}', '{"id": 2}' }, payloads)
  end)

  for _, level in ipairs { "serializable", "repeatable read" } do
    it(("works where transactions are %s by default"):format(level), function()
      ledger:subscribe("a", "s")
      local strict = ledger:connect()
      strict:exec(("set default_transaction_isolation = '%s'"):format(level))
      assert.equal("1", strict:query("select * from tidemill.publish('a', dedupe_key => 'k')")[1].delivered)
      assert.equal("t", strict:query("select * from tidemill.publish('a', dedupe_key => 'k')")[1].duplicate)
      assert.equal(2, #strict:query "select * from tidemill.publish_many('{a}'::text[], '{1,2}')")
      -- With a row in the way that its snapshot cannot see it is told to try again, as ever at this level.
      strict:exec "begin"
      strict:query "select count(*) from tidemill.queue_message"
      ledger.db:query "select tidemill.publish('a', dedupe_key => 'new')"
      local _, sqlstate = schema.refused(strict, "select tidemill.publish('a', dedupe_key => 'new')")
      assert.equal("40001", sqlstate)
      strict:exec "rollback"
    end)
  end

  describe("checks the topic:", function()
    before_each(function()
      ledger:subscribe("a.b_c-d:9", "s")
    end)

    it("letters, digits and four signs make one", function()
      assert.equal("1", ledger:first("select * from tidemill.publish('a.b_c-d:9')").delivered)
    end)

    it("white space around it does not count", function()
      local result = ledger:first("select * from tidemill.publish($1)", " \t\n\r\v\fa.b_c-d:9 \n")
      assert.equal("a.b_c-d:9", result.topic)
      assert.equal("1", result.delivered)
    end)

    it("its own letters all count", function()
      for _, topic in ipairs { "v", "vat.approv", "tnrf", "x0B" } do
        assert.equal(topic, ledger:first("select * from tidemill.publish($1)", topic).topic)
        assert.same({ topic, topic }, schema.column(ledger.db:query(
          "select * from tidemill.publish_many(array[$1::text], '{1,2}')", topic), "topic"))
      end
    end)

    it("200 characters are allowed, 201 are not", function()
      assert.equal(200, #ledger:first("select * from tidemill.publish($1)", (" "):rep(9) .. ("x"):rep(200)).topic)
      assert_refused(("`%s…` is not a topic: it has 201 characters, at most 200 are allowed"):format(("x"):rep(40)),
        "select tidemill.publish($1)", ("x"):rep(201))
    end)

    for _, topic in ipairs { "not a topic!", "", "a/b", "order.päid", "a*", "ａ", "a'b", "a\\b" } do
      it(("`%s` is none"):format(topic), function()
        assert_refused(("`%s` is not a topic: use letters, digits, `.`, `_`, `-` or `:`"):format(topic),
          "select tidemill.publish($1)", topic)
        assert.equal(0, #ledger:rows())
      end)
    end

    it("neither is one of two lines", function()
      assert.equal("`a", (ledger:refused("select tidemill.publish($1)", "a\nb")))
    end)

    it("white space alone is the empty text", function()
      assert_refused("`` is not a topic: use letters, digits, `.`, `_`, `-` or `:`", "select tidemill.publish('  ')")
    end)

    it("NULL is refused", function()
      assert_refused("`topic` is required", "select tidemill.publish(null)")
    end)
  end)

  describe("takes as payload", function()
    before_each(function()
      ledger:subscribe("a", "s")
    end)

    it("an empty object by default and for SQL NULL", function()
      ledger.db:query "select tidemill.publish('a')"
      ledger.db:query "select tidemill.publish('a', null)"
      assert.same({ "{}", "{}" }, schema.column(ledger:rows(), "payload"))
    end)

    for _, json in ipairs { "null", "true", "false", "0", "-12.50", "12345678901234567890", '"text"', '""', "[]", "{}",
      '[1, [null], {"a": {}}]' } do
      it("the JSON value " .. json, function()
        ledger.db:query("select tidemill.publish('a', $1::jsonb)", json)
        assert.equal(json, ledger:rows()[1].payload)
      end)
    end

    it("as much text as max_payload_bytes, and no byte more", function()
      ledger.db:exec "update tidemill.setting set max_payload_bytes = 20"
      ledger.db:query("select tidemill.publish('a', to_jsonb($1::text))", ("x"):rep(18))
      assert_refused("the payload has 21 bytes as text, at most 20 are allowed (`max_payload_bytes`)",
        "select tidemill.publish('a', to_jsonb($1::text))", ("x"):rep(19))
      -- Bytes, not characters.
      assert_refused("the payload has 22 bytes as text, at most 20 are allowed (`max_payload_bytes`)",
        "select tidemill.publish('a', to_jsonb($1::text))", ("ä"):rep(10))
      assert.equal(1, #ledger:rows())
    end)

    it("one MiB unless configured otherwise", function()
      ledger.db:query("select tidemill.publish('a', to_jsonb($1::text))", ("x"):rep(1048574))
      assert_refused("the payload has 1048577 bytes as text, at most 1048576 are allowed (`max_payload_bytes`)",
        "select tidemill.publish('a', to_jsonb($1::text))", ("x"):rep(1048575))
    end)

    it("nothing that is small on disk and reads back huge", function()
      local json = "[" .. ("1e131071,"):rep(99) .. "1e131071]"
      assert.is_true(tonumber(ledger.db:value("select pg_column_size($1::jsonb)", json)) < 5000)
      local message = ledger:refused("select tidemill.publish('a', $1::jsonb)", json)
      assert.truthy(message:find "^the payload has 13107%d%d%d bytes as text")
    end)
  end)

  describe("decides when the message is due:", function()
    before_each(function()
      ledger:subscribe("a", "s")
    end)

    local function due_in_secs()
      return tonumber(ledger.db:value
        "select extract(epoch from available_at - created_at) from tidemill.queue_message")
    end

    it("after `delay`", function()
      ledger.db:query "select tidemill.publish('a', delay => '1 hour 500 ms')"
      assert.equal(3600.5, due_in_secs())
    end)

    it("now, for a delay of 0", function()
      ledger.db:query "select tidemill.publish('a', delay => '0')"
      assert.equal(0, due_in_secs())
    end)

    it("at `available_at`", function()
      ledger.db:query "select tidemill.publish('a', available_at => now() + '90 s')"
      assert.equal(90, due_in_secs())
    end)

    it("now, for a time that has passed", function()
      ledger.db:query "select tidemill.publish('a', available_at => '2001-01-01')"
      assert.equal(0, due_in_secs())
    end)

    it("not both ways", function()
      assert_refused("give `delay` or `available_at`, not both",
        "select tidemill.publish('a', delay => '1 s', available_at => now())")
    end)

    it("not before now", function()
      assert_refused("`delay` is -00:00:01: it must be between 0 and 100 years",
        "select tidemill.publish('a', delay => '-1 s')")
    end)

    it("not later than in 100 years", function()
      assert.equal("1", ledger:first("select * from tidemill.publish('a', delay => '100 years')").delivered)
      assert_refused("`delay` is 100 years 1 day: it must be between 0 and 100 years",
        "select tidemill.publish('a', delay => '100 years 1 day')")
      assert_refused("`delay` is 170000000 years: it must be between 0 and 100 years",
        "select tidemill.publish('a', delay => '170000000 years')")
      -- Seconds are compared by the calendar, as the years are.
      assert.equal("1", ledger:first(
        "select * from tidemill.publish('a', delay => make_interval(secs => 3153600000))").delivered)
      assert_refused("`available_at` is 2999-01-01 00:00:00+00: it must be within 100 years from now",
        "select tidemill.publish('a', available_at => '2999-01-01 00:00:00+00')")
    end)

    for _, endless in ipairs { "infinity", "-infinity" } do
      it("not at " .. endless, function()
        assert_refused(("`available_at` is %s: it must be within 100 years from now"):format(endless),
          "select tidemill.publish('a', available_at => $1)", endless)
      end)
    end
  end)

  describe("checks its options:", function()
    before_each(function()
      ledger:subscribe("a", "s")
    end)

    it("priority from -9 to 9", function()
      ledger.db:query "select tidemill.publish('a', priority => -9)"
      ledger.db:query "select tidemill.publish('a', priority => 9)"
      ledger.db:query "select tidemill.publish('a', priority => null)"
      assert.same({ "-9", "9", "0" }, schema.column(ledger:rows(), "priority"))
      assert_refused("`priority` is -10: it must be between -9 (first) and 9 (last)",
        "select tidemill.publish('a', priority => -10)")
      assert_refused("`priority` is 10: it must be between -9 (first) and 9 (last)",
        "select tidemill.publish('a', priority => 10)")
    end)

    it("max_attempts from 1", function()
      ledger.db:query "select tidemill.publish('a', max_attempts => 1)"
      ledger.db:query "select tidemill.publish('a', max_attempts => 32767)"
      assert.same({ "1", "32767" }, schema.column(ledger:rows(), "max_attempts"))
      assert_refused("`max_attempts` is 0: it must be between 1 and 32767",
        "select tidemill.publish('a', max_attempts => 0)")
      assert_refused("`max_attempts` is 32768: it must be between 1 and 32767",
        "select tidemill.publish('a', max_attempts => 32768)")
    end)

    it("dedupe_key of 1 to 500 characters", function()
      assert.equal("1", ledger:first("select * from tidemill.publish('a', dedupe_key => $1)", ("ä"):rep(500)).delivered)
      assert_refused("`dedupe_key` is empty: leave it out, or give 1 to 500 characters",
        "select tidemill.publish('a', dedupe_key => '')")
      assert_refused("`dedupe_key` has 501 characters: at most 500 are allowed",
        "select tidemill.publish('a', dedupe_key => $1)", ("x"):rep(501))
    end)

    it("on_duplicate", function()
      assert_refused("`on_duplicate` is `drop`: it must be `keep` or `replace`",
        "select tidemill.publish('a', on_duplicate => 'drop')")
      assert.equal("1", ledger:first("select * from tidemill.publish('a', on_duplicate => null)").delivered)
    end)

    it("headers are an object or nothing", function()
      ledger.db:query [[select tidemill.publish('a', headers => '{"trace": "x"}')]]
      ledger.db:query [[select tidemill.publish('a', headers => 'null')]]
      assert.equal('{"trace": "x"}', ledger:rows()[1].headers)
      assert.is_nil(ledger:rows()[2].headers)
      assert_refused("`headers` is a JSON array: it must be an object", "select tidemill.publish('a', headers => '[]')")
      assert_refused("`headers` has 70009 bytes as text: at most 65536 are allowed",
        "select tidemill.publish('a', headers => jsonb_build_object('a', repeat('x', 70000)))")
    end)

    it("published_by is at most 500 characters", function()
      assert_refused("`published_by` has 501 characters: at most 500 are allowed",
        "select tidemill.publish('a', published_by => $1)", ("x"):rep(501))
    end)

    it("an unknown one is no such function", function()
      local _, sqlstate = ledger:refused("select tidemill.publish('a', prioritty => 1)")
      assert.equal("42883", sqlstate)
    end)
  end)
end)

describe("a notification", function()
  before_each(function()
    ledger:subscribe("a", "one")
    ledger:subscribe("a", "two")
  end)

  it("comes once a publish, whatever the number of subscribers, with the trimmed topic", function()
    assert.same({ "a", "a" }, ledger:notified(function()
      ledger.db:query "select tidemill.publish('a')"
      ledger.db:query "select tidemill.publish(' a ')"
    end))
  end)

  it("comes for a delayed message too, so that workers learn its due time", function()
    assert.same({ "a" }, ledger:notified(function()
      ledger.db:query "select tidemill.publish('a', delay => '1 h')"
    end))
  end)

  it("can be left out for one publish, and switched off", function()
    assert.same({}, ledger:notified(function()
      ledger.db:query "select tidemill.publish('a', notify => false)"
      ledger.db:query "select * from tidemill.publish_many('{a}'::text[], '{1}', notify => false)"
      ledger.db:query "update tidemill.setting set notify = false"
      ledger.db:query "select tidemill.publish('a', notify => true)"
      ledger.db:query "select * from tidemill.publish_many('{a}'::text[], '{1}')"
    end))
    assert.equal(8, #ledger:rows())
  end)

  it("goes to the channel of the prefix", function()
    ledger.db:query "update tidemill.setting set prefix = 'shop'"
    assert.same({ "a" }, ledger:notified(function()
      ledger.db:query "select tidemill.publish('a')"
    end, "shop_queue"))
  end)

  it("does not come for a duplicate that was kept", function()
    assert.same({ "a" }, ledger:notified(function()
      for _ = 1, 3 do
        ledger.db:query "select tidemill.publish('a', dedupe_key => 'k')"
      end
    end))
  end)
end)
