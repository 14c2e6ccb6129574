#!/usr/bin/env luajit
-- medians.lua FILE…: medians of the runs of bench_claim (a JSON object a line), as a Markdown table.
--
-- A run beside a busy neighbour (a quarter of a core and more) counts only where fewer than two
-- undisturbed ones are there; such a line is marked with ~.

local cjson = require "cjson"

local NOISE = 0.25

-- What a line shows of its options: those that differ from the plain case.
local PLAIN = { done = 0, future = 0, lanes = 1, per_call = 1000, pad = 40, snapshot = 0, stale = 0, pipeline = 1,
  marks = 1, pin = 1 }
local SHOWN = { "done", "future", "snapshot", "stale", "lanes", "per_call", "pad", "pipeline", "marks", "pin" }

local COLUMNS = {
  { "rows/s", "rows_per_s", "%.0f" },
  { "server CPU ms/1000", "server_cpu_ms_per_1000", "%.1f" },
  { "client CPU ms/1000", "client_cpu_ms_per_1000", "%.2f" },
  { "WAL B/row", "wal_bytes_per_row", "%.0f" },
  { "claim p50 ms", "claim_ms.p50", "%.2f" },
  { "p99", "claim_ms.p99", "%.2f" },
  { "max", "claim_ms.max", "%.2f" },
  { "dead tuples", "dead_tuples", "%.0f" },
}

local function field(run, path)
  local value = run
  for name in path:gmatch "[^.]+" do
    value = value[name]
  end
  return value
end

local function median(runs, path)
  local values = {}
  for i, run in ipairs(runs) do
    values[i] = field(run, path)
  end
  table.sort(values)
  return (values[math.floor((#values + 1) / 2)] + values[math.ceil((#values + 1) / 2)]) / 2
end

local function label(run)
  local words = {}
  for _, name in ipairs(SHOWN) do
    if run[name] ~= PLAIN[name] then
      table.insert(words, ("%s=%d"):format(name, run[name]))
    end
  end
  return #words > 0 and table.concat(words, " ") or "–"
end

local function usable(runs)
  local quiet = {}
  for _, run in ipairs(runs) do
    if run.other_cores < NOISE then
      table.insert(quiet, run)
    end
  end
  if #quiet >= 2 or #quiet == #runs then
    return quiet, ""
  end
  return runs, " ~"
end

if #arg == 0 then
  io.stderr:write "usage: medians.lua FILE…\n"
  os.exit(2)
end

local groups, order = {}, {}
for _, path in ipairs(arg) do
  for line in io.lines(path) do
    local run = cjson.decode(line)
    local key = ("%d | %d | %s"):format(run.rows, run.batch, label(run))
    if not groups[key] then
      groups[key] = {}
      table.insert(order, key)
    end
    table.insert(groups[key], run)
  end
end

local head, rule = "| rows | batch | case |", "|---:|---:|---|"
for _, column in ipairs(COLUMNS) do
  head, rule = head .. " " .. column[1] .. " |", rule .. "---:|"
end
print(head .. " runs |")
print(rule .. "---:|")
for _, key in ipairs(order) do
  local runs, mark = usable(groups[key])
  local line = "| " .. key .. mark .. " |"
  for _, column in ipairs(COLUMNS) do
    line = line .. " " .. column[3]:format(median(runs, column[2])) .. " |"
  end
  print(line .. " " .. #runs .. " |")
end
