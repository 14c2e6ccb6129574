/* Which config and which database a command means, and how it asks it: see cli.h. */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "app/devdb.h"
#include "app/load.h"
#include "cli/cli.h"
#include "pg/address.h"
#include "pg/housekeeping.h"
#include "pg/migrate.h"
#include "pg/queries.h"
#include "pg/session.h"

char *mill_cli_folder(const struct mill_cli *cli)
{
	const char *slash = strrchr(cli->config_path, '/');
	if (slash == NULL)
		return mill_strdup(".");
	if (slash == cli->config_path)
		return mill_strdup("/");
	return mill_strndup(cli->config_path, (size_t)(slash - cli->config_path));
}

static bool config_is_there(const struct mill_cli *cli)
{
	return access(cli->config_path, F_OK) == 0;
}

int mill_cli_check_config(const struct mill_cli *cli, struct mill_err *err)
{
	if (config_is_there(cli))
		return 0;
	return mill_err_set(err, MILL_ERR_CONFIG,
	                    "there is no %s: go to the folder of your app, or name its config with "
	                    "-c FILE",
	                    cli->config_path);
}

void mill_cli_tell_problems(struct mill_buffer *problems, struct mill_err *err)
{
	if (problems->len == 0)
		return;
	mill_buffer_bytes(problems, "", 1);
	char *rest = problems->data;
	for (char *line; (line = strsep(&rest, "\n")) != NULL;) {
		if (line[0] == 0)
			continue;
		mill_err_set(err, MILL_ERR_CONFIG, "%s", line);
		if (rest != NULL && rest[strspn(rest, "\n")] != 0)
			mill_cli_fail(err);
	}
}

int mill_cli_load(const struct mill_cli *cli, enum mill_load_mode mode,
                  struct mill_manifest *manifest, struct mill_err *err)
{
	if (mill_cli_check_config(cli, err) != 0)
		return -1;
	struct mill_buffer problems = { 0 };
	int result = mill_load_manifest_listing(cli->config_path, mode, MILL_CLI_LOAD_SECS,
	                                        manifest, &problems, err);
	if (result != 0)
		mill_cli_tell_problems(&problems, err);
	mill_buffer_free(&problems);
	return result;
}

int mill_cli_find_database(const struct mill_cli *cli, struct mill_cli_database *database,
                           struct mill_err *err)
{
	*database = (struct mill_cli_database){ 0 };
	if (!config_is_there(cli) && !cli->config_given) {
		if (cli->database == NULL)
			return mill_err_set(
			        err, MILL_ERR_USAGE,
			        "there is no %s here, and no database is named: go to the folder "
			        "of your app, or use -c FILE or --database DSN",
			        cli->config_path);
		mill_manifest_init(&database->manifest);
	} else if (mill_cli_load(cli, MILL_LOAD_CONFIG, &database->manifest, err) != 0) {
		return -1;
	}
	const char *named = cli->database ? cli->database : database->manifest.settings.database;
	if (named != NULL) {
		database->dsn = mill_strdup(named);
	} else {
		struct mill_settings *settings = &database->manifest.settings;
		char *folder = mill_cli_folder(cli), *closed = NULL;
		database->dsn = mill_devdb_find(folder, &closed);
		if (database->dsn == NULL)
			database->unnamed = mill_sprintf(
			        "no database is named in the config, %s, and by the PG* variables",
			        closed ? closed : "no `tidemill dev` runs there");
		free(closed);
		free(folder);
		if (database->dsn != NULL) {
			/* An address for LISTEN belongs to a database that is not used here. */
			free(settings->listen_database);
			settings->listen_database = NULL;
		}
	}
	return 0;
}

void mill_cli_free_database(struct mill_cli_database *database)
{
	mill_session_close(database->session);
	free(database->dsn);
	free(database->unnamed);
	mill_manifest_free(&database->manifest);
	*database = (struct mill_cli_database){ 0 };
}

/* ---- asking it ------------------------------------------------------------------------------- */

static void on_notice(const char *severity, const char *text, void *context)
{
	(void)context;
	if (strcmp(severity, "WARNING") == 0)
		mill_cli_warn("%s", text);
}

/*
 * Something that migrations make is not there. A server names a function with all its arguments,
 * and adds a hint to cast them: its name alone is to the point.
 */
