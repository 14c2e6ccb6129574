/*
 * The Lua state of an executor: made, filled with libraries, closed, and entered.
 *
 * Handlers find the standard libraries, the modules of lua/tidemill/ (embedded in the program),
 * lua-cjson, and `tidemill.host`: the C functions that those modules are built on and that are
 * nobody else's business.
 *
 * Executor process only. Lua is entered through mill_vm_call here, and through lua_resume in
 * task.c: both protected, so that a script's error, or running out of memory, is a value and no end
 * of the process. Knows nothing of deliveries but how the log should name the one that runs.
 */
#pragma once

#include <lua.h>

#include "core/err.h"
#include "executor/host.h"

struct mill_vm {
	lua_State *L;
	const struct mill_speaker *speaker; /* the delivery that runs, or NULL */
};

/* Make the state. `vm` must not move afterwards. */
int mill_vm_init(struct mill_vm *vm, struct mill_err *err);
/* The same without `tidemill.host`, for a process that is no executor: modules find that of
 * lua/tidemill/host.lua. */
int mill_vm_init_plain(struct mill_vm *vm, struct mill_err *err);
/* Close it, finalizers of handlers included. */
void mill_vm_fini(struct mill_vm *vm);

/*
 * Call `function(L)` protected, with `argument` as light userdata at index 1. What it leaves on the
 * stack is dropped. −1: it raised, and `err` tells what.
 */
int mill_vm_call(struct mill_vm *vm, lua_CFunction function, void *argument, struct mill_err *err);

/* Push the module `tidemill.host`, a table, for others to add to. May raise: call it protected. */
void mill_vm_push_host(lua_State *L);

/* Push a field of an embedded module, `require(module)[field]`. May raise. */
void mill_vm_push(lua_State *L, const char *module, const char *field);

/* Bytes the Lua heap holds. */
uint64_t mill_vm_heap_bytes(const struct mill_vm *vm);
