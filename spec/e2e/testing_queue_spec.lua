-- tidemill.testing tells the truth about what only the database refuses: the same handlers in a real queue.

local json = require "tidemill.json"
local testing = require "tidemill.testing"
local tidemill = require "spec.support.tidemill"

-- With what looks like punctuation inside of texts.
local PAYLOAD = [=[{ ('x'):rep(%d), 1, { a = 'b, "c: d\\', [','] = ',' } }]=]

-- As handlers write it, it has the size that is allowed; as Postgres prints it, five bytes more.
local written = json.encode(loadstring("return " .. PAYLOAD:format(0))())
PAYLOAD = PAYLOAD:format(1024 * 1024 - #written)

local HANDLERS = {
  with_done = "ctx:publish('x') ctx:publish('x', P)",
  at_once = "tidemill.publish('x', P)",
  many = "tidemill.publish_many { { topic = 'x' }, { topic = 'x', payload = P } }",
  in_transaction = "tidemill.transaction(function(tx) tx:publish('x', P) end)",
  many_in_transaction = "tidemill.transaction(function(tx) tx:publish_many { { topic = 'x', payload = P } } end)",
  finish = "ctx:publish('x') ctx:publish('x', P) ctx:finish(function() end)",
  just_fits = "ctx:publish('x', ('x'):rep(1024 * 1024 - 2))",
}

local function source(body)
  return ('local tidemill = require "tidemill"\nreturn function(_, ctx)\n%s\nend\n'):format((body:gsub("P%f[%W]",
    function() return PAYLOAD end)))
end

describe("tidemill.testing agrees with a queue", function()
  after_each(tidemill.close_all)

  it("about payloads that are too large", function()
    local subscribe, handlers, count = {}, {}, 0
    for name, body in pairs(HANDLERS) do
      subscribe[name], handlers[name], count = name, source(body), count + 1
    end
    local app = tidemill.app { config = { subscribe = subscribe, max_attempts = 1 }, handlers = handlers }
    app:start()
    for name in pairs(HANDLERS) do
      app:must_run("publish", name)
    end
    app:wait_until(function()
      return tonumber(app.db:value [[select count(*) from tidemill.queue_message
        where subscriber <> '' and status in ('done', 'failed')]]) == count
    end, 30, "all messages are finished")
    for name in pairs(HANDLERS) do
      local row = app:ledger("subscriber = $1", name)[1]
      local chunk = assert(loadstring(handlers[name], ("@%s/handlers/%s.lua"):format(app.dir, name)))
      local run = testing.run(chunk(), {}, { max_attempts = 1 })
      assert.equal(row.status, run.status, name)
      assert.equal(row.error, run.error, name)
    end
    assert.equal("done", app:ledger("subscriber = 'just_fits'")[1].status)
    assert.matches("the payload has 1048581 bytes as text", app:ledger("subscriber = 'finish'")[1].error)
  end)
end)
