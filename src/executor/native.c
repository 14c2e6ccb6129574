/*
 * The Lua module `tidemill.native`: what of the Lua library is written in C. It is a face only: it
 * takes arguments apart and raises. The same in an executor, which preloads it, and in a plain
 * LuaJIT program, which loads it as a shared object; so it must not know whether a runtime is
 * there.
 */
#include <lauxlib.h>
#include <time.h>

#include "core/uuid.h"
#include "executor/connection.h"
#include "executor/host.h"
#include "executor/json.h"
#include "executor/json_number.h"
#include "executor/json_value.h"
#include "executor/settings.h"
#include "executor/sql_value.h"
#include "pg/statement.h"

/* Kept between calls of encode; a larger one is given back after the call. */
#define KEPT_BYTES (1024 * 1024)

/* Raises with the position of the Lua code that called. */
static int raise(lua_State *L, const struct mill_err *err)
{
	return luaL_error(L, "%s", err->message);
}

static int decode(lua_State *L, int depth_max)
{
	struct mill_err err = MILL_ERR_INIT;
	size_t len;
	luaL_checktype(L, 1, LUA_TSTRING);
	const char *text = lua_tolstring(L, 1, &len);
	if (mill_json_decode_within(L, text, len, depth_max, &err) != 0)
		return raise(L, &err);
	return 1;
}

static int l_decode(lua_State *L)
{
	return decode(L, MILL_JSON_DEPTH);
}

/* What the library itself made of payloads: an item of publish_many, or the list. */
static int l_decode_items(lua_State *L)
{
	return decode(L, MILL_JSON_DEPTH + 2);
}

static int l_buffer_gc(lua_State *L)
{
	mill_buffer_free(lua_touserdata(L, 1));
	return 0;
}

/*
 * The buffer is an upvalue, so that no raise leaks it. What is written goes behind what is there: a
 * debug hook might encode while an encode is under way.
 */
static int l_encode(lua_State *L)
{
	struct mill_err err = MILL_ERR_INIT;
	struct mill_buffer *buffer = lua_touserdata(L, lua_upvalueindex(1));
	size_t start = buffer->len;
	luaL_checkany(L, 1);
	if (mill_json_encode(L, 1, "value", buffer, &err) != 0)
		return raise(L, &err);
	size_t len = buffer->len - start;
	buffer->len = start;
	lua_pushlstring(L, buffer->data + start, len);
	if (buffer->cap > KEPT_BYTES && start == 0)
		mill_buffer_free(buffer);
	return 1;
}

static void push_encode(lua_State *L)
{
	struct mill_buffer *buffer = lua_newuserdata(L, sizeof(*buffer));
	*buffer = (struct mill_buffer){ 0 };
	lua_createtable(L, 0, 1);
	lua_pushcfunction(L, l_buffer_gc);
	lua_setfield(L, -2, "__gc");
	lua_setmetatable(L, -2);
	lua_pushcclosure(L, l_encode, 1);
}

static int l_array(lua_State *L)
{
	if (lua_isnoneornil(L, 1)) {
		lua_settop(L, 0);
		lua_newtable(L);
	} else {
		luaL_checktype(L, 1, LUA_TTABLE);
		lua_settop(L, 1);
	}
	if (lua_getmetatable(L, 1)) {
		luaL_getmetatable(L, MILL_JSON_ARRAY);
		luaL_argcheck(L, lua_rawequal(L, -1, -2), 1,
		              "a table without a metatable expected, which array would replace");
		lua_settop(L, 1);
	} else {
		mill_json_mark_array(L, 1);
	}
	return 1;
}

static int l_is_array(lua_State *L)
{
	luaL_checkany(L, 1);
	bool marked = false;
	if (lua_type(L, 1) == LUA_TTABLE && lua_getmetatable(L, 1)) {
		luaL_getmetatable(L, MILL_JSON_ARRAY);
		marked = lua_rawequal(L, -1, -2);
	}
	lua_pushboolean(L, marked);
	return 1;
}

/* decimal(text or number or decimal): a decimal, even where a Lua number would do. */
static int l_decimal(lua_State *L)
{
	char written[MILL_NUMBER_TEXT];
	struct mill_number number;
	size_t len, bad_at;
	const char *text = mill_json_decimal_text(L, 1, &len);
	if (text != NULL) {
		lua_settop(L, 1);
		return 1;
	}
	if (lua_type(L, 1) == LUA_TNUMBER) {
		double value = lua_tonumber(L, 1);
		luaL_argcheck(L, value - value == 0, 1, "a finite number expected");
		len = mill_number_write(value, written);
		text = written;
	} else {
		luaL_checktype(L, 1, LUA_TSTRING);
		text = lua_tolstring(L, 1, &len);
		luaL_argcheck(L, len > 0 && mill_number_scan(text, len, &number, &bad_at) == len, 1,
		              "a number as JSON writes it expected, such as -12.50 or 1e400");
	}
	mill_json_push_decimal(L, text, len);
	return 1;
}

static int l_is_decimal(lua_State *L)
{
	luaL_checkany(L, 1);
	lua_pushboolean(L, mill_json_decimal_text(L, 1, NULL) != NULL);
	return 1;
}

static int l_uuid(lua_State *L)
{
	uint8_t id[16];
	char text[37];
	mill_uuid_v7(id);
	mill_uuid_text(id, text);
	lua_pushlstring(L, text, 36);
	return 1;
}

/* Wall clock, seconds since 1970. */
static int l_now(lua_State *L)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	lua_pushnumber(L, (double)now.tv_sec + (double)now.tv_nsec / 1e9);
	return 1;
}

/* ends_transaction(sql) → whether the statement would end the transaction it stands in. */
static int l_ends_transaction(lua_State *L)
{
	struct mill_span sql;
	sql.data = luaL_checklstring(L, 1, &sql.len);
	lua_pushboolean(L, mill_statement_ends_transaction(sql));
	return 1;
}

/* host() → a new table of what modules ask of their program, for one that is no executor. */
static int l_host(lua_State *L)
{
	lua_newtable(L);
	mill_host_open(L, NULL);
	return 1;
}

__attribute__((visibility("default"))) int luaopen_tidemill_native(lua_State *L)
{
	static const luaL_Reg functions[] = {
		{ "decode", l_decode },
		{ "decode_items", l_decode_items },
		{ "array", l_array },
		{ "is_array", l_is_array },
		{ "decimal", l_decimal },
		{ "is_decimal", l_is_decimal },
		{ "uuid", l_uuid },
		{ "now", l_now },
		{ "ends_transaction", l_ends_transaction },
		{ "host", l_host },
		{ "connect", mill_connection_open },
		{ "settings", mill_settings_new },
	};
	mill_json_open(L);
	lua_createtable(L, 0, 16);
	for (size_t i = 0; i < MILL_COUNT(functions); i++) {
		lua_pushcfunction(L, functions[i].func);
		lua_setfield(L, -2, functions[i].name);
	}
	mill_sql_push_encoder(L);
	lua_setfield(L, -2, "arguments");
	push_encode(L);
	lua_setfield(L, -2, "encode");
	mill_json_push_null(L);
	lua_setfield(L, -2, "null");
	luaL_getmetatable(L, MILL_JSON_ARRAY);
	lua_setfield(L, -2, "array_mt");
	return 1;
}
