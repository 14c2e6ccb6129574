-- When a message that a spec's handler publishes is due: what the database refuses of the option `at`
-- (sql/0002_publish.sql), in its words. lua/tidemill/publication.lua has seen to its form.
--
-- Plain LuaJIT only.

local date, floor = os.date, math.floor
local format, match, sub = string.format, string.match, string.sub

local due = {}

local DAYS = { 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31 }

local function days_of(year, month)
  local leap = year % 4 == 0 and (year % 100 ~= 0 or year % 400 == 0)
  return month == 2 and leap and 29 or DAYS[month]
end

-- Seconds since 1970 of midnight UTC.
local function midnight(year, month, day)
  if month <= 2 then
    year, month = year - 1, month + 12
  end
  local days = 365 * year + floor(year / 4) - floor(year / 100) + floor(year / 400)
    + floor((153 * (month - 3) + 2) / 5) + day - 1
  return (days - 719468) * 86400
end

-- How far a zone is ahead of UTC, in seconds; nil where there is none such.
local function ahead_of(zone)
  if zone == "Z" or zone == "z" then
    return 0
  end
  local sign, hours, minutes = match(zone, "^([+-])(%d%d):?(%d*)$")
  hours, minutes = tonumber(hours), tonumber(minutes) or 0
  if hours <= 15 and minutes <= 59 then
    return (sign == "-" and -1 or 1) * (hours * 3600 + minutes * 60)
  end
end

-- Seconds since 1970, or nil where there is no such time.
local function secs_of(year, month, day, clock, zone)
  local hour, minute, rest = match(clock, "^(%d%d):(%d%d)(.*)$")
  hour, minute = tonumber(hour), tonumber(minute)
  local second = tonumber(match(rest, "^:(.+)$") or 0)
  local ahead = ahead_of(zone)
  if year < 1 or month < 1 or month > 12 or day < 1 or day > days_of(year, month) or not ahead then
    return nil
  end
  local of_day = hour * 3600 + minute * 60 + second
  if hour > 24 or minute > 59 or second > 60 or of_day > 86400 then
    return nil
  end
  return midnight(year, month, day) + of_day - ahead
end

-- As Postgres shows a time with its zone, in UTC.
local function shown(secs)
  local micros = floor(secs % 1 * 1e6 + 0.5)
  local fraction = micros > 0 and match(format(".%06d", micros), "^(.-)0*$") or ""
  return date("!%Y-%m-%d %H:%M:%S", floor(secs)) .. fraction .. "+00"
end

-- Why a time as text is refused at `now`, or nil; and whether that is so before its payload is looked at.
function due.fault(at, now)
  local year, month, day, clock, zone = match(at, "^(%d%d%d%d)%-(%d%d)%-(%d%d)[Tt ]([%d:.]+)(.+)$")
  if #match(clock, "%.?(%d*)$") > 9 then
    return format("`at` is `%s`: give a time with its zone, such as 2030-01-31T08:00:00Z", sub(at, 1, 100)), true
  end
  local secs = secs_of(tonumber(year), tonumber(month), tonumber(day), clock, zone)
  if not secs then
    return format("`at` is `%s`: there is no such time", at), true
  end
  local today = date("!*t", floor(now))
  local last = midnight(today.year + 100, today.month, math.min(today.day, days_of(today.year + 100, today.month)))
    + now % 86400
  if secs > last then
    return format("`available_at` is %s: it must be within 100 years from now", shown(secs)), false
  end
end

return due
