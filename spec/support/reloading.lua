-- Apps that are reloaded: what their specs share.

local folder = require "spec.support.folder"
local journal = require "spec.support.journal"
local process = require "spec.support.process"

local reloading = { text = folder.read }

local SUBSCRIBE = { t = "work" }

local HANDLER = [[
local tidemill = require "tidemill"
local journal = require "journal"
local loaded = io.open("loaded", "a")
loaded:write(journal.pid, "\n")
loaded:close()
%s
return journal.recorded(function(payload, ctx)
%s
end)
]]

local function whole(config)
  config.subscribe = config.subscribe or SUBSCRIBE
  if config.watch == nil then
    config.watch = false
  end
  return config
end

-- As journal.app; topic `t` is subscribed to by `work`, and nothing reloads by itself, unless the
-- config says otherwise.
function reloading.app(config, handlers)
  local app = journal.app { config = whole(config or {}), handlers = handlers }
  for name, body in pairs(handlers) do
    reloading.write(app, name, body)
  end
  return app
end

-- Writes another config, with the same defaults.
function reloading.set(app, config)
  local with = { executors = 1, poll_secs = 3600, lease_secs = 300 }
  for key, value in pairs(whole(config)) do
    with[key] = value
  end
  app:write_config(with)
end

-- Writes a handler, given as a body; `before` stands at the top level of its file.
function reloading.write(app, name, body, before)
  app:write_handler(name, HANDLER:format(before or "", body))
end

function reloading.read(app, name)
  return folder.read(app.dir .. "/handlers/" .. name .. ".lua")
end

-- Waits for the end of the next reload, from a mark by `position`: true, or nil and the rest of the
-- line that tells the failure.
function reloading.wait(worker, from)
  local event, rest = worker:wait_for("event=(reload[e_][df]%a*) (generation=[^\n]*)", 30, from)
  if event == "reloaded" then
    return true
  end
  return nil, rest
end

-- Asks for a reload by SIGHUP and waits for its end.
function reloading.reload(_, worker)
  local from = worker:position()
  worker:kill "HUP"
  return reloading.wait(worker, from)
end

function reloading.must_reload(app, worker)
  local ok, line = reloading.reload(app, worker)
  if not ok then
    error("the reload failed: " .. line, 2)
  end
end

-- Waits until the worker has so many executors.
function reloading.wait_for_executors(app, worker, count)
  local children
  app:wait_until(function()
    children = process.children(worker.pid)
    return #children == count
  end, 30, function()
    return ("%d executors, found %d"):format(count, #children)
  end)
end

-- The same, and all of them have loaded the handlers: what becomes of the disk now is no affair of theirs.
function reloading.wait_until_loaded(app, worker, count)
  reloading.wait_for_executors(app, worker, count)
  app:wait_until(function()
    local ok, text = pcall(folder.read, app.dir .. "/loaded")
    for _, child in ipairs(process.children(worker.pid)) do
      if not ok or not ("\n" .. text):find(("\n%d\n"):format(child.pid), 1, true) then
        return false
      end
    end
    return true
  end, 30, "all executors have loaded")
end

return reloading
