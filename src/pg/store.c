/*
 * The ledger as typed calls, the messages' part: see store.h; the workers' is in store_workers.c.
 * Each function is one exchange; columns are read by number.
 */
#include <stdio.h>

#include "core/policy.h"
#include "pg/refusal.h"
#include "pg/store_state.h"

#define HISTORY_ERROR_MAX 500
#define UNDO_PASSES 1000 /* messages that wait, in each range */
#define BIT(query) (UINT64_C(1) << (query))

static const uint64_t uses[] = {
	[MILL_USE_WORK] = BIT(MILL_QUERY_PIN) | BIT(MILL_QUERY_CLAIM) | BIT(MILL_QUERY_DUE) |
	                  BIT(MILL_QUERY_UNDO_CLAIM) | BIT(MILL_QUERY_SETTLE_DONE) |
	                  BIT(MILL_QUERY_SETTLE_BACK) | BIT(MILL_QUERY_STILL_HELD) |
	                  BIT(MILL_QUERY_NOTIFY),
	[MILL_USE_LEASE] = BIT(MILL_QUERY_REGISTER_LANES) | BIT(MILL_QUERY_READ_LANES) |
	                   BIT(MILL_QUERY_REGISTER_WORKER) | BIT(MILL_QUERY_DECLARE_WORKER) |
	                   BIT(MILL_QUERY_RENEW) | BIT(MILL_QUERY_LEAVE) |
	                   BIT(MILL_QUERY_NOTIFY_CONTROL),
	[MILL_USE_SWEEP] = BIT(MILL_QUERY_PIN) | BIT(MILL_QUERY_STAMP) |
	                   BIT(MILL_QUERY_RECLAIM_DEAD) | BIT(MILL_QUERY_RECLAIM_UNKNOWN) |
	                   BIT(MILL_QUERY_BURY) | BIT(MILL_QUERY_PRUNE) |
	                   BIT(MILL_QUERY_PRUNE_DISCARDED) | BIT(MILL_QUERY_REMOVE_LANES) |
	                   BIT(MILL_QUERY_ADOPT) | BIT(MILL_QUERY_NOTIFY),
	[MILL_USE_PUBLISH] = BIT(MILL_QUERY_PATIENCE) | BIT(MILL_QUERY_SETTLE_PUBLISHING) |
	                     BIT(MILL_QUERY_PUBLISH),
	[MILL_USE_LISTEN] = 0,
};

struct mill_store *mill_store_new(const struct mill_store_options *options)
{
	struct mill_store *store = mill_calloc(1, sizeof(*store));
	bool plain = options->shape == MILL_SHAPE_PLAIN;
	for (size_t i = 0; i < MILL_QUERY_COUNT; i++) {
		const struct mill_query_text *text = &mill_queries[i];
		if (plain && mill_plain_queries[i].name != NULL)
			text = &mill_plain_queries[i];
		store->statements[i].name = text->name;
		store->statements[i].sql = mill_query_fill(text->sql, options->schema,
		                                           options->table, options->prefix);
	}
	store->max_payload_bytes = options->max_payload_bytes;
	store->pairs = plain ? mill_pairs_new() : NULL;
	store->notify = options->notify;
	store->retain_hours = (int32_t)options->retain_hours;
	return store;
}

void mill_store_free(struct mill_store *store)
{
	for (size_t i = 0; i < MILL_QUERY_COUNT; i++)
		free((char *)store->statements[i].sql);
	mill_pairs_free(store->pairs);
	free(store->worker_id);
	mill_params_free(&store->params);
	free(store);
}

void mill_store_statements(const struct mill_store *store, enum mill_store_use use,
                           struct mill_link_options *options)
{
	options->statements = store->statements;
	options->statement_count = MILL_QUERY_COUNT;
	options->prepared = uses[use];
}

void mill_store_set_worker(struct mill_store *store, const char *worker_id)
{
	free(store->worker_id);
	store->worker_id = mill_strdup(worker_id);
}

/* What claimed_by says of a claim: never used twice. */
static struct mill_span token(const struct mill_store *store, uint64_t claim, char *text,
                              size_t size)
{
	int len = snprintf(text, size, "%s#%llu", store->worker_id, (unsigned long long)claim);
	MILL_ASSERT(len > 0 && (size_t)len < size);
	return (struct mill_span){ text, (size_t)len };
}

struct mill_span mill_store_fence(const struct mill_store *store, uint64_t claim,
                                  char text[MILL_STORE_FENCE_MAX])
{
	return token(store, claim, text, MILL_STORE_FENCE_MAX);
}

struct mill_params *mill_store_params(struct mill_store *store)
{
	mill_params_clear(&store->params);
	return &store->params;
}

