/*
 * A connection of a plain LuaJIT program, for lua/tidemill/connection.lua: a blocking session as a
 * Lua object.
 *
 * The Lua module `tidemill.native`. No executor uses it: it would hold up every other delivery.
 */
#pragma once

#include <lua.h>

/*
 * A lua_CFunction: connect(dsn or nil, application) → a connection, or nil and why there is none.
 * Its methods:
 *
 *     ask(text, arguments, commits)   rows and the command's tag, or nil and a table
 *     in_transaction()
 *     is_lost()
 *     close()
 */
int mill_connection_open(lua_State *L);
