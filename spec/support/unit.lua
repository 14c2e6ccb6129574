-- The C functions of src/core, called through the FFI: the place to declare them.
--
--   local lib = unit.cdef [[ uint32_t mill_policy_backoff(uint32_t attempts, uint32_t base); ]]
--   assert.equal(10, lib.mill_policy_backoff(1, 10))
--
-- Spec files run in one process and may declare the same structure; a declaration given before,
-- word for word, is skipped.

local ffi = require "ffi"

local unit = {}

local function absolute(path)
  return path:sub(1, 1) == "/" and path or require("lfs").currentdir() .. "/" .. path
end

local build = os.getenv "TIDEMILL_BUILD" or "build/debug"
unit.path = absolute(os.getenv "TIDEMILL_UNIT" or build .. "/libtidemill_unit.so")

-- The FFI keeps its declarations when busted reloads this module, so this memory must last as long.
local registry = debug.getregistry()
registry["tidemill.spec.declared"] = registry["tidemill.spec.declared"] or {}
local declared = registry["tidemill.spec.declared"]

-- The declarations of a text, comments left out, split at the semicolons outside of braces.
local function declarations(text)
  text = text:gsub("/%*.-%*/", " "):gsub("//[^\n]*", " "):gsub("%s+", " ")
  local list, start, depth = {}, 1, 0
  for at, sign in text:gmatch "()([{};])" do
    if sign == "{" then
      depth = depth + 1
    elseif sign == "}" then
      depth = depth - 1
    elseif depth == 0 then
      table.insert(list, (text:sub(start, at):gsub("^ ", "")))
      start = at + 1
    end
  end
  local rest = text:sub(start):gsub("^ +", "")
  if rest ~= "" then
    error("a declaration does not end in `;`: " .. rest, 3)
  end
  return list
end

-- Declares C functions and types, and returns the library they are called on.
function unit.cdef(text)
  for _, declaration in ipairs(declarations(text)) do
    if not declared[declaration] then
      local ok, err = pcall(ffi.cdef, declaration)
      if not ok then
        error(("%s\nin: %s"):format(err, declaration), 2)
      end
      declared[declaration] = true
    end
  end
  return unit.library()
end

function unit.library()
  if not unit.loaded then
    local ok, lib = pcall(ffi.load, unit.path)
    if not ok then
      error(("%s\nbuild it first (make build), or name it in TIDEMILL_UNIT"):format(lib), 2)
    end
    unit.loaded = lib
  end
  return unit.loaded
end

return unit
