/*
 * What a person does to messages: `failed retry`, `failed discard`, `cancel`, `reschedule`.
 *
 * All call the SQL functions of sql/0003_operations.sql, which look at a message's state first and
 * say in words what they did or why not. Many messages go in batches, each a transaction.
 */
#include <stdio.h>

#include "cli/cli.h"
#include "core/policy.h"
#include "pg/session.h"

#define BATCH 100
#define REASONS_MAX 20 /* of those left alone by --all or --topic, told one by one */

struct change {
	struct mill_cli *cli;
	struct mill_cli_database database;
	const char *call;     /* SQL about the message m.id; a.argument is its argument */
	const char *argument; /* $1; may be NULL */
	const char *done;     /* "retried" */
	bool each;            /* say what became of each message, not how many in all */
	int64_t changed, unchanged;
	struct mill_progress progress;
};

/* ---- batches --------------------------------------------------------------------------------- */

/* Count and tell; the first two columns are `changed` and `message`. */
static void take_rows(struct change *change, const struct mill_rows *rows)
{
	bool json = mill_cli_value(change->cli, "json") != NULL;
	for (int i = 0; i < mill_rows_count(rows); i++) {
		const char *text = mill_rows_text(rows, i, 1);
		if (mill_rows_bool(rows, i, 0)) {
			change->changed++;
			if (change->each && !json)
				printf("%s\n", text);
			continue;
		}
		change->unchanged++;
		if (change->each || change->unchanged <= REASONS_MAX) {
			struct mill_err err = MILL_ERR_INIT;
			mill_progress_end(&change->progress);
			mill_err_set(&err, MILL_ERR_INPUT, "%s", text);
			mill_cli_fail(&err);
		}
	}
	if (!change->each)
		mill_progress_show(&change->progress, "%lld %s…", (long long)change->changed,
		                   change->done);
}

/* The SQL function's call and its argument, in a FROM behind m: as `r`. */
#define THE_CALL                                                                                   \
	" cross join lateral (select $1::text as argument) as a cross join lateral {schema}."

/* `before` ends with THE_CALL, `after` is what follows it. */
static int run_batch(struct change *change, const char *before, const char *after, int n_params,
                     const char *const *params, struct mill_rows **rows, struct mill_err *err)
{
	char *sql = mill_sprintf("%s%s as r %s", before, change->call, after);
	int result = mill_cli_query_pinned(&change->database, sql, n_params, params, rows, err);
	free(sql);
	if (result == 0)
		take_rows(change, *rows);
	return result;
}

static int interrupted(struct mill_err *err)
{
	return mill_err_set(err, MILL_ERR_SYSTEM, "interrupted: the rest was left as it is");
}

static int change_ids(struct change *change, struct mill_err *err)
{
	static const char before[] =
	        "select r.changed, r.message"
	        " from unnest($2::uuid[]) with ordinality as m(id, n)" THE_CALL;
	int count = change->cli->operand_count;
	change->each = true;
	for (int at = 0; at < count; at += BATCH) {
		struct mill_buffer ids = { 0 };
		for (int i = at; i < count && i < at + BATCH; i++) {
			mill_buffer_text(&ids, i == at ? "{" : ",");
			mill_buffer_text(&ids, change->cli->operands[i]);
		}
		mill_buffer_bytes(&ids, "}", 2);
		const char *params[] = { change->argument, ids.data };
		struct mill_rows *rows;
		int result = run_batch(change, before, "order by m.n", 2, params, &rows, err);
		mill_buffer_free(&ids);
		if (result != 0)
			return -1;
		mill_rows_free(rows);
		if (mill_cli_interrupted() && at + BATCH < count)
			return interrupted(err);
	}
	return 0;
}

/* A time that reads back the same under any setting of the session. */
#define EXACT(time) "to_char(" time " at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"

/*
 * All that had failed when the command began, oldest first: each is looked at once, also one that
 * fails again meanwhile.
 */
