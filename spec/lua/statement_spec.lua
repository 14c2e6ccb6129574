-- Which statements end the transaction they stand in, told by their text.

local native = require "tidemill.native"

describe("a statement", function()
  it("ends its transaction", function()
    for _, text in ipairs {
      "commit", "COMMIT", "Commit Work", "commit and chain", "commit and no chain", "commit;", " \t\r\n\fcommit",
      ";; commit", "end", "END TRANSACTION", "abort", "abort and chain", "rollback", "rollback;", "rollback work",
      "rollback transaction and chain", "rollback and chain", "rollback prepared 'x'", "commit prepared 'x'",
      "prepare transaction 'x'", "prepare/**/transaction 'x'", "-- a\ncommit", "--\rcommit", "/**/commit",
      "/*/**/*/end", "/* to */rollback-- to", "rollback /* to savepoint a */", "commit\0", "rollback tofu",
    } do
      assert.is_true(native.ends_transaction(text), text)
    end
  end)

  it("does not", function()
    for _, text in ipairs {
      "", " ", ";", "--", "/*", "/*/", "/* /* */ commit", "-- commit", "/* commit */ select 1", "select 'commit'",
      "commits", "commit_", "end$", "\"commit\"", "'commit'", "(commit)", "begin", "start transaction", "savepoint a",
      "release savepoint a", "rollback to a", "ROLLBACK TO SAVEPOINT a", "rollback work to a",
      "rollback transaction to savepoint a", "rollback/**/to--\na", "rollback\nto\ncommit", "prepare p as select 1",
      "prepare transactions as select 1", "set transaction read only", "insert into commit values (1)",
      "commit\195\164",
    } do
      assert.is_false(native.ends_transaction(text), text)
    end
  end)
end)
