/*
 * Every statement the runtime prepares, by name. The texts are in queries.c and queries_plain.c,
 * with `{schema}`, `{table}` and `{prefix}` to be filled in.
 */
#pragma once

enum mill_query {
	MILL_QUERY_PIN,
	MILL_QUERY_CLAIM,
	MILL_QUERY_DUE,
	MILL_QUERY_UNDO_CLAIM,
	MILL_QUERY_SETTLE_DONE,
	MILL_QUERY_SETTLE_BACK,
	MILL_QUERY_SETTLE_PUBLISHING,
	MILL_QUERY_STILL_HELD,
	MILL_QUERY_FINISH,            /* this and the next: of executors, with text parameters */
	MILL_QUERY_FINISH_PUBLISHING, /* no such thing on a plain table */
	MILL_QUERY_PATIENCE,
	MILL_QUERY_NOTIFY,
	MILL_QUERY_NOTIFY_CONTROL,
	MILL_QUERY_PUBLISH,
	MILL_QUERY_REGISTER_LANES,
	MILL_QUERY_READ_LANES,
	MILL_QUERY_REGISTER_WORKER,
	MILL_QUERY_DECLARE_WORKER,
	MILL_QUERY_RENEW,
	MILL_QUERY_LEAVE,
	MILL_QUERY_STAMP,
	MILL_QUERY_RECLAIM_DEAD,
	MILL_QUERY_RECLAIM_UNKNOWN,
	MILL_QUERY_BURY,
	MILL_QUERY_PRUNE,
	MILL_QUERY_PRUNE_DISCARDED,
	MILL_QUERY_REMOVE_LANES,
	MILL_QUERY_ADOPT,
	MILL_QUERY_COUNT,
};

struct mill_query_text {
	const char *name;
	const char *sql;
};

extern const struct mill_query_text mill_queries[MILL_QUERY_COUNT];

/* What the statements find in the database. */
enum mill_shape {
	MILL_SHAPE_LEDGER, /* what sql/ makes */
	/* One table that another program made, with the columns of a plain queue and no others that
	 * matter, and nothing of ours beside it. */
	MILL_SHAPE_PLAIN,
};

/* The texts for MILL_SHAPE_PLAIN. Where the name is NULL, that of mill_queries serves as well. */
extern const struct mill_query_text mill_plain_queries[MILL_QUERY_COUNT];

/*
 * `sql` with its placeholders filled in: {schema} and {table} as quoted identifiers, {prefix} bare.
 * All three must be plain identifiers. A new string for the caller to free.
 */
char *mill_query_fill(const char *sql, const char *schema, const char *table, const char *prefix);
