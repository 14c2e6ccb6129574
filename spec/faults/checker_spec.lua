-- The checker itself: it must find each way to break the contract, or the other specs here prove
-- nothing.

local checker = require "spec.support.checker"

local ID = "0190d0c0-0000-7000-8000-000000000001"

-- A message that was run once, as the checker gets to see it. `change` spoils it.
local function evidence(change)
  local found = {
    committed = { ID },
    rows = { { id = ID, status = "done", attempts = "1" } },
    steps = {
      [ID] = {
        { became = "pending", attempts = 0, at = 9 },
        {
          was = "pending", became = "running", attempts_were = 0, attempts = 1, claimed_by = "host-100-aa#1", at = 9.9,
        },
        {
          was = "running", became = "done", attempts_were = 1, attempts = 1, claimed_by = "host-100-aa#1", at = 11.1,
        },
      },
    },
    runs = {
      { id = ID, attempt = 1, run = "200.1", executor = 200, worker = 100, began = 10, ended = 11, held = {} },
    },
    windows = {},
    lease_secs = 2,
    max_attempts = 3,
  }
  change(found, found.steps[ID], found.runs)
  return found
end

-- A second run by worker 101, after the first one's lease was lost.
local function run_again(found, steps, runs, began)
  steps[3] = {
    was = "running", became = "pending", attempts_were = 1, attempts = 1, claimed_by = "host-100-aa#1",
    error = "the subscriber holding this message stopped responding", at = began - 0.2,
  }
  steps[4] = {
    was = "pending", became = "running", attempts_were = 1, attempts = 2, claimed_by = "host-101-bb#1",
    at = began - 0.1,
  }
  steps[5] = {
    was = "running", became = "done", attempts_were = 2, attempts = 2, claimed_by = "host-101-bb#1", at = began + 1.1,
  }
  found.rows[1].attempts = "2"
  runs[2] = { id = ID, attempt = 2, run = "201.1", executor = 201, worker = 101, began = began, ended = began + 1,
    held = began < 11 and { ["200.1"] = true } or {} }
end

describe("the checker", function()
  it("accepts a message that was run once", function()
    assert.equal(1, checker.prove(evidence(function() end)).messages)
  end)

  it("accepts one that was run again after its worker was dead", function()
    local figures = checker.prove(evidence(function(found, steps, runs)
      run_again(found, steps, runs, 12)
      runs[1].ended = nil
    end))
    assert.same({ 2, 2, 1, 0 }, { figures.runs, figures.attempts, figures.reclaims, figures.overlaps })
  end)

  it("accepts an overlap with a run whose lease had ended", function()
    local figures = checker.prove(evidence(function(found, steps, runs)
      run_again(found, steps, runs, 10.5)
      found.windows = { { worker = 100, from = 9, to = 9.6 }, { from = 9.8, to = 10.4 } }
    end))
    assert.equal(1, figures.overlaps)
  end)

  local spoilt = {
    { "a lost message", "is lost", function(found) found.rows = {} end },
    { "a row that nobody published", "nobody published", function(found) found.committed = {} end },
    { "a message left running", "ended as running", function(found, steps)
      steps[3] = nil
      found.rows[1].status = "running"
    end },
    { "a dead letter too early", "dead letter after 1 attempts", function(found, steps)
      found.may_fail = true
      steps[3].became, found.rows[1].status = "failed", "failed"
    end },
    { "a done message that never ran", "no run of it returned", function(_, _, runs) runs[1] = nil end },
    { "a done message whose run did not return", "no run had returned", function(_, _, runs) runs[1].ended = nil end },
    { "a message done before its run returned", "no run had returned", function(_, steps) steps[3].at = 10.5 end },
    { "a run before its claim", "which never claimed it so", function(_, steps) steps[2].at = 10.5 end },
    { "done said by another attempt than the one that returned", "which never claimed it so", function(_, _, runs)
      runs[1].worker = 101
    end },
    { "a second run of one claim", "was started 2 times", function(_, _, runs)
      runs[2] = { id = ID, attempt = 1, run = "200.2", executor = 200, worker = 100, began = 12, ended = 13, held = {} }
    end },
    { "an attempt spent for nothing", "in which it was not started", function(found, steps, runs)
      run_again(found, steps, runs, 12)
      steps[3].error = nil
      table.remove(runs, 1)
    end },
    { "an attempt given back that was none", "had its attempts set", function(found, steps)
      steps[3].attempts, found.rows[1].attempts = 0, "0"
    end },
    { "a claim that counts nothing", "without counting the attempt", function(found, steps)
      steps[2].attempts, steps[3].attempts_were, steps[3].attempts = 0, 0, 0
      found.rows[1].attempts = "0"
    end },
    { "a fence used twice", "was claimed twice as host-100-aa#1", function(found, steps, runs)
      run_again(found, steps, runs, 12)
      steps[4].claimed_by = "host-100-aa#1"
      runs[2].worker = 100
    end },
    { "a step out of nowhere", "does not follow the one before", function(_, steps) steps[3].was = "pending" end },
    { "a finished message that came back", "went from done to running", function(found, steps)
      steps[4] = { was = "done", became = "running", attempts_were = 1, attempts = 1, claimed_by = "host-100-aa#2",
        at = 12 }
      found.rows[1].status = "running"
    end },
    { "more starts than allowed", "at most 1 are allowed", function(found, steps, runs)
      run_again(found, steps, runs, 12)
      found.max_attempts = 1
    end },
    { "two runs at a time", "was run twice at a time", function(found, steps, runs)
      run_again(found, steps, runs, 10.5)
    end },
    { "two runs at a time, the first of which never returned", "was run twice at a time", function(found, steps, runs)
      run_again(found, steps, runs, 10.5)
      runs[1].ended = nil
    end },
    { "two runs at a time, excused by another worker's window", "was run twice at a time", function(found, steps, runs)
      run_again(found, steps, runs, 10.5)
      found.windows = { { worker = 101, from = 9, to = 10.4 } }
    end },
    { "two runs at a time, when the window was too short to lose a lease", "was run twice at a time",
      function(found, steps, runs)
        run_again(found, steps, runs, 10.5)
        found.windows = { { worker = 100, from = 9.5, to = 10.4 } }
      end },
    { "two runs at a time, long after the window", "was run twice at a time", function(found, steps, runs)
      run_again(found, steps, runs, 20)
      runs[1].ended = 30
      found.windows = { { worker = 100, from = 9, to = 10.4 } }
    end },
    { "a row that changed without a step", "not what its last step says", function(found)
      found.rows[1].attempts = "2"
    end },
  }
  for _, case in ipairs(spoilt) do
    it("finds " .. case[1], function()
      local ok, err = pcall(checker.prove, evidence(case[3]))
      assert.is_false(ok)
      assert.truthy(tostring(err):find(case[2], 1, true), tostring(err))
    end)
  end
end)
