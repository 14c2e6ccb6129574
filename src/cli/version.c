/* `tidemill version`: what this is made of, and what it talks to. */
#include <stdio.h>
#include <uv.h>

#include "cli/cli.h"
#include "executor/version.h"
#include "pg/session.h"
#include "pg/version.h"

static void print_version(const char *name, int number)
{
	/* 150020 is 15.20 */
	printf("%-10s%d.%d\n", name, number / 10000, number % 10000);
}

/* The server, where one is named or runs for this folder. */
static void print_server(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	struct mill_cli_database database;
	if (mill_cli_find_database(cli, &database, &err) != 0) {
		/* Without a config there is none to look for; a config at fault is worth telling.
		 */
		if (err.kind == MILL_ERR_CONFIG)
			printf("%-10snot asked: %s\n", "Postgres", err.message);
		return;
	}
	struct mill_session *session;
	if (mill_session_open(database.dsn, "tidemill version", &session, &err) == 0) {
		print_version("Postgres", mill_session_server_version(session));
		mill_session_close(session);
	} else {
		printf("%-10snot reached: %s\n", "Postgres", err.message);
	}
	mill_cli_free_database(&database);
}

int mill_cli_version(struct mill_cli *cli)
{
	printf("%-10s%s\n", "tidemill", MILL_VERSION);
	printf("%-10s%s\n", "LuaJIT", mill_vm_version());
	printf("%-10s%s\n", "libuv", uv_version_string());
	print_version("libpq", mill_pg_client_version());
	fflush(stdout);
	print_server(cli);
	return MILL_EXIT_OK;
}
