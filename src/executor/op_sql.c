/*
 * SQL as ops: see op_sql.h.
 *
 * A step is one statement on the way: it waits for a connection where it has none, is asked, and
 * answered. What follows from the answer is in the table of steps; `finish` is two of them.
 */
#include "executor/op_sql.h"

#include <stdio.h>

#include "core/killpoint.h"
#include "executor/sql_value.h"
#include "pg/arguments.h"
#include "pg/clients.h"
#include "pg/queries.h"
#include "pg/statement.h"

#define ORPHAN_EVERY_SECS 60
#define BUFFER_KEEP (1024 * 1024) /* arguments that grew beyond are given back */

enum step { QUERY, BEGIN, COMMIT, ROLLBACK, SETTLE, COMMIT_DONE, GIVE_UP };

/* What a wait keeps from one op to the next. */
struct mill_sql_use {
	struct mill_wait *wait;
	struct mill_clients_turn turn;
	struct mill_client *client; /* taken: for the step, or for the transaction */
	uint64_t transaction;       /* the number of the one it is in; 0: none */
	enum step step;
	struct mill_buffer sql, arguments; /* of the step */
	bool has_publications;
	const struct mill_answer *answer; /* while it is looked at */
};

static const struct mill_answer no_answer;

static struct mill_sql_use *use_of(struct mill_wait *wait)
{
	if (wait->sql == NULL) {
		wait->sql = mill_calloc(1, sizeof(*wait->sql));
		wait->sql->wait = wait;
	}
	return wait->sql;
}

/* ---- steps --------------------------------------------------------------------------------- */

static void on_answer(struct mill_answer *answer, void *context);

static void ask(struct mill_sql_use *use)
{
	bool continues = use->transaction != 0;
	struct mill_client_statement statement = {
		.sql = { use->sql.data, use->sql.len },
		.arguments = { use->arguments.data, use->arguments.len },
		.continues = continues,
		.commits = (use->step == QUERY && !continues) || use->step == COMMIT ||
		           use->step == COMMIT_DONE,
	};
	mill_client_ask(use->client, &statement, on_answer, use);
}

static void on_turn(struct mill_clients_turn *turn, struct mill_client *client)
{
	struct mill_sql_use *use = mill_container_of(turn, struct mill_sql_use, turn);
	use->client = client;
	ask(use);
}

static void set_text(struct mill_buffer *to, struct mill_span text)
{
	to->len = 0;
	mill_buffer_bytes(to, text.data, text.len);
}

static void start_step(struct mill_sql_use *use, enum step step, struct mill_span sql)
{
	use->step = step;
	set_text(&use->sql, sql);
	if (use->client == NULL) {
		use->turn.on_turn = on_turn;
		use->client = mill_clients_take(use->wait->ops->clients, &use->turn);
	}
	if (use->client != NULL)
		ask(use);
}

/* The step, or the transaction, is over. */
static void give_back(struct mill_sql_use *use)
{
	struct mill_client *client = use->client;
	use->client = NULL;
	use->transaction = 0;
	if (client != NULL)
		mill_clients_give(use->wait->ops->clients, client);
}

static void wake(struct mill_sql_use *use, const struct mill_answer *answer)
{
	struct mill_wait *wait = use->wait;
	use->answer = answer;
	mill_wait_finish(wait, false, MILL_SPAN_NONE);
	if (wait->sql != NULL)
		wait->sql->answer = NULL;
}

/* The handler is not resumed. */
static void end(struct mill_sql_use *use, enum mill_outcome_kind kind, const char *text)
{
	struct mill_wait *wait = use->wait;
	wait->ends = true;
	wait->ending = kind;
	mill_wait_finish(wait, false, text ? MILL_SPAN(text) : MILL_SPAN_NONE);
}

/* ---- what follows from an answer ----------------------------------------------------------- */

/*
 * AND CHAIN leaves another transaction, which shows in the command's tag only; and ROLLBACK TO has
 * the tag of ROLLBACK.
 */
