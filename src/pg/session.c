/* One blocking connection: see session.h. */
#include "pg/session.h"

#include <libpq-fe.h>

#include "pg/arguments.h"

#define OLDEST_SERVER 130000
#define CONNECT_TIMEOUT_SECS "10"

struct mill_session {
	PGconn *conn;
	mill_session_notice on_notice;
	void *context;
};

struct mill_rows {
	PGresult *result;
};

/* ---- notices ---------------------------------------------------------------------------- */

static void on_server_notice(void *arg, const PGresult *result)
{
	struct mill_session *session = arg;
	if (session->on_notice == NULL)
		return;
	const char *severity = PQresultErrorField(result, PG_DIAG_SEVERITY_NONLOCALIZED);
	const char *text = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);
	session->on_notice(severity ? severity : "NOTICE", text ? text : "", session->context);
}

void mill_session_on_notice(struct mill_session *session, mill_session_notice on_notice,
                            void *context)
{
	session->on_notice = on_notice;
	session->context = context;
}

/* ---- opening ---------------------------------------------------------------------------- */

static const char *option_value(const PQconninfoOption *options, const char *keyword)
{
	for (; options->keyword != NULL; options++)
		if (strcmp(options->keyword, keyword) == 0)
			return options->val ? options->val : "";
	return "";
}

static bool is_uri(const char *dsn)
{
	return strncmp(dsn, "postgresql://", 13) == 0 || strncmp(dsn, "postgres://", 11) == 0;
}

/*
 * Look at the address before libpq does. Its own messages quote what they could not read, and with
 * an unescaped `@`, `/` or blank in a password, that is a piece of the password.
 * `*several` tells whether there is more than one host.
 */
static int check_dsn(const char *dsn, bool *several, struct mill_err *err)
{
	PQconninfoOption *options = PQconninfoParse(dsn, NULL);
	if (options == NULL)
		return mill_err_set(
		        err, MILL_ERR_CONFIG,
		        "the address of the database cannot be read: write "
		        "postgresql://user@host:5432/name or host=… dbname=…, with known "
		        "options only (it is not shown here, as it may hold a password)");
	const char *host = option_value(options, "host");
	const char *port = option_value(options, "port");
	bool misread = port[strspn(port, "0123456789,")] != '\0';
	if (is_uri(dsn) && (strchr(host, '@') || strchr(option_value(options, "dbname"), '@')))
		misread = true;
	const char *env = getenv("PGHOST");
	*several = strchr(host[0] != '\0' || env == NULL ? host : env, ',') != NULL;
	PQconninfoFree(options);
	if (misread)
		return mill_err_set(
		        err, MILL_ERR_CONFIG,
		        "the address of the database is misread: its host, port or name "
		        "holds a character that belongs to a password; in a URI write `@` "
		        "as %%40, `/` as %%2F and `:` as %%3A");
	return 0;
}

int mill_session_check_dsn(const char *dsn, struct mill_err *err)
{
	bool several;
	return check_dsn(dsn, &several, err);
}

/* What libpq says about a connection that failed or was lost. */
static int unreached(const PGconn *conn, const char *sqlstate, struct mill_err *err)
{
	const char *text = PQerrorMessage(conn);
	return mill_err_set_at(err, MILL_ERR_UNREACHED, 0, sqlstate, __FILE__, __LINE__, "%s",
	                       text[0] != '\0' ? text : "the connection to the database was lost");
}

int mill_session_open(const char *dsn, const char *application_name, struct mill_session **session,
                      struct mill_err *err)
{
	if (dsn == NULL)
		dsn = "";
	bool several = false;
	if (check_dsn(dsn, &several, err) != 0)
		return -1;

