-- Proves the contract of one run under faults, from what was seen outside of the program: the ids
-- whose publish committed, the runs that handlers recorded (witness.lua), the steps of each row
-- that triggers recorded, and the final rows. Knows nothing of processes and asks nobody: pure.
--
--   checker.prove {
--     committed = { id, … }, runs = …, steps = …, rows = …, max_attempts = 50,
--     windows = { { worker = pid or nil for all, from = …, to = … } }, lease_secs = 2,
--     is_unknown = function(row) … end,   -- may this row, whose publish is in doubt, be there?
--     may_fail = false,                   -- whether dead letters are accepted
--   }
--
-- A window is a time in which a worker could not renew its lease. When windows took half a lease or
-- more of the time before a run, an earlier run in that worker may overlap it: the lease may have
-- ended, since the last renewal can be a third of it old. At most GRACE_SECS after its windows the
-- worker must have found itself dead, and its handlers are stopped.
--
-- A hold is the time from a claim to what ended it. It belongs to an attempt of a message in a
-- worker; runs and holds are matched by these three.

local checker = {}

local GRACE_SECS = 3
-- Between a run's time and a step's: two clocks of one machine.
local CLOCK_SECS = 0.05
local MOST_SHOWN = 10
local RECLAIMED = "the subscriber holding this message stopped responding"

-- Its handler had the processor when its executor was killed: at its first instruction, perhaps,
-- before it could record that it had begun.
local function is_blame(text)
  return text ~= nil and text:find("handler crashed its executor", 1, true) == 1
end

local LEGAL = {
  pending = { running = true, discarded = true },
  running = { pending = true, done = true, failed = true, discarded = true },
}

local function trail(steps, runs)
  local lines = {}
  for _, step in ipairs(steps or {}) do
    table.insert(lines, ("    %.6f %s → %s, attempts %s → %s, %s%s"):format(
      step.at, step.was, step.became, step.attempts_were, step.attempts, step.claimed_by,
      step.error and ": " .. step.error:sub(1, 80) or ""))
  end
  for _, run in ipairs(runs or {}) do
    table.insert(lines, ("    run %s, attempt %d in worker %d: %.6f to %s%s"):format(
      run.run, run.attempt, run.worker, run.began, run.ended and ("%.6f"):format(run.ended) or "its death",
      next(run.held) and ", while others held the message" or ""))
  end
  return table.concat(lines, "\n")
end

-- The pid in `host-pid-random#claim`.
local function worker_of(claimed_by)
  return tonumber(claimed_by and claimed_by:match "%-(%d+)%-%x+#%d+$")
end

local function key_of(attempt, worker)
  return ("%s in %s"):format(attempt, worker)
end

-- The holds of one message by attempt and worker, and what is wrong with its steps.
local function read_steps(steps, fail)
  local holds, tokens = {}, {}
  local hold -- the one under way
  if steps[1].was ~= nil or steps[1].attempts ~= 0 then
    fail "does not begin with its publish"
  end
  for i = 2, #steps do
    local step = steps[i]
    if step.was ~= steps[i - 1].became or step.attempts_were ~= steps[i - 1].attempts then
      fail "has a step that does not follow the one before"
    elseif not (LEGAL[step.was] or {})[step.became] then
      fail(("went from %s to %s"):format(step.was, step.became))
    elseif step.became == "running" then
      if step.attempts ~= step.attempts_were + 1 then
        fail "was claimed without counting the attempt"
      end
      if tokens[step.claimed_by] then
        fail("was claimed twice as " .. step.claimed_by)
      end
      tokens[step.claimed_by] = true
      local key = key_of(step.attempts, worker_of(step.claimed_by))
      holds[key] = holds[key]
        or { claims = 0, refunds = 0, reclaims = 0, blames = 0, claimed_at = step.at, done_at = nil, runs = {} }
      hold = holds[key]
      hold.claims = hold.claims + 1
    else
      local refund = step.attempts_were - step.attempts
      if refund ~= 0 and not (refund == 1 and step.became == "pending") then
        fail(("had its attempts set from %d to %d"):format(step.attempts_were, step.attempts))
      end
      hold.refunds = hold.refunds + refund
      hold.reclaims = hold.reclaims + (step.error == RECLAIMED and refund == 0 and 1 or 0)
      hold.blames = hold.blames + (step.became == "pending" and is_blame(step.error) and refund == 0 and 1 or 0)
      hold.done_at = hold.done_at or step.became == "done" and step.at
    end
  end
  return holds
end

