/*
 * What is done about executors while they run: which load or hold the processor for too long, use
 * too much memory, have had enough deliveries, or do not end. See pool.h.
 */
#include <stdio.h>

#include "core/clock.h"
#include "core/log.h"
#include "flow/pool_state.h"

#define LOAD_LIMIT_SECS 60
#define MEMORY_CHECK_NS 500000000u
#define MEMORY_KILL_FACTOR 2 /* so many times the limit is far over: killed, not drained */
#define LEAVE_SECS 10        /* what an executor has to end in when it has nothing left to do */
#define SECOND_NS 1e9

static void watch_load(struct mill_process *process, uint64_t now)
{
	/* One that was started a moment ago, by this very walk, is younger than `now`. */
	if (process->state != MILL_PROCESS_STARTING || now <= process->started_ns ||
	    (double)(now - process->started_ns) <= LOAD_LIMIT_SECS * SECOND_NS)
		return;
	struct mill_pool *pool = process->executor.pool;
	mill_process_kill(process, MILL_KILL_LOAD);
	if (!pool->trial) {
		mill_log(MILL_LOG_ERROR, "load_hangs", MILL_INT("pid", process->handle.pid),
		         MILL_INT("secs", LOAD_LIMIT_SECS));
		mill_pool_keep_retiring(pool);
		return;
	}
	char text[160];
	snprintf(text, sizeof(text),
	         "config.lua or a handler has not loaded within %d s: it waits or loops outside of "
	         "a function",
	         LOAD_LIMIT_SECS);
	mill_pool_set_back(pool, MILL_SETBACK_LOAD, MILL_SPAN(text));
}

/* Drained, and nothing left to do: a finalizer may still hang. */
static void watch_leaving(struct mill_process *process, uint64_t now)
{
	if (process->state != MILL_PROCESS_DRAINING || !mill_list_empty(&process->executor.sent))
		return;
	if (process->idle_ns == 0)
		process->idle_ns = now;
	else if ((double)(now - process->idle_ns) > LEAVE_SECS * SECOND_NS)
		mill_process_kill(process, MILL_KILL_ORDERED);
}

static void watch_processor(struct mill_process *process, uint64_t now)
{
	const struct mill_process_limits *limits = &process->executor.pool->limits;
	struct mill_on_processor on;
	if (process->state == MILL_PROCESS_DYING || !mill_process_page(process, &on))
		return;
	double grace = limits->kill_grace_secs * SECOND_NS;
	/* A limit that passed while another had the processor counts from when this one got it. */
	uint64_t late_from = on.deadline_ns > on.since_ns ? on.deadline_ns : on.since_ns;
	bool late = on.deadline_ns != 0 && now > late_from && (double)(now - late_from) > grace;
	bool stalls = now > on.since_ns &&
	              (double)(now - on.since_ns) > limits->stall_secs * SECOND_NS + grace;
	if (!late && !stalls)
		return;
	process->killed_ticket = on.ticket;
	mill_process_kill(process, late ? MILL_KILL_LIMIT : MILL_KILL_STALL);
}

static unsigned looks_in(double secs)
{
	return (unsigned)(secs * 1000 / MILL_POOL_WATCH_MS) + 1;
}

/*
 * The time limit of a handler that waits is its executor's to keep, and one that was stopped keeps
 * none. So an executor that has deliveries and shows no sign of life is asked for one, and killed
 * if it gives none. Counted in looks: while the whole machine stands still, nobody is silent.
 */
static void watch_reaction(struct mill_process *process)
{
	const struct mill_process_limits *limits = &process->executor.pool->limits;
	struct mill_on_processor on;
	uint64_t turns = mill_process_turns(process);
	bool expected =
	        process->state == MILL_PROCESS_READY || process->state == MILL_PROCESS_DRAINING;
	if (!expected || mill_list_empty(&process->executor.sent) || turns != process->turns_seen ||
	    mill_process_page(process, &on)) {
		process->turns_seen = turns;
		process->silent_looks = 0;
		return;
	}
	process->silent_looks++;
	unsigned patience = looks_in(limits->stall_secs);
	if (process->silent_looks == patience)
		mill_process_ping(process);
	else if (process->silent_looks > 2 * patience + looks_in(limits->kill_grace_secs))
		mill_process_kill(process, MILL_KILL_FROZEN);
}

/* It gets nothing new, and goes when its successor is there. */
static void retire(struct mill_process *process)
{
	process->retiring = true;
	mill_pool_start_missing(process->executor.pool);
}

static bool may_retire(const struct mill_process *process)
{
	const struct mill_pool *pool = process->executor.pool;
	return process->state == MILL_PROCESS_READY && !process->retiring && !pool->draining &&
	       !pool->trial && mill_clock_ns() >= pool->hold_until_ns;
}

/* Over the limit an executor is replaced; far over, its handler is not waited for. */
static void watch_memory(struct mill_process *process)
{
	struct mill_pool *pool = process->executor.pool;
	size_t limit = pool->limits.max_memory_mb;
	size_t used = limit == 0 ? 0 : mill_process_memory_mb(process);
	if (used <= limit || process->state == MILL_PROCESS_DYING)
		return;
	if (used > limit * MEMORY_KILL_FACTOR) {
		struct mill_on_processor on;
		process->killed_ticket = mill_process_page(process, &on) ? on.ticket : 0;
		mill_process_kill(process, MILL_KILL_MEMORY);
	} else if (may_retire(process)) {
		mill_log(MILL_LOG_INFO, "executor_recycled", MILL_INT("pid", process->handle.pid),
		         MILL_INT("memory_mb", used), MILL_INT("max_memory_mb", limit));
		retire(process);
	}
}

/* Handlers left files open that nothing closes: what comes next would fail for it. */
static void watch_wear(struct mill_process *process)
{
	if (!mill_process_is_worn(process) || !may_retire(process))
		return;
	mill_log(MILL_LOG_WARN, "executor_recycled", MILL_INT("pid", process->handle.pid),
	         MILL_TEXT("reason", "no more files can be opened"));
	retire(process);
}

void mill_pool_check_deliveries(struct mill_process *process)
{
	uint64_t limit = process->executor.pool->limits.max_deliveries;
	if (limit == 0 || process->executor.delivered < limit || !may_retire(process))
		return;
	mill_log(MILL_LOG_INFO, "executor_recycled", MILL_INT("pid", process->handle.pid),
	         MILL_INT("deliveries", process->executor.delivered));
	retire(process);
}

void mill_pool_on_watch(uv_timer_t *timer)
{
	struct mill_pool *pool = mill_container_of(timer, struct mill_pool, watch);
	uint64_t now = mill_clock_ns();
	bool needed = false;
	bool memory = now - pool->memory_checked_ns > MEMORY_CHECK_NS;
	if (memory)
		pool->memory_checked_ns = now;
	mill_list_each(node, &pool->processes)
	{
		struct mill_process *process = mill_process_at(node);
		watch_load(process, now);
		watch_processor(process, now);
		watch_reaction(process);
		watch_leaving(process, now);
		watch_wear(process);
		if (memory)
			watch_memory(process);
		needed |= process->state == MILL_PROCESS_STARTING ||
		          process->state == MILL_PROCESS_DRAINING ||
		          !mill_list_empty(&process->executor.sent);
	}
	if (!needed)
		uv_timer_stop(timer); /* an idle pool wakes nobody; a flush starts it again */
}
