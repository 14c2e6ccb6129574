/* One connection for statements of handlers: see client.h. */
#include "pg/client.h"

#include <libpq-fe.h>
#include <stdio.h>

#include "core/list.h"
#include "pg/arguments.h"
#include "pg/cancel.h"
#include "pg/connect.h"
#include "pg/prepared.h"
#include "pg/statement.h"
#include "pg/watch.h"

#define CLEAN_DEADLINE_MS 5000
#define BUFFER_KEEP (1024 * 1024) /* one that grew beyond is given back after the statement */
/* A server of 14 or newer looks so often whether we are still there while a statement runs. */
#define CHECK_SQL "SELECT set_config('client_connection_check_interval', '5000', false)"

enum client_state { CLOSED, CONNECTING, READY };

/* What the exchange that is under way is for. */
enum client_work {
	NOTHING,
	GREETING,  /* is the server's end ours? */
	CHECKING,  /* CHECK_SQL */
	PREPARING, /* the statement of `sql` */
	EXECUTING,
	CLEANING,
};

struct mill_client {
	struct mill_client_options options;
	enum client_state state;
	enum client_work work;
	struct mill_connect *connect; /* CONNECTING */
	PGconn *connection;
	struct mill_watch watch;
	bool watching_write;
	uv_timer_t timer; /* a deadline, or the next turn of the loop */
	bool pooled;      /* somebody between us and the server */
	bool dirty;       /* something outlived its transaction in the session */
	bool checks;      /* the server knows CHECK_SQL */
	bool unchecked;   /* and was made to forget it */
	bool worn;        /* the connection works, but not as it should */
	bool leaving;     /* the server is about to hang up */
	struct mill_prepared prepared;

	/* What is asked. */
	bool asked;
	struct mill_buffer sql; /* with a NUL */
	struct mill_buffer arguments;
	bool has_arguments, continues, commits, was_in_transaction, repeated;
	struct mill_prepared_statement *statement; /* while it is PREPARING or EXECUTING by name */
	struct mill_answer answer;
	struct mill_answer last_words; /* of the server, unasked; failed: there are */
	mill_client_done done;
	void *context;
	void (*cleaned)(struct mill_client *client, bool good, void *context);
};

static void begin_statement(struct mill_client *client);
static void lose(struct mill_client *client);
static void on_ready_event(uv_poll_t *poll, int status, int events);

/* ---- the connection ------------------------------------------------------------------------ */

static void drop_connection(struct mill_client *client)
{
	if (client->connect != NULL)
		mill_connect_abandon(client->connect);
	client->connect = NULL;
	mill_watch_stop(&client->watch);
	PQfinish(client->connection);
	client->connection = NULL;
	client->state = CLOSED;
	client->work = NOTHING;
	client->statement = NULL;
	client->dirty = client->worn = client->leaving = client->pooled = false;
	client->checks = client->unchecked = false;
	mill_prepared_clear(&client->prepared);
}

/* What runs is of no use any more: the server is told so, and the connection goes with it. */
static void cancel(struct mill_client *client)
{
	mill_watch_stop(&client->watch);
	mill_cancel_and_finish(client->options.loop, client->connection);
	client->connection = NULL;
}

/* ---- the end of what was asked ------------------------------------------------------------- */

static void release_if_large(struct mill_buffer *buffer)
{
	if (buffer->cap > BUFFER_KEEP)
		mill_buffer_free(buffer);
}

static void finish(struct mill_client *client)
{
	struct mill_answer answer = client->answer;
	client->answer = (struct mill_answer){ 0 };
	client->asked = false;
	release_if_large(&client->sql);
	release_if_large(&client->arguments);
	client->work = NOTHING;
	client->statement = NULL;
	uv_timer_stop(&client->timer);
	client->done(&answer, client->context);
	mill_answer_clear(&answer);
}

