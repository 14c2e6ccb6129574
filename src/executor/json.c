/* The JSON reader: see json.h. One pass over the text, straight into Lua values. */
#include "executor/json.h"

#include <lauxlib.h>
#include <stdio.h>

#include "executor/json_number.h"
#include "executor/json_text.h"
#include "executor/json_value.h"

/*
 * Values wait on the Lua stack until their table's size is known, so that small tables are made in
 * one piece. Only near the root: a C function may use 8000 slots in all.
 */
#define WAITING 32
#define WAITING_DEPTH 8

struct reader {
	lua_State *L;
	struct mill_err *err;
	const char *start, *at, *end;
	int depth, depth_max;
	int array_slot;   /* stack index of the array metatable; negated until an array needs it */
	int scratch_slot; /* stack index of what holds `scratch` when it is not `small` */
	char *scratch;    /* where strings with escapes are put together */
	size_t scratch_size;
	char small[256];
};

static int read_value(struct reader *reader);

/* ---- what can be wrong ----------------------------------------------------------------- */

static int fail_at(struct reader *reader, const char *at, const char *why)
{
	return mill_err_set(reader->err, MILL_ERR_INPUT, "not JSON at byte %zu: %s",
	                    (size_t)(at - reader->start) + 1, why);
}

static int fail_expected(struct reader *reader, const char *expected)
{
	char why[128], found[16];
	unsigned char c = reader->at < reader->end ? (unsigned char)*reader->at : 0;
	if (reader->at == reader->end)
		snprintf(found, sizeof(found), "the end");
	else if (c > 0x20 && c < 0x7f)
		snprintf(found, sizeof(found), "`%c`", c);
	else
		snprintf(found, sizeof(found), "byte 0x%02X", c);
	snprintf(why, sizeof(why), "expected %s, found %s", expected, found);
	return fail_at(reader, reader->at, why);
}

static inline void skip_space(struct reader *reader)
{
	while (reader->at < reader->end && (*reader->at == ' ' || *reader->at == '\n' ||
	                                    *reader->at == '\t' || *reader->at == '\r'))
		reader->at++;
}

/* The next byte that is no space; 0, which no JSON token begins with, at the end. */
static inline char next_token(struct reader *reader)
{
	skip_space(reader);
	return reader->at < reader->end ? *reader->at : '\0';
}

/* ---- strings --------------------------------------------------------------------------- */

/* Four hexadecimal digits at `at`, or −1. */
static int read_hex(const char *at, const char *end)
{
	int code = 0;
	if (end - at < 4)
		return -1;
	for (int i = 0; i < 4; i++) {
		char c = at[i];
		int digit = c >= '0' && c <= '9'   ? c - '0'
		            : c >= 'a' && c <= 'f' ? c - 'a' + 10
		            : c >= 'A' && c <= 'F' ? c - 'A' + 10
		                                   : -1;
		if (digit < 0)
			return -1;
		code = code * 16 + digit;
	}
	return code;
}

static char *write_utf8(char *out, uint32_t code)
{
	if (code < 0x80) {
		*out++ = (char)code;
	} else if (code < 0x800) {
		*out++ = (char)(0xC0 | code >> 6);
		*out++ = (char)(0x80 | (code & 0x3F));
	} else if (code < 0x10000) {
		*out++ = (char)(0xE0 | code >> 12);
		*out++ = (char)(0x80 | (code >> 6 & 0x3F));
		*out++ = (char)(0x80 | (code & 0x3F));
	} else {
		*out++ = (char)(0xF0 | code >> 18);
		*out++ = (char)(0x80 | (code >> 12 & 0x3F));
		*out++ = (char)(0x80 | (code >> 6 & 0x3F));
		*out++ = (char)(0x80 | (code & 0x3F));
	}
	return out;
}

/* Reads the `\u…` whose backslash is at `at`, with its second half where there is one. */
static const char *read_unicode(struct reader *reader, const char *at, char **out)
{
	int code = read_hex(at + 2, reader->end);
	if (code < 0) {
		fail_at(reader, at, "`\\u` needs four hexadecimal digits");
		return NULL;
	}
	const char *next = at + 6;
	if (code >= 0xD800 && code <= 0xDFFF) {
		int low = -1;
		if (code <= 0xDBFF && reader->end - next >= 6 && next[0] == '\\' && next[1] == 'u')
			low = read_hex(next + 2, reader->end);
		if (low < 0xDC00 || low > 0xDFFF) {
			fail_at(reader, at, "half of a surrogate pair without the other half");
			return NULL;
		}
		code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
		next += 6;
	}
	*out = write_utf8(*out, (uint32_t)code);
	return next;
}

/*
 * Makes room for the string at `at`, whose text ends somewhere before the closing quote: no string
 * is longer than it is written. Memory comes from Lua, so that a raise loses none.
 */
