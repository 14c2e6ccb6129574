-- Commands whose standard output is closed, full, or read by nobody: an output that is lost is an error, and
-- what the command did is told all the same.

local folder = require "spec.support.folder"
local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

local CLOSED = "tidemill: standard output is closed, and nothing was done: where its output is not wanted, send it to "
  .. "/dev/null\n"
local FULL = "tidemill: cannot write the output: No space left on device"

local CONFIG = { subscribe = { t = "fail" }, max_attempts = 1 }
local HANDLERS = { fail = "return function() error 'no' end" }

-- Runs a command with its standard output redirected as a shell writes it.
local function redirected(app, redirection, ...)
  return process.run {
    "bash", "-c", 'set -o pipefail; "$0" "$@" ' .. redirection, tidemill.binary, "-c", app.config_path, ...,
  }
end

describe("a command whose standard output", function()
  after_each(tidemill.close_all)

  it("is closed does nothing, and says so", function()
    local app = tidemill.app { config = CONFIG, handlers = HANDLERS }
    app:must_run "drain" -- registers the subscription
    app:must_run("publish", "t")
    app:must_run "drain"
    local id = app:ledger()[1].id
    local before = app:ledger()
    for _, words in ipairs {
      { "help" }, { "--help" }, { "publish", "--help" }, { "keys" }, { "statements" }, { "version" }, { "check" },
      { "init", app.dir .. "/new" }, { "call", "t/fail" }, { "test" }, { "migrate" }, { "publish", "t" },
      { "publish", "t", "/dev/null", "--lines" }, { "status" }, { "status", "--watch" }, { "failed", "list" },
      { "failed", "show", id }, { "failed", "retry", id }, { "failed", "discard", "--all" }, { "cancel", id },
      { "reschedule", id, "--at", "2030-01-01T00:00:00Z" }, { "reclaim" }, { "prune" },
    } do
      table.insert(words, 1, "--database")
      table.insert(words, 2, app.dsn)
      for _, redirection in ipairs { ">&-", "1</dev/null" } do
        local result = redirected(app, redirection, unpack(words))
        assert.same({ code = 1, stdout = "", stderr = CLOSED }, result, table.concat(words, " ", 3))
      end
    end
    assert.same(before, app:ledger())
    assert.is_nil(io.open(app.dir .. "/new/config.lua"))
  end)

  it("is closed works where it has nothing to say: drain", function()
    local app = tidemill.app { config = CONFIG, handlers = HANDLERS }
    app:must_run "drain" -- registers the subscription
    app:must_run("publish", "t")
    assert.equal(0, redirected(app, ">&-", "--database", app.dsn, "drain").code)
    assert.equal("failed", app:ledger()[1].status)
    -- A mistake on the command line is told as ever.
    assert.equal(2, redirected(app, ">&-", "drian").code)
    assert.equal(2, redirected(app, ">&-").code)
  end)

  it("is full fails, whether the output is short or long", function()
    local app = tidemill.app { database = false, config = CONFIG, handlers = HANDLERS }
    for _, words in ipairs { { "check" }, { "keys" }, { "statements" }, { "--help" } } do
      local result = redirected(app, ">/dev/full", unpack(words))
      assert.same({ 1, FULL .. "\n" }, { result.code, result.stderr }, words[1])
    end
  end)

  it("is full says what it changed", function()
    local app = tidemill.app { config = CONFIG, handlers = HANDLERS }
    local function full(...)
      local result = redirected(app, ">/dev/full", "--database", app.dsn, ...)
      assert.equal(1, result.code, result.stderr)
      assert.equal(FULL, result.stderr:sub(1, #FULL), result.stderr)
      return result.stderr:sub(#FULL + 1)
    end
    assert.matches('^, but schema "tidemill" is at version %d+\n$', full "migrate")
    app:must_run "drain"
    local published = full("publish", "t", "{}", "--dedupe-key", "k")
    local id = app:ledger()[1].id
    assert.equal(", but the message was published as " .. id .. "\n", published)
    assert.equal(", but nothing was published: message " .. id .. " waits with the same key\n",
      full("publish", "t", "{}", "--dedupe-key", "k"))
    folder.write(app.dir, "lines", "1\n2\n")
    assert.equal(", but of the lines 2 were published\n", full("publish", "t", app.dir .. "/lines", "--lines"))
    assert.equal(", but 1 message was rescheduled\n", full("reschedule", id, "--at", "2030-01-01T00:00:00Z"))
    app:must_run "drain"
    assert.equal(", but 2 messages were retried\n", full("failed", "retry", "--all"))
    assert.equal(", but 1 message was cancelled\n", full("cancel", id))
    app:must_run "drain"
    assert.equal(", but 2 messages were discarded\n", full("failed", "discard", "--all"))
    assert.equal(", but 0 messages were reclaimed\n", full "reclaim")
    assert.equal(", but 0 messages were deleted\n", full "prune")
    assert.equal(", but the app was written to " .. app.dir .. "/new\n", full("init", app.dir .. "/new"))
    -- What is only looked at has changed nothing.
    assert.equal("\n", full "status")
  end)

  it("is read by nobody any more is content", function()
    local app = tidemill.app { database = false, config = CONFIG, handlers = HANDLERS }
    for _, words in ipairs { { "check" }, { "keys" }, { "statements" } } do
      local result = redirected(app, "| true", unpack(words))
      assert.same({ 0, "" }, { result.code, result.stderr })
    end
  end)
end)
