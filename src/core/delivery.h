/*
 * A delivery: one claimed message on its way through the runtime.
 *
 *     CLAIMED ──► SENT ──► FINISHED ──► (the database said yes) ──► freed
 *        │          │          ▲
 *        └──────────┴──────────┘  given back: an outcome like any other
 *
 * A delivery is on exactly one list, and that list is its state; mill_delivery_move is the one
 * place that changes it. Runtime process.
 */
#pragma once

#include "core/config.h"
#include "core/list.h"
#include "core/message.h"

enum mill_delivery_state {
	MILL_DELIVERY_NEW,      /* on no list yet */
	MILL_DELIVERY_CLAIMED,  /* waits in dispatch for an executor */
	MILL_DELIVERY_SENT,     /* an executor has it */
	MILL_DELIVERY_FINISHED, /* its outcome waits in settle for the database */
};

/* What the ledger is told about a delivery that ended. */
enum mill_settlement {
	MILL_SETTLE_DONE,
	MILL_SETTLE_PENDING, /* again, after delay_secs */
	MILL_SETTLE_FAILED,  /* the dead letter */
	MILL_SETTLE_DISCARDED,
};

struct mill_lane_state;

/*
 * A subscription as the runtime works with it. It outlives reloads, so that what is under way keeps
 * its lane and counts against its limit: see flow/lanes.h.
 */
struct mill_lane {
	size_t index;   /* in the newest manifest: what its executors know it by */
	int32_t number; /* the ledger's lane, stamped on its rows */
	const struct mill_manifest_lane *spec; /* its own copy */
	size_t running; /* deliveries of this lane, from the claim to the settlement */
	size_t alone;   /* those of them that wait to run alone in an executor */
	bool unclaimed; /* declared, but not served here (run --only) */
	bool removed;   /* a reload took it away: what is under way ends, nothing new begins */
	struct mill_lane_state *claiming; /* claim's; NULL: it has none */
};

struct mill_delivery {
	struct mill_link_node node;
	enum mill_delivery_state state;
	uint64_t ticket;
	struct mill_lane *lane;
	uint8_t id[16];
	uint64_t claim; /* the number of the claim that took it: with the worker's id, its fence */
	uint32_t attempts, max_attempts;
	uint32_t crashes;
	struct mill_buffer frame; /* the DELIVER frame, until it is sent */
	uint64_t sent_ns;         /* when an executor got it; 0: none did */

	/* FINISHED: */
	enum mill_settlement settlement;
	double delay_secs;
	uint64_t took_ns;   /* from sent to the outcome; 0: it was never sent */
	bool refund;        /* the attempt is not counted */
	bool cancelled;     /* a person took it away while it was held here */
	bool crashed;       /* its executor died while it waited */
	bool written;       /* its executor wrote that it is done: nothing is left to do */
	char *error;        /* NULL: the row keeps what it has */
	char *publications; /* JSON array for publish_many, or NULL */
	unsigned refusals;  /* how often the database refused this settlement */
	unsigned setbacks;  /* the same, and how often its row was locked */
	uint64_t rest_ns;   /* not tried again before then */
	bool resent;        /* an answer was lost: it may be written already */
};

struct mill_delivery *mill_delivery_new(void);
/* Only off every list. */
void mill_delivery_free(struct mill_delivery *delivery);

/* Move a delivery to the list of another state. `from` NULL: it is new; `to` NULL: it is over. */
void mill_delivery_move(struct mill_delivery *delivery, struct mill_list *from,
                        struct mill_list *to, enum mill_delivery_state state);

/*
 * Decide what an outcome means for the ledger: done, again after a backoff, or the dead letter.
 * Copies the texts (cleaned and cut), fills the FINISHED part. `random` in [0, 1) is for the
 * jitter.
 */
void mill_delivery_conclude(struct mill_delivery *delivery, const struct mill_outcome *outcome,
                            double random);

/* The message's id as text, into 37 bytes. */
void mill_delivery_id_text(const struct mill_delivery *delivery, char text[37]);
