/*
 * The command line: what a command is, what it is told, and how it speaks.
 *
 * A command is a row of the table in main.c: its options are a table too, from which they are
 * parsed and help is printed. Every command is one function of `struct mill_cli` that returns the
 * exit code. Output for people or programs goes to stdout; an error is one line on stderr.
 */
#pragma once

#include <stdio.h>

#include "core/config.h"
#include "core/err.h"
#include "core/message.h"

/* Exit codes, the same for all commands. */
enum {
	MILL_EXIT_OK = 0,
	MILL_EXIT_FAILURE = 1, /* the database, the system */
	MILL_EXIT_USAGE = 2,   /* the command line, config.lua, a handler, a payload */
	MILL_EXIT_HASTY = 3,   /* a second signal */
};

struct mill_option {
	const char *name;  /* without the dashes */
	char letter;       /* 0: none */
	const char *value; /* what it takes, for help; NULL: nothing */
	const char *help;
};

#define MILL_OPTIONS_MAX 12 /* of one command */
#define MILL_OPERANDS_MAX 2

struct mill_cli;

struct mill_command {
	const char *name;
	const char *synopsis;              /* what follows the name */
	const char *summary;               /* one line */
	const char *details;               /* what help says besides; ends with a newline */
	const struct mill_option *options; /* ends with a row without a name; NULL: none */
	int min_operands, max_operands;
	bool hidden;
	int (*run)(struct mill_cli *cli);
};

struct mill_cli {
	const char *program;                 /* argv[0] */
	const struct mill_command *commands; /* all; ends with a row without a name */
	const struct mill_command *command;
	const char *config_path; /* ./config.lua where not given */
	bool config_given;
	const char *database;                 /* NULL: not given */
	const char *values[MILL_OPTIONS_MAX]; /* of the command's options; "" for a flag */
	const char *operands[MILL_OPERANDS_MAX];
	int operand_count;
	bool help;
	bool leave_at_once; /* set by a command: a thread of its own still runs */
};

/* Options that every command has. */
extern const struct mill_option mill_cli_options[];

/*
 * Read the words after argv[0]: options of all commands anywhere, the command, its options and
 * operands. `--` ends options. The log is set up as told. An error is MILL_ERR_USAGE.
 */
int mill_cli_parse(struct mill_cli *cli, int argc, char **argv, struct mill_err *err);

/* The value of an option of the command: NULL when it was not given, "" for a flag. */
const char *mill_cli_value(const struct mill_cli *cli, const char *name);

/*
 * The value as a number in [min, max], a whole one when asked; `preset` when it was not given.
 */
int mill_cli_number(const struct mill_cli *cli, const char *name, bool whole, double min,
                    double max, double preset, double *value, struct mill_err *err);

/* The entry of `names` most like `word`, or NULL where none is close. */
const char *mill_cli_closest(const char *word, const char *const *names, size_t count);

/* `tidemill --help`, and `tidemill help COMMAND`. */
void mill_cli_print_overview(const struct mill_cli *cli, FILE *out);
void mill_cli_print_help(const struct mill_command *command, FILE *out);

/* `tidemill: …` on stderr, one line. Returns the exit code that fits the error. */
int mill_cli_fail(const struct mill_err *err);
MILL_PRINTF(1, 2) void mill_cli_warn(const char *format, ...);

/* A JSON string, quotes included. Bytes that are no UTF-8 become U+FFFD. */
void mill_cli_print_json(FILE *out, const char *text);

/* A word as a shell reads it back; a new string for the caller to free. */
char *mill_cli_shell_word(const char *word);

/* Subscriptions as a table for people: topic, subscriber, handler. `indent` blanks before each
 * line. */
void mill_cli_print_lanes(FILE *out, const struct mill_manifest *manifest, int indent);

/*
 * Is `text` JSON that Postgres takes (jsonb)? The error, MILL_ERR_INPUT, says in which line and
 * column it ceases to be.
 */
int mill_cli_check_json(const char *text, size_t len, struct mill_err *err);

/* The folder that the config is in; a new string for the caller to free. */
char *mill_cli_folder(const struct mill_cli *cli);

/*
 * Load the config, within a time. On success `manifest` is the caller's to free. When several
 * things are wrong with it, all but the last have been told, and `err` is the last.
 */
int mill_cli_load(const struct mill_cli *cli, enum mill_load_mode mode,
                  struct mill_manifest *manifest, struct mill_err *err);

/*
 * The database that a command means: --database, else what the config says, else a private server
 * that runs for the config's folder, else the PG* variables; and the config (its defaults where
 * --database stands without one). Without a config and --database it is an error.
 */
struct mill_cli_database {
	char *dsn; /* NULL: PG* variables */
	struct mill_manifest manifest;
};
int mill_cli_find_database(const struct mill_cli *cli, struct mill_cli_database *database,
                           struct mill_err *err);
void mill_cli_free_database(struct mill_cli_database *database);

/* What migrations are told by a config. The texts stay the manifest's and the DSN's owner's. */
struct mill_migrate_options;
void mill_cli_migrate_options(const struct mill_manifest *manifest, const char *dsn,
                              struct mill_migrate_options *options);

/* "user@host:port/dbname" of a DSN (NULL: PG* variables), never a password; a new string. */
char *mill_cli_describe(const char *dsn);

/* The commands. */
int mill_cli_dev(struct mill_cli *cli);
int mill_cli_run(struct mill_cli *cli);
int mill_cli_check(struct mill_cli *cli);
int mill_cli_migrate(struct mill_cli *cli);
int mill_cli_publish(struct mill_cli *cli);
int mill_cli_version(struct mill_cli *cli);
int mill_cli_executor(struct mill_cli *cli);
int mill_cli_keys(struct mill_cli *cli);
int mill_cli_help(struct mill_cli *cli);
