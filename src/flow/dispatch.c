/*
 * Deliveries on their way to executors: see dispatch.h.
 *
 * A ticket is the number of a slot and a count of that slot's uses, so that a late or forged
 * outcome cannot name a later delivery.
 */
#include "flow/dispatch.h"

#include "core/clock.h"
#include "core/killpoint.h"
#include "core/log.h"

/* A message that was in so many crashes without being the cause runs alone, and answers for itself.
 */
#define CRASHES_BEFORE_SOLO 2

/* A handler that has held the processor for longer than this gets no company while others are free.
 */
#define BUSY_NS 10000000u

struct slot {
	struct mill_delivery *delivery; /* NULL: free */
	struct mill_executor *executor; /* who has it; NULL: it waits */
	uint32_t uses;
	uint32_t next_free;
};

struct mill_dispatch {
	struct mill_dispatch_options options;
	struct mill_list claimed;
	struct mill_list solo; /* claimed too, to run alone */
	size_t sent;
	struct slot *slots;
	uint32_t slot_count, first_free; /* first_free == slot_count: none */
};

struct mill_dispatch *mill_dispatch_new(const struct mill_dispatch_options *options)
{
	struct mill_dispatch *dispatch = mill_calloc(1, sizeof(*dispatch));
	dispatch->options = *options;
	mill_list_init(&dispatch->claimed);
	mill_list_init(&dispatch->solo);
	return dispatch;
}

void mill_dispatch_free(struct mill_dispatch *dispatch)
{
	MILL_ASSERT(mill_dispatch_held(dispatch) == 0);
	free(dispatch->slots);
	free(dispatch);
}

size_t mill_dispatch_held(const struct mill_dispatch *dispatch)
{
	return dispatch->claimed.len + dispatch->solo.len + dispatch->sent;
}

/*
 * What waits to run alone takes no room from the others, who pass it by: a lane that has some is
 * not claimed for until they are through (see claim.c), which bounds them.
 */
size_t mill_dispatch_room(const struct mill_dispatch *dispatch, struct mill_pool *pool)
{
	size_t room = mill_pool_room(pool);
	return room > dispatch->claimed.len ? room - dispatch->claimed.len : 0;
}

/* ---- tickets ------------------------------------------------------------------------------- */

static void grow_slots(struct mill_dispatch *dispatch)
{
	uint32_t old = dispatch->slot_count, count = old ? old * 2 : 64;
	dispatch->slots = mill_realloc(dispatch->slots, count * sizeof(dispatch->slots[0]));
	for (uint32_t i = old; i < count; i++)
		dispatch->slots[i] = (struct slot){ .next_free = i + 1 };
	dispatch->first_free = old;
	dispatch->slot_count = count;
}

static uint64_t issue_ticket(struct mill_dispatch *dispatch, struct mill_delivery *delivery)
{
	if (dispatch->first_free == dispatch->slot_count)
		grow_slots(dispatch);
	uint32_t number = dispatch->first_free;
	struct slot *slot = &dispatch->slots[number];
	dispatch->first_free = slot->next_free;
	slot->delivery = delivery;
	slot->executor = NULL;
	slot->uses++;
	/* Never 0, which the blame page means by "nobody". */
	return (uint64_t)slot->uses << 32 | number;
}

static struct slot *slot_of(struct mill_dispatch *dispatch, uint64_t ticket)
{
	uint32_t number = (uint32_t)ticket, uses = (uint32_t)(ticket >> 32);
	if (number >= dispatch->slot_count || dispatch->slots[number].uses != uses)
		return NULL;
	return dispatch->slots[number].delivery ? &dispatch->slots[number] : NULL;
}

static void return_ticket(struct mill_dispatch *dispatch, uint64_t ticket)
{
	struct slot *slot = slot_of(dispatch, ticket);
	MILL_ASSERT(slot != NULL);
	slot->delivery = NULL;
	slot->executor = NULL;
	slot->next_free = dispatch->first_free;
	dispatch->first_free = (uint32_t)(slot - dispatch->slots);
}

struct mill_delivery *mill_dispatch_find(struct mill_dispatch *dispatch,
                                         const struct mill_executor *executor, uint64_t ticket)
{
	struct slot *slot = slot_of(dispatch, ticket);
	return slot && slot->executor == executor ? slot->delivery : NULL;
}

/* ---- to the executors ---------------------------------------------------------------------- */

static bool runs_alone(const struct mill_delivery *delivery)
{
	return delivery->crashes >= CRASHES_BEFORE_SOLO;
}

static struct mill_list *waiting_list(struct mill_dispatch *dispatch,
                                      const struct mill_delivery *delivery)
{
	return runs_alone(delivery) ? &dispatch->solo : &dispatch->claimed;
}

void mill_dispatch_take(struct mill_dispatch *dispatch, struct mill_delivery *delivery,
                        struct mill_deliver *deliver)
{
	delivery->ticket = issue_ticket(dispatch, delivery);
	deliver->ticket = delivery->ticket;
	mill_deliver_write(&delivery->frame, deliver);
	delivery->lane->alone += runs_alone(delivery);
	mill_delivery_move(delivery, NULL, waiting_list(dispatch, delivery), MILL_DELIVERY_CLAIMED);
}

/* The least loaded executor with room; one whose handler hogs the processor only as a last resort.
 */
static struct mill_executor *choose(struct mill_pool *pool)
{
	struct mill_executor *best = NULL;
	bool best_busy = false;
	for (struct mill_executor *e = mill_pool_next(pool, NULL); e; e = mill_pool_next(pool, e)) {
		if (mill_executor_room(e) == 0)
			continue;
		bool busy = !mill_list_empty(&e->sent) && mill_executor_busy_ns(e) > BUSY_NS;
		if (best == NULL || (best_busy && !busy) ||
		    (best_busy == busy && e->sent.len < best->sent.len)) {
			best = e;
			best_busy = busy;
		}
	}
	return best;
}

