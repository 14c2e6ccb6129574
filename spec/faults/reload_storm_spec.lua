-- Everything at once: files change, break and are mended, executors are killed, subscriptions come and
-- go, and reloads are asked for, while messages are published. In the end each is done.

local clock = require "spec.support.clock"
local journal = require "spec.support.journal"
local process = require "spec.support.process"
local reloading = require "spec.support.reloading"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local TOPICS = { "a", "b", "c", "d" }

-- The subscriptions of a config, of each topic or of some.
local function config_of(random, all)
  local subscribe = { t = "work" }
  for _, topic in ipairs(TOPICS) do
    if all or random(2) == 1 then
      subscribe[topic] = random(3) == 1 and { work = { concurrency = random(4) } } or "work"
    end
  end
  return {
    watch = true, executors = random(3), concurrency = random(20), batch = random(50), lease_secs = 60 + random(60),
    max_attempts = 1000, retry_backoff_secs = 0, subscribe = subscribe,
  }
end

local function actions(app, worker, random)
  local body = [[ tidemill.sleep(0.02 * math.random()) ]]
  return {
    function()
      reloading.set(app, config_of(random))
    end,
    function()
      reloading.write(app, "work", body .. ("\n"):rep(random(9)))
    end,
    function()
      app:write_handler("work", random(2) == 1 and "" or "return function(")
    end,
    function()
      app:write_config(random(2) == 1 and "" or "return {")
    end,
    function()
      worker:kill "HUP"
    end,
    function()
      local children = process.children(worker.pid)
      if #children > 0 then
        process.run { "kill", "-9", children[random(#children)].pid }
      end
    end,
    function()
      for _, topic in ipairs(TOPICS) do
        journal.publish_many(app, topic, random(30))
      end
      journal.publish_many(app, "t", random(100))
    end,
    function()
      clock.sleep(random() * 0.5)
    end,
  }
end

for _, seed in ipairs { 1, 2, 3 } do
  describe("a storm of changes and kills, number " .. seed, function()
    it("loses no message, and the last state of the disk is what runs", function()
      local state = seed
      -- A generator of our own: the same storm each time, as far as processes allow.
      local function random(most)
        state = (state * 16807) % 2147483647
        return most and state % most + 1 or state / 2147483647
      end
      local app = reloading.app(config_of(random, true), { work = "" })
      local worker = app:start()
      local list = actions(app, worker, random)
      for _ = 1, 120 do
        list[random(#list)]()
        clock.sleep(random() * 0.1)
      end
      reloading.write(app, "work", [[ journal.note(ctx.generation .. " at last") ]])
      reloading.set(app, config_of(random, true))
      journal.publish_many(app, "t", 1)
      journal.wait_until_finished(app, 60)
      assert.equal(0, journal.count(app, "failed"))
      local total = tonumber(app.db:value "select count(*) from tidemill.queue_message")
      assert.equal(total, journal.count(app, "done"))
      -- Those published while nobody subscribed to their topic ran nowhere.
      local ended = {}
      for _, run in ipairs(journal.ended(app)) do
        ended[run.id] = true
      end
      for _, row in ipairs(app:ledger "subscriber <> ''") do
        assert.truthy(ended[row.id], row.id)
      end
      app:wait_until(function()
        journal.publish_many(app, "t", 1)
        journal.wait_until_finished(app)
        local notes = journal.notes(app)
        return #notes > 0
          and notes[#notes] == app.db:value "select generation from tidemill.worker" .. " at last"
      end)
      local executors = tonumber(reloading.text(app.config_path):match '"executors"%] = (%d+)')
      reloading.wait_for_executors(app, worker, executors)
    end)
  end)
end
