/* Checks, JSON and log lines for the Lua modules: see host.h. */
#include "executor/host.h"

#include <lauxlib.h>
#include <math.h>

#include "core/log.h"
#include "core/policy.h"
#include "executor/json.h"

#define LOG_TEXT_MAX (16 * 1024) /* bytes of one text in a handler's log line */
#define LOG_FIELDS_MAX 32        /* fields that a handler may add to its line */
#define SCRATCH_KEEP (1024 * 1024)

/* topic(text) → the topic without white space around it, or nil and what is wrong. */
static int l_topic(lua_State *L)
{
	size_t len;
	const char *text = luaL_checklstring(L, 1, &len), *topic;
	struct mill_err err = MILL_ERR_INIT;
	if (mill_policy_topic(text, len, &topic, &len, &err) == 0) {
		lua_pushlstring(L, topic, len);
		return 1;
	}
	lua_pushnil(L);
	lua_pushstring(L, err.message);
	return 2;
}

static struct mill_field log_field(lua_State *L, const char *name, int index)
{
	if (lua_type(L, index) == LUA_TNUMBER) {
		double number = lua_tonumber(L, index);
		if (number == floor(number) && fabs(number) <= 9007199254740992.0)
			return MILL_INT(name, number);
	}
	size_t len;
	const char *text = luaL_checklstring(L, index, &len);
	return MILL_TEXT_N(name, text, mill_policy_boundary(text, len, LOG_TEXT_MAX));
}

/*
 * log(level, event, text or nil, name, value, …): one line, about the delivery that runs. `level`
 * is one of mill_log_level; names are checked and values are strings or numbers:
 * lua/tidemill/log.lua sees to that.
 */
static int l_log(lua_State *L)
{
	const struct mill_speaker *const *speaker = lua_touserdata(L, lua_upvalueindex(1));
	int level = luaL_checkint(L, 1), top = lua_gettop(L);
	const char *event = luaL_checkstring(L, 2);
	luaL_argcheck(L, level >= MILL_LOG_DEBUG && level <= MILL_LOG_ERROR, 1, "no log level");
	luaL_argcheck(L, top - 3 <= 2 * LOG_FIELDS_MAX, top, "too many fields");
	struct mill_field fields[5 + LOG_FIELDS_MAX + 1];
	size_t n = 0;
	if (speaker != NULL && *speaker != NULL) {
		fields[n++] = MILL_TEXT("message_id", (*speaker)->message_id);
		fields[n++] = MILL_TEXT("topic", (*speaker)->topic);
		fields[n++] = MILL_TEXT("subscriber", (*speaker)->subscriber);
		fields[n++] = MILL_INT("attempt", (*speaker)->attempt);
	}
	if (!lua_isnoneornil(L, 3))
		fields[n++] = log_field(L, "text", 3);
	for (int i = 4; i + 1 <= top; i += 2)
		fields[n++] = log_field(L, luaL_checkstring(L, i), i + 1);
	fields[n] = MILL_FIELD_LAST;
	mill_log_write((enum mill_log_level)level, event, fields);
	return 0;
}

/* encode(value, name) → JSON, or nil and what is wrong, in which the value is called `name`. */
static int l_encode(lua_State *L)
{
	struct mill_buffer *scratch = lua_touserdata(L, lua_upvalueindex(1));
	struct mill_err err = MILL_ERR_INIT;
	luaL_checkany(L, 1);
	/* The state owns the buffer: running out of memory half way leaks nothing. */
	scratch->len = 0;
	if (mill_json_encode(L, 1, luaL_checkstring(L, 2), scratch, &err) != 0) {
		lua_pushnil(L);
		lua_pushstring(L, err.message);
		return 2;
	}
	lua_pushlstring(L, scratch->data, scratch->len);
	if (scratch->cap > SCRATCH_KEEP)
		mill_buffer_free(scratch);
	return 1;
}

static int l_scratch_gc(lua_State *L)
{
	mill_buffer_free(lua_touserdata(L, 1));
	return 0;
}

static void push_scratch(lua_State *L)
{
	struct mill_buffer *scratch = lua_newuserdata(L, sizeof(*scratch));
	*scratch = (struct mill_buffer){ 0 };
	lua_createtable(L, 0, 1);
	lua_pushcfunction(L, l_scratch_gc);
	lua_setfield(L, -2, "__gc");
	lua_setmetatable(L, -2);
}

void mill_host_open(lua_State *L, const struct mill_speaker *const *speaker)
{
	lua_pushcfunction(L, l_topic);
	lua_setfield(L, -2, "topic");
	push_scratch(L);
	lua_pushcclosure(L, l_encode, 1);
	lua_setfield(L, -2, "encode");
	lua_pushlightuserdata(L, (void *)speaker);
	lua_pushcclosure(L, l_log, 1);
	lua_setfield(L, -2, "log");
	lua_pushinteger(L, mill_log_threshold());
	lua_setfield(L, -2, "log_threshold");
}
