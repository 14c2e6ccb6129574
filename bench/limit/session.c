/* Plain statements of the claim experiment: see session.h. */
#include "session.h"

#include <stdio.h>

#include "pg/queries.h"

void bench_session_check(PGconn *connection, bool good, const char *what)
{
	if (good)
		return;
	fprintf(stderr, "claim: %s: %s", what, PQerrorMessage(connection));
	exit(1);
}

static void on_notice(void *context, const char *message)
{
	(void)context;
	(void)message;
}

PGconn *bench_session_open(void)
{
	PGconn *connection = PQconnectdb("application_name='tidemill bench'");
	bench_session_check(connection, PQstatus(connection) == CONNECTION_OK,
	                    "no server is reached by the PG* variables");
	PQsetNoticeProcessor(connection, on_notice, NULL);
	return connection;
}

static PGresult *ask(PGconn *connection, const char *schema, const char *sql)
{
	char *filled = mill_query_fill(sql, schema, "queue_message", "tidemill_bench");
	PGresult *result = PQexec(connection, filled);
	ExecStatusType status = PQresultStatus(result);
	bench_session_check(connection, status == PGRES_COMMAND_OK || status == PGRES_TUPLES_OK,
	                    filled);
	free(filled);
	return result;
}

void bench_session_run(PGconn *connection, const char *schema, const char *sql)
{
	PQclear(ask(connection, schema, sql));
}

double bench_session_number(PGconn *connection, const char *schema, const char *sql)
{
	PGresult *result = ask(connection, schema, sql);
	double value = PQntuples(result) > 0 ? atof(PQgetvalue(result, 0, 0)) : 0;
	PQclear(result);
	return value;
}
