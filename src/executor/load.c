/* From config.lua to a manifest: see load.h. */
#include "executor/load.h"

#include <lauxlib.h>

/* What the C functions given to lua/tidemill/load.lua work on. */
struct loading {
	const struct mill_load *load;
	struct mill_loaded *loaded;
	struct mill_buffer *problems;
	bool done;
};

static struct loading *loading_of(lua_State *L)
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
	struct loading *loading = loading_of(L);
	const struct mill_config_key *key = find_key(L, MILL_SCOPE_APP, luaL_checkstring(L, 1));
	if (key == NULL)
		return 1;
	struct mill_err err = MILL_ERR_INIT;
	struct mill_value value = value_at(L, 2);
	return answer(L, mill_config_set(&loading->loaded->manifest.settings, key, &value, &err),
	              &err);
}

/* lane(topic, subscriber, label) → the lane's number and its topic as it counts, or nil and what is
 * wrong */
static int l_lane(lua_State *L)
{
	struct loading *loading = loading_of(L);
	struct mill_span topic, subscriber;
	topic.data = luaL_checklstring(L, 1, &topic.len);
	subscriber.data = luaL_checklstring(L, 2, &subscriber.len);
	struct mill_manifest_lane *lane;
	struct mill_err err = MILL_ERR_INIT;
	if (mill_manifest_add(&loading->loaded->manifest, topic, subscriber, luaL_checkstring(L, 3),
	                      &lane, &err) != 0) {
		lua_pushnil(L);
		lua_pushstring(L, err.message);
		return 2;
	}
	lua_pushinteger(L, (lua_Integer)(lane - loading->loaded->manifest.lanes));
	lua_pushstring(L, lane->topic);
	return 2;
}

/* lane_option(number of a lane, key, value) */
static int l_lane_option(lua_State *L)
{
	struct loading *loading = loading_of(L);
	lua_Integer number = luaL_checkinteger(L, 1);
	luaL_argcheck(L, number >= 0 && (size_t)number < loading->loaded->manifest.lane_count, 1,
	              "no lane");
	const struct mill_config_key *key =
	        find_key(L, MILL_SCOPE_SUBSCRIPTION, luaL_checkstring(L, 2));
	if (key == NULL)
		return 1;
	struct mill_err err = MILL_ERR_INIT;
	struct mill_value value = value_at(L, 3);
	struct mill_lane_options *options = &loading->loaded->manifest.lanes[number].options;
	return answer(L, mill_config_set_lane(options, key, &value, &err), &err);
}

/* text(key) → the setting as it stands */
static int l_text(lua_State *L)
{
	struct mill_settings *settings = &loading_of(L)->loaded->manifest.settings;
	const char *name = luaL_checkstring(L, 1);
	const struct mill_config_key *key = mill_config_find(MILL_SCOPE_APP, name);
	luaL_argcheck(L, key != NULL && key->kind == MILL_KEY_TEXT, 1, "no setting that is a text");
	lua_pushstring(L, *(char **)((char *)settings + key->offset));
	return 1;
}

static const luaL_Reg functions[] = {
	{ "setting", l_setting }, { "lane", l_lane }, { "lane_option", l_lane_option },
	{ "text", l_text },       { NULL, NULL },
};

/* The list of problems on top of the stack, one line each. */
static void note_problems(lua_State *L, struct mill_buffer *problems)
{
	for (int i = 1;; i++) {
		lua_rawgeti(L, -1, i);
		size_t len;
		const char *text = lua_tolstring(L, -1, &len);
		if (text == NULL)
			break;
		if (i > 1)
			mill_buffer_text(problems, "\n");
		mill_buffer_bytes(problems, text, len);
		lua_pop(L, 1);
	}
	lua_pop(L, 1);
}

/*
 * From a table topic → subscriber → lane, on top of the stack, to a list in the manifest's order,
 * so that a DELIVER finds its handler by index.
 */
static void order_lanes(lua_State *L, const struct mill_manifest *manifest)
{
	lua_createtable(L, (int)manifest->lane_count, 0);
	for (size_t i = 0; i < manifest->lane_count; i++) {
		lua_getfield(L, -2, manifest->lanes[i].topic);
		lua_getfield(L, -1, manifest->lanes[i].subscriber);
		MILL_ASSERT(lua_istable(L, -1));
		lua_rawseti(L, -3, (int)i + 1);
		lua_pop(L, 1);
	}
	lua_remove(L, -2);
}

static int l_run(lua_State *L)
{
	struct loading *loading = lua_touserdata(L, 1);
	bool handlers = loading->loaded->handlers;
	mill_vm_push(L, "tidemill.environment", "install");
	lua_call(L, 0, 0);
	mill_vm_push(L, "tidemill.fences", "install");
	lua_call(L, 0, 0);
	mill_vm_push(L, "tidemill.load", "run");
	lua_newtable(L);
	lua_pushlightuserdata(L, loading);
	luaL_setfuncs(L, functions, 1);
	lua_pushlstring(L, loading->load->config_path.data, loading->load->config_path.len);
	lua_pushboolean(L, handlers);
	lua_pushinteger(L, loading->load->generation);
	if (loading->load->call.data != NULL)
		lua_pushlstring(L, loading->load->call.data, loading->load->call.len);
	else
		lua_pushnil(L);
	lua_call(L, 5, 2); /* → lanes, problems; one of them nil */
	if (!lua_isnil(L, -1)) {
		note_problems(L, loading->problems);
		return 0;
	}
	lua_pop(L, 1);
	mill_manifest_sort(&loading->loaded->manifest);
	mill_vm_push_host(L);
	lua_pushstring(L, loading->loaded->manifest.settings.schema);
	lua_setfield(L, -2, "schema");
	lua_pushboolean(L, loading->load->plain_table);
	lua_setfield(L, -2, "plain_table");
	lua_pop(L, 1);
	if (handlers) {
		order_lanes(L, &loading->loaded->manifest);
		loading->loaded->lanes_ref = luaL_ref(L, LUA_REGISTRYINDEX);
	}
	mill_vm_push(L, "tidemill.fences", "loaded");
	lua_call(L, 0, 0);
	loading->done = true;
	return 0;
}

int mill_load_run(struct mill_vm *vm, const struct mill_load *load, struct mill_loaded *loaded,
                  struct mill_buffer *problems)
{
	*loaded = (struct mill_loaded){
		.generation = load->generation,
		.handlers = load->mode == MILL_LOAD_HANDLERS,
		.lanes_ref = LUA_NOREF,
	};
	mill_manifest_init(&loaded->manifest);
	struct loading loading = { .load = load, .loaded = loaded, .problems = problems };
	struct mill_err err = MILL_ERR_INIT;
	if (mill_vm_call(vm, l_run, &loading, &err) != 0)
		mill_buffer_text(problems, err.message);
	if (loading.done)
		return 0;
	mill_load_release(vm, loaded);
	return -1;
}

void mill_load_release(struct mill_vm *vm, struct mill_loaded *loaded)
{
	luaL_unref(vm->L, LUA_REGISTRYINDEX, loaded->lanes_ref);
	mill_manifest_free(&loaded->manifest);
	*loaded = (struct mill_loaded){ .lanes_ref = LUA_NOREF };
}
