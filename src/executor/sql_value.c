/*
 * Values of SQL in Lua: see sql_value.h.
 *
 *     boolean                true, false
 *     int2, int4, oid, float number
 *     int8, numeric          number where it keeps the value, otherwise a decimal
 *     json, jsonb            as tidemill.json.decode has it
 *     NULL                   no key at all
 *     all else               text, as Postgres prints it
 */
#include "executor/sql_value.h"

#include <lauxlib.h>
#include <math.h>
#include <stdio.h>

#include "executor/json.h"
#include "executor/json_number.h"
#include "executor/json_value.h"
#include "pg/arguments.h"

/* ---- arguments ----------------------------------------------------------------------------- */

static struct mill_span number_text(double value, char text[MILL_NUMBER_TEXT])
{
	if (value != value)
		return MILL_SPAN("NaN");
	if (isinf(value))
		return value > 0 ? MILL_SPAN("Infinity") : MILL_SPAN("-Infinity");
	return (struct mill_span){ text, mill_number_write(value, text) };
}

static int add_json(lua_State *L, int index, int number, struct mill_buffer *out,
                    struct mill_buffer *scratch, struct mill_err *err)
{
	char name[16];
	snprintf(name, sizeof(name), "$%d", number);
	scratch->len = 0;
	if (mill_json_encode(L, index, name, scratch, err) != 0)
		return -1;
	mill_arguments_add(out, (struct mill_span){ scratch->data, scratch->len });
	return 0;
}

static int add_text(lua_State *L, int index, int number, struct mill_buffer *out,
                    struct mill_err *err)
{
	struct mill_span text;
	text.data = lua_tolstring(L, index, &text.len);
	if (memchr(text.data, 0, text.len) != NULL)
		return mill_err_set(err, MILL_ERR_INPUT,
		                    "$%d: a text with a zero byte, which Postgres cannot store "
		                    "(bytea is written in hex: '\\x00ff')",
		                    number);
	mill_arguments_add(out, text);
	return 0;
}

/* One value at `index`, which is $`number`. */
static int add_argument(lua_State *L, int index, int number, struct mill_buffer *out,
                        struct mill_buffer *scratch, struct mill_err *err)
{
	char text[MILL_NUMBER_TEXT];
	struct mill_span decimal;
	if (mill_json_is_null(L, index)) {
		mill_arguments_add(out, MILL_SPAN_NONE);
		return 0;
	}
	decimal.data = mill_json_decimal_text(L, index, &decimal.len);
	if (decimal.data != NULL) {
		mill_arguments_add(out, decimal);
		return 0;
	}
	switch (lua_type(L, index)) {
	case LUA_TNIL:
		mill_arguments_add(out, MILL_SPAN_NONE);
		return 0;
	case LUA_TBOOLEAN:
		mill_arguments_add(out, lua_toboolean(L, index) ? MILL_SPAN("true")
		                                                : MILL_SPAN("false"));
		return 0;
	case LUA_TNUMBER:
		mill_arguments_add(out, number_text(lua_tonumber(L, index), text));
		return 0;
	case LUA_TSTRING:
		return add_text(L, index, number, out, err);
	default:
		/* Tables and the FFI's integers; it knows what to say of the rest. */
		return add_json(L, index, number, out, scratch, err);
	}
}

/* The buffers are the function's own, so that no raise leaks them. */
static int l_arguments(lua_State *L)
{
	struct mill_buffer *buffers = lua_touserdata(L, lua_upvalueindex(1));
	struct mill_err err = MILL_ERR_INIT;
	int count = lua_gettop(L);
	buffers[0].len = 0;
	for (int i = 1; i <= count; i++) {
		if (add_argument(L, i, i, &buffers[0], &buffers[1], &err) != 0) {
			lua_pushnil(L);
			lua_pushstring(L, err.message);
			return 2;
		}
	}
	lua_pushlstring(L, buffers[0].data ? buffers[0].data : "", buffers[0].len);
	for (int i = 0; i < 2; i++)
		if (buffers[i].cap > 1024 * 1024)
			mill_buffer_free(&buffers[i]);
	return 1;
}

static int l_buffers_gc(lua_State *L)
{
	struct mill_buffer *buffers = lua_touserdata(L, 1);
	mill_buffer_free(&buffers[0]);
	mill_buffer_free(&buffers[1]);
	return 0;
}

void mill_sql_push_encoder(lua_State *L)
{
	struct mill_buffer *buffers = lua_newuserdata(L, 2 * sizeof(*buffers));
	buffers[0] = buffers[1] = (struct mill_buffer){ 0 };
	lua_createtable(L, 0, 1);
	lua_pushcfunction(L, l_buffers_gc);
	lua_setfield(L, -2, "__gc");
	lua_setmetatable(L, -2);
	lua_pushcclosure(L, l_arguments, 1);
}

/* ---- values -------------------------------------------------------------------------------- */

/* NaN and the infinities are numbers too, and no JSON. */
static void push_number(lua_State *L, struct mill_span text)
{
	struct mill_err err = MILL_ERR_INIT;
	if (mill_json_push_number(L, text.data, text.len, &err) == 0)
		return;
	bool infinite = memchr(text.data, 'I', text.len) != NULL;
	double value = infinite ? (text.data[0] == '-' ? -INFINITY : INFINITY) : NAN;
	lua_pushnumber(L, value);
}

