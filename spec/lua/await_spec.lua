-- Waiting, against a host made of Lua: lua/tidemill/await.lua.

local WAIT = {}
local answers, is_running

package.loaded["tidemill.host"] = {
  wait = WAIT,
  running = function()
    return is_running
  end,
  outcome = function()
    return unpack(table.remove(answers, 1), 1, 2)
  end,
}
package.loaded["tidemill.await"] = nil
local await = require "tidemill.await"

-- Runs a function as a delivery: each wait is noted, and answered by the next of `given`. Returns
-- the notes and what the function returned, or how it failed.
local function deliver(fn, given)
  answers, is_running = given or {}, true
  local noted = {}
  local co = coroutine.create(fn)
  local function step(...)
    if coroutine.status(co) == "suspended" then
      assert(select(2, ...) == WAIT, "a yield that is no wait")
      table.insert(noted, table.concat({ select(3, ...) }, " "))
      return step(coroutine.resume(co))
    end
    is_running = false
    return noted, ...
  end
  return step(coroutine.resume(co))
end

describe("a wait", function()
  it("yields the op with its arguments and returns the outcome", function()
    local noted, ok, value, err = deliver(function()
      return await.op("sleep", 1, 2)
    end, { { "slept" } })
    assert.same({ "sleep 1 2" }, noted)
    assert.same({ true, "slept" }, { ok, value })
    assert.is_nil(err)
  end)

  it("returns nil and the error of an op that failed", function()
    local _, ok, value, err = deliver(function()
      return await.op "publish"
    end, { { nil, "refused" } })
    assert.is_true(ok)
    assert.is_nil(value)
    assert.equal("refused", err)
  end)

  it("passes through coroutines at any depth, in their order", function()
    local noted, ok, value = deliver(function()
      local outer = await.wrap(function()
        local inner = await.wrap(function()
          coroutine.yield(await.op "first")
          return await.op "third"
        end)
        local one = inner()
        local two = await.op "second"
        return one .. two .. inner()
      end)
      return outer()
    end, { { "1" }, { "2" }, { "3" } })
    assert.same({ "first", "second", "third" }, noted)
    assert.same({ true, "123" }, { ok, value })
  end)

  it("keeps what coroutines pass each other, nils and counts included", function()
    local _, ok, count, a, b, c = deliver(function()
      local co = coroutine.create(function(...)
        local n = select("#", ...)
        await.op "op"
        return n, coroutine.yield(...)
      end)
      local first = { n = select("#", await.resume(co, nil, 2, nil)) }
      local _, n, x, y = await.resume(co, nil, "y")
      return first.n, n, x, y
    end, { { true } })
    assert.is_true(ok)
    assert.equal(4, count)
    assert.equal(3, a)
    assert.is_nil(b)
    assert.equal("y", c)
  end)

  it("leaves a coroutine's error what it is", function()
    local thrown = {}
    local _, ok, caught, err, status = deliver(function()
      local co = coroutine.create(function()
        await.op "op"
        error(thrown)
      end)
      local resumed, value = await.resume(co)
      local fn = await.wrap(function()
        error(thrown)
      end)
      local _, wrapped = pcall(fn)
      return resumed, value == thrown and wrapped == thrown, coroutine.status(co)
    end, { { true } })
    assert.is_true(ok)
    assert.is_false(caught)
    assert.is_true(err)
    assert.equal("dead", status)
  end)

  it("is refused by name where C code is between, and the waiting coroutine goes on", function()
    local refusals = {}
    local noted, ok = deliver(function()
      local function try()
        table.insert(refusals, (select(2, await.op "sleep")))
      end
      table.sort({ 2, 1 }, function(a, b)
        try()
        return a < b
      end)
      local before = #refusals
      local inner = await.wrap(function()
        try()
        coroutine.yield()
        try()
      end)
      string.gsub("x", "x", function() inner() end)
      assert(#refusals == before + 1)
      inner()
      refusals.last = refusals[#refusals]
    end, { { "slept" } })
    assert.is_true(ok)
    assert.same({ "sleep" }, noted)
    assert.matches("^`sleep` cannot wait inside of a function that C code called", refusals[1])
    assert.equal(refusals[1], refusals[#refusals])
  end)

  it("is refused while nothing runs", function()
    is_running = false
    local refused = select(2, await.op "publish")
    assert.equal("`publish` works only while a handler runs, not while config.lua and modules are loaded", refused)
    assert.equal(refused, coroutine.wrap(function()
      return select(2, await.op "publish")
    end)())
    assert.equal((refused:gsub("publish", "retry")), (await.finish "retry"))
  end)
end)

describe("coroutine functions", function()
  it("refuse what the originals refuse", function()
    assert.has_error(function() await.resume(5) end)
    assert.has_error(function() await.wrap(5) end)
    local dead = coroutine.create(function() end)
    assert.is_true(await.resume(dead))
    assert.same({ false, "cannot resume dead coroutine" }, { await.resume(dead) })
    local fn = await.wrap(function() return 1 end)
    assert.equal(1, fn())
    assert.error_matches(fn, "cannot resume dead coroutine")
  end)
end)
