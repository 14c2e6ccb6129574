/*
 * Outcomes on their way into the ledger: see settle.h.
 *
 *     waiting ──► in flight ──► settled, freed
 *        ▲            │
 *        │            ├─ the connection broke, 40001 …: all back to waiting
 *        │            ├─ not in the answer: alone ──► was it locked, or is the lease lost?
 *        └────────────┴─ the batch was refused: each alone, so that one bad row costs only itself
 *
 * Done and the other outcomes are written by different statements, so each kind has lists of its
 * own. What is written alone goes through the publish link, where it may wait: for a row that
 * somebody has locked, or, when the handler published something, for a dedupe key in a stranger's
 * transaction.
 */
#include "flow/settle.h"

#include "core/clock.h"
#include "core/log.h"

#define BATCH_MOST 500
#define ALONE_MOST 64       /* in flight at a time, each a transaction of its own */
#define RETRY_NS 100000000u /* pause after a refusal, doubled up to RETRY_MOST_NS */
#define RETRY_MOST_NS 30000000000u

struct channel;

/* One write on its way: what it wrote, to be compared with the answer. */
struct flight {
	struct mill_settle *settle; /* NULL: forgotten */
	struct channel *channel;
	struct mill_list deliveries;
	bool alone;
	struct flight *next; /* in settle->flights */
};

/* One kind of outcome. */
struct channel {
	struct mill_list waiting; /* for the next batch */
	struct mill_list alone;   /* each for a write of its own */
	size_t batches, alones;   /* in flight */
};

enum { DONE, BACK, CHANNELS };

struct mill_settle {
	struct mill_settle_options options;
	struct channel channels[CHANNELS];
	struct flight *flights;
	size_t held;
	uint64_t paused_until_ns; /* after a refusal */
	unsigned refusals;
	struct mill_log_gate gate;
	uv_timer_t wake; /* ends a pause: the loop turns, and mill_settle_turn sends */
	void (*on_closed)(void *context);
	void *closed_context;
};

struct mill_settle *mill_settle_new(const struct mill_settle_options *options)
{
	struct mill_settle *settle = mill_calloc(1, sizeof(*settle));
	settle->options = *options;
	for (size_t i = 0; i < CHANNELS; i++) {
		mill_list_init(&settle->channels[i].waiting);
		mill_list_init(&settle->channels[i].alone);
	}
	MILL_ASSERT(uv_timer_init(options->loop, &settle->wake) == 0);
	return settle;
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct mill_settle *settle = mill_container_of(handle, struct mill_settle, wake);
	void (*on_closed)(void *) = settle->on_closed;
	void *context = settle->closed_context;
	free(settle);
	on_closed(context);
}

void mill_settle_close(struct mill_settle *settle, void (*on_closed)(void *context), void *context)
{
	MILL_ASSERT(settle->held == 0 && settle->flights == NULL);
	settle->on_closed = on_closed;
	settle->closed_context = context;
	uv_close((uv_handle_t *)&settle->wake, on_timer_closed);
}

size_t mill_settle_held(const struct mill_settle *settle)
{
	return settle->held;
}

static struct channel *channel_of(struct mill_settle *settle, const struct mill_delivery *delivery)
{
	return &settle->channels[delivery->settlement == MILL_SETTLE_DONE ? DONE : BACK];
}

void mill_settle_take(struct mill_settle *settle, struct mill_delivery *delivery)
{
	settle->held++;
	struct channel *channel = channel_of(settle, delivery);
	mill_delivery_move(delivery, NULL,
	                   delivery->publications ? &channel->alone : &channel->waiting,
	                   MILL_DELIVERY_FINISHED);
}

static void log_outcome(enum mill_log_level level, const char *event,
                        const struct mill_delivery *delivery, const char *error)
{
	char id[37];
	mill_delivery_id_text(delivery, id);
	mill_log(level, event, MILL_TEXT("message_id", id),
	         MILL_TEXT("topic", delivery->lane->spec->topic),
	         MILL_TEXT("subscriber", delivery->lane->spec->subscriber),
	         MILL_INT("attempt", delivery->attempts),
	         MILL_INT("max_attempts", delivery->max_attempts), MILL_TEXT("error", error));
}

/* What the ledger now says, once a delivery, after the database said yes. */
static void log_settled(const struct mill_delivery *delivery)
{
	switch (delivery->settlement) {
	case MILL_SETTLE_DONE:
		break;
	case MILL_SETTLE_PENDING:
		if (delivery->error != NULL)
			log_outcome(MILL_LOG_WARN, "message_retried", delivery, delivery->error);
		break;
	case MILL_SETTLE_FAILED:
		log_outcome(MILL_LOG_ERROR, "message_failed", delivery, delivery->error);
		break;
	case MILL_SETTLE_DISCARDED:
		log_outcome(MILL_LOG_INFO, "message_discarded", delivery, delivery->error);
		break;
	}
}

