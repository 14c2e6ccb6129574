/*
 * The pool: the executor processes of one generation, which have all loaded the same. It starts
 * them, hands them frames, watches, kills and replaces them, and says which delivery answers for a
 * death. What replaces one reads the disk: where that holds something else by now, the pool says so
 * and goes on with what it has.
 *
 * Runtime process. Knows frames and processes; neither claims nor the ledger. What a frame means is
 * dispatch's business, told through the callbacks.
 */
#pragma once

#include <uv.h>

#include "core/delivery.h"
#include "core/message.h"

struct mill_pool;

/* One executor process. Opaque but for what dispatch keeps in it. */
struct mill_executor {
	struct mill_list sent; /* dispatch's: the deliveries it has */
	uint64_t delivered;    /* dispatch's: how many it ever got */
	struct mill_pool *pool;
};

/* Why an executor is gone. */
struct mill_executor_death {
	bool ordered;     /* told to end, or killed for the program's end: nobody's fault */
	uint64_t blamed;  /* the ticket that was on the processor; 0: none */
	char reason[200]; /* what the blamed delivery is told */
};

/* What keeps an executor from serving. */
enum mill_setback {
	MILL_SETBACK_LOAD,    /* config or a handler does not load */
	MILL_SETBACK_DIFFERS, /* it loaded something else than this generation */
	MILL_SETBACK_ENDED,   /* on trial: it ended, or hung, before all were ready */
};

struct mill_pool_options {
	uv_loop_t *loop;
	const char *program; /* what to start: `program executor` */
	const char *config_path;
	const char *database; /* where handlers' SQL goes; NULL: as the config says. Copied */
	bool plain_table;     /* see mill_load */
	uint32_t generation;
	/*
	 * How many and within which limits, until the first executor's manifest says it; read
	 * during the start only. NULL: the pool is on trial. It begins with one executor, starts
	 * the others once that has loaded, and replaces none before all are ready.
	 */
	const struct mill_settings *settings;
	size_t trial_memory_mb; /* on trial: max_memory_mb until that manifest is there */

	/*
	 * The first executor has loaded: what config and handlers came to. Called once, before
	 * on_ready. False: not acceptable, and the pool is to be drained.
	 */
	bool (*on_manifest)(struct mill_pool *pool, const struct mill_manifest *manifest,
	                    void *context);
	/* An executor can take deliveries. */
	void (*on_ready)(struct mill_executor *executor, void *context);
	/* All are ready: the trial is over. Called once. */
	void (*on_complete)(struct mill_pool *pool, void *context);
	/* `text` is for people; absent for DIFFERS. Not on trial, it is tried again by itself. */
	void (*on_setback)(struct mill_pool *pool, enum mill_setback setback, struct mill_span text,
	                   void *context);
	void (*on_outcome)(struct mill_executor *executor, const struct mill_outcome *outcome,
	                   void *context);
	void (*on_request)(struct mill_executor *executor, const struct mill_request *request,
	                   void *context);
	/* An executor has loaded this file, or looked for it. */
	void (*on_file)(struct mill_pool *pool, const struct mill_file *file, void *context);
	/* It has ended (waitpid): `sent` holds what it never answered, and must be empty on return.
	 */
	void (*on_gone)(struct mill_executor *executor, const struct mill_executor_death *death,
	                void *context);
	void *context;
};

/* Start executors. A copy of the options is kept. */
struct mill_pool *mill_pool_start(const struct mill_pool_options *options);

/* Executors that can take deliveries, for walking: NULL ends. */
struct mill_executor *mill_pool_next(struct mill_pool *pool, struct mill_executor *after);
size_t mill_pool_ready_count(struct mill_pool *pool);
/* How many it has when none is missing, and how many deliveries each may hold. */
size_t mill_pool_count(const struct mill_pool *pool);
size_t mill_pool_concurrency(const struct mill_pool *pool);
/*
 * The extra executor for messages that run alone: started when `wanted`, ended when not. NULL while
 * there is none that is ready. It is not among those that mill_pool_next walks.
 */
struct mill_executor *mill_pool_solo(struct mill_pool *pool, bool wanted);
/* How many more deliveries it may hold; 0 when it is not ready. */
size_t mill_executor_room(const struct mill_executor *executor);
/*
 * How many more deliveries they may hold together. What recycled ones have still to finish counts:
 * deliveries that last must not gather ever more processes around them.
 */
size_t mill_pool_room(struct mill_pool *pool);
/* Nanoseconds its current delivery has held the processor; 0 when idle. */
uint64_t mill_executor_busy_ns(const struct mill_executor *executor);
int mill_executor_pid(const struct mill_executor *executor);

/* Where to write frames for it; sent by mill_pool_flush, once a turn of the loop. */
struct mill_buffer *mill_executor_out(struct mill_executor *executor);
void mill_pool_flush(struct mill_pool *pool);

/*
 * Ask every executor to finish what it has and end, also from within a callback; none is replaced
 * any more, and no setback is told.
 */
void mill_pool_drain(struct mill_pool *pool);
/* Kill every executor; each is replaced unless the pool drains. */
void mill_pool_kill(struct mill_pool *pool);
/* No executor process is left. */
bool mill_pool_is_empty(const struct mill_pool *pool);

/* Close handles and free; only when it is empty. */
void mill_pool_close(struct mill_pool *pool, void (*on_closed)(void *context), void *context);
