/*
 * When and what to claim: see claim.h.
 *
 * Low-water marks. A deep lane is claimed batch after batch from its head, and the dead versions of
 * what was claimed lie before the rest: a scan from the beginning would walk over all of them each
 * time. So each lane remembers, per priority, how far it has come, and the next claim begins there.
 * The mark is only a hint: a message with an earlier due time can appear behind it (a transaction
 * that committed late). Nothing is missed, because
 * - a lane becomes IDLE only after a full scan, from the beginning, came back short;
 * - a lane in steady use has a full scan every FULL_SCAN_LEAST_NS, or ten times as long as the last
 *   one took, so that full scans never take more than a tenth of the time.
 * What returns to `pending` is due from that moment on, never before the mark.
 */
#include "flow/claim.h"

#include <math.h>

#include "core/clock.h"
#include "core/killpoint.h"
#include "core/log.h"

#define LANES_PER_CLAIM 64
/* Of a lane's messages that run alone so many may wait when more is claimed. */
#define ALONE_AHEAD 1
#define FULL_SCAN_LEAST_NS 200000000u
#define BACKOFF_LEAST_NS 50000000u
#define BACKOFF_MOST_NS 1000000000u
#define ERROR_PAUSE_NS 1000000000u
#define NEVER UINT64_MAX
#define SECOND_NS 1e9

/*
 * When a claim whose answer was lost is undone: at once, and again and again, each so long after
 * the last, because it may commit late. After an interruption of the network, the kernel delivers
 * what a closed connection had still to send, a quarter of an hour later at the most. A row claimed
 * so would be held for as long as this worker lives.
 */
static const double undo_after_secs[] = { 0, 2, 10, 60, 300, 900 };

struct lane_state {
	struct mill_link_node node; /* in ready or idle */
	struct mill_lane *lane;
	bool ready;
	bool woken;      /* since the claim in flight was sent: its answer does not make it idle */
	uint64_t due_ns; /* idle: when to look again */
	uint64_t backoff_ns; /* due, but not claimable: the next pause */
	uint64_t full_ns;    /* when its last full scan was sent */
	uint64_t full_took_ns;
	int64_t low[MILL_PRIORITIES];
	size_t want, got; /* of the claim in flight */
	bool full;        /* the claim in flight scans it from the beginning */
};

struct lost_claim {
	uint64_t number;
	uint64_t at_ns;
	size_t tries;
	bool in_flight;
	struct lost_claim *next;
	struct mill_claim *claim;
};

struct mill_claim {
	struct mill_claim_options options;
	struct lane_state *states;
	struct mill_list ready, idle;
	struct lane_state *asked[LANES_PER_CLAIM]; /* of the claim in flight, in its order */
	size_t asked_count;
	bool in_flight;
	uint64_t number; /* of the last claim */
	uint64_t sent_ns;
	size_t most;
	struct lost_claim *lost;
	size_t undoing;    /* undo statements and due questions in flight */
	uint64_t pause_ns; /* no claim before then, after an error */
	bool stopped;
	uv_timer_t due, poll;
	int handles;
	struct mill_log_gate gate;
	void (*on_closed)(void *context);
	void *closed_context;
};

/* ---- lanes --------------------------------------------------------------------------------- */

static struct lane_state *state_at(struct mill_link_node *node)
{
	return mill_container_of(node, struct lane_state, node);
}

static void make_ready(struct mill_claim *claim, struct lane_state *state)
{
	state->woken = true;
	if (state->ready || state->lane->unclaimed)
		return;
	mill_list_remove(&claim->idle, &state->node);
	mill_list_push(&claim->ready, &state->node);
	state->ready = true;
	state->due_ns = NEVER;
}

static void make_idle(struct mill_claim *claim, struct lane_state *state, uint64_t due_ns)
{
	MILL_ASSERT(state->ready);
	mill_list_remove(&claim->ready, &state->node);
	mill_list_push(&claim->idle, &state->node);
	state->ready = false;
	state->due_ns = due_ns;
}

static void set_due_timer(struct mill_claim *claim);

