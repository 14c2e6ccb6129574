/* The Lua state of an executor: see vm.h. */
#include "executor/vm.h"

#include <lauxlib.h>
#include <lualib.h>
#include <lua5.1/lua-cjson.h>

#include "core/embedded.h"
#include "core/log.h"
#include "executor/json.h"

#define HOST_MODULE "tidemill.host"

/* ---- tidemill.host ------------------------------------------------------------------------ */

void mill_vm_push_host(lua_State *L)
{
	lua_getfield(L, LUA_REGISTRYINDEX, "_LOADED");
	lua_getfield(L, -1, HOST_MODULE);
	if (lua_isnil(L, -1)) {
		lua_pop(L, 1);
		lua_newtable(L);
		lua_pushvalue(L, -1);
		lua_setfield(L, -3, HOST_MODULE);
	}
	lua_remove(L, -2);
}

/* ---- modules ------------------------------------------------------------------------------ */

/* The loader of an embedded module; its upvalue is the module's place in the list. */
static int l_load_embedded(lua_State *L)
{
	const struct mill_embedded *file =
	        &mill_embedded_lua[lua_tointeger(L, lua_upvalueindex(1))];
	const char *chunk = lua_pushfstring(L, "=%s", file->name);
	if (luaL_loadbufferx(L, (const char *)file->data, file->len, chunk, "t") != 0)
		return lua_error(L);
	lua_pushstring(L, file->name);
	lua_call(L, 1, 1);
	return 1;
}

static void preload_modules(lua_State *L)
{
	lua_getglobal(L, "package");
	lua_getfield(L, -1, "preload");
	for (size_t i = 0; i < mill_embedded_lua_count; i++) {
		lua_pushinteger(L, (lua_Integer)i);
		lua_pushcclosure(L, l_load_embedded, 1);
		lua_setfield(L, -2, mill_embedded_lua[i].name);
	}
	lua_pushcfunction(L, luaopen_tidemill_native);
	lua_setfield(L, -2, "tidemill.native");
	lua_pushcfunction(L, luaopen_cjson);
	lua_setfield(L, -2, "cjson");
	lua_pop(L, 2);
}

void mill_vm_push(lua_State *L, const char *module, const char *field)
{
	lua_getglobal(L, "require");
	lua_pushstring(L, module);
	lua_call(L, 1, 1);
	lua_getfield(L, -1, field);
	lua_remove(L, -2);
}

/* ---- the state ---------------------------------------------------------------------------- */

static int l_open_plain(lua_State *L)
{
	luaL_openlibs(L);
	mill_json_open(L);
	preload_modules(L);
	return 0;
}

static int l_open(lua_State *L)
{
	struct mill_vm *vm = lua_touserdata(L, 1);
	l_open_plain(L);
	mill_vm_push_host(L);
	mill_host_open(L, &vm->speaker);
	return 0;
}

/* Only an unprotected call gets here, which would be a mistake of ours, or no memory for one. */
static int on_panic(lua_State *L)
{
	const char *text = lua_tostring(L, -1);
	mill_log(MILL_LOG_ERROR, "lua_panic", MILL_TEXT("error", text ? text : "no text"));
	abort();
}

static int init(struct mill_vm *vm, lua_CFunction open, struct mill_err *err)
{
	*vm = (struct mill_vm){ .L = luaL_newstate() };
	if (vm->L == NULL)
		return mill_err_set(err, MILL_ERR_SYSTEM, "no memory for a Lua state");
	lua_atpanic(vm->L, on_panic);
	if (mill_vm_call(vm, open, vm, err) == 0)
		return 0;
	mill_vm_fini(vm);
	return -1;
}

int mill_vm_init(struct mill_vm *vm, struct mill_err *err)
{
	return init(vm, l_open, err);
}

int mill_vm_init_plain(struct mill_vm *vm, struct mill_err *err)
{
	return init(vm, l_open_plain, err);
}

void mill_vm_fini(struct mill_vm *vm)
{
	lua_close(vm->L);
	*vm = (struct mill_vm){ 0 };
}

int mill_vm_call(struct mill_vm *vm, lua_CFunction function, void *argument, struct mill_err *err)
{
	lua_State *L = vm->L;
	int top = lua_gettop(L);
	int failed = lua_cpcall(L, function, argument);
	if (failed) {
		bool text = lua_type(L, -1) == LUA_TSTRING;
		mill_err_set(err, MILL_ERR_CONFIG, "%s",
		             text ? lua_tostring(L, -1) : "no error text");
	}
	lua_settop(L, top);
	return failed ? -1 : 0;
}

uint64_t mill_vm_heap_bytes(const struct mill_vm *vm)
{
	return (uint64_t)lua_gc(vm->L, LUA_GCCOUNT, 0) * 1024 +
	       (uint64_t)lua_gc(vm->L, LUA_GCCOUNTB, 0);
}
