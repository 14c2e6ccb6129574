-- What is installed works where it lies: the program, and the library for plain LuaJIT and busted.

local folder = require "spec.support.folder"
local plain = require "spec.support.plain"
local process = require "spec.support.process"

local build = os.getenv "TIDEMILL_BUILD" or "build/debug"

describe("an installation", function()
  local prefix
  setup(function()
    prefix = folder.temp "tidemill-install"
    local result = process.run { "cmake", "--install", build, "--prefix", prefix }
    assert(result.code == 0, result.stdout .. result.stderr)
  end)
  teardown(function()
    folder.remove(prefix)
  end)

  -- In the place of /usr/local, which LuaJIT knows.
  local function run(...)
    return process.run {
      argv = { ... }, cwd = prefix .. "/shop",
      env = plain.env { lua = prefix .. "/share/lua/5.1", native = prefix .. "/lib/lua/5.1" },
    }
  end

  it("has a program that needs nothing beside it", function()
    local result = process.run { argv = { prefix .. "/bin/tidemill", "init", "shop" }, cwd = prefix }
    assert.equal(0, result.code, result.stderr)
    local test = process.run { argv = { prefix .. "/bin/tidemill", "test" }, cwd = prefix .. "/shop" }
    assert.equal(0, test.code, test.stdout .. test.stderr)
  end)

  it("has a library for plain LuaJIT", function()
    local result = run("luajit", "-e", [[
      local t = require "tidemill"
      print(t.json.encode { a = t.array(), n = t.decimal "12345678901234567890" } ~= nil, #t.uuid())]])
    assert.same({ code = 0, stdout = "true\t36\n", stderr = "" }, result)
  end)

  it("has what a spec needs under plain busted", function()
    local result = run("busted", "--lua=luajit")
    assert.equal(0, result.code, result.stdout .. result.stderr)
    assert.truthy(result.stdout:find("2 successes / 0 failures / 0 errors", 1, true), result.stdout)
  end)

  it("has no editor annotations among the modules", function()
    assert.is_false(pcall(folder.read, prefix .. "/share/lua/5.1/tidemill/_meta/config.lua"))
  end)
end)
