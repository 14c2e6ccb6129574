-- `tidemill test`: an app's specs, with nothing but the program and busted.

local folder = require "spec.support.folder"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

describe("test", function()
  local dir
  before_each(function()
    dir = folder.temp "tidemill-test"
  end)
  after_each(function()
    folder.remove(dir)
  end)

  local function run(...)
    return process.run { argv = { tidemill.binary, ... }, cwd = dir }
  end

  -- One spec file with this body.
  local function with_spec(body)
    folder.write(dir, "spec/app_spec.lua", 'local testing = require "tidemill.testing"\n' .. body)
  end

  it("passes what init wrote, by the commands that init prints", function()
    local told = run("init", "my shop").stdout:match "\nnext:\n(.-)\n  [^\n]* dev "
    assert.matches("^  cd 'my shop'\n  .+ test +# ", told)
    local result = process.run { argv = { "sh", "-e", "-c", told }, cwd = dir }
    assert.equal(0, result.code, result.stderr)
    assert.matches("2 successes / 0 failures / 0 errors / 0 pending", result.stdout)
  end)

  it("fails with the handler's error and its place", function()
    folder.write(dir, "handlers/deep/ship.lua", "return function(order)\n  error('no stock of ' .. order.sku)\nend\n")
    with_spec [[
      it("ships", function()
        local run = testing.run("deep.ship", { sku = "a1" })
        assert.equal("done", run.outcome, run.error)
      end)]]
    local result = run "test"
    assert.equal(1, result.code)
    assert.truthy(result.stdout:find("0 successes / 1 failure", 1, true), result.stdout)
    assert.truthy(result.stdout:find("./handlers/deep/ship.lua:2: no stock of a1\nstack traceback:\n\t[C]: in function "
      .. "'error'\n\t./handlers/deep/ship.lua:2: in function 'handler'\n", 1, true), result.stdout)
    assert.falsy(result.stdout:find("tidemill/", 1, true), result.stdout)
  end)

  it("hands everything that follows to busted", function()
    with_spec [[
      it("one", function() end)
      it("two", function() error "two" end)]]
    local result = run("test", "--filter=one", "-o", "TAP", "spec/app_spec.lua")
    assert.same({ code = 0, stdout = "ok 1 - one\n1..1\n", stderr = "" }, result)
    assert.equal(1, run("test", "--filter=two").code)
    assert.matches("^usage: tidemill test ", run("test", "--help").stdout)
    assert.equal(run("help", "test").stdout, run("test", "-h").stdout)
  end)

  it("works in the folder of the config", function()
    run("init", "shop")
    local result = process.run { argv = { tidemill.binary, "-c", dir .. "/shop/config.lua", "test" }, cwd = "/" }
    assert.equal(0, result.code, result.stdout .. result.stderr)
    assert.truthy(result.stdout:find("2 successes", 1, true))
    result = run("-c", "nothere/config.lua", "test")
    assert.same({ 1, "tidemill: cannot go to the folder nothere: No such file or directory\n" },
      { result.code, result.stderr })
  end)

  it("says that there are no specs", function()
    local said = {
      code = 1, stdout = "",
      stderr = "tidemill: there is no folder spec here: specs stand in spec/NAME_spec.lua, see docs/handlers.md, and "
        .. "`tidemill init` writes one\n",
    }
    assert.same(said, run "test")
    assert.same(said, run("test", "--filter=one"))
    folder.write(dir, "mine/a_spec.lua", "it('is found', function() end)")
    assert.equal(0, run("test", "mine").code)
    assert.equal(0, run("test", "mine/a_spec.lua").code)
  end)

  it("says how busted is installed", function()
    local result = process.run {
      argv = { tidemill.binary, "test" }, cwd = dir, env = { LUA_PATH = "/nowhere/?.lua" },
    }
    assert.same({
      code = 1, stdout = "",
      stderr = "tidemill: busted is not installed, which runs the specs: apt-get install lua-busted, or luarocks "
        .. "--lua-version=5.1 install busted\n",
    }, result)
  end)
end)
