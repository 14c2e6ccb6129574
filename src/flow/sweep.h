/*
 * Sweeps: the housekeeping that any live worker does for all, from time to time.
 *
 * Rows written by hand get their lane, messages of dead or unknown workers go back, finished ones
 * are pruned, lanes nobody declares any more are removed and what waits in them is failed. Each is
 * one statement on a link of its own, in small batches; rows that somebody has locked are left for
 * the next time, and a table that is locked is waited for. Runtime process.
 */
#pragma once

#include "pg/store.h"

struct mill_sweep;

struct mill_sweep_options {
	struct mill_store *store;
	struct mill_link *link; /* the sweep link */
	double lease_secs;
	/* Something became claimable in this topic. */
	void (*on_work)(struct mill_span topic, void *context);
	void *context;
};

struct mill_sweep *mill_sweep_new(const struct mill_sweep_options *options);
/* The lease that sweeps keep time by has changed. */
void mill_sweep_set_lease(struct mill_sweep *sweep, double lease_secs);
/* Only after the link is closed. */
void mill_sweep_free(struct mill_sweep *sweep);

/* Start the sweeps that are due; about once a second, while the link is up. */
void mill_sweep_turn(struct mill_sweep *sweep);
