/* Help, printed from the tables: see cli.h. */
#include "cli/cli.h"

#include <stdio.h>

#define INDENT 28        /* where the text beside an option begins */
#define COMMAND_WIDTH 16 /* of the names in the list of commands */

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

/* Commands, all of them or those of a group. */
static void print_commands(const struct mill_cli *cli, FILE *out)
{
	size_t len = cli->group ? strlen(cli->group) : 0;
	for (const struct mill_command *command = cli->commands; command->name; command++) {
		bool other = len > 0 && (strncmp(command->name, cli->group, len) != 0 ||
		                         command->name[len] != ' ');
		if (!command->hidden && !other)
			fprintf(out, "  %-*s%s\n", COMMAND_WIDTH, command->name, command->summary);
	}
}

void mill_cli_print_overview(const struct mill_cli *cli, FILE *out)
{
	if (cli->group == NULL)
		fputs("tidemill: a message queue in Postgres whose handlers are Lua functions\n\n",
		      out);
	fprintf(out, "usage: tidemill %s%sCOMMAND [ARGUMENT…]\n\ncommands:\n",
	        cli->group ? cli->group : "", cli->group ? " " : "");
	print_commands(cli, out);
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
	/* Words given to `help` are looked up as the command line looks them up. */
	struct mill_cli asked = { .program = cli->program, .commands = cli->commands };
	struct mill_err err = MILL_ERR_INIT;
	char *words[4] = { (char *)cli->program, "--help" };
	for (int i = 0; i < cli->operand_count; i++)
		words[2 + i] = (char *)cli->operands[i];
	if (mill_cli_parse(&asked, 2 + cli->operand_count, words, &err) != 0)
		return mill_cli_fail(&err);
	if (asked.command == NULL)
		mill_cli_print_overview(&asked, stdout);
	else
		mill_cli_print_help(asked.command, stdout);
	return MILL_EXIT_OK;
}
