/* The JSON writer: see json.h. Straight into the buffer; makes no garbage in Lua. */
#include "executor/json.h"

#include <lauxlib.h>
#include <math.h>
#include <stdio.h>

#include "executor/json_number.h"
#include "executor/json_text.h"
#include "executor/json_value.h"

/* Where in the value the writer is: the steps from the root, innermost first, for messages. */
struct step {
	const struct step *up;
	const char *key; /* NULL: an element of an array */
	size_t len;
	int element;
};

struct writer {
	lua_State *L;
	struct mill_buffer *out;
	struct mill_err *err;
	const char *name;
	const void *array_metatable; /* NULL until a table with a metatable is met */
};

static int write_value(struct writer *writer, const struct step *step, int depth);

/* ---- what can be wrong ----------------------------------------------------------------- */

#define SHOWN_STEPS 12 /* of a long path, so many at its start */
#define SHOWN_KEY 40

static bool is_identifier(const char *key, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		char c = key[i];
		bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
		if (!letter && !(i > 0 && c >= '0' && c <= '9'))
			return false;
	}
	return len > 0;
}

/* Appends a key as it stands in Lua source, cut when it is long; what is not printable as `?`. */
static void show_key(struct mill_buffer *path, const char *key, size_t len)
{
	if (len <= SHOWN_KEY && is_identifier(key, len)) {
		mill_buffer_text(path, ".");
		mill_buffer_bytes(path, key, len);
		return;
	}
	const char *at = key, *end = key + len;
	mill_buffer_text(path, "[\"");
	while (at < end && at - key < SHOWN_KEY) {
		unsigned char c = (unsigned char)*at;
		size_t n = c < 0x80 ? 1 : utf8_sequence(at, end);
		if (n == 0 || c < 0x20 || c == 0x7f) {
			mill_buffer_text(path, "?");
			at++;
		} else {
			mill_buffer_bytes(path, at, n);
			at += n;
		}
	}
	mill_buffer_text(path, at < end ? "…\"]" : "\"]");
}

static void show_step(struct mill_buffer *path, const struct step *step)
{
	char index[16];
	if (step->key != NULL) {
		show_key(path, step->key, step->len);
	} else {
		snprintf(index, sizeof(index), "[%d]", step->element);
		mill_buffer_text(path, index);
	}
}

/* `name.path: why`. Returns −1. */
static int fail(struct writer *writer, const struct step *step, const char *why)
{
	const struct step *shown[SHOWN_STEPS];
	size_t steps = 0;
	for (const struct step *at = step; at != NULL; at = at->up)
		steps++;
	size_t hidden = steps > SHOWN_STEPS ? steps - SHOWN_STEPS : 0;
	size_t n = steps - hidden;
	for (size_t i = 0; i < hidden; i++)
		step = step->up;
	for (size_t i = n; i > 0; i--, step = step->up)
		shown[i - 1] = step;

	struct mill_buffer path = { 0 };
	mill_buffer_text(&path, writer->name);
	for (size_t i = 0; i < n; i++)
		show_step(&path, shown[i]);
	if (hidden > 0)
		mill_buffer_text(&path, "…");
	mill_err_set(writer->err, MILL_ERR_INPUT, "%.*s: %s", (int)path.len, path.data, why);
	mill_buffer_free(&path);
	return -1;
}

static int fail_type(struct writer *writer, const struct step *step, const char *type)
{
	char why[80];
	snprintf(why, sizeof(why), "a %s cannot be written as JSON", type);
	return fail(writer, step, why);
}

/* ---- bytes ----------------------------------------------------------------------------- */

static inline void ensure(struct mill_buffer *out, size_t len)
{
	if (out->cap - out->len < len)
		mill_buffer_reserve(out, len);
}

static inline void put(struct mill_buffer *out, char c)
{
	ensure(out, 1);
	out->data[out->len++] = c;
}

static inline void put_bytes(struct mill_buffer *out, const char *bytes, size_t len)
{
	ensure(out, len);
	memcpy(out->data + out->len, bytes, len);
	out->len += len;
}

/* ---- strings --------------------------------------------------------------------------- */