static void end_delivery(struct mill_settle *settle, struct mill_delivery *delivery,
                         struct mill_list *from)
{
	mill_delivery_move(delivery, from, NULL, MILL_DELIVERY_NEW);
	settle->held--;
	settle->options.on_settled(delivery, settle->options.context);
	mill_delivery_free(delivery);
}

/* ---- flights ------------------------------------------------------------------------------- */

static struct flight *flight_new(struct mill_settle *settle, struct channel *channel, bool alone)
{
	struct flight *flight = mill_calloc(1, sizeof(*flight));
	flight->settle = settle;
	flight->channel = channel;
	flight->alone = alone;
	mill_list_init(&flight->deliveries);
	flight->next = settle->flights;
	settle->flights = flight;
	*(alone ? &channel->alones : &channel->batches) += 1;
	return flight;
}

static void flight_landed(struct flight *flight)
{
	*(flight->alone ? &flight->channel->alones : &flight->channel->batches) -= 1;
}

static void flight_free(struct flight *flight)
{
	struct flight **at = &flight->settle->flights;
	while (*at != flight)
		at = &(*at)->next;
	*at = flight->next;
	flight_landed(flight);
	free(flight);
}

static int compare_ids(const void *a, const void *b)
{
	const struct mill_delivery *const *left = a, *const *right = b;
	return memcmp((*left)->id, (*right)->id, sizeof((*left)->id));
}

/* Is this delivery among the rows that were written? They mostly come in the order they were sent.
 */
static bool was_written(const struct mill_results *results, size_t answered, size_t *hint,
                        const struct mill_delivery *delivery)
{
	for (size_t i = 0; i < answered; i++) {
		uint8_t id[16];
		size_t at = (*hint + i) % answered;
		mill_store_settled_id(results, at, id);
		if (memcmp(id, delivery->id, sizeof(id)) == 0) {
			*hint = at + 1;
			return true;
		}
	}
	return false;
}

/* What is missing from the answer was locked by somebody, or is no longer ours: it stays. */
static void take_answer(struct flight *flight, const struct mill_results *results)
{
	size_t answered = mill_store_settled_count(results), hint = 0;
	bool all = answered == flight->deliveries.len;
	mill_list_each(node, &flight->deliveries)
	{
		struct mill_delivery *delivery =
		        mill_container_of(node, struct mill_delivery, node);
		if (!all && !was_written(results, answered, &hint, delivery))
			continue;
		log_settled(delivery);
		end_delivery(flight->settle, delivery, &flight->deliveries);
	}
}

/* What a batch did not write is tried alone; what is not ours even then has lost its lease. */
static void take_rest(struct flight *flight)
{
	struct mill_settle *settle = flight->settle;
	mill_list_each(node, &flight->deliveries)
	{
		struct mill_delivery *delivery =
		        mill_container_of(node, struct mill_delivery, node);
		if (!flight->alone) {
			mill_delivery_move(delivery, &flight->deliveries, &flight->channel->alone,
			                   MILL_DELIVERY_FINISHED);
			continue;
		}
		if (delivery->cancelled)
			log_outcome(MILL_LOG_INFO, "message_cancelled", delivery, NULL);
		else
			log_outcome(MILL_LOG_WARN, "lease_lost", delivery, NULL);
		end_delivery(settle, delivery, &flight->deliveries);
	}
}

/*
 * The database refuses this one outcome. What the handler published may be at fault: then the
 * message has failed. Otherwise a shorter, plainer error is tried; after that the row itself
 * refuses (a trigger, a constraint), and only trying again later is left.
 */
static void take_refusal(struct mill_settle *settle, struct mill_delivery *delivery,
                         const struct mill_err *err)
{
	delivery->refusals++;
	if (delivery->publications != NULL) {
		char *text =
		        mill_sprintf("what the handler published was refused: %s", err->message);
		struct mill_outcome raised = { .kind = MILL_OUTCOME_RAISED,
			                       .error = MILL_SPAN(text) };
		mill_delivery_conclude(delivery, &raised, mill_clock_random());
		free(text);
		return;
	}
	if (delivery->refusals == 2 && delivery->error != NULL) {
		free(delivery->error);
		delivery->error = mill_strdup("the error text was refused by the database");
	}
	log_outcome(MILL_LOG_ERROR, "outcome_refused", delivery, err->message);
	settle->refusals = delivery->refusals;
}

static void on_wake(uv_timer_t *timer)
{
	(void)timer; /* turning the loop is the purpose */
}

static void pause_writing(struct mill_settle *settle)
{
	uint64_t pause = RETRY_NS;
	for (unsigned i = 1; i < settle->refusals && pause < RETRY_MOST_NS; i++)
		pause *= 2;
	settle->paused_until_ns = mill_clock_ns() + pause;
	uv_timer_start(&settle->wake, on_wake, pause / 1000000 + 1, 0);
}

