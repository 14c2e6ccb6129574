-- The handlers of the sample app, as their config subscribes them.

local testing = require "tidemill.testing"

describe("the sample app", function()
  before_each(testing.reset)

  local function run(name, payload, options)
    options = options or {}
    options.config = "config.lua"
    return testing.run(name, payload, options)
  end

  it("charges a card, or fails the attempt when the bank does not answer", function()
    local outcomes = {}
    for _ = 1, 200 do
      local one = run("charge_card", { id = 1, cents = 500 })
      outcomes[one.outcome] = true
      if one.outcome == "done" then
        assert.equal("order.paid", one.published[1].topic)
        assert.equal(500, one.published[1].payload.cents)
      else
        assert.matches("^[^\n]*handlers/charge_card.lua:%d+: the bank did not answer\n", one.error)
        assert.same({ "pending", {} }, { one.status, one.published })
      end
    end
    assert.same({ done = true, raised = true }, outcomes)
    assert.equal("discard", run("charge_card", { id = 1 }).outcome)
  end)

  it("packs an order, later where the warehouse is closed", function()
    local packed = run("fulfil_order", { id = 7 })
    assert.same({ "done", "order.shipped", 7 },
      { packed.outcome, packed.published[1].topic, packed.published[1].payload.id })
    local closed = { id = 7, warehouse = "closed" }
    local first = run("fulfil_order", closed)
    assert.same({ "retry", 2, "the warehouse is closed" }, { first.outcome, first.delay_secs, first.error })
    assert.equal("done", run("fulfil_order", closed, { attempts = 2 }).outcome)
  end)

  it("welcomes users that have a name", function()
    assert.equal("Welcome, Ada!", run("welcome", { name = "Ada" }).log[1].fields.subject)
    assert.equal("discarded", run("welcome", {}).status)
  end)

  it("tells operations what it is about", function()
    local told = run("order.shipped/notify_ops", { id = 7 })
    assert.same({ about = "order.shipped", order = 7 }, told.log[1].fields)
  end)
end)
