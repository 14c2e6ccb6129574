/*
 * The program: finds the command and runs it.
 */
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"

/* What was asked for, help included. Returns the exit code. */
static int run(struct mill_cli *cli, struct mill_err *err)
{
	bool silent = cli->command ? cli->command->silent && !cli->help : !cli->help;
	if (!silent && mill_cli_check_output(err) != 0)
		return mill_cli_fail(err);
	if (cli->command != NULL && !cli->help)
		return cli->command->run(cli);
	if (cli->command != NULL)
		mill_cli_print_help(cli->command, stdout);
	else
		mill_cli_print_overview(cli, cli->help ? stdout : stderr);
	return cli->help ? MILL_EXIT_OK : MILL_EXIT_USAGE;
}

int main(int argc, char **argv)
{
	mill_cli_take_streams();
	signal(SIGPIPE, SIG_IGN);
	/* Whoever started us may ignore it, and then children cannot be waited for. */
	signal(SIGCHLD, SIG_DFL);

	struct mill_cli cli = {
		.program = argc > 0 ? argv[0] : "tidemill",
		.commands = mill_cli_commands,
		.config_path = "config.lua",
	};
	struct mill_err err = MILL_ERR_INIT;
	int code =
	        mill_cli_parse(&cli, argc, argv, &err) != 0 ? mill_cli_fail(&err) : run(&cli, &err);
	if (mill_cli_end_output(&cli, &err) != 0 && code == MILL_EXIT_OK)
		code = mill_cli_fail(&err);
	free(cli.did);
	/* A thread may still wait for a database; the end of the process is its end. */
	if (cli.leave_at_once)
		_exit(code);
	return code;
}