static void end_cleaning(struct mill_client *client, bool good)
{
	void (*cleaned)(struct mill_client *, bool, void *) = client->cleaned;
	client->cleaned = NULL;
	client->work = NOTHING;
	uv_timer_stop(&client->timer);
	mill_answer_clear(&client->answer);
	cleaned(client, good, client->options.context);
}

/* The connection is gone, `answer` has failed or says so now. */
static void lose(struct mill_client *client)
{
	bool began = client->work == EXECUTING;
	if (client->asked || client->cleaned != NULL)
		mill_answer_lost(&client->answer, client->connection);
	if (client->asked && client->commits && began && client->answer.failure.lost)
		mill_answer_unknown(&client->answer);
	client->answer.failure.lost = client->asked;
	drop_connection(client);
	if (client->asked)
		finish(client);
	else if (client->cleaned != NULL)
		end_cleaning(client, false);
	else
		client->options.on_idle_loss(client, client->options.context);
}

/* ---- statements ---------------------------------------------------------------------------- */

static void flush(struct mill_client *client)
{
	int left = PQflush(client->connection);
	if (left < 0) {
		/* What the server said before it hung up is to be read first. */
		left = 0;
	}
	if ((left > 0) == client->watching_write)
		return;
	client->watching_write = left > 0;
	mill_watch_change(&client->watch, UV_READABLE | (left > 0 ? UV_WRITABLE : 0),
	                  on_ready_event);
}

static void on_deadline(uv_timer_t *timer)
{
	struct mill_client *client = mill_container_of(timer, struct mill_client, timer);
	mill_answer_fail(&client->answer, NULL, "the database does not answer");
	lose(client);
}

static void on_send_failed(uv_timer_t *timer)
{
	lose(mill_container_of(timer, struct mill_client, timer));
}

/* What was handed to libpq goes out; a connection that takes nothing is lost in the next turn. */
static void sent(struct mill_client *client, enum client_work work, int good)
{
	client->work = work;
	if (good == 1)
		flush(client);
	else
		uv_timer_start(&client->timer, on_send_failed, 0, 0);
}

static void send_execute(struct mill_client *client)
{
	struct mill_arguments arguments = { 0 };
	if (client->has_arguments &&
	    mill_arguments_read((struct mill_span){ client->arguments.data, client->arguments.len },
	                        &arguments) != 0)
		arguments = (struct mill_arguments){ 0 };
	int good =
	        client->statement != NULL && client->statement->on_server
	                ? PQsendQueryPrepared(client->connection, client->statement->name,
	                                      arguments.count, arguments.list, NULL, NULL, 0)
	                : PQsendQueryParams(client->connection, client->sql.data, arguments.count,
	                                    NULL, arguments.list, NULL, NULL, 0);
	mill_arguments_free(&arguments);
	if (good == 1)
		PQsetSingleRowMode(client->connection);
	sent(client, EXECUTING, good);
}

static struct mill_span sql_of(const struct mill_client *client)
{
	return (struct mill_span){ client->sql.data, client->sql.len - 1 };
}

static void begin_statement(struct mill_client *client)
{
	client->was_in_transaction = PQtransactionStatus(client->connection) != PQTRANS_IDLE;
	client->statement = NULL;
	if (!client->pooled && !client->repeated)
		client->statement = mill_prepared_use(&client->prepared, sql_of(client));
	struct mill_prepared_statement *statement = client->statement;
	/* A text used once travels in one piece; what is used again is worth a name. */
	if (statement != NULL && !statement->on_server && statement->uses++ > 0)
		sent(client, PREPARING,
		     PQsendPrepare(client->connection, statement->name, client->sql.data, 0, NULL));
	else
		send_execute(client);
}