static void reserve_scratch(struct reader *reader, const char *at)
{
	while (at < reader->end && *at != '"')
		at += *at == '\\' && reader->end - at > 1 ? 2 : 1;
	size_t size = (size_t)(at - reader->at);
	if (size <= reader->scratch_size)
		return;
	reader->scratch = lua_newuserdata(reader->L, size);
	reader->scratch_size = size;
	lua_replace(reader->L, reader->scratch_slot);
}

/* Passes over text to the next quote or backslash, checking its bytes. NULL when one is wrong. */
static const char *check_plain(struct reader *reader, const char *at)
{
	for (;;) {
		at = plain_end(at, reader->end);
		while (at < reader->end && (unsigned char)*at >= 0x80) {
			size_t len = utf8_sequence(at, reader->end);
			if (len == 0) {
				fail_at(reader, at, "the text is not UTF-8");
				return NULL;
			}
			at += len;
		}
		if (at == reader->end) {
			fail_at(reader, at, "the end inside a string");
			return NULL;
		}
		unsigned char c = (unsigned char)*at;
		if (c == '"' || c == '\\')
			return at;
		if (c < 0x20) {
			fail_at(reader, at,
			        "a control character in a string must be written `\\u00…`");
			return NULL;
		}
	}
}

/* The string whose first `plain - reader->at` bytes are plain and whose next is a backslash. */
static int read_escaped(struct reader *reader, const char *plain)
{
	static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
	reserve_scratch(reader, plain);
	const char *at = reader->at;
	char *out = reader->scratch;
	for (;;) {
		memcpy(out, at, (size_t)(plain - at));
		out += plain - at;
		at = plain;
		if (*at == '"')
			break;
		char letter = reader->end - at > 1 ? at[1] : '\0';
		const char *known = letter == '\0' ? NULL : strchr(letters, letter);
		if (letter == 'u') {
			at = read_unicode(reader, at, &out);
			if (at == NULL)
				return -1;
		} else if (known != NULL) {
			*out++ = meanings[known - letters];
			at += 2;
		} else {
			return fail_at(reader, at,
			               "no such escape: `\\` goes before one of \"\\/bfnrtu");
		}
		plain = check_plain(reader, at);
		if (plain == NULL)
			return -1;
	}
	lua_pushlstring(reader->L, reader->scratch, (size_t)(out - reader->scratch));
	reader->at = at + 1;
	return 0;
}

/* The rest of a string, from behind its opening quote. */
static int read_string(struct reader *reader)
{
	const char *at = plain_end(reader->at, reader->end);
	if (at == reader->end || *at != '"') {
		at = check_plain(reader, at);
		if (at == NULL)
			return -1;
		if (*at == '\\')
			return read_escaped(reader, at);
	}
	lua_pushlstring(reader->L, reader->at, (size_t)(at - reader->at));
	reader->at = at + 1;
	return 0;
}

/* ---- numbers and words ----------------------------------------------------------------- */

static int read_number(struct reader *reader)
{
	double value;
	bool exact;
	size_t bad_at;
	size_t used = mill_number_read(reader->at, (size_t)(reader->end - reader->at), &value,
	                               &exact, &bad_at);
	if (used == 0)
		return fail_at(reader, reader->at + bad_at, "a number that JSON does not allow");
	if (exact)
		lua_pushnumber(reader->L, value);
	else
		mill_json_push_decimal(reader->L, reader->at, used);
	reader->at += used;
	return 0;
}

static bool take_word(struct reader *reader, const char *word, size_t len)
{
	if ((size_t)(reader->end - reader->at) < len || memcmp(reader->at, word, len) != 0)
		return false;
	reader->at += len;
	return true;
}

/* ---- arrays and objects ---------------------------------------------------------------- */

/* Reserves stack for one more table, and the slot where it will stand. Returns the slot, 0 if none.
 */
static int enter(struct reader *reader)
{
	if (++reader->depth > reader->depth_max) {
		char why[64];
		snprintf(why, sizeof(why), "nested deeper than %d", reader->depth_max);
		fail_at(reader, reader->at, why);
		return 0;
	}
	if (!lua_checkstack(reader->L, WAITING + 8)) {
		fail_at(reader, reader->at, "no stack left for another level");
		return 0;
	}
	reader->at++;
	lua_pushnil(reader->L);
	return lua_gettop(reader->L);
}

static int waiting_room(const struct reader *reader)
{
	return reader->depth <= WAITING_DEPTH ? WAITING : 1;
}

static void make_array(struct reader *reader, int slot, int count)
{
	lua_State *L = reader->L;
	lua_createtable(L, count, 0);
	if (reader->array_slot < 0) {
		reader->array_slot = -reader->array_slot;
		luaL_getmetatable(L, MILL_JSON_ARRAY);
		lua_replace(L, reader->array_slot);
	}
	lua_pushvalue(L, reader->array_slot);
	lua_setmetatable(L, -2);
	lua_replace(L, slot);
}

