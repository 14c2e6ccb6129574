/*
 * The runtime: everything that turns rows into handler calls, wired together.
 *
 * Runtime process only; never runs Lua. Takes no signals and owns no loop, so that a program can
 * embed it: the caller turns the loop and says when to stop.
 */
#pragma once

#include <uv.h>

#include "core/config.h"
#include "core/err.h"
#include "pg/queries.h"

struct mill_runtime;

struct mill_runtime_options {
	uv_loop_t *loop;
	const char *config_path; /* of config.lua, for the executors */
	const char *database;    /* overrides the manifest's; NULL: as the manifest says */
	bool until_idle;         /* stop by itself when nothing is claimable any more */
	const char *only; /* "TOPIC" or "TOPIC/SUBSCRIBER": claim for these lanes alone; or NULL */
	const struct mill_manifest *manifest; /* as loaded from config_path; copied */
	enum mill_shape shape;                /* of what lies in the database */

	/* Executors loaded, database reached, lanes registered: called once, on the loop. */
	void (*on_ready)(void *context);
	/*
	 * The end, called exactly once after a successful start. Exit codes: 0 an orderly stop, 1 a
	 * failure (`err` says which), 2 a handler that does not load, 3 a hasty stop.
	 */
	void (*on_stopped)(int exit_code, const struct mill_err *err, void *context);
	void *context;
};

/*
 * Start. 0: on_stopped will be called, later, once; −1: `err` says why, nothing is left behind.
 * The database need not be there yet: the runtime goes on trying.
 */
int mill_runtime_start(const struct mill_runtime_options *options, struct mill_runtime **runtime,
                       struct mill_err *err);

/*
 * Orderly stop: claims no more, gives back what has not started, waits up to shutdown_secs for
 * running handlers, then stops those too. A second call stops now: gives back what it can within
 * two seconds. May be called at any time between start and on_stopped.
 */
void mill_runtime_stop(struct mill_runtime *runtime);

/*
 * Load config and handlers anew, and let new executors take over from the old ones when all is well
 * with them. `reason` is for the log. May be called as mill_runtime_stop.
 */
void mill_runtime_reload(struct mill_runtime *runtime, const char *reason);

/* Free the memory; after on_stopped only. */
void mill_runtime_free(struct mill_runtime *runtime);
