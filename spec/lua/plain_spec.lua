-- `require "tidemill"` in a plain luajit process: no executor, no runtime, no database.

local plain = require "spec.support.plain"
local process = require "spec.support.process"

-- Runs a script in a luajit process of its own, with the library of this tree and build.
local function luajit(script)
  return process.run {
    argv = { "luajit", "-e", script },
    cwd = "/",
    env = plain.env(),
  }
end

local function output_of(script)
  local result = luajit(script)
  assert.equal(0, result.code, result.stderr)
  return result.stdout, result.stderr
end

describe("require tidemill in a plain program", function()
  it("has values, JSON and clocks", function()
    assert.equal('[1,[],null,12345678901234567890,"é"]\n', (output_of [[
      local t = require "tidemill"
      assert(t.now() > 1700000000 and #t.uuid() == 36)
      print(t.json.encode(t.array { 1, t.array(), t.null, t.decimal "12345678901234567890", "é" }))
    ]]))
  end)

  it("writes log lines to standard error", function()
    local _, lines = output_of [[require "tidemill".log.warn("low", { level = 1, n = 2 })]]
    assert.matches("^time=%S+ level=warn event=log text=low level_=1 n=2\n$", lines)
  end)

  it("says what to do instead of a wait", function()
    for _, call in ipairs { "publish('t')", "sleep(0)" } do
      local text = output_of(([[
        local t = require "tidemill"
        local ok, err = pcall(function() t.%s end)
        io.write(tostring(ok), " ", tostring(err))
      ]]):format(call))
      assert.matches('^false .*:2: `%w+` works only inside of a handler: ', text)
    end
    -- In a coroutine too: nobody would ever resume it.
    assert.matches("^false .*inside of a handler", (output_of [[
      local t = require "tidemill"
      io.write(tostring(coroutine.wrap(function() return pcall(t.sleep, 0) end)()))
      io.write(" ", select(2, pcall(t.sleep, 0)))
    ]]))
  end)

  it("changes nothing of the standard library", function()
    assert.equal("same\n", (output_of [[
      local before = { print, os.exit, coroutine.resume, coroutine.wrap, os.setlocale, getmetatable(_G) }
      require "tidemill"
      local after = { print, os.exit, coroutine.resume, coroutine.wrap, os.setlocale, getmetatable(_G) }
      for i = 1, 6 do assert(before[i] == after[i], i) end
      print "same"
    ]]))
  end)
end)
