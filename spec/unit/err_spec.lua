-- Errors as values, and what a SQLSTATE asks for: src/core/err.

local ffi = require "ffi"
local header = require "spec.support.header"

local lib = header.declare("core/err.h")

local function reaction(sqlstate)
  return tonumber(ffi.cast("int", lib.mill_err_database_reaction(sqlstate)))
end

local function filled(...)
  local err = ffi.new "struct mill_err"
  local result = lib.mill_err_set_at(err, lib.MILL_ERR_INPUT, 0, nil, "x.c", 7, ...)
  return err, result
end

describe("a SQLSTATE", function()
  it("asks for a retry, a new connection, patience, or costs its one item", function()
    local retry, reconnect = lib.MILL_REACT_RETRY, lib.MILL_REACT_RECONNECT
    local wait, refuse = lib.MILL_REACT_WAIT, lib.MILL_REACT_REFUSE
    for sqlstate, expected in pairs {
      ["40001"] = retry, ["40P01"] = retry, ["55P03"] = retry, ["57014"] = retry,
      ["57P01"] = reconnect, ["57P02"] = reconnect, ["57P03"] = reconnect, ["57P05"] = reconnect,
      ["08006"] = reconnect, ["08P01"] = reconnect, ["53300"] = reconnect, ["53100"] = reconnect,
      ["25006"] = reconnect, ["25P03"] = reconnect, ["26000"] = reconnect, ["XX001"] = reconnect,
      ["42P01"] = wait, ["42501"] = wait, ["3F000"] = wait, ["28P01"] = wait, ["3D000"] = wait,
      ["22023"] = refuse, ["22P02"] = refuse, ["23505"] = refuse, ["23514"] = refuse,
      ["P0001"] = refuse, ["42601"] = refuse, ["0A000"] = refuse,
    } do
      assert.equal(tonumber(expected), reaction(sqlstate), sqlstate)
    end
  end)

  it("that is missing means the connection is gone", function()
    assert.equal(tonumber(lib.MILL_REACT_RECONNECT), reaction "")
    assert.equal(tonumber(lib.MILL_REACT_RECONNECT), reaction(nil))
  end)
end)

describe("an error", function()
  it("is one line, whatever was put in", function()
    local err, result = filled("  two\n\tlines,  three \r\n")
    assert.equal(-1, result)
    assert.equal("two lines, three", ffi.string(err.message))
    assert.equal(7, err.line)
  end)

  it("is cut on a character boundary", function()
    local err = filled(("é"):rep(2000))
    local text = ffi.string(err.message)
    assert.truthy(#text < 1024 and #text > 1000, #text)
    assert.equal(("é"):rep(#text / 2), text)
  end)

  it("keeps its kind when it is wrapped", function()
    local err = filled("the cause")
    lib.mill_err_wrap(err, "%s", "while doing it")
    assert.equal("while doing it: the cause", ffi.string(err.message))
    assert.equal(tonumber(lib.MILL_ERR_INPUT), tonumber(err.kind))
  end)
end)
