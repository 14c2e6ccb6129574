-- What a handler is given and publishes on untouched is the value that was published.

local journal = require "spec.support.journal"
local random_json = require "spec.support.random_json"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local DOCUMENTS = 600

-- Publish each text to `in`, have it published on to `out`, and compare in Postgres.
local function carry(texts)
  local app = journal.app {
    config = { subscribe = { ["in"] = "carry" }, max_attempts = 1, retain_hours = 0 },
    handlers = { carry = [[ ctx:publish("out", payload, { headers = { from = ctx.message_id } }) ]] },
  }
  app:start()
  local expected = 0
  for _, text in ipairs(texts) do
    -- jsonb has no lone surrogate and no NUL: such a text is refused where it is published.
    local ok, err = pcall(app.db.query, app.db, "select tidemill.publish('in', $1::jsonb)", text)
    if ok then
      expected = expected + 1
    else
      assert.matches("^22", tostring(err.sqlstate), tostring(err))
    end
  end
  journal.wait_until_finished(app)
  local failed = app:ledger "status = 'failed'"
  assert.equal(0, #failed, failed[1] and failed[1].error)
  local compared = app.db:query [[
    select count(*) as all, count(*) filter (where i.payload = o.payload) as equal
    from tidemill.queue_message i join tidemill.queue_message o
      on o.topic = 'out' and o.headers ->> 'from' = i.id::text
    where i.topic = 'in']]
  assert.same({ all = tostring(expected), equal = tostring(expected) }, compared[1])
  return expected
end

describe("a payload on its way through a handler", function()
  it("stays the same value, whatever it is", function()
    local carried = carry(random_json.documents(20260, DOCUMENTS))
    assert.truthy(carried > DOCUMENTS / 2, carried)
  end)

  it("stays the same value at the edges", function()
    assert.equal(14, carry {
      "[]", "{}", "null", "true", '""', "0", "[[], {}, [null]]", '{"": {"a": []}}',
      "12345678901234567890", "0.1000000000000000055", "1e400", "-1e-400",
      '"\\u0001\\ud83d\\ude00"', ("["):rep(900) .. ("]"):rep(900),
    })
  end)
end)
