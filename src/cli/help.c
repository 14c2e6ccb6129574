/* Help, printed from the tables: see cli.h. */
#include "cli/cli.h"

#include <stdio.h>

#define INDENT 28 /* where the text beside an option begins */

static void print_option(const struct mill_option *option, FILE *out)
{
	char left[64];
	char letter[5] = "";
	if (option->letter != 0)
		snprintf(letter, sizeof(letter), "-%c, ", option->letter);
	snprintf(left, sizeof(left), "  %s--%s%s%s", letter, option->name, option->value ? " " : "",
	         option->value ? option->value : "");
	fprintf(out, "%-*s%s%s\n", INDENT, left, strlen(left) >= INDENT ? " " : "", option->help);
}

static void print_options(const struct mill_option *options, FILE *out)
{
	for (; options->name != NULL; options++)
		print_option(options, out);
}

void mill_cli_print_overview(const struct mill_cli *cli, FILE *out)
{
	fputs("tidemill: a message queue in Postgres whose handlers are Lua functions\n"
	      "\n"
	      "usage: tidemill COMMAND [ARGUMENT…]\n"
	      "\n"
	      "commands:\n",
	      out);
	for (const struct mill_command *command = cli->commands; command->name; command++)
		if (!command->hidden)
			fprintf(out, "  %-12s%s\n", command->name, command->summary);
	fputs("\noptions of all commands:\n", out);
	print_options(mill_cli_options, out);
	fputs("\n`tidemill help COMMAND` says more about one.\n", out);
}

void mill_cli_print_help(const struct mill_command *command, FILE *out)
{
	fprintf(out, "usage: tidemill %s%s%s\n\n%s.\n", command->name,
	        command->synopsis[0] ? " " : "", command->synopsis, command->summary);
	if (command->details != NULL)
		fprintf(out, "\n%s", command->details);
	if (command->options != NULL) {
		fputs("\noptions:\n", out);
		print_options(command->options, out);
	}
	fputs("\noptions of all commands:\n", out);
	print_options(mill_cli_options, out);
	fputs("\nexit codes: 0 done; 1 a failure of the database or the system; 2 a mistake on the "
	      "command\n"
	      "line, in config.lua, a handler or a message",
	      out);
	bool stays = strcmp(command->name, "run") == 0 || strcmp(command->name, "dev") == 0;
	fputs(stays ? "; 3 stopped in haste by a second signal\n" : "\n", out);
}

int mill_cli_help(struct mill_cli *cli)
{
	if (cli->operand_count == 0) {
		mill_cli_print_overview(cli, stdout);
		return MILL_EXIT_OK;
	}
	/* A word given to `help` is looked up as the command line looks it up. */
	struct mill_cli asked = { .program = cli->program, .commands = cli->commands };
	struct mill_err err = MILL_ERR_INIT;
	char *words[] = { (char *)cli->program, "--help", (char *)cli->operands[0] };
	if (mill_cli_parse(&asked, 3, words, &err) != 0)
		return mill_cli_fail(&err);
	mill_cli_print_help(asked.command, stdout);
	return MILL_EXIT_OK;
}
