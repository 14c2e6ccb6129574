/*
 * Lua values to SQL and back: what handlers and scripts give to a statement as $1 …, and the tables
 * they get for its rows.
 *
 * Must not know how a statement travels. Executor process, and the Lua module `tidemill.native` in
 * any program.
 */
#pragma once

#include <lua.h>

#include "pg/answer.h"

/*
 * arguments(…) → the values encoded as src/pg/arguments.h says, or nil and which of them cannot be
 * one. Pushes the function. May raise: call it protected.
 */
void mill_sql_push_encoder(lua_State *L);

/*
 * Push what a statement came to: a list of rows, tables by column name, with `affected` and
 * `fields`; or nil and a table about the failure. Returns how many values. May raise out of memory.
 */
int mill_sql_push_answer(lua_State *L, const struct mill_answer *answer);
