/* `tidemill migrate`: create the schema, or bring it up to date. */
#include "pg/migrate.h"

#include <stdio.h>

#include "cli/cli.h"

/* `--print` needs a config for the names in the SQL, and no database. */
static int print_sql(const struct mill_migrate_options *options)
{
	struct mill_err err = MILL_ERR_INIT;
	char *sql = mill_migrate_print(options, &err);
	if (sql == NULL)
		return mill_cli_fail(&err);
	fputs(sql, stdout);
	free(sql);
	return MILL_EXIT_OK;
}

static int migrate(struct mill_cli *cli, const struct mill_migrate_options *options)
{
	struct mill_err err = MILL_ERR_INIT;
	struct mill_migrate_result result;
	if (mill_migrate_run(options, &result, &err) != 0)
		return mill_cli_fail(&err);
	char *where = mill_cli_describe(options->dsn);
	mill_cli_did(cli, "schema \"%s\" is at version %d", options->schema, result.to_version);
	if (result.from_version == result.to_version)
		printf("%s: schema \"%s\" is at version %d, nothing to do\n", where,
		       options->schema, result.to_version);
	else if (result.from_version == 0)
		printf("%s: schema \"%s\" was made, at version %d\n", where, options->schema,
		       result.to_version);
	else
		printf("%s: schema \"%s\" went from version %d to %d\n", where, options->schema,
		       result.from_version, result.to_version);
	free(where);
	return MILL_EXIT_OK;
}

int mill_cli_migrate(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	double to;
	if (mill_cli_number(cli, "to", true, 1, mill_migrate_newest(), 0, &to, &err) != 0)
		return mill_cli_fail(&err);
	struct mill_cli_database database;
	if (mill_cli_find_database(cli, &database, &err) != 0)
		return mill_cli_fail(&err);
	struct mill_migrate_options options;
	mill_cli_migrate_options(&database.manifest, database.dsn, &options);
	options.to_version = (int)to;
	int code =
	        mill_cli_value(cli, "print") != NULL ? print_sql(&options) : migrate(cli, &options);
	mill_cli_free_database(&database);
	return code;
}
