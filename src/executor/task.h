/*
 * Tasks: one coroutine for each delivery that runs, from DELIVER to exactly one OUTCOME.
 *
 * A task runs until its handler returns, raises or ends the delivery, and is suspended whenever it
 * waits for an op (ops.h). Past its time limit while suspended, or cancelled, it is dropped where
 * it stands: the op is cancelled, an error is raised inside it, and whatever it does then it is
 * never resumed again. What a handler does on the processor, this file cannot stop; the blame page
 * tells the runtime, which can.
 *
 * Executor process only. Knows nothing of sockets: outcomes are appended to a buffer.
 */
#pragma once

#include <uv.h>

#include "core/list.h"
#include "core/message.h"
#include "core/page.h"
#include "executor/load.h"
#include "executor/ops.h"
#include "executor/vm.h"

struct mill_tasks_options {
	uv_loop_t *loop;
	struct mill_vm *vm;
	const struct mill_loaded *loaded; /* filled before the first delivery */
	struct mill_page *page;
	struct mill_buffer *out; /* for OUTCOME, REQUEST and FILE frames */
	/*
	 * Called before a handler gets the processor. `quick`: the last time one of its lane had
	 * it, it gave it back soon; otherwise it may hold it for long.
	 */
	void (*before_run)(void *context, uint64_t now_ns, bool quick);
	void *context;
};

struct mill_task;

struct mill_tasks {
	struct mill_tasks_options options;
	struct mill_ops ops;
	struct mill_list running; /* suspended in an op, but for the one on the processor */
	struct mill_list idle;    /* for the next delivery, most with a coroutine that ended well */
	struct mill_task *current;
	/* References in the Lua registry. */
	int main_ref;    /* lua/tidemill/task.lua: runs one delivery */
	int waiting_ref; /* lua/tidemill/render.lua: a text with the traceback of a coroutine */
	int wait_ref;    /* the private value that await yields first */
	int mend_ref;    /* lua/tidemill/fences.lua: undoes what a handler changed for all */
	bool bent;       /* there is something to be undone */
	uint64_t code;   /* of the files that were loaded: goes into the manifest */
	const void *wait;
	bool *quick; /* of each lane, see before_run */
	/* The last created_at as text, since those of a batch are often of one second. */
	int64_t second;
	char second_text[32];
};

/* Adds what tasks need to `tidemill.host`. `tasks` must not move afterwards. */
int mill_tasks_init(struct mill_tasks *tasks, const struct mill_tasks_options *options,
                    struct mill_err *err);

/* Start a delivery; its lane is one of the manifest's. The spans are not kept. */
void mill_tasks_deliver(struct mill_tasks *tasks, const struct mill_deliver *deliver);

/* Drop a delivery with outcome DISCARD; one that has ended already is ignored. */
void mill_tasks_cancel(struct mill_tasks *tasks, const struct mill_cancel *cancel);

/*
 * Stop every timer and forget all deliveries without an outcome. The loop must turn until it is
 * empty before mill_tasks_fini, and the Lua state must still be open then.
 */
void mill_tasks_close(struct mill_tasks *tasks);
void mill_tasks_fini(struct mill_tasks *tasks);
