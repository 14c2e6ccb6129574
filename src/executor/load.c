/* From config.lua to a manifest: see load.h. */
#include "executor/load.h"

#include <lauxlib.h>

#include "executor/settings.h"

struct loading {
	const struct mill_load *load;
	struct mill_loaded *loaded;
	struct mill_buffer *problems;
	bool done;
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
	mill_vm_push(L, "tidemill.files", "install");
	lua_call(L, 0, 0);
	mill_vm_push(L, "tidemill.load", "run");
	lua_newtable(L);
	lua_pushlightuserdata(L, &loading->loaded->manifest);
	mill_settings_open(L);
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
