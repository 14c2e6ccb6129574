/* Which config and which database a command means: see cli.h. */
#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "app/devdb.h"
#include "app/load.h"
#include "cli/cli.h"
#include "pg/address.h"
#include "pg/migrate.h"

/* Much longer than any config takes; a handler may read a model or warm a cache. */
#define LOAD_SECS 60

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

static void tell_problems(struct mill_buffer *problems, struct mill_err *err)
{
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
	if (!config_is_there(cli))
		return mill_err_set(
		        err, MILL_ERR_CONFIG,
		        "there is no %s: go to the folder of your app, or name its config with "
		        "-c FILE",
		        cli->config_path);
	struct mill_buffer problems = { 0 };
	int result = mill_load_manifest_listing(cli->config_path, mode, LOAD_SECS, manifest,
	                                        &problems, err);
	if (result != 0 && problems.len > 0)
		tell_problems(&problems, err);
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
		char *folder = mill_cli_folder(cli);
		database->dsn = mill_devdb_find(folder);
		free(folder);
	}
	return 0;
}

void mill_cli_free_database(struct mill_cli_database *database)
{
	free(database->dsn);
	mill_manifest_free(&database->manifest);
}

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
