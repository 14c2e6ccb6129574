/*
 * The life of this worker in the database: see lease.h.
 *
 *     NEW ──► REGISTERING ──► ALIVE ──► DEAD ──► (mill_lease_register) REGISTERING …
 *
 * A worker counts its own lease from the moment it sent the renewal, and ends it a little early:
 * when the others learn of its death, its handlers have been stopped.
 */
#include "flow/lease.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/log.h"
#include "flow/sweep.h"

#define TICK_MOST_SECS 1.0
#define MARGIN_MOST_SECS 0.5
#define SECOND_NS 1e9

enum lease_state { NEW, REGISTERING, ALIVE, DEAD, LEAVING, LEFT };

struct mill_lease {
	struct mill_lease_options options;
	enum lease_state state;
	char worker_id[128];
	bool asking; /* a registration is in flight */
	bool renewing;
	uint64_t renewed_ns; /* when the last successful renewal was sent */
	uint64_t renewal_sent_ns;
	struct mill_sweep *sweep;
	uv_timer_t tick;
	uv_timer_t end; /* of the lease, unless it is renewed */
	int handles;
	struct mill_log_gate gate;
	void (*on_left)(void *context);
	void *left_context;
	void (*on_closed)(void *context);
	void *closed_context;
};

static double lease_secs(const struct mill_lease *lease)
{
	return (double)lease->options.manifest->settings.lease_secs;
}

/* Short leases are looked after more often. */
static double tick_secs(const struct mill_lease *lease)
{
	return fmin(lease_secs(lease) / 6, TICK_MOST_SECS);
}

/* The end of a lease is left to stopping the handlers. */
static double own_lease_secs(const struct mill_lease *lease)
{
	return lease_secs(lease) - fmin(lease_secs(lease) / 12, MARGIN_MOST_SECS);
}

static void log_refusal(struct mill_lease *lease, const char *what, const struct mill_err *err)
{
	uint64_t skipped;
	if (err->kind != MILL_ERR_UNREACHED && mill_log_gate(&lease->gate, 10, &skipped))
		mill_log(MILL_LOG_ERROR, "lease_refused", MILL_TEXT("what", what),
		         MILL_TEXT("error", err->message), MILL_TEXT("sqlstate", err->sqlstate),
		         MILL_INT("skipped", skipped));
}

/* ---- the end of the lease ------------------------------------------------------------------ */

static void die(struct mill_lease *lease, const char *reason)
{
	lease->state = DEAD;
	uv_timer_stop(&lease->end);
	mill_log(MILL_LOG_ERROR, "lease_over", MILL_TEXT("worker", lease->worker_id),
	         MILL_TEXT("reason", reason));
	lease->options.on_dead(lease->options.context);
}

static void on_end(uv_timer_t *timer);

static uint64_t end_ns(const struct mill_lease *lease)
{
	return lease->renewed_ns + (uint64_t)(own_lease_secs(lease) * SECOND_NS);
}

void mill_lease_check(struct mill_lease *lease)
{
	if (lease->state == ALIVE && mill_clock_ns() >= end_ns(lease))
		die(lease, "it could not be renewed in time");
}

static void set_end(struct mill_lease *lease)
{
	mill_lease_check(lease);
	if (lease->state != ALIVE)
		return;
	uint64_t now = mill_clock_ns(), end = end_ns(lease);
	uv_timer_start(&lease->end, on_end, end > now ? (end - now) / 1000000 + 1 : 0, 0);
}

/* The loop's idea of now may be older than the clock's: a timer that fires early is set again. */
static void on_end(uv_timer_t *timer)
{
	set_end(mill_container_of(timer, struct mill_lease, end));
}

/* ---- registration -------------------------------------------------------------------------- */

/* Readable for an operator (`host-pid-…`), and never used twice. `#` begins the claim's number. */
static void make_worker_id(struct mill_lease *lease)
{
	char host[64] = "";
	uint32_t random;
	gethostname(host, sizeof(host) - 1);
	for (char *c = host; *c; c++)
		if (*c == '#' || (unsigned char)*c <= ' ' || (unsigned char)*c >= 0x7F)
			*c = '-';
	mill_clock_random_bytes(&random, sizeof(random));
	snprintf(lease->worker_id, sizeof(lease->worker_id), "%.60s-%d-%08x", host, (int)getpid(),
	         random);
	mill_store_set_worker(lease->options.store, lease->worker_id);
}

