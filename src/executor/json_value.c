/* Null, array marks and decimals as Lua values: see json.h and json_value.h. */
#include "executor/json_value.h"

#include <lauxlib.h>

#include "executor/json_number.h"

#define TYPE_CDATA 10 /* LuaJIT's type of FFI values, which lua.h does not name */

/* ---- null ------------------------------------------------------------------------------ */

void mill_json_push_null(lua_State *L)
{
	lua_pushlightuserdata(L, NULL);
}

bool mill_json_is_null(lua_State *L, int index)
{
	return lua_type(L, index) == LUA_TLIGHTUSERDATA && lua_touserdata(L, index) == NULL;
}

static int l_light_tostring(lua_State *L)
{
	if (mill_json_is_null(L, 1))
		lua_pushliteral(L, "null");
	else
		lua_pushfstring(L, "userdata: %p", lua_touserdata(L, 1));
	return 1;
}

/*
 * All light userdata share one metatable. When somebody set one already it is theirs, and null
 * prints as they say.
 */
static void open_null(lua_State *L)
{
	mill_json_push_null(L);
	if (lua_getmetatable(L, -1)) {
		lua_pop(L, 2);
		return;
	}
	lua_createtable(L, 0, 1);
	lua_pushcfunction(L, l_light_tostring);
	lua_setfield(L, -2, "__tostring");
	lua_setmetatable(L, -2);
	lua_pop(L, 1);
}

/* ---- arrays ---------------------------------------------------------------------------- */

void mill_json_mark_array(lua_State *L, int index)
{
	lua_pushvalue(L, index);
	luaL_getmetatable(L, MILL_JSON_ARRAY);
	lua_setmetatable(L, -2);
	lua_pop(L, 1);
}

/* ---- decimals -------------------------------------------------------------------------- */

struct decimal {
	size_t len;
	char text[];
};

void mill_json_push_decimal(lua_State *L, const char *text, size_t len)
{
	struct decimal *decimal = lua_newuserdata(L, sizeof(*decimal) + len);
	decimal->len = len;
	memcpy(decimal->text, text, len);
	luaL_getmetatable(L, MILL_JSON_DECIMAL);
	lua_setmetatable(L, -2);
}

static struct decimal *to_decimal(lua_State *L, int index)
{
	struct decimal *decimal = NULL;
	if (lua_type(L, index) != LUA_TUSERDATA || !lua_getmetatable(L, index))
		return NULL;
	luaL_getmetatable(L, MILL_JSON_DECIMAL);
	if (lua_rawequal(L, -1, -2))
		decimal = lua_touserdata(L, index < 0 ? index - 2 : index);
	lua_pop(L, 2);
	return decimal;
}

const char *mill_json_decimal_text(lua_State *L, int index, size_t *len)
{
	struct decimal *decimal = to_decimal(L, index);
	if (decimal == NULL)
		return NULL;
	if (len != NULL)
		*len = decimal->len;
	return decimal->text;
}

static struct decimal *check_decimal(lua_State *L, int index)
{
	struct decimal *decimal = to_decimal(L, index);
	if (decimal == NULL)
		luaL_argerror(L, index, "a decimal expected");
	return decimal;
}

static struct mill_number number_of(const struct decimal *decimal)
{
	struct mill_number number;
	size_t bad_at;
	mill_number_scan(decimal->text, decimal->len, &number, &bad_at);
	return number;
}

static int l_decimal_tostring(lua_State *L)
{
	struct decimal *decimal = check_decimal(L, 1);
	lua_pushlstring(L, decimal->text, decimal->len);
	return 1;
}

static int l_decimal_number(lua_State *L)
{
	struct mill_number number = number_of(check_decimal(L, 1));
	lua_pushnumber(L, mill_number_nearest(&number));
	return 1;
}

static int compare(lua_State *L)
{
	struct mill_number a = number_of(check_decimal(L, 1));
	struct mill_number b = number_of(check_decimal(L, 2));
	return mill_number_compare(&a, &b);
}

static int l_decimal_eq(lua_State *L)
{
	lua_pushboolean(L, compare(L) == 0);
	return 1;
}

static int l_decimal_lt(lua_State *L)
{
	lua_pushboolean(L, compare(L) < 0);
	return 1;
}

static int l_decimal_le(lua_State *L)
{
	lua_pushboolean(L, compare(L) <= 0);
	return 1;
}

/* `text .. decimal`: either side may be the decimal, the other is a text or a number. */
static int l_decimal_concat(lua_State *L)
{
	for (int i = 1; i <= 2; i++) {
		size_t len;
		const char *text = mill_json_decimal_text(L, i, &len);
		if (text != NULL)
			lua_pushlstring(L, text, len);
		else if (lua_isstring(L, i))
			lua_pushvalue(L, i);
		else
			return luaL_error(L, "attempt to concatenate a decimal with a %s",
			                  luaL_typename(L, i));
	}
	lua_concat(L, 2);
	return 1;
}

