/*
 * The ledger as typed calls, the workers' part: the lanes they declare, their leases, and what they
 * do for all. See store.h. The messages that pass through their hands are store.c's.
 */
#include "pg/store_state.h"

/* An exchange of one statement. */
static void send_one(struct mill_link *link, enum mill_query query, const struct mill_params *p,
                     mill_link_done done, void *context)
{
	mill_link_begin(link);
	mill_link_add(link, query, p);
	mill_link_end(link, done, context);
}

/* ---- lanes --------------------------------------------------------------------------------- */

static void pair_params(struct mill_params *p, const struct mill_manifest *manifest)
{
	mill_params_array(p, MILL_TYPE_TEXT);
	for (size_t i = 0; i < manifest->lane_count; i++)
		mill_element_text(p, MILL_SPAN(manifest->lanes[i].topic));
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_TEXT);
	for (size_t i = 0; i < manifest->lane_count; i++)
		mill_element_text(p, MILL_SPAN(manifest->lanes[i].subscriber));
	mill_params_array_end(p);
}

/* $3 and $4 where a table has no lanes: their numbers are ours, and so is the app's name. */
static void declare_pairs(struct mill_store *store, struct mill_params *p,
                          const struct mill_manifest *manifest)
{
	mill_pairs_declare(store->pairs, manifest);
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < manifest->lane_count; i++)
		mill_element_int4(p, mill_pairs_number(store->pairs, manifest->lanes[i].topic,
		                                       manifest->lanes[i].subscriber));
	mill_params_array_end(p);
	mill_params_text(p, MILL_SPAN(manifest->settings.app));
}

void mill_store_register_lanes(struct mill_store *store, struct mill_link *link,
                               const struct mill_manifest *manifest, mill_link_done done,
                               void *context)
{
	mill_link_begin(link);
	struct mill_params *p = mill_store_params(store);
	mill_params_text(p, MILL_SPAN(manifest->settings.app));
	pair_params(p, manifest);
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < manifest->lane_count; i++)
		mill_element_int4(p, (int32_t)manifest->lanes[i].options.max_attempts);
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < manifest->lane_count; i++)
		mill_element_int4(p, (int32_t)manifest->lanes[i].options.retry_backoff_secs);
	mill_params_array_end(p);
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < manifest->lane_count; i++)
		mill_element_int4(p, (int32_t)manifest->lanes[i].options.retain_hours);
	mill_params_array_end(p);
	mill_link_add(link, MILL_QUERY_REGISTER_LANES, p);
	p = mill_store_params(store);
	pair_params(p, manifest);
	if (store->pairs != NULL)
		declare_pairs(store, p, manifest);
	mill_link_add(link, MILL_QUERY_READ_LANES, p);
	mill_link_end(link, done, context);
}

int32_t mill_store_registered_lane(const struct mill_results *results, size_t i,
                                   struct mill_span *app)
{
	const struct mill_rowset *rows = mill_results_at(results, 1);
	*app = mill_rowset_span(rows, (int)i, 1);
	return mill_rowset_int(rows, (int)i, 0);
}

/* ---- workers ------------------------------------------------------------------------------- */

static void worker_param(struct mill_store *store, struct mill_params *p)
{
	mill_params_text(p, MILL_SPAN(store->worker_id));
}

static void lane_numbers_param(struct mill_params *p, const struct mill_store_worker *worker)
{
	mill_params_array(p, MILL_TYPE_INT4);
	for (size_t i = 0; i < worker->lane_count; i++)
		mill_element_int4(p, worker->lanes[i]);
	mill_params_array_end(p);
}

void mill_store_register_worker(struct mill_store *store, struct mill_link *link,
                                const struct mill_store_worker *worker, mill_link_done done,
                                void *context)
{
	struct mill_params *p = mill_store_params(store);
	worker_param(store, p);
	mill_params_text(p, MILL_SPAN(worker->app));
	mill_params_text(p, MILL_SPAN(worker->host));
	mill_params_int4(p, worker->pid);
	mill_params_int4(p, worker->lease_secs);
	lane_numbers_param(p, worker);
	mill_params_int4(p, worker->generation);
	send_one(link, MILL_QUERY_REGISTER_WORKER, p, done, context);
}

