-- The table of configuration keys and the manifest: src/core/config and src/core/manifest.

local ffi = require "ffi"
local header = require "spec.support.header"

local lib = header.declare("core/config.h")

local APP, SUBSCRIPTION = lib.MILL_SCOPE_APP, lib.MILL_SCOPE_SUBSCRIPTION
local TEXT, INTEGER, NUMBER = lib.MILL_KEY_TEXT, lib.MILL_KEY_INTEGER, lib.MILL_KEY_NUMBER
local BOOLEAN, STRUCTURE = lib.MILL_KEY_BOOLEAN, lib.MILL_KEY_STRUCTURE
local HEADER = 6 -- bytes of a frame before its body

local function new_manifest()
  local manifest = ffi.new "struct mill_manifest"
  lib.mill_manifest_init(manifest)
  return ffi.gc(manifest, lib.mill_manifest_free)
end

local function value_of(value)
  local kind = type(value)
  if kind == "string" then
    return ffi.new("struct mill_value", lib.MILL_VALUE_TEXT, 0, false, value, #value)
  elseif kind == "number" then
    return ffi.new("struct mill_value", lib.MILL_VALUE_NUMBER, value)
  elseif kind == "boolean" then
    return ffi.new("struct mill_value", lib.MILL_VALUE_BOOLEAN, 0, value)
  end
  return ffi.new("struct mill_value", lib.MILL_VALUE_OTHER, 0, false, kind, #kind)
end

-- Sets a key of the app; returns what is wrong.
local function set(manifest, name, value)
  local err = ffi.new "struct mill_err"
  local key = lib.mill_config_find(APP, name)
  assert(key ~= nil, name)
  local held = value_of(value)
  if lib.mill_config_set(manifest.settings, key, held, err) ~= 0 then
    return ffi.string(err.message)
  end
end

local function keys()
  local count = ffi.new "size_t[1]"
  local list, first = {}, lib.mill_config_keys(count)
  for i = 0, tonumber(count[0]) - 1 do
    list[i + 1] = first[i]
  end
  return list
end

local function span(text)
  return ffi.new("struct mill_span", text, #text)
end

-- Adds a lane and returns it, or nil and what is wrong.
local function add(manifest, topic, subscriber, handler)
  local lane, err = ffi.new "struct mill_manifest_lane *[1]", ffi.new "struct mill_err"
  if lib.mill_manifest_add(manifest, span(topic), span(subscriber), handler or subscriber, lane, err) ~= 0 then
    return nil, ffi.string(err.message)
  end
  return lane[0]
end

-- The body of the MANIFEST frame.
local function written(manifest)
  local out = ffi.gc(ffi.new "struct mill_buffer", lib.mill_buffer_free)
  lib.mill_manifest_write(out, manifest)
  return ffi.string(out.data, out.len):sub(HEADER + 1)
end

-- The manifest in a body, or nil and what is wrong.
local function read(body)
  local memory = ffi.new("char[?]", math.max(#body, 1))
  ffi.copy(memory, body, #body)
  local reader = ffi.new("struct mill_reader", memory, memory + #body, false)
  local manifest, err = ffi.new "struct mill_manifest", ffi.new "struct mill_err"
  if lib.mill_manifest_read(reader, manifest, err) ~= 0 then
    return nil, ffi.string(err.message)
  end
  return ffi.gc(manifest, lib.mill_manifest_free)
end

describe("the table of keys", function()
  it("documents every key by one sentence", function()
    for _, key in ipairs(keys()) do
      assert.matches("^%u.*%.$", ffi.string(key.doc), ffi.string(key.name))
    end
  end)

  it("names no key twice in one scope", function()
    local seen = {}
    for _, key in ipairs(keys()) do
      for scope = APP, SUBSCRIPTION do
        if bit.band(key.scopes, bit.lshift(1, scope)) ~= 0 then
          local name = scope .. ffi.string(key.name)
          assert.is_nil(seen[name], name)
          seen[name] = true
        end
      end
    end
  end)

  it("accepts every default of its own, and both bounds, and nothing beyond", function()
    for _, key in ipairs(keys()) do
      local manifest, name = new_manifest(), ffi.string(key.name)
      if key.kind == INTEGER or key.kind == NUMBER then
        local lane = key.scopes == bit.lshift(1, SUBSCRIPTION)
        local function try(number)
          local held = value_of(number)
          if lane then
            return lib.mill_config_set_lane(manifest.settings.lane, key, held, nil)
          end
          return lib.mill_config_set(manifest.settings, key, held, nil)
        end
        assert.equal(0, try(key.preset), name)
        assert.equal(0, try(key.min), name)
        assert.equal(0, try(key.max), name)
        assert.equal(-1, try(key.min - 0.001), name)
        assert.equal(-1, try(key.max + 1), name)
        assert.equal(-1, try(0 / 0), name)
        assert.equal(-1, try(math.huge), name)
        assert.equal(-1, try(-math.huge), name)
      end
    end
  end)

  it("finds a key in its scope only", function()
    assert.is_true(lib.mill_config_find(APP, "poll_secs") ~= nil)
    assert.is_true(lib.mill_config_find(SUBSCRIPTION, "poll_secs") == nil)
    assert.is_true(lib.mill_config_find(APP, "max_attempts") == lib.mill_config_find(SUBSCRIPTION, "max_attempts"))
    assert.is_true(lib.mill_config_find(APP, "concurrency") ~= lib.mill_config_find(SUBSCRIPTION, "concurrency"))
    assert.is_true(lib.mill_config_find(SUBSCRIPTION, "handler").kind == STRUCTURE)
    assert.is_true(lib.mill_config_find(APP, "handler") == nil)
    assert.is_true(lib.mill_config_find(APP, "") == nil)
  end)

  it("suggests the nearest key when one is near", function()
    local function suggest(scope, name)
      local found = lib.mill_config_suggest(scope, name)
      return found ~= nil and ffi.string(found) or nil
    end
    assert.equal("poll_secs", suggest(APP, "poll_sec"))
    assert.equal("poll_secs", suggest(APP, "pollsecs"))
    assert.equal("max_attempts", suggest(SUBSCRIPTION, "max_atempts"))
    assert.equal("handler", suggest(SUBSCRIPTION, "handlr"))
    assert.equal("subscribe", suggest(APP, "subscribes"))
    assert.is_nil(suggest(APP, "zzz"))
    assert.is_nil(suggest(SUBSCRIPTION, "poll_secs"))
    assert.is_nil(suggest(APP, ("x"):rep(1000)))
  end)
end)

describe("a setting", function()
  it("is kept", function()
    local manifest = new_manifest()
    assert.is_nil(set(manifest, "app", "shop"))
    assert.is_nil(set(manifest, "app", "shop2"))
    assert.is_nil(set(manifest, "batch", 7))
    assert.is_nil(set(manifest, "poll_secs", 0.25))
    assert.is_nil(set(manifest, "migrate", false))
    assert.is_nil(set(manifest, "timeout_secs", 1.5))
    assert.equal("shop2", ffi.string(manifest.settings.app))
    assert.equal(7, tonumber(manifest.settings.batch))
    assert.equal(0.25, manifest.settings.poll_secs)
    assert.is_false(manifest.settings.migrate)
    assert.equal(1.5, manifest.settings.lane.timeout_secs)
  end)

  it("of a wrong type or out of range is refused with what was expected and found", function()
    local manifest = new_manifest()
    for _, case in ipairs {
      { "batch", "5", 'expected a whole number from 1 to 10000 (messages), found "5"' },
      { "batch", 0, "expected a whole number from 1 to 10000 (messages), found 0" },
      { "batch", 1.5, "expected a whole number from 1 to 10000 (messages), found 1.5" },
      { "retry_jitter", 1.5, "expected a number from 0 to 1 (share), found 1.5" },
      { "migrate", 1, "expected true or false, found 1" },
      { "notify", "true", 'expected true or false, found "true"' },
      { "app", true, "expected a text of 1 to 100 bytes, found true" },
      { "app", "", 'expected a text of 1 to 100 bytes, found ""' },
      { "app", {}, "expected a text of 1 to 100 bytes, found a table" },
      { "app", "a\0b", 'expected a text of 1 to 100 bytes, found "a\239\191\189b"' },
      { "schema", "a-b", "`a-b` is not a name: use letters, digits and `_`, at most 63, no digit first" },
      { "prefix", ("x"):rep(51), ('expected a text of 1 to 50 bytes, found "%s…"'):format(("x"):rep(40)) },
    } do
      assert.equal(case[3], set(manifest, case[1], case[2]))
    end
    assert.equal("tidemill", ffi.string(manifest.settings.schema))
    assert.equal(100, tonumber(manifest.settings.batch))
  end)

  it("has the type of its kind", function()
    for _, key in ipairs(keys()) do
      local name = ffi.string(key.name)
      if key.kind ~= STRUCTURE and bit.band(key.scopes, 1) ~= 0 then
        local manifest = new_manifest()
        assert.equal(key.kind ~= BOOLEAN, set(manifest, name, true) ~= nil, name)
        assert.is_truthy(set(manifest, name, {}), name)
        if key.kind == TEXT then
          assert.is_truthy(set(manifest, name, 1), name)
        end
      end
    end
  end)
end)

describe("a lane", function()
  it("begins with the app's options", function()
    local manifest = new_manifest()
    set(manifest, "max_attempts", 9)
    set(manifest, "concurrency", 33)
    local lane = add(manifest, " order.paid\n", "crm.sync", "module")
    assert.equal("order.paid", ffi.string(lane.topic))
    assert.equal("crm.sync", ffi.string(lane.subscriber))
    assert.equal("module", ffi.string(lane.handler))
    assert.equal(9, tonumber(lane.options.max_attempts))
    assert.equal(0, tonumber(lane.options.concurrency))
  end)

  it("is refused with a bad topic, a bad name, or when it is there already", function()
    local manifest = new_manifest()
    add(manifest, "t", "a")
    assert.matches("^`no topic` is not a topic", (select(2, add(manifest, "no topic", "a"))))
    assert.matches("^`a b` is not a subscriber's name", (select(2, add(manifest, "t", "a b"))))
    assert.matches("^` a` is not a subscriber's name", (select(2, add(manifest, "t", " a"))))
    assert.matches("^`` is not a subscriber's name", (select(2, add(manifest, "t", ""))))
    assert.equal("`a` subscribes to `t` twice", (select(2, add(manifest, " t ", "a"))))
    assert.equal(1, tonumber(manifest.lane_count))
  end)

  it("has its place by topic and subscriber", function()
    local manifest = new_manifest()
    for _, pair in ipairs { { "b", "b" }, { "a", "z" }, { "b", "a" }, { "B", "x" }, { "a.b", "a" } } do
      add(manifest, pair[1], pair[2])
    end
    lib.mill_manifest_sort(manifest)
    local list = {}
    for i = 0, tonumber(manifest.lane_count) - 1 do
      list[i + 1] = ffi.string(manifest.lanes[i].topic) .. "/" .. ffi.string(manifest.lanes[i].subscriber)
    end
    assert.same({ "B/x", "a/z", "a.b/a", "b/a", "b/b" }, list)
  end)
end)

describe("a manifest", function()
  local function example()
    local manifest = new_manifest()
    set(manifest, "app", "shop")
    set(manifest, "database", "host=/x")
    set(manifest, "poll_secs", 0.5)
    set(manifest, "notify", false)
    set(manifest, "max_attempts", 7)
    add(manifest, "a", "one")
    local lane = add(manifest, "b", "two", "function at config.lua:3")
    lane.options.timeout_secs = 0.25
    return manifest
  end

  it("reads back as it was written", function()
    local manifest = example()
    local copy = assert(read(written(manifest)))
    assert.equal(written(manifest), written(copy))
    assert.equal(lib.mill_manifest_digest(manifest), lib.mill_manifest_digest(copy))
    assert.equal("host=/x", ffi.string(copy.settings.database))
    assert.is_true(copy.settings.listen_database == nil)
    assert.is_false(copy.settings.notify)
    assert.equal(2, tonumber(copy.lane_count))
    assert.equal(0.25, copy.lanes[1].options.timeout_secs)
    assert.equal(7, tonumber(copy.lanes[1].options.max_attempts))
    assert.equal("function at config.lua:3", ffi.string(copy.lanes[1].handler))
  end)

  it("has another digest when anything in it differs", function()
    local digest = lib.mill_manifest_digest(example())
    assert.equal(digest, lib.mill_manifest_digest(example()))
    for _, change in ipairs {
      function(manifest) set(manifest, "batch", 99) end,
      function(manifest) set(manifest, "listen_database", "x") end,
      function(manifest) set(manifest, "notify", true) end,
      function(manifest) manifest.lanes[0].options.max_attempts = 8 end,
      function(manifest) add(manifest, "c", "three") end,
      function(manifest) manifest.code = 1 end,
    } do
      local manifest = example()
      change(manifest)
      assert.is_true(digest ~= lib.mill_manifest_digest(manifest))
    end
  end)

  it("that is cut anywhere, or goes on, is refused and leaves nothing behind", function()
    local body = written(example())
    for len = 0, #body - 1 do
      assert.is_nil((read(body:sub(1, len))), len)
    end
    assert.is_nil((read(body .. "\0")))
  end)

  it("with any byte changed is refused, or holds what config.lua might", function()
    local body = written(example())
    local accepted = 0
    for at = 1, #body do
      for _, byte in ipairs { 0, 1, 65, 127, 128, 255 } do
        local manifest = read(body:sub(1, at - 1) .. string.char(byte) .. body:sub(at + 1))
        if manifest then
          accepted = accepted + 1
          assert.is_not_nil((read(written(manifest))))
        end
      end
    end
    assert.is_true(accepted > 0)
  end)
end)

describe("what only a restart can change", function()
  local function changed(manifest, other)
    local names, key = {}, nil
    repeat
      key = lib.mill_manifest_restart_key(manifest, other, key)
      if key ~= nil then
        table.insert(names, ffi.string(key.name))
      end
    until key == nil
    return names
  end

  it("is told key by key, in the order of the table", function()
    local old, new = new_manifest(), new_manifest()
    assert.same({}, changed(old, new))
    set(new, "batch", 7)
    set(new, "timeout_secs", 7)
    set(new, "watch", false)
    add(new, "a", "one")
    assert.same({}, changed(old, new))
    set(new, "max_payload_bytes", 7)
    set(new, "schema", "other")
    set(new, "database", "dbname=x")
    set(new, "notify", false)
    assert.same({ "database", "schema", "max_payload_bytes", "notify" }, changed(old, new))
    assert.same(changed(old, new), changed(new, old))
    set(old, "database", "dbname=x")
    assert.same({ "schema", "max_payload_bytes", "notify" }, changed(old, new))
  end)

  it("is what the table marks", function()
    local marked = {}
    for _, key in ipairs(keys()) do
      if key.restart then
        table.insert(marked, ffi.string(key.name))
      end
    end
    assert.same({ "app", "database", "listen_database", "schema", "table", "prefix", "max_payload_bytes", "notify" },
      marked)
  end)
end)
