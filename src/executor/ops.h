/*
 * Ops: the things a handler can wait for, as a table of start and cancel functions.
 *
 * A wait is begun in Lua: lua/tidemill/await.lua yields a private value, an op's name and its
 * arguments, with no C frame in between. task.c then starts the op here; when it is over the op
 * wakes the task, and Lua fetches the result from inside the coroutine. So an op never enters Lua
 * itself, and dropping a delivery is: cancel the op, nothing else.
 *
 * Executor process only. Knows one wait, not the task it belongs to.
 */
#pragma once

#include <lua.h>
#include <uv.h>

#include "core/log.h"
#include "core/message.h"
#include "executor/host.h"

struct mill_http_client;
struct mill_transfer;
struct mill_clients;
struct mill_sql_use;
struct mill_wait;

struct mill_op {
	const char *name;
	/*
	 * Begin. The arguments stand on `co` from index `first` on, unchecked: a handler may call
	 * await itself; they stay there until the wait is woken or cancelled. 0: the wait will be
	 * woken, once, later; −1: `err` says why not. Allocates nothing in Lua.
	 */
	int (*start)(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err);
	/* Forget about it: the wait will not be woken any more. */
	void (*cancel)(struct mill_wait *wait);
	/* Push the result of a wait that went well, and return how many values. May raise. */
	int (*result)(struct mill_wait *wait, lua_State *L);
};

/* The op of that name, or NULL. */
const struct mill_op *mill_op_find(const char *name);

/* What all waits of an executor share. */
struct mill_ops {
	uv_loop_t *loop;
	struct mill_buffer *out; /* frames to the runtime; not owned */
	/*
	 * The op of this wait is over, `failed` and `reply` are set. They point into memory that is
	 * the op's again when wake returns.
	 */
	void (*wake)(struct mill_wait *wait);
	struct mill_wait **slots; /* every wait by its slot, so that a REPLY finds its own */
	uint32_t slot_count;
	uint32_t requests;             /* sent so far */
	struct mill_http_client *http; /* NULL until the first request */

	/* op_sql's: set when the settings are known; NULL before. */
	struct mill_clients *clients;
	const char *finish_sql, *finish_publishing_sql; /* the latter NULL: it cannot be done */
	uint64_t transactions;                          /* begun so far */
	struct mill_log_gates orphans;
};

void mill_ops_init(struct mill_ops *ops, uv_loop_t *loop, struct mill_buffer *out,
                   void (*wake)(struct mill_wait *wait));
/* Close what ops keep open between waits. No wait is on an op; the loop must turn once more. */
void mill_ops_close(struct mill_ops *ops);
/* After every wait was closed. */
void mill_ops_fini(struct mill_ops *ops);

/* A REPLY frame: wakes the wait that asked. One that no wait expects any more is dropped. */
void mill_ops_reply(struct mill_ops *ops, const struct mill_reply *reply);

/* Embedded in a task, which is on at most one op at a time. */
struct mill_wait {
	struct mill_ops *ops;
	const struct mill_op *op;    /* NULL: on none */
	const struct mill_op *ended; /* the last one that was woken, for its result() */
	bool failed;
	struct mill_span reply; /* failed: the error's text; else what result() makes values of */

	/* On whose behalf; set by the task before start. */
	uint64_t ticket;
	struct mill_span published_by;
	struct mill_span fence; /* claimed_by of its row; absent: it has none */
	const struct mill_speaker *speaker;
	struct mill_buffer *publications; /* what goes with its `done`: `[item,item` */

	/*
	 * Set by an op before wake: the delivery is over, and its handler is not to be resumed.
	 * `reply` is then the error of RAISED.
	 */
	bool ends;
	enum mill_outcome_kind ending;

	/* The ops' own. */
	uv_timer_t timer;
	uint32_t slot;
	uint64_t request; /* 0: none is out */
	struct mill_transfer *transfer;
	struct mill_sql_use *sql; /* NULL: never used */
};

/* Takes a slot and a timer for the life of the wait. */
void mill_wait_init(struct mill_wait *wait, struct mill_ops *ops);
/*
 * Give them back. The memory must stay until the loop has turned once more; the wait must be on no
 * op.
 */
void mill_wait_close(struct mill_wait *wait);

/* Start an op: as mill_op.start. */
int mill_wait_start(struct mill_wait *wait, const struct mill_op *op, lua_State *co, int first,
                    struct mill_err *err);
/* For an op: it is over, with this reply. Wakes the wait. */
void mill_wait_finish(struct mill_wait *wait, bool failed, struct mill_span reply);
/* Cancel the op it is on, if any. */
void mill_wait_cancel(struct mill_wait *wait);
/* The delivery is over: give back what it still holds. On no op. */
void mill_wait_release(struct mill_wait *wait);
