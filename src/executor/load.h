/*
 * LOAD: from the path of a config.lua to a manifest, and to the handlers themselves.
 *
 * The walk through the config's tables, the handlers' modules and the search for a key's line are
 * Lua (lua/tidemill/load.lua); each key and lane goes through the checks of core/config here.
 *
 * Executor process only.
 */
#pragma once

#include "core/config.h"
#include "core/message.h"
#include "executor/vm.h"

struct mill_loaded {
	uint32_t generation;
	bool handlers; /* they were loaded too */
	struct mill_manifest manifest;
	int lanes_ref; /* handlers: a list of what lua/tidemill/task.lua needs of each lane */
};

/*
 * Evaluate the config, and in mode HANDLERS load every handler; once a state. −1: nothing is left
 * in `loaded`, and `problems` gets what is wrong, one line each, `file:line: …`.
 */
int mill_load_run(struct mill_vm *vm, const struct mill_load *load, struct mill_loaded *loaded,
                  struct mill_buffer *problems);

/* Give back what a successful mill_load_run left. */
void mill_load_release(struct mill_vm *vm, struct mill_loaded *loaded);
