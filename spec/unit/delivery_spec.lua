-- What an outcome means for the ledger. src/core/delivery

local ffi = require "ffi"
local header = require "spec.support.header"

local lib = header.declare "core/delivery.h"

-- As in core/delivery.h, and in core/message.h for the outcomes.
local SETTLEMENTS = {
  [tonumber(lib.MILL_SETTLE_DONE)] = "done",
  [tonumber(lib.MILL_SETTLE_PENDING)] = "pending",
  [tonumber(lib.MILL_SETTLE_FAILED)] = "failed",
  [tonumber(lib.MILL_SETTLE_DISCARDED)] = "discarded",
}
local OUTCOMES = {
  done = lib.MILL_OUTCOME_DONE,
  raised = lib.MILL_OUTCOME_RAISED,
  retry = lib.MILL_OUTCOME_RETRY,
  snooze = lib.MILL_OUTCOME_SNOOZE,
  discard = lib.MILL_OUTCOME_DISCARD,
  returned = lib.MILL_OUTCOME_RETURNED,
}

local function text_of(pointer)
  return pointer ~= nil and ffi.string(pointer) or nil
end

-- Concludes a delivery: `fields` are attempts (1), max_attempts (5), backoff (10), jitter, random,
-- delay, error, publications; a table as `before` is concluded first.
local function conclude(kind, fields)
  fields = fields or {}
  local spec = ffi.new "struct mill_manifest_lane"
  spec.options.retry_backoff_secs = fields.backoff or 10
  spec.options.retry_jitter = fields.jitter or 0
  local lane = ffi.new("struct mill_lane", { spec = spec })
  local delivery = lib.mill_delivery_new()
  delivery.lane = lane
  delivery.attempts = fields.attempts or 1
  delivery.max_attempts = fields.max_attempts or 5
  local outcome = ffi.new "struct mill_outcome"
  local function apply(name, from)
    outcome.kind = OUTCOMES[name]
    outcome.delay_secs = from.delay or 0
    outcome.error = ffi.new("struct mill_span", from.error, from.error and #from.error or 0)
    outcome.publications = ffi.new("struct mill_span", from.publications, from.publications and #from.publications or 0)
    lib.mill_delivery_conclude(delivery, outcome, from.random or 0)
  end
  if fields.before then
    apply(fields.before, fields)
    apply(kind, { error = fields.second_error })
  else
    apply(kind, fields)
  end
  local result = {
    settlement = SETTLEMENTS[tonumber(delivery.settlement)],
    delay = delivery.delay_secs,
    refund = delivery.refund,
    error = text_of(delivery.error),
    publications = text_of(delivery.publications),
  }
  lib.mill_delivery_free(delivery)
  return result
end

describe("the end of a delivery", function()
  it("that returned is done, with what it published", function()
    assert.same({ settlement = "done", delay = 0, refund = false }, conclude "done")
    assert.same({ settlement = "done", delay = 0, refund = false, publications = "[1]" },
      conclude("done", { publications = "[1]", attempts = 5 }))
  end)

  it("that raised waits for its backoff, until its attempts are spent", function()
    for attempts, expected in ipairs { 10, 20, 40, 80 } do
      assert.same({ settlement = "pending", delay = expected, refund = false, error = "no" },
        conclude("raised", { attempts = attempts, error = "no" }))
    end
    assert.same({ settlement = "failed", delay = 0, refund = false, error = "no" },
      conclude("raised", { attempts = 5, error = "no" }))
    -- A row whose max_attempts was lowered meanwhile.
    assert.equal("failed", conclude("raised", { attempts = 6, error = "no" }).settlement)
    assert.equal(3600, conclude("raised", { attempts = 49, max_attempts = 32767, error = "no" }).delay)
    assert.equal(3600, conclude("raised", { attempts = 32766, max_attempts = 32767, error = "no" }).delay)
  end)

  it("that raised drops what it published", function()
    assert.is_nil(conclude("raised", { error = "no", publications = "[1]" }).publications)
    assert.same({ settlement = "pending", delay = 10, refund = false, error = "refused" },
      conclude("raised", { before = "done", publications = "[1]", second_error = "refused" }))
  end)

  it("that raised waits longer by the jitter, never shorter", function()
    assert.equal(100, conclude("raised", { backoff = 100, jitter = 0.5, random = 0 }).delay)
    assert.equal(125, conclude("raised", { backoff = 100, jitter = 0.5, random = 0.5 }).delay)
  end)

  it("that asked for a retry waits for the time it gave, and counts", function()
    assert.same({ settlement = "pending", delay = 7.5, refund = false, error = "busy" },
      conclude("retry", { delay = 7.5, error = "busy" }))
    assert.same({ settlement = "failed", delay = 0, refund = false, error = "busy" },
      conclude("retry", { delay = 7.5, error = "busy", attempts = 5 }))
  end)

  it("that snoozes does not count, in its last attempt neither", function()
    assert.same({ settlement = "pending", delay = 60, refund = true }, conclude("snooze", { delay = 60, attempts = 5 }))
  end)

  it("that discards says why", function()
    assert.same({ settlement = "discarded", delay = 0, refund = false, error = "old" },
      conclude("discard", { error = "old" }))
  end)

  it("that never came is due now and does not count", function()
    assert.same({ settlement = "pending", delay = 0, refund = true }, conclude("returned", { attempts = 5 }))
  end)

  it("bounds the delays that it is given", function()
    for _, kind in ipairs { "retry", "snooze" } do
      assert.equal(0, conclude(kind, { delay = -5 }).delay)
      assert.equal(0, conclude(kind, { delay = 0 / 0 }).delay)
      assert.equal(100 * 366 * 86400, conclude(kind, { delay = math.huge }).delay)
      assert.equal(100 * 366 * 86400, conclude(kind, { delay = 1e18 }).delay)
    end
  end)

  it("never goes without a reason where one is due", function()
    for _, kind in ipairs { "raised", "retry", "discard" } do
      assert.equal("the handler gave no reason", conclude(kind).error)
      assert.equal("the handler gave no reason", conclude(kind, { error = "" }).error)
    end
    assert.is_nil(conclude("done").error)
    assert.is_nil(conclude("snooze").error)
    assert.is_nil(conclude("returned").error)
  end)

  it("has an error that Postgres takes", function()
    assert.equal("a\239\191\189b\239\191\189", conclude("raised", { error = "a\0b\255" }).error)
    local cut = conclude("raised", { error = ("é"):rep(3000) }).error
    assert.equal(("é"):rep(2000) .. "…", cut)
  end)
end)
