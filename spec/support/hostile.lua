-- Handlers that do their worst, each by accident, and what must become of a message that such a handler gets.
--
-- A script is { name, body, ends }: the body of a function (payload, ctx) that finds `tidemill`, `ffi` and `spin`.
-- `ends` is a text (or several: one of them) that its error must contain when it becomes a dead letter; without
-- one it must be done, and with `discarded = true` discarded. What of the library a script breaks, it may find
-- broken itself. `memory`: it is about max_memory_mb.

-- ---- raise --------------------------------------------------------------------------------------

local errors = {
  { "raises_nil", "error(nil)", "the error is nil" },
  { "raises_false", "error(false)", "the error is false" },
  { "raises_a_table", "error { code = 5 }", 'the error is a table: {"code":5}' },
  { "raises_a_cycle", "local t = {} t.t = t error(t)", "the error is a table" },
  { "raises_a_function", "error(print)", "the error is a function" },
  { "raises_a_coroutine", "error(coroutine.create(print))", "the error is a thread" },
  { "raises_cdata", "error(ffi.new 'int[4]')", "cdata<int [4]>" },
  { "raises_with_a_raising_tostring", "error(setmetatable({}, { __tostring = function() error(nil) end }))",
    "whose __tostring fails" },
  { "raises_with_a_waiting_tostring", "error(setmetatable({}, { __tostring = function() tidemill.sleep(1) end }))",
    "whose __tostring fails" },
  { "raises_with_a_raising_index", "error(setmetatable({}, { __index = error, __pairs = error, __len = error }))",
    "the error is a table" },
  { "raises_ten_megabytes", "error(('é'):rep(5e6), 0)", "éé" },
  { "raises_no_utf8", "error('\\0\\255\\254 bytes', 0)", "bytes" },
  { "raises_in_a_coroutine", "coroutine.wrap(function() error 'inside' end)()", "inside" },
  { "raises_in_an_error_handler", "xpcall(function() error 'one' end, function() error 'two' end) error 'three'",
    "three" },
  { "yields_by_itself", "coroutine.yield(1, 2)", "coroutine.yield outside" },
  { "exits", "os.exit(true, true)", "os.exit would end every delivery" },
  { "retries_for_ever", "ctx:retry(1e300)", "expected seconds" },
  { "discards_in_a_callback", "('a'):gsub('a', function() ctx:discard() end)", "cannot wait inside" },
  { "publishes_a_cycle", "local t = {} t.t = t ctx:publish('a', t)", "payload" },
  { "publishes_too_much", "for _ = 1, 70 do ctx:publish('a', ('x'):rep(1024 * 1024 - 9)) end", "cannot publish more" },
  { "calls_a_number", "payload.n = 5 payload.n()", "attempt to call" },
  { "recurses", "local function f() return 1 + f() end f()", "stack overflow" },
  -- Overflows C's stack, or Lua's.
  { "recurses_in_gsub", "local function f() return (('a'):gsub('a', f)) end f()", "" },
  { "recurses_in_tostring", [[
    local t = setmetatable({}, { __tostring = function(t) return "x" .. tostring(t) end })
    tostring(t)]], "overflow" },
  { "sorts_without_an_order", [[
    local t = {}
    for i = 1, 100 do t[i] = i % 7 end
    table.sort(t, function() return true end)
    error "no order"]], "order" },
  { "asks_for_too_long_a_text", "local t = ('x'):rep(2 ^ 40) error('got ' .. #t)", "" },
  { "opens_every_file", "local t = {} while true do t[#t + 1] = assert(io.open '/dev/null') end", "Too many open" },
  { "changes_its_coroutine", "setfenv(0, {})", "setfenv" },
  { "reaches_for_the_registry", "debug.getregistry()[1] = nil", "debug.getregistry" },
  { "asks_for_what_is_no_sql", "tidemill.query 'selekt'", "syntax error" },
  { "ends_its_connection", "tidemill.query 'select pg_terminate_backend(pg_backend_pid())'", "terminating connection" },
  { "raises_in_a_transaction", [[
    tidemill.transaction(function(tx)
      tx:query "create table tidemill.left_over ()"
      error "in a transaction"
    end)]], "in a transaction" },
  { "loads_what_is_no_program", "assert(load '(')()", "unexpected symbol" },
  { "ends_well", "ctx:discard 'on purpose'", "on purpose", discarded = true },
}

-- ---- break what all share -----------------------------------------------------------------------