static int l_decimal_arithmetic(lua_State *L)
{
	return luaL_error(
	        L, "a decimal holds more digits than a Lua number, so it has no arithmetic: use "
	           "decimal:number(), which rounds, or tostring(decimal) for its digits");
}

static void open_decimal(lua_State *L)
{
	static const luaL_Reg events[] = {
		{ "__tostring", l_decimal_tostring },
		{ "__eq", l_decimal_eq },
		{ "__lt", l_decimal_lt },
		{ "__le", l_decimal_le },
		{ "__concat", l_decimal_concat },
		{ "__add", l_decimal_arithmetic },
		{ "__sub", l_decimal_arithmetic },
		{ "__mul", l_decimal_arithmetic },
		{ "__div", l_decimal_arithmetic },
		{ "__mod", l_decimal_arithmetic },
		{ "__pow", l_decimal_arithmetic },
		{ "__unm", l_decimal_arithmetic },
	};
	if (luaL_newmetatable(L, MILL_JSON_DECIMAL)) {
		for (size_t i = 0; i < MILL_COUNT(events); i++) {
			lua_pushcfunction(L, events[i].func);
			lua_setfield(L, -2, events[i].name);
		}
		lua_createtable(L, 0, 1);
		lua_pushcfunction(L, l_decimal_number);
		lua_setfield(L, -2, "number");
		lua_setfield(L, -2, "__index");
	}
	lua_pop(L, 1);
}

int mill_json_push_number(lua_State *L, const char *text, size_t len, struct mill_err *err)
{
	size_t bad_at;
	double value;
	bool exact;
	if (len == 0 || mill_number_read(text, len, &value, &exact, &bad_at) != len)
		return mill_err_set(err, MILL_ERR_INPUT, "`%.*s` is not a number",
		                    len > 40 ? 40 : (int)len, text);
	if (exact)
		lua_pushnumber(L, value);
	else
		mill_json_push_decimal(L, text, len);
	return 0;
}

/* ---- 64-bit integers of the FFI -------------------------------------------------------- */

#define KEPT_ISTYPE "tidemill.ffi.istype"
#define KEPT_SIGNED "tidemill.ffi.int64"
#define KEPT_UNSIGNED "tidemill.ffi.uint64"

/* Keeps what tells the integers from other cdata, before a handler can change the ffi table. */
static void open_int64(lua_State *L)
{
	static const char *const types[][2] = { { "int64_t", KEPT_SIGNED },
		                                { "uint64_t", KEPT_UNSIGNED } };
	int top = lua_gettop(L);
	lua_getglobal(L, "require");
	lua_pushliteral(L, "ffi");
	if (lua_isnil(L, -2) || lua_pcall(L, 1, 1, 0) != 0) {
		lua_settop(L, top); /* a state without the FFI has no cdata either */
		return;
	}
	int ffi = lua_gettop(L);
	lua_getfield(L, ffi, "istype");
	lua_setfield(L, LUA_REGISTRYINDEX, KEPT_ISTYPE);
	for (size_t i = 0; i < MILL_COUNT(types); i++) {
		lua_getfield(L, ffi, "typeof");
		lua_pushstring(L, types[i][0]);
		lua_call(L, 1, 1);
		lua_setfield(L, LUA_REGISTRYINDEX, types[i][1]);
	}
	lua_settop(L, top);
}

static bool is_type(lua_State *L, int index, const char *kept)
{
	lua_getfield(L, LUA_REGISTRYINDEX, KEPT_ISTYPE);
	lua_getfield(L, LUA_REGISTRYINDEX, kept);
	lua_pushvalue(L, index);
	lua_call(L, 2, 1);
	bool yes = lua_toboolean(L, -1);
	lua_pop(L, 1);
	return yes;
}

bool mill_json_cdata_int64(lua_State *L, int index, uint64_t *magnitude, bool *negative)
{
	if (lua_type(L, index) != TYPE_CDATA)
		return false;
	index = index < 0 ? lua_gettop(L) + index + 1 : index;
	bool is_signed = is_type(L, index, KEPT_SIGNED);
	if (!is_signed && !is_type(L, index, KEPT_UNSIGNED))
		return false;
	uint64_t bits;
	memcpy(&bits, lua_topointer(L, index), sizeof(bits));
	*negative = is_signed && (int64_t)bits < 0;
	*magnitude = *negative ? 0 - bits : bits;
	return true;
}

void mill_json_open(lua_State *L)
{
	luaL_newmetatable(L, MILL_JSON_ARRAY);
	lua_pop(L, 1);
	open_null(L);
	open_decimal(L);
	open_int64(L);
}
