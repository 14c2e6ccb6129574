/*
 * The claim experiment: what the server gives to the program's own statements.
 *
 * One connection claims and settles until all is done, with the texts of src/pg/queries.c and the
 * rules of the runtime's claim, and with nothing else: no event loop, no executors, no handlers.
 * What the whole program reaches can be compared with it, and a change to a statement, an index or
 * a table option can be judged before anything is built on it. Prints one JSON object on one line.
 *
 *     claim batch=500 done=1000000 snapshot=1
 *
 * The server is the one of the PG* variables; the schema tidemill_bench there is dropped and made.
 */
#include <endian.h>
#include <stdio.h>

#include "core/clock.h"
#include "exchange.h"
#include "lanes.h"
#include "ledger.h"
#include "meter.h"

#define COLUMN_ID 0
#define COLUMN_LANE 1
#define COLUMN_PRIORITY 2
#define COLUMN_AVAILABLE_AT 3

typedef uint8_t id_bytes[16];

struct run {
	const struct bench_options *options;
	PGconn *work;
	struct bench_lanes *lanes;
	struct mill_params params;

	/* What is claimed and not yet settled, sorted by id. */
	id_bytes *held;
	size_t held_count;
	uint64_t held_claim;

	uint64_t claims; /* the number of the last */
	int64_t settled;
	bool empty;        /* no lane has anything left */
	uint64_t *took_ns; /* of each claim */
	size_t took_count, took_room;
	int64_t *per_second; /* settled when each second was over */
	size_t seconds, seconds_room;
};

/* ---- one claim, one settle ---------------------------------------------------------------------
 */

static int compare_ids(const void *a, const void *b)
{
	return memcmp(a, b, sizeof(id_bytes));
}

static void queue_settle(struct run *run)
{
	struct mill_params *params = &run->params;
	char text[32];
	struct mill_span token = bench_lanes_token(run->held_claim, text);
	mill_params_clear(params);
	mill_params_array(params, MILL_TYPE_UUID);
	for (size_t i = 0; i < run->held_count; i++)
		mill_element_uuid(params, run->held[i]);
	mill_params_array_end(params);
	mill_params_array(params, MILL_TYPE_TEXT);
	for (size_t i = 0; i < run->held_count; i++)
		mill_element_text(params, token);
	mill_params_array_end(params);
	bench_exchange_queue(run->work, MILL_QUERY_SETTLE_DONE, run->options->pin, params);
}

static void take_settled(struct run *run)
{
	PGresult *rows = bench_exchange_take(run->work, run->options->pin);
	if ((size_t)PQntuples(rows) != run->held_count) {
		fprintf(stderr, "claim: %d of %zu rows were settled\n", PQntuples(rows),
		        run->held_count);
		exit(1);
	}
	PQclear(rows);
	run->settled += (int64_t)run->held_count;
	run->held_count = 0;
}

static bool queue_claim(struct run *run)
{
	if (run->empty)
		return false;
	if (!bench_lanes_ask(run->lanes, run->claims + 1, &run->params)) {
		run->empty = true;
		return false;
	}
	run->claims++;
	bench_exchange_queue(run->work, MILL_QUERY_CLAIM, run->options->pin, &run->params);
	return true;
}

static void remember_time(struct run *run, uint64_t ns)
{
	if (run->took_count == run->took_room) {
		run->took_room = run->took_room * 2 + 1024;
		run->took_ns = mill_realloc(run->took_ns, run->took_room * sizeof(run->took_ns[0]));
	}
	run->took_ns[run->took_count++] = ns;
}

static void take_claimed(struct run *run, uint64_t sent_ns)
{
	PGresult *rows = bench_exchange_take(run->work, run->options->pin);
	uint64_t took = mill_clock_ns() - sent_ns;
	remember_time(run, took);
	int count = PQntuples(rows);
	for (int i = 0; i < count; i++) {
		uint32_t lane;
		uint16_t priority;
		uint64_t available_at;
		memcpy(run->held[i], PQgetvalue(rows, i, COLUMN_ID), sizeof(id_bytes));
		memcpy(&lane, PQgetvalue(rows, i, COLUMN_LANE), sizeof(lane));
		memcpy(&priority, PQgetvalue(rows, i, COLUMN_PRIORITY), sizeof(priority));
		memcpy(&available_at, PQgetvalue(rows, i, COLUMN_AVAILABLE_AT),
		       sizeof(available_at));
		bench_lanes_row(run->lanes, (int32_t)be32toh(lane), (int16_t)be16toh(priority),
		                (int64_t)be64toh(available_at));
	}
	PQclear(rows);
	qsort(run->held, (size_t)count, sizeof(id_bytes), compare_ids);
	run->held_count = (size_t)count;
	run->held_claim = run->claims;
	bench_lanes_conclude(run->lanes, took);
}

/* ---- the loop ----------------------------------------------------------------------------------
 */

/*
 * Settle what is held and claim the next. In one round trip the claim's time begins when the settle
 * before it is answered, since the server does one after the other.
 */
