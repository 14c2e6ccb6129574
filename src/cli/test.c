/*
 * `tidemill test`: the app's specs, run by busted inside of this process, so that they need no
 * library beside the program.
 */
#include <errno.h>
#include <unistd.h>

#include "cli/cli.h"
#include "executor/program.h"

/* Specs are looked for, and modules of the app found, from the folder of the config. */
static int enter_folder(const struct mill_cli *cli, struct mill_err *err)
{
	if (!cli->config_given)
		return 0;
	char *folder = mill_cli_folder(cli);
	int result = chdir(folder) == 0
	                     ? 0
	                     : mill_err_system(err, errno, "cannot go to the folder %s", folder);
	free(folder);
	return result;
}

int mill_cli_test(struct mill_cli *cli)
{
	struct mill_program program = {
		.module = "tidemill.testing.busted",
		.function = "run",
		.word_count = cli->operand_count,
		.words = cli->operands,
	};
	struct mill_err err = MILL_ERR_INIT;
	int code = MILL_EXIT_OK;
	if (enter_folder(cli, &err) != 0 || mill_program_run(&program, &code, &err) != 0)
		return mill_cli_fail(&err);
	return code;
}
