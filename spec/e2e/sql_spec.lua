-- tidemill.query: values both ways, errors, what a session keeps, and what a result may be. Connections
-- are in sql_connections_spec.lua.

local sql = require "spec.support.sql"

describe("tidemill.query", function()
  after_each(sql.stop)

  -- ---- values ---------------------------------------------------------------------------------

  it("gives each type its value", function()
    local run = sql.start()
    for expression, expected in pairs {
      ["true"] = "boolean true",
      ["false"] = "boolean false",
      ["null::integer"] = "nil nil",
      ["32767::int2"] = "number 32767",
      ["-5::int4"] = "number -5",
      ["0::int4"] = "number 0",
      ["42::oid"] = "number 42",
      ["9007199254740992::int8"] = "number 9.007199254741e+15",
      ["9007199254740993::int8"] = "decimal 9007199254740993",
      ["(-9223372036854775808)::int8"] = "decimal -9223372036854775808",
      ["0.1::float8"] = "number 0.1",
      ["1e300::float8"] = "number 1e+300",
      ["1.5::float4"] = "number 1.5",
      ["'NaN'::float8"] = "number nan",
      ["'Infinity'::float8"] = "number inf",
      ["'-Infinity'::float4"] = "number -inf",
      ["12.50::numeric"] = "number 12.5",
      ["19.99::numeric"] = "number 19.99",
      ["12345678901234567890.12::numeric"] = "decimal 12345678901234567890.12",
      ["'NaN'::numeric"] = "number nan",
      ["'null'::jsonb"] = "null null",
      ["'[]'::json"] = "json []",
      ["'{}'::jsonb"] = "json {}",
      [ [['{"a": [1.0, 12345678901234567890]}'::jsonb]] ] = "json {\"a\":[1,12345678901234567890]}",
      ["'7'::jsonb"] = "number 7",
      ["'text'::text"] = "string text",
      ["''::text"] = "string ",
      ["'é'::char(3)"] = "string é  ",
      ["date '2030-01-31'"] = "string 2030-01-31",
      ["interval '1 day'"] = "string 1 day",
      ["'{1,2}'::int[]"] = "string {1,2}",
      [ [['\x00ff'::bytea]] ] = "string \\x00ff",
      ["'0190b2d4-0000-7000-8000-000000000000'::uuid"] = "string 0190b2d4-0000-7000-8000-000000000000",
    } do
      -- Three times: sent whole, prepared, and by its name.
      for time = 1, 3 do
        local found = run:lua(([[
          local v = t.query(%q)[1].v
          local kind, text = type(v), tostring(v)
          if v == t.null then kind, text = "null", "null"
          elseif t.json.is_decimal(v) then kind = "decimal"
          elseif kind == "table" then kind, text = "json", t.json.encode(v)
          elseif v ~= v then text = "nan" end
          return kind .. " " .. text
        ]]):format("select " .. expression .. " as v"))
        assert.equal(expected, found, expression .. ", time " .. time)
      end
    end
  end)

  it("takes each value as an argument", function()
    local run = sql.start()
    for _, case in ipairs {
      { "nil", "text", nil },
      { "t.null", "text", nil },
      { "true", "bool", "true" },
      { "false", "text", "false" },
      { "7", "int4", "7" },
      { "-0.5", "float8", "-0.5" },
      { "2^53", "int8", "9007199254740992" },
      { "0.1 + 0.2", "float8", "0.30000000000000004" },
      { "1e300", "float8", "1e+300" },
      { "0/0", "float8", "NaN" },
      { "1/0", "float8", "Infinity" },
      { "-1/0", "float8", "-Infinity" },
      { "'é'", "text", "é" },
      { "''", "text", "" },
      { [["'; drop table x; --"]], "text", "'; drop table x; --" },
      { "t.decimal '12345678901234567890.10'", "numeric", "12345678901234567890.10" },
      { "9007199254740993LL", "int8", "9007199254740993" },
      { "18446744073709551615ULL", "numeric", "18446744073709551615" },
      { "{ a = 1, b = { t.null } }", "jsonb", '{"a": 1, "b": [null]}' },
      { "{}", "jsonb", "{}" },
      { "t.array {}", "jsonb", "[]" },
      { "{ 1, 'x' }", "jsonb", '[1, "x"]' },
      { "t.query([[select '[]'::jsonb as v]])[1].v", "jsonb", "[]" },
    } do
      local expression, type, expected = unpack(case, 1, 3)
      local found = run:lua(("return { t.query('select $1::%s::text as v', %s)[1].v }"):format(type, expression))
      assert.equal(expected, found[1], expression)
    end
  end)

  it("takes arguments in their places, nil at the end too", function()
    local run = sql.start()
    assert.same({ "a", "c" }, run:lua [[
      local row = t.query("select $1::text as a, $2::text as b, $3::text as c, $4::text as d", "a", nil, "c", nil)[1]
      return { row.a, row.b == nil and row.d == nil and row.c }
    ]])
  end)

  it("takes a list as JSON, as the documentation has it", function()
    local run = sql.start()
    assert.same({ 2, 0 }, run:lua [[
      local text = "select count(*) as n from generate_series(1, 5) as g(id) "
        .. "where id in (select v::bigint from jsonb_array_elements_text($1) as v)"
      return { t.query(text, { 2, 3, 9 })[1].n, t.query(text, t.array())[1].n }
    ]])
  end)

  it("takes a thousand arguments", function()
    local run = sql.start()
    assert.same({ 500500 }, run:lua [[
      local places, values = {}, {}
      for i = 1, 1000 do places[i], values[i] = "$" .. i .. "::int", i end
      return { t.query("select " .. table.concat(places, "+") .. " as v", unpack(values))[1].v }
    ]])
  end)

  it("refuses what cannot be an argument, naming it", function()
    local run = sql.start()
    for expression, expected in pairs {
      ["'x', print"] = "tidemill.query: %$2: a function cannot be written as JSON",
      ["{ a = { print } }"] = "tidemill.query: %$1.a%[1%]: a function cannot",
      ["{ 0/0 }"] = "tidemill.query: %$1%[1%]: ",
      ["'a\\0b'"] = "tidemill.query: %$1: a text with a zero byte",
      ["'\\255'"] = "invalid byte sequence.*SQLSTATE 22021",
    } do
      assert.matches("^text:1: .*" .. expected, run:fails(("t.query('select $1::text', %s)"):format(expression)))
    end
    for expression, expected in pairs {
      ["'select 1', 2"] = "text:1: bind message supplies 1 parameters, .*; the statement has not as many",
      [""] = "text:1: tidemill.query: expected SQL as a text, found nothing",
      ["{}"] = "text:1: tidemill.query: expected SQL as a text, found a table",
      ["'select 1\\0'"] = "text:1: tidemill.query: the SQL text holds a zero byte",
    } do
      assert.matches("^" .. expected, run:fails(("t.query(%s)"):format(expression)))
    end
    assert.same({ 1 }, run:lua "return { t.query('select 1 as v')[1].v }")
  end)

  -- ---- rows -----------------------------------------------------------------------------------

  it("returns rows with `affected` and `fields`", function()
    local run = sql.start()
    run.db:exec "create table item (id int primary key, name text)"
    for _, case in ipairs {
      { "insert into item values (1, 'a'), (2, null), (3, 'c')", 0, 3, {} },
      { "update item set name = 'x' where id > 1 returning id, name", 2, 2, { "id", "name" } },
      { "update item set name = 'x' where false", 0, 0, {} },
      { "select id from item order by id", 3, 3, { "id" } },
      { "select id, name from item where false", 0, 0, { "id", "name" } },
      { "select from item", 3, 3, {} },
      { "delete from item", 0, 3, {} },
      { "create table other ()", 0, 0, {} },
    } do
      local statement, count, affected, fields = unpack(case)
      assert.same({ count, affected, fields }, run:lua(([[
        local rows = t.query(%q)
        return { #rows, rows.affected, rows.fields }
      ]]):format(statement)), statement)
    end
  end)

  it("numbers names that come twice", function()
    local run = sql.start()
    assert.same({ { "id", "id_2", "id_3", "?column?", "?column?_2" }, { 1, 2, 3 } }, run:lua [[
      local rows = t.query("select 1 as id, 2 as id, 3 as id, 4, 5")
      return { rows.fields, { rows[1].id, rows[1].id_2, rows[1].id_3 } }
    ]])
    -- Also where the number is taken.
    assert.same({ { "a", "a_2", "a_3" } }, run:lua [[return { t.query("select 1 as a, 2 as a_2, 3 as a").fields }]])
  end)

  it("returns 1,600 columns and 50,000 rows", function()
    local run = sql.start()
    assert.same({ 1600, 1600, 50000, 50000 }, run:lua [[
      local names = {}
      for i = 1, 1600 do names[i] = i .. " as c" .. i end
      local wide = t.query("select " .. table.concat(names, ","))
      local long = t.query("select i from generate_series(1, 50000) as g(i)")
      return { #wide.fields, wide[1].c1600, #long, long[50000].i }
    ]])
  end)

  it("refuses a result that is too large, and goes on", function()
    local run = sql.start()
    local text = run:fails "t.query [[select repeat('x', 1000) from generate_series(1, 10000000)]]"
    assert.matches("^text:1: the result is larger than 67108864 bytes, the most one query may return: select less",
      text)
    assert.same({ 1 }, run:lua "return { t.query('select 1 as v')[1].v }")
    run:wait_for_connections(0, "active")
  end)

  it("counts rows and columns into a result's size, whatever is in them", function()
    local run = sql.start { settings = "max_memory_mb = 300," }
    local function ask(rows, columns)
      return run:lua(([[
        local ok, e = pcall(t.query, %q)
        collectgarbage()
        return ok and #e or e.message .. tostring(e.lost) .. tostring(e.unknown)
      ]]):format(("select %s from generate_series(1, %d)"):format(columns, rows)))
    end
    local nulls = table.concat({ "null as a", "null as b", "null as c", "null as d", "null as e" }, ", ")
    assert.equal(600000, ask(600000, ""))
    assert.equal(300000, ask(300000, nulls))
    for rows, columns in pairs { [840000] = "", [320000] = nulls, [20000000] = "", [15000000] = nulls } do
      assert.matches("^the result is larger than 67108864 bytes.*each row counts 80 bytes, .*truetrue$",
        ask(rows, columns))
    end
    -- Tables in JSON too.
    local json = "(select jsonb_agg('%s'::jsonb) from generate_series(1, 10000)) as j"
    assert.equal(30, ask(30, json:format "[]"))
    for _, element in ipairs { "[]", "{}", "[1,2,3,4,5]", '{"a":{"b":[]}}' } do
      assert.matches("^the result is larger than 67108864 bytes", ask(1000, json:format(element)))
    end
    run:wait_for_connections(0, "active")
  end)

  -- ---- errors ---------------------------------------------------------------------------------

  it("raises a table with all that the database says", function()
    local run = sql.start()
    run.db:exec "create table item (id int constraint first_one primary key, n int not null)"
    run.db:exec "insert into item values (1, 1)"
    assert.same({
      false, "duplicate key value violates unique constraint \"first_one\"", "23505", "Key (id)=(1) already exists.",
      "first_one", "item", "public", "text:1",
      "text:1: duplicate key value violates unique constraint \"first_one\" (SQLSTATE 23505)",
    }, run:lua [[local ok, e = pcall(function() t.query("insert into item values ($1, 2)", 1) end)
      return { ok, e.message, e.sqlstate, e.detail, e.constraint, e.table, e.schema, e.where, tostring(e) }
    ]])
    assert.same({ "23502", "n" }, run:lua [[
      local _, e = pcall(t.query, "insert into item values (2, null)")
      return { e.sqlstate, e.column }
    ]])
    assert.matches("perhaps you meant", run:lua [[
      return select(2, pcall(t.query, "select idd from item")).hint:lower()
    ]])
  end)

  it("shows message, SQLSTATE and the handler's traceback of one that is not caught", function()
    local run = sql.start()
    local text = run:fails "local function inner()\n  t.query('select 1/0')\nend\ninner()"
    assert.matches("^text:2: division by zero %(SQLSTATE 22012%)\nstack traceback:\n.*text:2: in function 'inner'"
      .. "\n.*text:4: in function", text)
    assert.no.matches("tidemill%.", text)
  end)

  it("refuses what cannot be one statement", function()
    local run = sql.start()
    for statement, expected in pairs {
      ["select 1; select 2"] = "multiple commands.*SQLSTATE 42601.*one statement at a time",
      [""] = "no statement in this SQL text",
      ["-- nothing"] = "no statement in this SQL text",
      ["copy (select 1) to stdout"] = "COPY from or to the client is not possible here",
      ["copy nothing from stdin"] = "SQLSTATE 42P01",
      ["copy item from stdin"] = "COPY from or to the client is not possible here",
      ["begin"] = "begins a transaction, which was rolled back: use tidemill.transaction",
      ["start transaction read only"] = "begins a transaction",
      ["selec 1"] = "syntax error.*SQLSTATE 42601",
    } do
      run.db:exec "drop table if exists item; create table item (id int)"
      for _ = 1, 3 do
        assert.matches(expected, run:fails(("t.query(%q)"):format(statement)), statement)
        assert.same({ 1 }, run:lua "return { t.query('select 1 as v')[1].v }", statement)
      end
    end
    -- Not an error of ours: the server warns.
    for _, statement in ipairs { "commit", "rollback" } do
      run:lua(("t.query(%q) return 1"):format(statement))
    end
  end)

  it("names the column whose JSON cannot be read", function()
    local run = sql.start()
    assert.matches("column `v` of row 1 cannot be read: .* %(select it as text%)",
      run:fails [[t.query([=[select '"\ud800"'::json as v]=])]])
  end)

  -- ---- the session ----------------------------------------------------------------------------

  it("resets what a statement leaves in the session", function()
    local run = sql.start { settings = "sql_connections = 1," }
    run.db:exec [[create procedure meddle() language plpgsql as
      $$ begin set work_mem = '7MB'; commit; raise exception 'no'; end $$]]
    local ask = "select pg_backend_pid() as pid, current_setting('client_connection_check_interval', true) as checks"
    local before = run:lua(("return t.query(%q)[1]"):format(ask))
    for statement, check in pairs {
      ["set work_mem = '7MB'"] = "select current_setting('work_mem') <> '7MB'",
      ["select set_config('work_mem', '7MB', false)"] = "select current_setting('work_mem') <> '7MB'",
      ["create TEMPORARY table left_over_2 ()"] = "select to_regclass('left_over_2') is null",
      ["create table pg_temp.left_over_3 ()"] = "select to_regclass('left_over_3') is null",
      ["select pg_try_advisory_lock_shared(7)"] = "select count(*) = 0 from pg_locks where locktype = 'advisory'",
      ["create temp table left_over ()"] = "select to_regclass('left_over') is null",
      ["select pg_advisory_lock(7)"] = "select count(*) = 0 from pg_locks where locktype = 'advisory'",
      ["listen channel"] = "select count(*) = 0 from pg_listening_channels()",
      ["prepare mine as select 1"] = "select count(*) = 0 from pg_prepared_statements where name = 'mine'",
      ["declare c cursor with hold for select 1"] = "select count(*) = 0 from pg_cursors where name = 'c'",
      ["do $$ begin set work_mem = '7MB'; end $$"] = "select current_setting('work_mem') <> '7MB'",
      ["/* that fails */ call meddle()"] = "select current_setting('work_mem') <> '7MB'",
      ["update pg_settings set setting = 7168 where name = 'work_mem'"] =
        "select current_setting('work_mem') <> '7MB'",
    } do
      local found = run:lua(([[
        local ok = pcall(t.query, %q)
        return { ok, t.query(%q)[1].good, t.query(%q)[1] }
      ]]):format(statement, "select (" .. check .. ") as good", ask))
      assert.same({ not statement:find "fails", true, before }, found, statement)
    end
  end)

  it("keeps prepared what leaves nothing, though it looks so", function()
    local run = sql.start { settings = "sql_connections = 1," }
    assert.equal(1, run:lua [[
      for _ = 1, 3 do t.query "select 1 as email_template, pg_advisory_xact_lock(7) as threshold, 2 as temperature" end
      return t.query("select count(*) as n from pg_prepared_statements where statement like 'select 1 as email%'")[1].n
    ]])
  end)

  it("prepares again what a change of a table has made invalid", function()
    local run = sql.start { settings = "sql_connections = 1," }
    run.db:exec "create table item (id int); insert into item values (1)"
    local ask = "local row = t.query('select * from item')[1] return { row.id, row.name or false }"
    for _ = 1, 4 do
      assert.same({ 1, false }, run:lua(ask))
    end
    run.db:exec "alter table item add name text default 'new'"
    for _ = 1, 4 do
      assert.same({ 1, "new" }, run:lua(ask))
    end
    run.db:exec "alter table item alter id type text"
    assert.same({ "1", "new" }, run:lua(ask))
    -- A handler that throws away what is prepared harms nobody.
    for _, statement in ipairs { "deallocate all", "discard all" } do
      assert.same({ "1", "new" }, run:lua(ask))
      run:lua(("t.query(%q) return 1"):format(statement))
      assert.same({ "1", "new" }, run:lua(ask))
    end
  end)

  it("keeps a bounded number of statements prepared", function()
    local run = sql.start { settings = "sql_connections = 1," }
    local count = run:lua [[
      for round = 1, 4 do
        for i = 1, 40 do
          for _ = 1, 2 do assert(t.query("select " .. (round * 30 + i) .. " as v")[1].v == round * 30 + i) end
        end
      end
      return t.query("select count(*) as n from pg_prepared_statements")[1].n
    ]]
    assert.is_true(count > 10 and count <= 64, count)
  end)

  it("does not gather notifications that nobody reads", function()
    local run = sql.start { settings = "sql_connections = 1," }
    assert.same({ 1 }, run:lua [[
      t.transaction(function(tx)
        tx:query "listen here"
        for i = 1, 100 do tx:query("select pg_notify('here', $1)", ("x"):rep(7000) .. i) end
      end)
      return { t.query("select 1 as v")[1].v }
    ]])
  end)

  it("bears what a handler says to its ops directly", function()
    local run = sql.start { settings = "sql_connections = 1," }
    assert.same({ 1 }, run:lua [[
      local op = require "tidemill.await".op
      for number, arguments in ipairs {
        { "query" }, { "query", false }, { "query", 7, "select 1", "" }, { "query", {}, "select 1", "" },
        { "query", false, "select 1", "garbage" }, { "query", false, "select 1", "\255\255\255\127" },
        { "query", false, "select\0 1", "" }, { "query", false, 7, "" },
        { "begin" }, { "begin", {} }, { "commit" }, { "commit", 0 }, { "commit", "1" }, { "rollback", 0/0 },
        { "finish" }, { "finish", 1 },
      } do
        local result, wrong = op(unpack(arguments, 1, 4))
        assert(result == nil and type(wrong) == "string", number .. tostring(wrong))
      end
      return { t.query("select 1 as v")[1].v }
    ]])
    -- What begins no transaction is none.
    assert.equal("done", run.executor:outcome(run:send [[
      local op = require "tidemill.await".op
      local number = op("begin", "select 1")
      assert(op("query", number, "select 1", "") == nil)
      assert(op("commit", number) == nil)
      return 1
    ]]).kind)
    assert.equal(1, run:lua "return t.query('select 1 as v')[1].v")
  end)

  -- ---- where it waits -------------------------------------------------------------------------

  it("waits inside of pcall and of coroutines of the handler's own", function()
    local run = sql.start()
    assert.same({ true, 1, 2, 3 }, run:lua [[
      local ok, rows = pcall(t.query, "select 1 as v")
      local values = {}
      for v in coroutine.wrap(function()
        for i = 2, 3 do coroutine.yield(t.query("select $1::int as v", i)[1].v) end
      end) do table.insert(values, v) end
      return { ok, rows[1].v, values[1], values[2] }
    ]])
  end)

  it("says where it cannot wait", function()
    local run = sql.start()
    assert.matches("tidemill.query: `query` cannot wait inside of a function that C code called",
      run:fails "table.sort({ 2, 1 }, function(a, b) t.query 'select 1' return a < b end)")
  end)
end)
