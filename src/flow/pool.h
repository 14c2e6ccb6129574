/*
 * The pool: the executor processes. It starts them, hands them frames, watches, kills and replaces
 * them, and says which delivery answers for a death.
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

struct mill_pool_options {
	uv_loop_t *loop;
	const char *program; /* what to start: `program executor` */
	const char *config_path;
	uint32_t generation;
	size_t count;
	size_t concurrency; /* deliveries one executor may hold */
	double stall_secs, kill_grace_secs;
	size_t max_memory_mb;    /* over it an executor is replaced; 0: no limit */
	uint64_t max_deliveries; /* after so many it is replaced; 0: never */

	/* The first executor has loaded: what config and handlers came to. Called once, before
	 * on_ready. */
	void (*on_manifest)(const struct mill_manifest *manifest, void *context);
	/* An executor can take deliveries. */
	void (*on_ready)(struct mill_executor *executor, void *context);
	void (*on_outcome)(struct mill_executor *executor, const struct mill_outcome *outcome,
	                   void *context);
	void (*on_request)(struct mill_executor *executor, const struct mill_request *request,
	                   void *context);
	/* It has ended (waitpid): `sent` holds what it never answered, and must be empty on return.
	 */
	void (*on_gone)(struct mill_executor *executor, const struct mill_executor_death *death,
	                void *context);
	/* Config or a handler does not load, before any executor ever did: `text` for people. */
	void (*on_load_error)(struct mill_span text, void *context);
	void *context;
};

/* Start `count` executors. A copy of the options is kept. */
struct mill_pool *mill_pool_start(const struct mill_pool_options *options);

/* Executors that can take deliveries, for walking: NULL ends. */
struct mill_executor *mill_pool_next(struct mill_pool *pool, struct mill_executor *after);
size_t mill_pool_ready_count(struct mill_pool *pool);
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

/* Ask every executor to finish what it has and end; none is replaced any more. */
void mill_pool_drain(struct mill_pool *pool);
/* Kill every executor; each is replaced unless the pool drains. */
void mill_pool_kill(struct mill_pool *pool);
/* No executor process is left. */
bool mill_pool_is_empty(const struct mill_pool *pool);

/* Close handles and free; only when it is empty. */
void mill_pool_close(struct mill_pool *pool, void (*on_closed)(void *context), void *context);
