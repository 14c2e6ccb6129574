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

-- Times, and whether they are good ones.
local TIMES = {
  ["2030-02-28T00:00:00Z"] = true, ["2028-02-29T24:00Z"] = true, ["2030-12-31t23:59:60+15:59"] = true,
  ["2030-06-30 12:00-0130"] = true, ["2026-01-01T00:00:00.123456789Z"] = true, ["1970-01-01T00:00+05"] = true,
  ["2030-02-29T00:00:00Z"] = false, ["2100-02-29T00:00:00Z"] = false, ["2030-02-30T00:00:00Z"] = false,
  ["2030-13-01T00:00:00Z"] = false, ["2030-00-01T00:00:00Z"] = false, ["2030-01-00T00:00:00Z"] = false,
  ["0000-01-01T00:00:00Z"] = false, ["2030-01-01T24:00:01Z"] = false, ["2030-01-01T25:00Z"] = false,
  ["2030-01-01T00:60Z"] = false, ["2030-01-01T00:00:61Z"] = false, ["2030-01-01T00:00+16:00"] = false,
  ["2030-01-01T00:00+01:60"] = false, ["2030-01-01T00:00:00.1234567890Z"] = false,
  ["2400-02-29T10:20:30.5Z"] = false, ["9999-12-31T23:59-12"] = false,
  ["2030-12-31T23:59:60.5Z"] = false,
}

describe("tidemill.testing agrees with a queue", function()
  after_each(tidemill.close_all)

  local function compare(bodies)
    local subscribe, handlers, count = {}, {}, 0
    for name, body in pairs(bodies) do
      subscribe[name], handlers[name], count = name, source(body), count + 1
    end
    local app = tidemill.app { config = { subscribe = subscribe, max_attempts = 1 }, handlers = handlers }
    app:start()
    for name in pairs(bodies) do
      app:must_run("publish", name)
    end
    app:wait_until(function()
      return tonumber(app.db:value [[select count(*) from tidemill.queue_message
        where subscriber <> '' and status in ('done', 'failed')]]) == count
    end, 30, "all messages are finished")
    for name in pairs(bodies) do
      local row = app:ledger("subscriber = $1", name)[1]
      local chunk = assert(loadstring(handlers[name], ("@%s/handlers/%s.lua"):format(app.dir, name)))
      local run = testing.run(chunk(), {}, { max_attempts = 1 })
      assert.equal(row.status, run.status, name)
      assert.equal(row.error, run.error, name)
    end
    return app
  end

  it("about payloads that are too large", function()
    local app = compare(HANDLERS)
    assert.equal("done", app:ledger("subscriber = 'just_fits'")[1].status)
    assert.matches("the payload has 1048581 bytes as text", app:ledger("subscriber = 'finish'")[1].error)
  end)

  it("about times that there are not, or that are too far away", function()
    local bodies, good, count = {}, {}, 0
    for at, is_good in pairs(TIMES) do
      count = count + 1
      for way, body in pairs {
        gathered = "ctx:publish('x', {}, { at = %q })", at_once = "tidemill.publish('x', {}, { at = %q })",
        by_sql = "tidemill.publish_many { { topic = 'x', at = %q } }",
      } do
        local name = ("%s_%d"):format(way, count)
        bodies[name], good[name] = body:format(at), is_good
      end
    end
    local app = compare(bodies)
    for name, is_good in pairs(good) do
      local row = app:ledger("subscriber = $1", name)[1]
      assert.equal(is_good and "done" or "failed", row.status, bodies[name])
    end
  end)
end)