/* An exchange of one statement with its plan pinned: its result is number 1. */
static void send_pinned(struct mill_link *link, enum mill_query query, const struct mill_params *p,
                        mill_link_done done, void *context)
{
	mill_link_begin(link);
	mill_link_add(link, MILL_QUERY_PIN, NULL);
	mill_link_add(link, query, p);
	mill_link_end(link, done, context);
}

void mill_store_copy_id(const struct mill_rowset *rows, int row, int column, uint8_t id[16])
{
	struct mill_span span = mill_rowset_span(rows, row, column);
	MILL_ASSERT(span.len == 16);
	memcpy(id, span.data, 16);
}

/* What the statements for a plain table that publish are told besides. */
static void publish_params(const struct mill_store *store, struct mill_params *p)
{
	if (store->pairs == NULL)
		return;
	mill_pairs_params(store->pairs, p);
	mill_params_int4(p, (int32_t)store->max_payload_bytes);
	mill_params_bool(p, store->notify);
}

/* ---- claim --------------------------------------------------------------------------------- */

/* $3 to $5 where a table has no lanes: the pairs, and where to begin. It has one priority. */
static void plain_range_params(const struct mill_store *store, struct mill_params *p,
                               const struct mill_store_want *wants, size_t count)
{
	int32_t *numbers = mill_alloc(count * sizeof(numbers[0]));
	for (size_t i = 0; i < count; i++)
		numbers[i] = wants[i].lane;
	mill_pairs_params_of(store->pairs, p, numbers, count);
	free(numbers);
	mill_params_array(p, MILL_TYPE_TIMESTAMPTZ);
	for (size_t i = 0; i < count; i++)
		mill_element_int8(p, wants[i].low[0 - MILL_PRIORITY_LEAST]);
	mill_params_array_end(p);
}

/* A probe for each priority of each lane: the priority, and where it begins. */
static void probe_params(struct mill_params *p, const struct mill_store_want *wants, size_t count)
{
	mill_params_array(p, MILL_TYPE_INT2);
	for (size_t i = 0; i < count; i++)
		for (int16_t at = 0; at < MILL_PRIORITIES; at++)
			mill_element_int2(p, (int16_t)(MILL_PRIORITY_LEAST + at));
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_TIMESTAMPTZ);
	for (size_t i = 0; i < count; i++)
		for (size_t at = 0; at < MILL_PRIORITIES; at++)
			mill_element_int8(p, wants[i].low[at]);
	mill_params_array_end(p);
}

/* $3 to $6 of a ledger: which probes are whose, and the probes. */
static void range_params(struct mill_params *p, const struct mill_store_want *wants, size_t count)
{
	for (int32_t end = 1; end <= MILL_PRIORITIES; end += MILL_PRIORITIES - 1) {
		mill_params_array(p, MILL_TYPE_INT4);
		for (size_t i = 0; i < count; i++)
			mill_element_int4(p, (int32_t)i * MILL_PRIORITIES + end);
		mill_params_array_end(p);
	}
	probe_params(p, wants, count);
}

void mill_store_claim(struct mill_store *store, struct mill_link *link, uint64_t claim,
                      const struct mill_store_want *wants, size_t want_count, int32_t most,
                      mill_link_done done, void *context)
{
	struct mill_params *p = mill_store_params(store);
	char text[200];
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < want_count; i++)
		mill_element_int4(p, wants[i].lane);
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < want_count; i++)
		mill_element_int4(p, wants[i].count);
	mill_params_array_end(p);
	if (store->pairs != NULL)
		plain_range_params(store, p, wants, want_count);
	else
		range_params(p, wants, want_count);
	mill_params_int4(p, most);
	mill_params_text(p, token(store, claim, text, sizeof(text)));
	mill_params_int4(p, (int32_t)store->max_payload_bytes);
	send_pinned(link, MILL_QUERY_CLAIM, p, done, context);
}

size_t mill_store_claimed_count(const struct mill_results *results)
{
	return (size_t)mill_rowset_count(mill_results_at(results, 1));
}

void mill_store_claimed_row(const struct mill_results *results, size_t i,
                            struct mill_store_claimed *row)
{
	const struct mill_rowset *rows = mill_results_at(results, 1);
	int at = (int)i;
	mill_store_copy_id(rows, at, 0, row->id);
	row->lane = mill_rowset_int(rows, at, 1);
	row->priority = mill_rowset_int(rows, at, 2);
	row->available_at = mill_rowset_int8(rows, at, 3);
	row->seq = mill_rowset_int8(rows, at, 4);
	row->attempts = mill_rowset_int(rows, at, 5);
	row->max_attempts = mill_rowset_int(rows, at, 6);
	row->crashes = mill_rowset_int(rows, at, 7);
	int64_t created_at = mill_rowset_int8(rows, at, 8); /* by hand, perhaps infinity */
	row->created_at = created_at > INT64_MAX - MILL_PG_EPOCH_US ? INT64_MAX
	                                                            : created_at + MILL_PG_EPOCH_US;
	row->published_by = mill_rowset_span(rows, at, 9);
	row->headers = mill_rowset_span(rows, at, 10);
	row->payload = mill_rowset_span(rows, at, 11);
}

