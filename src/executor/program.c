/* A Lua program inside of this one: see program.h. */
#include "executor/program.h"

#include <lauxlib.h>

#include "executor/vm.h"

struct run {
	const struct mill_program *program;
	int code;
	bool refused; /* rather than raised */
};

static int l_run(lua_State *L)
{
	struct run *run = lua_touserdata(L, 1);
	mill_vm_push(L, run->program->module, run->program->function);
	lua_createtable(L, run->program->word_count, 1);
	for (int i = 0; i < run->program->word_count; i++) {
		lua_pushstring(L, run->program->words[i]);
		lua_rawseti(L, -2, i + 1);
	}
	lua_call(L, 1, 2);
	run->refused = lua_isnil(L, -2);
	if (run->refused)
		return lua_error(L);
	run->code = luaL_checkint(L, -2);
	return 0;
}

int mill_program_run(const struct mill_program *program, int *code, struct mill_err *err)
{
	struct run run = { .program = program };
	struct mill_vm vm;
	if (mill_vm_init_plain(&vm, err) != 0)
		return -1;
	int result = mill_vm_call(&vm, l_run, &run, err);
	mill_vm_fini(&vm);
	if (result != 0 && run.refused)
		err->kind = MILL_ERR_SYSTEM;
	*code = run.code;
	return result;
}
