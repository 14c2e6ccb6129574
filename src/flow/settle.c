/*
 * Outcomes on their way into the ledger: see settle.h.
 *
 *     waiting ──► in flight ──► settled, freed
 *        ▲            │
 *        │            ├─ the connection broke, 40001 …: all back to waiting
 *        │            ├─ the batch was refused: each alone, so that one bad row costs only itself
 *        │            └─ not in the answer: missing ──► asked for: no longer ours, freed
 *        │                                                │
 *        └── resting ◄── refused alone, or ours but locked by somebody ◄┘
 *
 * Nothing here waits for a lock: what is locked is skipped and tried again, so that a stranger's
 * transaction holds up no other outcome. Done and the other outcomes are written by different
 * statements, so each kind has lists of its own. A handler's publications go with its `done`
 * through the publish link. A dedupe key in a stranger's transaction makes them come back, and they
 * are tried again one at a time, since all publishing shares that link.
 */
#include "flow/settle.h"

#include "core/clock.h"
#include "core/killpoint.h"
#include "core/log.h"

#define BATCH_MOST 500
#define ALONE_MOST 64 /* in flight at a time, each a transaction of its own */
#define PAUSE_NS 100000000u
#define PAUSE_WAIT_NS 1000000000u /* while a person must act, a missing table for instance */
/* The pause before one outcome is tried again: doubled each time, up to these. */
#define REST_LEAST_NS 50000000u
#define REST_LOCKED_NS 1000000000u
#define REST_REFUSED_NS 30000000000u

struct channel;

enum flight_kind {
	BATCH,
	ALONE,
	AGAIN,    /* alone too: with publications that met somebody's lock before */
	QUESTION, /* writes nothing: are these still ours? */
	FLIGHT_KINDS,
};

/* One exchange on its way: what it is about, to be compared with the answer. */
struct flight {
	struct mill_settle *settle; /* NULL: forgotten */
	struct channel *channel;
	enum flight_kind kind;
	struct mill_list deliveries;
	struct flight *next; /* in settle->flights */
};

/* One kind of outcome. */
struct channel {
	struct mill_list waiting; /* for the next batch */
	struct mill_list alone;   /* each for a write of its own */
	struct mill_list missing; /* for the next question */
	size_t in_flight[FLIGHT_KINDS];
};

enum { DONE, BACK, CHANNELS };

struct mill_settle {
	struct mill_settle_options options;
	struct channel channels[CHANNELS];
	struct mill_list resting; /* until their rest_ns */
	struct flight *flights;
	size_t held;
	uint64_t paused_until_ns; /* nothing can be written at all */
	struct mill_log_gate gate;
	uv_timer_t wake; /* ends a pause or a rest: the loop turns, and mill_settle_turn sends */
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
		mill_list_init(&settle->channels[i].missing);
	}
	mill_list_init(&settle->resting);
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

/* To where it is written from: what comes with publications, or was refused, goes alone. */
static void enqueue(struct mill_settle *settle, struct mill_delivery *delivery,
                    struct mill_list *from)
{
	struct channel *channel = channel_of(settle, delivery);
	bool alone = delivery->publications != NULL || delivery->refusals > 0;
	mill_delivery_move(delivery, from, alone ? &channel->alone : &channel->waiting,
	                   MILL_DELIVERY_FINISHED);
}

/* `more` is one field that this event has besides; a text that is NULL: none. */
static void log_outcome_with(enum mill_log_level level, const char *event,
                             const struct mill_delivery *delivery, const char *error,
                             struct mill_field more)
{
	char id[37];
	mill_delivery_id_text(delivery, id);
	mill_log(level, event, MILL_TEXT("message_id", id),
	         MILL_TEXT("topic", delivery->lane->spec->topic),
	         MILL_TEXT("subscriber", delivery->lane->spec->subscriber),
	         MILL_INT("attempt", delivery->attempts),
	         MILL_INT("max_attempts", delivery->max_attempts),
	         MILL_NUMBER("secs", (double)delivery->took_ns / 1e9), more,
	         MILL_TEXT("error", error));
}

static void log_outcome(enum mill_log_level level, const char *event,
                        const struct mill_delivery *delivery, const char *error)
{
	log_outcome_with(level, event, delivery, error, MILL_TEXT("", NULL));
}

static void log_failed(const struct mill_settle *settle, const struct mill_delivery *delivery)
{
	char id[37], room[MILL_STORE_HINT];
	mill_delivery_id_text(delivery, id);
	const char *hint = mill_store_failed_hint(settle->options.store, id, room);
	log_outcome_with(MILL_LOG_ERROR, "message_failed", delivery, delivery->error,
	                 MILL_TEXT("hint", hint));
}