/* Did something that only concerns the prepared statement go wrong, and nothing happen yet? */
static bool repeat(struct mill_client *client)
{
	const struct mill_failure *failure = &client->answer.failure;
	struct mill_prepared_statement *statement = client->statement;
	if (!client->answer.failed || statement == NULL || !statement->on_server)
		return false;
	bool gone = strcmp(failure->sqlstate, "26000") == 0;
	bool changed = strcmp(failure->sqlstate, "0A000") == 0 &&
	               strstr(failure->message, "cached plan") != NULL;
	if (!gone && !changed)
		return false;
	client->statement = NULL;
	if (gone)
		statement->on_server = false;
	mill_prepared_forget(&client->prepared, statement);
	if (client->was_in_transaction)
		return false;
	mill_answer_clear(&client->answer);
	client->repeated = true;
	send_execute(client);
	return true;
}

/* Commands that leave something behind, by the word the server answers with. */
static bool tag_leaves_state(const char *tag)
{
	static const char *const tags[] = { "SET",        "RESET",   "LISTEN",
		                            "PREPARE",    "LOAD",    "DECLARE CURSOR",
		                            "DEALLOCATE", "DISCARD", "DEALLOCATE ALL",
		                            "DISCARD ALL" };
	for (size_t i = 0; i < MILL_COUNT(tags); i++)
		if (strcmp(tag, tags[i]) == 0)
			return true;
	return false;
}

static void end_statement(struct mill_client *client)
{
	if (repeat(client))
		return;
	struct mill_answer *answer = &client->answer;
	if (tag_leaves_state(answer->tag) || mill_statement_leaves_state(sql_of(client)))
		client->dirty = true;
	/* A wrong number of arguments counts as a violation of the protocol, which it is not. */
	const char *sqlstate = answer->failure.sqlstate;
	if (answer->failed && sqlstate[0] != '\0' && strcmp(sqlstate, "08P01") != 0 &&
	    mill_err_database_reaction(sqlstate) == MILL_REACT_RECONNECT)
		client->worn = true;
	finish(client);
}

/* ---- cleaning ------------------------------------------------------------------------------ */

/* The next thing to mend; false: there is none. */
static bool send_cleaning(struct mill_client *client)
{
	PGconn *connection = client->connection;
	if (PQtransactionStatus(connection) != PQTRANS_IDLE) {
		sent(client, CLEANING, PQsendQuery(connection, "ROLLBACK"));
	} else if (client->dirty && !client->pooled) {
		client->dirty = false;
		mill_prepared_clear(&client->prepared);
		client->unchecked = client->checks;
		sent(client, CLEANING, PQsendQuery(connection, "DISCARD ALL"));
	} else if (client->unchecked) {
		client->unchecked = false;
		sent(client, CLEANING, PQsendQuery(connection, CHECK_SQL));
	} else if (client->prepared.stale.len > 0) {
		mill_buffer_bytes(&client->prepared.stale, "", 1);
		sent(client, CLEANING, PQsendQuery(connection, client->prepared.stale.data));
		mill_buffer_free(&client->prepared.stale);
	} else {
		return false;
	}
	return true;
}

bool mill_client_clean(struct mill_client *client,
                       void (*cleaned)(struct mill_client *client, bool good, void *context))
{
	MILL_ASSERT(!client->asked && client->cleaned == NULL);
	if (client->state != READY || client->worn) {
		drop_connection(client);
		return true;
	}
	if (!send_cleaning(client))
		return true;
	client->cleaned = cleaned;
	if (!uv_is_active((uv_handle_t *)&client->timer))
		uv_timer_start(&client->timer, on_deadline, CLEAN_DEADLINE_MS, 0);
	return false;
}

static void end_step_of_cleaning(struct mill_client *client)
{
	bool failed = client->answer.failed;
	mill_answer_clear(&client->answer);
	client->work = NOTHING;
	if (failed) {
		drop_connection(client);
		end_cleaning(client, false);
	} else if (!send_cleaning(client)) {
		end_cleaning(client, true);
	}
}

/* ---- answers ------------------------------------------------------------------------------- */

