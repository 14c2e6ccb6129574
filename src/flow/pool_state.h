/*
 * The pool's own state, private to pool.c (which executors there are) and pool_watch.c (what is
 * done about them while they run).
 */
#pragma once

#include "flow/process.h"

#define MILL_POOL_WATCH_MS 100

struct mill_pool {
	struct mill_pool_options options;
	struct mill_list processes;
	size_t count;       /* executors to be there */
	size_t concurrency; /* deliveries one of them may hold */
	struct mill_process_limits limits;
	bool draining;
	bool trial;
	bool loaded;       /* some executor got as far as a manifest */
	uint64_t digest;   /* of that manifest */
	unsigned failures; /* executors in a row that failed to start */
	uint64_t hold_until_ns;
	uint64_t memory_checked_ns;
	uv_timer_t watch;
	uv_timer_t restart;
	int handles;
	void (*on_closed)(void *context);
	void *closed_context;
};

static inline struct mill_process *mill_process_of(const struct mill_executor *executor)
{
	return (struct mill_process *)executor;
}

static inline struct mill_process *mill_process_at(struct mill_link_node *node)
{
	return mill_container_of(node, struct mill_process, node);
}

/* As many as configured, not counting those that are about to go. */
void mill_pool_start_missing(struct mill_pool *pool);
/* No successor can be had: what was to retire goes on, so that somebody serves. */
void mill_pool_keep_retiring(struct mill_pool *pool);
/* Tell the owner, unless the pool drains. */
void mill_pool_set_back(struct mill_pool *pool, enum mill_setback setback, struct mill_span text);

/* Every MILL_POOL_WATCH_MS while there is something to look at. */
void mill_pool_on_watch(uv_timer_t *timer);
/* Has it had its max_deliveries? */
void mill_pool_check_deliveries(struct mill_process *process);