static void take_failure(struct flight *flight, const struct mill_err *err)
{
	struct mill_settle *settle = flight->settle;
	enum mill_err_reaction reaction = err->kind == MILL_ERR_UNREACHED
	                                          ? MILL_REACT_RECONNECT
	                                          : mill_err_database_reaction(err->sqlstate);
	bool refused = reaction == MILL_REACT_REFUSE;
	uint64_t skipped;
	if (reaction == MILL_REACT_WAIT && mill_log_gate(&settle->gate, 30, &skipped))
		mill_log(MILL_LOG_ERROR, "outcomes_wait", MILL_TEXT("error", err->message),
		         MILL_INT("held", settle->held));
	struct channel *channel = flight->channel;
	bool to_alone = flight->alone || refused;
	mill_list_each(node, &flight->deliveries)
	{
		struct mill_delivery *delivery =
		        mill_container_of(node, struct mill_delivery, node);
		struct mill_list *to = to_alone ? &channel->alone : &channel->waiting;
		if (refused && flight->alone) {
			take_refusal(settle, delivery, err);
			to = &channel_of(settle, delivery)->alone;
		}
		mill_delivery_move(delivery, &flight->deliveries, to, MILL_DELIVERY_FINISHED);
	}
	if (reaction == MILL_REACT_WAIT || reaction == MILL_REACT_RETRY ||
	    (refused && flight->alone))
		pause_writing(settle);
}

static void on_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct flight *flight = context;
	if (flight->settle == NULL) {
		free(flight);
		return;
	}
	if (err != NULL) {
		take_failure(flight, err);
	} else {
		flight->settle->refusals = 0;
		take_answer(flight, results);
		take_rest(flight);
	}
	flight_free(flight);
}

/* ---- sending ------------------------------------------------------------------------------- */

static void send_batch(struct mill_settle *settle, struct channel *channel)
{
	struct mill_delivery *batch[BATCH_MOST];
	size_t count = 0;
	struct flight *flight = flight_new(settle, channel, false);
	while (count < BATCH_MOST && !mill_list_empty(&channel->waiting)) {
		struct mill_delivery *delivery = mill_container_of(
		        mill_list_first(&channel->waiting), struct mill_delivery, node);
		mill_list_remove(&channel->waiting, &delivery->node);
		batch[count++] = delivery;
	}
	qsort(batch, count, sizeof(batch[0]), compare_ids);
	for (size_t i = 0; i < count; i++)
		mill_list_push(&flight->deliveries, &batch[i]->node);
	mill_store_settle(settle->options.store, settle->options.work, batch, count, on_answer,
	                  flight);
}

static void send_alone(struct mill_settle *settle, struct channel *channel)
{
	struct mill_delivery *delivery =
	        mill_container_of(mill_list_first(&channel->alone), struct mill_delivery, node);
	struct flight *flight = flight_new(settle, channel, true);
	mill_delivery_move(delivery, &channel->alone, &flight->deliveries, MILL_DELIVERY_FINISHED);
	mill_store_settle_alone(settle->options.store, settle->options.publish, delivery, on_answer,
	                        flight);
}

static void channel_turn(struct mill_settle *settle, struct channel *channel)
{
	if (mill_link_is_up(settle->options.work) && channel->batches == 0 &&
	    !mill_list_empty(&channel->waiting))
		send_batch(settle, channel);
	while (mill_link_is_up(settle->options.publish) && channel->alones < ALONE_MOST &&
	       !mill_list_empty(&channel->alone))
		send_alone(settle, channel);
}

void mill_settle_turn(struct mill_settle *settle)
{
	if (settle->paused_until_ns != 0 && mill_clock_ns() < settle->paused_until_ns)
		return;
	settle->paused_until_ns = 0;
	for (size_t i = 0; i < CHANNELS; i++)
		channel_turn(settle, &settle->channels[i]);
}

void mill_settle_forget(struct mill_settle *settle)
{
	while (settle->flights != NULL) {
		struct flight *flight = settle->flights;
		settle->flights = flight->next;
		flight_landed(flight);
		flight->settle = NULL; /* its answer is still to come, and frees it */
		mill_list_each(node, &flight->deliveries)
		        end_delivery(settle, mill_container_of(node, struct mill_delivery, node),
		                     &flight->deliveries);
	}
	for (size_t i = 0; i < CHANNELS; i++) {
		struct mill_list *lists[] = { &settle->channels[i].waiting,
			                      &settle->channels[i].alone };
		for (size_t j = 0; j < MILL_COUNT(lists); j++)
			mill_list_each(node, lists[j]) end_delivery(
			        settle, mill_container_of(node, struct mill_delivery, node),
			        lists[j]);
	}
}
