/*
 * Housekeeping by hand: the sweeps that workers do by themselves, run by a command until nothing is
 * left to do.
 *
 * The statements are those of the runtime (queries.c), in transactions like the runtime's: READ
 * COMMITTED whatever the database's default, plans pinned. Blocking; plain commands only.
 */
#pragma once

#include "core/err.h"

struct mill_session;
struct mill_rows;

/* A queue and the way to it; all of it the caller's. */
struct mill_housekeeping {
	struct mill_session *session;
	const char *schema, *table, *prefix; /* plain identifiers */
};

/*
 * Run one statement, {schema} {table} {prefix} in it filled in, in a transaction of its own: READ
 * COMMITTED and with the plans of the runtime, so that a stale statistic costs nothing. Begun again
 * a few times where another transaction was in the way (40001, 40P01). As mill_session_query.
 */
int mill_housekeeping_query(const struct mill_housekeeping *queue, const char *sql, int n_params,
                            const char *const *params, struct mill_rows **rows,
                            struct mill_err *err);

struct mill_housekeeping_counts {
	int64_t returned; /* reclaim: pending again */
	int64_t failed;   /* reclaim: out of attempts, dead letters now */
	int64_t workers;  /* reclaim: dead ones, removed */
	int64_t pruned;
};

/*
 * Called after each batch with what was done so far. False: stop here, which is no failure.
 */
typedef bool (*mill_housekeeping_progress)(const struct mill_housekeeping_counts *counts,
                                           void *context);

/*
 * Take back what dead workers hold, and what an unknown holder has held for longer than
 * `lease_secs`. Topics that have something again are announced. `counts` is right on error too: a
 * batch that was committed stays.
 */
int mill_housekeeping_reclaim(const struct mill_housekeeping *queue, int64_t lease_secs,
                              mill_housekeeping_progress progress, void *context,
                              struct mill_housekeeping_counts *counts, struct mill_err *err);

/* Delete done and discarded messages that are older than their subscription keeps them. */
int mill_housekeeping_prune(const struct mill_housekeeping *queue,
                            mill_housekeeping_progress progress, void *context,
                            struct mill_housekeeping_counts *counts, struct mill_err *err);