	/* What stands before dbname gives way to the DSN, what stands behind it wins. */
	const char *keywords[10], *values[10];
	size_t n = 0;
	if (getenv("PGCONNECT_TIMEOUT") == NULL) {
		keywords[n] = "connect_timeout";
		values[n++] = CONNECT_TIMEOUT_SECS;
	}
	/* A server that is gone without a word: 15 s of silence, then 3 probes 5 s apart. */
	keywords[n] = "keepalives_idle";
	values[n++] = "15";
	keywords[n] = "keepalives_interval";
	values[n++] = "5";
	keywords[n] = "keepalives_count";
	values[n++] = "3";
	if (several && getenv("PGTARGETSESSIONATTRS") == NULL) {
		/* Of several servers the one that takes writes is wanted. */
		keywords[n] = "target_session_attrs";
		values[n++] = "read-write";
	}
	keywords[n] = "fallback_application_name";
	values[n++] = application_name;
	if (dsn[0] != '\0') {
		keywords[n] = "dbname";
		values[n++] = dsn;
	}
	keywords[n] = "client_encoding";
	values[n++] = "UTF8";
	MILL_ASSERT(n < MILL_COUNT(keywords));
	keywords[n] = NULL;
	values[n] = NULL;

	PGconn *conn = PQconnectdbParams(keywords, values, 1);
	if (conn == NULL)
		return mill_err_set(err, MILL_ERR_UNREACHED, "out of memory while connecting");
	if (PQstatus(conn) != CONNECTION_OK) {
		unreached(conn, NULL, err);
		PQfinish(conn);
		return -1;
	}
	struct mill_session *new_session = mill_calloc(1, sizeof(*new_session));
	new_session->conn = conn;
	PQsetNoticeReceiver(conn, on_server_notice, new_session);
	int version = PQserverVersion(conn);
	if (version < OLDEST_SERVER) {
		char *where = mill_session_describe(new_session);
		const char *shown = PQparameterStatus(conn, "server_version");
		mill_err_database(err, NULL, "%s is PostgreSQL %s: Tidemill needs 13 or newer",
		                  where, shown ? shown : "of an unknown version");
		free(where);
		goto fail;
	}
	if (mill_session_script(new_session, "set standard_conforming_strings = on", err) != 0)
		goto fail;
	*session = new_session;
	return 0;

fail:
	mill_session_close(new_session);
	return -1;
}

void mill_session_close(struct mill_session *session)
{
	if (session == NULL)
		return;
	PQfinish(session->conn);
	free(session);
}

/* ---- asking ----------------------------------------------------------------------------- */

/* The line, from 1, of the character number `position` (from 1) in UTF-8 text. */
static int line_of(const char *sql, const char *position)
{
	long left = position ? strtol(position, NULL, 10) - 1 : -1;
	if (left < 0)
		return 0;
	int line = 1;
	for (; left > 0 && *sql != '\0'; sql++) {
		if (*sql == '\n')
			line++;
		if (((unsigned char)sql[1] & 0xC0) != 0x80)
			left--;
	}
	return line;
}

/*
 * Turn a failed result into an error. The server's DETAIL is left out: it quotes rows, and rows
 * hold payloads. `script` is the text whose lines are counted, or NULL.
 */
static int failed(const PGconn *conn, const PGresult *result, const char *script,
                  struct mill_err *err)
{
	const char *sqlstate = PQresultErrorField(result, PG_DIAG_SQLSTATE);
	if (PQstatus(conn) != CONNECTION_OK)
		return unreached(conn, sqlstate, err);
	const char *text = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);
	const char *hint = PQresultErrorField(result, PG_DIAG_MESSAGE_HINT);
	if (text == NULL)
		text = PQerrorMessage(conn);
	if (text[0] == '\0')
		text = "the server answered with something that is no result";
	mill_err_database(err, sqlstate, "%s%s%s%s", text, hint ? " (" : "", hint ? hint : "",
	                  hint ? ")" : "");
	int line = script ? line_of(script, PQresultErrorField(result, PG_DIAG_STATEMENT_POSITION))
	                  : 0;
	if (line > 0)
		mill_err_wrap(err, "line %d", line);
	return -1;
}

static bool is_good(const PGresult *result)
{
	ExecStatusType status = PQresultStatus(result);
	return status == PGRES_TUPLES_OK || status == PGRES_COMMAND_OK ||
	       status == PGRES_EMPTY_QUERY;
}

int mill_session_script(struct mill_session *session, const char *sql, struct mill_err *err)
{
	PGresult *result = PQexec(session->conn, sql);
	int outcome = is_good(result) ? 0 : failed(session->conn, result, sql, err);
	PQclear(result);
	return outcome;
}

