-- `tidemill test` runs this, with no database and no clock.

local testing = require "tidemill.testing"

describe("hello", function()
  before_each(testing.reset)

  it("greets by name", function()
    local run = testing.run("hello", { name = "Ann" })
    assert.equal("done", run.outcome, run.error)
    assert.equal("hello, Ann", run.log[1].text)
  end)

  it("greets the world where nobody is named", function()
    local run = testing.run("hello")
    assert.equal("done", run.outcome, run.error)
    assert.equal("hello, world", run.log[1].text)
  end)
end)
