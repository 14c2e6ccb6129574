/*
 * The worker as a foreground program: `run`, `dev` and `drain` are this, with something around it.
 *
 * Brings the database up to date, trying for as long as it takes, turns the loop with a runtime on
 * it, and translates signals: the first SIGINT or SIGTERM stops in order, the second in haste,
 * SIGHUP reloads. Knows nothing of where the database comes from.
 */
#pragma once

#include "cli/cli.h"

struct mill_worker;

struct mill_worker_options {
	struct mill_cli *cli;
	const struct mill_manifest *manifest;
	const char *dsn; /* NULL: PG* variables */
	/* What to say before the error where nothing names the database; NULL where something does.
	 */
	const char *unnamed;
	const char *only; /* as in mill_runtime_options */
	/*
	 * Stop by itself when nothing is claimable. Then a database that cannot be reached at the
	 * beginning is an error, and being stopped by a signal before that a failure.
	 */
	bool until_idle;
	/* Stop when the terminal is gone, too: nobody could press Ctrl-C any more. */
	bool ends_with_terminal;
	/*
	 * Once the database is up to date and before anything is claimed: may block, runs in a
	 * thread of its own. Trouble that may pass is tried again. May be NULL.
	 */
	int (*before_start)(void *context, struct mill_err *err);
	/*
	 * Once a second, on the loop: does what the worker needs still stand? −1: it ends at once,
	 * with a failure. May be NULL.
	 */
	int (*watch)(void *context, struct mill_err *err);
	/* The runtime is ready and has said so in the log. May be NULL. */
	void (*on_ready)(struct mill_worker *worker, void *context);
	void *context;
};

/*
 * Run to the end. SIGINT and SIGTERM must be held back (mill_signals_hold); they are let through
 * once their handlers stand. Errors have been told. Returns the exit code.
 */
int mill_worker_run(const struct mill_worker_options *options);

/* A lane that the option `name` gives must be one of the config's: TOPIC or TOPIC/SUBSCRIBER. */
int mill_worker_check_only(const struct mill_manifest *manifest, const char *name, const char *only,
                           struct mill_err *err);

/*
 * Do something that blocks in a thread of its own; `done` comes on the loop, unless the worker ends
 * before. `job` must stay until then, or for ever when it does not come.
 */
void mill_worker_background(struct mill_worker *worker, void (*work)(void *job),
                            void (*done)(void *job), void *job);