/* The loop's idea of now may be older than the clock's: a timer that fires early is set again. */
static void on_due(uv_timer_t *timer)
{
	struct mill_claim *claim = mill_container_of(timer, struct mill_claim, due);
	uint64_t now = mill_clock_ns();
	mill_list_each(node, &claim->idle) if (state_at(node)->due_ns <= now)
	        make_ready(claim, state_at(node));
	set_due_timer(claim);
}

static void set_due_timer(struct mill_claim *claim)
{
	uint64_t first = NEVER, now = mill_clock_ns();
	mill_list_each(node, &claim->idle) if (state_at(node)->due_ns < first) first =
	        state_at(node)->due_ns;
	if (claim->pause_ns > now && !mill_list_empty(&claim->ready) && claim->pause_ns < first)
		first = claim->pause_ns;
	if (first == NEVER || claim->stopped)
		uv_timer_stop(&claim->due);
	else
		uv_timer_start(&claim->due, on_due, first > now ? (first - now) / 1000000 + 1 : 0,
		               0);
}

static bool may_scan_full(const struct lane_state *state, uint64_t now)
{
	uint64_t pause = state->full_took_ns * 10;
	if (pause < FULL_SCAN_LEAST_NS)
		pause = FULL_SCAN_LEAST_NS;
	return state->full_ns == 0 || now - state->full_ns >= pause;
}

void mill_claim_wake_topic(struct mill_claim *claim, struct mill_span topic)
{
	for (size_t i = 0; i < claim->options.lane_count; i++) {
		const char *name = claim->states[i].lane->spec->topic;
		if (strlen(name) == topic.len && memcmp(name, topic.data, topic.len) == 0)
			make_ready(claim, &claim->states[i]);
	}
}

void mill_claim_wake_all(struct mill_claim *claim)
{
	for (size_t i = 0; i < claim->options.lane_count; i++)
		make_ready(claim, &claim->states[i]);
}

void mill_claim_expect(struct mill_claim *claim, const struct mill_lane *lane, double secs)
{
	struct lane_state *state = &claim->states[lane - claim->options.lanes];
	uint64_t due = mill_clock_ns() + (uint64_t)(fmin(secs, 86400) * SECOND_NS);
	if (!state->ready && due < state->due_ns) {
		state->due_ns = due;
		set_due_timer(claim);
	}
}

static void on_poll(uv_timer_t *timer)
{
	mill_claim_wake_all(mill_container_of(timer, struct mill_claim, poll));
}

/* ---- the answer ---------------------------------------------------------------------------- */

static struct lane_state *asked_lane(struct mill_claim *claim, int32_t number)
{
	for (size_t i = 0; i < claim->asked_count; i++)
		if (claim->asked[i]->lane->number == number)
			return claim->asked[i];
	return NULL;
}

/* The order of a lane, which RETURNING does not keep. */
static int compare_rows(const void *a, const void *b)
{
	const struct mill_store_claimed *left = a, *right = b;
	if (left->priority != right->priority)
		return left->priority < right->priority ? -1 : 1;
	if (left->available_at != right->available_at)
		return left->available_at < right->available_at ? -1 : 1;
	return left->seq < right->seq ? -1 : left->seq > right->seq;
}

/* What other programs wrote obeys no limits: why this message cannot be delivered, or NULL. */
static const char *fault_of(const struct mill_store_claimed *row)
{
	if (row->payload.data == NULL)
		return "its payload is larger than max_payload_bytes";
	if (row->headers.data != NULL && row->headers.len == 0)
		return "its headers are larger than 65536 bytes";
	return NULL;
}

static void take_row(struct mill_claim *claim, const struct mill_store_claimed *row)
{
	struct lane_state *state = asked_lane(claim, row->lane);
	MILL_ASSERT(state != NULL);
	struct mill_lane *lane = state->lane;
	state->got++;
	int64_t *low = &state->low[row->priority - MILL_PRIORITY_LEAST];
	if (row->available_at > *low)
		*low = row->available_at;

	struct mill_delivery *delivery = mill_delivery_new();
	delivery->lane = lane;
	lane->running++;
	memcpy(delivery->id, row->id, sizeof(delivery->id));
	delivery->claim = claim->number;
	delivery->attempts = (uint32_t)row->attempts;
	delivery->max_attempts = row->max_attempts > 0 ? (uint32_t)row->max_attempts
	                                               : (uint32_t)lane->spec->options.max_attempts;
	delivery->crashes = (uint32_t)row->crashes;
	const char *fault = fault_of(row);
	if (fault != NULL) {
		claim->options.on_refused(delivery, fault, claim->options.context);
		return;
	}
	struct mill_deliver deliver = {
		.lane = (uint32_t)lane->index,
		.attempts = delivery->attempts,
		.max_attempts = delivery->max_attempts,
		.priority = row->priority,
		.created_at = row->created_at,
		.published_by = row->published_by,
		.headers = row->headers,
		.payload = row->payload,
	};
	memcpy(deliver.id, row->id, sizeof(deliver.id));
	claim->options.on_claimed(delivery, &deliver, claim->options.context);
}

