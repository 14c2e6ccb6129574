-- publish --lines: a message a line, in batches that are all or nothing.

local process = require "spec.support.process"
local tidemill = require "spec.support.tidemill"

local app
before_each(function()
  app = tidemill.app {
    config = { subscribe = { a = { "greet", "count" } }, executors = 1 },
    handlers = { greet = "return function() end", count = "return function() end" },
  }
  app:stop(app:start())
end)
after_each(tidemill.close_all)

local function publish(stdin, ...)
  return app:run { "publish", "--lines", "a", stdin = stdin, ... }
end

-- The payloads of one subscriber in the order they were written, as one JSON array.
local function payloads()
  return app.db:value [[select coalesce(jsonb_agg(payload order by seq), '[]') from tidemill.queue_message
    where subscriber = 'greet']]
end

local function numbered(from, to)
  local list = {}
  for i = from, to do
    table.insert(list, ('{"n": %d}'):format(i))
  end
  return table.concat(list, "\n") .. "\n"
end

describe("publish --lines", function()
  it("publishes each line in its order, whatever JSON it is", function()
    local result = publish(' {"a": "x\\"y\\\\z"}\n\n \t\r\n[1, {"b": null}]\r\n"é, {}"\nnull\n-5')
    assert.same({ code = 0, stdout = '{"published":5,"delivered":10}\n', stderr = "" }, result)
    assert.equal([=[[{"a": "x\"y\\z"}, [1, {"b": null}], "é, {}", null, -5]]=], payloads())
  end)

  it("publishes nothing where there are no lines", function()
    for _, text in ipairs { "", "\n", " \n\t\n" } do
      assert.same({ code = 0, stdout = '{"published":0,"delivered":0}\n', stderr = "" }, publish(text))
    end
    assert.equal("[]", payloads())
  end)

  it("takes a file, and more lines than a batch has", function()
    app:write("messages", numbered(1, 1203))
    assert.equal('{"published":1203,"delivered":2406}\n',
      app:must_run("publish", "--lines", "a", app.dir .. "/messages"))
    assert.equal("t", app.db:value [[select jsonb_agg(payload order by seq)
      = (select jsonb_agg(jsonb_build_object('n', n) order by n) from generate_series(1, 1203) as n)
      from tidemill.queue_message where subscriber = 'greet']])
    assert.equal("3", app.db:value "select count(distinct created_at) from tidemill.queue_message")
  end)

  it("lets its options hold for every line", function()
    publish(numbered(1, 2), "--priority", "-3", "--delay", "600", "--by", "someone", "--max-attempts", "2")
    publish(numbered(3, 3), "--at", "2099-01-31T08:00:00Z")
    local rows = app.db:query [[select priority, published_by, max_attempts, count(*),
      bool_and(available_at = created_at + interval '600 s') as due from tidemill.queue_message
      where payload <> '{"n": 3}' group by 1, 2, 3]]
    assert.same({ priority = "-3", published_by = "someone", max_attempts = "2", count = "4", due = "t" }, rows[1])
    assert.equal("2", app.db:value [[select count(*) from tidemill.queue_message
      where available_at = '2099-01-31 08:00:00Z' and priority = 0 and max_attempts is null]])
  end)

  it("takes lines of 1 MiB, in memory that does not grow with their number", function()
    if os.getenv "TIDEMILL_TEST_CHILD_ASAN_OPTIONS" then
      return pending "the address space of a sanitizer's build cannot be limited"
    end
    app:write("messages", ('"' .. ("x"):rep(1024 * 1024 - 2) .. '"\n'):rep(200))
    -- Published to nobody, each is written once.
    local result = process.run {
      argv = { "bash", "-c", [[ulimit -v 150000; exec "$0" "$@"]], tidemill.binary, "publish", "--lines", "nobody",
        app.dir .. "/messages", "--database", app.dsn },
      cwd = "/",
    }
    assert.equal('{"published":200,"delivered":0}\n', result.stdout, result.stderr)
    assert.equal("200", app.db:value [[select count(*) from tidemill.queue_message
      where octet_length(payload::text) = 1024 * 1024]])
  end)

  it("publishes what is there when the input pauses", function()
    process.run { "mkfifo", app.dir .. "/pipe" }
    local writer = process.spawn { "sh", "-c", [[exec >"$0"; echo '{"n": 1}'; read line <"$0.go"; echo '{"n": 2}']],
      app.dir .. "/pipe" }
    process.run { "mkfifo", app.dir .. "/pipe.go" }
    local publisher = app:spawn("publish", "--lines", "a", app.dir .. "/pipe")
    app:wait_until(function()
      return payloads() == '[{"n": 1}]'
    end, 30, "the first line is published while the second is not written")
    process.run { "sh", "-c", [[echo >"$0"]], app.dir .. "/pipe.go" }
    assert.same({ 0 }, { publisher:wait() })
    assert.same({ 0 }, { writer:wait() })
    assert.equal('[{"n": 1}, {"n": 2}]', payloads())
    assert.equal('{"published":2,"delivered":4}\n', publisher:stdout())
  end)

  it("warns once when nobody subscribes", function()
    local result = app:run { "publish", "--lines", "nobody", stdin = numbered(1, 1001) }
    assert.equal(0, result.code)
    assert.equal('{"published":1001,"delivered":0}\n', result.stdout)
    local _, warnings = result.stderr:gsub("tidemill: warning: nobody subscribes to `nobody`", "")
    assert.equal(1, warnings, result.stderr)
  end)
end)

