/*
 * The program: finds the command and runs it.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"

/* A descriptor of ours must not get the number of a standard stream that was closed. */
static void keep_standard_streams(void)
{
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (fcntl(fd, F_GETFD) < 0 &&
		    open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY) < 0)
			abort();
}

int main(int argc, char **argv)
{
	keep_standard_streams();
	signal(SIGPIPE, SIG_IGN);
	/* Whoever started us may ignore it, and then children cannot be waited for. */
	signal(SIGCHLD, SIG_DFL);

	struct mill_cli cli = {
		.program = argc > 0 ? argv[0] : "tidemill",
		.commands = mill_cli_commands,
		.config_path = "config.lua",
	};
	struct mill_err err = MILL_ERR_INIT;
	int code = MILL_EXIT_OK;
	if (mill_cli_parse(&cli, argc, argv, &err) != 0) {
		code = mill_cli_fail(&err);
	} else if (cli.command == NULL) {
		mill_cli_print_overview(&cli, cli.help ? stdout : stderr);
		code = cli.help ? MILL_EXIT_OK : MILL_EXIT_USAGE;
	} else if (cli.help) {
		mill_cli_print_help(cli.command, stdout);
	} else {
		code = cli.command->run(&cli);
	}
	/* Output that was lost is a failure, unless the reader went away on purpose. */
	bool lost = (fflush(stdout) != 0 && errno != EPIPE) || (ferror(stdout) && errno != EPIPE);
	if (lost && code == MILL_EXIT_OK) {
		mill_err_system(&err, errno ? errno : EIO, "cannot write the output");
		code = mill_cli_fail(&err);
	}
	/* A thread may still wait for a database; the end of the process is its end. */
	if (cli.leave_at_once)
		_exit(code);
	return code;
}
