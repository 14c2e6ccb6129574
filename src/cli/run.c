/* `tidemill run`: the worker in the foreground. */
#include "app/child.h"
#include "cli/worker.h"

int mill_cli_run(struct mill_cli *cli)
{
	mill_signals_hold();
	mill_child_keep_from(3);
	struct mill_err err = MILL_ERR_INIT;
	struct mill_cli_database database = { 0 };
	if (mill_cli_check_config(cli, &err) != 0 ||
	    mill_cli_find_database(cli, &database, &err) != 0)
		return mill_signals_waiting() ? MILL_EXIT_OK : mill_cli_fail(&err);
	const char *only = mill_cli_value(cli, "only");
	int code;
	if (only != NULL && mill_worker_check_only(&database.manifest, "only", only, &err) != 0)
		code = mill_cli_fail(&err);
	else
		code = mill_worker_run(&(struct mill_worker_options){
		        .cli = cli,
		        .manifest = &database.manifest,
		        .dsn = database.dsn,
		        .unnamed = database.unnamed,
		        .only = only,
		});
	/* A thread that still waits for the database looks at these texts. */
	if (!cli->leave_at_once)
		mill_cli_free_database(&database);
	return code;
}