describe("a line that is wrong", function()
  it("ends it with 2 before its batch, and says what is published", function()
    local result = publish(numbered(1, 600) .. '{"n": 601\n' .. numbered(602, 700))
    assert.same({
      code = 2,
      stdout = '{"published":500,"delivered":1000}\n',
      stderr = "tidemill: standard input:601: this is not JSON: column 10: `,` or `}` is expected; "
        .. "what stands before line 501 is published, and nothing from there on\n",
    }, result)
    assert.equal("500", app.db:value "select max((payload ->> 'n')::int) from tidemill.queue_message")
    -- So the rest can be published from there.
    assert.equal(0, publish(numbered(501, 700)).code)
    assert.equal("700", app.db:value "select count(distinct payload) from tidemill.queue_message")
  end)

  it("in the first batch leaves nothing published", function()
    app:write("messages", '1\n\n"\255"\n')
    local path = app.dir .. "/messages"
    assert.same({
      code = 2,
      stdout = '{"published":0,"delivered":0}\n',
      stderr = "tidemill: " .. path .. ":3: this is not JSON: column 2: bytes that are no UTF-8; "
        .. "nothing is published\n",
    }, app:run("publish", "--lines", "a", path))
    assert.equal("[]", payloads())
  end)

  it("is found also where only the server can tell", function()
    for _, case in ipairs {
      { "1e400000", "value overflows numeric format" },
      { '"' .. ("x"):rep(1024 * 1024) .. '"',
        "the payload has 1048578 bytes as text, at most 1048576 are allowed (`max_payload_bytes`)" },
    } do
      local result = publish("1\n\n2\n" .. case[1] .. "\n3\n")
      assert.same({
        code = 2,
        stdout = '{"published":0,"delivered":0}\n',
        stderr = "tidemill: standard input:4: " .. case[2] .. "; nothing is published\n",
      }, result)
    end
    assert.equal("[]", payloads())
  end)
end)

describe("publish --lines that cannot begin", function()
  local cases = {
    { 2, { "a", "/nowhere/file" }, "cannot read /nowhere/file: No such file or directory; with --lines, what follows "
      .. "the topic is a file of messages, or `-`" },
    { 2, { "a b" }, "`a b` is not a topic: use letters, digits, `.`, `_`, `-` or `:`" },
    { 2, { "a", "--dedupe-key", "k" }, "`--dedupe-key` is for one message, and `--lines` publishes many" },
    { 2, { "a", "--priority", "10" }, "`--priority` is `10`: use a whole number from -9 to 9" },
    { 2, { "a", "--at", "2099-01-31T08:00:00Z", "--delay", "1" }, "give `--delay` or `--at`, not both" },
  }
  for _, case in ipairs(cases) do
    it("ends with 2: " .. case[3], function()
      assert.same({ code = case[1], stdout = "", stderr = "tidemill: " .. case[3] .. "\n" },
        app:run("publish", "--lines", unpack(case[2])))
    end)
  end

  it("says how far it came when the connection is lost", function()
    process.run { "mkfifo", app.dir .. "/pipe", app.dir .. "/go" }
    local publisher = app:spawn("publish", "--lines", "a", app.dir .. "/pipe")
    local writer = process.spawn {
      "sh", "-c", [[exec >"$0"; cat "$1"; read line <"$2"; cat "$1"]], app.dir .. "/pipe",
      app:write("messages", numbered(1, 500)), app.dir .. "/go",
    }
    app:wait_until(function()
      return payloads() ~= "[]"
    end, 30, "the first batch is published")
    app.admin:query([[select pg_terminate_backend(pid) from pg_stat_activity
      where datname = $1 and application_name = 'tidemill publish']], app.database)
    process.run { "sh", "-c", [[echo >"$0"]], app.dir .. "/go" }
    assert.same({ 1 }, { publisher:wait() })
    writer:wait()
    assert.truthy(publisher:stderr():find "^tidemill: [^\n]+; what stands before line 501 is published, and of the 500 "
      .. "messages from there on that were on their way it is not known\n$", publisher:stderr())
    assert.equal('{"published":500,"delivered":1000}\n', publisher:stdout())
    assert.equal("500", app.db:value "select count(*) from tidemill.queue_message where subscriber = 'greet'")
  end)

  it("ends between two batches when it is interrupted", function()
    process.run { "mkfifo", app.dir .. "/pipe" }
    local publisher = app:spawn("publish", "--lines", "a", app.dir .. "/pipe")
    local writer = process.spawn {
      "sh", "-c", [[exec >"$0"; cat "$1"; exec sleep 600]], app.dir .. "/pipe", app:write("messages", numbered(1, 501)),
    }
    app:wait_until(function()
      return app.db:value "select count(*) from tidemill.queue_message where subscriber = 'greet'" == "501"
    end, 30, "all lines that were written are published")
    publisher:kill "INT"
    assert.same({ 1 }, { publisher:wait() })
    writer:destroy()
    assert.equal("tidemill: interrupted; what stands before line 502 is published, and nothing from there on\n",
      publisher:stderr())
    assert.equal('{"published":501,"delivered":1002}\n', publisher:stdout())
  end)
end)
