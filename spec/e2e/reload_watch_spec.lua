-- Reloads that nobody asks for: files change.

local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local journal = require "spec.support.journal"
local lfs = require "lfs"
local process = require "spec.support.process"
local relay = require "spec.support.relay"
local reloading = require "spec.support.reloading"
local tidemill = require "spec.support.tidemill"

after_each(tidemill.close_all)

local NOTE = [[ journal.note(ctx.generation .. " %s") ]]

local function app_with(config, handlers)
  config = config or {}
  config.watch = true
  return reloading.app(config, handlers or { work = NOTE:format "old" })
end

local function run_one(app)
  journal.publish(app, "t")
  journal.wait_until_finished(app)
end

local function last_note(app)
  local notes = journal.notes(app)
  return notes[#notes]
end

-- Does `change` and waits for the reload that it sets off.
local function changed(worker, change)
  local from = worker:position()
  change()
  local ok, line = reloading.wait(worker, from)
  if not ok then
    error("the reload failed: " .. line, 2)
  end
end

-- The same, and returns how it failed.
local function broken(worker, change)
  local from = worker:position()
  change()
  local ok, line = reloading.wait(worker, from)
  assert.is_nil(ok)
  return line
end

local function count(worker, event)
  local _, times = worker:stderr():gsub("event=" .. event, "")
  return times
end

-- Saves as editors do: a new file takes the place of the old one.
local function replace(app, path, text)
  app:write(path .. ".new~", text)
  assert(os.rename(app.dir .. "/" .. path .. ".new~", app.dir .. "/" .. path))
end

local function handler_text(body)
  return ([[
    local journal = require "journal"
    local tidemill = require "tidemill"
    return journal.recorded(function(payload, ctx) %s end)
  ]]):format(body)
end

for _, how in ipairs { "events", "poll" } do
  describe("a change found by " .. how, function()
    local function start(app)
      return app:start { env = { TIDEMILL_WATCH = how == "poll" and "poll" or false } }
    end

    it("of a handler is a reload, whose reason is the file", function()
      local app = app_with()
      local worker = start(app)
      run_one(app)
      changed(worker, function()
        app:write("handlers/work.lua", handler_text(NOTE:format "new"))
      end)
      worker:wait_for("event=reload_begun generation=2 reason=" .. (app.dir .. "/handlers/work.lua"):gsub("%p", "%%%0"))
      run_one(app)
      assert.same({ "1 old", "2 new" }, journal.notes(app))
    end)

    it("of a handler that is replaced, once and again and again", function()
      local app = app_with()
      local worker = start(app)
      for round = 1, 3 do
        local before = count(worker, "reloaded")
        for n = 1, round do
          replace(app, "handlers/work.lua", handler_text(NOTE:format(round .. "." .. n)))
        end
        app:wait_until(function()
          run_one(app)
          return last_note(app):find(round .. "." .. round, 1, true)
        end)
        assert.truthy(count(worker, "reloaded") - before <= 2)
      end
    end)

    it("of config.lua, of a new handler, of one that goes and comes back", function()
      local app = app_with()
      local worker = start(app)
      changed(worker, function()
        reloading.set(app, { watch = true, batch = 7 })
      end)
      local line = broken(worker, function()
        reloading.set(app, { watch = true, subscribe = { t = { "work", "tell" } } })
      end)
      assert.truthy(line:find("module `tell` not found", 1, true), line)
      changed(worker, function()
        app:write("handlers/tell.lua", handler_text [[ journal.note "told" ]])
      end)
      run_one(app)
      assert.equal(2, journal.count(app, "done"))
      line = broken(worker, function()
        os.remove(app.dir .. "/handlers/work.lua")
      end)
      assert.truthy(line:find("module `work` not found", 1, true), line)
      changed(worker, function()
        app:write("handlers/work.lua", handler_text(NOTE:format "back"))
      end)
      run_one(app)
      assert.equal(4, journal.count(app, "done"))
    end)

    it("of a link to a release", function()
      local app = app_with()
      local function release(number)
        local dir = ("releases/%d/"):format(number)
        app:write(dir .. "handlers/journal.lua", folder.read(app.dir .. "/handlers/journal.lua"))
        app:write(dir .. "handlers/work.lua", handler_text(NOTE:format("release " .. number)))
        app:write(dir .. "config.lua", folder.read(app.config_path))
      end
      local function switch(number)
        process.run { "ln", "-s", "releases/" .. number, app.dir .. "/next" }
        assert(os.rename(app.dir .. "/next", app.dir .. "/current"))
      end
      release(1)
      release(2)
      switch(1)
      -- The link that is named is itself reached through another.
      process.run { "ln", "-s", app.dir .. "/current", app.dir .. "/app" }
      app.config_path = app.dir .. "/app/config.lua"
      local worker = start(app)
      run_one(app)
      for number = 2, 4 do
        release(number)
        changed(worker, function()
          switch(number)
        end)
        run_one(app)
      end
      assert.same({ "1 release 1", "2 release 2", "3 release 3", "4 release 4" }, journal.notes(app))
      -- In the release itself, too.
      changed(worker, function()
        app:write("releases/4/handlers/work.lua", handler_text(NOTE:format "mended"))
      end)
      process.run { "rm", "-r", app.dir .. "/releases/1", app.dir .. "/releases/2" }
      run_one(app)
      assert.equal("5 mended", last_note(app))
    end)
  end)
end

describe("a library", function()
  it("of any folder, which a handler requires, is watched", function()
    local app = app_with()
    app:write("shared/words.lua", [[ return { word = "old" } ]])
    app:write("handlers/work.lua", handler_text [[ journal.note(require "words".word) ]])
    app:write("config.lua", ([[
      package.path = "%s/shared/?.lua;" .. package.path
      require "words"
      return { executors = 1, poll_secs = 3600, subscribe = { t = "work" } }
    ]]):format(app.dir))
    local worker = app:start()
    run_one(app)
    changed(worker, function()
      app:write("shared/words.lua", [[ return { word = "new" } ]])
    end)
    run_one(app)
    local line = broken(worker, function()
      app:write("shared/words.lua", "return {\n\nword = }")
    end)
    assert.truthy(line:find "shared/words.lua:3: unexpected symbol near '}'", line)
    changed(worker, function()
      app:write("shared/words.lua", [[ return { word = "newest" } ]])
    end)
    run_one(app)
    assert.same({ "old", "new", "newest" }, journal.notes(app))
  end)

  it("that is required while a handler runs is watched from then on", function()
    local app = app_with({}, { work = [[ journal.note(require "lazy.words") ]] })
    app:write("config.lua", ([[
      package.path = "%s/shared/?.lua;" .. package.path
      return { executors = 1, poll_secs = 3600, subscribe = { t = "work" } }
    ]]):format(app.dir))
    app:write("shared/lazy/words.lua", [[ return "old" ]])
    local worker = app:start()
    run_one(app)
    changed(worker, function()
      app:write("shared/lazy/words.lua", [[ return "new" ]])
    end)
    run_one(app)
    assert.same({ "old", "new" }, journal.notes(app))
  end)

  it("that is not there yet is waited for", function()
    local app = app_with()
    app:write("config.lua", ([[
      package.path = "%s/shared/?.lua;" .. package.path
      return { executors = 1, poll_secs = 3600, subscribe = { t = "work" } }
    ]]):format(app.dir))
    local worker = app:start()
    local line = broken(worker, function()
      app:write("handlers/work.lua", [[ require "deep.words" ]]
        .. handler_text [[ journal.note(require "deep.words") ]])
    end)
    assert.truthy(line:find("module `deep.words` not found", 1, true), line)
    changed(worker, function()
      app:write("shared/deep/words.lua", [[ return "here" ]])
    end)
    run_one(app)
    assert.same({ "here" }, journal.notes(app))
  end)
end)

describe("the folder of handlers", function()
  it("may be replaced as a whole, and have new folders in it", function()
    local app = app_with()
    local worker = app:start()
    local module = folder.read(app.dir .. "/handlers/journal.lua")
    for n = 1, 3 do
      app:write("other/journal.lua", module)
      app:write("other/work.lua", handler_text(NOTE:format(n)))
      changed(worker, function()
        assert(os.rename(app.dir .. "/handlers", app.dir .. "/old" .. n))
        assert(os.rename(app.dir .. "/other", app.dir .. "/handlers"))
      end)
      run_one(app)
    end
    assert.same({ "2 1", "3 2", "4 3" }, journal.notes(app))
    changed(worker, function()
      app:write("handlers/deep/er/tell.lua", "return function() end")
    end)
    changed(worker, function()
      app:write("handlers/deep/er/tell.lua", "return function() return 1 end")
    end)
  end)

  it("may have links to itself and to folders above it", function()
    local app = app_with()
    for name, target in pairs { self = ".", other = ".", up = "..", round = "../handlers", deep = "self/other" } do
      assert(lfs.link(target, app.dir .. "/handlers/" .. name, true))
    end
    reloading.write(app, "below", NOTE:format "below")
    reloading.set(app, { watch = true, subscribe = { t = { "work", "self.other.self.round.self.other.below" } } })
    local worker = app:start()
    for _, text in ipairs { "new", "newer" } do
      changed(worker, function()
        reloading.write(app, "below", NOTE:format(text))
      end)
    end
    app:stop(worker)
  end)

  it("is another one after the config says so", function()
    local app = app_with()
    local worker = app:start()
    app:write("mine/journal.lua", folder.read(app.dir .. "/handlers/journal.lua"))
    app:write("mine/work.lua", handler_text(NOTE:format "mine"))
    changed(worker, function()
      reloading.set(app, { watch = true, handlers = "mine" })
    end)
    run_one(app)
    changed(worker, function()
      app:write("mine/work.lua", handler_text(NOTE:format "still mine"))
    end)
    run_one(app)
    assert.same({ "2 mine", "3 still mine" }, journal.notes(app))
  end)
end)

describe("no reload", function()
  it("comes from a touch, from other files, or from what handlers write", function()
    local app = app_with({}, { work = [[
      for n = 1, 20 do
        local file = io.open("handlers/log.txt", "a") file:write(n, "\n") file:close()
      end
    ]] })
    local worker = app:start()
    for _ = 1, 20 do
      run_one(app)
      app:write("app.log", tostring(clock.now()))
      app:write("handlers/.work.lua.swp", "x")
      app:write("handlers/work.lua~", "x")
      lfs.touch(app.config_path)
      lfs.touch(app.dir .. "/handlers/work.lua")
      app:write("handlers/work.lua", reloading.read(app, "work"))
    end
    -- What comes after all that is the first.
    changed(worker, function()
      app:write("handlers/work.lua", handler_text(NOTE:format "new"))
    end)
    assert.equal(1, count(worker, "reload_begun"))
  end)

  it("comes from a handler that the config has just let go of", function()
    local app = app_with({ subscribe = { t = { "work", "other" } } }, { work = NOTE:format "work", other = "" })
    local worker = app:start()
    run_one(app)
    changed(worker, function()
      reloading.set(app, { watch = true })
    end)
    for n = 1, 2 do
      changed(worker, function()
        reloading.write(app, "work", NOTE:format(n))
      end)
    end
    assert.is_nil(worker:stderr():find("other.lua", 1, true))
    assert.equal(3, count(worker, "reloaded"))
  end)

  it("comes with `watch = false`, until that is changed", function()
    local app = app_with()
    reloading.set(app, { watch = false })
    local worker = app:start()
    app:write("handlers/work.lua", handler_text(NOTE:format "unseen"))
    run_one(app)
    clock.sleep(0.5)
    run_one(app)
    assert.same({ "1 old", "1 old" }, journal.notes(app))
    reloading.set(app, { watch = true })
    reloading.must_reload(app, worker)
    run_one(app)
    changed(worker, function()
      app:write("handlers/work.lua", handler_text(NOTE:format "seen"))
    end)
    run_one(app)
    assert.same({ "1 old", "1 old", "2 unseen", "3 seen" }, journal.notes(app))
  end)
end)

describe("files that change all the time", function()
  it("cause few reloads, and the last state counts", function()
    local app = app_with()
    local worker = app:start()
    local started = clock.now()
    for n = 1, 400 do
      replace(app, "handlers/work.lua", handler_text(NOTE:format(n)))
      clock.sleep(0.01)
    end
    local secs = clock.now() - started
    app:wait_until(function()
      run_one(app)
      return last_note(app):find " 400$"
    end)
    local reloads = count(worker, "reload_begun")
    assert.truthy(reloads <= 4 * secs + 2, ("%d reloads in %g s"):format(reloads, secs))
    reloading.wait_for_executors(app, worker, 1)
  end)

  it("in the middle of a reload make one more behind it", function()
    local app = app_with()
    local worker = app:start()
    local from = worker:position()
    local slow = "while not io.open 'loaded' do end\n"
    app:write("handlers/work.lua", slow .. handler_text(NOTE:format "first"))
    worker:wait_for("event=reload_begun", 30, from)
    app:write("handlers/work.lua", handler_text(NOTE:format "second"))
    clock.sleep(0.3)
    app:write("handlers/work.lua", handler_text(NOTE:format "third"))
    clock.sleep(0.3)
    app:write("loaded", "")
    worker:wait_for("event=reloaded generation=3", 30, from)
    app:wait_until(function()
      run_one(app)
      return last_note(app):find "third"
    end)
    -- Where the machine is slow, the third state is seen after the second reload has begun.
    assert.truthy(count(worker, "reload_begun") <= 3)
  end)
end)

describe("a file that is written in two steps", function()
  it("fails at most once, and is loaded when it is whole", function()
    local app = app_with()
    local worker = app:start()
    local whole = handler_text(NOTE:format "whole")
    local line = broken(worker, function()
      app:write("handlers/work.lua", whole:sub(1, #whole - 10))
    end)
    assert.truthy(line:find "handlers/work.lua:%d+: ", line)
    run_one(app)
    changed(worker, function()
      app:write("handlers/work.lua", whole)
    end)
    run_one(app)
    assert.same({ "1 old", "2 whole" }, journal.notes(app))
    assert.equal(1, count(worker, "reload_failed"))
  end)

  it("fails once, however long it stays so", function()
    local app = app_with()
    local worker = app:start()
    broken(worker, function()
      app:write("handlers/work.lua", "")
    end)
    for _ = 1, 30 do
      clock.sleep(0.1)
      lfs.touch(app.dir .. "/handlers/work.lua")
    end
    assert.equal(1, count(worker, "reload_failed"))
    assert.equal(1, count(worker, "reload_begun"))
  end)
end)

describe("all workers of a folder", function()
  it("reload, under load, and nothing is lost", function()
    local app = app_with({ executors = 2 }, { work = [[ tidemill.sleep(0.01) ]] })
    local workers = { app:start(), app:start(), app:start() }
    journal.publish_many(app, "t", 3000)
    for n = 2, 6 do
      local from = {}
      for i, worker in ipairs(workers) do
        from[i] = worker:position()
      end
      replace(app, "handlers/work.lua", handler_text(([[ tidemill.sleep(0.01) local _ = %d ]]):format(n)))
      for i, worker in ipairs(workers) do
        worker:wait_for("event=reloaded generation=" .. n, 30, from[i])
      end
    end
    journal.wait_until_finished(app, 60)
    assert.equal(3000, journal.count(app, "done", "attempts = 1 and crashes = 0"))
    journal.assert_once_each(app, 3000)
  end)
end)

describe("tidemill dev", function()
  it("follows its files as `run` does", function()
    local app = app_with()
    local dev = app:spawn "dev"
    dev:wait_for("event=ready", 30)
    run_one(app)
    changed(dev, function()
      replace(app, "handlers/work.lua", handler_text(NOTE:format "new"))
    end)
    run_one(app)
    assert.same({ "1 old", "2 new" }, journal.notes(app))
  end)
end)

describe("a system whose watches are used up", function()
  -- A name space of its own, in which nobody may watch files. Root is nobody there to what belongs to
  -- other accounts, such as the server's socket.
  local function argv(script)
    return {
      "unshare", "--user", "--map-root-user", "sh", "-c",
      "echo 0 > /proc/sys/user/max_inotify_instances && " .. script,
    }
  end

  it("is said once, and changes are found by looking", function()
    if process.run(argv "true").code ~= 0 then
      return pending "no user name spaces here"
    end
    local app = app_with()
    local between = relay.start(app)
    local worker = process.spawn {
      argv = argv(("exec %s run -c %s --database \"%s\""):format(tidemill.binary, app.config_path, between.dsn)),
      cwd = app.dir,
    }
    table.insert(app.processes, worker)
    worker:wait_for "event=ready"
    worker:wait_for "event=watch_limited folder=%S+ error="
    for n = 1, 2 do
      changed(worker, function()
        app:write("handlers/work.lua", handler_text(NOTE:format(n)))
      end)
      run_one(app)
    end
    assert.same({ "2 1", "3 2" }, journal.notes(app))
    assert.equal(1, count(worker, "watch_limited"))
    app:stop(worker)
    between:destroy()
  end)
end)
