/*
 * A link to Postgres: see link.h.
 *
 *     CONNECTING ──► PREPARING ──► UP
 *      ▲     │            │         │
 *      └── WAITING ◄──────┴─────────┘   (backoff 50 ms … 2 s)
 *
 * What is on the wire is a queue of exchanges. Each travels as
 *
 *     BEGIN  statement…  Sync  COMMIT  Sync
 *
 * because an error makes the server skip everything up to the next Sync: with the COMMIT behind a
 * Sync of its own it is always executed, and ends a failed transaction as the ROLLBACK it then
 * means. So a failure costs its own exchange only, however many follow in the pipe. An explicit
 * BEGIN fixes the isolation level whatever the database's default, and holds through a transaction
 * pooler.
 */
#include "pg/link.h"

#include <libpq-fe.h>
#include <stdio.h>

#include "core/clock.h"
#include "core/list.h"
#include "core/log.h"
#include "pg/cancel.h"
#include "pg/connect.h"
#include "pg/watch.h"

#define PREPARE_DEADLINE_MS 10000
#define BACKOFF_LEAST_MS 50
#define BACKOFF_MOST_MS 2000
#define STATEMENTS_PER_EXCHANGE 40
#define NOTICE_EVERY_SECS 60 /* the same text */

enum link_state { CONNECTING, PREPARING, UP, WAITING, CLOSED };

/* One transaction on the wire. PREPARING uses one of its own for each prepare. */
struct exchange {
	struct mill_link_node node; /* in link->in_flight */
	mill_link_done done;
	void *context;
	size_t expected; /* results before the first Sync: BEGIN and the statements */
	size_t received;
	bool synced; /* the first Sync has come: what follows is the COMMIT */
	bool plain;  /* a prepare or LISTEN: one result, one Sync */
	uint64_t sent_ns;
	struct mill_err err;
	PGresult *results[STATEMENTS_PER_EXCHANGE];
	size_t result_count;
};

struct mill_link {
	struct mill_link_options options;
	enum link_state state;
	struct mill_connect *connect; /* CONNECTING */
	PGconn *connection;           /* PREPARING and UP */
	struct mill_watch watch;
	uv_timer_t timer; /* backoff, deadlines: one per state */
	bool flush_wanted, watching_write;
	struct mill_list in_flight;
	struct exchange *open; /* begun, not ended */
	size_t to_prepare;     /* answers PREPARING still waits for */
	unsigned failures;     /* in a row, for the backoff */
	bool was_up;
	uint64_t reconnects;
	char said[sizeof(((struct mill_err *)0)->message)]; /* the last trouble, said once */
	bool told;                                          /* and the end of it will be */
	struct mill_log_gates notices;
	struct mill_err last_words; /* of the server, before it ended the connection */
	void (*on_closed)(void *context);
	void *closed_context;
};

struct mill_results {
	const struct exchange *exchange;
};

static void lose(struct mill_link *link, const struct mill_err *err);
static void flush(struct mill_link *link);

/* ---- errors -------------------------------------------------------------------------------- */

static void result_error(const PGresult *result, struct mill_err *err)
{
	const char *sqlstate = PQresultErrorField(result, PG_DIAG_SQLSTATE);
	const char *primary = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);
	const char *detail = PQresultErrorField(result, PG_DIAG_MESSAGE_DETAIL);
	/* A FATAL (server shutting down) and libpq's own errors have no primary text at times. */
	if (sqlstate == NULL)
		mill_err_set(err, MILL_ERR_UNREACHED, "%s", PQresultErrorMessage(result));
	else
		mill_err_database(err, sqlstate, "%s%s%s",
		                  primary ? primary : "the server reported an error",
		                  detail ? ": " : "", detail ? detail : "");
}

/*
 * While nothing is in flight, the reason why the server ends the connection comes as a notice, and
 * of the end itself libpq knows only that it was unexpected.
 */