static void put_escape(struct mill_buffer *out, unsigned char c)
{
	static const char hex[] = "0123456789abcdef";
	static const char letters[0x20] = {
		['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f', ['\r'] = 'r'
	};
	if (c < 0x20 && letters[c] == 0) {
		char text[6] = { '\\', 'u', '0', '0', hex[c >> 4], hex[c & 15] };
		put_bytes(out, text, sizeof(text));
	} else {
		char text[2] = { '\\', c < 0x20 ? letters[c] : (char)c };
		put_bytes(out, text, sizeof(text));
	}
}

/* Appends the string in quotes. Returns what is wrong with it, or NULL. */
static const char *put_string(struct mill_buffer *out, const char *text, size_t len)
{
	const char *at = text, *end = text + len;
	ensure(out, len + 2);
	put(out, '"');
	while (at < end) {
		const char *plain = at;
		at = plain_end(at, end);
		while (at < end && (unsigned char)*at >= 0x80) {
			size_t n = utf8_sequence(at, end);
			if (n == 0)
				return "is not UTF-8, as all text must be: write bytes as base64 "
				       "or hex";
			at += n;
		}
		put_bytes(out, plain, (size_t)(at - plain));
		if (at < end && ((unsigned char)*at < 0x20 || *at == '"' || *at == '\\')) {
			if (*at == '\0')
				return "with a NUL byte cannot be stored by Postgres";
			put_escape(out, (unsigned char)*at++);
		}
	}
	put(out, '"');
	return NULL;
}

static int write_string(struct writer *writer, const struct step *step)
{
	size_t len;
	const char *text = lua_tolstring(writer->L, -1, &len);
	const char *wrong = put_string(writer->out, text, len);
	if (wrong == NULL)
		return 0;
	char why[120];
	snprintf(why, sizeof(why), "text %s", wrong);
	return fail(writer, step, why);
}

static int write_key(struct writer *writer, const struct step *step)
{
	const char *wrong = put_string(writer->out, step->key, step->len);
	if (wrong == NULL) {
		put(writer->out, ':');
		return 0;
	}
	char why[120];
	snprintf(why, sizeof(why), "a key %s", wrong);
	return fail(writer, step, why);
}

/* ---- numbers and what stands for them -------------------------------------------------- */

static int write_number(struct writer *writer, const struct step *step)
{
	double value = lua_tonumber(writer->L, -1);
	if (!isfinite(value))
		return fail(writer, step,
		            isnan(value) ? "NaN cannot be written as JSON"
		                         : "an infinite number cannot be written as JSON");
	ensure(writer->out, MILL_NUMBER_TEXT);
	writer->out->len += mill_number_write(value, writer->out->data + writer->out->len);
	return 0;
}

static int write_userdata(struct writer *writer, const struct step *step)
{
	size_t len;
	const char *text = mill_json_decimal_text(writer->L, -1, &len);
	if (text == NULL)
		return fail_type(writer, step, "userdata");
	put_bytes(writer->out, text, len);
	return 0;
}

static int write_cdata(struct writer *writer, const struct step *step)
{
	uint64_t magnitude;
	bool negative;
	if (!mill_json_cdata_int64(writer->L, -1, &magnitude, &negative))
		return fail_type(writer, step, luaL_typename(writer->L, -1));
	if (negative)
		put(writer->out, '-');
	ensure(writer->out, MILL_NUMBER_TEXT);
	writer->out->len +=
	        mill_number_write_digits(magnitude, writer->out->data + writer->out->len);
	return 0;
}

/* ---- tables ---------------------------------------------------------------------------- */

static bool is_marked(struct writer *writer, int table)
{
	lua_State *L = writer->L;
	if (!lua_getmetatable(L, table))
		return false;
	if (writer->array_metatable == NULL) {
		luaL_getmetatable(L, MILL_JSON_ARRAY);
		writer->array_metatable = lua_topointer(L, -1);
		lua_pop(L, 1);
	}
	bool marked = lua_topointer(L, -1) == writer->array_metatable;
	lua_pop(L, 1);
	return marked;
}

/* A key that no JSON object can have, at the top of the stack. */
static int fail_key(struct writer *writer, const struct step *step)
{
	char why[160];
	if (lua_type(writer->L, -1) == LUA_TNUMBER)
		snprintf(why, sizeof(why),
		         "the key %.14g: an object's keys are strings (use tostring), and an "
		         "array's are "
		         "1, 2, 3… without a gap (use tidemill.null)",
		         lua_tonumber(writer->L, -1));
	else
		snprintf(why, sizeof(why), "a key that is a %s: an object's keys are strings",
		         luaL_typename(writer->L, -1));
	return fail(writer, step, why);
}

static int fail_mixed(struct writer *writer, const struct step *step, bool marked)
{
	size_t len;
	const char *key = lua_tolstring(writer->L, -1, &len);
	struct mill_buffer shown = { 0 };
	show_key(&shown, key, len);
	char why[200];
	snprintf(why, sizeof(why),
	         marked ? "an array cannot have the key %.*s"
	                : "has elements of an array and the key %.*s: JSON has no such table",
	         (int)shown.len, shown.data);
	mill_buffer_free(&shown);
	return fail(writer, step, why);
}

/*
 * Are the keys of the table exactly 1…n, in whatever order? Looks at keys only. Returns n, or −1
 * with the error set.
 */
static int count_elements(struct writer *writer, int table, const struct step *step, bool marked)
{
	lua_State *L = writer->L;
	int count = 0;
	double largest = 0;
	lua_pushnil(L);
	while (lua_next(L, table)) {
		lua_pop(L, 1);
		if (lua_type(L, -1) == LUA_TSTRING)
			return fail_mixed(writer, step, marked);
		double key = lua_type(L, -1) == LUA_TNUMBER ? lua_tonumber(L, -1) : 0;
		if (key < 1 || key != floor(key))
			return fail_key(writer, step);
		largest = fmax(largest, key);
		count++;
	}
	if (largest == count)
		return count;
	int missing = 1;
	for (;; missing++) {
		lua_rawgeti(L, table, missing);
		bool found = !lua_isnil(L, -1);
		lua_pop(L, 1);
		if (!found)
			break;
	}
	char why[120];
	snprintf(why, sizeof(why),
	         "[%d] is missing and [%.14g] is not: an array has no gap (use tidemill.null)",
	         missing, largest);
	return fail(writer, step, why);
}

/* The table at `table`, whose first key and value lie on the stack; the key is a number. */
static int write_array(struct writer *writer, int table, const struct step *up, int depth,
                       bool marked)
{
	lua_State *L = writer->L;
	struct step step = { .up = up, .element = 1 };
	put(writer->out, '[');
	/* Mostly the keys come as 1, 2, 3…, and one pass does. */
	do {
		if (lua_type(L, -2) != LUA_TNUMBER || lua_tonumber(L, -2) != step.element)
			break;
		if (step.element > 1)
			put(writer->out, ',');
		if (write_value(writer, &step, depth) != 0)
			return -1;
		lua_pop(L, 1);
		step.element++;
	} while (lua_next(L, table));

	if (lua_gettop(L) > table) {
		int count = count_elements(writer, table, up, marked);
		for (; step.element <= count; step.element++) {
			lua_settop(L, table);
			if (step.element > 1)
				put(writer->out, ',');
			lua_rawgeti(L, table, step.element);
			if (write_value(writer, &step, depth) != 0)
				return -1;
		}
		if (count < 0)
			return -1;
		lua_settop(L, table);
	}
	put(writer->out, ']');
	return 0;
}

/* The same, where the key is a string. */
static int write_object(struct writer *writer, int table, const struct step *up, int depth)
{
	lua_State *L = writer->L;
	struct step step = { .up = up };
	char before = '{';
	do {
		if (lua_type(L, -2) != LUA_TSTRING) {
			lua_pop(L, 1);
			return fail_key(writer, up);
		}
		step.key = lua_tolstring(L, -2, &step.len);
		put(writer->out, before);
		before = ',';
		if (write_key(writer, &step) != 0 || write_value(writer, &step, depth) != 0)
			return -1;
		lua_pop(L, 1);
	} while (lua_next(L, table));
	put(writer->out, '}');
	return 0;
}

static int write_table(struct writer *writer, const struct step *step, int depth)
{
	lua_State *L = writer->L;
	char why[80];
	if (++depth > MILL_JSON_DEPTH) {
		snprintf(why, sizeof(why), "nested deeper than %d: does a table hold itself?",
		         MILL_JSON_DEPTH);
		return fail(writer, step, why);
	}
	if (!lua_checkstack(L, 8))
		return fail(writer, step, "no Lua stack left for another level");
	int table = lua_gettop(L);
	bool marked = is_marked(writer, table);
	lua_pushnil(L);
	if (!lua_next(L, table)) {
		put_bytes(writer->out, marked ? "[]" : "{}", 2);
		return 0;
	}
	if (lua_type(L, -2) == LUA_TNUMBER || marked)
		return write_array(writer, table, step, depth, marked);
	return write_object(writer, table, step, depth);
}

/* ---- values ---------------------------------------------------------------------------- */

/* Writes the value at the top of the stack, which stays there; after an error more may lie above.
 */
static int write_value(struct writer *writer, const struct step *step, int depth)
{
	lua_State *L = writer->L;
	switch (lua_type(L, -1)) {
	case LUA_TSTRING:
		return write_string(writer, step);
	case LUA_TNUMBER:
		return write_number(writer, step);
	case LUA_TTABLE:
		return write_table(writer, step, depth);
	case LUA_TBOOLEAN:
		if (lua_toboolean(L, -1))
			put_bytes(writer->out, "true", 4);
		else
			put_bytes(writer->out, "false", 5);
		return 0;
	case LUA_TNIL:
		put_bytes(writer->out, "null", 4);
		return 0;
	case LUA_TLIGHTUSERDATA:
		if (!mill_json_is_null(L, -1))
			return fail_type(writer, step, "light userdata");
		put_bytes(writer->out, "null", 4);
		return 0;
	case LUA_TUSERDATA:
		return write_userdata(writer, step);
	case LUA_TFUNCTION:
	case LUA_TTHREAD:
		return fail_type(writer, step, luaL_typename(L, -1));
	default:
		return write_cdata(writer, step);
	}
}

int mill_json_encode(lua_State *L, int index, const char *name, struct mill_buffer *out,
                     struct mill_err *err)
{
	struct writer writer = { .L = L, .out = out, .err = err, .name = name };
	int top = lua_gettop(L);
	size_t len = out->len;
	if (!lua_checkstack(L, 8))
		return mill_err_set(err, MILL_ERR_INPUT, "%s: no Lua stack left to write JSON",
		                    name);
	lua_pushvalue(L, index);
	int rc = write_value(&writer, NULL, 0);
	lua_settop(L, top);
	if (rc != 0)
		out->len = len;
	return rc;
}