static bool has_ended(const struct mill_sql_use *use, const struct mill_answer *answer)
{
	struct mill_span sql = { use->sql.data, use->sql.len };
	if (!mill_client_in_transaction(use->client) || strcmp(answer->tag, "COMMIT") == 0)
		return true;
	return strcmp(answer->tag, "ROLLBACK") == 0 && mill_statement_ends_transaction(sql);
}

static void after_query(struct mill_sql_use *use, struct mill_answer *answer)
{
	if (use->transaction == 0) {
		if (!answer->failed && mill_client_in_transaction(use->client))
			mill_answer_fail(answer, NULL,
			                 "this statement begins a transaction, which was rolled "
			                 "back: use tidemill.transaction");
		give_back(use);
	} else if (has_ended(use, answer)) {
		if (!answer->failed)
			mill_answer_fail(answer, NULL,
			                 "this statement ended the transaction: leave that to "
			                 "the end of its function");
		give_back(use);
	}
	wake(use, answer);
}

static void after_begin(struct mill_sql_use *use, struct mill_answer *answer)
{
	if (answer->failed)
		give_back(use);
	else
		use->transaction = ++use->wait->ops->transactions;
	wake(use, answer);
}

/* A COMMIT of a transaction in which a statement had failed is answered by ROLLBACK. */
static void check_commit(struct mill_answer *answer)
{
	if (!answer->failed && strcmp(answer->tag, "COMMIT") != 0)
		mill_answer_fail(answer, "25P02",
		                 "the transaction was rolled back, since one of its statements "
		                 "had failed");
}

static void after_commit(struct mill_sql_use *use, struct mill_answer *answer)
{
	check_commit(answer);
	give_back(use);
	wake(use, answer);
}

static void after_rollback(struct mill_sql_use *use, struct mill_answer *answer)
{
	give_back(use);
	wake(use, answer);
}

/* Topics that nobody subscribes to, as the runtime tells of what it publishes itself. */
static void tell_orphans(const struct mill_sql_use *use, const struct mill_answer *answer)
{
	struct mill_reader row = { answer->rows.data, answer->rows.data + answer->rows.len, false };
	const struct mill_speaker *speaker = use->wait->speaker;
	mill_read_span(&row);
	struct mill_span topics = mill_read_span(&row);
	uint64_t skipped;
	if (topics.data == NULL || !mill_log_gates(&use->wait->ops->orphans, topics.data,
	                                           topics.len, ORPHAN_EVERY_SECS, &skipped))
		return;
	mill_log(MILL_LOG_WARN, "nobody_subscribes",
	         MILL_TEXT_N("published_topic", topics.data, topics.len),
	         MILL_TEXT("message_id", speaker->message_id), MILL_TEXT("topic", speaker->topic),
	         MILL_TEXT("subscriber", speaker->subscriber), MILL_INT("skipped", skipped));
}

/* The message's row is written, if it still was ours, and not committed yet. */
static void after_settle(struct mill_sql_use *use, struct mill_answer *answer)
{
	if (answer->failed) {
		if (!mill_client_in_transaction(use->client))
			give_back(use);
		wake(use, answer);
	} else if (answer->row_count == 0) {
		use->arguments.len = 0;
		start_step(use, GIVE_UP, MILL_SPAN("ROLLBACK"));
	} else {
		if (use->has_publications)
			tell_orphans(use, answer);
		MILL_KILL_POINT("finish_settled");
		use->arguments.len = 0;
		start_step(use, COMMIT_DONE, MILL_SPAN("COMMIT"));
	}
}

static void after_commit_done(struct mill_sql_use *use, struct mill_answer *answer)
{
	MILL_KILL_POINT("finish_committed");
	check_commit(answer);
	give_back(use);
	if (!answer->failed)
		end(use, MILL_OUTCOME_FINISHED, NULL);
	else if (answer->failure.unknown)
		/* Were the handler told, it might return and so have the message marked done. */
		end(use, MILL_OUTCOME_RAISED, answer->failure.message);
	else
		wake(use, answer);
}

/*
 * No row was there to write: the lease is lost, or the transaction itself changed the row, which is
 * as it was now, and ours. The runtime's fence tells one from the other.
 */