static void greet(struct mill_client *client)
{
	sent(client, GREETING,
	     PQsendQueryParams(client->connection, "SELECT pg_backend_pid()", 0, NULL, NULL, NULL,
	                       NULL, 0));
}

/* A pooler gives itself away: the process that answers is not the one that was connected to. */
static void end_greeting(struct mill_client *client)
{
	char pid[16];
	int len = snprintf(pid, sizeof(pid), "%d", PQbackendPID(client->connection));
	struct mill_reader rows = { client->answer.rows.data,
		                    client->answer.rows.data + client->answer.rows.len, false };
	struct mill_span found = mill_read_span(&rows);
	if (client->answer.failed)
		return lose(client);
	client->pooled = found.len != (size_t)len || memcmp(found.data, pid, found.len) != 0;
	mill_answer_clear(&client->answer);
	if (!client->pooled && PQserverVersion(client->connection) >= 140000)
		sent(client, CHECKING, PQsendQuery(client->connection, CHECK_SQL));
	else
		begin_statement(client);
}

static void end_exchange(struct mill_client *client)
{
	switch (client->work) {
	case NOTHING:
		break;
	case GREETING:
		end_greeting(client);
		break;
	case CHECKING: /* a server that cannot (not on Linux) does without */
		client->checks = !client->answer.failed;
		mill_answer_clear(&client->answer);
		begin_statement(client);
		break;
	case PREPARING:
		if (client->answer.failed) {
			end_statement(client);
			break;
		}
		mill_answer_clear(&client->answer);
		client->statement->on_server = true;
		send_execute(client);
		break;
	case EXECUTING:
		end_statement(client);
		break;
	case CLEANING:
		end_step_of_cleaning(client);
		break;
	}
}

/* A statement is given up in its middle, and its connection with it. */
static void give_up(struct mill_client *client)
{
	client->answer.failure.lost = true;
	if (client->commits && client->work == EXECUTING)
		mill_answer_unknown(&client->answer);
	cancel(client);
	drop_connection(client);
	finish(client);
}

static void read_results(struct mill_client *client)
{
	while (client->work != NOTHING && client->connection != NULL &&
	       !PQisBusy(client->connection)) {
		PGresult *result = PQgetResult(client->connection);
		if (result == NULL) {
			if (PQstatus(client->connection) != CONNECTION_OK)
				return lose(client);
			end_exchange(client);
			continue;
		}
		if (mill_answer_take(&client->answer, result) != 0)
			return give_up(client);
	}
}

static void on_ready_event(uv_poll_t *poll, int status, int events)
{
	struct mill_client *client = poll->data;
	(void)status;
	(void)events;
	bool read = PQconsumeInput(client->connection) == 1;
	PGnotify *notify;
	while ((notify = PQnotifies(client->connection)) != NULL)
		PQfreemem(notify);
	if (client->work != NOTHING)
		read_results(client);
	/* That may have closed the connection, or the client. */
	if (client->watch.poll != poll)
		return;
	if (!read || client->leaving || PQstatus(client->connection) != CONNECTION_OK)
		lose(client);
	else
		flush(client);
}

/* ---- connecting ---------------------------------------------------------------------------- */

/* Of what the server says unasked, its last words matter. */
static void on_notice(void *context, const PGresult *result)
{
	struct mill_client *client = context;
	const char *severity = PQresultErrorField(result, PG_DIAG_SEVERITY_NONLOCALIZED);
	if (severity == NULL || (strcmp(severity, "FATAL") != 0 && strcmp(severity, "PANIC") != 0))
		return;
	client->leaving = true;
	mill_answer_refuse(&client->last_words, result);
}