static void on_worker_registered(struct mill_results *results, const struct mill_err *err,
                                 void *context)
{
	(void)results;
	struct mill_lease *lease = context;
	lease->asking = false;
	if (lease->state != REGISTERING)
		return;
	if (err != NULL) {
		/* It may have been written all the same: a further try is a worker of another name.
		 */
		make_worker_id(lease);
		log_refusal(lease, "register worker", err);
		return;
	}
	lease->state = ALIVE;
	lease->renewed_ns = lease->renewal_sent_ns;
	mill_log(MILL_LOG_INFO, "registered", MILL_TEXT("worker", lease->worker_id),
	         MILL_TEXT("app", lease->options.manifest->settings.app),
	         MILL_INT("lanes", lease->options.manifest->lane_count));
	lease->options.on_registered(lease->options.context);
	set_end(lease);
}

static void register_worker(struct mill_lease *lease)
{
	const struct mill_manifest *manifest = lease->options.manifest;
	char host[64] = "";
	gethostname(host, sizeof(host) - 1);
	int32_t *lanes = mill_alloc(manifest->lane_count * sizeof(lanes[0]));
	for (size_t i = 0; i < manifest->lane_count; i++)
		lanes[i] = lease->options.lanes[i].number;
	struct mill_store_worker worker = {
		.app = manifest->settings.app,
		.host = host,
		.pid = (int32_t)getpid(),
		.lease_secs = (int32_t)manifest->settings.lease_secs,
		.generation = (int32_t)lease->options.generation,
		.lanes = lanes,
		.lane_count = manifest->lane_count,
	};
	lease->asking = true;
	lease->renewal_sent_ns = mill_clock_ns();
	mill_store_register_worker(lease->options.store, lease->options.link, &worker,
	                           on_worker_registered, lease);
	free(lanes);
}

/* One pair of another app's, and none of ours was written: this program cannot run. */
static int check_owners(struct mill_lease *lease, const struct mill_results *results)
{
	const struct mill_manifest *manifest = lease->options.manifest;
	const char *own = manifest->settings.app;
	for (size_t i = 0; i < manifest->lane_count; i++) {
		const struct mill_manifest_lane *lane = &manifest->lanes[i];
		struct mill_span app;
		mill_store_registered_lane(results, i, &app);
		if (app.data == NULL ||
		    (app.len == strlen(own) && memcmp(app.data, own, app.len) == 0))
			continue;
		struct mill_err refusal;
		mill_err_set(&refusal, MILL_ERR_CONFIG,
		             "`%s` of topic `%s` belongs to app `%.*s`: name the subscriber "
		             "otherwise, or set `app`",
		             lane->subscriber, lane->topic, (int)app.len, app.data);
		lease->state = DEAD;
		lease->options.on_refused(&refusal, lease->options.context);
		return -1;
	}
	return 0;
}

static void on_lanes_registered(struct mill_results *results, const struct mill_err *err,
                                void *context)
{
	struct mill_lease *lease = context;
	lease->asking = false;
	if (lease->state != REGISTERING)
		return;
	if (err != NULL) {
		log_refusal(lease, "register lanes", err);
		return;
	}
	if (check_owners(lease, results) != 0)
		return;
	for (size_t i = 0; i < lease->options.manifest->lane_count; i++) {
		struct mill_span app;
		int32_t number = mill_store_registered_lane(results, i, &app);
		if (app.data == NULL)
			return; /* somebody removed it this moment: again */
		lease->options.lanes[i].number = number;
	}
	register_worker(lease);
}

static void register_lanes(struct mill_lease *lease)
{
	lease->asking = true;
	mill_store_register_lanes(lease->options.store, lease->options.link,
	                          lease->options.manifest, on_lanes_registered, lease);
}

void mill_lease_register(struct mill_lease *lease)
{
	MILL_ASSERT(lease->state == NEW || lease->state == DEAD);
	lease->state = REGISTERING;
	make_worker_id(lease);
	if (mill_link_is_up(lease->options.link))
		register_lanes(lease);
}

