/*
 * A task from the inside: for task.c, which leads it through its life, and task_host.c, which
 * answers what Lua asks about it.
 *
 * Executor process only.
 */
#pragma once

#include "executor/task.h"

struct mill_task {
	struct mill_link_node node; /* on tasks->running or tasks->idle */
	struct mill_tasks *tasks;
	lua_State *co; /* NULL: the last one cannot be used again */
	int co_ref;
	uv_timer_t limit; /* runs from the first wait to the end */
	struct mill_wait wait;

	/* The delivery. */
	uint64_t ticket;
	const struct mill_manifest_lane *lane;
	const struct mill_deliver *starting; /* until the coroutine has taken it */
	uint64_t deadline_ns;
	char message_id[37];
	struct mill_speaker speaker;
	struct mill_buffer published_by, fence;
	struct mill_buffer publications; /* `[item,item` */
	struct mill_span result;         /* on the coroutine's stack, while it ends well */
};

/*
 * Add what modules ask about the delivery that runs to the table on top of the stack, which is
 * `tidemill.host`. May raise: call it protected.
 */
void mill_task_open_host(lua_State *L, struct mill_tasks *tasks);
