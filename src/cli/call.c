/* `tidemill call`: one handler, once, without the queue. */
#include "app/call.h"
#include "app/devdb.h"

#include <stdio.h>

#include "cli/cli.h"

/* The text is whole here, traceback and all; everywhere else an error is one line. */
static int tell(const char *what, const char *text)
{
	fprintf(stderr, "tidemill: %s%s\n", what, text ? text : "");
	return MILL_EXIT_FAILURE;
}

static int print_result(const struct mill_call_result *result)
{
	char what[80];
	switch (result->kind) {
	case MILL_OUTCOME_DONE:
	case MILL_OUTCOME_FINISHED:
		if (result->publications != NULL)
			fprintf(stderr, "tidemill: published nothing, there is no queue here: %s\n",
			        result->publications);
		puts(result->result ? result->result : "null");
		return MILL_EXIT_OK;
	case MILL_OUTCOME_RETRY:
		snprintf(what, sizeof(what),
		         "the handler asked to be tried again in %g s: ", result->delay_secs);
		return tell(what, result->error);
	case MILL_OUTCOME_SNOOZE:
		snprintf(what, sizeof(what), "the handler put the message off for %g s",
		         result->delay_secs);
		return tell(what, NULL);
	case MILL_OUTCOME_DISCARD:
		return tell("the handler discarded the message: ", result->error);
	case MILL_OUTCOME_RAISED:
	case MILL_OUTCOME_RETURNED:
		break;
	}
	return tell("", result->error ? result->error : "the handler was not started");
}

int mill_cli_call(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	struct mill_buffer payload = { 0 }, problems = { 0 };
	int code = MILL_EXIT_OK;
	if (mill_cli_check_config(cli, &err) != 0 ||
	    mill_cli_read_payload(cli->operand_count > 1 ? cli->operands[1] : "{}", &payload,
	                          &err) != 0 ||
	    mill_cli_check_json(payload.data, payload.len, &err) != 0) {
		code = mill_cli_fail(&err);
	} else {
		/* The server of `tidemill dev`, where nobody names another. */
		char *folder = mill_cli_folder(cli), *closed = NULL;
		char *found = cli->database ? NULL : mill_devdb_find(folder, &closed);
		struct mill_call_options options = {
			.config_path = cli->config_path,
			.database = cli->database ? cli->database : found,
			.database_yields = cli->database == NULL,
			.handler = cli->operands[0],
			.payload = { payload.data, payload.len },
			.load_secs = MILL_CLI_LOAD_SECS,
		};
		struct mill_call_result result;
		if (mill_call_run(&options, &result, &problems, &err) == 0) {
			mill_cli_did(cli, "the handler has run");
			code = print_result(&result);
			mill_call_free(&result);
		} else {
			mill_cli_tell_problems(&problems, &err);
			code = mill_cli_fail(&err);
		}
		free(closed);
		free(found);
		free(folder);
	}
	mill_buffer_free(&payload);
	mill_buffer_free(&problems);
	return code;
}
