-- The app of a spec: the subscriptions of a config.lua, loaded as an executor loads them.
--
-- Plain LuaJIT only.

local loader = require "tidemill.load"
local native = require "tidemill.native"

local format = string.format
local concat, insert, sort = table.concat, table.insert, table.sort

local app = {}

-- Those of a config, each with `max_attempts` and `timeout_secs`; or nil and what is wrong with it.
function app.load(path)
  local settings, numbers = native.settings(), {}
  local api = setmetatable({}, { __index = settings })
  function api.lane(topic, subscriber, label)
    local number, counted = settings.lane(topic, subscriber, label)
    if number then
      numbers[counted .. "/" .. subscriber] = number
    end
    return number, counted
  end
  local topics, problems = loader.run(api, path, true, 1)
  if not topics then
    return nil, concat(problems, "\n")
  end
  local lanes = {}
  for topic, subscribers in pairs(topics) do
    for subscriber, lane in pairs(subscribers) do
      lane.max_attempts, lane.timeout_secs = settings.lane_limits(numbers[topic .. "/" .. subscriber])
      insert(lanes, lane)
    end
  end
  return lanes
end

-- The one that a name means, SUBSCRIBER or TOPIC/SUBSCRIBER, or nil and why there is none.
function app.find(lanes, name)
  local found = {}
  for _, lane in ipairs(lanes) do
    local pair = lane.topic .. "/" .. lane.subscriber
    if name == pair then
      return lane
    elseif name == lane.subscriber then
      insert(found, { lane = lane, pair = pair })
    end
  end
  if #found == 1 then
    return found[1].lane
  end
  local pairs_found = {}
  for i, each in ipairs(found) do
    pairs_found[i] = each.pair
  end
  sort(pairs_found)
  return nil, #found == 0 and format("there is no subscriber `%s`", name)
    or format("`%s` may mean several subscriptions: name one of %s", name, concat(pairs_found, ", "))
end

return app