local changes = {
  { "has_no_format", "string.format = nil string.format = error" },
  { "has_no_string_methods", "debug.setmetatable('', nil)" },
  { "has_strange_strings", "getmetatable('').__index = function() return error end" },
  { "has_strange_numbers", "debug.setmetatable(0, { __add = error, __index = error, __call = error })" },
  { "has_strange_functions", "debug.setmetatable(print, { __index = error })" },
  { "has_strange_arrays", "getmetatable(tidemill.array()).__index = error" },
  { "calls_its_type_type", "type = payload.type or 'order'" },
  { "calls_its_next_next", "next, select, pairs, ipairs = 1, 2, 3, 4" },
  { "catches_everything", "pcall = function() return true end error = function() end" },
  { "calls_its_table_table", "table, string, os, io = {}, {}, {}, {}" },
  { "requires_nothing", "require = nil require = function() end package.loaders = {} package.path = ''" },
  { "forgets_all_modules", "for name in pairs(package.loaded) do package.loaded[name] = nil end" },
  { "has_its_own_globals", "pcall(setmetatable, _G, {}) debug.setmetatable(_G, { __index = error })" },
  { "sets_an_environment", "setfenv(1, {})" },
  { "stops_the_collector", "collectgarbage 'stop'" },
  { "tunes_the_collector", "collectgarbage('setpause', 1e6) collectgarbage('setstepmul', 1)" },
  { "switches_the_compiler_off", "jit.off() jit.flush()" },
  { "leaves_a_hook", "local n = 0 debug.sethook(function() n = n + 1 if n > 50 then error 'hook' end end, 'l')" },
  { "redirects_output", "io.output '/dev/full' io.write 'x'" },
  { "redirects_input", "io.input '/dev/zero'" },
  { "closes_output", "io.stdout:close() io.stderr:close() io.close()" },
  { "buffers_output", "io.stdout:setvbuf('full', 2 ^ 20) io.write 'x'" },
  { "writes_many_globals", "for i = 1, 500 do _G['many_' .. i] = i end" },
  { "has_no_tidemill", "tidemill.sleep, tidemill.publish, tidemill.log = error, error, error" },
  { "has_no_ctx", "for name in pairs(ctx) do ctx[name] = nil end" },
  { "keeps_its_ctx", "kept_ctx = rawget(_G, 'kept_ctx') or ctx pcall(kept_ctx.retry, kept_ctx, -1)" },
  { "prints_a_lot", "io.write(('x'):rep(5e6))" },
  { "returns_what_cannot_be_read", "return setmetatable({}, { __index = error, __tostring = error })" },
  { "changes_the_folder", "ffi.cdef 'int chdir(const char *);' ffi.C.chdir '/'" },
  { "forks", "ffi.cdef 'int fork(void);' ffi.C.fork()" },
  { "forks_and_waits", "ffi.cdef 'int fork(void);' ffi.C.fork() tidemill.sleep(0.05)" },
  { "leaves_forks", [[
    ffi.cdef "int fork(void); unsigned sleep(unsigned);"
    for _ = 1, 5 do
      if ffi.C.fork() == 0 then ffi.C.sleep(1000) end
    end]] },
  { "leaves_programs", "os.execute 'sleep 1000 & sleep 1000 >/dev/null 2>&1 &'" },
  { "leaves_pipes", [[
    for _ = 1, 3 do
      io.popen "exec sleep 1000"
      io.popen("cat >/dev/null; sleep 1000", "w"):write "x"
    end]] },
  { "leaves_raising_finalizers", [[
    for _ = 1, 3 do
      ffi.gc(ffi.new "int[1]", function() error "finalizer" end)
      getmetatable(newproxy(true)).__gc = error
    end]] },
  { "needs_much_memory_once", [[
    local t = {}
    for i = 1, 260 do t[i] = ("x"):rep(1024 * 1024 - i) end
    tidemill.sleep(1.2)]], memory = true },
}

-- ---- do not come back ---------------------------------------------------------------------------

local HELD = "held the processor"
local LATE = "exceeded its time limit of 2 s"

local hangs = {
  { "loops", "while true do end", HELD },
  { "loops_in_pcall", "while true do pcall(function() while true do end end) end", HELD },
  { "loops_interpreted", "local function f() while true do end end jit.off(f) f()", HELD },
  { "loops_over_errors", "while true do pcall(error, 'x') end", HELD },
  { "loops_in_a_callback", "('a'):gsub('a', function() while true do end end)", HELD },
  { "loops_in_a_comparison", "table.sort({ 3, 2, 1 }, function() while true do end end)", HELD },
  { "loops_in_a_metamethod", "return setmetatable({}, { __index = function() while true do end end }).x", HELD },
  { "loops_in_a_coroutine", [[
    local f = coroutine.wrap(function() while true do coroutine.yield() end end)
    while true do f() end]], HELD },
  { "loops_in_its_error", "error(setmetatable({}, { __tostring = function() while true do end end }))", HELD },
  { "loops_in_a_finalizer", [[
    getmetatable(newproxy(true)).__gc = function() while true do end end
    collectgarbage()]], HELD },
  { "matches_for_ever", "(('a'):rep(300)):find(('a-'):rep(20) .. 'b')", HELD },
  { "runs_a_program", "os.execute 'sleep 1000'", HELD },
  { "reads_a_program", "io.popen('sleep 1000'):read()", HELD },
  { "reads_a_pipe", [[
    local name = os.tmpname()
    os.remove(name)
    os.execute("mkfifo " .. name)
    io.open(name):read()]], HELD },
  { "sleeps_in_c", "ffi.cdef 'unsigned sleep(unsigned);' ffi.C.sleep(1000)", HELD },
  { "stops_itself", "ffi.cdef 'int raise(int);' ffi.C.raise(19)", HELD },
  { "waits_for_ever", "tidemill.sleep(3600)", LATE },
  { "waits_again_and_again", "while true do tidemill.sleep(0) end", LATE },
  { "queries_for_ever", "tidemill.query 'select pg_sleep(1000)'", LATE },
  { "locks_the_queue_and_waits", [[
    tidemill.transaction(function(tx)
      tx:query "lock table tidemill.queue_message in access exclusive mode"
      tidemill.sleep(1000)
    end)]], LATE },
  { "locks_the_queue_and_loops", [[
    tidemill.transaction(function(tx)
      tx:query "lock table tidemill.queue_message in access exclusive mode"
      while true do end
    end)]], { HELD, LATE } }, -- late where it had to wait for the lock
  { "waits_in_pcall", "while true do pcall(tidemill.sleep, 0.5) end", LATE },
  { "loops_when_it_is_late", "pcall(tidemill.sleep, 3600) while true do end", "the processor" },
}

