/*
 * Settle: outcomes become rows.
 *
 * Group commit: outcomes gather while a write is in flight, so it writes one when idle and hundreds
 * under load. It keeps each until the database has acknowledged it, across reconnects; a write
 * whose answer was lost is sent again, and the fence makes the second harmless. One row that cannot
 * be written never holds up the others.
 *
 * Runtime process. Knows the store; neither executors nor lanes' options.
 */
#pragma once

#include "core/delivery.h"
#include "flow/orphan.h"
#include "pg/store.h"

struct mill_settle;

struct mill_settle_options {
	uv_loop_t *loop;
	struct mill_store *store;
	struct mill_link *work, *publish;
	struct mill_orphans *orphans; /* borrowed */
	/* A delivery is over, by whatever end; it is freed after the call. */
	void (*on_settled)(struct mill_delivery *delivery, void *context);
	void *context;
};

struct mill_settle *mill_settle_new(const struct mill_settle_options *options);
/* Close its timer and free it; only when it holds nothing. */
void mill_settle_close(struct mill_settle *settle, void (*on_closed)(void *context), void *context);

/* Take over a finished delivery. */
void mill_settle_take(struct mill_settle *settle, struct mill_delivery *delivery);
/* Send what has gathered; once a turn of the loop. */
void mill_settle_turn(struct mill_settle *settle);
/* Deliveries whose outcome the database has not acknowledged. */
size_t mill_settle_held(const struct mill_settle *settle);

/* The worker lost its lease: what is held is no longer ours to write. Forget it all. */
void mill_settle_forget(struct mill_settle *settle);
