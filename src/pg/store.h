/*
 * The ledger as typed calls: what the runtime asks of the database, without SQL and without libpq.
 *
 * A store fills in the statements for one schema; the calls send one exchange each on a link that
 * was made with mill_store_statements. Answers come as link.h says: later, exactly once; rows are
 * read with the functions below, during the callback. Only the store knows which shape of table it
 * works on (queries.h): on a plain one, what the table has no place for is done without.
 *
 * Runtime process.
 */
#pragma once

#include "core/delivery.h"
#include "pg/link.h"
#include "pg/queries.h"

struct mill_store;

struct mill_store_options {
	const char *schema, *table, *prefix; /* plain identifiers */
	int64_t max_payload_bytes;
	enum mill_shape shape;
	/* For a plain table, where no setting in the database says so: */
	bool notify;          /* whether publishing notifies */
	int64_t retain_hours; /* of what was published to nobody; 0 keeps it */
};
struct mill_store *mill_store_new(const struct mill_store_options *options);
void mill_store_free(struct mill_store *store);
/*
 * What a person can do about the dead letter `id`, for its line in the log; written to `hint`. NULL
 * on a plain table, which no command of ours looks at.
 */
#define MILL_STORE_HINT 160
const char *mill_store_failed_hint(const struct mill_store *store, const char *id,
                                   char hint[MILL_STORE_HINT]);

/* Which statements a link prepares. */
enum mill_store_use {
	MILL_USE_WORK,
	MILL_USE_LEASE,
	MILL_USE_SWEEP,
	MILL_USE_PUBLISH,
	MILL_USE_LISTEN,
};
/* Fill in statements, statement_count and prepared of a link's options. */
void mill_store_statements(const struct mill_store *store, enum mill_store_use use,
                           struct mill_link_options *options);

/* Name the worker whose claims are to be fenced: from now on tokens begin with this id. */
void mill_store_set_worker(struct mill_store *store, const char *worker_id);
/* What claimed_by says of the messages of a claim. Lies in `text`. */
#define MILL_STORE_FENCE_MAX 200
struct mill_span mill_store_fence(const struct mill_store *store, uint64_t claim,
                                  char text[MILL_STORE_FENCE_MAX]);

/* ---- claim, on the work link --------------------------------------------------------------- */

#define MILL_PRIORITY_LEAST (-9)
#define MILL_PRIORITY_MOST 9
#define MILL_PRIORITIES (MILL_PRIORITY_MOST - MILL_PRIORITY_LEAST + 1)

/* One lane of a claim: how many, and for each priority from which due time on (µs since 2000). */
struct mill_store_want {
	int32_t lane;
	int32_t count;
	int64_t low[MILL_PRIORITIES];
};

/* Claim at most `most` messages in all under claim number `claim`. */
void mill_store_claim(struct mill_store *store, struct mill_link *link, uint64_t claim,
                      const struct mill_store_want *wants, size_t want_count, int32_t most,
                      mill_link_done done, void *context);

/* One claimed row. Spans lie in the results. */
struct mill_store_claimed {
	uint8_t id[16];
	int32_t lane, priority;
	int64_t available_at; /* µs since 2000, for the low-water mark */
	int64_t seq;
	int32_t attempts;
	int32_t max_attempts; /* 0: the lane's */
	int32_t crashes;
	int64_t created_at; /* µs since 1970 */
	struct mill_span published_by;
	struct mill_span headers; /* empty: they are larger than 65536 bytes */
	struct mill_span payload; /* absent: it is larger than max_payload_bytes */
};
size_t mill_store_claimed_count(const struct mill_results *results);
void mill_store_claimed_row(const struct mill_results *results, size_t i,
                            struct mill_store_claimed *row);

/* When the first waiting message of each lane is due. */
void mill_store_due(struct mill_store *store, struct mill_link *link, const int32_t *lanes,
                    size_t count, mill_link_done done, void *context);
size_t mill_store_due_count(const struct mill_results *results);
/* Seconds from now, negative when it is due already. */
void mill_store_due_row(const struct mill_results *results, size_t i, int32_t *lane, double *secs);

/*
 * Give back what a claim took whose reply was lost; attempts refunded. `wants` are those of the
 * claim. A deep lane is searched no farther than where its claim can have been: when that was cut
 * short, look again when the lane has moved on.
 */
void mill_store_undo_claim(struct mill_store *store, struct mill_link *link, uint64_t claim,
                           const struct mill_store_want *wants, size_t want_count,
                           mill_link_done done, void *context);
size_t mill_store_undone_count(const struct mill_results *results);
bool mill_store_undo_was_cut(const struct mill_results *results);