const char *mill_lease_worker_id(const struct mill_lease *lease)
{
	return lease->worker_id;
}

/* ---- renewal ------------------------------------------------------------------------------- */

static void on_renewed(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct mill_lease *lease = context;
	lease->renewing = false;
	if (lease->state != ALIVE)
		return;
	if (err != NULL) {
		log_refusal(lease, "renew", err);
	} else if (mill_store_renewed(results)) {
		lease->renewed_ns = lease->renewal_sent_ns;
		set_end(lease);
	} else {
		die(lease, "other workers have declared it dead");
	}
}

static void renew(struct mill_lease *lease)
{
	lease->renewing = true;
	lease->renewal_sent_ns = mill_clock_ns();
	mill_store_renew(lease->options.store, lease->options.link, on_renewed, lease);
}

static void on_tick(uv_timer_t *timer)
{
	struct mill_lease *lease = mill_container_of(timer, struct mill_lease, tick);
	uint64_t now = mill_clock_ns();
	bool up = mill_link_is_up(lease->options.link);
	if (lease->state == REGISTERING && up && !lease->asking)
		register_lanes(lease);
	if (lease->state != ALIVE || !up)
		return;
	double since = (double)(now - lease->renewed_ns) / SECOND_NS;
	if (since > lease_secs(lease) / 3 - tick_secs(lease) / 2 && !lease->renewing)
		renew(lease);
	if (mill_link_is_up(lease->options.sweep_link))
		mill_sweep_turn(lease->sweep);
}

static void on_leave_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	(void)results;
	struct mill_lease *lease = context;
	lease->state = LEFT;
	if (err != NULL)
		log_refusal(lease, "leave", err);
	lease->on_left(lease->left_context);
}

static void say_farewell(struct mill_lease *lease)
{
	mill_store_leave(lease->options.store, lease->options.link, on_leave_answer, lease);
}

void mill_lease_link_up(struct mill_lease *lease)
{
	if (lease->state == REGISTERING && !lease->asking)
		register_lanes(lease);
	else if (lease->state == ALIVE && !lease->renewing)
		renew(lease);
	else if (lease->state == LEAVING)
		say_farewell(lease);
}

/* ---- life ---------------------------------------------------------------------------------- */

struct mill_lease *mill_lease_new(const struct mill_lease_options *options)
{
	struct mill_lease *lease = mill_calloc(1, sizeof(*lease));
	lease->options = *options;
	struct mill_sweep_options sweep_options = {
		.store = options->store,
		.link = options->sweep_link,
		.lease_secs = lease_secs(lease),
		.on_work = options->on_work,
		.context = options->context,
	};
	lease->sweep = mill_sweep_new(&sweep_options);
	MILL_ASSERT(uv_timer_init(options->loop, &lease->tick) == 0);
	MILL_ASSERT(uv_timer_init(options->loop, &lease->end) == 0);
	lease->handles = 2;
	uint64_t tick_ms = (uint64_t)(tick_secs(lease) * 1000);
	uv_timer_start(&lease->tick, on_tick, tick_ms, tick_ms);
	return lease;
}

void mill_lease_leave(struct mill_lease *lease, void (*on_left)(void *context), void *context)
{
	/* A registration under way is answered first: exchanges of a link keep their order. */
	bool registered = lease->state == ALIVE || lease->asking;
	lease->state = registered ? LEAVING : LEFT;
	uv_timer_stop(&lease->tick);
	uv_timer_stop(&lease->end);
	lease->on_left = on_left;
	lease->left_context = context;
	if (!registered)
		on_left(context);
	else if (mill_link_is_up(lease->options.link))
		say_farewell(lease);
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct mill_lease *lease = handle->data;
	if (--lease->handles > 0)
		return;
	void (*on_closed)(void *) = lease->on_closed;
	void *context = lease->closed_context;
	mill_sweep_free(lease->sweep);
	free(lease);
	on_closed(context);
}

void mill_lease_close(struct mill_lease *lease, void (*on_closed)(void *context), void *context)
{
	lease->on_closed = on_closed;
	lease->closed_context = context;
	lease->tick.data = lease->end.data = lease;
	uv_close((uv_handle_t *)&lease->tick, on_timer_closed);
	uv_close((uv_handle_t *)&lease->end, on_timer_closed);
}
