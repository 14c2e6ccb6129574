-- The ledger itself: who may touch it, what it refuses, its indexes and ids. No program takes part.

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

describe("the caller", function()
  local role

  setup(function()
    role = "tidemill_spec_caller_" .. ledger.db.pid
    ledger.db:exec(("create role %s login"):format(role))
  end)

  teardown(function()
    ledger.db:exec(("drop owned by %s; drop role %s"):format(role, role))
  end)

  before_each(function()
    ledger.db:exec(("drop owned by %s"):format(role))
    ledger:subscribe("a", "s")
  end)

  local function assert_denied(connection, sql)
    local message, sqlstate = schema.refused(connection, sql)
    assert.equal("42501", sqlstate, ("%s: %s"):format(sql, message))
  end

  it("without a grant may do nothing", function()
    local caller = ledger:connect("user=" .. role)
    for _, sql in ipairs {
      "select tidemill.publish('a')",
      "select * from tidemill.publish_many('{a}'::text[], '{1}')",
      "select * from tidemill.publish_many('[]')",
      "select * from tidemill.queue_message",
    } do
      assert_denied(caller, sql)
    end
  end)

  it("with the schema open to it may still execute nothing and see nothing", function()
    ledger.db:exec(("grant usage on schema tidemill to %s"):format(role))
    local functions = ledger.db:query [[select oid::regprocedure::text as name from pg_proc
      where pronamespace = 'tidemill'::regnamespace and proname <> 'uuid7']]
    assert.is_true(#functions > 5)
    for _, fn in ipairs(functions) do
      assert.equal("f", ledger.db:value("select has_function_privilege($1, $2, 'execute')", role, fn.name), fn.name)
    end
    assert.equal("0", ledger.db:value([[select count(*) from pg_class
      where relnamespace = 'tidemill'::regnamespace and relkind in ('r', 'v')
        and has_table_privilege($1, oid, 'select, insert, update, delete, truncate, references, trigger')]], role))
  end)

  it("with the duty of a publisher publishes, and touches no table", function()
    ledger.db:query("select tidemill.grant_to($1, 'publisher')", role)
    local caller = ledger:connect("user=" .. role)
    assert.equal("1", caller:query("select * from tidemill.publish('a', dedupe_key => 'k')")[1].delivered)
    assert.equal("t", caller:query(
      "select * from tidemill.publish('a', dedupe_key => 'k', on_duplicate => 'replace')")[1].duplicate)
    assert.equal(1, #caller:query "select * from tidemill.publish_many('{a}'::text[], '{1}')")
    assert.equal(1, #caller:query [[select * from tidemill.publish_many('[{"topic": "a"}]')]])
    assert.same({ role, role, role }, schema.column(ledger:rows(), "published_by"))
    for _, sql in ipairs {
      "select * from tidemill.queue_message",
      "insert into tidemill.queue_message (topic) values ('a')",
      "select * from tidemill.subscription",
      "select * from tidemill.lane_status",
      "select tidemill.retry(gen_random_uuid())",
      "select * from tidemill.write_many('{a}', '{1}', null, null, null, null, null, null, null, true)",
    } do
      assert_denied(caller, sql)
    end
  end)

  it("cannot slip functions, operators or tables of its own under ours", function()
    ledger.db:query("select tidemill.grant_to($1, 'publisher')", role)
    ledger.db:exec(("create schema trap authorization %s"):format(role))
    local caller = ledger:connect("user=" .. role)
    caller:exec [[
      set search_path = trap, pg_catalog;
      create function trap.btrim(text, text) returns text language plpgsql as
        $$ begin raise exception 'trapped'; end $$;
      create function trap.now() returns timestamptz language plpgsql as $$ begin raise exception 'trapped'; end $$;
      create function trap.pg_notify(text, text) returns void language plpgsql as
        $$ begin raise exception 'trapped'; end $$;
      create function trap.length(text) returns integer language plpgsql as $$ begin raise exception 'trapped'; end $$;
      create function trap.gt(integer, integer) returns boolean language plpgsql as
        $$ begin raise exception 'trapped'; end $$;
      create operator trap.> (function = trap.gt, leftarg = integer, rightarg = integer);
      create function trap.cat(text, text) returns text language plpgsql as $$ begin raise exception 'trapped'; end $$;
      create operator trap.|| (function = trap.cat, leftarg = text, rightarg = text);
      create table trap.subscription (lane integer, topic text, subscriber text);
      create temporary table setting (prefix text);
      create temporary table unnest (topic text);
    ]]
    for _, sql in ipairs { "select btrim('a', 'b')", "select 1 > 2", "select now()" } do
      assert.equal("trapped", (schema.refused(caller, sql)))
    end
    assert.equal("1", caller:query("select * from tidemill.publish('a', dedupe_key => 'k')")[1].delivered)
    assert.equal(2, #caller:query "select * from tidemill.publish_many('{a}'::text[], '{1,2}')")
    assert.equal(1, #caller:query [[select * from tidemill.publish_many('[{"topic": "a", "delay_secs": 1}]')]])
    assert.equal(4, #ledger:rows())
  end)
end)

describe("the ledger", function()
  it("takes a row written by hand with the plain columns only", function()
    ledger.db:query [[insert into tidemill.queue_message
      (id, topic, subscriber, status, payload, attempts, available_at, claimed_at, claimed_by, processed_at, error,
       published_by, created_at, updated_at)
      values (gen_random_uuid(), 'a', 's', 'pending', '{}', 0, now(), null, null, null, null, '', now(), now())]]
    ledger.db:query "insert into tidemill.queue_message (topic, subscriber) values ('a', 's')"
    local all = ledger:rows()
    assert.equal(2, #all)
    for _, row in ipairs(all) do
      assert.same({ "pending", "{}", "0", "0", "0" },
        { row.status, row.payload, row.attempts, row.priority, row.crashes })
      assert.is_nil(row.lane)
      assert.is_not_nil(row.seq)
    end
  end)

  it("lets whoever may insert use the default id", function()
    local role = "tidemill_spec_hand_" .. ledger.db.pid
    ledger.db:exec((([[
      create role ROLE login;
      grant usage on schema tidemill to ROLE;
      grant insert on tidemill.queue_message to ROLE;
    ]]):gsub("ROLE", role)))
    local hand = ledger:connect("user=" .. role)
    local ok, err = pcall(hand.query, hand, "insert into tidemill.queue_message (topic, subscriber) values ('a', 's')")
    hand:close()
    ledger.db:exec(("drop owned by %s; drop role %s"):format(role, role))
    assert.is_true(ok, tostring(err))
  end)

  local bad = {
    message_has_a_known_status = "(topic, status, processed_at) values ('a', 'waiting', now())",
    message_is_unfinished_without_processed_at = "(topic, status) values ('a', 'done')",
    message_failed_with_an_error = "(topic, status, processed_at) values ('a', 'failed', now())",
    message_priority_in_range = "(topic, priority) values ('a', 10)",
    message_due_time_is_finite = "(topic, available_at) values ('a', 'infinity')",
  }
  for name, values in pairs(bad) do
    it(("refuses %s, which no worker could understand"):format(values), function()
      local message, sqlstate = ledger:refused("insert into tidemill.queue_message " .. values)
      assert.equal("23514", sqlstate)
      assert.truthy(message:find(name, 1, true), message)
    end)
  end

  -- What a statement wrote into the ledger, counted on a connection whose statistics hold nothing else.
  local function written(worker, sql)
    worker:exec "begin"
    worker:query(sql)
    local counts = worker:query([[select n_tup_upd as all, n_tup_hot_upd as hot from pg_stat_xact_user_tables
      where schemaname = 'tidemill' and relname = 'queue_message']])[1]
    worker:exec "commit"
    return counts
  end

  it("writes a claim and its release without touching an index", function()
    ledger:subscribe("a", "s")
    -- Several pages full: each must have kept room for the claimed versions, which are larger.
    ledger.db:query [[select * from tidemill.publish_many('{a}'::text[], (
      select array_agg(to_jsonb(repeat('x', 200))) from generate_series(1, 300)))]]
    ledger.db:query "select tidemill.publish('a', dedupe_key => 'k')"
    assert.same({ all = "301", hot = "301" }, written(ledger:connect(),
      [[update tidemill.queue_message set status = 'running', attempts = attempts + 1, claimed_at = now(),
        claimed_by = '01a22c47-f447-7def-a105-f049691a3411#123', updated_at = now()]]))
    ledger.db:exec "vacuum tidemill.queue_message"
    assert.same({ all = "301", hot = "301" }, written(ledger:connect(),
      [[update tidemill.queue_message set status = 'pending', attempts = attempts - 1, claimed_at = null,
        claimed_by = null, updated_at = now()]]))
  end)

  it("has no index that names a column written by a claim", function()
    local indexes = schema.column(ledger.db:query [[select pg_get_indexdef(indexrelid) as text from pg_index
      where indrelid = 'tidemill.queue_message'::regclass]], "text")
    assert.is_true(#indexes >= 5)
    for _, text in ipairs(indexes) do
      for _, name in ipairs { "status", "claimed_at", "claimed_by", "attempts", "updated_at" } do
        assert.is_nil(text:find(name, 1, true), text)
      end
    end
  end)

  it("finds few dead letters among many done rows without reading those", function()
    ledger.db:exec [[
      insert into tidemill.queue_message (topic, subscriber, status, processed_at)
        select 'a', 's', 'done', now() from generate_series(1, 3000);
      insert into tidemill.queue_message (topic, subscriber, status, processed_at, error)
        values ('a', 's', 'failed', now(), 'boom');
      analyze tidemill.queue_message;
    ]]
    local plan = table.concat(schema.column(ledger.db:query
      "explain (analyze, buffers) select * from tidemill.failed_message order by failed_at desc limit 50",
      "QUERY PLAN"), "\n")
    assert.truthy(plan:find("message_failed", 1, true), plan)
    local blocks = tonumber(plan:match "Buffers: shared hit=(%d+)")
    assert.is_true(blocks ~= nil and blocks < 10, plan)
  end)
end)

describe("uuid7", function()
  it("makes a UUID of version 7 that tells its time", function()
    local made = ledger:first [[select id::text, extract(epoch from before) * 1000 as before,
        extract(epoch from after) * 1000 as after
      from (select clock_timestamp() as before, tidemill.uuid7() as id, clock_timestamp() as after) as t]]
    assert.equal("7", made.id:sub(15, 15))
    assert.truthy(made.id:sub(20, 20):match "[89ab]")
    local ms = tonumber(made.id:sub(1, 8) .. made.id:sub(10, 13), 16)
    local fraction = tonumber(made.id:sub(16, 18), 16) / 4096
    -- The fraction is cut to 12 bits, a quarter of a microsecond.
    assert.is_true(ms + fraction >= tonumber(made.before) - 0.001)
    assert.is_true(ms + fraction <= tonumber(made.after) + 0.001)
  end)

  it("makes ids that sort by the time of their making, within the millisecond too", function()
    ledger.db:exec [[
      create temporary table made (place serial, id uuid);
      do $$ begin
        for i in 1 .. 2000 loop
          insert into made (id) values (tidemill.uuid7());
        end loop;
      end $$;
    ]]
    local seen = ledger:first [[
      select count(*) filter (where time < before) as disorder, count(distinct time) as times,
             count(distinct left(time, 13)) as milliseconds
        from (select left(id::text, 18) as time, left(lag(id) over (order by place)::text, 18) as before
                from made) as m]]
    ledger.db:exec "drop table made"
    assert.equal("0", seen.disorder)
    assert.is_true(tonumber(seen.times) > tonumber(seen.milliseconds))
  end)

  it("never makes one twice", function()
    assert.equal("20000", ledger.db:value "select count(distinct tidemill.uuid7()) from generate_series(1, 20000)")
  end)
end)
