/* The Lua state of an executor: see vm.h. */
#include "executor/vm.h"

#include <lauxlib.h>
#include <lualib.h>
#include <lua5.1/lua-cjson.h>
#include <math.h>
#include <stdio.h>

#include "core/embedded.h"
#include "core/log.h"
#include "core/policy.h"
#include "executor/json.h"

#define HOST_MODULE "tidemill.host"

#define LOG_TEXT_MAX (16 * 1024) /* bytes of one text in a handler's log line */
#define LOG_FIELDS_MAX 32        /* fields that a handler may add to its line */
#define SCRATCH_KEEP (1024 * 1024)

/* ---- tidemill.host: what needs no delivery ------------------------------------------------ */

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
	const struct mill_vm *vm = lua_touserdata(L, lua_upvalueindex(1));
	int level = luaL_checkint(L, 1), top = lua_gettop(L);
	const char *event = luaL_checkstring(L, 2);
	luaL_argcheck(L, level >= MILL_LOG_DEBUG && level <= MILL_LOG_ERROR, 1, "no log level");
	luaL_argcheck(L, top - 3 <= 2 * LOG_FIELDS_MAX, top, "too many fields");
	struct mill_field fields[5 + LOG_FIELDS_MAX + 1];
	size_t n = 0;
	if (vm->speaker != NULL) {
		fields[n++] = MILL_TEXT("message_id", vm->speaker->message_id);
		fields[n++] = MILL_TEXT("topic", vm->speaker->topic);
		fields[n++] = MILL_TEXT("subscriber", vm->speaker->subscriber);
		fields[n++] = MILL_INT("attempt", vm->speaker->attempt);
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
	struct mill_vm *vm = lua_touserdata(L, lua_upvalueindex(1));
	struct mill_err err = MILL_ERR_INIT;
	luaL_checkany(L, 1);
	/* The state owns the buffer: running out of memory half way leaks nothing. */
	vm->scratch.len = 0;
	if (mill_json_encode(L, 1, luaL_checkstring(L, 2), &vm->scratch, &err) != 0) {
		lua_pushnil(L);
		lua_pushstring(L, err.message);
		return 2;
	}
	lua_pushlstring(L, vm->scratch.data, vm->scratch.len);
	if (vm->scratch.cap > SCRATCH_KEEP)
		mill_buffer_free(&vm->scratch);
	return 1;
}

static const luaL_Reg host_functions[] = {
	{ "topic", l_topic },
	{ "encode", l_encode },
	{ "log", l_log },
	{ NULL, NULL },
};

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

static int l_open(lua_State *L)
{
	struct mill_vm *vm = lua_touserdata(L, 1);
	luaL_openlibs(L);
	mill_json_open(L);
	preload_modules(L);
	mill_vm_push_host(L);
	lua_pushlightuserdata(L, vm);
	luaL_setfuncs(L, host_functions, 1);
	lua_pushinteger(L, mill_log_threshold());
	lua_setfield(L, -2, "log_threshold");
	return 0;
}

/* Only an unprotected call gets here, which would be a mistake of ours, or no memory for one. */
static int on_panic(lua_State *L)
{
	const char *text = lua_tostring(L, -1);
	mill_log(MILL_LOG_ERROR, "lua_panic", MILL_TEXT("error", text ? text : "no text"));
	abort();
}

int mill_vm_init(struct mill_vm *vm, struct mill_err *err)
{
	*vm = (struct mill_vm){ .L = luaL_newstate() };
	if (vm->L == NULL)
		return mill_err_set(err, MILL_ERR_SYSTEM, "no memory for a Lua state");
	lua_atpanic(vm->L, on_panic);
	if (mill_vm_call(vm, l_open, vm, err) == 0)
		return 0;
	mill_vm_fini(vm);
	return -1;
}

void mill_vm_fini(struct mill_vm *vm)
{
	lua_close(vm->L);
	mill_buffer_free(&vm->scratch);
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