int mill_session_query(struct mill_session *session, const char *sql, int n_params,
                       const char *const *params, struct mill_rows **rows, struct mill_err *err)
{
	PGresult *result = PQexecParams(session->conn, sql, n_params, NULL, params, NULL, NULL, 0);
	if (!is_good(result)) {
		failed(session->conn, result, NULL, err);
		PQclear(result);
		return -1;
	}
	if (rows == NULL) {
		PQclear(result);
		return 0;
	}
	*rows = mill_alloc(sizeof(**rows));
	(*rows)->result = result;
	return 0;
}

void mill_session_ask(struct mill_session *session, struct mill_span sql,
                      struct mill_span arguments, struct mill_answer *answer)
{
	PGconn *conn = session->conn;
	struct mill_arguments list;
	if (mill_arguments_read(arguments, &list) != 0) {
		mill_answer_fail(answer, NULL,
		                 "these arguments were not encoded, or are more than %d",
		                 MILL_ARGUMENTS_MAX);
		return;
	}
	char *text = mill_span_dup(sql);
	bool good = PQsendQueryParams(conn, text, list.count, NULL, list.list, NULL, NULL, 0) == 1;
	free(text);
	mill_arguments_free(&list);
	if (good)
		PQsetSingleRowMode(conn);
	for (PGresult *result; good && (result = PQgetResult(conn)) != NULL;)
		good = mill_answer_take(answer, result) == 0;
	if (!good && answer->failed) {
		/* In the middle of something that is not wanted. */
		char reason[256];
		PGcancel *cancel = PQgetCancel(conn);
		PQcancel(cancel, reason, sizeof(reason));
		PQfreeCancel(cancel);
		answer->failure.lost = true;
	} else if (PQstatus(conn) != CONNECTION_OK) {
		mill_answer_lost(answer, conn);
	}
}

bool mill_session_in_transaction(const struct mill_session *session)
{
	return PQtransactionStatus(session->conn) != PQTRANS_IDLE;
}

/* ---- rows ------------------------------------------------------------------------------- */

int mill_rows_count(const struct mill_rows *rows)
{
	return PQntuples(rows->result);
}

int64_t mill_rows_affected(const struct mill_rows *rows)
{
	return strtoll(PQcmdTuples(rows->result), NULL, 10);
}

const char *mill_rows_text(const struct mill_rows *rows, int row, int column)
{
	MILL_ASSERT(row >= 0 && row < PQntuples(rows->result));
	MILL_ASSERT(column >= 0 && column < PQnfields(rows->result));
	if (PQgetisnull(rows->result, row, column))
		return NULL;
	return PQgetvalue(rows->result, row, column);
}

size_t mill_rows_len(const struct mill_rows *rows, int row, int column)
{
	MILL_ASSERT(row >= 0 && row < PQntuples(rows->result));
	MILL_ASSERT(column >= 0 && column < PQnfields(rows->result));
	return (size_t)PQgetlength(rows->result, row, column);
}

int64_t mill_rows_int8(const struct mill_rows *rows, int row, int column)
{
	const char *text = mill_rows_text(rows, row, column);
	return text ? strtoll(text, NULL, 10) : 0;
}

bool mill_rows_bool(const struct mill_rows *rows, int row, int column)
{
	const char *text = mill_rows_text(rows, row, column);
	return text != NULL && text[0] == 't';
}

void mill_rows_free(struct mill_rows *rows)
{
	if (rows == NULL)
		return;
	PQclear(rows->result);
	free(rows);
}

/* ---- about it --------------------------------------------------------------------------- */

int mill_session_server_version(const struct mill_session *session)
{
	return PQserverVersion(session->conn);
}

char *mill_session_describe(const struct mill_session *session)
{
	const char *user = PQuser(session->conn), *host = PQhost(session->conn);
	const char *port = PQport(session->conn), *dbname = PQdb(session->conn);
	return mill_sprintf("%s@%s:%s/%s", user ? user : "", host ? host : "", port ? port : "",
	                    dbname ? dbname : "");
}
