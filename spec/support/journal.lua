-- Apps whose handlers tell what they did, so that a spec need not believe the ledger: each run is a
-- `begin` and, when the handler returned, an `end` in a file of the app's folder.
--
--   local app = journal.app {
--     config = { subscribe = { ["order.paid"] = "greet" } },
--     handlers = { greet = [[ tidemill.sleep(payload.secs) ]] },
--   }
--   app:start()
--   local id = journal.publish(app, "order.paid", '{"secs": 1}')
--   journal.wait_for_status(app, id, "done")
--   assert.equal(1, #journal.begun(app, id))
--
-- A handler is given as the body of a function of (payload, ctx) that finds `tidemill` and `journal`.

local folder = require "spec.support.folder"
local tidemill = require "spec.support.tidemill"

local journal = {}

-- What is found by `require "journal"` in a handler. A line is one write to a file opened for
-- appending, so lines of several processes do not mix.
local MODULE = [[
local ffi = require "ffi"
local tidemill = require "tidemill"

ffi.cdef "int getpid(void); int kill(int pid, int signal);"

local journal = { pid = ffi.C.getpid() }

local function append(name, text)
  local file = assert(io.open(name, "a"))
  assert(file:write(text, "\n"))
  assert(file:close())
end

-- A line of the handler's own, found by `journal.notes`.
function journal.note(text)
  append("notes", text)
end

-- Waits until the spec makes the file `name`. Others run meanwhile.
function journal.wait_for(name)
  while true do
    local file = io.open(name)
    if file then
      return file:close()
    end
    tidemill.sleep(0.01)
  end
end

-- Ends this process, as the kernel would for want of memory.
function journal.kill_myself()
  ffi.C.kill(journal.pid, 9)
end

local function record(what, ctx)
  append("runs", ("%s %s %s %d %d"):format(what, ctx.message_id, ctx.subscriber, ctx.attempts, journal.pid))
end

function journal.recorded(handler)
  return function(payload, ctx)
    record("begin", ctx)
    handler(payload, ctx)
    record("end", ctx)
  end
end

return journal
]]

local HANDLER = [[
local tidemill = require "tidemill"
local journal = require "journal"
return journal.recorded(function(payload, ctx)
%s
end)
]]

-- A config in which nothing but the mechanism under test moves a message: every fallback is far
-- away.
local CONFIG = { executors = 1, poll_secs = 3600, lease_secs = 300 }

local function with_defaults(config)
  local whole = {}
  for _, from in ipairs { CONFIG, config } do
    for key, value in pairs(from) do
      whole[key] = value
    end
  end
  return whole
end

-- As tidemill.app: `config` is a table, `handlers` are bodies.
function journal.app(options)
  local app = tidemill.app {
    config = with_defaults(options.config),
    database = options.database,
  }
  app:write_handler("journal", MODULE)
  for name, body in pairs(options.handlers) do
    app:write_handler(name, HANDLER:format(body))
  end
  return app
end

local function lines(app, name)
  local ok, text = pcall(folder.read, app.dir .. "/" .. name)
  local list = {}
  for line in (ok and text or ""):gmatch "[^\n]+" do
    table.insert(list, line)
  end
  return list
end

-- What handlers noted, in the order it was written.
function journal.notes(app)
  return lines(app, "notes")
end

-- All runs in the order they were written, each { what = "begin" or "end", id, subscriber, attempt,
-- pid }.
function journal.runs(app)
  local runs = {}
  for i, line in ipairs(lines(app, "runs")) do
    local what, id, subscriber, attempt, pid = line:match "^(%a+) (%S+) (%S+) (%d+) (%d+)$"
    runs[i] = { what = what, id = id, subscriber = subscriber, attempt = tonumber(attempt), pid = tonumber(pid) }
  end
  return runs
end

local function select_runs(app, what, id)
  local found = {}
  for _, run in ipairs(journal.runs(app)) do
    if run.what == what and (id == nil or run.id == id) then
      table.insert(found, run)
    end
  end
  return found
end

-- The runs that began, of one message or of all.
function journal.begun(app, id)
  return select_runs(app, "begin", id)
end

-- The runs whose handler returned.
function journal.ended(app, id)
  return select_runs(app, "end", id)
end

-- Raises unless `count` messages were run, each once and to its end.
function journal.assert_once_each(app, count)
  local begun, ended = {}, {}
  for _, run in ipairs(journal.runs(app)) do
    local to = run.what == "begin" and begun or ended
    to[run.id] = (to[run.id] or 0) + 1
  end
  local total = 0
  for id, times in pairs(begun) do
    total = total + 1
    if times ~= 1 or ended[id] ~= 1 then
      error(("message %s began %d times and ended %d times"):format(id, times, ended[id] or 0), 2)
    end
  end
  if total ~= count then
    error(("%d messages were run, expected %d"):format(total, count), 2)
  end
end

-- ---- the ledger ---------------------------------------------------------------------------------

-- Publishes by plain SQL, outside of any program of ours; `options` is SQL such as `priority => 3`.
-- Returns the message's id.
function journal.publish(app, topic, payload, options)
  return app.db:value(
    ("select (tidemill.publish($1, $2::jsonb%s)).id"):format(options and ", " .. options or ""), topic, payload or "{}")
end

-- Publishes `count` messages {"n": 1} … in one statement.
function journal.publish_many(app, topic, count, options)
  app.db:query(
    ([[select count(*) from tidemill.publish_many(array[$1],
      array(select jsonb_build_object('n', n) from generate_series(1, $2::int) as n order by n)%s)]]):format(
      options and ", " .. options or ""), topic, count)
end

-- The row of a message.
function journal.row(app, id)
  return app:ledger("id = $1", id)[1]
end

-- Waits until a message has this status; returns its row.
function journal.wait_for_status(app, id, status, secs)
  return app:wait_until(function()
    local row = journal.row(app, id)
    return row and row.status == status and row
  end, secs, ("message %s is %s"):format(id, status))
end

-- Waits until no message waits or runs.
function journal.wait_until_finished(app, secs)
  app:wait_until(function()
    return not app.db:value "select 1 from tidemill.queue_message where processed_at is null limit 1"
  end, secs, "all messages are finished")
end

-- How many messages have a status; `where` narrows it.
function journal.count(app, status, where)
  return tonumber(app.db:value(
    ("select count(*) from tidemill.queue_message where status = $1 and (%s)"):format(where or "true"), status))
end

-- Waits until `count` runs have begun.
function journal.wait_until_begun(app, count, secs)
  app:wait_until(function()
    return #journal.begun(app) >= count
  end, secs, ("%d runs have begun"):format(count))
end

return journal
