/*
 * Dispatch: which executor gets which delivery, and what its end means.
 *
 * It holds deliveries from the claim to their outcome (CLAIMED, SENT) and hands them on to settle.
 * Runtime process. Knows neither SQL nor how executors are started.
 */
#pragma once

#include "flow/pool.h"

struct mill_dispatch;

struct mill_dispatch_options {
	/* Takes over a delivery whose outcome is known (FINISHED part filled, on no list). */
	void (*on_finished)(struct mill_delivery *delivery, void *context);
	void *context;
};

struct mill_dispatch *mill_dispatch_new(const struct mill_dispatch_options *options);
/* Only when it holds nothing. */
void mill_dispatch_free(struct mill_dispatch *dispatch);

/* How many more deliveries can be taken. */
size_t mill_dispatch_room(const struct mill_dispatch *dispatch, struct mill_pool *pool);
/* Deliveries it holds, waiting or sent. */
size_t mill_dispatch_held(const struct mill_dispatch *dispatch);

/*
 * Take over a new delivery; dispatch gives it a ticket, and its lane's index when it is sent.
 * `deliver` has the rest of the frame.
 */
void mill_dispatch_take(struct mill_dispatch *dispatch, struct mill_delivery *delivery,
                        struct mill_deliver *deliver);
/* Send what waits to executors that have room. */
void mill_dispatch_send(struct mill_dispatch *dispatch, struct mill_pool *pool);
/* Give back what was not sent: nothing of it has started. */
void mill_dispatch_release(struct mill_dispatch *dispatch);
/* The same of lanes that a reload took away. */
void mill_dispatch_release_removed(struct mill_dispatch *dispatch);

/* What the pool reports. An outcome for a ticket that is not its own is ignored (an executor's
 * handler may have forged the frame). */
void mill_dispatch_outcome(struct mill_dispatch *dispatch, struct mill_executor *executor,
                           const struct mill_outcome *outcome);
void mill_dispatch_gone(struct mill_dispatch *dispatch, struct mill_executor *executor,
                        const struct mill_executor_death *death);

/* The delivery of a ticket that `executor` has, or NULL. */
struct mill_delivery *mill_dispatch_find(struct mill_dispatch *dispatch,
                                         const struct mill_executor *executor, uint64_t ticket);

/*
 * A person cancelled a message: where it runs, it is stopped at its next wait. The ledger has it as
 * discarded already, so whatever its outcome is, the fence refuses it.
 */
void mill_dispatch_cancel(struct mill_dispatch *dispatch, const uint8_t id[16]);