/* When the next message is due could not be learnt. */
static void look_again(struct mill_claim *claim, uint64_t due_ns)
{
	mill_list_each(node, &claim->idle)
	{
		struct lane_state *state = state_at(node);
		if (!state->lane->unclaimed && state->due_ns > due_ns)
			state->due_ns = due_ns;
	}
	set_due_timer(claim);
}

static void on_due_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct mill_claim *claim = context;
	claim->undoing--;
	uint64_t now = mill_clock_ns();
	if (err != NULL) {
		look_again(claim, now + ERROR_PAUSE_NS);
		return;
	}
	for (size_t i = 0; i < mill_store_due_count(results); i++) {
		int32_t number;
		double secs;
		mill_store_due_row(results, i, &number, &secs);
		struct lane_state *state = NULL;
		for (size_t j = 0; j < claim->options.lane_count && state == NULL; j++)
			if (claim->states[j].lane->number == number)
				state = &claim->states[j];
		if (state == NULL || state->ready)
			continue;
		uint64_t due;
		if (secs > 0) {
			due = now + (uint64_t)(fmin(secs, 86400) * SECOND_NS);
		} else {
			/* Due, yet the full scan did not get it: somebody has it locked. Do not
			 * spin. */
			due = now + state->backoff_ns;
			state->backoff_ns = state->backoff_ns * 2 < BACKOFF_MOST_NS
			                            ? state->backoff_ns * 2
			                            : BACKOFF_MOST_NS;
		}
		if (due < state->due_ns)
			state->due_ns = due;
	}
	set_due_timer(claim);
}

/* What a short answer means for a lane: look again from the beginning, or rest until it is due. */
static void conclude_lanes(struct mill_claim *claim, bool cut)
{
	int32_t rest[LANES_PER_CLAIM];
	size_t rest_count = 0;
	uint64_t now = mill_clock_ns();
	for (size_t i = 0; i < claim->asked_count; i++) {
		struct lane_state *state = claim->asked[i];
		if (state->full)
			state->full_took_ns = now - claim->sent_ns;
		if (state->got > 0)
			state->backoff_ns = BACKOFF_LEAST_NS;
		bool is_short = state->got < state->want && !cut;
		if (!is_short || state->woken) {
			/* More is there, or may be. Those served go behind those that were not
			 * reached. */
			if (state->got > 0 || is_short) {
				mill_list_remove(&claim->ready, &state->node);
				mill_list_push(&claim->ready, &state->node);
			}
		} else if (!state->full) {
			uint64_t pause = state->full_took_ns * 10;
			pause = pause < FULL_SCAN_LEAST_NS ? FULL_SCAN_LEAST_NS : pause;
			make_idle(claim, state, state->full_ns + pause);
		} else {
			make_idle(claim, state, NEVER);
			rest[rest_count++] = state->lane->number;
		}
	}
	if (rest_count > 0 && !claim->stopped && mill_link_is_up(claim->options.work)) {
		claim->undoing++;
		mill_store_due(claim->options.store, claim->options.work, rest, rest_count,
		               on_due_answer, claim);
	}
	set_due_timer(claim);
}

static void take_claimed(struct mill_claim *claim, const struct mill_results *results)
{
	size_t count = mill_store_claimed_count(results);
	struct mill_store_claimed *rows = mill_alloc(count * sizeof(rows[0]));
	for (size_t i = 0; i < count; i++)
		mill_store_claimed_row(results, i, &rows[i]);
	qsort(rows, count, sizeof(rows[0]), compare_rows);
	for (size_t i = 0; i < count; i++)
		take_row(claim, &rows[i]);
	free(rows);
	conclude_lanes(claim, count >= claim->most);
}

