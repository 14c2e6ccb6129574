/* `tidemill run`: the worker in the foreground. */
#include "app/child.h"
#include "cli/worker.h"

/* A lane that --only names must be one of the config's. */
static int check_only(const struct mill_manifest *manifest, const char *only, struct mill_err *err)
{
	for (size_t i = 0; i < manifest->lane_count; i++) {
		const struct mill_manifest_lane *lane = &manifest->lanes[i];
		size_t topic_len = strlen(lane->topic);
		if (strncmp(only, lane->topic, topic_len) != 0)
			continue;
		if (only[topic_len] == 0 ||
		    (only[topic_len] == '/' && strcmp(only + topic_len + 1, lane->subscriber) == 0))
			return 0;
	}
	return mill_err_set(
	        err, MILL_ERR_USAGE,
	        "`--only` is `%s`, and the config has no such subscription: `tidemill check` "
	        "lists them, write TOPIC or TOPIC/SUBSCRIBER",
	        only);
}

int mill_cli_run(struct mill_cli *cli)
{
	mill_signals_hold();
	mill_child_keep_from(3);
	struct mill_err err = MILL_ERR_INIT;
	struct mill_manifest manifest;
	if (mill_cli_load(cli, MILL_LOAD_CONFIG, &manifest, &err) != 0)
		return mill_signals_waiting() ? MILL_EXIT_OK : mill_cli_fail(&err);
	const char *only = mill_cli_value(cli, "only");
	int code;
	if (only != NULL && check_only(&manifest, only, &err) != 0)
		code = mill_cli_fail(&err);
	else
		code = mill_worker_run(&(struct mill_worker_options){
		        .cli = cli,
		        .manifest = &manifest,
		        .dsn = cli->database ? cli->database : manifest.settings.database,
		        .only = only,
		});
	/* A thread that still waits for the database looks at the manifest's texts. */
	if (!cli->leave_at_once)
		mill_manifest_free(&manifest);
	return code;
}
