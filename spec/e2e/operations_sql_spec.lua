-- What a person does to one message, looks at and grants, as SQL callers see it. No program takes part.

local schema = require "spec.support.schema"

local ledger = schema.new()
local lane

setup(function()
  ledger:open()
end)
teardown(function()
  ledger:close()
end)
before_each(function()
  ledger:clear()
  lane = ledger:subscribe("a", "s")
end)
after_each(function()
  ledger:close_connections()
end)

-- SQL that brings a message which was just published into each state.
local into = {
  pending = "select 1",
  running = [[update tidemill.queue_message set status = 'running', attempts = 1, claimed_at = now(),
    claimed_by = 'w#1']],
  done = "update tidemill.queue_message set status = 'done', attempts = 1, processed_at = now()",
  failed = [[update tidemill.queue_message set status = 'failed', attempts = 5, crashes = 2, processed_at = now(),
    claimed_at = now() - interval '1 min', claimed_by = 'w#7', error = 'boom',
    errors = '[{"attempt": 4, "at": "2026-01-01T00:00:00+00:00", "by": "w#6", "error": "bang"},
               {"attempt": 5, "at": "2026-01-01T00:01:00+00:00", "by": "w#7", "error": "boom"}]']],
  discarded = [[update tidemill.queue_message set status = 'discarded', attempts = 1, processed_at = now(),
    error = 'not needed']],
}

-- Publishes one message and brings it into a state. Returns its id.
local function message(state, options)
  local id = ledger.db:value(("select id from tidemill.publish('a'%s)"):format(options or ""))
  ledger.db:query(into[state])
  return id
end

-- Calls an operation: whether it changed something, and its words.
local function call(sql, ...)
  local result = ledger:first(("select * from tidemill.%s"):format(sql), ...)
  return result.changed == "t", result.message
end

-- A table that compares as the whole ledger.
local function snapshot()
  local rows = ledger:rows()
  return { rows = rows, count = #rows }
end

local function assert_untouched(words, sql, ...)
  local before = snapshot()
  local args = { n = select("#", ...), ... }
  local changed, text
  local payloads = ledger:notified(function()
    changed, text = call(sql, unpack(args, 1, args.n))
  end)
  assert.is_false(changed)
  assert.equal(words, text)
  assert.same({}, payloads)
  assert.same(before, snapshot())
end

local function elements(row)
  return ledger.db:query([[select e.value ->> 'attempt' as attempt, e.value ->> 'by' as by, e.value ->> 'error' as error
    from jsonb_array_elements($1::jsonb) with ordinality as e (value, place) order by place]], row.errors)
end

describe("an operation", function()
  for _, sql in ipairs { "retry($1)", "discard($1, 'why')", "cancel($1)", "reschedule($1, now())" } do
    it(("%s on an unknown id says so"):format(sql), function()
      local id = "00000000-0000-7000-8000-000000000000"
      assert_untouched("there is no message " .. id, sql, id)
    end)

    it(("%s on NULL is refused"):format(sql), function()
      local text, sqlstate = ledger:refused("select tidemill." .. sql, nil)
      assert.equal("`id` is required", text)
      assert.equal("22023", sqlstate)
    end)

    it(("%s waits for a worker that holds the row, and judges what that left"):format(sql), function()
      local id = message "pending"
      local worker, person = ledger:connect(), ledger:connect()
      worker:exec("begin; " .. into.done)
      person:send(("select * from tidemill.%s"):format(sql), id)
      ledger:wait_until_blocked(person)
      worker:exec "commit"
      local result = person:receive()[1]
      assert.equal("f", result.changed)
      assert.truthy(result.message:find("message " .. id .. " is done: ", 1, true), result.message)
      assert.equal("done", ledger:rows()[1].status)
    end)
  end
end)

describe("retry", function()
  it("gives a failed message a new life", function()
    local id = message "failed"
    local changed, text
    assert.same({ "a" }, ledger:notified(function()
      changed, text = call("retry($1)", id)
    end))
    assert.is_true(changed)
    assert.equal(("message %s is pending again"):format(id), text)
    local row = ledger:rows("available_at = updated_at")[1]
    assert.same({ "pending", "0", "0", tostring(lane) }, { row.status, row.attempts, row.crashes, row.lane })
    for _, name in ipairs { "processed_at", "claimed_at", "claimed_by", "error" } do
      assert.is_nil(row[name], name)
    end
    local past = elements(row)
    assert.same({ "4", "5" }, schema.column(past, "attempt"))
    assert.same({ "bang", "boom" }, schema.column(past, "error"))
  end)

  it("pressed twice changes nothing the second time, and says so", function()
    local id = message "failed"
    call("retry($1)", id)
    assert_untouched(("message %s is pending: only a failed or discarded one can be retried"):format(id),
      "retry($1)", id)
  end)

  it("takes a discarded message too, and keeps the reason in its past", function()
    local id = message "discarded"
    assert.is_true((call("retry($1)", id)))
    local row = ledger:rows()[1]
    assert.equal("pending", row.status)
    assert.same({ "not needed" }, schema.column(elements(row), "error"))
  end)

  for _, state in ipairs { "running", "done" } do
    it(("leaves a %s message alone"):format(state), function()
      local id = message(state)
      assert_untouched(("message %s is %s: only a failed or discarded one can be retried"):format(id, state),
        "retry($1)", id)
    end)
  end

  it("changes nothing while another message with its dedupe key waits", function()
    local id = message("failed", ", dedupe_key => 'k'")
    ledger.db:query "select tidemill.publish('a', dedupe_key => 'k')"
    assert_untouched(("message %s stays failed: another one with the dedupe key `k` is unfinished"):format(id),
      "retry($1)", id)
    ledger.db:query "update tidemill.queue_message set status = 'done', processed_at = now() where status = 'pending'"
    assert.is_true((call("retry($1)", id)))
  end)

  it("goes to the lane that the subscription has now", function()
    local id = message "failed"
    ledger.db:query "delete from tidemill.subscription"
    local new = ledger:subscribe("a", "s")
    assert.not_equal(lane, new)
    call("retry($1)", id)
    assert.equal(tostring(new), ledger:rows()[1].lane)
  end)

  it("says when nobody is subscribed any more", function()
    local id = message "failed"
    ledger.db:query "delete from tidemill.subscription"
    local changed, text = call("retry($1)", id)
    assert.is_true(changed)
    assert.equal(("message %s is pending again, but `s` is not subscribed to `a` now"):format(id), text)
    assert.is_nil(ledger:rows()[1].lane)
  end)

  it("says nothing to workers where notifications are switched off", function()
    local id = message "failed"
    ledger.db:query "update tidemill.setting set notify = false"
    assert.same({}, ledger:notified(function()
      call("retry($1)", id)
    end))
  end)

  it("keeps the last five errors, each cut to 500 bytes between characters", function()
    local id = message "failed"
    for i = 1, 6 do
      ledger.db:query([[update tidemill.queue_message set status = 'failed', processed_at = now(), attempts = $1,
        error = $2]], i, i .. ("ä"):rep(300))
      call("retry($1)", id)
    end
    local past = elements(ledger:rows()[1])
    assert.same({ "2", "3", "4", "5", "6" }, schema.column(past, "attempt"))
    assert.equal("6" .. ("ä"):rep(249) .. "…", past[5].error)
  end)

  it("makes something of a past that is no list", function()
    local id = message "failed"
    ledger.db:query "update tidemill.queue_message set errors = '{}'"
    call("retry($1)", id)
    assert.same({ "boom" }, schema.column(elements(ledger:rows()[1]), "error"))
  end)
end)

describe("discard", function()
  it("ends a failed message with the reason given", function()
    local id = message "failed"
    ledger.db:query "update tidemill.queue_message set processed_at = now() - interval '30 days'"
    local changed, text = call("discard($1, $2)", id, " \t very wrong, v ")
    assert.is_true(changed)
    assert.equal(("message %s is discarded"):format(id), text)
    -- Kept from now on as long as any finished row.
    local row = ledger:rows("processed_at = updated_at")[1]
    assert.same({ "discarded", "very wrong, v" }, { row.status, row.error })
    assert.same({ "bang", "boom" }, schema.column(elements(row), "error"))
  end)

  it("pressed twice changes nothing the second time, and says so", function()
    local id = message "failed"
    call("discard($1, 'why')", id)
    assert_untouched(("message %s is discarded: only a failed one can be discarded"):format(id), "discard($1, 'x')", id)
  end)

  it("gives a reason when none is given", function()
    for _, why in ipairs { "''", "null", "'  '" } do
      ledger:clear()
      call(("discard($1, %s)"):format(why), message "failed")
      assert.equal("discarded", ledger:rows()[1].error)
    end
    ledger:clear()
    call("discard($1)", message "failed")
    assert.equal("discarded", ledger:rows()[1].error)
  end)

  it("cuts a long reason to 4000 bytes between characters", function()
    call("discard($1, $2)", message "failed", "x" .. ("€"):rep(2000))
    assert.equal("x" .. ("€"):rep(1333) .. "…", ledger:rows()[1].error)
  end)

  for _, state in ipairs { "pending", "running" } do
    it(("sends who meets a %s message to cancel"):format(state), function()
      local id = message(state)
      assert_untouched(("message %s is %s: only a failed one can be discarded; cancel it instead"):format(id, state),
        "discard($1, 'x')", id)
    end)
  end

  it("leaves a done message alone", function()
    local id = message "done"
    assert_untouched(("message %s is done: only a failed one can be discarded"):format(id), "discard($1, 'x')", id)
  end)
end)

describe("cancel", function()
  it("discards a pending message", function()
    local id = message "pending"
    local changed, text
    assert.same({}, ledger:notified(function()
      changed, text = call("cancel($1)", id)
    end, "tidemill_control"))
    assert.is_true(changed)
    assert.equal(("message %s is discarded"):format(id), text)
    local row = ledger:rows()[1]
    assert.same({ "discarded", "cancelled" }, { row.status, row.error })
    assert.is_not_nil(row.processed_at)
  end)

  it("discards a running message and tells its worker, whatever `notify` says", function()
    local id = message "running"
    ledger.db:query "update tidemill.setting set notify = false, prefix = 'shop'"
    local changed, text
    assert.same({ "cancel " .. id }, ledger:notified(function()
      changed, text = call("cancel($1)", id)
    end, "shop_control"))
    assert.is_true(changed)
    assert.equal(("message %s is discarded; its handler, which was running, is told to stop"):format(id), text)
    local row = ledger:rows()[1]
    assert.same({ "discarded", "cancelled" }, { row.status, row.error })
    -- The worker's own write finds nothing.
    assert.equal(0, ledger.db:query([[update tidemill.queue_message set status = 'done', processed_at = now()
      where id = $1 and status = 'running' and claimed_by = 'w#1']], id).affected)
  end)

  it("keeps the error of an earlier attempt in the past", function()
    local id = message "pending"
    ledger.db:query "update tidemill.queue_message set attempts = 2, error = 'boom'"
    call("cancel($1)", id)
    assert.same({ "boom" }, schema.column(elements(ledger:rows()[1]), "error"))
  end)

  it("frees the dedupe key", function()
    call("cancel($1)", message("pending", ", dedupe_key => 'k'"))
    assert.equal("f", ledger:first("select * from tidemill.publish('a', dedupe_key => 'k')").duplicate)
  end)

  it("pressed twice changes nothing the second time, and says so", function()
    local id = message "running"
    call("cancel($1)", id)
    assert_untouched(("message %s is discarded: only a pending or running one can be cancelled"):format(id),
      "cancel($1)", id)
  end)

  for _, state in ipairs { "done", "failed" } do
    it(("leaves a %s message alone"):format(state), function()
      local id = message(state)
      assert_untouched(("message %s is %s: only a pending or running one can be cancelled"):format(id, state),
        "cancel($1)", id)
    end)
  end
end)

describe("reschedule", function()
  local later = "2099-01-31 08:00:00+00"

  it("moves the due time of a pending message and wakes the workers", function()
    local id = message "pending"
    local changed, text
    assert.same({ "a" }, ledger:notified(function()
      changed, text = call("reschedule($1, $2)", id, later)
    end))
    assert.is_true(changed)
    assert.equal(("message %s is due at 2099-01-31 08:00:00 UTC"):format(id), text)
    assert.equal(1, #ledger:rows(("available_at = '%s'"):format(later)))
  end)

  it("pressed twice changes nothing the second time, and says so", function()
    local id = message "pending"
    call("reschedule($1, $2)", id, later)
    assert_untouched(("message %s is due at 2099-01-31 08:00:00 UTC already"):format(id),
      "reschedule($1, $2)", id, later)
  end)

  it("takes a time that has passed as now", function()
    local id = message("pending", ", delay => '1 h'")
    assert.is_true((call("reschedule($1, '2001-01-01')", id)))
    assert.equal(1, #ledger:rows "available_at = updated_at")
    local changed, text = call("reschedule($1, '2001-01-01')", id)
    assert.is_false(changed)
    assert.truthy(text:find "is due at [-%d]+ [:%d]+ UTC already$")
  end)

  it("refuses a time that is none", function()
    local id = message "pending"
    for at, shown in pairs { infinity = "infinity", ["2999-01-01 00:00:00+00"] = "2999-01-01 00:00:00+00" } do
      assert.equal(("`at` is %s: it must be within 100 years from now"):format(shown),
        (ledger:refused("select tidemill.reschedule($1, $2)", id, at)))
    end
    assert.equal("`at` is required", (ledger:refused("select tidemill.reschedule($1, null)", id)))
  end)

  for _, state in ipairs { "running", "done", "failed", "discarded" } do
    it(("leaves a %s message alone"):format(state), function()
      local id = message(state)
      assert_untouched(("message %s is %s: only a pending one can be rescheduled"):format(id, state),
        "reschedule($1, $2)", id, later)
    end)
  end
end)

describe("the view", function()
  it("lane_status counts each subscription by state", function()
    ledger:subscribe("a", "other")
    ledger:subscribe("idle", "s")
    for i, state in ipairs { "waiting", "waiting", "scheduled", "running", "failed", "failed", "done", "discarded" } do
      local id = ledger.db:value("select id from tidemill.publish('a', delay => $1)",
        state == "scheduled" and "1 h" or "0")
      local change = into[state]
      if change then
        ledger.db:query(change .. (" where id = '%s'"):format(id))
      end
      if i == 1 then
        ledger.db:query("update tidemill.queue_message set available_at = now() - interval '90 s' where id = $1", id)
      end
    end
    ledger.db:query([[insert into tidemill.worker (id, app, lease_secs, lease_until, lanes) values
      ('alive', 'shop', 30, now() + interval '30 s', array[$1, 99]::integer[]),
      ('dead', 'shop', 30, now() - interval '1 s', array[$1]::integer[])]], lane)
    local rows = ledger.db:query "select *, round(oldest_due_age_secs) as age from tidemill.lane_status order by lane"
    assert.equal(3, #rows)
    local function counts(row)
      return { row.topic, row.subscriber, row.app, row.waiting, row.scheduled, row.running, row.failed,
        row.age or "none", row.workers_alive }
    end
    assert.same({ "a", "s", "shop", "2", "1", "1", "2", "90", "1" }, counts(rows[1]))
    -- The other subscriber's rows have stayed as they were published.
    assert.same({ "a", "other", "shop", "7", "1", "0", "0", "0", "0" }, counts(rows[2]))
    assert.same({ "idle", "s", "shop", "0", "0", "0", "0", "none", "0" }, counts(rows[3]))
  end)

  it("lane_status shows what no lane owns", function()
    ledger.db:query [[insert into tidemill.queue_message (topic, subscriber)
      values ('by.hand', 'x'), ('by.hand', 'x')]]
    ledger.db:query "insert into tidemill.queue_message (topic, subscriber, lane) values ('gone', 'y', 4711)"
    local rows = ledger.db:query "select * from tidemill.lane_status where app is null order by topic"
    assert.same({ "by.hand", "gone" }, schema.column(rows, "topic"))
    assert.same({ "2", "1" }, schema.column(rows, "waiting"))
    assert.is_nil(rows[2].lane)
  end)

  it("worker_status tells who is alive", function()
    ledger.db:query [[insert into tidemill.worker
        (id, app, host, pid, lease_secs, lease_until, generation, lanes) values
      ('one', 'shop', 'h', 7, 30, now() + interval '30 s', 3, '{1,2}'),
      ('two', 'shop', 'h', 8, 30, now() - interval '1 s', 1, '{}')]]
    local rows = ledger.db:query "select * from tidemill.worker_status order by id"
    assert.same({ "t", "f" }, schema.column(rows, "alive"))
    assert.same({ "2", "0" }, schema.column(rows, "lanes"))
    assert.same({ "3", "1" }, schema.column(rows, "generation"))
  end)

  it("failed_message lists dead letters without their payload", function()
    local id = message "failed"
    message "discarded"
    ledger.db:query("update tidemill.queue_message set status = 'failed', error = 'boom' where id = $1", id)
    local rows = ledger.db:query "select * from tidemill.failed_message"
    assert.equal(1, #rows)
    assert.same({ id, "a", "s", "boom" }, { rows[1].id, rows[1].topic, rows[1].subscriber, rows[1].error })
    for _, name in ipairs(rows.fields) do
      assert.not_equal("payload", name)
      assert.not_equal("headers", name)
    end
  end)
end)

describe("grant_to", function()
  local role

  setup(function()
    role = "tidemill_spec_duty_" .. ledger.db.pid
    ledger.db:exec(("create role %s login"):format(role))
  end)

  teardown(function()
    ledger.db:exec(("drop owned by %s; drop role %s"):format(role, role))
  end)

  local statements = {
    publish = "select tidemill.publish('a')",
    publish_many = "select * from tidemill.publish_many('{a}'::text[], '{1}')",
    publish_item = "select * from tidemill.publish_item('{\"topic\": \"a\"}')",
    publish_items = "select * from tidemill.publish_many('[{\"topic\": \"a\"}]')",
    execute = "select tidemill.execute('{\"topic\": \"a\"}')",
    execute_jsonb = "select tidemill.execute('{\"topic\": \"a\"}'::jsonb)",
    retry = "select tidemill.retry(gen_random_uuid())",
    discard = "select tidemill.discard(gen_random_uuid(), 'x')",
    cancel = "select tidemill.cancel(gen_random_uuid())",
    reschedule = "select tidemill.reschedule(gen_random_uuid(), now())",
    lanes = "select * from tidemill.lane_status",
    workers = "select * from tidemill.worker_status",
    failed = "select * from tidemill.failed_message",
    version = "select version from tidemill.migration",
    claim = "update tidemill.queue_message set attempts = attempts where id in "
      .. "(select id from tidemill.queue_message for update skip locked limit 1)",
    prune = "delete from tidemill.queue_message where false",
    insert = "insert into tidemill.queue_message (topic, subscriber) values ('a', 's')",
    payload = "select payload from tidemill.queue_message",
    register = [[insert into tidemill.subscription (app, topic, subscriber) values ('x', 'new', 's')
      on conflict (topic, subscriber) do update set updated_at = now()]],
    renew = "insert into tidemill.worker (id, app, lease_secs, lease_until) values (gen_random_uuid(), 'x', 1, now())",
    settings = "select prefix from tidemill.setting",
    remember = "select tidemill.remember_error(null, 1, now(), 'w', 'boom')",
    place = "select tidemill.place('{}', '{}')",
    change_settings = "update tidemill.setting set notify = false",
    change_version = "delete from tidemill.migration",
    grant = "select tidemill.grant_to(session_user, 'worker')",
  }

  local duties = {
    publisher = { "publish", "publish_many", "publish_item", "publish_items", "execute", "execute_jsonb" },
    reader = { "lanes", "workers", "failed", "version" },
    operator = { "lanes", "workers", "failed", "version", "retry", "discard", "cancel", "reschedule" },
    worker = { "publish", "publish_many", "publish_item", "publish_items", "execute", "execute_jsonb", "retry",
      "discard", "cancel", "reschedule", "lanes", "workers", "failed", "version", "claim", "prune", "insert",
      "payload", "register", "renew", "settings", "remember", "place" },
  }

  for duty, allowed in pairs(duties) do
    it(("a %s may do exactly what it needs"):format(duty), function()
      ledger.db:exec(("drop owned by %s"):format(role))
      ledger.db:query("select tidemill.grant_to($1, $2)", role, duty)
      local caller = ledger:connect("user=" .. role)
      local may = {}
      for _, name in ipairs(allowed) do
        may[name] = true
      end
      for name, sql in pairs(statements) do
        local ok, err = pcall(caller.query, caller, sql)
        if may[name] then
          assert.is_true(ok, ("%s: %s"):format(name, tostring(err)))
        else
          assert.is_false(ok, name .. " was allowed")
          assert.equal("42501", err.sqlstate, name)
        end
      end
    end)
  end

  it("takes a role's name as it is", function()
    ledger.db:exec [[create role "Tidemill Spec; ""Odd"""]]
    local ok, err = pcall(ledger.db.query, ledger.db, [[select tidemill.grant_to('Tidemill Spec; "Odd"', 'reader')]])
    ledger.db:exec [[drop owned by "Tidemill Spec; ""Odd"""; drop role "Tidemill Spec; ""Odd"""]]
    assert.is_true(ok, tostring(err))
  end)

  it("names what it does not know", function()
    assert.equal("there is no role `nobody_at_all`: create it first",
      (ledger:refused "select tidemill.grant_to('nobody_at_all', 'reader')"))
    assert.equal("`boss` is not a duty: it must be `publisher`, `worker`, `reader` or `operator`",
      (ledger:refused("select tidemill.grant_to($1, 'boss')", role)))
  end)
end)
