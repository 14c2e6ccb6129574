-- The headers of src/core as declarations for the FFI, so that a spec never holds a copy of a struct
-- that the C code has changed since.
--
--   local lib = header.declare("core/config.h", "core/policy.h")
--
-- Knows as much of C as these headers need: no conditionals, no macros in declarations but those
-- named here. A struct's enum members are cdata: tonumber makes them comparable and printable.

local unit = require "spec.support.unit"

local header = {}

-- Words that mean nothing to the FFI.
local DROPPED = { "MILL_PRINTF%b()", "MILL_NORETURN", "_Atomic" }

local function read(path)
  local file = assert(io.open("src/" .. path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

-- Takes `static inline` functions out of the text.
local function without_bodies(text)
  return (text:gsub("static inline[^{;]*%b{}", ""))
end

local function declarations(path, seen)
  if seen[path] then
    return ""
  end
  seen[path] = true
  local text = read(path)
  local before = {}
  for included in text:gmatch '#include "(core/[^"]+)"' do
    table.insert(before, declarations(included, seen))
  end
  text = text:gsub("/%*.-%*/", " "):gsub("\\\n", " ")
  text = ("\n" .. text):gsub("\n%s*#[^\n]*", "\n")
  for _, word in ipairs(DROPPED) do
    text = text:gsub(word, " ")
  end
  return table.concat(before) .. without_bodies(text)
end

-- Declares headers of src/ and what they include, and returns the library of src/core.
function header.declare(...)
  local lib
  for _, path in ipairs { ... } do
    lib = unit.cdef(declarations(path, {}))
  end
  return lib
end

return header
