/*
 * `tidemill statements`, hidden: the SQL of the runtime, for those who read it and for specs.
 *
 * Needs no database; the names are those of the config, or the defaults where there is none.
 */
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"
#include "pg/queries.h"

/* One line, whatever the text holds. */
static void print_escaped(const char *text)
{
	for (; *text; text++)
		if (*text == '\n')
			fputs("\\n", stdout);
		else if (*text == '\t')
			fputs("\\t", stdout);
		else if (*text == '\\')
			fputs("\\\\", stdout);
		else
			putchar(*text);
}

int mill_cli_statements(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	struct mill_manifest manifest;
	if (!cli->config_given && access(cli->config_path, F_OK) != 0)
		mill_manifest_init(&manifest);
	else if (mill_cli_load(cli, MILL_LOAD_CONFIG, &manifest, &err) != 0)
		return mill_cli_fail(&err);
	const struct mill_settings *settings = &manifest.settings;
	for (size_t i = 0; i < MILL_QUERY_COUNT; i++) {
		char *sql = mill_query_fill(mill_queries[i].sql, settings->schema, settings->table,
		                            settings->prefix);
		printf("%s\t", mill_queries[i].name);
		print_escaped(sql);
		putchar('\n');
		free(sql);
	}
	mill_manifest_free(&manifest);
	return MILL_EXIT_OK;
}
