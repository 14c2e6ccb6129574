/*
 * The Lua values that stand for what Lua lacks: null, arrays that know they are arrays, and
 * decimals. What all of src/executor may use of them is declared in json.h; this is for reader and
 * writer.
 */
#pragma once

#include "executor/json.h"

/* Names of the metatables in the registry. */
#define MILL_JSON_ARRAY "tidemill.array"
#define MILL_JSON_DECIMAL "tidemill.decimal"

/* Pushes a decimal with this text, a number by JSON's grammar. */
void mill_json_push_decimal(lua_State *L, const char *text, size_t len);

/*
 * Whether the value at `index` is cdata of the FFI's int64_t or uint64_t; then its value's size
 * goes to `*magnitude` and its sign to `*negative`.
 */
bool mill_json_cdata_int64(lua_State *L, int index, uint64_t *magnitude, bool *negative);
