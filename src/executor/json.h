/*
 * JSON for handlers: text to Lua values and back, with nothing changed on the way.
 *
 * What lua-cjson does not keep is kept here: an empty array stays an array, and a number that a Lua
 * number cannot carry stays the same number (see mill_json_decode). Must not know queues, messages
 * or the loop. Executor process, and the Lua module `tidemill.native` in any program.
 *
 * How JSON values look in Lua:
 *
 *     null            tidemill.null, the light userdata NULL (also lua-cjson's null)
 *     true, false     boolean
 *     string          string, UTF-8
 *     number          number, or `decimal` (userdata) where a number would lose digits
 *     array           table with the array metatable, 1…n
 *     object          table without a metatable; keys are strings
 */
#pragma once

#include <lua.h>

#include "core/err.h"
#include "core/frame.h"

#define MILL_JSON_DEPTH 1000 /* arrays and objects nested deeper are refused, both ways */

/*
 * Registers the metatables of arrays and decimals in the state and makes null print as `null`. Must
 * run once a state before anything below; again is harmless. May raise out of memory.
 */
void mill_json_open(lua_State *L);

/*
 * Reads one JSON text (RFC 8259, strictly) and pushes its value. `text` needs no NUL at its end and
 * may move or go afterwards. Returns 0; or -1 with nothing pushed, and `err` (MILL_ERR_INPUT) tells
 * the byte, counted from 1, and what is wrong there.
 *
 * A number becomes a Lua number when mill_json_encode would write that Lua number with the same
 * value (0.1, 42, 1.50, 1e2), and a decimal otherwise (12345678901234567890, 1e400). Of duplicate
 * keys the last wins, as in jsonb. `\u0000` becomes a NUL byte; lone surrogates and bad UTF-8 are
 * refused.
 *
 * Bad input never raises, but memory can run out: call it protected. Uses the Lua stack above its
 * top, runs no Lua code and never yields.
 */
int mill_json_decode(lua_State *L, const char *text, size_t len, struct mill_err *err);

/* The same where values that may be nested that deep stand in something: how deep all of it may be.
 */
int mill_json_decode_within(lua_State *L, const char *text, size_t len, int depth_max,
                            struct mill_err *err);

/*
 * Appends the value at `index` to `out` as JSON without spaces. `name` is what the value is called
 * in messages: with `payload` an error reads
 *
 *     payload.items[3].price: a function cannot be written as JSON
 *
 * Returns 0; or -1 with `err` (MILL_ERR_INPUT) and `out` as it was. The stack is left as it was.
 *
 * nil and null are `null`. A table marked as an array, or one whose keys are exactly 1…n, n > 0, is
 * an array; one with string keys only, or empty, an object; any other mix is refused, never
 * guessed. Tables are read raw: metamethods are not called, so no Lua code runs and it never
 * yields. Decimals and the FFI's int64_t and uint64_t are written exactly, other numbers as the
 * shortest text that reads back the same, whatever the locale. Refused: NaN and infinities, NUL
 * bytes and bad UTF-8 (Postgres stores neither), functions, threads, other userdata and cdata.
 *
 * Memory can run out: call it protected, with `out` owned by something that outlives a raise.
 */
int mill_json_encode(lua_State *L, int index, const char *name, struct mill_buffer *out,
                     struct mill_err *err);

/*
 * Pushes the number written in `text` as mill_json_decode would: a number or a decimal. For int8
 * and numeric columns. Returns 0; or -1 with nothing pushed when the text is no JSON number (`NaN`,
 * `+1`,
 * `.5`). May raise out of memory.
 */
int mill_json_push_number(lua_State *L, const char *text, size_t len, struct mill_err *err);

/* Push tidemill.null, which is not nil. */
void mill_json_push_null(lua_State *L);
bool mill_json_is_null(lua_State *L, int index);

/*
 * The text of the decimal at `index`, which lives as long as the value; NULL when it is no decimal.
 * `len` may be NULL. So a parameter of a query can be a decimal.
 */
const char *mill_json_decimal_text(lua_State *L, int index, size_t *len);

/* Marks the table at `index` as an array. */
void mill_json_mark_array(lua_State *L, int index);

/*
 * The Lua module `tidemill.native`: null, array_mt, array, decode, encode, decimal, uuid, now. The
 * executor preloads it; a plain LuaJIT program requires it as a shared object. Calls
 * mill_json_open.
 */
int luaopen_tidemill_native(lua_State *L);