static void remember_lost(struct mill_claim *claim, uint64_t number)
{
	struct lost_claim *lost = mill_calloc(1, sizeof(*lost));
	lost->number = number;
	lost->claim = claim;
	lost->next = claim->lost;
	claim->lost = lost;
}

static void on_claim_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct mill_claim *claim = context;
	claim->in_flight = false;
	if (err == NULL) {
		MILL_KILL_POINT("claim_answered");
		take_claimed(claim, results);
		return;
	}
	if (err->kind == MILL_ERR_UNREACHED) {
		remember_lost(claim, claim->number);
		return;
	}
	claim->pause_ns =
	        mill_clock_ns() + (mill_err_database_reaction(err->sqlstate) == MILL_REACT_RETRY
	                                   ? BACKOFF_LEAST_NS
	                                   : ERROR_PAUSE_NS);
	set_due_timer(claim);
	uint64_t skipped;
	if (mill_log_gate(&claim->gate, 10, &skipped))
		mill_log(MILL_LOG_ERROR, "claim_refused", MILL_TEXT("error", err->message),
		         MILL_TEXT("sqlstate", err->sqlstate), MILL_INT("skipped", skipped));
}

/* ---- undoing a claim whose answer was lost ------------------------------------------------- */

static void on_undone(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct lost_claim *lost = context;
	struct mill_claim *claim = lost->claim;
	lost->in_flight = false;
	claim->undoing--;
	if (err != NULL) {
		lost->at_ns = mill_clock_ns() + ERROR_PAUSE_NS;
		return;
	}
	size_t count = mill_store_undone_count(results);
	if (count > 0) {
		mill_log(MILL_LOG_INFO, "claim_undone", MILL_INT("messages", count));
		mill_claim_wake_all(claim);
	}
	lost->tries++;
	if (lost->tries < MILL_COUNT(undo_after_secs)) {
		double secs = undo_after_secs[lost->tries];
		lost->at_ns = mill_clock_ns() + (uint64_t)(secs * SECOND_NS);
		return;
	}
	struct lost_claim **at = &claim->lost;
	while (*at != lost)
		at = &(*at)->next;
	*at = lost->next;
	free(lost);
}

static void undo_lost(struct mill_claim *claim, uint64_t now)
{
	for (struct lost_claim *lost = claim->lost; lost != NULL; lost = lost->next) {
		if (lost->in_flight || lost->at_ns > now)
			continue;
		lost->in_flight = true;
		claim->undoing++;
		mill_store_undo_claim(claim->options.store, claim->options.work, lost->number,
		                      on_undone, lost);
	}
}

void mill_claim_forget(struct mill_claim *claim)
{
	struct lost_claim **at = &claim->lost;
	while (*at != NULL) {
		struct lost_claim *lost = *at;
		if (lost->in_flight) {
			lost->tries = MILL_COUNT(undo_after_secs); /* the answer frees it */
			at = &lost->next;
		} else {
			*at = lost->next;
			free(lost);
		}
	}
}

/* ---- asking -------------------------------------------------------------------------------- */

static size_t lane_room(const struct mill_lane *lane, size_t most)
{
	int64_t limit = lane->spec->options.concurrency;
	if (lane->alone > ALONE_AHEAD)
		return 0;
	if (limit == 0)
		return most;
	size_t room = lane->running < (size_t)limit ? (size_t)limit - lane->running : 0;
	return room < most ? room : most;
}

static void reset_marks(struct lane_state *state)
{
	for (size_t i = 0; i < MILL_PRIORITIES; i++)
		state->low[i] = MILL_PG_MINUS_INFINITY;
}

static void fill_want(struct mill_claim *claim, struct lane_state *state, size_t count,
                      uint64_t now, struct mill_store_want *want)
{
	state->full = may_scan_full(state, now);
	if (state->full) {
		reset_marks(state);
		state->full_ns = now;
	}
	state->want = count;
	state->got = 0;
	state->woken = false;
	want->lane = state->lane->number;
	want->count = (int32_t)count;
	memcpy(want->low, state->low, sizeof(want->low));
	claim->asked[claim->asked_count++] = state;
}

