/* Errors as values: see err.h. */
#include "core/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <uv.h>

#include "core/policy.h"

/* Messages become log lines and terminal lines: one line each, whatever libpq or Lua put in. */
static void flatten(char *text)
{
	size_t out = 0;
	for (size_t in = 0; text[in] != '\0'; in++) {
		char c = text[in];
		bool space = c == '\n' || c == '\r' || c == '\t' || c == ' ';
		if (space && (out == 0 || text[out - 1] == ' '))
			continue;
		text[out++] = space ? ' ' : c;
	}
	while (out > 0 && text[out - 1] == ' ')
		out--;
	text[out] = '\0';
}

/* vsnprintf may cut a character in half at the end of the buffer. */
static void trim_to_boundary(struct mill_err *err)
{
	size_t len = strlen(err->message);
	if (len == sizeof(err->message) - 1)
		err->message[mill_policy_boundary(err->message, len, len - 1)] = '\0';
}

int mill_err_set_at(struct mill_err *err, enum mill_err_kind kind, int code, const char *sqlstate,
                    const char *file, int line, const char *format, ...)
{
	if (err == NULL)
		return -1;
	err->kind = kind;
	err->code = code;
	snprintf(err->sqlstate, sizeof(err->sqlstate), "%s", sqlstate ? sqlstate : "");
	err->file = file;
	err->line = line;
	va_list args;
	va_start(args, format);
	vsnprintf(err->message, sizeof(err->message), format, args);
	va_end(args);
	if (code != 0) {
		size_t len = strlen(err->message);
		const char *reason = code < 0 ? uv_strerror(code) : strerror(code);
		snprintf(err->message + len, sizeof(err->message) - len, ": %s", reason);
	}
	trim_to_boundary(err);
	flatten(err->message);
	return -1;
}

int mill_err_wrap(struct mill_err *err, const char *format, ...)
{
	if (err == NULL)
		return -1;
	char inner[sizeof(err->message)];
	memcpy(inner, err->message, sizeof(inner));
	va_list args;
	va_start(args, format);
	vsnprintf(err->message, sizeof(err->message), format, args);
	va_end(args);
	size_t len = strlen(err->message);
	snprintf(err->message + len, sizeof(err->message) - len, ": %s", inner);
	trim_to_boundary(err);
	flatten(err->message);
	return -1;
}

/*
 * A longer prefix wins over a shorter one, so the exceptions stand first. What is in no row refuses
 * the item: repeating a statement that the server rejects would be repeated for ever.
 */
static const struct {
	const char *prefix;
	enum mill_err_reaction reaction;
} reactions[] = {
	{ "40001", MILL_REACT_RETRY },     /* serialization failure */
	{ "40P01", MILL_REACT_RETRY },     /* deadlock */
	{ "55P03", MILL_REACT_RETRY },     /* lock_timeout */
	{ "57014", MILL_REACT_RETRY },     /* statement_timeout or a cancel */
	{ "57P", MILL_REACT_RECONNECT },   /* shutting down, starting up, idle session ended */
	{ "08", MILL_REACT_RECONNECT },    /* connection lost */
	{ "53", MILL_REACT_RECONNECT },    /* no slots, no memory, no disk */
	{ "25006", MILL_REACT_RECONNECT }, /* read-only: look for a read-write server */
	{ "25P", MILL_REACT_RECONNECT },   /* the transaction ended under us (idle timeouts) */
	{ "58", MILL_REACT_RECONNECT },    /* the server's own files failed */
	{ "XX", MILL_REACT_RECONNECT },    /* internal error, corruption */
	{ "26", MILL_REACT_RECONNECT }, /* a prepared statement is gone (a pooler, DISCARD ALL) */
	{ "28", MILL_REACT_WAIT },      /* password, pg_hba */
	{ "3D", MILL_REACT_WAIT },      /* no such database */
	{ "3F", MILL_REACT_WAIT },      /* no such schema */
	{ "42P01", MILL_REACT_WAIT },   /* no such table */
	{ "42703", MILL_REACT_WAIT },   /* no such column: an older schema */
	{ "42883", MILL_REACT_WAIT },   /* no such function: an older schema */
	{ "42501", MILL_REACT_WAIT },   /* no grant */
};

bool mill_err_is_lock_timeout(const struct mill_err *err)
{
	return err != NULL && strcmp(err->sqlstate, "55P03") == 0;
}

enum mill_err_reaction mill_err_database_reaction(const char *sqlstate)
{
	if (sqlstate == NULL || sqlstate[0] == '\0')
		return MILL_REACT_RECONNECT;
	for (size_t i = 0; i < MILL_COUNT(reactions); i++)
		if (strncmp(sqlstate, reactions[i].prefix, strlen(reactions[i].prefix)) == 0)
			return reactions[i].reaction;
	return MILL_REACT_REFUSE;
}
