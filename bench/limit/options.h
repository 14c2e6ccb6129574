/*
 * What one run of the claim experiment does: the options of its command line, key=value each.
 */
#pragma once

#include "core/base.h"

struct bench_options {
	int64_t rows;     /* pending messages to claim and settle */
	int64_t batch;    /* most rows a claim takes */
	int64_t done;     /* rows that are done already */
	int64_t future;   /* rows that are due tomorrow */
	int64_t lanes;    /* the pending rows are spread over so many */
	int64_t per_call; /* so many consecutive rows share their due time, as of one publish_many
	                   */
	int64_t pad;      /* bytes of padding in the payload */
	int64_t secs;     /* end after so long, finished or not */
	bool snapshot;    /* another session holds an old snapshot all the while */
	bool stale;       /* statistics from when the table was empty */
	bool pipeline;    /* settle a batch and claim the next in one round trip */
	bool marks;       /* low-water marks */
	bool pin;         /* the statement that pins the plan */
	const char *schema;
};

/* The defaults, then argv[1 …]. A bad option ends the program with a list of the known ones. */
struct bench_options bench_options_read(int argc, char **argv);

/* The options as members of a JSON object, without braces, to standard output. */
void bench_options_print(const struct bench_options *options);