static int change_failed(struct change *change, const char *topic, struct mill_err *err)
{
	static const char before[] =
	        "with m as materialized (select f.id, f.failed_at from {schema}.failed_message as f"
	        "  where ($2::text is null or f.topic = $2::text) and f.failed_at <= "
	        "$3::timestamptz"
	        "   and (f.failed_at, f.id) > ($4::timestamptz, $5::uuid)"
	        "  order by f.failed_at, f.id limit 100)"
	        " select r.changed, r.message, " EXACT("m.failed_at") ", m.id from m" THE_CALL;
	_Static_assert(BATCH == 100, "the limit in the statement");
	struct mill_rows *rows, *now;
	if (mill_cli_query(&change->database, "select " EXACT("now()"), 0, NULL, &now, err) != 0)
		return -1;
	char *after_time = mill_strdup("-infinity");
	char *after_id = mill_strdup("00000000-0000-0000-0000-000000000000");
	int result = 0;
	for (int found = BATCH; found == BATCH && result == 0;) {
		const char *params[] = { change->argument, topic, mill_rows_text(now, 0, 0),
			                 after_time, after_id };
		result = run_batch(change, before, "order by m.failed_at, m.id", MILL_COUNT(params),
		                   params, &rows, err);
		if (result != 0)
			break;
		found = mill_rows_count(rows);
		if (found > 0) {
			free(after_time);
			free(after_id);
			after_time = mill_strdup(mill_rows_text(rows, found - 1, 2));
			after_id = mill_strdup(mill_rows_text(rows, found - 1, 3));
		}
		mill_rows_free(rows);
		if (mill_cli_interrupted() && found == BATCH)
			result = interrupted(err);
	}
	free(after_time);
	free(after_id);
	mill_rows_free(now);
	return result;
}

static int change_keyed(struct change *change, const char *key, const char *topic,
                        struct mill_err *err)
{
	static const char before[] =
	        "with m as materialized (select q.id, q.seq from {schema}.{table} as q"
	        "  where q.dedupe_key = $2::text and q.processed_at is null"
	        "   and ($3::text is null or q.topic = $3::text))"
	        " select r.changed, r.message from m" THE_CALL;
	const char *params[] = { change->argument, key, topic };
	struct mill_rows *rows;
	change->each = true;
	if (run_batch(change, before, "order by m.seq", MILL_COUNT(params), params, &rows, err) !=
	    0)
		return -1;
	int found = mill_rows_count(rows);
	mill_rows_free(rows);
	if (found > 0)
		return 0;
	return mill_err_set(err, MILL_ERR_DATABASE,
	                    "no unfinished message%s%s%s has the dedupe key `%s`",
	                    topic ? " of topic `" : "", topic ? topic : "", topic ? "`" : "", key);
}

/* ---- commands -------------------------------------------------------------------------------- */

static int check_ids(const struct mill_cli *cli, struct mill_err *err)
{
	for (int i = 0; i < cli->operand_count; i++)
		if (mill_cli_check_id(cli->operands[i], err) != 0)
			return -1;
	return 0;
}

static void print_how_many(const struct change *change)
{
	printf("%s %lld message%s", change->done, (long long)change->changed,
	       change->changed == 1 ? "" : "s");
	if (change->unchanged > 0)
		printf(", left %lld as %s", (long long)change->unchanged,
		       change->unchanged == 1 ? "it was" : "they were");
	putchar('\n');
}

/* How many, where that was not said message by message. */
static void print_counts(const struct change *change, const char *topic)
{
	if (mill_cli_value(change->cli, "json") != NULL)
		printf("{\"changed\":%lld,\"unchanged\":%lld}\n", (long long)change->changed,
		       (long long)change->unchanged);
	else if (!change->each && change->changed + change->unchanged == 0)
		printf("no message%s%s%s has failed\n", topic ? " of topic `" : "",
		       topic ? topic : "", topic ? "`" : "");
	else if (!change->each)
		print_how_many(change);
}