static void after_give_up(struct mill_sql_use *use, struct mill_answer *answer)
{
	(void)answer;
	give_back(use);
	end(use, MILL_OUTCOME_RAISED,
	    "ctx:finish: the message was not there to be marked done: a statement of the "
	    "transaction "
	    "changed its row, or another worker has it; all was rolled back");
}

static void (*const after[])(struct mill_sql_use *use, struct mill_answer *answer) = {
	[QUERY] = after_query,       [BEGIN] = after_begin,   [COMMIT] = after_commit,
	[ROLLBACK] = after_rollback, [SETTLE] = after_settle, [COMMIT_DONE] = after_commit_done,
	[GIVE_UP] = after_give_up,
};

static void on_answer(struct mill_answer *answer, void *context)
{
	struct mill_sql_use *use = context;
	if (use->arguments.cap > BUFFER_KEEP)
		mill_buffer_free(&use->arguments);
	after[use->step](use, answer);
}

/* ---- starting ------------------------------------------------------------------------------ */

static int need_clients(const struct mill_wait *wait, struct mill_err *err)
{
	if (wait->ops->clients != NULL)
		return 0;
	return mill_err_set(err, MILL_ERR_INPUT, "there is no database here");
}

/* The transaction that stands at `index` is the one this delivery is in. */
static int need_transaction(struct mill_wait *wait, lua_State *co, int index, struct mill_err *err)
{
	const struct mill_sql_use *use = wait->sql;
	if (use != NULL && use->transaction != 0 &&
	    lua_tonumber(co, index) == (double)use->transaction)
		return 0;
	return mill_err_set(err, MILL_ERR_INPUT,
	                    "this transaction is over, or belongs to another delivery");
}

/* What a statement is made of: a text without NUL at `index`. */
static int read_sql(lua_State *co, int index, struct mill_span *sql, struct mill_err *err)
{
	if (lua_type(co, index) != LUA_TSTRING)
		return mill_err_set(err, MILL_ERR_INPUT, "expected SQL as a text");
	sql->data = lua_tolstring(co, index, &sql->len);
	if (memchr(sql->data, 0, sql->len) != NULL)
		return mill_err_set(err, MILL_ERR_INPUT, "the SQL text holds a zero byte");
	return 0;
}

static int query_start(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err)
{
	struct mill_span sql, encoded = MILL_SPAN("");
	struct mill_arguments arguments;
	if (need_clients(wait, err) != 0 || read_sql(co, first + 1, &sql, err) != 0)
		return -1;
	if (lua_toboolean(co, first)) {
		if (need_transaction(wait, co, first, err) != 0)
			return -1;
	} else if (wait->sql != NULL && wait->sql->transaction != 0) {
		return mill_err_set(err, MILL_ERR_INPUT,
		                    "inside of a transaction use the functions of its argument "
		                    "(tx:query, tx:publish)");
	}
	if (lua_type(co, first + 2) == LUA_TSTRING)
		encoded.data = lua_tolstring(co, first + 2, &encoded.len);
	if (mill_arguments_read(encoded, &arguments) != 0)
		return mill_err_set(err, MILL_ERR_INPUT,
		                    "these arguments were not encoded, or are more than %d",
		                    MILL_ARGUMENTS_MAX);
	mill_arguments_free(&arguments);
	struct mill_sql_use *use = use_of(wait);
	set_text(&use->arguments, encoded);
	start_step(use, QUERY, sql);
	return 0;
}

static int begin_start(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err)
{
	struct mill_span sql;
	if (need_clients(wait, err) != 0 || read_sql(co, first, &sql, err) != 0)
		return -1;
	if (wait->sql != NULL && wait->sql->transaction != 0)
		return mill_err_set(err, MILL_ERR_INPUT,
		                    "a transaction cannot begin inside of another: use the one "
		                    "there is, and savepoints");
	struct mill_sql_use *use = use_of(wait);
	use->arguments.len = 0;
	start_step(use, BEGIN, sql);
	return 0;
}

static int commit_start(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err)
{
	if (need_transaction(wait, co, first, err) != 0)
		return -1;
	wait->sql->arguments.len = 0;
	start_step(wait->sql, COMMIT, MILL_SPAN("COMMIT"));
	return 0;
}

