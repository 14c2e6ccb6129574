/* `tidemill reload`: ask all workers of the app to load config and handlers anew. */
#include <stdio.h>

#include "cli/cli.h"
#include "pg/session.h"

/* $1 the app. The workers that are alive and listen hear it when this commits. */
static const char ask_sql[] =
        "select count(*), pg_notify('{prefix}_control', 'reload ' || $1::text)"
        " from {schema}.worker_status where app = $1::text and alive";

static int ask(struct mill_cli *cli, struct mill_cli_database *database, struct mill_err *err)
{
	const struct mill_settings *settings = &database->manifest.settings;
	const char *app = mill_cli_value(cli, "app");
	if (app == NULL)
		app = settings->app;
	if (!settings->notify)
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "the config says `notify = false`, so workers do not listen: "
		                    "send each a SIGHUP");
	const char *params[] = { app };
	struct mill_rows *rows;
	if (mill_cli_query(database, ask_sql, 1, params, &rows, err) != 0)
		return -1;
	long long workers = mill_rows_int8(rows, 0, 0);
	mill_rows_free(rows);
	if (mill_cli_value(cli, "json") != NULL)
		printf("{\"workers\":%lld}\n", workers);
	else if (workers > 0)
		printf("asked %lld worker%s of app `%s` to reload: `tidemill status` shows the "
		       "generation each is at\n",
		       workers, workers == 1 ? "" : "s", app);
	if (workers == 0)
		return mill_err_set(err, MILL_ERR_DATABASE, "no worker of app `%s` is alive", app);
	return 0;
}

int mill_cli_reload(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	struct mill_cli_database database;
	if (mill_cli_open_database(cli, &database, &err) != 0)
		return mill_cli_fail(&err);
	int code = ask(cli, &database, &err) == 0 ? MILL_EXIT_OK : mill_cli_fail(&err);
	mill_cli_free_database(&database);
	return code;
}