static int explain_missing(const struct mill_settings *settings, struct mill_err *err)
{
	const char *advice = settings->migrate
	                             ? "run `tidemill migrate`"
	                             : "this command needs what `tidemill migrate` makes, and the "
	                               "config says `migrate = false`";
	char what[sizeof(err->message)];
	memcpy(what, err->message, sizeof(what));
	char *end = strstr(what, " does not exist");
	if (strcmp(err->sqlstate, "3F000") == 0 || end == NULL)
		return mill_err_set(err, MILL_ERR_DATABASE,
		                    "this database has no queue in schema \"%s\": %s",
		                    settings->schema, advice);
	*end = 0;
	what[strcspn(what, "(")] = 0;
	return mill_err_set(err, MILL_ERR_DATABASE,
	                    "this database has no queue in schema \"%s\", or one older than this "
	                    "program (%s is missing): %s",
	                    settings->schema, what, advice);
}

int mill_cli_explain(const struct mill_cli_database *database, struct mill_err *err)
{
	static const char *const missing[] = { "3F000", "42883", "42P01", "42703" };
	const struct mill_settings *settings = &database->manifest.settings;
	const char *schema = settings->schema;
	for (size_t i = 0; i < MILL_COUNT(missing); i++)
		if (strcmp(err->sqlstate, missing[i]) == 0)
			return explain_missing(settings, err);
	char said[sizeof(err->message)];
	memcpy(said, err->message, sizeof(said));
	if (strcmp(err->sqlstate, "42501") == 0)
		return mill_err_set(err, MILL_ERR_DATABASE,
		                    "%s: the owner of schema \"%s\" grants what a role needs by "
		                    "`grant_to`, see docs/sql.md",
		                    said, schema);
	/* A value that the server finds wrong is a mistake in the command. */
	if (strncmp(err->sqlstate, "22", 2) == 0)
		err->kind = MILL_ERR_INPUT;
	if (err->kind == MILL_ERR_UNREACHED && database->unnamed != NULL)
		return mill_err_wrap(err, "%s", database->unnamed);
	return -1;
}

int mill_cli_connect(const struct mill_cli *cli, struct mill_cli_database *database,
                     struct mill_err *err)
{
	char *name = mill_sprintf("tidemill %s", cli->command->name);
	mill_session_close(database->session);
	database->session = NULL;
	int result = mill_session_open(database->dsn, name, &database->session, err);
	free(name);
	if (result != 0)
		return mill_cli_explain(database, err);
	mill_session_on_notice(database->session, on_notice, NULL);
	return 0;
}

int mill_cli_open_database(const struct mill_cli *cli, struct mill_cli_database *database,
                           struct mill_err *err)
{
	if (mill_cli_find_database(cli, database, err) != 0)
		return -1;
	if (mill_cli_connect(cli, database, err) == 0)
		return 0;
	mill_cli_free_database(database);
	return -1;
}

int mill_cli_query(struct mill_cli_database *database, const char *sql, int n_params,
                   const char *const *params, struct mill_rows **rows, struct mill_err *err)
{
	const struct mill_settings *settings = &database->manifest.settings;
	char *filled = mill_query_fill(sql, settings->schema, settings->table, settings->prefix);
	int result = mill_session_query(database->session, filled, n_params, params, rows, err);
	free(filled);
	return result == 0 ? 0 : mill_cli_explain(database, err);
}

int mill_cli_query_pinned(struct mill_cli_database *database, const char *sql, int n_params,
                          const char *const *params, struct mill_rows **rows, struct mill_err *err)
{
	const struct mill_settings *settings = &database->manifest.settings;
	struct mill_housekeeping queue = { database->session, settings->schema, settings->table,
		                           settings->prefix };
	int result = mill_housekeeping_query(&queue, sql, n_params, params, rows, err);
	return result == 0 ? 0 : mill_cli_explain(database, err);
}

/* ---- about it -------------------------------------------------------------------------------- */

void mill_cli_migrate_options(const struct mill_manifest *manifest, const char *dsn,
                              struct mill_migrate_options *options)
{
	const struct mill_settings *settings = &manifest->settings;
	*options = (struct mill_migrate_options){
		.dsn = dsn,
		.schema = settings->schema,
		.table = settings->table,
		.prefix = settings->prefix,
		.max_payload_bytes = (int)settings->max_payload_bytes,
		.notify = settings->notify,
	};
}

static char *part(const struct mill_address *address, const char *keyword)
{
	char *value = mill_address_get(address, keyword);
	return value ? value : mill_strdup("");
}

char *mill_cli_describe(const char *dsn)
{
	struct mill_address address;
	if (mill_address_parse(dsn, "tidemill", &address, NULL) != 0)
		return mill_strdup("");
	char *user = part(&address, "user"), *host = part(&address, "host");
	char *port = part(&address, "port"), *dbname = part(&address, "dbname");
	char *text = mill_sprintf("%s@%s:%s/%s", user, host, port, dbname);
	free(user);
	free(host);
	free(port);
	free(dbname);
	mill_address_free(&address);
	return text;
}