void mill_claim_turn(struct mill_claim *claim)
{
	uint64_t now = mill_clock_ns();
	if (!mill_link_is_up(claim->options.work))
		return;
	undo_lost(claim, now);
	if (claim->stopped || claim->in_flight || claim->pause_ns > now)
		return;
	size_t most =
	        mill_list_empty(&claim->ready) ? 0 : claim->options.room(claim->options.context);
	if (most > claim->options.batch)
		most = claim->options.batch;
	if (most == 0)
		return;
	struct mill_store_want wants[LANES_PER_CLAIM];
	claim->asked_count = 0;
	mill_list_each(node, &claim->ready)
	{
		size_t count = lane_room(state_at(node)->lane, most);
		if (count > 0)
			fill_want(claim, state_at(node), count, now, &wants[claim->asked_count]);
		if (claim->asked_count == LANES_PER_CLAIM)
			break;
	}
	if (claim->asked_count == 0)
		return;
	MILL_KILL_POINT("claim_begin");
	claim->in_flight = true;
	claim->sent_ns = now;
	claim->most = most;
	claim->number++;
	mill_store_claim(claim->options.store, claim->options.work, claim->number, wants,
	                 claim->asked_count, (int32_t)most, on_claim_answer, claim);
}

/* ---- life ---------------------------------------------------------------------------------- */

struct mill_claim *mill_claim_new(const struct mill_claim_options *options)
{
	struct mill_claim *claim = mill_calloc(1, sizeof(*claim));
	claim->options = *options;
	mill_list_init(&claim->ready);
	mill_list_init(&claim->idle);
	claim->states = mill_calloc(options->lane_count, sizeof(claim->states[0]));
	for (size_t i = 0; i < options->lane_count; i++) {
		struct lane_state *state = &claim->states[i];
		state->lane = &options->lanes[i];
		state->due_ns = NEVER;
		state->backoff_ns = BACKOFF_LEAST_NS;
		reset_marks(state);
		mill_list_push(&claim->idle, &state->node);
	}
	MILL_ASSERT(uv_timer_init(options->loop, &claim->due) == 0);
	MILL_ASSERT(uv_timer_init(options->loop, &claim->poll) == 0);
	claim->handles = 2;
	uint64_t poll_ms = (uint64_t)(options->poll_secs * 1000);
	uv_timer_start(&claim->poll, on_poll, poll_ms, poll_ms);
	mill_claim_wake_all(claim);
	return claim;
}

void mill_claim_stop(struct mill_claim *claim)
{
	claim->stopped = true;
	uv_timer_stop(&claim->due);
	uv_timer_stop(&claim->poll);
}

bool mill_claim_is_idle(const struct mill_claim *claim)
{
	if (!mill_link_is_up(claim->options.work) || !mill_claim_is_settled(claim))
		return false;
	uint64_t soon = mill_clock_ns() + (uint64_t)SECOND_NS;
	for (size_t i = 0; i < claim->options.lane_count; i++)
		if (claim->states[i].ready || claim->states[i].due_ns < soon)
			return false;
	return true;
}

bool mill_claim_is_settled(const struct mill_claim *claim)
{
	if (claim->in_flight || claim->undoing > 0)
		return false;
	for (const struct lost_claim *lost = claim->lost; lost != NULL; lost = lost->next)
		if (lost->tries == 0)
			return false;
	return true;
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct mill_claim *claim = handle->data;
	if (--claim->handles > 0)
		return;
	void (*on_closed)(void *) = claim->on_closed;
	void *context = claim->closed_context;
	free(claim->states);
	free(claim);
	on_closed(context);
}

void mill_claim_close(struct mill_claim *claim, void (*on_closed)(void *context), void *context)
{
	MILL_ASSERT(!claim->in_flight && claim->undoing == 0);
	mill_claim_forget(claim);
	claim->on_closed = on_closed;
	claim->closed_context = context;
	claim->due.data = claim->poll.data = claim;
	uv_close((uv_handle_t *)&claim->due, on_timer_closed);
	uv_close((uv_handle_t *)&claim->poll, on_timer_closed);
}
