/* `tidemill publish`: the command line's way to the SQL function. */
#include <errno.h>
#include <regex.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"
#include "core/policy.h"
#include "pg/session.h"

#define CENTURY_SECS (100.0 * 366 * 86400)

/* What is published. Texts belong to the command line, but for the payload. */
struct message {
	const char *topic, *delay, *at, *priority, *dedupe_key, *max_attempts, *by;
	struct mill_buffer payload; /* with a NUL behind it */
};

static int read_stdin(struct mill_buffer *payload, struct mill_err *err)
{
	while (true) {
		mill_buffer_reserve(payload, 65536);
		ssize_t n = read(STDIN_FILENO, payload->data + payload->len, 65536);
		if (n == 0)
			return 0;
		if (n > 0)
			payload->len += (size_t)n;
		else if (errno != EINTR)
			return mill_err_system(err, errno, "cannot read standard input");
		if (payload->len > MILL_FRAME_MAX)
			return mill_err_set(err, MILL_ERR_INPUT,
			                    "the message is larger than any queue takes");
	}
}

/* A date and a time with its zone: without one it would mean whatever the server's zone is. */
static int check_time(const char *at, struct mill_err *err)
{
	regex_t pattern;
	int code =
	        regcomp(&pattern,
	                "^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\\.[0-9]+)?)?"
	                "([Zz]|[+-][0-9]{2}(:?[0-9]{2})?)$",
	                REG_EXTENDED | REG_NOSUB);
	MILL_ASSERT(code == 0);
	code = regexec(&pattern, at, 0, NULL, 0);
	regfree(&pattern);
	if (code == 0)
		return 0;
	return mill_err_set(
	        err, MILL_ERR_USAGE,
	        "`--at` is `%s`: give a time with its zone, such as 2030-01-31T08:00:00Z", at);
}

static int read_message(struct mill_cli *cli, struct message *message, struct mill_err *err)
{
	double ignored;
	const char *start;
	size_t len;
	message->topic = cli->operands[0];
	if (mill_policy_topic(message->topic, strlen(message->topic), &start, &len, err) != 0)
		return -1;
	if (mill_cli_number(cli, "delay", false, 0, CENTURY_SECS, 0, &ignored, err) != 0 ||
	    mill_cli_number(cli, "priority", true, -9, 9, 0, &ignored, err) != 0 ||
	    mill_cli_number(cli, "max-attempts", true, 1, INT16_MAX, 0, &ignored, err) != 0)
		return -1;
	message->delay = mill_cli_value(cli, "delay");
	message->at = mill_cli_value(cli, "at");
	message->priority = mill_cli_value(cli, "priority");
	message->dedupe_key = mill_cli_value(cli, "dedupe-key");
	message->max_attempts = mill_cli_value(cli, "max-attempts");
	message->by = mill_cli_value(cli, "by");
	if (message->at != NULL && message->delay != NULL)
		return mill_err_set(err, MILL_ERR_USAGE, "give `--delay` or `--at`, not both");
	if (message->at != NULL && check_time(message->at, err) != 0)
		return -1;

	const char *payload = cli->operand_count > 1 ? cli->operands[1] : "{}";
	if (strcmp(payload, "-") != 0)
		mill_buffer_text(&message->payload, payload);
	else if (read_stdin(&message->payload, err) != 0)
		return -1;
	if (mill_cli_check_json(message->payload.data, message->payload.len, err) != 0)
		return -1;
	mill_buffer_bytes(&message->payload, "", 1);
	return 0;
}

static void on_notice(const char *severity, const char *text, void *context)
{
	(void)context;
	if (strcmp(severity, "WARNING") == 0)
		mill_cli_warn("%s", text);
}

/* What the server cannot know: which command helps. */
static int explain(const struct mill_cli_database *database, struct mill_err *err)
{
	static const char *const missing[] = { "3F000", "42883", "42P01" };
	for (size_t i = 0; i < MILL_COUNT(missing); i++)
		if (strcmp(err->sqlstate, missing[i]) == 0)
			return mill_err_set(
			        err, MILL_ERR_DATABASE,
			        "this database has no queue in schema \"%s\": run `tidemill "
			        "migrate` (%s)",
			        database->manifest.settings.schema, err->message);
	/* A value that the server finds wrong is a mistake in the command. */
	if (strncmp(err->sqlstate, "22", 2) == 0)
		err->kind = MILL_ERR_INPUT;
	if (err->kind == MILL_ERR_UNREACHED && database->dsn == NULL)
		return mill_err_wrap(err,
		                     "no database is named in the config, no `tidemill dev` runs "
		                     "there, and by the PG* variables");
	return -1;
}

static int publish(const struct mill_cli_database *database, const struct message *message,
                   struct mill_err *err)
{
	struct mill_session *session;
	if (mill_session_open(database->dsn, "tidemill publish", &session, err) != 0)
		return explain(database, err);
	mill_session_on_notice(session, on_notice, NULL);
	char *schema = mill_policy_quote_identifier(database->manifest.settings.schema);
	char *sql =
	        mill_sprintf("select id, topic, delivered, duplicate from %s.publish($1, $2::jsonb,"
	                     " delay => make_interval(secs => $3::double precision), available_at "
	                     "=> $4::timestamptz,"
	                     " priority => $5::double precision::integer, dedupe_key => $6,"
	                     " max_attempts => $7::double precision::integer, published_by => $8)",
	                     schema);
	const char *params[] = { message->topic,        message->payload.data,
		                 message->delay,        message->at,
		                 message->priority,     message->dedupe_key,
		                 message->max_attempts, message->by };
	struct mill_rows *rows;
	int result = mill_session_query(session, sql, MILL_COUNT(params), params, &rows, err);
	if (result == 0) {
		/* Neither an id nor a topic can hold what JSON would escape. */
		printf("{\"id\":\"%s\",\"topic\":\"%s\",\"delivered\":%lld,\"duplicate\":%s}\n",
		       mill_rows_text(rows, 0, 0), mill_rows_text(rows, 0, 1),
		       (long long)mill_rows_int8(rows, 0, 2),
		       mill_rows_bool(rows, 0, 3) ? "true" : "false");
		mill_rows_free(rows);
	} else {
		result = explain(database, err);
	}
	free(sql);
	free(schema);
	mill_session_close(session);
	return result;
}

int mill_cli_publish(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	struct message message = { 0 };
	struct mill_cli_database database;
	int code = MILL_EXIT_OK;
	if (read_message(cli, &message, &err) != 0 ||
	    mill_cli_find_database(cli, &database, &err) != 0) {
		code = mill_cli_fail(&err);
	} else {
		if (publish(&database, &message, &err) != 0)
			code = mill_cli_fail(&err);
		mill_cli_free_database(&database);
	}
	mill_buffer_free(&message.payload);
	return code;
}
