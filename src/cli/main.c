/*
 * The program: finds the command and runs it. The table of commands is here.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"

static const struct mill_option dev_options[] = {
	{ "sample", 0, NULL,
	  "publish the messages of sample.jsonl, beside the config, once all runs" },
	{ 0 },
};

static const struct mill_option run_options[] = {
	{ "only", 0, "LANE", "claim for TOPIC or TOPIC/SUBSCRIBER alone; nothing else changes" },
	{ 0 },
};

static const struct mill_option check_options[] = {
	{ "json", 0, NULL, "print JSON" },
	{ 0 },
};

static const struct mill_option migrate_options[] = {
	{ "print", 0, NULL, "print the SQL that makes a new schema, and change nothing" },
	{ "to", 0, "N", "go to version N at most (default: the newest)" },
	{ 0 },
};

static const struct mill_option publish_options[] = {
	{ "delay", 0, "SECONDS", "not before so many seconds from now" },
	{ "at", 0, "TIME", "not before this time, such as 2030-01-31T08:00:00Z" },
	{ "priority", 0, "N", "-9 to 9, smaller first (default 0)" },
	{ "dedupe-key", 0, "KEY", "at most one unfinished message with this key per subscriber" },
	{ "max-attempts", 0, "N",
	  "starts before it is a dead letter (default: the subscription's)" },
	{ "by", 0, "WHO", "the publisher's name (default: the database user)" },
	{ 0 },
};

static const struct mill_command commands[] = {
	{
	        .name = "dev",
	        .synopsis = "[--sample]",
	        .summary = "Run the app in this folder with a Postgres of its own",
	        .details = "Makes and starts a private Postgres in .tidemill beside the config, "
	                   "with a unix\n"
	                   "socket and no TCP port, brings its schema up to date and works until "
	                   "Ctrl-C, which\n"
	                   "stops the server too. Messages are still there the next time. Where "
	                   "the config or\n"
	                   "--database names a database, that one is used.\n",
	        .options = dev_options,
	        .run = mill_cli_dev,
	},
	{
	        .name = "run",
	        .synopsis = "[--only TOPIC[/SUBSCRIBER]]",
	        .summary = "Run the worker in the foreground",
	        .details = "Brings the schema up to date (unless the config says `migrate = "
	                   "false`) and calls\n"
	                   "handlers until it is told to end. While the database cannot be "
	                   "reached, it goes on\n"
	                   "trying. SIGTERM or SIGINT: claims no more and waits for running "
	                   "handlers, up to\n"
	                   "shutdown_secs; a second one: stops now.\n",
	        .options = run_options,
	        .run = mill_cli_run,
	},
	{
	        .name = "check",
	        .synopsis = "[--json]",
	        .summary = "Load the config and every handler, and list what is wired to what",
	        .details = "Needs no database. A mistake is told as file:line.\n",
	        .options = check_options,
	        .run = mill_cli_check,
	},
	{
	        .name = "migrate",
	        .synopsis = "[--print] [--to N]",
	        .summary = "Create the schema, or bring it up to date",
	        .details =
	                "Safe to run at any time and by several at once. `run` and `dev` do the "
	                "same at\n"
	                "their start. Without a config, only a database is needed (--database).\n",
	        .options = migrate_options,
	        .run = mill_cli_migrate,
	},
	{
	        .name = "publish",
	        .synopsis = "TOPIC [JSON or -] [option…]",
	        .summary = "Publish a message",
	        .details = "The message is any JSON value, {} when left out; `-` reads it from "
	                   "standard input.\n"
	                   "Prints {\"id\":…,\"topic\":…,\"delivered\":N,\"duplicate\":false}; "
	                   "delivered counts the\n"
	                   "subscribers that will get it. The database is that of --database, of "
	                   "the config, of\n"
	                   "a running `tidemill dev` in the config's folder, or of the PG* "
	                   "variables.\n",
	        .options = publish_options,
	        .min_operands = 1,
	        .max_operands = 2,
	        .run = mill_cli_publish,
	},
	{
	        .name = "version",
	        .synopsis = "",
	        .summary = "Print the versions of the program, its libraries and the server",
	        .run = mill_cli_version,
	},
	{
	        .name = "help",
	        .synopsis = "[COMMAND]",
	        .summary = "Say how a command is used",
	        .max_operands = 1,
	        .run = mill_cli_help,
	},
	{
	        .name = "executor",
	        .synopsis = "[PARENT]",
	        .summary = "Run handlers for the runtime that started this",
	        .details = "Started by the program itself, with its end of a socket pair as "
	                   "descriptor 3.\n",
	        .max_operands = 1,
	        .hidden = true,
	        .run = mill_cli_executor,
	},
	{
	        .name = "keys",
	        .synopsis = "",
	        .summary = "Print the table of configuration keys",
	        .details = "One key a line, fields separated by tabs, for script/check-docs.\n",
	        .hidden = true,
	        .run = mill_cli_keys,
	},
	{ 0 },
};

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
		.commands = commands,
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
	if (fflush(stdout) != 0 && errno != EPIPE && code == MILL_EXIT_OK) {
		mill_err_system(&err, errno, "cannot write the output");
		code = mill_cli_fail(&err);
	}
	/* A thread may still wait for a database; the end of the process is its end. */
	if (cli.leave_at_once)
		_exit(code);
	return code;
}
