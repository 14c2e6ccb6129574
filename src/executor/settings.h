/*
 * A manifest as Lua fills it: each key and lane of a config.lua goes through the checks of
 * core/config here. lua/tidemill/load.lua is who calls.
 *
 * Executor process; and the Lua module `tidemill.native`, for specs that run an app's handlers.
 */
#pragma once

#include <lua.h>

/*
 * Add the functions to the table below the top of the stack. On top is a userdata, light or not,
 * whose address is the manifest's; it is taken off.
 */
void mill_settings_open(lua_State *L);

/* A lua_CFunction: a new table of the functions, with a manifest of their own. */
int mill_settings_new(lua_State *L);
