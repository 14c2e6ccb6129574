/* Reading the command line: see cli.h. Knows tables of options, not what they are for. */
#include "cli/cli.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "core/log.h"
#include "core/policy.h"

enum { CONFIG, DATABASE, LOG_LEVEL, LOG_FORMAT, HELP };

const struct mill_option mill_cli_options[] = {
	[CONFIG] = { "config", 'c', "FILE", "the config to use (default: config.lua)" },
	[DATABASE] = { "database", 0, "DSN",
	               "the database, whatever the config says: a libpq URI or conninfo" },
	[LOG_LEVEL] = { "log-level", 0, "LEVEL", "debug, info (default), warn or error" },
	[LOG_FORMAT] = { "log-format", 0, "FORMAT",
	                 "text, json or terminal (default at a terminal)" },
	[HELP] = { "help", 'h', NULL, "say how a command is used" },
	{ 0 },
};

/* ---- suggestions ----------------------------------------------------------------------------- */

#define NAMES_MAX 64

/*
 * What may stand in a command's place: first words, or after a group's name its whole commands. Its
 * strings are the caller's to free.
 */
static size_t command_names(const struct mill_cli *cli, char *names[NAMES_MAX])
{
	size_t count = 0;
	for (const struct mill_command *command = cli->commands; command->name; command++) {
		size_t len = cli->group ? strlen(command->name) : strcspn(command->name, " ");
		if (!command->hidden && count < NAMES_MAX)
			names[count++] = mill_strndup(command->name, len);
	}
	return count;
}

static int unknown_command(const struct mill_cli *cli, const char *word, struct mill_err *err)
{
	char *names[NAMES_MAX];
	size_t count = command_names(cli, names);
	const char *closest = mill_policy_closest(word, (const char *const *)names, count);
	if (closest != NULL)
		mill_err_set(err, MILL_ERR_USAGE, "there is no command `%s`: did you mean `%s`?",
		             word, closest);
	else
		mill_err_set(err, MILL_ERR_USAGE,
		             "there is no command `%s`: `tidemill %s%s--help` lists them", word,
		             cli->group ? cli->group : "", cli->group ? " " : "");
	for (size_t i = 0; i < count; i++)
		free(names[i]);
	return -1;
}

static int unknown_option(const struct mill_cli *cli, const char *word, struct mill_err *err)
{
	const char *names[NAMES_MAX];
	size_t count = 0;
	for (const struct mill_option *option = mill_cli_options; option->name; option++)
		names[count++] = option->name;
	if (cli->command != NULL && cli->command->options != NULL)
		for (const struct mill_option *option = cli->command->options; option->name;
		     option++)
			names[count++] = option->name;
	char *bare = mill_strdup(word + strspn(word, "-"));
	bare[strcspn(bare, "=")] = 0;
	const char *closest = mill_policy_closest(bare, names, count);
	free(bare);
	const char *command = cli->command ? cli->command->name : NULL;
	if (closest != NULL)
		return mill_err_set(err, MILL_ERR_USAGE,
		                    "there is no option `%s`: did you mean `--%s`?", word, closest);
	return mill_err_set(err, MILL_ERR_USAGE,
	                    "there is no option `%s`: `tidemill %s%s--help` lists them%s", word,
	                    command ? command : "", command ? " " : "",
	                    command ? "; what begins with `-` but is none goes behind `--`" : "");
}

/* ---- words ----------------------------------------------------------------------------------- */

struct words {
	int count, at;
	char **list;
};

/*
 * An option in a table, by `--name`, `--name=value`, `-n` or `-nvalue`. Returns its index, or −1;
 * `*attached` is the value in the same word.
 */
static int find_option(const struct mill_option *options, const char *word, const char **attached)
{
	*attached = NULL;
	for (int i = 0; options != NULL && options[i].name != NULL; i++) {
		if (word[1] != '-') {
			if (options[i].letter == 0 || word[1] != options[i].letter)
				continue;
			*attached = word[2] ? word + 2 : NULL;
			return i;
		}
		size_t len = strlen(options[i].name);
		if (strncmp(word + 2, options[i].name, len) != 0 ||
		    (word[2 + len] && word[2 + len] != '='))
			continue;
		*attached = word[2 + len] ? word + 2 + len + 1 : NULL;
		return i;
	}
	return -1;
}

