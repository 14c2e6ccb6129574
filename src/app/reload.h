/*
 * Generations: which executors serve, and how others take their place.
 *
 * A reload starts new executors beside the old ones. When all have loaded the same, the new
 * generation is declared in the database and takes what is delivered from then on; the old one
 * finishes what it has and ends. Whatever goes wrong before that ends the new executors only.
 *
 * Runtime process. Knows pools and manifests; neither claims nor the ledger.
 */
#pragma once

#include "flow/pool.h"

struct mill_reload;

struct mill_reload_options {
	uv_loop_t *loop;
	const char *config_path;
	const char *database; /* of every pool: as in mill_pool_options */
	bool plain_table;
	const char *only;                     /* as in mill_runtime_options */
	const struct mill_manifest *settings; /* as config alone gave it; read during the start */
	bool may_watch;                       /* files, where the config says so */

	/* Of every pool: as in mill_pool_options. */
	void (*on_ready)(struct mill_executor *executor, void *context);
	void (*on_outcome)(struct mill_executor *executor, const struct mill_outcome *outcome,
	                   void *context);
	void (*on_request)(struct mill_executor *executor, const struct mill_request *request,
	                   void *context);
	void (*on_gone)(struct mill_executor *executor, const struct mill_executor_death *death,
	                void *context);

	/* The first generation has loaded, as mill_reload_manifest says. Once. */
	void (*on_first)(void *context);
	/* There is nothing yet that could go on: config or a handler does not load. */
	void (*on_load_error)(struct mill_span text, void *context);
	/*
	 * The next generation is complete. Answer, at any time later, with mill_reload_declared or
	 * mill_reload_refused. The manifest stays until the generation has ended.
	 */
	void (*on_complete)(const struct mill_manifest *manifest, uint32_t generation,
	                    void *context);
	void *context;
};

/* Start the first generation. A copy of the options is kept. */
struct mill_reload *mill_reload_start(const struct mill_reload_options *options);

/* The generation that serves: its number, its executors, and what they loaded. */
uint32_t mill_reload_generation(const struct mill_reload *reload);
struct mill_pool *mill_reload_pool(const struct mill_reload *reload);
/* NULL until on_first. */
const struct mill_manifest *mill_reload_manifest(const struct mill_reload *reload);

/* What a reload is for. */
enum mill_reload_cause {
	MILL_RELOAD_ASKED,     /* by a person */
	MILL_RELOAD_CHANGED,   /* files have changed */
	MILL_RELOAD_NECESSARY, /* an executor could not be replaced: told once, however often tried
	                        */
};

/*
 * Reload, as soon as it may be: while one is under way, once more behind it. `reason` is for the
 * log.
 */
void mill_reload_ask(struct mill_reload *reload, enum mill_reload_cause cause, const char *reason);

/* The new generation's lanes are declared: it serves from now on. False: it was given up meanwhile.
 */
bool mill_reload_declared(struct mill_reload *reload);
/* They cannot be: the generation before goes on. */
void mill_reload_refused(struct mill_reload *reload, const struct mill_err *err);

/* Send what was written for any executor; once a turn of the loop. */
void mill_reload_flush(struct mill_reload *reload);
/* How many deliveries all generations together may hold. */
size_t mill_reload_most(const struct mill_reload *reload);

/* No more reloads; every executor finishes what it has and ends. */
void mill_reload_drain(struct mill_reload *reload);
/* Kill all executors that may have deliveries; those of the serving generation are replaced, unless
 * it drains. */
void mill_reload_kill(struct mill_reload *reload);
/* No executor process is left. */
bool mill_reload_is_empty(const struct mill_reload *reload);
/* Close handles and free; only when it is empty. */
void mill_reload_close(struct mill_reload *reload, void (*on_closed)(void *context), void *context);