static void on_notice(void *context, const PGresult *notice)
{
	struct mill_link *link = context;
	struct mill_err text;
	uint64_t skipped;
	const char *severity = PQresultErrorField(notice, PG_DIAG_SEVERITY_NONLOCALIZED);
	if (severity != NULL &&
	    (strcmp(severity, "FATAL") == 0 || strcmp(severity, "PANIC") == 0)) {
		result_error(notice, &link->last_words);
		return;
	}
	mill_err_set(&text, MILL_ERR_DATABASE, "%s", PQresultErrorMessage(notice));
	if (!mill_log_gates(&link->notices, text.message, strlen(text.message), NOTICE_EVERY_SECS,
	                    &skipped))
		return;
	mill_log(MILL_LOG_WARN, "server_notice", MILL_TEXT("link", link->options.name),
	         MILL_TEXT("text", text.message), MILL_INT("skipped", skipped));
}

static void lose_as_told(struct mill_link *link)
{
	struct mill_err err = link->last_words;
	if (err.kind == MILL_ERR_NONE)
		mill_connect_describe(link->connection, &err);
	lose(link, &err);
}

/* ---- exchanges ----------------------------------------------------------------------------- */

static struct exchange *exchange_new(bool plain)
{
	struct exchange *exchange = mill_calloc(1, sizeof(*exchange));
	exchange->plain = plain;
	return exchange;
}

static void exchange_free(struct exchange *exchange)
{
	for (size_t i = 0; i < exchange->result_count; i++)
		PQclear(exchange->results[i]);
	free(exchange);
}

/* Answer what is in flight when the connection is gone. */
static void fail_in_flight(struct mill_link *link, const struct mill_err *err)
{
	struct mill_list orphans;
	mill_list_init(&orphans);
	mill_list_append(&orphans, &link->in_flight);
	struct mill_err unreached = *err;
	unreached.kind = MILL_ERR_UNREACHED;
	struct mill_link_node *node;
	while ((node = mill_list_shift(&orphans)) != NULL) {
		struct exchange *exchange = mill_container_of(node, struct exchange, node);
		if (exchange->done != NULL)
			exchange->done(NULL, &unreached, exchange->context);
		exchange_free(exchange);
	}
}

/* The connection refused to take more: the loss is handled when the loop turns, not in here. */
static void must_send(struct mill_link *link, int sent)
{
	if (sent == 0)
		link->flush_wanted = true; /* the flush fails too and reports it */
}

static void send_prepared(struct mill_link *link, const char *name,
                          const struct mill_params *params)
{
	const char *values[MILL_PARAMS_MAX];
	int formats[MILL_PARAMS_MAX];
	int count = params ? params->count : 0;
	for (int i = 0; i < count; i++) {
		values[i] = params->lengths[i] < 0 ? NULL : params->bytes.data + params->offsets[i];
		formats[i] = 1;
	}
	/* An empty text still needs an address that is not NULL. */
	for (int i = 0; i < count; i++)
		if (values[i] == NULL && params->lengths[i] == 0)
			values[i] = "";
	must_send(link, PQsendQueryPrepared(link->connection, name, count, values,
	                                    params ? params->lengths : NULL, formats, 1));
}

void mill_link_begin(struct mill_link *link)
{
	MILL_ASSERT(link->state == UP && link->open == NULL);
	link->open = exchange_new(false);
	link->open->expected = 1;
	send_prepared(link, "begin", NULL);
}

void mill_link_add(struct mill_link *link, size_t statement, const struct mill_params *params)
{
	MILL_ASSERT(link->open != NULL && (link->options.prepared & (UINT64_C(1) << statement)));
	MILL_ASSERT(link->open->expected < STATEMENTS_PER_EXCHANGE);
	link->open->expected++;
	send_prepared(link, link->options.statements[statement].name, params);
}

static void enqueue(struct mill_link *link, struct exchange *exchange)
{
	exchange->sent_ns = mill_clock_ns();
	mill_list_push(&link->in_flight, &exchange->node);
	link->flush_wanted = true;
}

void mill_link_end(struct mill_link *link, mill_link_done done, void *context)
{
	MILL_ASSERT(link->open != NULL);
	struct exchange *exchange = link->open;
	link->open = NULL;
	exchange->done = done;
	exchange->context = context;
	must_send(link, PQpipelineSync(link->connection));
	send_prepared(link, "commit", NULL);
	must_send(link, PQpipelineSync(link->connection));
	enqueue(link, exchange);
}

