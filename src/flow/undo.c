/* Claims whose answer was lost: see undo.h. */
#include "flow/undo.h"

#include <math.h>

#include "core/clock.h"
#include "core/log.h"

#define ERROR_PAUSE_NS 1000000000u
#define SECOND_NS 1e9

/*
 * At once, and again and again, each so long after the last, because the claim may commit late.
 * After an interruption of the network, the kernel delivers what a closed connection had still to
 * send, a quarter of an hour later at the most. A row claimed so would be held for as long as this
 * worker lives.
 */
static const double undo_after_secs[] = { 0, 2, 10, 60, 300, 900 };
/* A try that was cut short does not count, and is made again after so long, doubled each time. */
#define CUT_LEAST_SECS 2.0
#define CUT_MOST_SECS 300.0

struct lost_claim {
	uint64_t number;
	uint64_t at_ns;
	size_t tries;
	double cut_secs; /* the pause after a try that is cut short */
	bool in_flight;
	struct mill_store_want *wants;
	size_t want_count;
	struct lost_claim *next;
	struct mill_undo *undo;
};

struct mill_undo {
	struct mill_store *store;
	struct mill_link *work;
	struct lost_claim *lost;
	size_t in_flight;
	void (*on_undone)(void *context);
	void *context;
};

struct mill_undo *mill_undo_new(struct mill_store *store, struct mill_link *work,
                                void (*on_undone)(void *context), void *context)
{
	struct mill_undo *undo = mill_calloc(1, sizeof(*undo));
	*undo = (struct mill_undo){
		.store = store, .work = work, .on_undone = on_undone, .context = context
	};
	return undo;
}

void mill_undo_free(struct mill_undo *undo)
{
	MILL_ASSERT(undo->in_flight == 0);
	mill_undo_forget(undo);
	free(undo);
}

static void lost_free(struct lost_claim *lost)
{
	free(lost->wants);
	free(lost);
}

void mill_undo_add(struct mill_undo *undo, uint64_t number, const struct mill_store_want *wants,
                   size_t want_count)
{
	struct lost_claim *lost = mill_calloc(1, sizeof(*lost));
	lost->number = number;
	lost->cut_secs = CUT_LEAST_SECS;
	lost->wants = mill_alloc(want_count * sizeof(wants[0]));
	memcpy(lost->wants, wants, want_count * sizeof(wants[0]));
	lost->want_count = want_count;
	lost->undo = undo;
	lost->next = undo->lost;
	undo->lost = lost;
}

static void on_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct lost_claim *lost = context;
	struct mill_undo *undo = lost->undo;
	lost->in_flight = false;
	undo->in_flight--;
	if (err != NULL) {
		lost->at_ns = mill_clock_ns() + ERROR_PAUSE_NS;
		return;
	}
	size_t count = mill_store_undone_count(results);
	if (count > 0) {
		mill_log(MILL_LOG_INFO, "claim_undone", MILL_INT("messages", count));
		undo->on_undone(undo->context);
	}
	bool cut = mill_store_undo_was_cut(results);
	if (!cut || lost->tries == 0)
		lost->tries++;
	if (lost->tries < MILL_COUNT(undo_after_secs)) {
		double secs = cut ? lost->cut_secs : undo_after_secs[lost->tries];
		if (cut)
			lost->cut_secs = fmin(lost->cut_secs * 2, CUT_MOST_SECS);
		lost->at_ns = mill_clock_ns() + (uint64_t)(secs * SECOND_NS);
		return;
	}
	struct lost_claim **at = &undo->lost;
	while (*at != lost)
		at = &(*at)->next;
	*at = lost->next;
	lost_free(lost);
}

void mill_undo_turn(struct mill_undo *undo, uint64_t now)
{
	for (struct lost_claim *lost = undo->lost; lost != NULL; lost = lost->next) {
		if (lost->in_flight || lost->at_ns > now)
			continue;
		lost->in_flight = true;
		undo->in_flight++;
		mill_store_undo_claim(undo->store, undo->work, lost->number, lost->wants,
		                      lost->want_count, on_answer, lost);
	}
}

size_t mill_undo_in_flight(const struct mill_undo *undo)
{
	return undo->in_flight;
}

bool mill_undo_is_settled(const struct mill_undo *undo)
{
	if (undo->in_flight > 0)
		return false;
	for (const struct lost_claim *lost = undo->lost; lost != NULL; lost = lost->next)
		if (lost->tries == 0)
			return false;
	return true;
}

void mill_undo_forget(struct mill_undo *undo)
{
	struct lost_claim **at = &undo->lost;
	while (*at != NULL) {
		struct lost_claim *lost = *at;
		if (lost->in_flight) {
			lost->tries = MILL_COUNT(undo_after_secs); /* the answer frees it */
			at = &lost->next;
		} else {
			*at = lost->next;
			lost_free(lost);
		}
	}
}
