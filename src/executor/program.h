/*
 * A Lua program inside of this one: a function of an embedded module, run with the library that
 * handlers have, in the process that asks for it. `tidemill test` is one.
 *
 * Neither runtime nor executor: no delivery runs in it but what a spec makes up.
 */
#pragma once

#include "core/err.h"

struct mill_program {
	const char *module, *function; /* `require(module)[function]` */
	int word_count;
	const char *const *words; /* its argument, as a list */
};

/*
 * Run it. It returns an exit code, or nil and why it could not do what it is for; −1: that, or what
 * it raised. It may also end the process itself.
 */
int mill_program_run(const struct mill_program *program, int *code, struct mill_err *err);