static void turn(struct run *run)
{
	uint64_t sent = mill_clock_ns();
	bool settles = run->held_count > 0;
	if (settles)
		queue_settle(run);
	if (settles && !run->options->pipeline) {
		bench_exchange_flush(run->work);
		take_settled(run);
		settles = false;
		sent = mill_clock_ns();
	}
	bool claims = queue_claim(run);
	bench_exchange_flush(run->work);
	if (settles) {
		take_settled(run);
		sent = mill_clock_ns();
	}
	if (claims)
		take_claimed(run, sent);
}

static void note_second(struct run *run)
{
	if (run->seconds == run->seconds_room) {
		run->seconds_room = run->seconds_room * 2 + 64;
		run->per_second = mill_realloc(run->per_second,
		                               run->seconds_room * sizeof(run->per_second[0]));
	}
	run->per_second[run->seconds++] = run->settled;
}

static void drain(struct run *run)
{
	const uint64_t second = 1000000000u;
	uint64_t begun = mill_clock_ns(), next = begun + second;
	uint64_t deadline = begun + (uint64_t)run->options->secs * second;
	while (run->settled < run->options->rows && mill_clock_ns() < deadline) {
		turn(run);
		if (run->empty && run->held_count == 0)
			break;
		if (mill_clock_ns() >= next) {
			note_second(run);
			next += second;
		}
	}
	/* The time was over: what is held is settled all the same. */
	run->empty = true;
	if (run->held_count > 0)
		turn(run);
}

/* ---- the result --------------------------------------------------------------------------------
 */

static int compare_times(const void *a, const void *b)
{
	const uint64_t *left = a, *right = b;
	return (*left > *right) - (*left < *right);
}

static double share_ms(const struct run *run, double share)
{
	size_t at = (size_t)(share * (double)(run->took_count - 1) + 0.5);
	return (double)run->took_ns[at] / 1e6;
}

static void print_result(struct run *run, const struct bench_meter *meter, int64_t dead)
{
	const struct bench_reading *begun = &meter->begun, *ended = &meter->ended;
	double secs = bench_meter_secs(meter), rows = (double)run->settled;
	double per_1000 = rows > 0 ? 1e6 / rows : 0;
	qsort(run->took_ns, run->took_count, sizeof(run->took_ns[0]), compare_times);
	printf("{");
	bench_options_print(run->options);
	printf(", \"seconds\": %.3f, \"settled\": %lld, \"rows_per_s\": %.0f", secs,
	       (long long)run->settled, rows / secs);
	printf(", \"backend_cpu_ms_per_1000\": %.2f, \"server_cpu_ms_per_1000\": %.2f"
	       ", \"client_cpu_ms_per_1000\": %.2f",
	       (ended->backend_secs - begun->backend_secs) * per_1000,
	       (ended->server_secs - begun->server_secs) * per_1000,
	       (ended->self_secs - begun->self_secs) * per_1000);
	printf(", \"wal_bytes_per_row\": %.1f",
	       rows > 0 ? (ended->wal_bytes - begun->wal_bytes) / rows : 0);
	printf(", \"claims\": %llu, \"claim_ms\": {\"p50\": %.3f, \"p99\": %.3f, \"max\": %.3f}",
	       (unsigned long long)run->claims, share_ms(run, 0.5), share_ms(run, 0.99),
	       share_ms(run, 1));
	printf(", \"dead_tuples\": %lld, \"other_cores\": %.2f, \"per_second\": [", (long long)dead,
	       bench_meter_other_cores(meter));
	for (size_t i = 0; i < run->seconds; i++)
		printf("%s%lld", i ? ", " : "",
		       (long long)(run->per_second[i] - (i ? run->per_second[i - 1] : 0)));
	printf("]}\n");
}

/* The server must agree with what we counted, and a run without a time limit must leave nothing. */
static void check(const struct run *run, int64_t found, double secs)
{
	if (found != run->settled) {
		fprintf(stderr, "claim: %lld rows were settled, and %lld are done\n",
		        (long long)run->settled, (long long)found);
		exit(1);
	}
	if (run->settled < run->options->rows && secs < (double)run->options->secs) {
		fprintf(stderr, "claim: %lld of %lld rows were found\n", (long long)run->settled,
		        (long long)run->options->rows);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	const struct bench_options options = bench_options_read(argc, argv);
	PGconn *probe = bench_session_open();
	bench_ledger_make(probe, &options);
	struct run run = {
		.options = &options,
		.work = bench_session_open(),
		.lanes = bench_lanes_new(&options),
		.held = mill_calloc((size_t)options.batch, sizeof(id_bytes)),
	};
	bench_exchange_prepare(run.work, &options);
	PGconn *holder = options.snapshot ? bench_ledger_hold_snapshot() : NULL;

	struct bench_meter meter;
	bench_meter_init(&meter, probe, run.work);
	bench_meter_begin(&meter);
	drain(&run);
	bench_meter_end(&meter);

	int64_t dead = bench_ledger_dead(probe, &options);
	check(&run, bench_ledger_settled(probe, &options), bench_meter_secs(&meter));
	print_result(&run, &meter, dead);

	if (holder != NULL)
		PQfinish(holder);
	PQfinish(run.work);
	bench_ledger_drop(probe, &options);
	PQfinish(probe);
	bench_lanes_free(run.lanes);
	mill_params_free(&run.params);
	free(run.held);
	free(run.took_ns);
	free(run.per_second);
	return 0;
}
