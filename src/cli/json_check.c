/*
 * Is a text JSON that Postgres takes? See mill_cli_check_json in cli.h.
 *
 * The server would find out too, but its message does not say where, and a mistake in a message is
 * the user's (exit code 2) and needs no database to be found.
 */
#include <stdio.h>

#include "cli/cli.h"
#include "executor/json_number.h"
#include "executor/json_text.h"

#define DEPTH_MAX 1000 /* handlers refuse what is nested deeper */

struct scan {
	const char *text, *at, *end;
	int depth;
	const char *wrong; /* what is wrong at `at` */
};

static bool wrong(struct scan *scan, const char *what)
{
	scan->wrong = what;
	return false;
}

static void skip_space(struct scan *scan)
{
	while (scan->at < scan->end && strchr(" \t\r\n", *scan->at) != NULL && *scan->at != 0)
		scan->at++;
}

/* The four hexadecimal digits of \uXXXX, or −1. */
static int hex4(const char *at, const char *end)
{
	int value = 0;
	if (end - at < 4)
		return -1;
	for (int i = 0; i < 4; i++) {
		static const char digits[] = "0123456789abcdefABCDEF";
		const char *digit = at[i] ? strchr(digits, at[i]) : NULL;
		if (digit == NULL)
			return -1;
		int number = (int)(digit - digits);
		value = value * 16 + (number < 16 ? number : number - 6);
	}
	return value;
}

static bool scan_unicode(struct scan *scan)
{
	int code = hex4(scan->at + 2, scan->end);
	if (code < 0)
		return wrong(scan, "`\\u` needs four hexadecimal digits");
	if (code == 0)
		return wrong(scan, "Postgres stores no `\\u0000`");
	bool high = code >= 0xD800 && code <= 0xDBFF, low = code >= 0xDC00 && code <= 0xDFFF;
	const char *next = scan->at + 6;
	if (high && scan->end - next >= 6 && next[0] == '\\' && next[1] == 'u') {
		int second = hex4(next + 2, scan->end);
		if (second >= 0xDC00 && second <= 0xDFFF) {
			scan->at = next + 6;
			return true;
		}
	}
	if (high || low)
		return wrong(scan, "half of a surrogate pair");
	scan->at = next;
	return true;
}

static bool scan_string(struct scan *scan)
{
	scan->at++;
	while (true) {
		scan->at = plain_end(scan->at, scan->end);
		if (scan->at == scan->end)
			return wrong(scan, "a string does not end");
		unsigned char c = (unsigned char)*scan->at;
		if (c == '"') {
			scan->at++;
			return true;
		}
		if (c < 0x20)
			return wrong(scan,
			             "a control character in a string: write it as an escape");
		if (c >= 0x80) {
			size_t len = utf8_sequence(scan->at, scan->end);
			if (len == 0)
				return wrong(scan, "bytes that are no UTF-8");
			scan->at += len;
			continue;
		}
		char escape = scan->end - scan->at > 1 ? scan->at[1] : 0;
		if (escape == 'u') {
			if (!scan_unicode(scan))
				return false;
		} else if (escape != 0 && strchr("\"\\/bfnrt", escape) != NULL) {
			scan->at += 2;
		} else {
			return wrong(scan, "an escape that JSON does not know");
		}
	}
}

static bool scan_value(struct scan *scan);

/* The inside of `[…]` or `{…}`, from its first byte on. */
static bool scan_members(struct scan *scan, char close, bool keyed)
{
	if (++scan->depth > DEPTH_MAX)
		return wrong(scan, "nested deeper than 1000");
	scan->at++;
	skip_space(scan);
	if (scan->at < scan->end && *scan->at == close) {
		scan->at++;
		scan->depth--;
		return true;
	}
	while (true) {
		skip_space(scan);
		if (keyed) {
			if (scan->at == scan->end || *scan->at != '"')
				return wrong(scan, "a name in double quotes is expected");
			if (!scan_string(scan))
				return false;
			skip_space(scan);
			if (scan->at == scan->end || *scan->at != ':')
				return wrong(scan, "`:` is expected");
			scan->at++;
		}
		if (!scan_value(scan))
			return false;
		skip_space(scan);
		if (scan->at < scan->end && *scan->at == ',') {
			scan->at++;
			continue;
		}
		if (scan->at == scan->end || *scan->at != close)
			return wrong(scan,
			             keyed ? "`,` or `}` is expected" : "`,` or `]` is expected");
		scan->at++;
		scan->depth--;
		return true;
	}
}

static bool scan_word(struct scan *scan)
{
	static const char *const words[] = { "true", "false", "null" };
	for (size_t i = 0; i < MILL_COUNT(words); i++) {
		size_t len = strlen(words[i]);
		if ((size_t)(scan->end - scan->at) >= len && memcmp(scan->at, words[i], len) == 0) {
			scan->at += len;
			return true;
		}
	}
	return wrong(scan, "a value is expected");
}

static bool scan_value(struct scan *scan)
{
	skip_space(scan);
	if (scan->at == scan->end)
		return wrong(scan, "a value is expected");
	switch (*scan->at) {
	case '"':
		return scan_string(scan);
	case '[':
		return scan_members(scan, ']', false);
	case '{':
		return scan_members(scan, '}', true);
	default:
		break;
	}
	if (*scan->at != '-' && (*scan->at < '0' || *scan->at > '9'))
		return scan_word(scan);
	struct mill_number number;
	size_t bad_at;
	size_t len = mill_number_scan(scan->at, (size_t)(scan->end - scan->at), &number, &bad_at);
	scan->at += len ? len : bad_at;
	return len > 0 || wrong(scan, "a number is malformed");
}

int mill_cli_check_json(const char *text, size_t len, struct mill_err *err)
{
	struct scan scan = { .text = text, .at = text, .end = text + len };
	bool good = scan_value(&scan);
	if (good) {
		skip_space(&scan);
		if (scan.at == scan.end)
			return 0;
		wrong(&scan, "something follows the value");
	}
	int line = 1, column = 1;
	for (const char *at = text; at < scan.at; at++) {
		bool continues = ((unsigned char)*at & 0xC0) == 0x80;
		column += !continues;
		if (*at == '\n') {
			line++;
			column = 1;
		}
	}
	return mill_err_set(err, MILL_ERR_INPUT, "this is not JSON: line %d, column %d: %s", line,
	                    column, scan.wrong);
}
