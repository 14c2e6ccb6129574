/* The lanes of the claim loop: see lanes.h. */
#include "lanes.h"

#include <stdio.h>

#include "core/clock.h"
#include "pg/store.h"

#define LANES_PER_CLAIM 64
#define FULL_SCAN_LEAST_NS 200000000u

struct lane {
	int32_t number;
	bool full;      /* the claim in flight scans it from the beginning */
	bool must_full; /* it came back short from its mark */
	uint64_t full_ns, full_took_ns;
	int64_t low[MILL_PRIORITIES];
	int64_t got;
};

struct bench_lanes {
	int64_t batch;
	bool marks;
	struct lane *all;    /* by number − 1 */
	struct lane **ready; /* in rotation order */
	size_t ready_count;
	size_t asked_count; /* the first of `ready` */
	int64_t got;
};

struct bench_lanes *bench_lanes_new(const struct bench_options *options)
{
	struct bench_lanes *lanes = mill_calloc(1, sizeof(*lanes));
	size_t count = (size_t)options->lanes;
	lanes->batch = options->batch;
	lanes->marks = options->marks;
	lanes->all = mill_calloc(count, sizeof(lanes->all[0]));
	lanes->ready = mill_calloc(count, sizeof(lanes->ready[0]));
	lanes->ready_count = count;
	for (size_t i = 0; i < count; i++) {
		lanes->all[i].number = (int32_t)i + 1;
		lanes->ready[i] = &lanes->all[i];
	}
	return lanes;
}

void bench_lanes_free(struct bench_lanes *lanes)
{
	free(lanes->all);
	free(lanes->ready);
	free(lanes);
}

struct mill_span bench_lanes_token(uint64_t claim, char text[32])
{
	int len = snprintf(text, 32, "bench#%llu", (unsigned long long)claim);
	return (struct mill_span){ text, (size_t)len };
}

static bool may_scan_full(const struct bench_lanes *lanes, const struct lane *lane, uint64_t now)
{
	uint64_t pause = lane->full_took_ns * 10;
	if (pause < FULL_SCAN_LEAST_NS)
		pause = FULL_SCAN_LEAST_NS;
	return !lanes->marks || lane->must_full || lane->full_ns == 0 ||
	       now - lane->full_ns >= pause;
}

static void prepare_lane(const struct bench_lanes *lanes, struct lane *lane, uint64_t now)
{
	lane->got = 0;
	lane->full = may_scan_full(lanes, lane, now);
	if (!lane->full)
		return;
	lane->must_full = false;
	lane->full_ns = now;
	for (size_t i = 0; i < MILL_PRIORITIES; i++)
		lane->low[i] = MILL_PG_MINUS_INFINITY;
}

/* The statement's parameters, as its comment in queries.c lists them. */
bool bench_lanes_ask(struct bench_lanes *lanes, uint64_t claim, struct mill_params *params)
{
	size_t count = lanes->ready_count < LANES_PER_CLAIM ? lanes->ready_count : LANES_PER_CLAIM;
	struct lane **asked = lanes->ready;
	uint64_t now = mill_clock_ns();
	char text[32];
	lanes->asked_count = count;
	lanes->got = 0;
	if (count == 0)
		return false;
	for (size_t i = 0; i < count; i++)
		prepare_lane(lanes, asked[i], now);

	mill_params_clear(params);
	mill_params_array(params, MILL_TYPE_INT4);
	for (size_t i = 0; i < count; i++)
		mill_element_int4(params, asked[i]->number);
	mill_params_array_end(params);
	mill_params_array(params, MILL_TYPE_INT4);
	for (size_t i = 0; i < count; i++)
		mill_element_int4(params, (int32_t)lanes->batch);
	mill_params_array_end(params);
	for (int32_t end = 1; end <= MILL_PRIORITIES; end += MILL_PRIORITIES - 1) {
		mill_params_array(params, MILL_TYPE_INT4);
		for (size_t i = 0; i < count; i++)
			mill_element_int4(params, (int32_t)i * MILL_PRIORITIES + end);
		mill_params_array_end(params);
	}
	mill_params_array(params, MILL_TYPE_INT2);
	for (size_t i = 0; i < count * MILL_PRIORITIES; i++)
		mill_element_int2(params,
		                  (int16_t)(MILL_PRIORITY_LEAST + (int)(i % MILL_PRIORITIES)));
	mill_params_array_end(params);
	mill_params_array(params, MILL_TYPE_TIMESTAMPTZ);
	for (size_t i = 0; i < count; i++)
		for (size_t at = 0; at < MILL_PRIORITIES; at++)
			mill_element_int8(params, asked[i]->low[at]);
	mill_params_array_end(params);
	mill_params_int4(params, (int32_t)lanes->batch);
	mill_params_text(params, bench_lanes_token(claim, text));
	mill_params_int4(params, 1024 * 1024);
	return true;
}

void bench_lanes_row(struct bench_lanes *lanes, int32_t lane_number, int32_t priority,
                     int64_t available_at)
{
	struct lane *lane = &lanes->all[lane_number - 1];
	int64_t *low = &lane->low[priority - MILL_PRIORITY_LEAST];
	if (available_at > *low)
		*low = available_at;
	lane->got++;
	lanes->got++;
}

/*
 * Lanes that were served go behind those that were not reached; one that is short after a full scan
 * is empty and leaves.
 */
void bench_lanes_conclude(struct bench_lanes *lanes, uint64_t took_ns)
{
	bool cut = lanes->got >= lanes->batch;
	struct lane *served[LANES_PER_CLAIM];
	size_t served_count = 0, kept = 0;
	for (size_t i = 0; i < lanes->ready_count; i++) {
		struct lane *lane = lanes->ready[i];
		bool asked = i < lanes->asked_count;
		bool is_short = asked && !cut && lane->got < lanes->batch;
		if (asked && lane->full)
			lane->full_took_ns = took_ns;
		if (is_short && lane->full)
			continue;
		lane->must_full = lane->must_full || is_short;
		if (asked && (lane->got > 0 || is_short))
			served[served_count++] = lane;
		else
			lanes->ready[kept++] = lane;
	}
	memcpy(lanes->ready + kept, served, served_count * sizeof(served[0]));
	lanes->ready_count = kept + served_count;
}
