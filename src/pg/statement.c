/* What the text of a statement says of itself: see statement.h. */
#include "pg/statement.h"

#include <ctype.h>
#include <strings.h>

static bool starts(struct mill_span text, const char *with)
{
	size_t len = strlen(with);
	return text.len >= len && memcmp(text.data, with, len) == 0;
}

static void skip(struct mill_span *text, size_t len)
{
	text->data += len;
	text->len -= len;
}

static void skip_line(struct mill_span *text)
{
	while (text->len > 0 && text->data[0] != '\n' && text->data[0] != '\r')
		skip(text, 1);
}

/* Comments of this kind may stand in each other. */
static void skip_block(struct mill_span *text)
{
	size_t depth = 0;
	do {
		if (starts(*text, "/*")) {
			depth++;
			skip(text, 2);
		} else if (starts(*text, "*/")) {
			depth--;
			skip(text, 2);
		} else {
			skip(text, 1);
		}
	} while (depth > 0 && text->len > 0);
}

/* What stands between words; an empty statement is none. */
static void skip_blanks(struct mill_span *text)
{
	while (text->len > 0) {
		if (starts(*text, "--"))
			skip_line(text);
		else if (starts(*text, "/*"))
			skip_block(text);
		else if (text->data[0] == ';' || isspace((unsigned char)text->data[0]))
			skip(text, 1);
		else
			return;
	}
}

static bool is_of_word(char c)
{
	return isalnum((unsigned char)c) || c == '_' || c == '$' || (unsigned char)c >= 0x80;
}

/* The next word, which is taken off; empty: something else comes, or nothing. */
static struct mill_span take_word(struct mill_span *text)
{
	skip_blanks(text);
	struct mill_span word = { text->data, 0 };
	while (text->len > 0 && is_of_word(text->data[0])) {
		skip(text, 1);
		word.len++;
	}
	return word;
}

static bool is(struct mill_span word, const char *keyword)
{
	return word.len == strlen(keyword) && strncasecmp(word.data, keyword, word.len) == 0;
}

bool mill_statement_ends_transaction(struct mill_span sql)
{
	struct mill_span word = take_word(&sql);
	if (is(word, "commit") || is(word, "end") || is(word, "abort"))
		return true;
	if (is(word, "prepare"))
		return is(take_word(&sql), "transaction");
	if (!is(word, "rollback"))
		return false;
	word = take_word(&sql);
	if (is(word, "work") || is(word, "transaction"))
		word = take_word(&sql);
	return !is(word, "to");
}

/*
 * Words that may leave something, in lower case, or how they begin. An advisory lock of _xact_ ends
 * with its transaction.
 */
static const struct {
	const char *text;
	bool begins;
} leaving[] = {
	{ "set_config", false },
	{ "pg_settings", false },
	{ "temp", false },
	{ "temporary", false },
	{ "pg_temp", true },
	{ "hold", false },
	{ "pg_advisory_lock", true },
	{ "pg_try_advisory_lock", true },
};

static bool is_leaving(struct mill_span word)
{
	for (size_t i = 0; i < MILL_COUNT(leaving); i++) {
		struct mill_span start = { word.data, strlen(leaving[i].text) };
		if (word.len < start.len || (word.len > start.len && !leaving[i].begins))
			continue;
		if (is(start, leaving[i].text))
			return true;
	}
	return false;
}

bool mill_statement_leaves_state(struct mill_span sql)
{
	struct mill_span rest = sql;
	struct mill_span first = take_word(&rest);
	if (is(first, "do") || is(first, "call"))
		return true;
	/* In comments and texts too, which is too much, and harmless. */
	while (sql.len > 0) {
		struct mill_span word = { sql.data, 0 };
		while (word.len < sql.len && is_of_word(word.data[word.len]))
			word.len++;
		if (is_leaving(word))
			return true;
		skip(&sql, word.len > 0 ? word.len : 1);
	}
	return false;
}