-- Runs against holds: each start was paid for, each payment was for a start or a lost lease, and
-- `done` was said by a run that returned.
local function match_runs(runs, holds, max_attempts, fail)
  local complete = 0
  for _, run in ipairs(runs) do
    local hold = holds[key_of(run.attempt, run.worker)]
    if hold and run.began >= hold.claimed_at - CLOCK_SECS then
      table.insert(hold.runs, run)
    else
      fail(("was run as attempt %d in worker %d, which never claimed it so"):format(run.attempt, run.worker))
    end
    complete = complete + (run.ended and 1 or 0)
  end
  local counted = 0
  for key, hold in pairs(holds) do
    local started = #hold.runs
    if started > hold.claims then
      fail(("was started %d times as attempt %s, and claimed %d times"):format(started, key, hold.claims))
    end
    local unstarted = hold.claims - hold.refunds - started
    if unstarted > hold.reclaims + hold.blames then
      fail(("lost an attempt (%s) in which it was not started"):format(key))
    end
    counted = counted + math.max(0, started - hold.refunds)
    if hold.done_at then
      local returned = false
      for _, run in ipairs(hold.runs) do
        returned = returned or run.ended ~= nil and run.ended <= hold.done_at + CLOCK_SECS
      end
      if not returned then
        fail(("is done by attempt %s, in which no run had returned"):format(key))
      end
    end
  end
  if counted > max_attempts then
    fail(("was started %d times, at most %d are allowed"):format(counted, max_attempts))
  end
  return complete
end

-- Could the worker of `earlier` have lost its lease when `later` began?
local function is_excused(earlier, later, evidence)
  local since, away = later.began - evidence.lease_secs - GRACE_SECS, 0
  for _, window in ipairs(evidence.windows) do
    if window.worker == nil or window.worker == earlier.worker then
      away = away + math.max(0, math.min(window.to, later.began) - math.max(window.from, since))
    end
  end
  return away >= evidence.lease_secs / 2
end

-- Two runs at a time. Of a run that did not return, the kernel's lock tells whether its process
-- lived.
local function find_overlaps(runs, evidence, fail)
  local excused = 0
  for i, later in ipairs(runs) do
    for j = 1, i - 1 do
      local earlier = runs[j]
      local overlaps = earlier.ended and earlier.ended > later.began or not earlier.ended and later.held[earlier.run]
      if overlaps and is_excused(earlier, later, evidence) then
        excused = excused + 1
      elseif overlaps then
        fail(("was run twice at a time: run %s began during run %s"):format(later.run, earlier.run))
      end
    end
  end
  return excused
end

-- Raises with all that is wrong, each message with its trail; returns figures: messages, runs,
-- overlaps (the excused ones), attempts (the most of one message), refunds, reclaims.
function checker.prove(evidence)
  local problems, shown = {}, {}
  local figures = { messages = 0, runs = #evidence.runs, overlaps = 0, attempts = 0, refunds = 0, reclaims = 0 }
  local runs = {}
  for _, run in ipairs(evidence.runs) do
    runs[run.id] = runs[run.id] or {}
    table.insert(runs[run.id], run)
  end
  local function failing(id)
    return function(text)
      table.insert(problems, ("message %s %s%s"):format(id, text,
        not shown[id] and "\n" .. trail(evidence.steps[id], runs[id]) or ""))
      shown[id] = true
    end
  end

  local rows = {}
  for _, row in ipairs(evidence.rows) do
    rows[row.id] = row
  end
  local committed = {}
  for _, id in ipairs(evidence.committed) do
    committed[id] = true
    if not rows[id] then
      failing(id) "is lost: its publish committed"
    end
  end
  for id in pairs(runs) do
    if not rows[id] then
      failing(id) "was run, and is in no row"
    end
  end

  for id, row in pairs(rows) do
    local fail = failing(id)
    figures.messages = figures.messages + 1
    figures.attempts = math.max(figures.attempts, tonumber(row.attempts))
    if not committed[id] and not (evidence.is_unknown and evidence.is_unknown(row)) then
      fail "is a row that nobody published"
    end
    if row.status ~= "done" and not (row.status == "failed" and evidence.may_fail) then
      fail(("ended as %s: %s"):format(row.status, row.error))
    end
    if row.status == "failed" and tonumber(row.attempts) < evidence.max_attempts then
      fail(("is a dead letter after %s attempts"):format(row.attempts))
    end
    if tonumber(row.attempts) > evidence.max_attempts then
      fail(("has %s attempts, at most %d are allowed"):format(row.attempts, evidence.max_attempts))
    end
    local steps = evidence.steps[id]
    if not steps then
      fail "has no steps"
    else
      local holds = read_steps(steps, fail)
      for _, hold in pairs(holds) do
        figures.refunds = figures.refunds + hold.refunds
        figures.reclaims = figures.reclaims + hold.reclaims
      end
      local last = steps[#steps]
      if last.became ~= row.status or last.attempts ~= tonumber(row.attempts) then
        fail "is not what its last step says"
      end
      local complete = match_runs(runs[id] or {}, holds, evidence.max_attempts, fail)
      if row.status == "done" and complete == 0 then
        fail "is done, and no run of it returned"
      end
    end
    figures.overlaps = figures.overlaps + find_overlaps(runs[id] or {}, evidence, fail)
  end

  if #problems > 0 then
    local more = #problems - MOST_SHOWN
    error(("the contract is broken %d times:\n  %s%s"):format(#problems,
      table.concat(problems, "\n  ", 1, math.min(#problems, MOST_SHOWN)), more > 0 and "\n  …" or ""), 2)
  end
  return figures
end

return checker