/* A handler published to topics that nobody subscribes to, and the database has taken that. */
static void tell_orphans(struct mill_settle *settle, const struct mill_delivery *delivery,
                         const struct mill_results *results)
{
	char id[37];
	mill_delivery_id_text(delivery, id);
	mill_orphans_tell(settle->options.orphans, mill_store_unwanted(results), id,
	                  delivery->lane->spec->topic, delivery->lane->spec->subscriber);
}

/* What the ledger now says, once a delivery, after the database said yes. */
static void log_settled(struct mill_settle *settle, const struct mill_delivery *delivery)
{
	switch (delivery->settlement) {
	case MILL_SETTLE_DONE:
		if (mill_log_threshold() <= MILL_LOG_DEBUG)
			log_outcome(MILL_LOG_DEBUG, "message_done", delivery, NULL);
		break;
	case MILL_SETTLE_PENDING:
		if (delivery->error != NULL)
			log_outcome_with(MILL_LOG_WARN, "message_retried", delivery,
			                 delivery->error,
			                 MILL_NUMBER("retry_in_secs", delivery->delay_secs));
		break;
	case MILL_SETTLE_FAILED:
		log_failed(settle, delivery);
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

/* Somebody else has the message, or it is gone. Nothing was changed. */
static void log_lost(const struct mill_delivery *delivery)
{
	if (delivery->cancelled)
		log_outcome(MILL_LOG_INFO, "message_cancelled", delivery, NULL);
	else if (delivery->resent)
		log_outcome(MILL_LOG_INFO, "outcome_unknown", delivery,
		            "the connection broke before the answer: it was written then, or the "
		            "lease is lost");
	else
		log_outcome(MILL_LOG_WARN, "lease_lost", delivery, NULL);
}

void mill_settle_take(struct mill_settle *settle, struct mill_delivery *delivery)
{
	settle->held++;
	/* ctx:finish: the executor has been at the database with it. */
	if (delivery->written)
		end_delivery(settle, delivery, NULL);
	else
		enqueue(settle, delivery, NULL);
}

/* ---- pauses -------------------------------------------------------------------------------- */

static void on_wake(uv_timer_t *timer)
{
	(void)timer; /* turning the loop is the purpose */
}

static void pause_writing(struct mill_settle *settle, uint64_t pause_ns)
{
	settle->paused_until_ns = mill_clock_ns() + pause_ns;
}

static void rest(struct mill_settle *settle, struct mill_delivery *delivery, struct mill_list *from)
{
	uint64_t most = delivery->refusals > 0 ? REST_REFUSED_NS : REST_LOCKED_NS;
	uint64_t pause = REST_LEAST_NS;
	for (unsigned i = 0; i < delivery->setbacks && pause < most; i++)
		pause *= 2;
	delivery->setbacks++;
	delivery->rest_ns = mill_clock_ns() + (pause < most ? pause : most);
	mill_delivery_move(delivery, from, &settle->resting, MILL_DELIVERY_FINISHED);
}

/* Back to work what has rested enough; be woken for the next. */
static void end_rests(struct mill_settle *settle, uint64_t now)
{
	uint64_t next = settle->paused_until_ns > now ? settle->paused_until_ns : UINT64_MAX;
	mill_list_each(node, &settle->resting)
	{
		struct mill_delivery *delivery =
		        mill_container_of(node, struct mill_delivery, node);
		if (delivery->rest_ns <= now)
			enqueue(settle, delivery, &settle->resting);
		else if (delivery->rest_ns < next)
			next = delivery->rest_ns;
	}
	if (next == UINT64_MAX)
		uv_timer_stop(&settle->wake);
	else
		uv_timer_start(&settle->wake, on_wake, (next - now) / 1000000 + 1, 0);
}

/* ---- flights ------------------------------------------------------------------------------- */

static struct flight *flight_new(struct mill_settle *settle, struct channel *channel,
                                 enum flight_kind kind)
{
	struct flight *flight = mill_calloc(1, sizeof(*flight));
	flight->settle = settle;
	flight->channel = channel;
	flight->kind = kind;
	mill_list_init(&flight->deliveries);
	flight->next = settle->flights;
	settle->flights = flight;
	channel->in_flight[kind]++;
	return flight;
}

static void flight_free(struct flight *flight)
{
	struct flight **at = &flight->settle->flights;
	while (*at != flight)
		at = &(*at)->next;
	*at = flight->next;
	flight->channel->in_flight[flight->kind]--;
	free(flight);
}

static int compare_ids(const void *a, const void *b)
{
	const struct mill_delivery *const *left = a, *const *right = b;
	return memcmp((*left)->id, (*right)->id, sizeof((*left)->id));
}

/* Is this delivery among the rows of the answer? They mostly come in the order they were sent. */
static bool was_answered(const struct mill_results *results, size_t answered, size_t *hint,
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

static void take_answer(struct flight *flight, const struct mill_results *results)
{
	struct mill_settle *settle = flight->settle;
	size_t answered = mill_store_settled_count(results), hint = 0;
	bool all = answered == flight->deliveries.len;
	mill_list_each(node, &flight->deliveries)
	{
		struct mill_delivery *delivery =
		        mill_container_of(node, struct mill_delivery, node);
		bool found = all || was_answered(results, answered, &hint, delivery);
		if (flight->kind == QUESTION && found) {
			rest(settle, delivery, &flight->deliveries);
			continue;
		}
		if (flight->kind != QUESTION && !found) {
			mill_delivery_move(delivery, &flight->deliveries, &flight->channel->missing,
			                   MILL_DELIVERY_FINISHED);
			continue;
		}
		if (found && delivery->publications != NULL)
			tell_orphans(settle, delivery, results);
		if (found)
			log_settled(settle, delivery);
		else
			log_lost(delivery);
		end_delivery(settle, delivery, &flight->deliveries);
	}
}

/*
 * The database refuses this one outcome. What the handler published may be at fault: then the
 * message has failed. Otherwise a shorter, plainer error is tried; after that the row itself
 * refuses (a trigger, a constraint), and only trying again later is left.
 */
static void take_refusal(struct mill_settle *settle, struct mill_delivery *delivery,
                         struct mill_list *from, const struct mill_err *err)
{
	if (delivery->publications != NULL) {
		char *text =
		        mill_sprintf("what the handler published was refused: %s", err->message);
		struct mill_outcome raised = { .kind = MILL_OUTCOME_RAISED,
			                       .error = MILL_SPAN(text) };
		mill_delivery_conclude(delivery, &raised, mill_clock_random());
		free(text);
		enqueue(settle, delivery, from);
		return;
	}
	delivery->refusals++;
	if (delivery->refusals == 2 && delivery->error != NULL) {
		free(delivery->error);
		delivery->error = mill_strdup("the error text was refused by the database");
	}
	log_outcome(MILL_LOG_ERROR, "outcome_refused", delivery, err->message);
	rest(settle, delivery, from);
}

/* Where a delivery goes whose exchange came to nothing, through no fault of its own. */
static struct mill_list *source_of(struct flight *flight)
{
	struct channel *channel = flight->channel;
	return flight->kind == BATCH      ? &channel->waiting
	       : flight->kind == QUESTION ? &channel->missing
	                                  : &channel->alone;
}

static void take_failure(struct flight *flight, const struct mill_err *err)
{
	struct mill_settle *settle = flight->settle;
	bool unreached = err->kind == MILL_ERR_UNREACHED;
	bool alone = flight->kind == ALONE || flight->kind == AGAIN;
	enum mill_err_reaction reaction =
	        unreached ? MILL_REACT_RECONNECT : mill_err_database_reaction(err->sqlstate);
	mill_list_each(node, &flight->deliveries)
	{
		struct mill_delivery *delivery =
		        mill_container_of(node, struct mill_delivery, node);
		delivery->resent |= unreached && flight->kind != QUESTION;
		if (alone && reaction == MILL_REACT_REFUSE)
			take_refusal(settle, delivery, &flight->deliveries, err);
		else if (alone && reaction == MILL_REACT_RETRY)
			rest(settle, delivery, &flight->deliveries);
		else
			mill_delivery_move(delivery, &flight->deliveries,
			                   flight->kind == BATCH && reaction == MILL_REACT_REFUSE
			                           ? &flight->channel->alone
			                           : source_of(flight),
			                   MILL_DELIVERY_FINISHED);
	}
	if (reaction == MILL_REACT_WAIT)
		pause_writing(settle, PAUSE_WAIT_NS);
	else if (!alone && reaction == MILL_REACT_RETRY)
		pause_writing(settle, PAUSE_NS);
	else if (flight->kind == QUESTION && reaction == MILL_REACT_REFUSE)
		pause_writing(settle, PAUSE_WAIT_NS);
	else
		return;
	uint64_t skipped;
	if (mill_log_gate(&settle->gate, 30, &skipped))
		mill_log(MILL_LOG_ERROR, "outcomes_wait", MILL_TEXT("error", err->message),
		         MILL_TEXT("sqlstate", err->sqlstate), MILL_INT("held", settle->held));
}

static void on_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	MILL_KILL_POINT("settle_answered");
	struct flight *flight = context;
	if (flight->settle == NULL) {
		free(flight);
		return;
	}
	if (err != NULL)
		take_failure(flight, err);
	else
		take_answer(flight, results);
	flight_free(flight);
}

/* ---- sending ------------------------------------------------------------------------------- */

/* A batch or a question: up to BATCH_MOST of `from`, in the order of their ids. */
static void send_many(struct mill_settle *settle, struct channel *channel, enum flight_kind kind,
                      struct mill_list *from)
{
	MILL_KILL_POINT("settle_begin");
	struct mill_delivery *batch[BATCH_MOST];
	size_t count = 0;
	struct flight *flight = flight_new(settle, channel, kind);
	while (count < BATCH_MOST && !mill_list_empty(from)) {
		batch[count] = mill_container_of(mill_list_first(from), struct mill_delivery, node);
		mill_list_remove(from, &batch[count++]->node);
	}
	qsort(batch, count, sizeof(batch[0]), compare_ids);
	for (size_t i = 0; i < count; i++)
		mill_list_push(&flight->deliveries, &batch[i]->node);
	if (kind == QUESTION)
		mill_store_ask_held(settle->options.store, settle->options.work, batch, count,
		                    on_answer, flight);
	else
		mill_store_settle(settle->options.store, settle->options.work, batch, count,
		                  on_answer, flight);
}

static enum flight_kind alone_kind(const struct mill_delivery *delivery)
{
	return delivery->publications != NULL && delivery->setbacks > 0 ? AGAIN : ALONE;
}

static void send_alone(struct mill_settle *settle, struct channel *channel,
                       struct mill_delivery *delivery)
{
	struct flight *flight = flight_new(settle, channel, alone_kind(delivery));
	mill_delivery_move(delivery, &channel->alone, &flight->deliveries, MILL_DELIVERY_FINISHED);
	if (delivery->publications != NULL)
		mill_store_settle_publishing(settle->options.store, settle->options.publish,
		                             delivery, on_answer, flight);
	else
		mill_store_settle(settle->options.store, settle->options.work, &delivery, 1,
		                  on_answer, flight);
}

static void channel_turn(struct mill_settle *settle, struct channel *channel)
{
	bool work = mill_link_is_up(settle->options.work);
	bool publish = mill_link_is_up(settle->options.publish);
	if (work && channel->in_flight[BATCH] == 0 && !mill_list_empty(&channel->waiting))
		send_many(settle, channel, BATCH, &channel->waiting);
	if (work && channel->in_flight[QUESTION] == 0 && !mill_list_empty(&channel->missing))
		send_many(settle, channel, QUESTION, &channel->missing);
	mill_list_each(node, &channel->alone)
	{
		struct mill_delivery *delivery =
		        mill_container_of(node, struct mill_delivery, node);
		if (channel->in_flight[ALONE] >= ALONE_MOST)
			break;
		if (alone_kind(delivery) == AGAIN && channel->in_flight[AGAIN] > 0)
			continue;
		if (delivery->publications != NULL ? publish : work)
			send_alone(settle, channel, delivery);
	}
}

void mill_settle_turn(struct mill_settle *settle)
{
	uint64_t now = mill_clock_ns();
	end_rests(settle, now);
	if (now < settle->paused_until_ns)
		return;
	for (size_t i = 0; i < CHANNELS; i++)
		channel_turn(settle, &settle->channels[i]);
}

static void forget_list(struct mill_settle *settle, struct mill_list *list)
{
	mill_list_each(node, list)
	{
		end_delivery(settle, mill_container_of(node, struct mill_delivery, node), list);
	}
}

void mill_settle_forget(struct mill_settle *settle)
{
	while (settle->flights != NULL) {
		struct flight *flight = settle->flights;
		settle->flights = flight->next;
		flight->channel->in_flight[flight->kind]--;
		flight->settle = NULL; /* its answer is still to come, and frees it */
		forget_list(settle, &flight->deliveries);
	}
	for (size_t i = 0; i < CHANNELS; i++) {
		forget_list(settle, &settle->channels[i].waiting);
		forget_list(settle, &settle->channels[i].alone);
		forget_list(settle, &settle->channels[i].missing);
	}
	forget_list(settle, &settle->resting);
}