static void finish_exchange(struct mill_link *link, struct exchange *exchange)
{
	mill_list_remove(&link->in_flight, &exchange->node);
	bool failed = exchange->err.kind != MILL_ERR_NONE;
	struct mill_err err = exchange->err;
	/* An answer proves more than a connect does: a server that only accepts is backed off from.
	 */
	if (!failed && link->state == UP) {
		link->failures = 0;
		link->said[0] = '\0';
	}
	if (exchange->done != NULL) {
		struct mill_results results = { exchange };
		exchange->done(failed ? NULL : &results, failed ? &exchange->err : NULL,
		               exchange->context);
	}
	exchange_free(exchange);
	if (failed && link->state == UP &&
	    mill_err_database_reaction(err.sqlstate) == MILL_REACT_RECONNECT)
		lose(link, &err);
}

/* Take one result of the exchange at the head. Returns true when that exchange is complete. */
static bool take_result(struct exchange *exchange, PGresult *result)
{
	ExecStatusType status = PQresultStatus(result);
	if (status == PGRES_PIPELINE_SYNC) {
		PQclear(result);
		bool complete = exchange->plain || exchange->synced;
		exchange->synced = true;
		return complete;
	}
	bool good = status == PGRES_COMMAND_OK || status == PGRES_TUPLES_OK;
	bool first_error = exchange->err.kind == MILL_ERR_NONE;
	if (!good && status != PGRES_PIPELINE_ABORTED && first_error)
		result_error(result, &exchange->err);
	if (good && exchange->synced && first_error && strcmp(PQcmdStatus(result), "COMMIT") != 0)
		mill_err_database(&exchange->err, "40000", "the transaction was rolled back");
	if (good && !exchange->synced && exchange->result_count < STATEMENTS_PER_EXCHANGE)
		exchange->results[exchange->result_count++] = result;
	else
		PQclear(result);
	return false;
}

static void read_notifications(struct mill_link *link)
{
	PGnotify *notify;
	while (link->connection != NULL && (notify = PQnotifies(link->connection)) != NULL) {
		if (link->options.on_notify != NULL && link->state == UP)
			link->options.on_notify(notify->relname, notify->extra,
			                        link->options.context);
		PQfreemem(notify);
	}
}

static void read_results(struct mill_link *link)
{
	/* A NULL separates the results of one statement from the next; two in a row mean none is
	 * left. */
	int separators = 0;
	while (link->connection != NULL && !mill_list_empty(&link->in_flight) && separators < 3 &&
	       !PQisBusy(link->connection)) {
		PGresult *result = PQgetResult(link->connection);
		if (result == NULL) {
			separators++;
			continue;
		}
		separators = 0;
		struct mill_link_node *node = mill_list_first(&link->in_flight);
		struct exchange *exchange = mill_container_of(node, struct exchange, node);
		if (take_result(exchange, result))
			finish_exchange(link, exchange);
	}
}

/* ---- the loop ------------------------------------------------------------------------------ */

static void on_up_event(uv_poll_t *poll, int status, int events);

static void flush(struct mill_link *link)
{
	link->flush_wanted = false;
	int rest = PQflush(link->connection);
	if (rest < 0) {
		lose_as_told(link);
		return;
	}
	bool want_write = rest > 0;
	if (want_write == link->watching_write)
		return;
	link->watching_write = want_write;
	mill_watch_change(&link->watch, UV_READABLE | (want_write ? UV_WRITABLE : 0), on_up_event);
}

static void on_up_event(uv_poll_t *poll, int status, int events)
{
	struct mill_link *link = poll->data;
	if (status < 0 || ((events & UV_READABLE) && !PQconsumeInput(link->connection))) {
		/* What the server said last (a FATAL and its reason) is still to be read. */
		read_results(link);
		read_notifications(link);
		if (link->state == PREPARING || link->state == UP)
			lose_as_told(link);
		return;
	}
	read_results(link);
	read_notifications(link);
	if (link->connection == NULL)
		return;
	if (PQstatus(link->connection) == CONNECTION_BAD) {
		lose_as_told(link);
	} else if ((events & UV_WRITABLE) || link->flush_wanted) {
		flush(link);
	}
}

void mill_link_flush(struct mill_link *link)
{
	if (link->flush_wanted && link->connection != NULL)
		flush(link);
}

