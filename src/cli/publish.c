/* `tidemill publish`: the command line's way to the SQL function. */
#include <stdio.h>

#include "cli/cli.h"
#include "core/policy.h"
#include "pg/session.h"

#define CENTURY_SECS (100.0 * 365 * 86400) /* less than 100 years of any calendar */

/* What is published. Texts belong to the command line, but for the payload. */
struct message {
	const char *topic, *delay, *at, *priority, *dedupe_key, *max_attempts, *by;
	struct mill_buffer payload; /* with a NUL behind it */
};

int mill_cli_check_publish(const struct mill_cli *cli, struct mill_err *err)
{
	double ignored;
	const char *start, *topic = cli->operands[0], *at = mill_cli_value(cli, "at");
	size_t len;
	if (mill_policy_topic(topic, strlen(topic), &start, &len, err) != 0 ||
	    mill_cli_number(cli, "delay", false, 0, CENTURY_SECS, 0, &ignored, err) != 0 ||
	    mill_cli_number(cli, "priority", true, -9, 9, 0, &ignored, err) != 0 ||
	    mill_cli_number(cli, "max-attempts", true, 1, INT16_MAX, 0, &ignored, err) != 0)
		return -1;
	if (at != NULL && mill_cli_value(cli, "delay") != NULL)
		return mill_err_set(err, MILL_ERR_USAGE, "give `--delay` or `--at`, not both");
	return at != NULL ? mill_cli_check_time("at", at, err) : 0;
}

static int read_message(struct mill_cli *cli, struct message *message, struct mill_err *err)
{
	if (mill_cli_check_publish(cli, err) != 0)
		return -1;
	message->topic = cli->operands[0];
	message->delay = mill_cli_value(cli, "delay");
	message->at = mill_cli_value(cli, "at");
	message->priority = mill_cli_value(cli, "priority");
	message->dedupe_key = mill_cli_value(cli, "dedupe-key");
	message->max_attempts = mill_cli_value(cli, "max-attempts");
	message->by = mill_cli_value(cli, "by");

	const char *payload = cli->operand_count > 1 ? cli->operands[1] : "{}";
	if (mill_cli_read_payload(payload, &message->payload, err) != 0)
		return -1;
	return mill_cli_check_json(message->payload.data, message->payload.len, err);
}

static int publish(struct mill_cli *cli, struct mill_cli_database *database,
                   const struct message *message, struct mill_err *err)
{
	static const char sql[] =
	        "select id, topic, delivered, duplicate from {schema}.publish($1, $2::jsonb,"
	        " delay => make_interval(secs => $3::double precision), available_at => "
	        "$4::timestamptz,"
	        " priority => $5::double precision::integer, dedupe_key => $6,"
	        " max_attempts => $7::double precision::integer, published_by => $8)";
	const char *params[] = { message->topic,        message->payload.data,
		                 message->delay,        message->at,
		                 message->priority,     message->dedupe_key,
		                 message->max_attempts, message->by };
	struct mill_rows *rows;
	if (mill_cli_query(database, sql, MILL_COUNT(params), params, &rows, err) != 0)
		return -1;
	bool duplicate = mill_rows_bool(rows, 0, 3);
	mill_cli_did(cli,
	             duplicate ? "nothing was published: message %s waits with the same key"
	                       : "the message was published as %s",
	             mill_rows_text(rows, 0, 0));
	/* Neither an id nor a topic can hold what JSON would escape. */
	printf("{\"id\":\"%s\",\"topic\":\"%s\",\"delivered\":%lld,\"duplicate\":%s}\n",
	       mill_rows_text(rows, 0, 0), mill_rows_text(rows, 0, 1),
	       (long long)mill_rows_int8(rows, 0, 2), duplicate ? "true" : "false");
	mill_rows_free(rows);
	return 0;
}

int mill_cli_publish(struct mill_cli *cli)
{
	if (mill_cli_value(cli, "lines") != NULL)
		return mill_cli_publish_lines(cli);
	struct mill_err err = MILL_ERR_INIT;
	struct message message = { 0 };
	struct mill_cli_database database;
	int code = MILL_EXIT_OK;
	if (read_message(cli, &message, &err) != 0 ||
	    mill_cli_open_database(cli, &database, &err) != 0) {
		code = mill_cli_fail(&err);
	} else {
		if (publish(cli, &database, &message, &err) != 0)
			code = mill_cli_fail(&err);
		mill_cli_free_database(&database);
	}
	mill_buffer_free(&message.payload);
	return code;
}