static int read_array(struct reader *reader)
{
	lua_State *L = reader->L;
	int slot = enter(reader);
	if (slot == 0)
		return -1;
	if (next_token(reader) == ']') {
		make_array(reader, slot, 0);
	} else {
		int count = 0, waiting = 0, room = waiting_room(reader);
		bool more = true;
		while (more) {
			if (read_value(reader) != 0)
				return -1;
			waiting++;
			char next = next_token(reader);
			more = next == ',';
			if (!more && next != ']')
				return fail_expected(reader, "`,` or `]` in an array");
			if (more)
				reader->at++;
			if (more && waiting < room)
				continue;
			if (count == 0)
				make_array(reader, slot, waiting);
			count += waiting;
			for (int i = count; waiting > 0; i--, waiting--)
				lua_rawseti(L, slot, i);
			room = 1;
		}
	}
	reader->at++;
	reader->depth--;
	return 0;
}

/* Moves the pairs that wait above `slot` into its table, the first first: of equal keys the last
 * wins. */
static void store_pairs(lua_State *L, int slot, int pairs)
{
	if (pairs == 1) {
		lua_rawset(L, slot);
		return;
	}
	for (int i = slot + 1; i < slot + 2 * pairs; i += 2) {
		lua_pushvalue(L, i);
		lua_pushvalue(L, i + 1);
		lua_rawset(L, slot);
	}
	lua_settop(L, slot);
}

static int read_object(struct reader *reader)
{
	lua_State *L = reader->L;
	int slot = enter(reader);
	if (slot == 0)
		return -1;
	if (next_token(reader) == '}') {
		lua_createtable(L, 0, 0);
		lua_replace(L, slot);
	} else {
		int waiting = 0, room = waiting_room(reader) / 2;
		bool made = false, more = true;
		while (more) {
			if (next_token(reader) != '"')
				return fail_expected(reader, "a key in double quotes");
			reader->at++;
			if (read_string(reader) != 0)
				return -1;
			if (next_token(reader) != ':')
				return fail_expected(reader, "`:` after a key");
			reader->at++;
			if (read_value(reader) != 0)
				return -1;
			waiting++;
			char next = next_token(reader);
			more = next == ',';
			if (!more && next != '}')
				return fail_expected(reader, "`,` or `}` in an object");
			if (more)
				reader->at++;
			if (more && waiting < room)
				continue;
			if (!made) {
				lua_createtable(L, 0, waiting);
				lua_replace(L, slot);
				made = true;
			}
			store_pairs(L, slot, waiting);
			waiting = 0;
			room = 1;
		}
	}
	reader->at++;
	reader->depth--;
	return 0;
}

/* ---- values ---------------------------------------------------------------------------- */

/* Pushes the next value; there are slots for it. Recursion is bounded by enter. */
static int read_value(struct reader *reader)
{
	char first = next_token(reader);
	switch (first) {
	case '"':
		reader->at++;
		return read_string(reader);
	case '{':
		return read_object(reader);
	case '[':
		return read_array(reader);
	case 't':
		if (!take_word(reader, "true", 4))
			break;
		lua_pushboolean(reader->L, 1);
		return 0;
	case 'f':
		if (!take_word(reader, "false", 5))
			break;
		lua_pushboolean(reader->L, 0);
		return 0;
	case 'n':
		if (!take_word(reader, "null", 4))
			break;
		mill_json_push_null(reader->L);
		return 0;
	default:
		if (first == '-' || (first >= '0' && first <= '9'))
			return read_number(reader);
		break;
	}
	return fail_expected(reader, "a value");
}

int mill_json_decode(lua_State *L, const char *text, size_t len, struct mill_err *err)
{
	return mill_json_decode_within(L, text, len, MILL_JSON_DEPTH, err);
}

int mill_json_decode_within(lua_State *L, const char *text, size_t len, int depth_max,
                            struct mill_err *err)
{
	int top = lua_gettop(L);
	if (!lua_checkstack(L, WAITING))
		return mill_err_set(err, MILL_ERR_INPUT, "no Lua stack left to read JSON");
	struct reader reader;
	reader.L = L;
	reader.err = err;
	reader.start = reader.at = text;
	reader.end = text + len;
	reader.depth = 0;
	reader.depth_max = depth_max;
	reader.array_slot = -(top + 1);
	reader.scratch_slot = top + 2;
	reader.scratch = reader.small;
	reader.scratch_size = sizeof(reader.small);
	lua_pushnil(L);
	lua_pushnil(L);

	int rc = read_value(&reader);
	skip_space(&reader);
	if (rc == 0 && reader.at < reader.end)
		rc = fail_expected(&reader, "the end after the value");
	if (rc != 0) {
		lua_settop(L, top);
		return -1;
	}
	lua_replace(L, top + 1);
	lua_settop(L, top + 1);
	return 0;
}
