/*
 * An error as a value: what went wrong, where in the source, and how the caller should react.
 *
 * Functions that can fail return 0 or -1 and take a `struct mill_err *err` as their last argument,
 * which is filled where the failure happens, wrapped where its meaning changes and logged once, at
 * the top. The message is one line for a person, never a secret.
 */
#pragma once

#include "core/base.h"

enum mill_err_kind {
	MILL_ERR_NONE,
	MILL_ERR_SYSTEM,    /* errno or a libuv code */
	MILL_ERR_CONFIG,    /* the user's configuration or handler: exit code 2 */
	MILL_ERR_USAGE,     /* the command line: exit code 2 */
	MILL_ERR_INPUT,     /* bad data: a topic, a payload */
	MILL_ERR_PROTOCOL,  /* a peer sent what cannot be read */
	MILL_ERR_DATABASE,  /* Postgres said no: see sqlstate */
	MILL_ERR_UNREACHED, /* no connection, or it was lost */
};

/*
 * What a database error asks for. The classes are those of the SQLSTATE, see
 * mill_err_database_reaction.
 */
enum mill_err_reaction {
	MILL_REACT_RETRY,     /* the same statement, again: 40001, 40P01 */
	MILL_REACT_RECONNECT, /* this connection or server is no good: 57P0x, 08xxx, 53xxx, 25006 */
	MILL_REACT_WAIT,   /* a person must act (missing table, no grant): say so once, go on trying
	                    */
	MILL_REACT_REFUSE, /* this one item cannot be done: 22xxx, 23xxx and everything else */
};

struct mill_err {
	enum mill_err_kind kind;
	int code;         /* errno or uv code, 0 when there is none */
	char sqlstate[6]; /* "" when it was not the server that spoke */
	const char *file; /* where in our source */
	int line;
	char message[1024]; /* one line, cut on a character boundary */
};

#define MILL_ERR_INIT                                                                              \
	{                                                                                          \
		.kind = MILL_ERR_NONE                                                              \
	}

/* Fill `err` (may be NULL) and return -1, so that `return mill_err_set(…)` is the whole failure
 * path. */
#define mill_err_set(err, kind, ...)                                                               \
	mill_err_set_at((err), (kind), 0, NULL, __FILE__, __LINE__, __VA_ARGS__)
/* The same with an errno or libuv code, whose text is appended. */
#define mill_err_system(err, code, ...)                                                            \
	mill_err_set_at((err), MILL_ERR_SYSTEM, (code), NULL, __FILE__, __LINE__, __VA_ARGS__)
/* The same with the SQLSTATE of a server error (five characters or NULL). */
#define mill_err_database(err, sqlstate, ...)                                                      \
	mill_err_set_at((err), MILL_ERR_DATABASE, 0, (sqlstate), __FILE__, __LINE__, __VA_ARGS__)

MILL_PRINTF(7, 8)
int mill_err_set_at(struct mill_err *err, enum mill_err_kind kind, int code, const char *sqlstate,
                    const char *file, int line, const char *format, ...);

/* Put "prefix: " before the message; kind, code and place stay. Returns -1. */
MILL_PRINTF(2, 3) int mill_err_wrap(struct mill_err *err, const char *format, ...);

/* A lock was not to be had within lock_timeout. `err` may be NULL. */
bool mill_err_is_lock_timeout(const struct mill_err *err);

/* Which reaction a SQLSTATE asks for ("" or NULL, a lost connection, asks for a reconnect). */
enum mill_err_reaction mill_err_database_reaction(const char *sqlstate);
