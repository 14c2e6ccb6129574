-- Dedupe keys of tidemill.publish, with several publishers at once. No program takes part.

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

describe("a dedupe key", function()
  local function publish(extra)
    return ledger:first(("select * from tidemill.publish('a', dedupe_key => 'k'%s)"):format(extra or ""))
  end

  before_each(function()
    ledger:subscribe("a", "s")
  end)

  it("lets one unfinished row be, and reports it to the second", function()
    local one, two = publish ", payload => '1'", publish ", payload => '2'"
    assert.same({ id = one.id, topic = "a", delivered = "1", duplicate = "f" }, one)
    assert.same({ id = one.id, topic = "a", delivered = "0", duplicate = "t" }, two)
    local all = ledger:rows()
    assert.equal(1, #all)
    assert.same({ one.id, "1", "k" }, { all[1].id, all[1].payload, all[1].dedupe_key })
    assert.same({}, ledger.db:notices())
  end)

  it("is free again once the row is finished", function()
    publish()
    ledger.db:query "update tidemill.queue_message set status = 'done', processed_at = now()"
    assert.equal("f", publish().duplicate)
    assert.equal(2, #ledger:rows())
  end)

  it("counts while the row is running", function()
    local one = publish()
    ledger.db:query "update tidemill.queue_message set status = 'running'"
    assert.same({ id = one.id, topic = "a", delivered = "0", duplicate = "t" }, publish())
  end)

  it("belongs to one topic", function()
    ledger:subscribe("b", "s")
    publish()
    assert.equal("f", ledger:first("select * from tidemill.publish('b', dedupe_key => 'k')").duplicate)
  end)

  it("tells subscribers apart: who has no such row gets one", function()
    local one = publish()
    ledger:subscribe("a", "late")
    assert.same({ id = one.id, topic = "a", delivered = "1", duplicate = "t" }, publish())
    assert.same({ "s", "late" }, schema.column(ledger:rows(), "subscriber"))
  end)

  it("works many times in one statement", function()
    ledger.db:query "select tidemill.publish('a', dedupe_key => 'k') from generate_series(1, 5)"
    assert.equal(1, #ledger:rows())
  end)

  it("is kept on the record of a topic that nobody wants, and holds nothing up", function()
    for _ = 1, 2 do
      local result = ledger:first "select * from tidemill.publish('nobody', dedupe_key => 'k')"
      assert.same({ "0", "f" }, { result.delivered, result.duplicate })
    end
    assert.equal(2, #ledger:rows "dedupe_key = 'k' and status = 'done' and lane is null")
    assert.equal(2, #ledger.db:notices())
  end)

  describe("with on_duplicate => 'replace'", function()
    it("rewrites payload, priority and due time of a row that waits", function()
      local one = publish ", payload => '1', priority => 3, published_by => 'ann'"
      local two = publish [[, payload => '2', priority => -1, delay => '1 h', published_by => 'bob',
        headers => '{"n": 2}', on_duplicate => 'replace']]
      assert.same({ id = one.id, topic = "a", delivered = "1", duplicate = "t" }, two)
      assert.equal(1, #ledger:rows())
      local row = ledger:rows("available_at > now() + '59 min'")[1]
      assert.same({ "2", "-1", "bob", '{"n": 2}', "pending" },
        { row.payload, row.priority, row.published_by, row.headers, row.status })
    end)

    it("writes a new one where none waits", function()
      assert.equal("f", publish(", on_duplicate => 'replace'").duplicate)
      assert.equal(1, #ledger:rows())
    end)

    it("announces the change", function()
      publish()
      assert.same({ "a" }, ledger:notified(function()
        publish ", on_duplicate => 'replace'"
      end))
    end)

    it("keeps a row that runs", function()
      local one = publish ", payload => '1'"
      ledger.db:query "update tidemill.queue_message set status = 'running'"
      assert.same({ id = one.id, topic = "a", delivered = "0", duplicate = "t" },
        publish ", payload => '2', on_duplicate => 'replace'")
      assert.equal("1", ledger:rows()[1].payload)
    end)

    it("does not hold a running row while the publisher's transaction is open", function()
      publish()
      ledger.db:query "update tidemill.queue_message set status = 'running'"
      local other = ledger:connect()
      other:exec "begin; select tidemill.publish('a', dedupe_key => 'k', on_duplicate => 'replace')"
      assert.equal(1, ledger.db:query([[update tidemill.queue_message set status = 'done', processed_at = now()
        where id in (select id from tidemill.queue_message for update skip locked)]]).affected)
      other:exec "commit"
    end)

    it("decides for each subscriber alone", function()
      ledger:subscribe("a", "other")
      local one = publish ", payload => '1'"
      ledger.db:query "update tidemill.queue_message set status = 'running' where subscriber = 's'"
      assert.same({ id = one.id, topic = "a", delivered = "1", duplicate = "t" },
        publish ", payload => '2', on_duplicate => 'replace'")
      assert.equal("1", ledger:rows("subscriber = 's'")[1].payload)
      assert.equal("2", ledger:rows("subscriber = 'other'")[1].payload)
    end)
  end)

  describe("used by two at once:", function()
    local one, two

    before_each(function()
      one, two = ledger:connect(), ledger:connect()
    end)

    local function start_second(extra)
      one:exec "begin; select tidemill.publish('a', '1', dedupe_key => 'k')"
      two:send(("select * from tidemill.publish('a', '2', dedupe_key => 'k'%s)"):format(extra or ""))
      ledger:wait_until_blocked(two)
    end

    it("the second waits, and finds the first one's row", function()
      start_second()
      one:exec "commit"
      local result = two:receive()[1]
      assert.same({ id = ledger:rows()[1].id, topic = "a", delivered = "0", duplicate = "t" }, result)
      assert.same({ "1" }, schema.column(ledger:rows(), "payload"))
    end)

    it("the second writes its own when the first is rolled back", function()
      start_second()
      one:exec "rollback"
      local result = two:receive()[1]
      assert.same({ id = ledger:rows()[1].id, topic = "a", delivered = "1", duplicate = "f" }, result)
      assert.same({ "2" }, schema.column(ledger:rows(), "payload"))
    end)

    it("the second replaces the first one's row", function()
      start_second ", on_duplicate => 'replace'"
      one:exec "commit"
      local result = two:receive()[1]
      assert.same({ id = ledger:rows()[1].id, topic = "a", delivered = "1", duplicate = "t" }, result)
      assert.same({ "2" }, schema.column(ledger:rows(), "payload"))
    end)

    it("the second writes its own when the row in the way is finished meanwhile", function()
      ledger.db:query "select tidemill.publish('a', '0', dedupe_key => 'k')"
      one:exec "begin; update tidemill.queue_message set status = 'done', processed_at = now()"
      two:send "select * from tidemill.publish('a', '2', dedupe_key => 'k')"
      ledger:wait_until_blocked(two)
      one:exec "commit"
      assert.equal("f", two:receive()[1].duplicate)
      assert.same({ "0", "2" }, schema.column(ledger:rows(), "payload"))
    end)
  end)

  it("survives a crowd of publishers and finishers", function()
    local crowd = {}
    for i = 1, 8 do
      crowd[i] = ledger:connect()
      crowd[i]:send [[
        do $$
        declare result tidemill.publication;
        begin
          for i in 1 .. 100 loop
            result := tidemill.publish('a', dedupe_key => 'k',
                                       on_duplicate => case i % 2 when 0 then 'keep' else 'replace' end);
            if result.id is null then
              raise exception 'no id';
            end if;
            commit;
            update tidemill.queue_message set status = 'done', processed_at = now()
             where id = result.id and status = 'pending';
            commit;
          end loop;
        end $$]]
    end
    for _, connection in ipairs(crowd) do
      connection:receive(60)
    end
    assert.is_true(#ledger:rows "processed_at is not null" >= 100)
    assert.is_true(#ledger:rows "processed_at is null" <= 1)
  end)
end)