/* The value of an option: attached, or the next word. */
static int take_value(const struct mill_option *option, const char *attached, struct words *words,
                      const char **value, struct mill_err *err)
{
	if (option->value == NULL) {
		if (attached != NULL)
			return mill_err_set(err, MILL_ERR_USAGE, "`--%s` takes no value",
			                    option->name);
		*value = "";
		return 0;
	}
	if (attached == NULL && words->at + 1 < words->count)
		attached = words->list[++words->at];
	if (attached == NULL)
		return mill_err_set(err, MILL_ERR_USAGE, "`--%s` needs a value: --%s %s",
		                    option->name, option->name, option->value);
	*value = attached;
	return 0;
}

static int pick(const char *value, const char *option, const char *const *names, int count,
                struct mill_err *err)
{
	for (int i = 0; i < count; i++)
		if (strcmp(value, names[i]) == 0)
			return i;
	char *list = mill_strdup(names[0]);
	for (int i = 1; i < count; i++) {
		char *longer = mill_sprintf("%s, %s", list, names[i]);
		free(list);
		list = longer;
	}
	mill_err_set(err, MILL_ERR_USAGE, "`%s` is `%s`: use one of %s", option, value, list);
	free(list);
	return -1;
}

static const char *const levels[] = { "debug", "info", "warn", "error" };
static const char *const formats[] = { "text", "json", "terminal" };

/* What all commands are told. */
struct shared {
	enum mill_log_level level;
	enum mill_log_format format;
};

static int set_shared(struct mill_cli *cli, int option, const char *value, struct shared *shared,
                      struct mill_err *err)
{
	int picked;
	switch (option) {
	case CONFIG:
		if (value[0] == 0)
			return mill_err_set(err, MILL_ERR_USAGE, "`--config` names no file");
		cli->config_path = value;
		cli->config_given = true;
		return 0;
	case DATABASE:
		if (value[0] == 0)
			return mill_err_set(
			        err, MILL_ERR_USAGE,
			        "`--database` is empty: leave it out to use the config's");
		cli->database = value;
		return 0;
	case LOG_LEVEL:
		picked = pick(value, "--log-level", levels, MILL_COUNT(levels), err);
		shared->level = picked < 0 ? shared->level : (enum mill_log_level)picked;
		return picked < 0 ? -1 : 0;
	case LOG_FORMAT:
		picked = pick(value, "--log-format", formats, MILL_COUNT(formats), err);
		shared->format = picked < 0 ? shared->format : (enum mill_log_format)picked;
		return picked < 0 ? -1 : 0;
	default:
		cli->help = true;
		return 0;
	}
}

static int take_option(struct mill_cli *cli, struct words *words, struct shared *shared,
                       struct mill_err *err)
{
	const char *word = words->list[words->at], *attached, *value;
	int index = cli->command ? find_option(cli->command->options, word, &attached) : -1;
	if (index >= 0) {
		MILL_ASSERT(index < MILL_OPTIONS_MAX);
		return take_value(&cli->command->options[index], attached, words,
		                  &cli->values[index], err);
	}
	index = find_option(mill_cli_options, word, &attached);
	if (index < 0)
		return unknown_option(cli, word, err);
	if (take_value(&mill_cli_options[index], attached, words, &value, err) != 0)
		return -1;
	return set_shared(cli, index, value, shared, err);
}

/* The command, in one word or two. */
static int take_command(struct mill_cli *cli, const char *word, struct mill_err *err)
{
	char *name = cli->group ? mill_sprintf("%s %s", cli->group, word) : mill_strdup(word);
	size_t len = strlen(name);
	bool begins = false;
	for (const struct mill_command *command = cli->commands; command->name; command++) {
		if (strcmp(command->name, name) == 0)
			cli->command = command;
		if (strncmp(command->name, name, len) == 0 && command->name[len] == ' ')
			begins = true;
	}
	int result = cli->command || begins ? 0 : unknown_command(cli, name, err);
	if (begins)
		cli->group = word;
	free(name);
	return result;
}

static int take_word(struct mill_cli *cli, const char *word, struct mill_err *err)
{
	if (cli->command == NULL)
		return take_command(cli, word, err);
	if (cli->operand_count == cli->command->max_operands)
		return mill_err_set(err, MILL_ERR_USAGE,
		                    "`%s` is one word too many: tidemill %s %s", word,
		                    cli->command->name, cli->command->synopsis);
	/* The command's own word was read before, so this place is free. */
	cli->operands[cli->operand_count++] = word;
	return 0;
}

