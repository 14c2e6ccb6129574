/* The runtime's sweeps by hand: see housekeeping.h. */
#include "pg/housekeeping.h"

#include <stdio.h>

#include "core/frame.h"
#include "pg/queries.h"
#include "pg/session.h"

#define BATCH 500
#define TRIES 5

/* ---- transactions ---------------------------------------------------------------------------- */

static int run_filled(const struct mill_housekeeping *queue, const char *sql, int n_params,
                      const char *const *params, struct mill_rows **rows, struct mill_err *err)
{
	char *filled = mill_query_fill(sql, queue->schema, queue->table, queue->prefix);
	int result = mill_session_query(queue->session, filled, n_params, params, rows, err);
	free(filled);
	return result;
}

static int try_query(const struct mill_housekeeping *queue, const char *sql, int n_params,
                     const char *const *params, struct mill_rows **rows, struct mill_err *err)
{
	struct mill_session *session = queue->session;
	struct mill_rows *found = NULL;
	if (mill_session_script(session, "begin isolation level read committed read write", err) !=
	    0)
		return -1;
	if (run_filled(queue, mill_queries[MILL_QUERY_PIN].sql, 0, NULL, NULL, err) != 0 ||
	    run_filled(queue, sql, n_params, params, &found, err) != 0 ||
	    mill_session_script(session, "commit", err) != 0) {
		/* The first error is the one to tell; a lost connection rolls back by itself. */
		mill_session_script(session, "rollback", NULL);
		mill_rows_free(found);
		return -1;
	}
	if (rows != NULL)
		*rows = found;
	else
		mill_rows_free(found);
	return 0;
}

int mill_housekeeping_query(const struct mill_housekeeping *queue, const char *sql, int n_params,
                            const char *const *params, struct mill_rows **rows,
                            struct mill_err *err)
{
	for (int tries = 1;; tries++) {
		if (try_query(queue, sql, n_params, params, rows, err) == 0)
			return 0;
		if (tries == TRIES || err->sqlstate[0] == 0 ||
		    mill_err_database_reaction(err->sqlstate) != MILL_REACT_RETRY)
			return -1;
	}
}

/* ---- sweeps ---------------------------------------------------------------------------------- */

/* The columns of every sweep. */
enum { SWEPT_ID, SWEPT_TOPIC, SWEPT_SUBSCRIBER, SWEPT_FAILED };

static int run_sweep(const struct mill_housekeeping *queue, enum mill_query query,
                     int64_t lease_secs, struct mill_rows **rows, struct mill_err *err)
{
	char most[24], lease[24];
	snprintf(most, sizeof(most), "%d", BATCH);
	snprintf(lease, sizeof(lease), "%lld", (long long)lease_secs);
	const char *params[] = { most, lease };
	return mill_housekeeping_query(queue, mill_queries[query].sql, 2, params, rows, err);
}

/* Announce each topic that has something again; in a row written by hand it may be any text. */
static int announce(const struct mill_housekeeping *queue, const struct mill_rows *rows,
                    struct mill_err *err)
{
	struct mill_buffer topics = { 0 };
	for (int i = 0; i < mill_rows_count(rows); i++) {
		const char *topic = mill_rows_text(rows, i, SWEPT_TOPIC);
		bool told = mill_rows_bool(rows, i, SWEPT_FAILED);
		for (int before = 0; before < i && !told; before++)
			told = !mill_rows_bool(rows, before, SWEPT_FAILED) &&
			       strcmp(mill_rows_text(rows, before, SWEPT_TOPIC), topic) == 0;
		if (told)
			continue;
		mill_buffer_text(&topics, topics.len ? ",\"" : "{\"");
		for (const char *at = topic; *at; at++) {
			if (*at == '"' || *at == '\\')
				mill_buffer_text(&topics, "\\");
			mill_buffer_bytes(&topics, at, 1);
		}
		mill_buffer_text(&topics, "\"");
	}
	int result = 0;
	if (topics.len > 0) {
		mill_buffer_bytes(&topics, "}", 2);
		const char *params[] = { topics.data };
		result = run_filled(queue, mill_queries[MILL_QUERY_NOTIFY].sql, 1, params, NULL,
		                    err);
	}
	mill_buffer_free(&topics);
	return result;
}

/* Reclaim batch by batch. 1: `progress` said to stop. */
static int reclaim(const struct mill_housekeeping *queue, enum mill_query query, int64_t lease_secs,
                   mill_housekeeping_progress progress, void *context,
                   struct mill_housekeeping_counts *counts, struct mill_err *err)
{
	for (int swept = BATCH; swept >= BATCH;) {
		struct mill_rows *rows;
		if (run_sweep(queue, query, lease_secs, &rows, err) != 0)
			return -1;
		swept = mill_rows_count(rows);
		for (int i = 0; i < swept; i++) {
			if (mill_rows_bool(rows, i, SWEPT_FAILED))
				counts->failed++;
			else
				counts->returned++;
		}
		int result = announce(queue, rows, err);
		mill_rows_free(rows);
		if (result != 0)
			return -1;
		if (!progress(counts, context))
			return 1;
	}
	return 0;
}

int mill_housekeeping_reclaim(const struct mill_housekeeping *queue, int64_t lease_secs,
                              mill_housekeeping_progress progress, void *context,
                              struct mill_housekeeping_counts *counts, struct mill_err *err)
{
	*counts = (struct mill_housekeeping_counts){ 0 };
	int result =
	        reclaim(queue, MILL_QUERY_RECLAIM_DEAD, lease_secs, progress, context, counts, err);
	if (result == 0) {
		struct mill_rows *rows;
		result = mill_housekeeping_query(queue, mill_queries[MILL_QUERY_BURY].sql, 0, NULL,
		                                 &rows, err);
		if (result == 0) {
			counts->workers = mill_rows_affected(rows);
			mill_rows_free(rows);
		}
	}
	if (result == 0)
		result = reclaim(queue, MILL_QUERY_RECLAIM_UNKNOWN, lease_secs, progress, context,
		                 counts, err);
	return result < 0 ? -1 : 0;
}

int mill_housekeeping_prune(const struct mill_housekeeping *queue,
                            mill_housekeeping_progress progress, void *context,
                            struct mill_housekeeping_counts *counts, struct mill_err *err)
{
	static const enum mill_query queries[] = { MILL_QUERY_PRUNE, MILL_QUERY_PRUNE_DISCARDED };
	*counts = (struct mill_housekeeping_counts){ 0 };
	for (size_t i = 0; i < MILL_COUNT(queries); i++)
		for (int swept = BATCH; swept >= BATCH;) {
			struct mill_rows *rows;
			/* Retention is the subscription's: the lease plays no part, and must only
			 * not be 0. */
			if (run_sweep(queue, queries[i], 1, &rows, err) != 0)
				return -1;
			swept = mill_rows_count(rows);
			counts->pruned += swept;
			mill_rows_free(rows);
			if (!progress(counts, context))
				return 0;
		}
	return 0;
}
