/* Filling the ledger: see ledger.h. */
#include "ledger.h"

#include <stdio.h>

#include "pg/migrate.h"

/*
 * Rows as publishers leave them: ids in the order of time, and runs of rows with one due time. What
 * differs between the three kinds is when they are due and how they ended.
 */
static void fill(PGconn *connection, const struct bench_options *options, int64_t count,
                 const char *due, const char *status, const char *processed)
{
	if (count == 0)
		return;
	char *sql = mill_sprintf(
	        "INSERT INTO {schema}.{table}"
	        " (topic, subscriber, lane, payload, available_at, created_at, status, "
	        "processed_at,"
	        "  published_by)"
	        " SELECT s.topic, s.subscriber, s.lane,"
	        "  jsonb_build_object('id', i, 'pad', repeat('x', %lld)),"
	        "  %s + i / %lld * interval '1 ms', now() - interval '1 hour', '%s', %s, 'bench'"
	        " FROM generate_series(0::bigint, %lld) AS i"
	        " JOIN {schema}.subscription AS s ON s.lane = 1 + i %% %lld ORDER BY i",
	        (long long)options->pad, due, (long long)options->per_call, status, processed,
	        (long long)count - 1, (long long)options->lanes);
	bench_session_run(connection, options->schema, sql);
	free(sql);
}

static void migrate(const struct bench_options *options)
{
	struct mill_migrate_options migrate_options = {
		.schema = options->schema,
		.table = "queue_message",
		.prefix = "tidemill_bench",
		.max_payload_bytes = 1024 * 1024,
		.notify = true,
	};
	struct mill_migrate_result result;
	struct mill_err err = MILL_ERR_INIT;
	if (mill_migrate_run(&migrate_options, &result, &err) != 0) {
		fprintf(stderr, "claim: %s\n", err.message);
		exit(1);
	}
}

void bench_ledger_make(PGconn *connection, const struct bench_options *options)
{
	const char *schema = options->schema;
	bench_ledger_drop(connection, options);
	migrate(options);
	bench_session_run(connection, schema, "CREATE EXTENSION IF NOT EXISTS pgstattuple");
	char *subscriptions =
	        mill_sprintf("INSERT INTO {schema}.subscription (app, topic, subscriber)"
	                     " SELECT 'bench', 'bench.' || i, 'claim'"
	                     " FROM generate_series(1, %lld) AS i ORDER BY i",
	                     (long long)options->lanes);
	bench_session_run(connection, schema, subscriptions);
	free(subscriptions);
	if (options->stale) {
		bench_session_run(connection, schema,
		                  "ALTER TABLE {schema}.{table} SET (autovacuum_enabled = false)");
		bench_session_run(connection, schema, "ANALYZE {schema}.{table}");
	}
	/* So that none comes by itself during the run. */
	bench_session_run(connection, schema, "CHECKPOINT");
	fill(connection, options, options->done, "now() - interval '1 day'", "done",
	     "now() - interval '12 hours' + i * interval '1 ms'");
	fill(connection, options, options->future, "now() + interval '1 day'", "pending", "NULL");
	fill(connection, options, options->rows, "now() - interval '1 hour'", "pending", "NULL");
	if (!options->stale)
		bench_session_run(connection, schema, "VACUUM (ANALYZE) {schema}.{table}");
}

PGconn *bench_ledger_hold_snapshot(void)
{
	PGconn *holder = bench_session_open();
	bench_session_run(holder, "public", "BEGIN ISOLATION LEVEL REPEATABLE READ");
	bench_session_run(holder, "public", "SELECT txid_current()");
	return holder;
}

int64_t bench_ledger_settled(PGconn *connection, const struct bench_options *options)
{
	return (int64_t)bench_session_number(
	               connection, options->schema,
	               "SELECT count(*) FROM {schema}.{table} WHERE status = 'done'") -
	       options->done;
}

int64_t bench_ledger_dead(PGconn *connection, const struct bench_options *options)
{
	return (int64_t)bench_session_number(
	        connection, options->schema,
	        "SELECT dead_tuple_count FROM pgstattuple('{schema}.{table}')");
}

void bench_ledger_drop(PGconn *connection, const struct bench_options *options)
{
	bench_session_run(connection, options->schema, "DROP SCHEMA IF EXISTS {schema} CASCADE");
}
