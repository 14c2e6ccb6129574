/*
 * The life of this worker in the database: see lease.h.
 *
 *     NEW ──► REGISTERING ──► ALIVE ──► DEAD ──► (mill_lease_register) REGISTERING …
 *
 * While ALIVE it may declare other lanes, in the same two steps as it registers: first the lanes
 * themselves, then, with their numbers, the worker.
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

#define DECLARED_DEAD "other workers have declared it dead"

enum lease_state { NEW, REGISTERING, ALIVE, DEAD, LEAVING, LEFT };

/* What is in flight of a registration. */
enum lease_asking { NOTHING, REGISTER, DECLARE };

struct mill_lease {
	struct mill_lease_options options;
	enum lease_state state;
	char worker_id[128];
	enum lease_asking asking;
	const struct mill_manifest *subject; /* it is about */
	const struct mill_manifest *next;    /* to be declared, or NULL */
	uint32_t next_generation;
	bool incomplete;   /* lanes are missing in the database: declare what holds again */
	int32_t *numbers;  /* of the subject's lanes */
	double held_secs;  /* how long the lease lasts */
	double doubt_secs; /* or perhaps so long: asked for, not answered; 0: no doubt */
	uint64_t asked_ns; /* when the worker's row was last asked for */
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
	return lease->doubt_secs > 0 ? fmin(lease->held_secs, lease->doubt_secs) : lease->held_secs;
}

/* Short leases are looked after more often. */
static double tick_secs(const struct mill_lease *lease)
{
	return fmin(lease_secs(lease) / 6, TICK_MOST_SECS);
}

