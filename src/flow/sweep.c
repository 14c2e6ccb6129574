/*
 * Housekeeping by statement: see sweep.h.
 *
 * A sweep that changed as many rows as its batch allows is run again at once; otherwise it rests
 * for its period. All workers do the same sweeps, and the jitter keeps them apart.
 */
#include "flow/sweep.h"

#include <math.h>

#include "core/clock.h"
#include "core/log.h"
#include "core/uuid.h"

#define BATCH 500
#define SECOND_NS 1e9

struct duty {
	const char *name;
	enum mill_query query;
	double period_least, period_most; /* seconds; between them, a share of lease_secs */
	double lease_share;
	void (*take)(struct mill_sweep *sweep, const struct mill_results *results, size_t count);
};

static void take_stamped(struct mill_sweep *sweep, const struct mill_results *results,
                         size_t count);
static void take_reclaimed(struct mill_sweep *sweep, const struct mill_results *results,
                           size_t count);
static void take_adopted(struct mill_sweep *sweep, const struct mill_results *results,
                         size_t count);
static void take_pruned(struct mill_sweep *sweep, const struct mill_results *results, size_t count);
static void take_removed(struct mill_sweep *sweep, const struct mill_results *results,
                         size_t count);

static const struct duty duties[] = {
	{ "stamp", MILL_QUERY_STAMP, 1, 1, 0, take_stamped },
	{ "reclaim_dead", MILL_QUERY_RECLAIM_DEAD, 0.5, 30, 1.0 / 3, take_reclaimed },
	{ "reclaim_unknown", MILL_QUERY_RECLAIM_UNKNOWN, 1, 300, 1, take_reclaimed },
	{ "prune", MILL_QUERY_PRUNE, 1, 60, 0.2, take_pruned },
	{ "prune_discarded", MILL_QUERY_PRUNE_DISCARDED, 1, 600, 1, take_pruned },
	{ "remove_lanes", MILL_QUERY_REMOVE_LANES, 1, 60, 1.0 / 3, take_removed },
	{ "adopt", MILL_QUERY_ADOPT, 1, 60, 1.0 / 3, take_adopted },
};

#define DUTIES MILL_COUNT(duties)

struct run {
	struct mill_sweep *sweep;
	const struct duty *duty;
	uint64_t due_ns;
	bool in_flight;
};

struct mill_sweep {
	struct mill_sweep_options options;
	struct run runs[DUTIES];
	struct mill_log_gate gate;
};

static uint64_t next_due(const struct mill_sweep *sweep, const struct duty *duty)
{
	double period = sweep->options.lease_secs * duty->lease_share;
	period = fmin(fmax(period, duty->period_least), duty->period_most);
	return mill_clock_ns() +
	       (uint64_t)(period * (0.75 + 0.25 * mill_clock_random()) * SECOND_NS);
}

static void refused(struct mill_sweep *sweep, const char *name, const struct mill_err *err)
{
	uint64_t skipped;
	if (err->kind != MILL_ERR_UNREACHED && mill_log_gate(&sweep->gate, 10, &skipped))
		mill_log(MILL_LOG_ERROR, "sweep_refused", MILL_TEXT("sweep", name),
		         MILL_TEXT("error", err->message), MILL_TEXT("sqlstate", err->sqlstate),
		         MILL_INT("skipped", skipped));
}

/* ---- what was swept ------------------------------------------------------------------------ */

static void on_notified(struct mill_results *results, const struct mill_err *err, void *context)
{
	(void)results;
	if (err != NULL)
		refused(context, "notify", err);
}

/* Each topic once: many rows have few topics. */
struct topics {
	struct mill_span list[BATCH];
	size_t count;
};

static void add_topic(struct topics *topics, struct mill_span topic)
{
	for (size_t i = 0; i < topics->count; i++)
		if (topics->list[i].len == topic.len &&
		    memcmp(topics->list[i].data, topic.data, topic.len) == 0)
			return;
	if (topics->count < BATCH)
		topics->list[topics->count++] = topic;
}

static void tell(struct mill_sweep *sweep, const struct topics *topics)
{
	for (size_t i = 0; i < topics->count; i++)
		sweep->options.on_work(topics->list[i], sweep->options.context);
	if (topics->count > 0 && mill_link_is_up(sweep->options.link))
		mill_store_notify(sweep->options.store, sweep->options.link, topics->list,
		                  topics->count, on_notified, sweep);
}

