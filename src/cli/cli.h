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

#define MILL_OPTIONS_MAX 12       /* of one command */
#define MILL_OPERANDS_ANY 1000000 /* as max_operands: as many as there are */

struct mill_cli;

struct mill_command {
	const char *name;                  /* one word, or two as in "failed list" */
	const char *synopsis;              /* what follows the name */
	const char *summary;               /* one line */
	const char *details;               /* what help says besides; ends with a newline */
	const struct mill_option *options; /* ends with a row without a name; NULL: none */
	int min_operands, max_operands;
	/* All that follows the name are operands, options too, but for a first --help. */
	bool words;
	bool hidden;
	bool silent; /* does its work where standard output is closed, too */
	int (*run)(struct mill_cli *cli);
};

struct mill_cli {
	const char *program;                 /* argv[0] */
	const struct mill_command *commands; /* all; ends with a row without a name */
	const struct mill_command *command;
	const char *group;       /* the first word of a command of two; NULL: not given */
	const char *config_path; /* ./config.lua where not given */
	bool config_given;
	const char *database;                 /* NULL: not given */
	const char *values[MILL_OPTIONS_MAX]; /* of the command's options; "" for a flag */
	const char **operands;                /* in argv, which they displace from its front */
	int operand_count;
	bool help;
	bool leave_at_once; /* set by a command: a thread of its own still runs */
	char *did;          /* see mill_cli_did */
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

/* `tidemill --help`, or what a group has; and `tidemill help COMMAND`. */
void mill_cli_print_overview(const struct mill_cli *cli, FILE *out);
void mill_cli_print_help(const struct mill_command *command, FILE *out);

/* Looks at the standard streams, and opens /dev/null in the place of those that are closed. */
void mill_cli_take_streams(void);
/* Before anything is done: can it be written what comes of it? */
int mill_cli_check_output(struct mill_err *err);
/*
 * For a command that has changed something: what, as half a sentence such as "3 messages were
 * retried", to be told where its output is lost. A later call replaces the text.
 */
MILL_PRINTF(2, 3) void mill_cli_did(struct mill_cli *cli, const char *format, ...);
/* At the end: −1 when output was lost that somebody might have read. */
int mill_cli_end_output(const struct mill_cli *cli, struct mill_err *err);

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

/* All of standard input, or of a text's own bytes where it is not `-`; a NUL stands behind. */
int mill_cli_read_payload(const char *operand, struct mill_buffer *payload, struct mill_err *err);

/*
 * A date and a time with its zone, as the option `name` takes it: without a zone it would mean
 * whatever the server's is.
 */
int mill_cli_check_time(const char *name, const char *at, struct mill_err *err);

/*
 * Is `text` JSON that Postgres takes (jsonb)? The error, MILL_ERR_INPUT, says in which line and
 * column it ceases to be.
 */
int mill_cli_check_json(const char *text, size_t len, struct mill_err *err);

/* The folder that the config is in; a new string for the caller to free. */
char *mill_cli_folder(const struct mill_cli *cli);

/* `name` in a folder, which may be `.`; a new string for the caller to free. */
char *mill_cli_in_folder(const char *folder, const char *name);
/* The folders that a file's path names, where they are not there. */
int mill_cli_make_folders(const char *path, struct mill_err *err);
/* A whole file; an error where it is there, unless it is to be replaced. */
int mill_cli_write_file(const char *path, const char *text, bool replace, struct mill_err *err);

/* Where an app has the annotations, as its .luarc.json says. */
#define MILL_CLI_ANNOTATIONS ".luals"
/* Write them, and tell so. */
int mill_cli_write_annotations(const char *folder, struct mill_err *err);

/* How long a config and its handlers may take to load: one may read a model or warm a cache. */
#define MILL_CLI_LOAD_SECS 60

/* Is there a config at all? The error says where to go. */
int mill_cli_check_config(const struct mill_cli *cli, struct mill_err *err);
/* Tell all problems of a config, a line each, but the last, which becomes `err`. */
void mill_cli_tell_problems(struct mill_buffer *problems, struct mill_err *err);

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
struct mill_session;
struct mill_rows;
struct mill_cli_database {
	char *dsn;     /* NULL: PG* variables */
	char *unnamed; /* then: what to say of it before an error; else NULL */
	struct mill_manifest manifest;
	struct mill_session *session; /* NULL: not connected */
};
int mill_cli_find_database(const struct mill_cli *cli, struct mill_cli_database *database,
                           struct mill_err *err);
/* Find it and connect; then the server's warnings are told. Nothing is left to free on error. */
int mill_cli_open_database(const struct mill_cli *cli, struct mill_cli_database *database,
                           struct mill_err *err);
/* Connect (again) to a database that was found. The error says which command helps. */
int mill_cli_connect(const struct mill_cli *cli, struct mill_cli_database *database,
                     struct mill_err *err);
void mill_cli_free_database(struct mill_cli_database *database);

/*
 * mill_session_query, with the names of the config in the place of {schema}, {table} and {prefix}.
 * The error says which command helps; one about a value of the user's is MILL_ERR_INPUT.
 */
int mill_cli_query(struct mill_cli_database *database, const char *sql, int n_params,
                   const char *const *params, struct mill_rows **rows, struct mill_err *err);
/* The same in a transaction of its own whose plans are pinned: mill_housekeeping_query. */
int mill_cli_query_pinned(struct mill_cli_database *database, const char *sql, int n_params,
                          const char *const *params, struct mill_rows **rows, struct mill_err *err);
/* An error of that session told so, for whoever asked it by itself. Returns −1. */
int mill_cli_explain(const struct mill_cli_database *database, struct mill_err *err);

/* What migrations are told by a config. The texts stay the manifest's and the DSN's owner's. */
struct mill_migrate_options;
void mill_cli_migrate_options(const struct mill_manifest *manifest, const char *dsn,
                              struct mill_migrate_options *options);

/* "user@host:port/dbname" of a DSN (NULL: PG* variables), never a password; a new string. */
char *mill_cli_describe(const char *dsn);

/* A message's id as it is typed; the error says what one looks like. */
int mill_cli_check_id(const char *id, struct mill_err *err);

/*
 * Long work: what is done so far, on a line of stderr that is drawn over, at most twice a second;
 * nothing where stderr is no terminal. `mill_progress_end` wipes the line, before anything else is
 * said. Zero-initialised to begin with.
 */
struct mill_progress {
	bool drawn;
	uint64_t next_ns;
};
MILL_PRINTF(2, 3) void mill_progress_show(struct mill_progress *progress, const char *format, ...);
void mill_progress_end(struct mill_progress *progress);

/*
 * From now on the first SIGINT or SIGTERM is only noted, for work to end in order, and interrupts
 * what waits; the second ends the process.
 */
void mill_cli_note_interrupts(void);
bool mill_cli_interrupted(void);

/* The table of commands, and the commands. */
extern const struct mill_command mill_cli_commands[];
int mill_cli_init(struct mill_cli *cli);
int mill_cli_dev(struct mill_cli *cli);
int mill_cli_run(struct mill_cli *cli);
int mill_cli_check(struct mill_cli *cli);
int mill_cli_migrate(struct mill_cli *cli);
int mill_cli_publish(struct mill_cli *cli);
/* `publish --lines`, and what both of these check before they look for a database. */
int mill_cli_publish_lines(struct mill_cli *cli);
int mill_cli_check_publish(const struct mill_cli *cli, struct mill_err *err);
int mill_cli_call(struct mill_cli *cli);
int mill_cli_test(struct mill_cli *cli);
int mill_cli_annotations(struct mill_cli *cli);
int mill_cli_drain(struct mill_cli *cli);
int mill_cli_reload(struct mill_cli *cli);
int mill_cli_status(struct mill_cli *cli);
int mill_cli_failed_list(struct mill_cli *cli);
int mill_cli_failed_show(struct mill_cli *cli);
int mill_cli_failed_retry(struct mill_cli *cli);
int mill_cli_failed_discard(struct mill_cli *cli);
int mill_cli_cancel(struct mill_cli *cli);
int mill_cli_reschedule(struct mill_cli *cli);
int mill_cli_reclaim(struct mill_cli *cli);
int mill_cli_prune(struct mill_cli *cli);
int mill_cli_version(struct mill_cli *cli);
int mill_cli_executor(struct mill_cli *cli);
int mill_cli_keys(struct mill_cli *cli);
int mill_cli_statements(struct mill_cli *cli);
int mill_cli_help(struct mill_cli *cli);
