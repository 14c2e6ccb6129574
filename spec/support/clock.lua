-- Monotonic time, sleeping and polling for the specs. Instants are seconds since some start, never
-- the wall clock.
--
-- A deadline here only says when to give up on something that should long have happened; no spec
-- asserts on how long a thing took. TIDEMILL_TEST_PATIENCE multiplies every deadline, for sanitizer
-- builds and slow machines.

local ffi = require "ffi"

-- busted reloads the modules for each spec file, the FFI keeps its declarations for the whole run.
if not pcall(ffi.typeof, "struct spec_timespec") then
  ffi.cdef [[
    struct spec_timespec { long tv_sec; long tv_nsec; };
    int spec_clock_gettime(int clock, struct spec_timespec *at) __asm__("clock_gettime");
    int spec_nanosleep(const struct spec_timespec *wanted, struct spec_timespec *left) __asm__("nanosleep");
  ]]
end

local CLOCK_MONOTONIC = 1
local STEP_SECS = 0.005

local clock = {}

local patience = tonumber(os.getenv "TIDEMILL_TEST_PATIENCE") or 1

-- Seconds, monotonic.
function clock.now()
  local at = ffi.new "struct spec_timespec"
  ffi.C.spec_clock_gettime(CLOCK_MONOTONIC, at)
  return tonumber(at.tv_sec) + tonumber(at.tv_nsec) / 1e9
end

-- Returns early when a signal arrives.
function clock.sleep(secs)
  local wanted = ffi.new("struct spec_timespec", math.floor(secs), math.floor(secs % 1 * 1e9))
  ffi.C.spec_nanosleep(wanted, nil)
end

-- The deadline `secs` from now, stretched by the patience of this run.
function clock.deadline(secs)
  return clock.now() + secs * patience
end

-- Calls `fn` until it returns something true and returns that, or nil once `secs` have passed. `fn`
-- is called at least once, and once more after the deadline.
function clock.poll(fn, secs)
  local deadline = clock.deadline(secs)
  while true do
    local late = clock.now() >= deadline
    local got = fn()
    if got then
      return got
    end
    if late then
      return nil
    end
    clock.sleep(STEP_SECS)
  end
end

-- As `poll`, but raises when the time is over. `what` completes the sentence "… did not happen: ";
-- a function is asked for the text at that moment, so that it can tell the state found.
function clock.wait_until(fn, secs, what)
  local got = clock.poll(fn, secs)
  if got then
    return got
  end
  if type(what) == "function" then
    what = what()
  end
  error(("did not happen within %g s: %s"):format(secs * patience, what or "(no description)"), 2)
end

return clock