-- ---- end their process --------------------------------------------------------------------------

-- Killed for its memory or, where the machine is so busy that it has not got far by then, for its time.
local EATEN = { "memory", HELD }
local CRASHED = "handler crashed its executor (signal "
local SOCKET = "ffi.cdef 'int close(int); int shutdown(int, int); int dup2(int, int);"
  .. " long write(int, const void *, size_t);' "

local crashes = {
  { "writes_to_null", "ffi.cast('int *', 0)[0] = 1", CRASHED .. "11, SIGSEGV" },
  { "calls_nowhere", "ffi.cast('void (*)(void)', 16)()", CRASHED .. "11, SIGSEGV" },
  { "overwrites_its_heap", "ffi.fill(ffi.new 'char[8]', 1e9, 65)", CRASHED .. "11, SIGSEGV" },
  { "aborts", "ffi.cdef 'void abort(void);' ffi.C.abort()", CRASHED .. "6, SIGABRT" },
  { "divides_by_zero", "ffi.cdef 'int raise(int);' ffi.C.raise(8)", CRASHED .. "8, SIGFPE" },
  { "kills_itself", "ffi.cdef 'int raise(int);' ffi.C.raise(9)", CRASHED .. "9, SIGKILL" },
  { "exits_in_c", "ffi.cdef 'void exit(int);' ffi.C.exit(3)", "handler ended its executor (exit code 3)" },
  { "exits_quickly_in_c", "ffi.cdef 'void _exit(int);' ffi.C._exit(0)", "handler ended its executor (exit code 0)" },
  { "is_killed_while_it_waits", [[
    ffi.cdef "int getpid(void);"
    os.execute(("(sleep 0.1; kill -9 %d) >/dev/null 2>&1 &"):format(ffi.C.getpid()))
    tidemill.sleep(60)]], CRASHED .. "9, SIGKILL" },
  { "recurses_in_coroutines", "local function f() coroutine.wrap(f)() end f()", "" },
  { "eats_memory", "local t = {} while true do t[#t + 1] = ('x'):rep(1e6) .. #t spin(0.0002) end", EATEN,
    memory = true },
  { "doubles_a_text", "local t = 'x' while true do t = t .. t spin(0.001) end", EATEN, memory = true },
  { "eats_memory_in_c", [[
    ffi.cdef "void *malloc(size_t);"
    while true do
      ffi.fill(ffi.C.malloc(1e7), 1e7, 1)
      spin(0.003)
    end]], EATEN, memory = true },
  { "closes_the_socket", SOCKET .. "ffi.C.close(3)", "executor" },
  { "closes_the_socket_and_waits", SOCKET .. "ffi.C.close(3) tidemill.sleep(60)", "executor" },
  { "shuts_the_socket_down", SOCKET .. "ffi.C.shutdown(3, 2)", "executor" },
  { "puts_a_file_on_the_socket", SOCKET .. "ffi.C.dup2(0, 3)", "executor" },
  { "writes_to_the_socket", SOCKET .. "ffi.C.write(3, ('garbage'):rep(100), 700)", "executor" },
  { "writes_a_huge_length", SOCKET .. "ffi.C.write(3, ('\\255'):rep(64), 64) spin(0.5)", "executor" },
  { "writes_half_a_frame", SOCKET .. "ffi.C.write(3, '\\9\\0\\0\\0', 4)", "executor" },
  { "closes_every_descriptor", SOCKET .. "for fd = 3, 100 do ffi.C.close(fd) end", "executor" },
}

return {
  { title = "raise", scripts = errors },
  { title = "change what all of their process share", scripts = changes },
  { title = "do not come back", scripts = hangs },
  { title = "end their process", scripts = crashes },
}
