/*
 * Which lanes a claim asks for and where it begins in each: the rules of the runtime's claim, as
 * far as a loop needs them that never waits.
 *
 * The one difference: where the runtime would rest until the next full scan of a lane is allowed,
 * this scans it at once, because the experiment ends with the last row.
 */
#pragma once

#include "options.h"
#include "pg/params.h"

struct bench_lanes;

struct bench_lanes *bench_lanes_new(const struct bench_options *options);
void bench_lanes_free(struct bench_lanes *lanes);

/* Write the parameters of the next claim, number `claim`. False: every lane is empty. */
bool bench_lanes_ask(struct bench_lanes *lanes, uint64_t claim, struct mill_params *params);

/* A row came back, of the lane with this number. */
void bench_lanes_row(struct bench_lanes *lanes, int32_t lane, int32_t priority,
                     int64_t available_at);

/* The answer is complete, after `took_ns`. */
void bench_lanes_conclude(struct bench_lanes *lanes, uint64_t took_ns);

/* What claimed_by says of a claim; `text` has room for it. */
struct mill_span bench_lanes_token(uint64_t claim, char text[32]);
