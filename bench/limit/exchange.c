/* The runtime's exchanges, without its loop: see exchange.h. */
#include "exchange.h"

#include <stdio.h>

static void expect(PGconn *connection, PGresult *result, ExecStatusType status, const char *what)
{
	bench_session_check(connection, result != NULL && PQresultStatus(result) == status, what);
}

static void prepare(PGconn *connection, const char *name, const char *sql)
{
	PGresult *result = PQprepare(connection, name, sql, 0, NULL);
	expect(connection, result, PGRES_COMMAND_OK, name);
	PQclear(result);
}

void bench_exchange_prepare(PGconn *connection, const struct bench_options *options)
{
	static const enum mill_query queries[] = { MILL_QUERY_PIN, MILL_QUERY_CLAIM,
		                                   MILL_QUERY_SETTLE_DONE };
	prepare(connection, "begin", "BEGIN ISOLATION LEVEL READ COMMITTED");
	prepare(connection, "commit", "COMMIT");
	for (size_t i = 0; i < MILL_COUNT(queries); i++) {
		const struct mill_query_text *query = &mill_queries[queries[i]];
		char *sql = mill_query_fill(query->sql, options->schema, "queue_message",
		                            "tidemill_bench");
		prepare(connection, query->name, sql);
		free(sql);
	}
	bench_session_check(connection, PQenterPipelineMode(connection) == 1, "pipeline mode");
}

static void send_prepared(PGconn *connection, const char *name, const struct mill_params *params)
{
	const char *values[MILL_PARAMS_MAX];
	int formats[MILL_PARAMS_MAX];
	int count = params != NULL ? params->count : 0;
	for (int i = 0; i < count; i++) {
		values[i] = params->bytes.data + params->offsets[i];
		formats[i] = 1;
	}
	int sent = PQsendQueryPrepared(connection, name, count, values,
	                               params != NULL ? params->lengths : NULL, formats, 1);
	bench_session_check(connection, sent == 1, name);
}

void bench_exchange_queue(PGconn *connection, enum mill_query query, bool pin,
                          const struct mill_params *params)
{
	send_prepared(connection, "begin", NULL);
	if (pin)
		send_prepared(connection, mill_queries[MILL_QUERY_PIN].name, NULL);
	send_prepared(connection, mill_queries[query].name, params);
	bench_session_check(connection, PQpipelineSync(connection) == 1, "sync");
	send_prepared(connection, "commit", NULL);
	bench_session_check(connection, PQpipelineSync(connection) == 1, "sync");
}

void bench_exchange_flush(PGconn *connection)
{
	bench_session_check(connection, PQflush(connection) == 0, "sending");
}

/* The next result, which must have this status; a statement's is followed by a separator. */
static PGresult *take(PGconn *connection, ExecStatusType status, const char *what)
{
	PGresult *result = PQgetResult(connection);
	expect(connection, result, status, what);
	if (status != PGRES_PIPELINE_SYNC)
		MILL_ASSERT(PQgetResult(connection) == NULL);
	return result;
}

PGresult *bench_exchange_take(PGconn *connection, bool pin)
{
	PQclear(take(connection, PGRES_COMMAND_OK, "begin"));
	if (pin)
		PQclear(take(connection, PGRES_TUPLES_OK, "pin"));
	PGresult *rows = take(connection, PGRES_TUPLES_OK, "the statement");
	PQclear(take(connection, PGRES_PIPELINE_SYNC, "sync"));
	PQclear(take(connection, PGRES_COMMAND_OK, "commit"));
	PQclear(take(connection, PGRES_PIPELINE_SYNC, "sync"));
	return rows;
}
