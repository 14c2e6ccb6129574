-- What a handler changes of what all handlers of its process share: it is told once, with file and line,
-- and the next delivery finds everything as it was.

local executor = require "spec.support.executor"
local process = require "spec.support.process"

-- Uses as much of the library as it can.
local GOOD = [[
  assert(("%d-%s"):format(5, "a"):rep(2) == "5-a5-a" and string.format("%q", "x") and ("x").trim == nil)
  local t = { 3, 1, 2 }
  table.sort(t)
  table.insert(t, 4)
  assert(table.concat(t, ",") == "1,2,3,4" and math.floor(2.5) == 2 and os.time() > 0 and type(t) == "table")
  assert(select("#", unpack(t)) == 4 and tostring(5) == "5" and next({ 1 }) == 1 and pcall(error, "x") == false)
  assert(coroutine.wrap(function() coroutine.yield(7) end)() == 7)
  assert(jit.status() and collectgarbage "isrunning" and debug.traceback("x"):find "stack")
  assert(io.output() == io.stdout and io.input() == io.stdin)
  assert(require "tidemill" == tidemill and require "string" == string and require "tidemill.json" == tidemill.json)
  assert(require("lazy") == "lazy" or package.loaded.lazy)
  package.loaded.lazy = nil
  tidemill.sleep(0)
  tidemill.log.info("good")
  print("good", 1)
  assert(tidemill.json.encode { a = tidemill.null } == '{"a":null}')
  local ok, wrong = pcall(ctx.publish, ctx, "not a topic", {})
  assert(not ok and wrong:find "is not a topic", wrong)
  ctx:publish("a", { 1 })
  local ok, wrong = pcall(tidemill.sleep, -1)
  assert(not ok and wrong:find "seconds", wrong)
]]

local function start(bad, options)
  options = options or {}
  local function handler(body)
    return ('local tidemill = require "tidemill"\nreturn function(payload, ctx)\n%s\nend\n'):format(body)
  end
  return executor.start {
    config = options.config or [[return { subscribe = { t = { "bad", "good",
      collect = function() collectgarbage() collectgarbage() end } } }]],
    handlers = { bad = handler(bad), good = handler(GOOD), lazy = "return 'lazy'", late = options.late },
    descriptors = options.descriptors,
  }
end

local function assert_good(run)
  local outcome = run:handle { to = "good" }
  assert.equal("done", outcome.kind, outcome.error)
  assert.equal('[{"topic":"a","message":[1]}]', outcome.publications)
end

-- name of the change → the handler's body
local changes = {
  { "string.format", "string.format = function() return 'mine' end assert(string.format() == 'mine')" },
  { "string.rep", "string.rep = nil" },
  { "table.sort", "table.sort = nil table.sort = 5" },
  { "math.floor", "math.floor = math.ceil" },
  { "os.time", "os.time = nil os.time = function() return -1 end" },
  { "io.open", "io.open = function() end" },
  { "coroutine.wrap", "coroutine.wrap = error" },
  { "debug.traceback", "debug.traceback = error" },
  { "package.path", "package.path = '' " },
  { "package.loaders", "package.loaders = {}" },
  { "type", "type = payload.type or 'order'" },
  { "next", "next = 5" },
  { "pcall", "pcall, error = 1, 2" },
  { "string", "string = 'text'" },
  { "tidemill.sleep", "tidemill.sleep = error" },
  { "tidemill.log.info", "tidemill.log.info = error" },
  { "tidemill.json.encode", "tidemill.json.encode = error" },
  { "the metatable of strings, __index", "getmetatable('').__index = function() return 'mine' end" },
  { "the metatable of strings, __add", "getmetatable('').__add = function() return 5 end assert('a' + 'b' == 5)" },
  { "the metatable of JSON arrays, __index", [[
    local mt = getmetatable(tidemill.array())
    mt.__index = error assert(mt.__index == error)]] },
  { "the metatable of strings", "debug.setmetatable('', nil)" },
  { "the metatable of numbers", "debug.setmetatable(0, { __index = function() return 1 end }) assert((5).x == 1)" },
  { "the metatable of functions", "debug.setmetatable(print, { __index = {} })" },
  { "the metatable of _G", "debug.setmetatable(_G, nil)" },
  { "the metatable of table", "debug.setmetatable(table, {})" },
}