static void on_deadline(uv_timer_t *timer)
{
	struct mill_link *link = mill_container_of(timer, struct mill_link, timer);
	struct mill_link_node *node = mill_list_first(&link->in_flight);
	if (node == NULL)
		return;
	const struct exchange *oldest = mill_container_of(node, struct exchange, node);
	double waited = (double)(mill_clock_ns() - oldest->sent_ns) / 1e9;
	if (waited < link->options.deadline_secs)
		return;
	struct mill_err err;
	mill_err_set(&err, MILL_ERR_UNREACHED, "no answer for %.0f s", waited);
	mill_cancel_running(link->options.loop, link->connection);
	lose(link, &err);
}

/* ---- preparing ----------------------------------------------------------------------------- */

static void become_up(struct mill_link *link)
{
	link->state = UP;
	if (link->options.prepared == 0)
		link->said[0] = '\0'; /* a listener gets no answers that could prove more */
	if (link->told)
		mill_log(MILL_LOG_INFO, "database_reached", MILL_TEXT("link", link->options.name));
	link->told = false;
	link->reconnects += link->was_up;
	link->was_up = true;
	uint64_t period_ms = (uint64_t)(link->options.deadline_secs * 1000 / 4) + 1;
	uv_timer_start(&link->timer, on_deadline, period_ms, period_ms);
	if (link->options.on_up != NULL)
		link->options.on_up(link->options.context);
}

static void on_prepared(struct mill_results *results, const struct mill_err *err, void *context)
{
	(void)results;
	struct mill_link *link = context;
	if (link->state != PREPARING)
		return;
	if (err != NULL) {
		if (err->kind != MILL_ERR_UNREACHED)
			lose(link, err);
		return;
	}
	if (--link->to_prepare == 0)
		become_up(link);
}

static void send_plain(struct mill_link *link)
{
	struct exchange *exchange = exchange_new(true);
	exchange->expected = 1;
	exchange->done = on_prepared;
	exchange->context = link;
	must_send(link, PQpipelineSync(link->connection));
	link->to_prepare++;
	enqueue(link, exchange);
}

static void prepare(struct mill_link *link, const char *name, const char *sql)
{
	must_send(link, PQsendPrepare(link->connection, name, sql, 0, NULL));
	send_plain(link);
}

static void on_unprepared(uv_timer_t *timer)
{
	struct mill_err err;
	mill_err_set(&err, MILL_ERR_UNREACHED, "connected, and then no answer within %d s",
	             PREPARE_DEADLINE_MS / 1000);
	lose(mill_container_of(timer, struct mill_link, timer), &err);
}

static void start_preparing(struct mill_link *link)
{
	link->state = PREPARING;
	uv_timer_start(&link->timer, on_unprepared, PREPARE_DEADLINE_MS, 0);
	link->last_words.kind = MILL_ERR_NONE;
	PQsetNoticeReceiver(link->connection, on_notice, link);
	link->watching_write = false;
	if (PQsetnonblocking(link->connection, 1) != 0 || !PQenterPipelineMode(link->connection) ||
	    mill_watch_start(&link->watch, link->options.loop, PQsocket(link->connection),
	                     UV_READABLE, on_up_event, link) != 0) {
		lose_as_told(link);
		return;
	}
	link->to_prepare = 0;
	prepare(link, "begin", "BEGIN ISOLATION LEVEL READ COMMITTED");
	prepare(link, "commit", "COMMIT");
	for (size_t i = 0; i < link->options.statement_count; i++)
		if (link->options.prepared & (UINT64_C(1) << i))
			prepare(link, link->options.statements[i].name,
			        link->options.statements[i].sql);
	for (const char *const *channel = link->options.channels; channel && *channel; channel++) {
		char *listen = mill_sprintf("LISTEN \"%s\"", *channel);
		must_send(link, PQsendQueryParams(link->connection, listen, 0, NULL, NULL, NULL,
		                                  NULL, 0));
		send_plain(link);
		free(listen);
	}
	flush(link);
}

/* ---- connecting ---------------------------------------------------------------------------- */

static void on_connected(PGconn *connection, const struct mill_err *err, void *context)
{
	struct mill_link *link = context;
	link->connect = NULL;
	link->connection = connection;
	if (err != NULL)
		lose(link, err);
	else
		start_preparing(link);
}

static void start_connecting(struct mill_link *link)
{
	link->state = CONNECTING;
	char *application = mill_sprintf("tidemill %s", link->options.name);
	struct mill_err err;
	link->connect = mill_connect_start(link->options.loop, link->options.dsn, application,
	                                   on_connected, link, &err);
	free(application);
	if (link->connect == NULL)
		lose(link, &err);
}