/* ---- settle -------------------------------------------------------------------------------- */

/*
 * Write the outcomes of `count` deliveries, sorted by id, all of one kind: done without
 * publications, or not done. The rows returned are those that were still ours and not locked.
 */
void mill_store_settle(struct mill_store *store, struct mill_link *work,
                       struct mill_delivery *const *deliveries, size_t count, mill_link_done done,
                       void *context);
/*
 * Write that one delivery is done together with what it published. On the publish link: a
 * dedupe key that somebody else is publishing makes it fail with a lock timeout, soon.
 */
void mill_store_settle_publishing(struct mill_store *store, struct mill_link *publish,
                                  const struct mill_delivery *delivery, mill_link_done done,
                                  void *context);
/* Of deliveries that could not be written, the rows returned are those that are still ours. */
void mill_store_ask_held(struct mill_store *store, struct mill_link *work,
                         struct mill_delivery *const *deliveries, size_t count, mill_link_done done,
                         void *context);
size_t mill_store_settled_count(const struct mill_results *results);
void mill_store_settled_id(const struct mill_results *results, size_t i, uint8_t id[16]);

/* ---- publish, on the publish link ------------------------------------------------------------ */

void mill_store_publish(struct mill_store *store, struct mill_link *link, struct mill_span request,
                        struct mill_span published_by, mill_link_done done, void *context);
/* {"id", "topic", "delivered", "duplicate"} */
struct mill_span mill_store_published(const struct mill_results *results);
/*
 * Of an answer to mill_store_publish or mill_store_settle_publishing: the topics, separated by
 * blanks, that were published to and to which nobody subscribes; absent when there are none.
 */
struct mill_span mill_store_unwanted(const struct mill_results *results);

/* ---- lanes and leases, on the lease link --------------------------------------------------- */

/*
 * Upsert the manifest's lanes and read their numbers. Another app's pair changes nothing. What is
 * published to a plain table from now on goes to these lanes.
 */
void mill_store_register_lanes(struct mill_store *store, struct mill_link *link,
                               const struct mill_manifest *manifest, mill_link_done done,
                               void *context);
/* The number of the manifest's lane `i` and the app that owns it (absent: it is gone again). */
int32_t mill_store_registered_lane(const struct mill_results *results, size_t i,
                                   struct mill_span *app);

struct mill_store_worker {
	const char *app, *host;
	int32_t pid;
	int32_t lease_secs;
	int32_t generation;
	const int32_t *lanes;
	size_t lane_count;
};
/* Write the row of the worker named by mill_store_set_worker. */
void mill_store_register_worker(struct mill_store *store, struct mill_link *link,
                                const struct mill_store_worker *worker, mill_link_done done,
                                void *context);
/* Change what it declares; a renewal, too: mill_store_renewed tells. */
void mill_store_declare_worker(struct mill_store *store, struct mill_link *link,
                               const struct mill_store_worker *worker, mill_link_done done,
                               void *context);
void mill_store_renew(struct mill_store *store, struct mill_link *link, mill_link_done done,
                      void *context);
/* Did the renewal find the lease still alive? */
bool mill_store_renewed(const struct mill_results *results);
/* Of a renewal that did: are all lanes that the worker declares still registered? */
bool mill_store_lanes_stand(const struct mill_results *results);
void mill_store_leave(struct mill_store *store, struct mill_link *link, mill_link_done done,
                      void *context);

/* ---- sweeps and notifications, on the sweep link ------------------------------------------- */

/*
 * Run one sweep of queries.h (stamp, reclaim_…, prune…, remove_lanes, adopt) over at most `most`
 * rows; reclaiming from the dead buries those that hold nothing any more.
 */
void mill_store_sweep(struct mill_store *store, struct mill_link *link, enum mill_query query,
                      int32_t most, int32_t lease_secs, mill_link_done done, void *context);
struct mill_store_swept {
	uint8_t id[16]; /* zeros for a lane */
	struct mill_span topic, subscriber;
	bool failed; /* it became a dead letter */
	int32_t attempts;
	struct mill_span error;
};
size_t mill_store_swept_count(const struct mill_results *results);
void mill_store_swept_row(const struct mill_results *results, size_t i,
                          struct mill_store_swept *row);
/* Tell everybody that these topics have something again. */
void mill_store_notify(struct mill_store *store, struct mill_link *link,
                       const struct mill_span *topics, size_t count, mill_link_done done,
                       void *context);
/* The same on the control channel, `probe …`; on the lease link. */
void mill_store_notify_control(struct mill_store *store, struct mill_link *link,
                               struct mill_span payload, mill_link_done done, void *context);