describe("a handler that changes the library", function()
  after_each(executor.stop_all)

  for _, change in ipairs(changes) do
    it("is told so once, and the others have it as it was: " .. change[1], function()
      local run = start("\n" .. change[2])
      for _ = 1, 2 do
        local outcome = run:handle { to = "bad" }
        assert.equal("done", outcome.kind, outcome.error)
        assert_good(run)
      end
      local found = 0
      for _, line in ipairs(run:log "library_changed") do
        if line:find('name="?' .. change[1]:gsub("%p", "%%%0") .. '"? ') then
          found = found + 1
          assert.matches("level=warn .* subscriber=bad .* at=handlers/bad.lua:[45]$", line)
        end
      end
      assert.equal(1, found, run.process:stderr())
    end)
  end

  it("sees its own change until it waits", function()
    local run = start [[
      string.format = function() return "mine" end
      assert(string.format() == "mine" and ("x"):format() == "mine")
      tidemill.sleep(0)
      assert(string.format("%d", 5) == "5")
    ]]
    local outcome = run:handle { to = "bad" }
    assert.equal("done", outcome.kind, outcome.error)
  end)

  it("may add to it for good, and is told that all share it", function()
    local run = start [[
      if not string.shout then
        function string.shout(s) return s:upper() end
      end
      assert(("a"):shout() == "A")
    ]]
    for _ = 1, 2 do
      local outcome = run:handle { to = "bad" }
      assert.equal("done", outcome.kind, outcome.error)
    end
    assert.equal(1, #run:log "library_changed")
    assert.matches("name=string.shout at=handlers/bad.lua:4$", run:log("library_changed")[1])
  end)

  it("while modules are loaded changes it for all, and that stays", function()
    local run = start("assert(('a'):shout() == 'A' and math.floor(1) == 'floor')", {
      config = [[
        function string.shout(s) return s:upper() end
        local floor = math.floor
        math.floor = function(x) if x == 1 then return "floor" end return floor(x) end
        return { subscribe = { t = { "bad", "good" } } }]],
    })
    for _ = 1, 2 do
      local outcome = run:handle { to = "bad" }
      assert.equal("done", outcome.kind, outcome.error)
      assert_good(run)
    end
    assert.equal(2, #run:log "library_changed")
    assert.matches("name=math.floor at=config.lua:3$", run:log("library_changed")[2])
  end)
end)

-- What is contained without a word: what is wrong shows in the handler itself, or nowhere.
local states = {
  ["stops the garbage collector"] = "collectgarbage 'stop' assert(not collectgarbage 'isrunning')",
  ["makes the garbage collector lazy"] = [[
    collectgarbage("setpause", 100000)
    collectgarbage("setstepmul", 1)
    collectgarbage("setpause", 100000)]],
  ["switches the compiler off"] = "jit.off() assert(not jit.status())",
  ["switches the compiler off for one function"] = "local function f() return 1 end jit.off(f) jit.on(f) f()",
  ["leaves a hook behind"] = [[
    local lines = 0
    debug.sethook(function()
      lines = lines + 1
      if lines > 10 then error 'the hook' end
    end, 'l')]],
  ["redirects io.write"] = "io.output(os.tmpname()) io.write 'x'",
  ["redirects io.write and closes the file"] = "io.output(os.tmpname()) io.close()",
  ["redirects io.read"] = "io.input '/dev/null' io.input():close()",
  ["closes standard output"] = "assert(not io.stdout:close()) assert(not io.close())",
  ["sets the buffer of standard output"] = "io.stdout:setvbuf('full', 1024 * 1024)",
  ["empties package.loaded"] = "for name in pairs(package.loaded) do package.loaded[name] = nil end",
  ["forgets the library"] = "package.loaded.tidemill, package.loaded['tidemill.host'], package.loaded.string = nil",
  ["sets a metatable of _G"] = "assert(not pcall(setmetatable, _G, {})) getmetatable(_G).__index = error",
  ["sets a metatable of a library"] = "assert(not pcall(setmetatable, string, {}))",
  ["reaches for the registry"] = [[
    local ok, wrong = pcall(function() debug.getregistry() end)
    assert(not ok and wrong:find("handlers/bad.lua:4: debug.getregistry", 1, true), wrong)]],
  ["reaches for the methods of all contexts"] = [[
    assert(not pcall(setmetatable, ctx, {}))
    getmetatable(ctx).__index, getmetatable(ctx).publish = error, error
    ctx.publish = error]],
  ["changes how all is compiled"] = [[
    local ok, wrong = pcall(function() jit.opt.start "hotloop=1" end)
    assert(not ok and wrong:find("handlers/bad.lua:4: jit.opt.start", 1, true), wrong)]],
  ["opens files until there are no more"] = [[
    local files = {}
    for i = 1, 1e5 do
      local file, wrong, code = io.open "/dev/null"
      if not file then
        assert(code == 24, wrong)
        break
      end
      files[i] = file
    end
    assert(#files > 10 and #files < 1e5)]],
}

describe("a handler that", function()
  after_each(executor.stop_all)

  for name, body in pairs(states) do
    it(name .. " changes nothing for the others", function()
      local run = start("\n" .. body)
      for _ = 1, 2 do
        local outcome = run:handle { to = "bad" }
        assert.equal("done", outcome.kind, outcome.error)
        assert_good(run)
      end
      assert.same({}, run:log "not_mended")
    end)
  end

  it("leaves nothing of what it stopped while it was loaded", function()
    local run = start("", { config = "collectgarbage 'stop' return { subscribe = { t = { 'bad', 'good' } } }" })
    assert_good(run)
  end)

  it("fails for want of files takes none from the next, whatever opened them", function()
    local run = start([[
      local files = {}
      for i = 1, payload.n do files[i] = assert(io.tmpfile()) end
    ]], { descriptors = 200 })
    for _ = 1, 2 do
      assert.matches("Too many open files", run:handle({ to = "bad", payload = '{"n": 1000}' }).error)
      local outcome = run:handle { to = "bad", payload = '{"n": 50}' }
      assert.equal("done", outcome.kind, outcome.error)
    end
  end)

  it("leaves pipes to programs open neither waits for them nor leaves them running", function()
    local run = start [[
      local pipes = {}
      for i = 1, 3 do pipes[i] = io.popen "exec sleep 1000" end
      local quick = io.popen "echo five"
      ctx:discard(quick:read "*l" .. tostring(quick:close()))
    ]]
    assert.equal("fivetrue", run:handle({ to = "bad" }).error)
    local function sleeps()
      local count = 0
      for _, child in ipairs(process.children()) do
        count = count + (child.name == "sleep" and 1 or 0)
      end
      return count
    end
    assert.equal(3, sleeps())
    for _ = 1, 3 do
      assert_good(run)
      assert.equal("done", run:handle({ to = "collect" }).kind)
    end
    assert.equal(0, sleeps())
  end)

  it("has finalizers that raise is named in the log, and nobody else is reached by them", function()
    local run = start [[
      local ffi = require "ffi"
      for _ = 1, 3 do
        ffi.gc(ffi.new "int[1]", function() error "no luck" end)
      end
      local kind = ffi.metatype(ffi.typeof "struct { int a; }", { __gc = function() error "no luck" end })
      kind()
      getmetatable(newproxy(true)).__gc = function() error "no luck" end
    ]]
    assert.equal("done", run:handle({ to = "bad" }).kind)
    for _ = 1, 2 do
      assert_good(run)
      assert.equal("done", run:handle({ to = "collect" }).kind)
    end
    assert.equal(5, #run:log "finalizer_failed")
    assert.matches('error="handlers/bad.lua:%d: no luck"$', run:log("finalizer_failed")[1])
  end)

  it("forks has one executor as before: the copy ends, and says nothing", function()
    local run = start [[
      local ffi = require "ffi"
      ffi.cdef "int fork(void); int getpid(void); int waitpid(int, int *, int);"
      local parent = ffi.C.getpid()
      local pid = ffi.C.fork()
      if ffi.C.getpid() == parent then
        local status = ffi.new "int[1]"
        ffi.C.waitpid(pid, status, 0)
        ctx:discard("the copy ended with " .. status[0] / 256)
      elseif payload.sleep then
        tidemill.sleep(1)
      end
    ]]
    for _, payload in ipairs { "{}", '{"sleep": true}' } do
      assert.equal("the copy ended with 1", run:handle({ to = "bad", payload = payload }).error)
      assert_good(run)
    end
  end)
end)

describe("what a handler starts", function()
  after_each(executor.stop_all)

  local function descriptors(run)
    local list = {}
    for fd, target in (run:handle { to = "bad" }).error:gmatch "(%d+)=(%S+)" do
      list[tonumber(fd)] = target
    end
    return list
  end

  it("has none of the program's descriptors, nor any that was open before it started", function()
    local run = start [==[
      local pipe = io.popen [[ls -l /proc/self/fd | sed -n 's/.* \([0-9]*\) -> \(.*\)/\1=\2/p']]
      ctx:discard(pipe:read "*a")
    ]==]
    local list = descriptors(run)
    assert.equal("/dev/null", list[0])
    for fd, target in pairs(list) do
      -- The one above is the folder that ls lists.
      assert.is_true(fd <= 2 or target:find "^/proc/" ~= nil, fd .. "=" .. target)
    end
  end)

  it("holds no descriptor in the executor that its starter left open", function()
    local run = executor.start {
      config = [[return { subscribe = { t = { bad = function(_, ctx)
        local ffi = require "ffi"
        ffi.cdef "long readlink(const char *, char *, size_t);"
        local list, buffer = {}, ffi.new "char[256]"
        for fd = 0, 200 do
          local n = ffi.C.readlink("/proc/self/fd/" .. fd, buffer, 256)
          if n > 0 then list[#list + 1] = fd .. "=" .. ffi.string(buffer, n):gsub("%s", "_") end
        end
        ctx:discard(table.concat(list, " "))
      end } } }]],
      open = { 7, 99 },
    }
    local list = descriptors(run)
    assert.is_nil(list[99])
    for fd, target in pairs(list) do
      -- The socket, and what libuv opened after the start.
      assert.is_true(fd <= 3 or target:find "^anon_inode:" ~= nil or target:find "^pipe:" ~= nil
        or target == "/dev/null" or target:find "^socket:" ~= nil and fd ~= 7, fd .. "=" .. target)
      assert.is_nil(target:find "hostname")
    end
  end)
end)

describe("a program that a handler starts and does not wait for", function()
  local tidemill = require "spec.support.tidemill"
  local journal = require "spec.support.journal"
  after_each(tidemill.close_all)

  local function sleeps()
    local count = 0
    for _, child in ipairs(process.children()) do
      count = count + (child.name == "sleep" and 1 or 0)
    end
    return count
  end

  local BODY = [[
    os.execute "sleep 1000 & sleep 1000 </dev/null >/dev/null 2>&1 &"
    journal.note "started"
    if payload.hang then io.popen("sleep 1000"):read() end
  ]]

  local function start_app()
    local app = journal.app { handlers = { work = BODY },
      config = { subscribe = { t = "work" }, timeout_secs = 1, kill_grace_secs = 0.1, max_attempts = 1 } }
    app:start()
    return app
  end

  it("ends with an executor that is killed", function()
    local app = start_app()
    journal.wait_for_status(app, journal.publish(app, "t", '{"hang": true}'), "failed")
    app:wait_until(function() return sleeps() == 0 end, 30, "they have ended")
  end)

  it("has no descriptor of the worker's", function()
    local app = journal.app { handlers = { work = [[
      local pipe = io.popen "ls -l /proc/self/fd"
      for line in pipe:lines() do
        local fd, target = line:match " (%d+) %-> (.*)$"
        if fd then journal.note(fd .. " " .. target) end
      end
      pipe:close()
    ]] }, config = { subscribe = { t = "work" } } }
    app:start()
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
    local list = {}
    for _, line in ipairs(journal.notes(app)) do
      local fd, target = line:match "^(%d+) (.*)$"
      list[tonumber(fd)] = target
    end
    -- The fourth is the folder that ls lists.
    assert.equal(3, #list)
    assert.equal("/dev/null", list[0])
    assert.matches("^pipe:", list[1])
    assert.matches("^/proc/", list[3])
  end)

  it("ends with `tidemill call`", function()
    local app = journal.app { handlers = { work = BODY }, config = {}, database = false }
    app:must_run("call", "work")
    app:wait_until(function() return sleeps() == 0 end, 30, "they have ended")
  end)

  it("ends with an executor that ends in order", function()
    local app = start_app()
    journal.wait_for_status(app, journal.publish(app, "t"), "done")
    assert.equal(2, sleeps())
    app:stop()
    app:wait_until(function() return sleeps() == 0 end, 30, "they have ended")
  end)
end)

describe("a handler that leaves descriptors open that nothing closes", function()
  local tidemill = require "spec.support.tidemill"
  local journal = require "spec.support.journal"
  after_each(tidemill.close_all)

  it("has its executor replaced, so that the next can open files", function()
    local app = tidemill.app {
      config = { executors = 1, poll_secs = 3600, max_attempts = 1, subscribe = { bad = "bad", good = "good" } },
      handlers = {
        bad = [[
          local ffi = require "ffi"
          ffi.cdef "int open(const char *, int, ...);"
          return function()
            while ffi.C.open("/dev/null", 0) >= 0 do end
            assert(io.open "/dev/null")
          end]],
        good = "return function() assert(io.open '/dev/null'):close() end",
      },
    }
    local worker = app:start()
    for _ = 1, 2 do
      local from = worker:position()
      local failed = journal.wait_for_status(app, journal.publish(app, "bad"), "failed")
      assert.matches("Too many open files", failed.error)
      worker:wait_for('event=executor_recycled pid=%d+ reason="no more files can be opened"', 30, from)
      journal.wait_for_status(app, journal.publish(app, "good"), "done")
    end
    app:stop()
    assert.is_nil(worker:stderr():find "executor_died")
  end)
end)