void mill_store_due(struct mill_store *store, struct mill_link *link, const int32_t *lanes,
                    size_t count, mill_link_done done, void *context)
{
	struct mill_params *p = mill_store_params(store);
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < count; i++)
		mill_element_int4(p, lanes[i]);
	mill_params_array_end(p);
	if (store->pairs != NULL)
		mill_pairs_params_of(store->pairs, p, lanes, count);
	send_pinned(link, MILL_QUERY_DUE, p, done, context);
}

size_t mill_store_due_count(const struct mill_results *results)
{
	return (size_t)mill_rowset_count(mill_results_at(results, 1));
}

void mill_store_due_row(const struct mill_results *results, size_t i, int32_t *lane, double *secs)
{
	const struct mill_rowset *rows = mill_results_at(results, 1);
	*lane = mill_rowset_int(rows, (int)i, 0);
	*secs = mill_rowset_float8(rows, (int)i, 1);
}

/* $2 to $4 of undo_claim: each priority of each lane. */
static void undo_range_params(struct mill_params *p, const struct mill_store_want *wants,
                              size_t count)
{
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < count * MILL_PRIORITIES; i++)
		mill_element_int4(p, wants[i / MILL_PRIORITIES].lane);
	mill_params_array_end(p);
	probe_params(p, wants, count);
}

void mill_store_undo_claim(struct mill_store *store, struct mill_link *link, uint64_t claim,
                           const struct mill_store_want *wants, size_t want_count,
                           mill_link_done done, void *context)
{
	char text[200];
	struct mill_params *p = mill_store_params(store);
	mill_params_text(p, token(store, claim, text, sizeof(text)));
	if (store->pairs == NULL) {
		undo_range_params(p, wants, want_count);
		mill_params_int4(p, UNDO_PASSES);
	}
	send_pinned(link, MILL_QUERY_UNDO_CLAIM, p, done, context);
}

size_t mill_store_undone_count(const struct mill_results *results)
{
	return (size_t)mill_rowset_int8(mill_results_at(results, 1), 0, 0);
}

bool mill_store_undo_was_cut(const struct mill_results *results)
{
	return mill_rowset_bool(mill_results_at(results, 1), 0, 1);
}

/* ---- settle -------------------------------------------------------------------------------- */

static const char *const statuses[] = {
	[MILL_SETTLE_DONE] = "done",
	[MILL_SETTLE_PENDING] = "pending",
	[MILL_SETTLE_FAILED] = "failed",
	[MILL_SETTLE_DISCARDED] = "discarded",
};

/* $1 and $2 of both statements: which messages, and by which claim they are ours. */
static void held_params(struct mill_store *store, struct mill_params *p,
                        struct mill_delivery *const *deliveries, size_t count)
{
	char text[200];
	mill_params_array(p, MILL_TYPE_UUID);
	for (size_t i = 0; i < count; i++)
		mill_element_uuid(p, deliveries[i]->id);
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_TEXT);
	for (size_t i = 0; i < count; i++)
		mill_element_text(p, token(store, deliveries[i]->claim, text, sizeof(text)));
	mill_params_array_end(p);
}

/* $3 to $8 of settle_back. */
static void back_params(struct mill_params *p, struct mill_delivery *const *deliveries,
                        size_t count)
{
	mill_params_array(p, MILL_TYPE_TEXT);
	for (size_t i = 0; i < count; i++)
		mill_element_text(p, MILL_SPAN(statuses[deliveries[i]->settlement]));
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_FLOAT8);
	for (size_t i = 0; i < count; i++)
		mill_element_float8(p, deliveries[i]->delay_secs);
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_TEXT);
	for (size_t i = 0; i < count; i++)
		mill_element_text(p, deliveries[i]->error ? MILL_SPAN(deliveries[i]->error)
		                                          : MILL_SPAN_NONE);
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_TEXT);
	for (size_t i = 0; i < count; i++) {
		const char *error = deliveries[i]->error;
		if (error == NULL) {
			mill_element_text(p, MILL_SPAN_NONE);
			continue;
		}
		char *short_error = mill_policy_clean_text(error, strlen(error), HISTORY_ERROR_MAX);
		mill_element_text(p, MILL_SPAN(short_error));
		free(short_error);
	}
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < count; i++)
		mill_element_int4(p, deliveries[i]->refund);
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < count; i++)
		mill_element_int4(p, deliveries[i]->crashed);
	mill_params_array_end(p);
}