static void send_first(struct mill_dispatch *dispatch, struct mill_list *from,
                       struct mill_executor *executor)
{
	struct mill_delivery *delivery =
	        mill_container_of(mill_list_first(from), struct mill_delivery, node);
	/* It may have waited through a reload, after which the executors number lanes otherwise. */
	mill_deliver_set_lane(&delivery->frame, (uint32_t)delivery->lane->index);
	mill_buffer_bytes(mill_executor_out(executor), delivery->frame.data, delivery->frame.len);
	mill_buffer_free(&delivery->frame);
	slot_of(dispatch, delivery->ticket)->executor = executor;
	delivery->sent_ns = mill_clock_ns();
	delivery->lane->alone -= from == &dispatch->solo;
	mill_delivery_move(delivery, from, &executor->sent, MILL_DELIVERY_SENT);
	executor->delivered++;
	dispatch->sent++;
}

void mill_dispatch_send(struct mill_dispatch *dispatch, struct mill_pool *pool)
{
	while (!mill_list_empty(&dispatch->claimed)) {
		struct mill_executor *executor = choose(pool);
		if (executor == NULL)
			break;
		send_first(dispatch, &dispatch->claimed, executor);
	}
	struct mill_executor *solo = mill_pool_solo(pool, !mill_list_empty(&dispatch->solo));
	if (solo != NULL && mill_list_empty(&solo->sent) && !mill_list_empty(&dispatch->solo))
		send_first(dispatch, &dispatch->solo, solo);
}

/* ---- and back ------------------------------------------------------------------------------ */

static void finish(struct mill_dispatch *dispatch, struct mill_delivery *delivery,
                   struct mill_list *from, const struct mill_outcome *outcome)
{
	return_ticket(dispatch, delivery->ticket);
	mill_buffer_free(&delivery->frame);
	delivery->lane->alone -= from == &dispatch->solo;
	mill_delivery_move(delivery, from, NULL, MILL_DELIVERY_NEW);
	if (delivery->sent_ns != 0)
		delivery->took_ns = mill_clock_ns() - delivery->sent_ns;
	mill_delivery_conclude(delivery, outcome, mill_clock_random());
	dispatch->options.on_finished(delivery, dispatch->options.context);
}

static void release(struct mill_dispatch *dispatch, struct mill_list *from, bool removed_only)
{
	const struct mill_outcome returned = { .kind = MILL_OUTCOME_RETURNED };
	mill_list_each(node, from)
	{
		struct mill_delivery *delivery =
		        mill_container_of(node, struct mill_delivery, node);
		if (removed_only && !delivery->lane->removed)
			continue;
		MILL_KILL_POINT("release");
		finish(dispatch, delivery, from, &returned);
	}
}

void mill_dispatch_release(struct mill_dispatch *dispatch)
{
	release(dispatch, &dispatch->claimed, false);
	release(dispatch, &dispatch->solo, false);
}

void mill_dispatch_release_removed(struct mill_dispatch *dispatch)
{
	release(dispatch, &dispatch->claimed, true);
	release(dispatch, &dispatch->solo, true);
}

void mill_dispatch_outcome(struct mill_dispatch *dispatch, struct mill_executor *executor,
                           const struct mill_outcome *outcome)
{
	MILL_KILL_POINT("outcome_taken");
	struct mill_delivery *delivery = mill_dispatch_find(dispatch, executor, outcome->ticket);
	if (delivery == NULL) {
		mill_log(MILL_LOG_WARN, "outcome_ignored",
		         MILL_INT("pid", mill_executor_pid(executor)),
		         MILL_TEXT("reason", "its executor does not have such a delivery"));
		return;
	}
	dispatch->sent--;
	finish(dispatch, delivery, &executor->sent, outcome);
}

void mill_dispatch_gone(struct mill_dispatch *dispatch, struct mill_executor *executor,
                        const struct mill_executor_death *death)
{
	mill_list_each(node, &executor->sent)
	{
		struct mill_delivery *delivery =
		        mill_container_of(node, struct mill_delivery, node);
		struct mill_outcome outcome = { .kind = MILL_OUTCOME_RETURNED };
		bool alone = runs_alone(delivery) && !death->ordered;
		if (death->blamed == delivery->ticket || alone) {
			outcome.kind = MILL_OUTCOME_RAISED;
			outcome.error = MILL_SPAN(death->reason);
		} else {
			delivery->crashed = !death->ordered;
		}
		dispatch->sent--;
		finish(dispatch, delivery, &executor->sent, &outcome);
	}
}

void mill_dispatch_cancel(struct mill_dispatch *dispatch, const uint8_t id[16])
{
	for (uint32_t i = 0; i < dispatch->slot_count; i++) {
		struct slot *slot = &dispatch->slots[i];
		if (slot->delivery == NULL || memcmp(slot->delivery->id, id, 16) != 0)
			continue;
		slot->delivery->cancelled = true;
		if (slot->executor == NULL) {
			const struct mill_outcome returned = { .kind = MILL_OUTCOME_RETURNED };
			finish(dispatch, slot->delivery, waiting_list(dispatch, slot->delivery),
			       &returned);
			return;
		}
		struct mill_cancel cancel = { .ticket = slot->delivery->ticket,
			                      .reason = MILL_SPAN("cancelled") };
		mill_cancel_write(mill_executor_out(slot->executor), &cancel);
		return;
	}
}
