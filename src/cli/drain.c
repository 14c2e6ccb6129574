/* `tidemill drain`: the worker until there is nothing to do, for tests and for cron. */
#include "app/child.h"
#include "cli/worker.h"

int mill_cli_drain(struct mill_cli *cli)
{
	mill_signals_hold();
	mill_child_keep_from(3);
	struct mill_err err = MILL_ERR_INIT;
	struct mill_cli_database database = { 0 };
	const char *topic = mill_cli_value(cli, "topic");
	if (mill_cli_check_config(cli, &err) != 0 ||
	    mill_cli_find_database(cli, &database, &err) != 0)
		return mill_cli_fail(&err);
	int code;
	if (topic != NULL && mill_worker_check_only(&database.manifest, "topic", topic, &err) != 0)
		code = mill_cli_fail(&err);
	else
		code = mill_worker_run(&(struct mill_worker_options){
		        .cli = cli,
		        .manifest = &database.manifest,
		        .dsn = database.dsn,
		        .unnamed = database.unnamed,
		        .only = topic,
		        .until_idle = true,
		});
	/* A thread that still waits for the database looks at these texts. */
	if (!cli->leave_at_once)
		mill_cli_free_database(&database);
	return code;
}