static void on_connected(PGconn *connection, const struct mill_err *err, void *context)
{
	struct mill_client *client = context;
	client->connect = NULL;
	if (connection == NULL) {
		mill_answer_fail(&client->answer, NULL, "the database cannot be reached: %s",
		                 err->message);
		lose(client);
		return;
	}
	client->connection = connection;
	client->state = READY;
	client->watching_write = false;
	PQsetNoticeReceiver(connection, on_notice, client);
	PQsetnonblocking(connection, 1);
	/* Where the loop cannot watch, the connection is lost in its next turn. */
	bool watched = mill_watch_start(&client->watch, client->options.loop, PQsocket(connection),
	                                UV_READABLE, on_ready_event, client) == 0;
	if (watched)
		greet(client);
	else
		sent(client, GREETING, 0);
}

static void start_connecting(struct mill_client *client)
{
	struct mill_err err;
	client->state = CONNECTING;
	client->connect =
	        mill_connect_start(client->options.loop, client->options.dsn,
	                           client->options.application, on_connected, client, &err);
	if (client->connect != NULL)
		return;
	mill_answer_fail(&client->answer, NULL, "%s", err.message);
	uv_timer_start(&client->timer, on_send_failed, 0, 0);
}

/* ---- life ---------------------------------------------------------------------------------- */

struct mill_client *mill_client_new(const struct mill_client_options *options)
{
	struct mill_client *client = mill_calloc(1, sizeof(*client));
	client->options = *options;
	mill_prepared_init(&client->prepared);
	MILL_ASSERT(uv_timer_init(options->loop, &client->timer) == 0);
	return client;
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct mill_client *client = mill_container_of(handle, struct mill_client, timer);
	mill_buffer_free(&client->sql);
	mill_buffer_free(&client->arguments);
	mill_answer_clear(&client->answer);
	mill_answer_clear(&client->last_words);
	free(client);
}

void mill_client_close(struct mill_client *client)
{
	if (client->state == READY && client->work != NOTHING && client->work != CLEANING)
		cancel(client);
	drop_connection(client);
	uv_close((uv_handle_t *)&client->timer, on_timer_closed);
}

/* Has the server not hung up yet, nor said that it will? */
static bool is_alive(struct mill_client *client)
{
	bool read = PQconsumeInput(client->connection) == 1;
	PQisBusy(client->connection); /* looks at what was read */
	return read && !client->leaving && PQstatus(client->connection) == CONNECTION_OK;
}

static void copy_text(struct mill_buffer *to, struct mill_span text)
{
	to->len = 0;
	mill_buffer_bytes(to, text.data, text.len);
}

void mill_client_ask(struct mill_client *client, const struct mill_client_statement *statement,
                     mill_client_done done, void *context)
{
	MILL_ASSERT(!client->asked && client->cleaned == NULL);
	client->asked = true;
	client->done = done;
	client->context = context;
	client->continues = statement->continues;
	client->commits = statement->commits;
	client->repeated = false;
	copy_text(&client->sql, statement->sql);
	mill_buffer_bytes(&client->sql, "", 1);
	client->has_arguments = statement->arguments.data != NULL;
	copy_text(&client->arguments, statement->arguments);
	/* Before anything is risked on a connection that lay idle. */
	if (client->state == READY && !client->continues && !is_alive(client))
		drop_connection(client);
	if (client->state == READY) {
		begin_statement(client);
	} else if (!client->continues) {
		mill_answer_clear(&client->last_words);
		start_connecting(client);
	} else {
		client->answer = client->last_words;
		client->last_words = (struct mill_answer){ 0 };
		mill_answer_fail(&client->answer, NULL,
		                 "the connection to the database was lost, and with it the "
		                 "transaction");
		uv_timer_start(&client->timer, on_send_failed, 0, 0);
	}
}

bool mill_client_is_busy(const struct mill_client *client)
{
	return client->asked || client->cleaned != NULL;
}

bool mill_client_is_open(const struct mill_client *client)
{
	return client->state == READY;
}

bool mill_client_in_transaction(const struct mill_client *client)
{
	return client->state == READY && PQtransactionStatus(client->connection) != PQTRANS_IDLE;
}