/* The end of a lease is left to stopping the handlers. */
static double own_secs(double secs)
{
	return secs - fmin(secs / 12, MARGIN_MOST_SECS);
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
static void on_tick(uv_timer_t *timer);

static uint64_t end_ns(const struct mill_lease *lease)
{
	uint64_t end = lease->renewed_ns + (uint64_t)(own_secs(lease->held_secs) * SECOND_NS);
	if (lease->doubt_secs == 0)
		return end;
	uint64_t since = lease->asked_ns > lease->renewed_ns ? lease->asked_ns : lease->renewed_ns;
	uint64_t other = since + (uint64_t)(own_secs(lease->doubt_secs) * SECOND_NS);
	return other < end ? other : end;
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

static void ask(struct mill_lease *lease);

static void set_lease_secs(struct mill_lease *lease, double secs)
{
	lease->held_secs = secs;
	lease->doubt_secs = 0;
	mill_sweep_set_lease(lease->sweep, secs);
	uint64_t tick_ms = (uint64_t)(tick_secs(lease) * 1000);
	if (uv_timer_get_repeat(&lease->tick) != tick_ms)
		uv_timer_start(&lease->tick, on_tick, tick_ms, tick_ms);
}

/* The lease lasts from when it was asked for. */
static void confirm(struct mill_lease *lease)
{
	if (lease->asked_ns > lease->renewed_ns)
		lease->renewed_ns = lease->asked_ns;
	set_lease_secs(lease, (double)lease->subject->settings.lease_secs);
}

static void take_registered(struct mill_lease *lease, const struct mill_err *err)
{
	if (err != NULL) {
		/* It may have been written all the same: a further try is a worker of another name.
		 */
		make_worker_id(lease);
		log_refusal(lease, "register worker", err);
		return;
	}
	lease->state = ALIVE;
	confirm(lease);
	mill_log(MILL_LOG_INFO, "registered", MILL_TEXT("worker", lease->worker_id),
	         MILL_TEXT("app", lease->subject->settings.app),
	         MILL_INT("lanes", lease->subject->lane_count));
	lease->options.on_registered(lease->numbers, lease->options.context);
	set_end(lease);
	ask(lease);
}

/* A lost answer leaves open which manifest holds; declaring again decides it. */
static void take_declared(struct mill_lease *lease, struct mill_results *results,
                          const struct mill_err *err)
{
	const struct mill_lease_options *options = &lease->options;
	if (err != NULL) {
		log_refusal(lease, "declare worker", err);
	} else if (!mill_store_renewed(results)) {
		die(lease, DECLARED_DEAD);
	} else if (lease->subject == lease->next) {
		confirm(lease);
		lease->options.manifest = lease->next;
		lease->options.generation = lease->next_generation;
		lease->next = NULL;
		lease->incomplete = false;
		set_end(lease);
		options->on_declared(lease->numbers, options->context);
	} else {
		confirm(lease);
		lease->incomplete = false;
		set_end(lease);
		mill_log(MILL_LOG_WARN, "lanes_restored",
		         MILL_INT("lanes", lease->subject->lane_count));
		options->on_renumbered(lease->numbers, options->context);
	}
}

static void on_worker_answer(struct mill_results *results, const struct mill_err *err,
                             void *context)
{
	struct mill_lease *lease = context;
	enum lease_asking asked = lease->asking;
	lease->asking = NOTHING;
	if (asked == REGISTER && lease->state == REGISTERING)
		take_registered(lease, err);
	else if (asked == DECLARE && lease->state == ALIVE)
		take_declared(lease, results, err);
}

static void ask_worker(struct mill_lease *lease)
{
	const struct mill_manifest *manifest = lease->subject;
	char host[64] = "";
	gethostname(host, sizeof(host) - 1);
	struct mill_store_worker worker = {
		.app = manifest->settings.app,
		.host = host,
		.pid = (int32_t)getpid(),
		.lease_secs = (int32_t)manifest->settings.lease_secs,
		.generation = (int32_t)(manifest == lease->next ? lease->next_generation
		                                                : lease->options.generation),
		.lanes = lease->numbers,
		.lane_count = manifest->lane_count,
	};
	lease->asked_ns = mill_clock_ns();
	if (lease->asking == REGISTER) {
		mill_store_register_worker(lease->options.store, lease->options.link, &worker,
		                           on_worker_answer, lease);
		return;
	}
	/* From now on the others may count with the new lease, whether we hear of it or not. */
	lease->doubt_secs = (double)manifest->settings.lease_secs;
	mill_store_declare_worker(lease->options.store, lease->options.link, &worker,
	                          on_worker_answer, lease);
	set_end(lease);
}

static void refuse_pairs(struct mill_lease *lease, const struct mill_err *refusal)
{
	const struct mill_lease_options *options = &lease->options;
	if (lease->asking == REGISTER) {
		lease->state = DEAD;
		options->on_refused(refusal, options->context);
	} else if (lease->subject == lease->next) {
		lease->next = NULL;
		options->on_declare_refused(refusal, options->context);
	} else {
		/* Lanes were deleted, and another app has taken one since. */
		lease->incomplete = false;
		log_refusal(lease, "restore lanes", refusal);
	}
}

/* One pair of another app's, and none of ours was written. */
static int check_owners(struct mill_lease *lease, const struct mill_results *results)
{
	const struct mill_manifest *manifest = lease->subject;
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
		refuse_pairs(lease, &refusal);
		lease->asking = NOTHING;
		return -1;
	}
	return 0;
}

static bool take_numbers(struct mill_lease *lease, const struct mill_results *results)
{
	size_t count = lease->subject->lane_count;
	lease->numbers = mill_realloc(lease->numbers, count * sizeof(lease->numbers[0]));
	for (size_t i = 0; i < count; i++) {
		struct mill_span app;
		lease->numbers[i] = mill_store_registered_lane(results, i, &app);
		if (app.data == NULL)
			return false; /* somebody removed it this moment: again */
	}
	return true;
}

static void on_lanes_answer(struct mill_results *results, const struct mill_err *err, void *context)
{
	struct mill_lease *lease = context;
	bool wanted =
	        lease->asking == REGISTER ? lease->state == REGISTERING : lease->state == ALIVE;
	if (err != NULL)
		log_refusal(lease, "register lanes", err);
	else if (wanted && check_owners(lease, results) != 0)
		return;
	if (wanted && err == NULL && take_numbers(lease, results))
		ask_worker(lease);
	else
		lease->asking = NOTHING;
}

/* Begin whichever registration is due, unless one is under way. */
static void ask(struct mill_lease *lease)
{
	if (lease->asking != NOTHING || !mill_link_is_up(lease->options.link))
		return;
	if (lease->state == REGISTERING)
		lease->asking = REGISTER;
	else if (lease->state == ALIVE && (lease->next != NULL || lease->incomplete))
		lease->asking = DECLARE;
	else
		return;
	bool other = lease->asking == DECLARE && lease->next != NULL;
	lease->subject = other ? lease->next : lease->options.manifest;
	mill_store_register_lanes(lease->options.store, lease->options.link, lease->subject,
	                          on_lanes_answer, lease);
}

void mill_lease_register(struct mill_lease *lease)
{
	MILL_ASSERT(lease->state == NEW || lease->state == DEAD);
	lease->state = REGISTERING;
	make_worker_id(lease);
	ask(lease);
}

void mill_lease_declare(struct mill_lease *lease, const struct mill_manifest *manifest,
                        uint32_t generation)
{
	MILL_ASSERT(lease->next == NULL);
	lease->next = manifest;
	lease->next_generation = generation;
	ask(lease);
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
		if (lease->renewal_sent_ns > lease->renewed_ns)
			lease->renewed_ns = lease->renewal_sent_ns;
		set_end(lease);
		lease->incomplete |= !mill_store_lanes_stand(results);
		ask(lease);
	} else {
		die(lease, DECLARED_DEAD);
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
	ask(lease);
	if (lease->state != ALIVE || !mill_link_is_up(lease->options.link))
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
	if (lease->state == ALIVE && !lease->renewing)
		renew(lease);
	else if (lease->state == LEAVING)
		say_farewell(lease);
	ask(lease);
}

/* ---- life ---------------------------------------------------------------------------------- */

struct mill_lease *mill_lease_new(const struct mill_lease_options *options)
{
	struct mill_lease *lease = mill_calloc(1, sizeof(*lease));
	lease->options = *options;
	lease->held_secs = (double)options->manifest->settings.lease_secs;
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
	bool registered = lease->state == ALIVE || lease->asking != NOTHING;
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
	free(lease->numbers);
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
