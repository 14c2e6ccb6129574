/*
 * What the modules of lua/tidemill/ ask of the program they run in, whichever that is: checks, JSON
 * under a name, log lines. In an executor these are part of `tidemill.host`, beside what only a
 * delivery can answer (task_host.c); in a plain LuaJIT program lua/tidemill/host.lua takes them
 * from `tidemill.native`.
 *
 * Must not know whether a runtime is there.
 */
#pragma once

#include <lua.h>

#include "core/base.h"

/* Whom a line of the log is about. */
struct mill_speaker {
	const char *message_id;
	const char *topic, *subscriber;
	uint32_t attempt;
};

/*
 * Add the functions to the table on top of the stack. `*speaker` is who speaks whenever a line is
 * written, NULL for nobody; `speaker` itself may be NULL. May raise: call it protected.
 */
void mill_host_open(lua_State *L, const struct mill_speaker *const *speaker);