static int rollback_start(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err)
{
	if (need_transaction(wait, co, first, err) != 0)
		return -1;
	wait->sql->arguments.len = 0;
	start_step(wait->sql, ROLLBACK, MILL_SPAN("ROLLBACK"));
	return 0;
}

static int finish_start(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err)
{
	if (need_transaction(wait, co, first, err) != 0)
		return -1;
	struct mill_sql_use *use = wait->sql;
	use->arguments.len = 0;
	/* Called without a queue, there is no row to write. */
	if (wait->fence.data == NULL) {
		start_step(use, COMMIT_DONE, MILL_SPAN("COMMIT"));
		return 0;
	}
	use->has_publications = wait->publications->len > 0;
	const char *sql =
	        use->has_publications ? wait->ops->finish_publishing_sql : wait->ops->finish_sql;
	if (sql == NULL)
		return mill_err_set(err, MILL_ERR_INPUT,
		                    "ctx:publish and ctx:finish together need a table of our own, "
		                    "this one is another program's");
	mill_arguments_add(&use->arguments, MILL_SPAN(wait->speaker->message_id));
	mill_arguments_add(&use->arguments, wait->fence);
	if (use->has_publications) {
		struct mill_buffer *items = wait->publications;
		mill_buffer_text(items, "]");
		mill_arguments_add(&use->arguments, (struct mill_span){ items->data, items->len });
		items->len--;
	}
	MILL_KILL_POINT("finish_begin");
	start_step(use, SETTLE, MILL_SPAN(sql));
	return 0;
}

/* ---- life ---------------------------------------------------------------------------------- */

void mill_sql_open(struct mill_ops *ops, const struct mill_sql_options *options)
{
	const struct mill_settings *settings = options->settings;
	char *dsn = mill_span_dup(options->database);
	ops->clients = mill_clients_new(&(struct mill_clients_options){
	        .loop = ops->loop,
	        .dsn = dsn,
	        .application = "tidemill handler",
	        .most = (size_t)settings->sql_connections,
	        .idle_secs = settings->sql_idle_secs,
	});
	free(dsn);
	ops->finish_sql = mill_query_fill(mill_queries[MILL_QUERY_FINISH].sql, settings->schema,
	                                  settings->table, settings->prefix);
	if (!options->plain_table)
		ops->finish_publishing_sql =
		        mill_query_fill(mill_queries[MILL_QUERY_FINISH_PUBLISHING].sql,
		                        settings->schema, settings->table, settings->prefix);
}

void mill_sql_close(struct mill_ops *ops)
{
	mill_clients_close(ops->clients);
	ops->clients = NULL;
	free((char *)ops->finish_sql);
	free((char *)ops->finish_publishing_sql);
	ops->finish_sql = ops->finish_publishing_sql = NULL;
}

/* ---- the end ------------------------------------------------------------------------------- */

static void sql_cancel(struct mill_wait *wait)
{
	mill_clients_leave(wait->ops->clients, &wait->sql->turn);
	give_back(wait->sql);
}

static int sql_result(struct mill_wait *wait, lua_State *L)
{
	const struct mill_sql_use *use = wait->sql;
	const struct mill_answer *answer = use->answer ? use->answer : &no_answer;
	if (use->step == BEGIN && !answer->failed) {
		lua_pushnumber(L, (double)use->transaction);
		return 1;
	}
	return mill_sql_push_answer(L, answer);
}

const struct mill_op mill_sql_ops[] = {
	{ "query", query_start, sql_cancel, sql_result },
	{ "begin", begin_start, sql_cancel, sql_result },
	{ "commit", commit_start, sql_cancel, sql_result },
	{ "rollback", rollback_start, sql_cancel, sql_result },
	{ "finish", finish_start, sql_cancel, sql_result },
	{ NULL, NULL, NULL, NULL },
};

void mill_sql_release(struct mill_wait *wait)
{
	if (wait->sql->client != NULL)
		give_back(wait->sql);
}

void mill_sql_use_free(struct mill_wait *wait)
{
	if (wait->sql == NULL)
		return;
	mill_buffer_free(&wait->sql->sql);
	mill_buffer_free(&wait->sql->arguments);
	free(wait->sql);
	wait->sql = NULL;
}
