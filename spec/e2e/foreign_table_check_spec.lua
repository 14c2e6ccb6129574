-- Programs and a table of another program: what they refuse, and in which words.

local foreign = require "spec.support.foreign"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

describe("a program that meets a foreign table", function()
  local function new_app(config)
    config = config or {}
    config.subscribe = { t = "work" }
    return foreign.app { config = config, handlers = { work = "" } }
  end

  local function refusal(change)
    local app = new_app()
    app.db:exec(change)
    local result = app:run "run"
    assert.equal(1, result.code)
    return result.stderr
  end

  for change, expected in pairs {
    ["drop table other.queue_message"] = 'there is no table "other"."queue_message"',
    ["alter table other.queue_message drop column claimed_by"] = "has not the columns of a queue",
    ["alter table other.queue_message alter payload type text"] = 'column "payload" is text: it must be jsonb or json',
    ["alter table other.queue_message alter id type text"] = 'column "id" is text: it must be uuid',
    ["alter table other.queue_message alter available_at type timestamp"] =
      'column "available_at" is timestamp without time zone: it must be timestamp with time zone',
    ["alter table other.queue_message alter claimed_by set not null"] =
      'column "claimed_by" is NOT NULL: it must be able to be empty',
    ["alter table other.queue_message alter claimed_by type varchar(40)"] =
      'column "claimed_by" is too short: it must hold 100 characters',
    ["alter table other.queue_message rename to q; create view other.queue_message as select * from other.q"] =
      "it must be an ordinary table, neither a view nor partitioned",
  } do
    it(("says what does not fit: %s"):format(change), function()
      local stderr = refusal(change)
      assert.truthy(stderr:find(expected, 1, true), stderr)
    end)
  end

  it("is drained like any other", function()
    local app = new_app()
    for _ = 1, 3 do
      foreign.insert_silently(app, "t", "work")
    end
    assert.equal(0, app:run("drain").code)
    assert.equal(3, foreign.count(app, "status = 'done' and attempts = 1"))
  end)

  it("says which commands need more than a table", function()
    local app = new_app()
    for _, words in ipairs { { "publish", "t" }, { "status" }, { "prune" }, { "reclaim" }, { "failed", "list" } } do
      local result = app:run(words)
      assert.equal(1, result.code, words[1])
      assert.truthy(result.stderr:find("the config says `migrate = false`", 1, true), result.stderr)
    end
    assert.equal(0, #app:ledger())
  end)

  it("says which right it lacks", function()
    local app = new_app()
    local role = "tidemill_spec_foreign_" .. app.db.pid
    app.db:exec((([[
      create role ROLE login; grant usage on schema other to ROLE;
      grant select, update on other.queue_message to ROLE]]):gsub("ROLE", role)))
    app.dsn = app.dsn .. " user=" .. role
    local result = app:run "run"
    app.db:exec(("drop owned by %s; drop role %s"):format(role, role))
    assert.equal(1, result.code)
    assert.truthy(result.stderr:find(role .. " may not delete: grant select, insert, update and delete on it", 1, true),
      result.stderr)
  end)

  it("with migrate = true says that the table is not its own", function()
    local app = new_app { migrate = true }
    local before = foreign.objects(app)
    local result = app:run "run"
    assert.equal(1, result.code)
    assert.truthy(result.stderr:find("set `migrate = false` to work with another program's table", 1, true),
      result.stderr)
    assert.equal(before, foreign.objects(app))
  end)
end)