#define LEVEL_VARIABLE "TIDEMILL_LOG_LEVEL"
#define FORMAT_VARIABLE "TIDEMILL_LOG_FORMAT"

/* The log as the environment wants it; an empty variable says nothing. */
static int read_environment(struct shared *shared, struct mill_err *err)
{
	const char *level = getenv(LEVEL_VARIABLE), *format = getenv(FORMAT_VARIABLE);
	int picked_level = MILL_LOG_INFO;
	int picked_format = isatty(STDERR_FILENO) ? MILL_LOG_TERMINAL : MILL_LOG_TEXT;
	if (level != NULL && level[0] != 0)
		picked_level = pick(level, LEVEL_VARIABLE, levels, MILL_COUNT(levels), err);
	if (picked_level >= 0 && format != NULL && format[0] != 0)
		picked_format = pick(format, FORMAT_VARIABLE, formats, MILL_COUNT(formats), err);
	if (picked_level < 0 || picked_format < 0)
		return -1;
	*shared = (struct shared){ (enum mill_log_level)picked_level,
		                   (enum mill_log_format)picked_format };
	return 0;
}

/* For us, and by the environment for the executors we start. */
static void set_up_log(const struct shared *shared)
{
	mill_log_setup(shared->level, shared->format);
	setenv(LEVEL_VARIABLE, levels[shared->level], 1);
	setenv(FORMAT_VARIABLE, formats[shared->format], 1);
}

/* Whether a word is one of our options, rather than an operand. */
static bool is_option(const struct mill_cli *cli, const char *word)
{
	bool option = word[0] == '-' && word[1] != 0;
	if (!option || cli->command == NULL || !cli->command->words)
		return option;
	bool help = strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
	return help && cli->operand_count == 0;
}

int mill_cli_parse(struct mill_cli *cli, int argc, char **argv, struct mill_err *err)
{
	struct words words = { argc, 1, argv };
	struct shared shared;
	bool options_end = false;
	if (read_environment(&shared, err) != 0)
		return -1;
	cli->operands = (const char **)argv + 1;
	for (; words.at < argc; words.at++) {
		const char *word = argv[words.at];
		bool option = !options_end && is_option(cli, word);
		if (option && strcmp(word, "--") == 0) {
			options_end = true;
			continue;
		}
		if (option && cli->command == NULL && strcmp(word, "--version") == 0)
			word = "version", option = false;
		int result =
		        option ? take_option(cli, &words, &shared, err) : take_word(cli, word, err);
		if (result != 0)
			return -1;
	}
	set_up_log(&shared);
	if (cli->group != NULL && cli->command == NULL && !cli->help)
		return mill_err_set(
		        err, MILL_ERR_USAGE,
		        "`%s` is the first word of several commands: `tidemill %s --help` lists "
		        "them",
		        cli->group, cli->group);
	if (cli->command != NULL && !cli->help && cli->operand_count < cli->command->min_operands)
		return mill_err_set(err, MILL_ERR_USAGE, "something is missing: tidemill %s %s",
		                    cli->command->name, cli->command->synopsis);
	return 0;
}

/* ---- values ---------------------------------------------------------------------------------- */

const char *mill_cli_value(const struct mill_cli *cli, const char *name)
{
	for (int i = 0; cli->command->options[i].name != NULL; i++)
		if (strcmp(cli->command->options[i].name, name) == 0)
			return cli->values[i];
	MILL_ASSERT(!"an option of this command");
	return NULL;
}

int mill_cli_number(const struct mill_cli *cli, const char *name, bool whole, double min,
                    double max, double preset, double *value, struct mill_err *err)
{
	const char *text = mill_cli_value(cli, name);
	*value = preset;
	if (text == NULL)
		return 0;
	char *end;
	double number = strtod(text, &end);
	if (end == text || *end != 0 || !(number >= min && number <= max) ||
	    (whole && number != floor(number)))
		return mill_err_set(err, MILL_ERR_USAGE,
		                    "`--%s` is `%s`: use a %s from %.14g to %.14g", name, text,
		                    whole ? "whole number" : "number", min, max);
	*value = number;
	return 0;
}
