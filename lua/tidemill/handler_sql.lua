-- SQL in an executor: each statement is a wait of the delivery that asks, on one of the executor's
-- connections (src/executor/op_sql.c).
--
-- Executor process, and specs; in a program of another kind every wait says what to do instead.

local host = require "tidemill.host"
local await = require "tidemill.await"
local log = require "tidemill.log"
local sql = require "tidemill.sql"

local ipairs, setmetatable = ipairs, setmetatable

local FOREIGN = "this table is another program's and has no function for it: publish one at a time, by tidemill.publish"

local engine = {}

function engine.query(session, text, arguments)
  return await.op("query", session or false, text, arguments)
end

-- A spec's stubs want the values (lua/tidemill/testing/sql.lua).
if host.plain then
  function engine.query(session, text, arguments, ...)
    return await.op("query", session or false, text, arguments, ...)
  end
end

function engine.begin(text)
  return await.op("begin", text)
end

function engine.commit(session)
  return await.op("commit", session)
end

function engine.rollback(session)
  return await.op("rollback", session)
end

function engine.publisher()
  if host.running() then
    return host.publisher()
  end
end

local handler_sql = {}

-- Settings are known only when config.lua has been read.
function handler_sql.engine()
  engine.schema = host.schema
  engine.refusal = host.plain_table and FOREIGN or nil
  return engine
end

-- For functions of the library: errors of ours are raised at the line that called these.
function handler_sql.transaction(name, fn, options)
  local used = handler_sql.engine()
  if options and host.running() then
    -- What a try gathered by ctx:publish, the next one gathers again.
    local mark = host.gathered()
    used = setmetatable({}, { __index = used })
    function used.begin_anew()
      host.rewind(mark)
    end
  end
  return sql.transaction(used, name, fn, options, engine.commit)
end

-- Commits together with this message's `done`, which ends the delivery.
local function finish(session)
  return await.op("finish", session)
end

-- As `transaction`, and the message is done with it. Returns only by raising; then what ctx:publish
-- gathered inside is forgotten too.
function handler_sql.finish(name, fn, options)
  local mark = host.gathered()
  local rewinding = setmetatable({}, { __index = handler_sql.engine() })
  function rewinding.rollback(session)
    host.rewind(mark)
    return engine.rollback(session)
  end
  return sql.transaction(rewinding, name, fn, options, finish, "read committed")
end

local told = {}

-- Topics that nobody subscribes to, each once.
function handler_sql.tell_unwanted(published)
  for _, result in ipairs(published) do
    if result.delivered == 0 and not result.duplicate and not told[result.topic] then
      told[result.topic] = true
      log.warn_event("nobody_subscribes", nil, "published_topic", result.topic)
    end
  end
end

return handler_sql
