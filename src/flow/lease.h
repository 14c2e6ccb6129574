/*
 * Lease: that this worker is known and alive, and what is done about those that are not.
 *
 * Registers lanes and worker and renews the lease, on a link of its own that touches neither the
 * ledger nor what publishers do, so that no lock can delay a renewal; and keeps the sweeps going
 * (sweep.h), on another. Runtime process.
 */
#pragma once

#include "core/delivery.h"
#include "pg/store.h"

struct mill_lease;

struct mill_lease_options {
	uv_loop_t *loop;
	struct mill_store *store;
	struct mill_link *link;               /* the lease link */
	struct mill_link *sweep_link;         /* may wait for a lock; a renewal must not */
	const struct mill_manifest *manifest; /* stays with the caller */
	uint32_t generation;
	/*
	 * Lanes and worker are registered: claims may begin. After each mill_lease_register.
	 * `numbers` are the lanes', in the manifest's order.
	 */
	void (*on_registered)(const int32_t *numbers, void *context);
	/* The manifest given to mill_lease_declare holds now. */
	void (*on_declared)(const int32_t *numbers, void *context);
	/* Another app owns one of its pairs: the manifest before it still holds. */
	void (*on_declare_refused)(const struct mill_err *err, void *context);
	/* Somebody had deleted lanes from the database: they are there again, under these numbers.
	 */
	void (*on_renumbered)(const int32_t *numbers, void *context);
	/* Another app owns one of the pairs: this one cannot run. */
	void (*on_refused)(const struct mill_err *err, void *context);
	/* The lease is over: to the others this worker is dead. Comes once per registration. */
	void (*on_dead)(void *context);
	/* Something became claimable in this topic. */
	void (*on_work)(struct mill_span topic, void *context);
	void *context;
};

struct mill_lease *mill_lease_new(const struct mill_lease_options *options);

/*
 * Take a new worker id and register; waits for the link. Call it at start, and after on_dead when
 * nothing of the old life runs any more.
 */
void mill_lease_register(struct mill_lease *lease);
/*
 * Register another manifest under the same worker and lease, as soon as both can be had; it stays
 * with the caller, as does the one before until on_declared. One at a time.
 */
void mill_lease_declare(struct mill_lease *lease, const struct mill_manifest *manifest,
                        uint32_t generation);
const char *mill_lease_worker_id(const struct mill_lease *lease);

/*
 * Before anything is done in the name of this worker: its lease may have ended while the process
 * was stopped. Once a turn of the loop.
 */
void mill_lease_check(struct mill_lease *lease);
/* The link came up: renew, register, sweep. */
void mill_lease_link_up(struct mill_lease *lease);

/*
 * An orderly end: delete the worker's row. While the link is down it waits for it, and the caller's
 * patience ends that by closing; otherwise `on_left` comes.
 */
void mill_lease_leave(struct mill_lease *lease, void (*on_left)(void *context), void *context);
/* Only after the lease link is closed. */
void mill_lease_close(struct mill_lease *lease, void (*on_closed)(void *context), void *context);