/* Always a Lua number: the column is one of the same kind. */
static void push_float(lua_State *L, struct mill_span text)
{
	struct mill_number number;
	size_t bad_at;
	if (mill_number_scan(text.data, text.len, &number, &bad_at) == text.len)
		lua_pushnumber(L, mill_number_nearest(&number));
	else
		push_number(L, text);
}

static int push_value(lua_State *L, uint32_t type, struct mill_span text, struct mill_err *err)
{
	switch (type) {
	case MILL_ANSWER_BOOL:
		lua_pushboolean(L, text.len > 0 && text.data[0] == 't');
		return 0;
	case MILL_ANSWER_INT2:
	case MILL_ANSWER_INT4:
	case MILL_ANSWER_OID:
	case MILL_ANSWER_FLOAT4:
	case MILL_ANSWER_FLOAT8:
		push_float(L, text);
		return 0;
	case MILL_ANSWER_INT8:
	case MILL_ANSWER_NUMERIC:
		push_number(L, text);
		return 0;
	case MILL_ANSWER_JSON:
	case MILL_ANSWER_JSONB:
		return mill_json_decode(L, text.data, text.len, err);
	default:
		lua_pushlstring(L, text.data, text.len);
		return 0;
	}
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* Push the list of names. A name that is taken gets a number: `id`, `id_2`, so that no value is
 * lost. */
static void push_fields(lua_State *L, const struct mill_answer *answer)
{
	lua_createtable(L, (int)answer->field_count, 0);
	mill_json_mark_array(L, -1);
	lua_newtable(L); /* the names that are taken */
	for (size_t i = 0; i < answer->field_count; i++) {
		lua_pushstring(L, answer->fields[i].name);
		for (int n = 2;; n++) {
			lua_pushvalue(L, -1);
			lua_rawget(L, -3);
			bool taken = !lua_isnil(L, -1);
			lua_pop(L, 1);
			if (!taken)
				break;
			lua_pop(L, 1);
			lua_pushfstring(L, "%s_%d", answer->fields[i].name, n);
		}
		lua_pushvalue(L, -1);
		lua_pushboolean(L, 1);
		lua_rawset(L, -4);
		lua_rawseti(L, -3, (int)i + 1);
	}
	lua_pop(L, 1);
}

static int push_unreadable(lua_State *L, const struct mill_answer *answer, size_t field, size_t row,
                           const struct mill_err *err)
{
	lua_pushnil(L);
	lua_newtable(L);
	lua_pushfstring(L, "column `%s` of row %d cannot be read: %s (select it as text)",
	                answer->fields[field].name, (int)row + 1, err->message);
	lua_setfield(L, -2, "message");
	return 2;
}

static int push_rows(lua_State *L, const struct mill_answer *answer)
{
	struct mill_reader reader = { answer->rows.data, answer->rows.data + answer->rows.len,
		                      false };
	lua_createtable(L, (int)answer->row_count, 2);
	int list = lua_gettop(L);
	push_fields(L, answer);
	int fields = lua_gettop(L);
	for (size_t row = 0; row < answer->row_count; row++) {
		lua_createtable(L, 0, (int)answer->field_count);
		for (size_t i = 0; i < answer->field_count; i++) {
			struct mill_err err = MILL_ERR_INIT;
			struct mill_span text = mill_read_span(&reader);
			if (text.data == NULL)
				continue;
			lua_rawgeti(L, fields, (int)i + 1);
			if (push_value(L, answer->fields[i].type, text, &err) != 0)
				return push_unreadable(L, answer, i, row, &err);
			lua_rawset(L, -3);
		}
		lua_rawseti(L, list, (int)row + 1);
	}
	lua_setfield(L, list, "fields");
	lua_pushnumber(L, (double)answer->affected);
	lua_setfield(L, list, "affected");
	return 1;
}

/* ---- failures ------------------------------------------------------------------------------ */

static void set_text(lua_State *L, const char *name, const char *text)
{
	if (text == NULL || text[0] == '\0')
		return;
	lua_pushstring(L, text);
	lua_setfield(L, -2, name);
}

static int push_failure(lua_State *L, const struct mill_failure *failure)
{
	lua_pushnil(L);
	lua_newtable(L);
	set_text(L, "message", failure->message);
	set_text(L, "sqlstate", failure->sqlstate);
	set_text(L, "detail", failure->detail);
	set_text(L, "hint", failure->hint);
	set_text(L, "constraint", failure->constraint);
	set_text(L, "schema", failure->schema);
	set_text(L, "table", failure->table);
	set_text(L, "column", failure->column);
	if (failure->lost) {
		lua_pushboolean(L, 1);
		lua_setfield(L, -2, "lost");
	}
	if (failure->unknown) {
		lua_pushboolean(L, 1);
		lua_setfield(L, -2, "unknown");
	}
	return 2;
}

int mill_sql_push_answer(lua_State *L, const struct mill_answer *answer)
{
	luaL_checkstack(L, 10, "a result");
	return answer->failed ? push_failure(L, &answer->failure) : push_rows(L, answer);
}
