-- A claim whose answer was lost is undone by its token, which no index knows: what it took is found by
-- where the claim looked, and a deep lane is not walked through for it.

local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local PASSES = 1000

-- A database with lane 1 of a ledger and the statement as the worker sends it.
local function prepared()
  local app = tidemill.app { config = { subscribe = { t = "h" } }, handlers = { h = "return function() end" } }
  app:must_run "migrate"
  app.db:exec [[insert into tidemill.subscription (app, topic, subscriber) values ('app', 't', 'h'), ('app', 'u', 'h')]]
  for line in app:must_run("statements"):gmatch "[^\n]+" do
    local name, sql = line:match "^([%w_]+)\t(.*)$"
    if name == "undo_claim" or name == "pin" then
      app.db:exec(("prepare %s as %s"):format(name, sql))
    end
  end
  return app, app.db
end

-- `count` rows due `secs` ago, or held by a claim.
local function insert(db, lane, count, secs, claimed_by, priority)
  db:query([[insert into tidemill.queue_message
    (topic, subscriber, lane, available_at, status, attempts, claimed_by, claimed_at, priority)
    select 't', 'h', $1::int, now() - $3::float8 * interval '1 s',
      case when $4::text is null then 'pending' else 'running' end,
      case when $4::text is null then 0 else 1 end, $4::text, case when $4::text is not null then now() end, $5::int
    from generate_series(1, $2::int)]], lane, count, secs, claimed_by, priority or 0)
end

local function text_of_execute(token, mark)
  local lanes, priorities, marks = {}, {}, {}
  for priority = -9, 9 do
    table.insert(lanes, 1)
    table.insert(priorities, priority)
    table.insert(marks, mark or "-infinity")
  end
  return ("execute undo_claim('%s', '{%s}', '{%s}', '{%s}', %d)"):format(token, table.concat(lanes, ","),
    table.concat(priorities, ","), table.concat(marks, ","), PASSES)
end

-- Undoes a claim: how many rows went back, and whether the search was cut short.
local function undo(db, token, mark)
  db:exec "begin isolation level read committed"
  db:query "execute pin"
  local row = db:query(text_of_execute(token, mark))
  db:exec "commit"
  assert.equal(1, #row)
  return tonumber(row[1][row.fields[1]]), row[1][row.fields[2]] == "t"
end

local function count(db, where)
  return tonumber(db:value("select count(*) from tidemill.queue_message where " .. where))
end

describe("undoing a claim", function()
  it("gives back what it took, uncounted and due now, and nothing else", function()
    local app, db = prepared()
    insert(db, 1, 20, 60, "w#7")
    insert(db, 1, 5, 60, "w#7", -9)
    insert(db, 1, 5, 60, "w#7", 9)
    insert(db, 1, 5, 60, "w#77")
    insert(db, 1, 5, 60, "other#7")
    insert(db, 1, 50, 60)
    insert(db, 2, 5, 60, "w#7")
    local listener = app:connect()
    listener:exec "listen tidemill_queue"
    local went, cut = undo(db, "w#7")
    assert.same({ 30, false }, { went, cut })
    assert.equal(80, count(db, "lane = 1 and status = 'pending' and attempts = 0 and claimed_by is null"))
    assert.equal(30, count(db, "lane = 1 and available_at > now() - interval '30 s'"))
    assert.equal(10, count(db, "lane = 1 and status = 'running' and attempts = 1"))
    assert.equal(5, count(db, "lane = 2 and claimed_by = 'w#7'"))
    assert.equal("t", listener:wait_notify(10).payload)
    assert.same({ 0, false }, { undo(db, "w#7") })
    assert.is_nil(listener:wait_notify(0.1))
  end)

  it("begins where the claim began", function()
    local _, db = prepared()
    insert(db, 1, 3, 3600, "w#7")
    insert(db, 1, 3, 60, "w#7")
    local mark = db:value "select now() - interval '10 minutes'"
    assert.same({ 3, false }, { undo(db, "w#7", mark) })
    assert.equal(3, count(db, "status = 'running'"))
  end)

  it("does not walk through what waits behind, however much", function()
    local _, db = prepared()
    -- All of one publish: no due time tells them apart.
    insert(db, 1, 50000, 60)
    insert(db, 1, 50000, -3600)
    insert(db, 1, 10, 120, "w#7")
    for _, analyzed in ipairs { false, true } do
      if analyzed then
        db:exec "analyze tidemill.queue_message"
      end
      db:exec "discard plans; begin isolation level read committed"
      db:query "execute pin"
      local plan = db:value("explain (analyze, buffers, timing off, format json) " .. text_of_execute "w#7")
      db:exec "rollback"
      -- The whole is named first, then its parts.
      local hit, read = plan:match '"Shared Hit Blocks": (%d+),%s+"Shared Read Blocks": (%d+)'
      local blocks = hit + read
      assert.truthy(blocks < 10 * PASSES, ("%d blocks\n%s"):format(blocks, plan))
      for scan in plan:gmatch '"Node Type": "([%w ]*Scan)"' do
        assert.truthy(scan == "Index Scan" or scan == "CTE Scan" or scan == "Function Scan" or scan == "Tid Scan"
          or scan == "Subquery Scan", scan .. "\n" .. plan)
      end
    end
    assert.same({ 10, true }, { undo(db, "w#7") })
  end)

  it("finds what many late ones have got before, when these have been claimed", function()
    local _, db = prepared()
    insert(db, 1, 10, 60, "w#7")
    -- Due earlier, and committed after the claim.
    insert(db, 1, PASSES + 500, 120)
    -- And others that run, which do not stand in the way.
    insert(db, 1, 3000, 90, "other#1")
    assert.same({ 0, true }, { undo(db, "w#7") })
    db:query [[update tidemill.queue_message set status = 'running', claimed_by = 'other#2'
      where id in (select id from tidemill.queue_message where status = 'pending' order by seq limit 500)]]
    -- As many wait before it as are passed: the search ends at the next one, if there is one.
    assert.same({ 10, false }, { undo(db, "w#7") })
    assert.equal(0, count(db, "claimed_by = 'w#7'"))
  end)
end)