static void log_row(struct mill_sweep *sweep, enum mill_log_level level, const char *event,
                    const struct mill_store_swept *row)
{
	char id[37], room[MILL_STORE_HINT];
	const char *hint = NULL;
	mill_uuid_text(row->id, id);
	if (row->failed)
		hint = mill_store_failed_hint(sweep->options.store, id, room);
	mill_log(level, event, MILL_TEXT("message_id", id),
	         MILL_TEXT_N("topic", row->topic.data, row->topic.len),
	         MILL_TEXT_N("subscriber", row->subscriber.data, row->subscriber.len),
	         MILL_INT("attempt", row->attempts), MILL_TEXT("hint", hint),
	         MILL_TEXT_N("error", row->error.data, row->error.len));
}

static void take_stamped(struct mill_sweep *sweep, const struct mill_results *results, size_t count)
{
	struct topics topics = { .count = 0 };
	for (size_t i = 0; i < count; i++) {
		struct mill_store_swept row;
		mill_store_swept_row(results, i, &row);
		add_topic(&topics, row.topic);
	}
	tell(sweep, &topics);
}

static void take_reclaimed(struct mill_sweep *sweep, const struct mill_results *results,
                           size_t count)
{
	struct topics topics = { .count = 0 };
	for (size_t i = 0; i < count; i++) {
		struct mill_store_swept row;
		mill_store_swept_row(results, i, &row);
		if (row.failed) {
			log_row(sweep, MILL_LOG_ERROR, "message_failed", &row);
		} else {
			log_row(sweep, MILL_LOG_WARN, "message_reclaimed", &row);
			add_topic(&topics, row.topic);
		}
	}
	tell(sweep, &topics);
}

static void take_adopted(struct mill_sweep *sweep, const struct mill_results *results, size_t count)
{
	struct topics topics = { .count = 0 };
	for (size_t i = 0; i < count; i++) {
		struct mill_store_swept row;
		mill_store_swept_row(results, i, &row);
		if (row.failed)
			log_row(sweep, MILL_LOG_ERROR, "message_failed", &row);
		else
			add_topic(&topics, row.topic);
	}
	tell(sweep, &topics);
}

static void take_pruned(struct mill_sweep *sweep, const struct mill_results *results, size_t count)
{
	(void)sweep;
	(void)results;
	if (count > 0)
		mill_log(MILL_LOG_DEBUG, "pruned", MILL_INT("messages", count));
}

static void take_removed(struct mill_sweep *sweep, const struct mill_results *results, size_t count)
{
	(void)sweep;
	for (size_t i = 0; i < count; i++) {
		struct mill_store_swept row;
		mill_store_swept_row(results, i, &row);
		mill_log(MILL_LOG_INFO, "lane_removed",
		         MILL_TEXT_N("topic", row.topic.data, row.topic.len),
		         MILL_TEXT_N("subscriber", row.subscriber.data, row.subscriber.len));
	}
}

/* ---- running ------------------------------------------------------------------------------- */

static void on_swept(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct run *run = context;
	struct mill_sweep *sweep = run->sweep;
	run->in_flight = false;
	run->due_ns = next_due(sweep, run->duty);
	if (err != NULL) {
		refused(sweep, run->duty->name, err);
		return;
	}
	size_t count = mill_store_swept_count(results);
	run->duty->take(sweep, results, count);
	if (count >= BATCH)
		run->due_ns = 0; /* there is more */
}

void mill_sweep_turn(struct mill_sweep *sweep)
{
	uint64_t now = mill_clock_ns();
	for (size_t i = 0; i < DUTIES; i++) {
		struct run *run = &sweep->runs[i];
		if (run->in_flight || now < run->due_ns)
			continue;
		run->in_flight = true;
		mill_store_sweep(sweep->options.store, sweep->options.link, run->duty->query, BATCH,
		                 (int32_t)sweep->options.lease_secs, on_swept, run);
	}
}

struct mill_sweep *mill_sweep_new(const struct mill_sweep_options *options)
{
	struct mill_sweep *sweep = mill_calloc(1, sizeof(*sweep));
	sweep->options = *options;
	for (size_t i = 0; i < DUTIES; i++) {
		sweep->runs[i].sweep = sweep;
		sweep->runs[i].duty = &duties[i];
		/* Dead workers are looked for at once; the rest begins at a random moment. */
		if (duties[i].query != MILL_QUERY_RECLAIM_DEAD)
			sweep->runs[i].due_ns =
			        mill_clock_ns() +
			        (uint64_t)(mill_clock_random() *
			                   (double)(next_due(sweep, &duties[i]) - mill_clock_ns()));
	}
	return sweep;
}

void mill_sweep_set_lease(struct mill_sweep *sweep, double lease_secs)
{
	sweep->options.lease_secs = lease_secs;
}

void mill_sweep_free(struct mill_sweep *sweep)
{
	free(sweep);
}