void mill_store_declare_worker(struct mill_store *store, struct mill_link *link,
                               const struct mill_store_worker *worker, mill_link_done done,
                               void *context)
{
	struct mill_params *p = mill_store_params(store);
	worker_param(store, p);
	mill_params_int4(p, worker->lease_secs);
	lane_numbers_param(p, worker);
	mill_params_int4(p, worker->generation);
	send_one(link, MILL_QUERY_DECLARE_WORKER, p, done, context);
}

void mill_store_renew(struct mill_store *store, struct mill_link *link, mill_link_done done,
                      void *context)
{
	struct mill_params *p = mill_store_params(store);
	worker_param(store, p);
	send_one(link, MILL_QUERY_RENEW, p, done, context);
}

bool mill_store_renewed(const struct mill_results *results)
{
	return mill_rowset_count(mill_results_at(results, 0)) == 1;
}

bool mill_store_lanes_stand(const struct mill_results *results)
{
	return mill_rowset_bool(mill_results_at(results, 0), 0, 1);
}

void mill_store_leave(struct mill_store *store, struct mill_link *link, mill_link_done done,
                      void *context)
{
	struct mill_params *p = mill_store_params(store);
	worker_param(store, p);
	send_one(link, MILL_QUERY_LEAVE, p, done, context);
}

/* ---- sweeps -------------------------------------------------------------------------------- */

void mill_store_sweep(struct mill_store *store, struct mill_link *link, enum mill_query query,
                      int32_t most, int32_t lease_secs, mill_link_done done, void *context)
{
	struct mill_params *p = mill_store_params(store);
	mill_params_int4(p, most);
	mill_params_int4(p, lease_secs);
	if (store->pairs != NULL) {
		mill_pairs_params(store->pairs, p);
		mill_pairs_option_params(store->pairs, p);
		mill_params_int4(p, store->retain_hours);
	}
	mill_link_begin(link);
	mill_link_add(link, MILL_QUERY_PIN, NULL);
	mill_link_add(link, query, p);
	if (query == MILL_QUERY_RECLAIM_DEAD)
		mill_link_add(link, MILL_QUERY_BURY, NULL);
	mill_link_end(link, done, context);
}

size_t mill_store_swept_count(const struct mill_results *results)
{
	return (size_t)mill_rowset_count(mill_results_at(results, 1));
}

void mill_store_swept_row(const struct mill_results *results, size_t i,
                          struct mill_store_swept *row)
{
	const struct mill_rowset *rows = mill_results_at(results, 1);
	int at = (int)i;
	memset(row->id, 0, sizeof(row->id));
	if (!mill_rowset_null(rows, at, 0))
		mill_store_copy_id(rows, at, 0, row->id);
	row->topic = mill_rowset_span(rows, at, 1);
	row->subscriber = mill_rowset_span(rows, at, 2);
	row->failed = mill_rowset_bool(rows, at, 3);
	row->attempts = mill_rowset_int(rows, at, 4);
	row->error = mill_rowset_span(rows, at, 5);
}

/* ---- notifications ------------------------------------------------------------------------- */

void mill_store_notify(struct mill_store *store, struct mill_link *link,
                       const struct mill_span *topics, size_t count, mill_link_done done,
                       void *context)
{
	struct mill_params *p = mill_store_params(store);
	mill_params_array(p, MILL_TYPE_TEXT);
	for (size_t i = 0; i < count; i++)
		mill_element_text(p, topics[i]);
	mill_params_array_end(p);
	send_one(link, MILL_QUERY_NOTIFY, p, done, context);
}

void mill_store_notify_control(struct mill_store *store, struct mill_link *link,
                               struct mill_span payload, mill_link_done done, void *context)
{
	struct mill_params *p = mill_store_params(store);
	mill_params_text(p, payload);
	send_one(link, MILL_QUERY_NOTIFY_CONTROL, p, done, context);
}
