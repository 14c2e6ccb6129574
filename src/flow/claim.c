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
#include "flow/undo.h"

#define LANES_PER_CLAIM 64
/* Of a lane's messages that run alone so many may wait when more is claimed. */
#define ALONE_AHEAD 1
#define FULL_SCAN_LEAST_NS 200000000u
#define BACKOFF_LEAST_NS 50000000u
#define BACKOFF_MOST_NS 1000000000u
#define ERROR_PAUSE_NS 1000000000u
#define NEVER UINT64_MAX
#define SECOND_NS 1e9

struct mill_lane_state {
	struct mill_link_node node; /* in ready, idle or retired */
	struct mill_lane *lane;
	int32_t asked_number; /* of the claim in flight: what the lane was called then */
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

struct mill_claim {
	struct mill_claim_options options;
	struct mill_list ready, idle;
	struct mill_list retired; /* of lanes taken away: until the claim in flight is answered */
	struct mill_lane_state *asked[LANES_PER_CLAIM]; /* of the claim in flight, in its order */
	size_t asked_count;
	bool in_flight;
	uint64_t number; /* of the last claim */
	uint64_t sent_ns;
	size_t most;
	struct mill_undo *undo;
	size_t questions;  /* when messages are due: in flight */
	uint64_t pause_ns; /* no claim before then, after an error */
	bool stopped;
	uv_timer_t due, poll;
	int handles;
	struct mill_log_gate gate;
	void (*on_closed)(void *context);
	void *closed_context;
};

/* ---- lanes --------------------------------------------------------------------------------- */

static struct mill_lane_state *state_at(struct mill_link_node *node)
{
	return mill_container_of(node, struct mill_lane_state, node);
}

static void free_list(struct mill_list *list)
{
	struct mill_link_node *node;
	while ((node = mill_list_shift(list)) != NULL) {
		state_at(node)->lane->claiming = NULL;
		free(state_at(node));
	}
}

static void make_ready(struct mill_claim *claim, struct mill_lane_state *state)
{
	state->woken = true;
	if (state->ready || state->lane->unclaimed)
		return;
	mill_list_remove(&claim->idle, &state->node);
	mill_list_push(&claim->ready, &state->node);
	state->ready = true;
	state->due_ns = NEVER;
}

static void make_idle(struct mill_claim *claim, struct mill_lane_state *state, uint64_t due_ns)
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

static bool may_scan_full(const struct mill_lane_state *state, uint64_t now)
{
	uint64_t pause = state->full_took_ns * 10;
	if (pause < FULL_SCAN_LEAST_NS)
		pause = FULL_SCAN_LEAST_NS;
	return state->full_ns == 0 || now - state->full_ns >= pause;
}

void mill_claim_wake_topic(struct mill_claim *claim, struct mill_span topic)
{
	for (size_t i = 0; i < mill_lanes_count(claim->options.lanes); i++) {
		const struct mill_lane *lane = mill_lanes_at(claim->options.lanes, i);
		const char *name = lane->spec->topic;
		if (strlen(name) == topic.len && memcmp(name, topic.data, topic.len) == 0)
			make_ready(claim, lane->claiming);
	}
}

void mill_claim_wake_all(struct mill_claim *claim)
{
	for (size_t i = 0; i < mill_lanes_count(claim->options.lanes); i++)
		make_ready(claim, mill_lanes_at(claim->options.lanes, i)->claiming);
}

void mill_claim_expect(struct mill_claim *claim, const struct mill_lane *lane, double secs)
{
	struct mill_lane_state *state = lane->claiming;
	uint64_t due = mill_clock_ns() + (uint64_t)(fmin(secs, 86400) * SECOND_NS);
	if (state != NULL && !lane->removed && !state->ready && due < state->due_ns) {
		state->due_ns = due;
		set_due_timer(claim);
	}
}

static void on_poll(uv_timer_t *timer)
{
	mill_claim_wake_all(mill_container_of(timer, struct mill_claim, poll));
}

/* ---- the answer ---------------------------------------------------------------------------- */

static struct mill_lane_state *asked_lane(struct mill_claim *claim, int32_t number)
{
	for (size_t i = 0; i < claim->asked_count; i++)
		if (claim->asked[i]->asked_number == number)
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

static void take_row(struct mill_claim *claim, const struct mill_store_claimed *row,
                     struct mill_span fence)
{
	struct mill_lane_state *state = asked_lane(claim, row->lane);
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
		.attempts = delivery->attempts,
		.max_attempts = delivery->max_attempts,
		.priority = row->priority,
		.created_at = row->created_at,
		.published_by = row->published_by,
		.headers = row->headers,
		.payload = row->payload,
		.fence = fence,
	};
	memcpy(deliver.id, row->id, sizeof(deliver.id));
	claim->options.on_claimed(delivery, &deliver, claim->options.context);
}

/* When the next message is due could not be learnt. */
static void look_again(struct mill_claim *claim, uint64_t due_ns)
{
	mill_list_each(node, &claim->idle)
	{
		struct mill_lane_state *state = state_at(node);
		if (!state->lane->unclaimed && state->due_ns > due_ns)
			state->due_ns = due_ns;
	}
	set_due_timer(claim);
}

static struct mill_lane_state *state_of(struct mill_claim *claim, int32_t number)
{
	for (size_t i = 0; i < mill_lanes_count(claim->options.lanes); i++) {
		const struct mill_lane *lane = mill_lanes_at(claim->options.lanes, i);
		if (lane->number == number)
			return lane->claiming;
	}
	return NULL;
}

static void on_due_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct mill_claim *claim = context;
	claim->questions--;
	uint64_t now = mill_clock_ns();
	if (err != NULL) {
		look_again(claim, now + ERROR_PAUSE_NS);
		return;
	}
	for (size_t i = 0; i < mill_store_due_count(results); i++) {
		int32_t number;
		double secs;
		mill_store_due_row(results, i, &number, &secs);
		struct mill_lane_state *state = state_of(claim, number);
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
		struct mill_lane_state *state = claim->asked[i];
		if (state->lane->removed)
			continue;
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
		claim->questions++;
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
	char text[MILL_STORE_FENCE_MAX];
	struct mill_span fence = mill_store_fence(claim->options.store, claim->number, text);
	for (size_t i = 0; i < count; i++)
		take_row(claim, &rows[i], fence);
	free(rows);
	conclude_lanes(claim, count >= claim->most);
}

static void take_refusal(struct mill_claim *claim, const struct mill_err *err)
{
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

/* Where it looked: marks only move on with an answer. */
static void remember_lost(struct mill_claim *claim)
{
	struct mill_store_want wants[LANES_PER_CLAIM];
	for (size_t i = 0; i < claim->asked_count; i++) {
		wants[i].lane = claim->asked[i]->asked_number;
		memcpy(wants[i].low, claim->asked[i]->low, sizeof(wants[i].low));
	}
	mill_undo_add(claim->undo, claim->number, wants, claim->asked_count);
}

static void on_claim_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct mill_claim *claim = context;
	claim->in_flight = false;
	if (err == NULL) {
		MILL_KILL_POINT("claim_answered");
		take_claimed(claim, results);
	} else if (err->kind == MILL_ERR_UNREACHED) {
		remember_lost(claim);
	} else {
		take_refusal(claim, err);
	}
	claim->asked_count = 0;
	free_list(&claim->retired);
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

static void reset_marks(struct mill_lane_state *state)
{
	for (size_t i = 0; i < MILL_PRIORITIES; i++)
		state->low[i] = MILL_PG_MINUS_INFINITY;
}

static void fill_want(struct mill_claim *claim, struct mill_lane_state *state, size_t count,
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
	state->asked_number = want->lane = state->lane->number;
	want->count = (int32_t)count;
	memcpy(want->low, state->low, sizeof(want->low));
	claim->asked[claim->asked_count++] = state;
}

void mill_claim_turn(struct mill_claim *claim)
{
	uint64_t now = mill_clock_ns();
	if (!mill_link_is_up(claim->options.work))
		return;
	mill_undo_turn(claim->undo, now);
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

static void on_undone(void *context)
{
	mill_claim_wake_all(context);
}

static void add_state(struct mill_claim *claim, struct mill_lane *lane)
{
	struct mill_lane_state *state = mill_calloc(1, sizeof(*state));
	state->lane = lane;
	state->backoff_ns = BACKOFF_LEAST_NS;
	lane->claiming = state;
	mill_list_push(&claim->idle, &state->node);
}

/* Those of lanes that are declared no more. A lane that came back has its old state. */
static void retire(struct mill_claim *claim, struct mill_list *from)
{
	mill_list_each(node, from)
	{
		struct mill_lane_state *state = state_at(node);
		if (!state->lane->removed)
			continue;
		mill_list_remove(from, node);
		mill_list_push(&claim->retired, node);
		state->ready = false;
	}
}

static void revive(struct mill_claim *claim)
{
	mill_list_each(node, &claim->retired)
	{
		if (state_at(node)->lane->removed)
			continue;
		mill_list_remove(&claim->retired, node);
		mill_list_push(&claim->idle, node);
	}
}

void mill_claim_follow(struct mill_claim *claim, size_t batch, double poll_secs)
{
	struct mill_lanes *lanes = claim->options.lanes;
	claim->options.batch = batch;
	retire(claim, &claim->ready);
	retire(claim, &claim->idle);
	revive(claim);
	if (!claim->in_flight)
		free_list(&claim->retired);
	for (size_t i = 0; i < mill_lanes_count(lanes); i++) {
		struct mill_lane *lane = mill_lanes_at(lanes, i);
		if (lane->claiming == NULL)
			add_state(claim, lane);
		/* Another number is another part of the index. */
		reset_marks(lane->claiming);
		lane->claiming->due_ns = NEVER;
		lane->claiming->full_ns = 0;
	}
	if (claim->stopped)
		return;
	uint64_t poll_ms = (uint64_t)(poll_secs * 1000);
	uv_timer_start(&claim->poll, on_poll, poll_ms, poll_ms);
	mill_claim_wake_all(claim);
}

struct mill_claim *mill_claim_new(const struct mill_claim_options *options)
{
	struct mill_claim *claim = mill_calloc(1, sizeof(*claim));
	claim->options = *options;
	mill_list_init(&claim->ready);
	mill_list_init(&claim->idle);
	mill_list_init(&claim->retired);
	claim->undo = mill_undo_new(options->store, options->work, on_undone, claim);
	MILL_ASSERT(uv_timer_init(options->loop, &claim->due) == 0);
	MILL_ASSERT(uv_timer_init(options->loop, &claim->poll) == 0);
	claim->handles = 2;
	mill_claim_follow(claim, options->batch, options->poll_secs);
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
	if (!mill_list_empty(&claim->ready))
		return false;
	mill_list_each(node, &claim->idle)
	{
		if (state_at(node)->due_ns < soon)
			return false;
	}
	return true;
}

bool mill_claim_is_settled(const struct mill_claim *claim)
{
	return !claim->in_flight && claim->questions == 0 && mill_undo_is_settled(claim->undo);
}

void mill_claim_forget(struct mill_claim *claim)
{
	mill_undo_forget(claim->undo);
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct mill_claim *claim = handle->data;
	if (--claim->handles > 0)
		return;
	void (*on_closed)(void *) = claim->on_closed;
	void *context = claim->closed_context;
	free(claim);
	on_closed(context);
}

void mill_claim_close(struct mill_claim *claim, void (*on_closed)(void *context), void *context)
{
	MILL_ASSERT(!claim->in_flight && claim->questions == 0);
	mill_undo_free(claim->undo);
	free_list(&claim->ready);
	free_list(&claim->idle);
	free_list(&claim->retired);
	claim->on_closed = on_closed;
	claim->closed_context = context;
	claim->due.data = claim->poll.data = claim;
	uv_close((uv_handle_t *)&claim->due, on_timer_closed);
	uv_close((uv_handle_t *)&claim->poll, on_timer_closed);
}