/* Each topic once, of the messages that go back to their lanes. */
static bool topic_params(struct mill_params *p, struct mill_delivery *const *deliveries,
                         size_t count)
{
	bool any = false;
	mill_params_array(p, MILL_TYPE_TEXT);
	for (size_t i = 0; i < count; i++) {
		if (deliveries[i]->settlement != MILL_SETTLE_PENDING)
			continue;
		const char *topic = deliveries[i]->lane->spec->topic;
		bool known = false;
		for (size_t j = 0; j < i && !known; j++)
			known = deliveries[j]->settlement == MILL_SETTLE_PENDING &&
			        strcmp(deliveries[j]->lane->spec->topic, topic) == 0;
		if (!known)
			mill_element_text(p, MILL_SPAN(topic));
		any = true;
	}
	mill_params_array_end(p);
	return any;
}

void mill_store_settle(struct mill_store *store, struct mill_link *work,
                       struct mill_delivery *const *deliveries, size_t count, mill_link_done done,
                       void *context)
{
	bool is_done = deliveries[0]->settlement == MILL_SETTLE_DONE;
	struct mill_params *p = mill_store_params(store);
	held_params(store, p, deliveries, count);
	if (!is_done)
		back_params(p, deliveries, count);
	mill_link_begin(work);
	mill_link_add(work, MILL_QUERY_PIN, NULL);
	mill_link_add(work, is_done ? MILL_QUERY_SETTLE_DONE : MILL_QUERY_SETTLE_BACK, p);
	if (!is_done) {
		p = mill_store_params(store);
		if (topic_params(p, deliveries, count))
			mill_link_add(work, MILL_QUERY_NOTIFY, p);
	}
	mill_link_end(work, done, context);
}

void mill_store_ask_held(struct mill_store *store, struct mill_link *work,
                         struct mill_delivery *const *deliveries, size_t count, mill_link_done done,
                         void *context)
{
	struct mill_params *p = mill_store_params(store);
	held_params(store, p, deliveries, count);
	send_pinned(work, MILL_QUERY_STILL_HELD, p, done, context);
}

size_t mill_store_settled_count(const struct mill_results *results)
{
	return (size_t)mill_rowset_count(mill_results_at(results, 1));
}

void mill_store_settled_id(const struct mill_results *results, size_t i, uint8_t id[16])
{
	mill_store_copy_id(mill_results_at(results, 1), (int)i, 0, id);
}

const char *mill_store_failed_hint(const struct mill_store *store, const char *id,
                                   char hint[MILL_STORE_HINT])
{
	if (store->pairs != NULL)
		return NULL;
	snprintf(hint, MILL_STORE_HINT,
	         "a dead letter: `tidemill failed show %s`, then `tidemill failed retry %s`", id,
	         id);
	return hint;
}

/* ---- publish ------------------------------------------------------------------------------- */

static void send_publishing(struct mill_store *store, struct mill_link *link, enum mill_query query,
                            const struct mill_params *p, mill_link_done done, void *context)
{
	mill_link_begin(link);
	mill_link_add(link, MILL_QUERY_PATIENCE, NULL);
	mill_link_add(link, query, p);
	if (store->pairs == NULL)
		mill_link_end(link, done, context);
	else
		mill_refusal_end(link, done, context);
}

void mill_store_settle_publishing(struct mill_store *store, struct mill_link *publish,
                                  const struct mill_delivery *delivery, mill_link_done done,
                                  void *context)
{
	char text[200];
	struct mill_params *p = mill_store_params(store);
	mill_params_uuid(p, delivery->id);
	mill_params_text(p, token(store, delivery->claim, text, sizeof(text)));
	mill_params_text(p, MILL_SPAN(delivery->publications));
	publish_params(store, p);
	send_publishing(store, publish, MILL_QUERY_SETTLE_PUBLISHING, p, done, context);
}

void mill_store_publish(struct mill_store *store, struct mill_link *link, struct mill_span request,
                        struct mill_span published_by, mill_link_done done, void *context)
{
	struct mill_params *p = mill_store_params(store);
	mill_params_text(p, request);
	mill_params_text(p, published_by);
	publish_params(store, p);
	send_publishing(store, link, MILL_QUERY_PUBLISH, p, done, context);
}

struct mill_span mill_store_published(const struct mill_results *results)
{
	return mill_rowset_span(mill_results_at(results, 1), 0, 0);
}

struct mill_span mill_store_unwanted(const struct mill_results *results)
{
	const struct mill_rowset *rows = mill_results_at(results, 1);
	return mill_rowset_count(rows) > 0 ? mill_rowset_span(rows, 0, MILL_REFUSAL_UNWANTED)
	                                   : MILL_SPAN_NONE;
}
