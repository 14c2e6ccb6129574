-- The worker of the benchmark: one subscription, whose handler counts and does nothing else. What
-- differs from run to run comes from the adapter, in the environment.

local here = assert(os.getenv "TIDEMILL_BENCH_FOLDER", "this config is for bench/peers/tidemill.lua")
package.path = here .. "/?.lua;" .. package.path

local n = tonumber(os.getenv "TIDEMILL_BENCH_N")
local sleep_secs = tonumber(os.getenv "TIDEMILL_BENCH_SLEEP_SECS")

-- nil is the default of the program.
local function option(name)
  return tonumber(os.getenv("TIDEMILL_BENCH_" .. name:upper()))
end

-- At the first message: this file also runs where no message ever will.
local hit

return {
  app = "bench",
  executors = option "executors",
  concurrency = option "concurrency",
  batch = option "batch",
  subscribe = {
    ["bench.job"] = {
      hit = function(message)
        hit = hit or require("tally").join(os.getenv "TIDEMILL_BENCH_TALLY", n)
        hit(message.id)
        if sleep_secs then
          require("tidemill").sleep(sleep_secs)
        end
      end,
    },
  },
}
