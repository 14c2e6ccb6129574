-- Temporary folders of the specs, under $TMPDIR or /tmp.

local ffi = require "ffi"
local lfs = require "lfs"

if not pcall(ffi.typeof, "struct spec_folder_declared") then
  ffi.cdef [[
    struct spec_folder_declared { int unused; };
    char *spec_mkdtemp(char *pattern) __asm__("mkdtemp");
  ]]
end

local folder = {}

-- Makes a new folder, mode 0700, whose name begins with `prefix`; returns its path.
function folder.temp(prefix)
  local pattern = ("%s/%s-XXXXXX"):format(os.getenv "TMPDIR" or "/tmp", prefix or "tidemill-spec")
  local path = ffi.new("char[?]", #pattern + 1, pattern)
  if ffi.C.spec_mkdtemp(path) == nil then
    error("cannot make a folder like " .. pattern, 2)
  end
  return ffi.string(path)
end

-- Writes a file below `dir`, making the folders of its relative path; returns the full path.
function folder.write(dir, path, text)
  for at in path:gmatch "()/" do
    lfs.mkdir(dir .. "/" .. path:sub(1, at - 1))
  end
  local full = dir .. "/" .. path
  local file = assert(io.open(full, "wb"))
  assert(file:write(text))
  assert(file:close())
  return full
end

-- The text of a file.
function folder.read(path)
  local file = assert(io.open(path, "rb"))
  local text = assert(file:read "*a")
  file:close()
  return text
end

-- Removes a file or a folder with all that is in it; symbolic links are removed, not followed.
function folder.remove(path)
  if lfs.symlinkattributes(path, "mode") == "directory" then
    for entry in lfs.dir(path) do
      if entry ~= "." and entry ~= ".." then
        folder.remove(path .. "/" .. entry)
      end
    end
  end
  os.remove(path)
end

return folder