/* Open, change by what `select` says, tell, close. */
static int run_change(struct change *change, const char *topic,
                      int (*select)(struct change *change, const char *topic, struct mill_err *err))
{
	struct mill_err err = MILL_ERR_INIT;
	if (check_ids(change->cli, &err) != 0 ||
	    mill_cli_open_database(change->cli, &change->database, &err) != 0)
		return mill_cli_fail(&err);
	mill_cli_note_interrupts();
	int result = select(change, topic, &err);
	mill_progress_end(&change->progress);
	mill_cli_did(change->cli, "%lld message%s %s", (long long)change->changed,
	             change->changed == 1 ? " was" : "s were", change->done);
	if (result == 0 || change->changed + change->unchanged > 0)
		print_counts(change, topic);
	int code = result == 0 ? MILL_EXIT_OK : mill_cli_fail(&err);
	mill_cli_free_database(&change->database);
	return code == MILL_EXIT_OK && change->unchanged > 0 ? MILL_EXIT_FAILURE : code;
}

static int select_ids(struct change *change, const char *topic, struct mill_err *err)
{
	(void)topic;
	return change_ids(change, err);
}

static int select_keyed(struct change *change, const char *topic, struct mill_err *err)
{
	return change_keyed(change, mill_cli_value(change->cli, "dedupe-key"), topic, err);
}

/* ID…, --topic or --all: one of them. */
static int change_dead_letters(struct change *change)
{
	const char *topic = mill_cli_value(change->cli, "topic");
	bool all = mill_cli_value(change->cli, "all") != NULL;
	bool ids = change->cli->operand_count > 0;
	if (ids + (topic != NULL) + all == 1)
		return run_change(change, topic, ids ? select_ids : change_failed);
	struct mill_err err = MILL_ERR_INIT;
	mill_err_set(&err, MILL_ERR_USAGE, "say which messages: their ids, `--topic` or `--all`%s",
	             ids || topic || all ? ", only one of these" : "");
	return mill_cli_fail(&err);
}

int mill_cli_failed_retry(struct mill_cli *cli)
{
	return change_dead_letters(
	        &(struct change){ .cli = cli, .call = "retry(m.id)", .done = "retried" });
}

int mill_cli_failed_discard(struct mill_cli *cli)
{
	return change_dead_letters(&(struct change){
	        .cli = cli,
	        .call = "discard(m.id, a.argument)",
	        .argument = mill_cli_value(cli, "why"),
	        .done = "discarded",
	});
}

int mill_cli_cancel(struct mill_cli *cli)
{
	struct change change = { .cli = cli, .call = "cancel(m.id)", .done = "cancelled" };
	const char *key = mill_cli_value(cli, "dedupe-key"), *topic = mill_cli_value(cli, "topic");
	bool ids = cli->operand_count > 0;
	struct mill_err err = MILL_ERR_INIT;
	if (ids == (key != NULL))
		mill_err_set(&err, MILL_ERR_USAGE, "say which message: its id or `--dedupe-key`%s",
		             ids ? ", only one of these" : "");
	else if (topic != NULL && key == NULL)
		mill_err_set(&err, MILL_ERR_USAGE,
		             "`--topic` goes with `--dedupe-key`: an id is of one topic anyway");
	else
		return run_change(&change, topic, ids ? select_ids : select_keyed);
	return mill_cli_fail(&err);
}

int mill_cli_reschedule(struct mill_cli *cli)
{
	struct change change = {
		.cli = cli,
		.call = "reschedule(m.id, a.argument::timestamptz)",
		.argument = mill_cli_value(cli, "at"),
		.done = "rescheduled",
	};
	struct mill_err err = MILL_ERR_INIT;
	if (change.argument == NULL)
		mill_err_set(&err, MILL_ERR_USAGE, "`--at TIME` is missing: when is it to be due?");
	else if (mill_cli_check_time("at", change.argument, &err) == 0)
		return run_change(&change, NULL, select_ids);
	return mill_cli_fail(&err);
}
