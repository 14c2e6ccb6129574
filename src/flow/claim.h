/*
 * Claim: when to ask the ledger for work, for which lanes, and how much.
 *
 * A lane is READY when something may be claimable in it, and IDLE when a claim came back short:
 * then it waits for a notification, for its next due time, or for the poll. Runtime process. Knows
 * the store; deliveries leave through a callback, capacity comes from one.
 */
#pragma once

#include "flow/lanes.h"
#include "pg/store.h"

struct mill_claim;

struct mill_claim_options {
	uv_loop_t *loop;
	struct mill_store *store;
	struct mill_link *work;
	struct mill_lanes *lanes; /* stay with the caller, and outlive the claim */
	size_t batch;
	double poll_secs;
	/* How many more deliveries the executors can hold. */
	size_t (*room)(void *context);
	/* Takes over a claimed message; `deliver` has its frame's fields, all but the ticket. */
	void (*on_claimed)(struct mill_delivery *delivery, struct mill_deliver *deliver,
	                   void *context);
	/* A message that cannot be delivered was claimed to fail: FINISHED part to be filled. */
	void (*on_refused)(struct mill_delivery *delivery, const char *reason, void *context);
	void *context;
};

struct mill_claim *mill_claim_new(const struct mill_claim_options *options);
/*
 * The lanes were declared anew (see lanes.h), or got other numbers: all are looked at again. A
 * claim in flight still brings messages of lanes that were taken away.
 */
void mill_claim_follow(struct mill_claim *claim, size_t batch, double poll_secs);
/* Stop claiming. What is in flight still arrives and is handed over. */
void mill_claim_stop(struct mill_claim *claim);
/* Claims whose answer is awaited, or whose lost answer is still to be undone. */
bool mill_claim_is_settled(const struct mill_claim *claim);
/* Only after the work link is closed. */
void mill_claim_close(struct mill_claim *claim, void (*on_closed)(void *context), void *context);

/* Something may be there in the lanes of this topic, in this lane, in all lanes. */
void mill_claim_wake_topic(struct mill_claim *claim, struct mill_span topic);
void mill_claim_wake_all(struct mill_claim *claim);
/* A message of this lane went back, to be due again in so many seconds. */
void mill_claim_expect(struct mill_claim *claim, const struct mill_lane *lane, double secs);

/* Send a claim if there is a reason and room for one; once a turn of the loop. */
void mill_claim_turn(struct mill_claim *claim);

/*
 * Nothing is claimable, nor will be within a second: every lane was looked at from the beginning
 * and the answer came back short.
 */
bool mill_claim_is_idle(const struct mill_claim *claim);

/* Forget claims under an old worker id whose answers were lost: they are nobody's any more. */
void mill_claim_forget(struct mill_claim *claim);
