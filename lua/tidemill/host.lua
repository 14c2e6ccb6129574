-- `tidemill.host` of a program that is no executor: a producer, a script, a spec. An executor has its
-- own, made in C (src/executor/task_host.c), and never loads this file.
--
-- No runtime is there to wait for. But a spec may run a handler (tidemill.testing): then `delivery` answers
-- what the modules ask about the delivery that runs.

local native = require "tidemill.native"

-- topic, encode, log, log_threshold: the same everywhere.
local host = native.host()
local write_line, machine_clock = host.log, native.now

-- Not in an executor.
host.plain = true

-- The delivery that a spec runs, while it has the processor: lua/tidemill/testing/delivery.lua.
host.delivery = nil

-- Of our functions in a database that is none.
host.schema = "tidemill"

-- What a wait yields first.
host.wait = {}

function host.running()
  return host.delivery ~= nil
end

function host.owns(message_id)
  return host.delivery ~= nil and host.delivery.message_id == message_id
end

function host.take()
  return host.delivery:take()
end

function host.outcome()
  return host.delivery:outcome()
end

function host.gather(item)
  return host.delivery:gather(item)
end

function host.gathered()
  return host.delivery:mark()
end

function host.rewind(mark)
  host.delivery:rewind(mark)
end

-- Who published the message that runs, or nil.
function host.publisher()
  local publisher = host.delivery.message.published_by
  return publisher ~= "" and publisher or nil
end

function host.log(level, ...)
  if host.delivery then
    host.delivery:write(level, ...)
  else
    write_line(level, ...)
  end
end

-- Nobody waits for a file to change.
function host.file() end

-- A spec's clock is its own.
function host.now()
  if host.delivery then
    return host.delivery.now
  end
  return machine_clock()
end

return host
