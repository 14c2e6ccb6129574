/* A manifest as Lua fills it: see settings.h. */
#include "executor/settings.h"

#include <lauxlib.h>

#include "core/config.h"

static struct mill_manifest *manifest_of(lua_State *L)
{
	return lua_touserdata(L, lua_upvalueindex(1));
}

static struct mill_value value_at(lua_State *L, int index)
{
	struct mill_value value = { .kind = MILL_VALUE_OTHER, .text = luaL_typename(L, index) };
	switch (lua_type(L, index)) {
	case LUA_TSTRING:
		value.kind = MILL_VALUE_TEXT;
		value.text = lua_tolstring(L, index, &value.text_len);
		break;
	case LUA_TNUMBER:
		value.kind = MILL_VALUE_NUMBER;
		value.number = lua_tonumber(L, index);
		break;
	case LUA_TBOOLEAN:
		value.kind = MILL_VALUE_BOOLEAN;
		value.boolean = lua_toboolean(L, index);
		break;
	}
	return value;
}

/* Returns to Lua: nothing, or what is wrong. */
static int answer(lua_State *L, int failed, const struct mill_err *err)
{
	if (!failed)
		return 0;
	lua_pushstring(L, err->message);
	return 1;
}

/* The row of a key; NULL with what is wrong pushed when there is none for a plain value. */
static const struct mill_config_key *find_key(lua_State *L, enum mill_config_scope scope,
                                              const char *name)
{
	const struct mill_config_key *key = mill_config_find(scope, name);
	if (key != NULL && key->kind != MILL_KEY_STRUCTURE)
		return key;
	const char *near = mill_config_suggest(scope, name);
	if (key == NULL && near != NULL)
		lua_pushfstring(L, "unknown key, did you mean `%s`?", near);
	else
		lua_pushstring(L, key == NULL ? "unknown key" : "has no place here");
	return NULL;
}

/* setting(key, value) */
static int l_setting(lua_State *L)
{
	const struct mill_config_key *key = find_key(L, MILL_SCOPE_APP, luaL_checkstring(L, 1));
	if (key == NULL)
		return 1;
	struct mill_err err = MILL_ERR_INIT;
	struct mill_value value = value_at(L, 2);
	return answer(L, mill_config_set(&manifest_of(L)->settings, key, &value, &err), &err);
}

/* lane(topic, subscriber, label) → the lane's number and its topic as it counts, or nil and what is
 * wrong */
static int l_lane(lua_State *L)
{
	struct mill_manifest *manifest = manifest_of(L);
	struct mill_span topic, subscriber;
	topic.data = luaL_checklstring(L, 1, &topic.len);
	subscriber.data = luaL_checklstring(L, 2, &subscriber.len);
	struct mill_manifest_lane *lane;
	struct mill_err err = MILL_ERR_INIT;
	if (mill_manifest_add(manifest, topic, subscriber, luaL_checkstring(L, 3), &lane, &err) !=
	    0) {
		lua_pushnil(L);
		lua_pushstring(L, err.message);
		return 2;
	}
	lua_pushinteger(L, (lua_Integer)(lane - manifest->lanes));
	lua_pushstring(L, lane->topic);
	return 2;
}

static struct mill_lane_options *lane_options_at(lua_State *L, int index)
{
	struct mill_manifest *manifest = manifest_of(L);
	lua_Integer number = luaL_checkinteger(L, index);
	luaL_argcheck(L, number >= 0 && (size_t)number < manifest->lane_count, index, "no lane");
	return &manifest->lanes[number].options;
}

/* lane_option(number of a lane, key, value) */
static int l_lane_option(lua_State *L)
{
	struct mill_lane_options *options = lane_options_at(L, 1);
	const struct mill_config_key *key =
	        find_key(L, MILL_SCOPE_SUBSCRIPTION, luaL_checkstring(L, 2));
	if (key == NULL)
		return 1;
	struct mill_err err = MILL_ERR_INIT;
	struct mill_value value = value_at(L, 3);
	return answer(L, mill_config_set_lane(options, key, &value, &err), &err);
}

/* text(key) → the setting as it stands */
static int l_text(lua_State *L)
{
	struct mill_settings *settings = &manifest_of(L)->settings;
	const char *name = luaL_checkstring(L, 1);
	const struct mill_config_key *key = mill_config_find(MILL_SCOPE_APP, name);
	luaL_argcheck(L, key != NULL && key->kind == MILL_KEY_TEXT, 1, "no setting that is a text");
	lua_pushstring(L, *(char **)((char *)settings + key->offset));
	return 1;
}

/* lane_limits(number of a lane) → its max_attempts and its timeout_secs as they stand */
static int l_lane_limits(lua_State *L)
{
	const struct mill_lane_options *options = lane_options_at(L, 1);
	lua_pushnumber(L, (double)options->max_attempts);
	lua_pushnumber(L, options->timeout_secs);
	return 2;
}

static const luaL_Reg functions[] = {
	{ "setting", l_setting },         { "lane", l_lane }, { "lane_option", l_lane_option },
	{ "lane_limits", l_lane_limits }, { "text", l_text }, { NULL, NULL },
};

void mill_settings_open(lua_State *L)
{
	luaL_setfuncs(L, functions, 1);
}

/* ---- a manifest that Lua owns ------------------------------------------------------------- */

static int l_manifest_gc(lua_State *L)
{
	mill_manifest_free(lua_touserdata(L, 1));
	return 0;
}

int mill_settings_new(lua_State *L)
{
	lua_newtable(L);
	struct mill_manifest *manifest = lua_newuserdata(L, sizeof(*manifest));
	mill_manifest_init(manifest);
	lua_createtable(L, 0, 1);
	lua_pushcfunction(L, l_manifest_gc);
	lua_setfield(L, -2, "__gc");
	lua_setmetatable(L, -2);
	mill_settings_open(L);
	return 1;
}