static void on_backoff(uv_timer_t *timer)
{
	start_connecting(mill_container_of(timer, struct mill_link, timer));
}

/* Trouble that repeats itself before anything succeeded is told once. */
static void report_loss(struct mill_link *link, const struct mill_err *err, bool was_up)
{
	if (strcmp(link->said, err->message) == 0)
		return;
	memcpy(link->said, err->message, sizeof(link->said));
	link->told = true;
	mill_log(MILL_LOG_WARN, was_up ? "database_lost" : "database_unreached",
	         MILL_TEXT("link", link->options.name), MILL_TEXT("error", err->message),
	         MILL_TEXT("sqlstate", err->sqlstate[0] ? err->sqlstate : NULL));
}

/* What was begun and not ended goes with it. */
static void drop_connection(struct mill_link *link)
{
	if (link->connect != NULL)
		mill_connect_abandon(link->connect);
	link->connect = NULL;
	mill_watch_stop(&link->watch);
	PQfinish(link->connection);
	link->connection = NULL;
	if (link->open != NULL)
		exchange_free(link->open);
	link->open = NULL;
}

static void lose(struct mill_link *link, const struct mill_err *err)
{
	if (link->state == WAITING || link->state == CLOSED)
		return;
	struct mill_err reason = *err; /* may live in what is freed below */
	bool was_up = link->state == UP;
	link->state = WAITING;
	drop_connection(link);
	report_loss(link, &reason, was_up);
	uint64_t wait_ms = BACKOFF_LEAST_MS;
	for (unsigned i = 0; i < link->failures && wait_ms < BACKOFF_MOST_MS; i++)
		wait_ms *= 2;
	if (wait_ms > BACKOFF_MOST_MS)
		wait_ms = BACKOFF_MOST_MS;
	wait_ms -= (uint64_t)((double)wait_ms / 4 * mill_clock_random());
	link->failures++;
	uv_timer_start(&link->timer, on_backoff, wait_ms, 0);
	fail_in_flight(link, &reason);
	if (link->options.on_down != NULL && link->state == WAITING)
		link->options.on_down(&reason, link->options.context);
}

/* ---- life ---------------------------------------------------------------------------------- */

struct mill_link *mill_link_new(const struct mill_link_options *options)
{
	struct mill_link *link = mill_calloc(1, sizeof(*link));
	link->options = *options;
	link->options.dsn = options->dsn ? mill_strdup(options->dsn) : NULL;
	mill_list_init(&link->in_flight);
	MILL_ASSERT(uv_timer_init(options->loop, &link->timer) == 0);
	link->state = WAITING;
	uv_timer_start(&link->timer, on_backoff, 0, 0);
	return link;
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct mill_link *link = mill_container_of(handle, struct mill_link, timer);
	void (*on_closed)(void *) = link->on_closed;
	void *context = link->closed_context;
	free((char *)link->options.dsn);
	free(link);
	if (on_closed != NULL)
		on_closed(context);
}

void mill_link_close(struct mill_link *link, void (*on_closed)(void *context), void *context)
{
	MILL_ASSERT(link->state != CLOSED);
	link->state = CLOSED;
	link->on_closed = on_closed;
	link->closed_context = context;
	drop_connection(link);
	struct mill_err err;
	mill_err_set(&err, MILL_ERR_UNREACHED, "the connection was closed");
	fail_in_flight(link, &err);
	uv_close((uv_handle_t *)&link->timer, on_timer_closed);
}

void mill_link_reset(struct mill_link *link, const struct mill_err *err)
{
	MILL_ASSERT(link->state == UP);
	lose(link, err);
}

void mill_link_set_deadline(struct mill_link *link, double deadline_secs)
{
	link->options.deadline_secs = deadline_secs;
}

bool mill_link_is_up(const struct mill_link *link)
{
	return link->state == UP;
}

size_t mill_link_in_flight(const struct mill_link *link)
{
	return link->in_flight.len;
}

uint64_t mill_link_reconnects(const struct mill_link *link)
{
	return link->reconnects;
}

const struct mill_rowset *mill_results_at(const struct mill_results *results, size_t n)
{
	/* The first result is the BEGIN's. */
	MILL_ASSERT(n + 1 < results->exchange->result_count);
	return (const struct mill_rowset *)results->exchange->results[n + 1];
}
