-- The claim takes the right rows, as many as asked, by the index, whatever the planner was told.

local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

-- What a DBA may have switched for the database, in all combinations.
local SWITCHES = {
  "enable_seqscan", "enable_indexscan", "enable_bitmapscan", "enable_nestloop", "enable_hashjoin",
  "enable_mergejoin", "enable_sort", "enable_material", "enable_tidscan",
}

-- Of two lanes five rows each, but eight in all: every priority of each from the beginning.
local function claim_statement()
  local priorities, marks = {}, {}
  for _ = 1, 2 do
    for priority = -9, 9 do
      table.insert(priorities, priority)
      table.insert(marks, "-infinity")
    end
  end
  return ("execute claim('{1,2}', '{5,5}', '{1,20}', '{19,38}', '{%s}', '{%s}', 8, 'spec#1', 1000000)"):format(
    table.concat(priorities, ","), table.concat(marks, ","))
end

local CLAIM = claim_statement()

local HANDLER = "return function() end"

-- A database with two lanes: 30 rows each, of three priorities; the due time falls as seq rises, so
-- that no order but the index's gives the right rows. 40 more are not due, 200 are done.
local function prepared()
  local app = tidemill.app { config = { subscribe = { a = "h", b = "h" } }, handlers = { h = HANDLER } }
  local migrated = app:run "migrate"
  assert.equal(0, migrated.code, migrated.stderr)
  local db = app.db
  db:exec [[
    insert into tidemill.subscription (app, topic, subscriber) values ('app', 'a', 'h'), ('app', 'b', 'h');
    insert into tidemill.queue_message (topic, subscriber, lane, priority, available_at)
      select chr(96 + l), 'h', l, n % 3 - 1, now() - n * interval '1 s'
      from generate_series(1, 2) l, generate_series(1, 30) n;
    insert into tidemill.queue_message (topic, subscriber, lane, priority, available_at)
      select 'a', 'h', 1, -9, now() + interval '1 h' from generate_series(1, 40);
    insert into tidemill.queue_message (topic, subscriber, lane, status, processed_at)
      select 'a', 'h', 1, 'done', now() from generate_series(1, 200)]]
  local listed = app:run "statements"
  assert.equal(0, listed.code, listed.stderr)
  for line in listed.stdout:gmatch "[^\n]+" do
    local name, sql = line:match "^(%w+)\t(.*)$"
    if name == "claim" or name == "pin" then
      db:exec(("prepare %s as %s"):format(name, sql))
    end
  end
  return app, db
end

-- Claim as the worker does, and undo it. The rows by lane, in the lane's order.
local function claim(db)
  db:exec "begin isolation level read committed"
  db:query "execute pin"
  local rows = db:query(CLAIM)
  db:exec "rollback"
  local lanes = { ["1"] = {}, ["2"] = {} }
  table.sort(rows, function(x, y)
    if x.priority ~= y.priority then
      return tonumber(x.priority) < tonumber(y.priority)
    end
    return x.available_at < y.available_at
  end)
  for _, row in ipairs(rows) do
    table.insert(lanes[row.lane], row.id)
  end
  return #rows, lanes
end

local function head(db, lane, n)
  local ids = {}
  for _, row in ipairs(db:query([[
    select id from tidemill.queue_message where lane = $1 and status = 'pending' and available_at <= now()
    order by priority, available_at, seq limit $2]], lane, n)) do
    table.insert(ids, row.id)
  end
  return ids
end

describe("the claim", function()
  it("takes the head of each lane under every combination of planner switches", function()
    local _, db = prepared()
    local expected = { ["1"] = head(db, 1, 5), ["2"] = head(db, 2, 3) }
    local wrong = {}
    for _, analyzed in ipairs { false, true } do
      if analyzed then
        db:exec "analyze tidemill.queue_message"
      end
      for combination = 0, 2 ^ #SWITCHES - 1 do
        local settings, rest = {}, combination
        for _, name in ipairs(SWITCHES) do
          table.insert(settings, ("set %s = %s"):format(name, rest % 2 == 0 and "off" or "on"))
          rest = math.floor(rest / 2)
        end
        -- A plan made under other switches must not be what is tried.
        db:exec(table.concat(settings, "; ") .. "; discard plans")
        local count, lanes = claim(db)
        if count ~= 8 or not pcall(assert.same, expected, lanes) then
          table.insert(wrong, table.concat(settings, "; "))
        end
      end
    end
    assert.same({}, wrong)
  end)

  it("reads the index, in its order, and nothing else", function()
    local _, db = prepared()
    db:exec "set enable_seqscan = on; set enable_indexscan = off; begin isolation level read committed"
    db:query "execute pin"
    local plan = {}
    for _, row in ipairs(db:query("explain " .. CLAIM)) do
      table.insert(plan, row["QUERY PLAN"])
    end
    db:exec "rollback"
    plan = table.concat(plan, "\n")
    assert.matches("Index Scan using message_claim", plan)
    for _, node in ipairs { "Seq Scan", "Sort", "Bitmap", "Hash Join", "Merge Join" } do
      assert.is_nil(plan:find(node, 1, true), plan)
    end
  end)

  it("passes over rows that somebody has locked, and takes as many behind them", function()
    local app, db = prepared()
    local locker = app:connect()
    local expected = head(db, 1, 8)
    locker:exec "begin"
    locker:query([[select from tidemill.queue_message where id = any ($1::uuid[]) for update]],
      "{" .. table.concat(expected, ",", 1, 3) .. "}")
    local count, lanes = claim(db)
    locker:exec "rollback"
    assert.equal(8, count)
    assert.same({ unpack(expected, 4, 8) }, lanes["1"])
  end)

  it("works for a whole worker in a database that is serializable by default", function()
    local app = tidemill.app { config = { subscribe = { a = "h" }, executors = 2 }, handlers = { h = HANDLER } }
    app.db:exec(("alter database %s set default_transaction_isolation = 'serializable'"):format(app.database))
    for _ = 1, 2 do
      app:start()
    end
    app.db:query "select count(*) from tidemill.publish_many(array['a'], array_fill('{}'::jsonb, array[2000]))"
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.queue_message where status = 'done' and attempts = 1" == "2000"
    end, 60, "all messages done at their first attempt")
  end)
end)
