-- `tidemill.host` of a program that is no executor: a producer, a script, a spec. An executor has its
-- own, made in C (src/executor/task_host.c), and never loads this file. No handler runs here, so
-- nothing can wait for a runtime.

local native = require "tidemill.native"

-- topic, encode, log, log_threshold: the same everywhere.
local host = native.host()

-- Not in an executor.
host.plain = true

-- What a wait yields first, if one could be begun here.
host.wait = {}

function host.running()
  return false
end

function host.owns()
  return false
end

return host
