/*
 * What a statement came to that a handler or a script wrote: rows as text, or a failure with all
 * the server said about it.
 *
 * Gathered row by row, so that it stays bounded, and kept apart from libpq, so that the layer that
 * makes values of it needs none. Both the asynchronous client and the blocking session fill it.
 */
#pragma once

#include "core/frame.h"

struct pg_conn;
struct pg_result;

/*
 * How large one answer may be. Beside the text of its values each row and each place in it counts,
 * and so do the arrays and objects of JSON and what is in them: the tables which Lua makes of an
 * answer stay bounded too.
 */
#define MILL_ANSWER_MAX (64 * 1024 * 1024) /* bytes */
#define MILL_ANSWER_TABLE 80               /* an empty one, and its place in the list */
#define MILL_ANSWER_VALUE 24               /* a key's place in a table; NULL has one as well */

/* Types whose values are more than text, by their numbers in Postgres' catalogue. */
enum mill_answer_type {
	MILL_ANSWER_BOOL = 16,
	MILL_ANSWER_INT8 = 20,
	MILL_ANSWER_INT2 = 21,
	MILL_ANSWER_INT4 = 23,
	MILL_ANSWER_OID = 26,
	MILL_ANSWER_JSON = 114,
	MILL_ANSWER_FLOAT4 = 700,
	MILL_ANSWER_FLOAT8 = 701,
	MILL_ANSWER_NUMERIC = 1700,
	MILL_ANSWER_JSONB = 3802,
};

struct mill_answer_field {
	char *name;
	uint32_t type;
};

/* Why there is no answer. Texts are NULL where the server said nothing. */
struct mill_failure {
	char sqlstate[6]; /* "": it was not the server that spoke */
	bool lost;        /* the connection is gone */
	bool unknown;     /* and whether the statement took effect is not known */
	char *message;    /* never NULL where `failed` */
	char *detail, *hint, *constraint, *schema, *table, *column;
};

/* Zero-initialised is empty. */
struct mill_answer {
	struct mill_answer_field *fields;
	size_t field_count;
	struct mill_buffer rows; /* a span for each value, row by row; absent: SQL NULL */
	size_t row_count;
	size_t json_size; /* what JSON in the rows counts beside its text */
	int64_t affected;
	char tag[32]; /* "INSERT 0 1" … */
	bool failed;
	struct mill_failure failure;
};

/* Free what it holds; it is empty again. */
void mill_answer_clear(struct mill_answer *answer);

/*
 * Take one result of the statement, which is cleared. −1: the answer has failed and the connection
 * must be closed, since it is in the middle of something (COPY, or more rows than are allowed).
 */
int mill_answer_take(struct mill_answer *answer, struct pg_result *result);

/* It failed, for a reason of our own. What was gathered is dropped. */
MILL_PRINTF(3, 4)
void mill_answer_fail(struct mill_answer *answer, const char *sqlstate, const char *format, ...);
/* It failed by what the server says in this result, which stays the caller's. */
void mill_answer_refuse(struct mill_answer *answer, const struct pg_result *result);
/* It failed because the connection did; unless it failed before. */
void mill_answer_lost(struct mill_answer *answer, const struct pg_conn *connection);
/* After a loss: the statement may have taken effect all the same. Says so in the message. */
void mill_answer_unknown(struct mill_answer *answer);
