-- The rules of the queue that are pure functions: src/core/policy.

local ffi = require "ffi"
local header = require "spec.support.header"
local unit = require "spec.support.unit"

local lib = header.declare("core/policy.h")

unit.cdef "void spec_free(void *memory) __asm__(\"free\");"

-- The trimmed topic, or nil and the error.
local function topic(text)
  local start, len, err = ffi.new "const char *[1]", ffi.new "size_t[1]", ffi.new "struct mill_err"
  if lib.mill_policy_topic(text, #text, start, len, err) ~= 0 then
    return nil, ffi.string(err.message)
  end
  return ffi.string(start[0], len[0])
end

local function owned(pointer)
  local text = ffi.string(pointer)
  ffi.C.spec_free(pointer)
  return text
end

local function clean(text, max)
  return owned(lib.mill_policy_clean_text(text, #text, max or 4000))
end

local function boundary(text, max)
  return tonumber(lib.mill_policy_boundary(text, #text, max))
end

describe("a topic", function()
  it("is letters, digits and four signs, without white space around it", function()
    for text, expected in pairs {
      ["order.paid"] = "order.paid",
      [" \t\n\v\f\rA-Z_a:z.09 \n"] = "A-Z_a:z.09",
      ["x"] = "x",
      [("t"):rep(200)] = ("t"):rep(200),
      ["  " .. ("t"):rep(200) .. "  "] = ("t"):rep(200),
    } do
      assert.equal(expected, topic(text))
    end
  end)

  it("is refused otherwise, with the text quoted", function()
    for _, text in ipairs { "", "   ", "not a topic!", "a/b", "ä", "a\0b", "a b" } do
      local found, message = topic(text)
      assert.is_nil(found)
      assert.matches("` is not a topic: use letters, digits, `.`, `_`, `%-` or `:`$", message)
    end
    assert.equal("`not a topic!` is not a topic: use letters, digits, `.`, `_`, `-` or `:`",
      select(2, topic " not a topic! "))
    assert.matches("a\239\191\189b", (select(2, topic "a\0b")))
  end)

  it("is at most 200 characters long", function()
    assert.matches("it has 201 characters, at most 200", (select(2, topic(("t"):rep(201)))))
  end)
end)

describe("the backoff", function()
  local function backoff(base, attempts, jitter, random)
    return lib.mill_policy_backoff_secs(base, attempts, jitter or 0, random or 0)
  end

  it("doubles with each attempt up to an hour", function()
    local list = {}
    for attempts = 1, 11 do
      list[attempts] = backoff(10, attempts)
    end
    assert.same({ 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600 }, list)
  end)

  it("does not overflow", function()
    assert.equal(3600, backoff(10, 50))
    assert.equal(3600, backoff(10, 4294967295))
    assert.equal(3600, backoff(4294967295, 4294967295))
    assert.equal(0, backoff(0, 4294967295))
    assert.equal(10, backoff(10, 0))
  end)

  it("is lengthened by the jitter and never shortened", function()
    assert.equal(100, backoff(100, 1, 0.5, 0))
    assert.equal(125, backoff(100, 1, 0.5, 0.5))
    assert.equal(199, backoff(100, 1, 1, 0.999))
    assert.equal(100, backoff(100, 1, 0, 0.999))
    assert.equal(7196, backoff(3600, 5, 1, 0.999))
  end)
end)

describe("a cut text", function()
  it("ends between characters", function()
    assert.equal(3, boundary("abc", 10))
    assert.equal(2, boundary("abc", 2))
    assert.equal(1, boundary("aé", 2))
    assert.equal(3, boundary("aé", 3))
    assert.equal(0, boundary("€", 2))
    assert.equal(0, boundary("😀", 3))
    assert.equal(4, boundary("😀x", 4))
    assert.equal(0, boundary("", 0))
  end)

  it("says that it was cut, and is valid UTF-8", function()
    assert.equal("abcd…", clean("abcdefgh", 4))
    assert.equal("aé…", clean("aéé", 4))
    assert.equal("abcd", clean("abcd", 4))
    assert.equal(4000 + #"…", #clean(("x"):rep(5000)))
  end)
end)

describe("a cleaned text", function()
  local bad = "\239\191\189"

  it("is the same when it is good", function()
    for _, text in ipairs { "", "plain", "äöü €", "😀 \127 \1 \n\t", "\238\128\128", "\244\143\191\191" } do
      assert.equal(text, clean(text))
    end
  end)

  it("has a replacement for each byte that is no UTF-8, and for NUL", function()
    for text, expected in pairs {
      ["a\0b"] = "a" .. bad .. "b",
      ["\128"] = bad,
      ["\195"] = bad,
      ["\195x"] = bad .. "x",
      ["\192\128"] = bad .. bad, -- an overlong NUL
      ["\224\159\191"] = bad .. bad .. bad, -- overlong
      ["\237\160\128"] = bad .. bad .. bad, -- a surrogate
      ["\240\143\191\191"] = bad .. bad .. bad .. bad, -- overlong
      ["\244\144\128\128"] = bad .. bad .. bad .. bad, -- above U+10FFFF
      ["\245\128\128\128"] = bad .. bad .. bad .. bad,
      ["\226\130"] = bad .. bad, -- half a character at the end
      ["\226\130\172\226\130"] = "€" .. bad .. bad,
      ["\255\254"] = bad .. bad,
    } do
      assert.equal(expected, clean(text))
    end
  end)

  it("keeps to its limit when every byte grows", function()
    local text = clean(("\0"):rep(10000), 4000)
    assert.is_true(#text <= 4000 + #"…")
    assert.equal(bad, text:sub(1, 3))
    assert.equal("…", text:sub(-3))
  end)
end)

describe("an identifier", function()
  it("is letters, digits and underscores, no digit first, of limited length", function()
    for _, name in ipairs { "a", "_", "tidemill", "A_1", ("x"):rep(63) } do
      assert.is_true(lib.mill_policy_identifier(name, 63), name)
    end
    for _, name in ipairs { "", "1a", "a-b", "a b", 'a"b', "ä", "a.b", "a;", ("x"):rep(64) } do
      assert.is_false(lib.mill_policy_identifier(name, 63), name)
    end
    assert.is_false(lib.mill_policy_identifier(("x"):rep(51), 50))
  end)

  it("is quoted", function()
    assert.equal('"queue_message"', owned(lib.mill_policy_quote_identifier "queue_message"))
  end)
end)

describe("the closest of some words", function()
  local function closest(word, ...)
    local words = { ... }
    local names = ffi.new("const char *[?]", #words, words)
    local found = lib.mill_policy_closest(word, names, #words)
    return found ~= nil and ffi.string(found) or nil
  end

  it("is a slip or two away: one letter wrong, missing, too many, or swapped with the next", function()
    for _, word in ipairs { "publish", "pablish", "publsh", "publiish", "pubilsh", "ublish", "publis", "pbulihs" } do
      assert.equal("publish", closest(word, "prune", "publish", "run"), word)
    end
    assert.equal("run", closest("rnu", "prune", "run"))
    -- The first of those that are equally near.
    assert.equal("ab", closest("a", "ab", "ac"))
  end)

  it("is one that begins with the word, where none is a slip away", function()
    assert.equal("timeout_secs", closest("timeout", "max_attempts", "timeout_secs"))
    assert.equal("time_out", closest("timeout", "timeout_secs", "time_out"))
    assert.is_nil(closest("ti", "timeout_secs"))
  end)

  it("is none when all are far", function()
    assert.is_nil(closest("publisher-of-things", "publish", "run"))
    assert.is_nil(closest("xyz", "prune", "publish"))
    assert.is_nil(closest("", "publish"))
    assert.is_nil(closest("publish"))
    assert.is_nil(closest(("x"):rep(41), ("x"):rep(41)))
  end)
end)
