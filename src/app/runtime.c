/*
 * Everything wired together: see runtime.h.
 *
 * Messages flow claim → dispatch → pool → dispatch → settle. Starting goes from the sink to the
 * source, stopping from the source to the sink: claim stops, dispatch gives back, the pool drains,
 * settle writes, the lease leaves, the links close. Each turn of the loop ends in on_turn, where
 * what the turn gathered is sent in one go.
 *
 *     LOADING ──► REGISTERING ──► RUNNING ◄──► REBORN (the lease was lost)
 *         └────────────┴─────────────┴──────────┴──► DRAINING ──► LEAVING ──► CLOSING ──►
 * on_stopped
 */
#include "app/runtime.h"

#include <math.h>

#include "app/load.h"
#include "core/killpoint.h"
#include "core/log.h"
#include "flow/claim.h"
#include "flow/dispatch.h"
#include "flow/lanes.h"
#include "flow/lease.h"
#include "flow/listener.h"
#include "flow/orphan.h"
#include "flow/pool.h"
#include "flow/relay.h"
#include "flow/settle.h"

#define HASTY_MS 2000
/* An exchange unanswered for so long: the connection hangs. A renewal has less time. */
#define LINK_DEADLINE_SECS 60.0
/* Outcomes the database has not taken yet, in batches: beyond, nothing more is claimed. */
#define UNSETTLED_BATCHES 4

enum phase { LOADING, REGISTERING, RUNNING, REBORN, DRAINING, LEAVING, CLOSING };

enum { WORK, LEASE, SWEEP, PUBLISH, LISTEN, LINKS };

struct mill_runtime {
	struct mill_runtime_options options;
	enum phase phase;
	struct mill_manifest settings; /* as config.lua alone gave it: for start and connections */
	struct mill_manifest manifest; /* as the executors loaded it: the lanes */
	bool has_manifest, was_ready, hasty;
	struct mill_lanes *lanes;
	char *queue_channel, *control_channel;
	const char *channels[3];

	struct mill_store *store;
	struct mill_link *links[LINKS];
	struct mill_pool *pool;
	struct mill_dispatch *dispatch;
	struct mill_settle *settle;
	struct mill_relay *relay;
	struct mill_orphans orphans;
	struct mill_claim *claim;       /* NULL until registered */
	struct mill_lease *lease;       /* NULL until the manifest is known */
	struct mill_listener *listener; /* NULL where notifications are off */

	uv_prepare_t turn;
	uv_timer_t deadline; /* of the drain, then of giving up */
	bool killing;
	int to_close;
	int exit_code;
	struct mill_err err;
};

static void begin_closing(struct mill_runtime *runtime);

/* Is what is claimed and finished now still ours to write? */
static bool is_alive(const struct mill_runtime *runtime)
{
	return runtime->phase == RUNNING || runtime->phase == DRAINING || runtime->phase == LEAVING;
}

/* ---- readiness ----------------------------------------------------------------------------- */

static void check_ready(struct mill_runtime *runtime)
{
	if (runtime->was_ready || runtime->phase != RUNNING ||
	    mill_pool_ready_count(runtime->pool) == 0)
		return;
	runtime->was_ready = true;
	if (runtime->options.on_ready != NULL)
		runtime->options.on_ready(runtime->options.context);
}

/* ---- claim → dispatch ---------------------------------------------------------------------- */

static size_t room(void *context)
{
	struct mill_runtime *runtime = context;
	size_t unsettled = (size_t)runtime->settings.settings.batch * UNSETTLED_BATCHES;
	if (runtime->phase != RUNNING || mill_settle_held(runtime->settle) > unsettled)
		return 0;
	return mill_dispatch_room(runtime->dispatch, runtime->pool);
}

/* The lease was lost meanwhile: others have this message, or will. */
static void drop(struct mill_delivery *delivery)
{
	delivery->lane->running--;
	mill_delivery_free(delivery);
}

static void on_claimed(struct mill_delivery *delivery, struct mill_deliver *deliver, void *context)
{
	struct mill_runtime *runtime = context;
	if (is_alive(runtime))
		mill_dispatch_take(runtime->dispatch, delivery, deliver);
	else
		drop(delivery);
}

static void on_refused_message(struct mill_delivery *delivery, const char *reason, void *context)
{
	struct mill_runtime *runtime = context;
	if (!is_alive(runtime)) {
		drop(delivery);
		return;
	}
	delivery->settlement = MILL_SETTLE_FAILED;
	delivery->error = mill_strdup(reason);
	mill_settle_take(runtime->settle, delivery);
}

/* ---- dispatch → settle → back to claim ----------------------------------------------------- */

static void on_finished(struct mill_delivery *delivery, void *context)
{
	struct mill_runtime *runtime = context;
	if (is_alive(runtime))
		mill_settle_take(runtime->settle, delivery);
	else
		drop(delivery);
}

static void on_settled(struct mill_delivery *delivery, void *context)
{
	struct mill_runtime *runtime = context;
	delivery->lane->running--;
	if (delivery->settlement == MILL_SETTLE_PENDING && runtime->claim != NULL)
		mill_claim_expect(runtime->claim, delivery->lane, delivery->delay_secs);
}

/* ---- the pool ------------------------------------------------------------------------------ */

static void on_outcome(struct mill_executor *executor, const struct mill_outcome *outcome,
                       void *context)
{
	struct mill_runtime *runtime = context;
	mill_dispatch_outcome(runtime->dispatch, executor, outcome);
}

static void on_request(struct mill_executor *executor, const struct mill_request *request,
                       void *context)
{
	struct mill_runtime *runtime = context;
	mill_relay_take(runtime->relay, executor, request,
	                mill_dispatch_find(runtime->dispatch, executor, request->ticket));
}

static void on_gone(struct mill_executor *executor, const struct mill_executor_death *death,
                    void *context)
{
	struct mill_runtime *runtime = context;
	mill_relay_forget(runtime->relay, executor);
	mill_dispatch_gone(runtime->dispatch, executor, death);
}

static void on_executor_ready(struct mill_executor *executor, void *context)
{
	(void)executor;
	check_ready(context);
}

static void on_load_error(struct mill_span text, void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->phase != LOADING)
		return;
	mill_log(MILL_LOG_ERROR, "load_failed", MILL_TEXT_N("error", text.data, text.len));
	mill_err_set(&runtime->err, MILL_ERR_CONFIG, "%.*s", (int)text.len, text.data);
	runtime->exit_code = 2;
	mill_runtime_stop(runtime);
}

/* ---- the lease ----------------------------------------------------------------------------- */

static void on_renumbered(const int32_t *numbers, void *context)
{
	struct mill_runtime *runtime = context;
	const struct mill_settings *settings = &runtime->settings.settings;
	mill_lanes_renumber(runtime->lanes, numbers);
	mill_claim_follow(runtime->claim, (size_t)settings->batch, settings->poll_secs);
}

static void on_registered(const int32_t *numbers, void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->phase != REGISTERING && runtime->phase != REBORN)
		return;
	runtime->phase = RUNNING;
	const struct mill_settings *settings = &runtime->settings.settings;
	if (runtime->claim == NULL) {
		mill_lanes_declare(runtime->lanes, &runtime->manifest, numbers,
		                   runtime->options.only);
		struct mill_claim_options options = {
			.loop = runtime->options.loop,
			.store = runtime->store,
			.work = runtime->links[WORK],
			.lanes = runtime->lanes,
			.batch = (size_t)settings->batch,
			.poll_secs = settings->poll_secs,
			.room = room,
			.on_claimed = on_claimed,
			.on_refused = on_refused_message,
			.context = runtime,
		};
		runtime->claim = mill_claim_new(&options);
	} else {
		on_renumbered(numbers, runtime);
	}
	check_ready(runtime);
}

static void on_lease_refused(const struct mill_err *err, void *context)
{
	struct mill_runtime *runtime = context;
	runtime->err = *err;
	runtime->exit_code = 2;
	mill_runtime_stop(runtime);
}

/*
 * To the others we are dead: stop all handlers, write nothing, and begin anew under another id. Not
 * while stopping: then what can still be written is, as far as the fence lets it pass.
 */
static void on_dead(void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->phase == DRAINING)
		mill_pool_kill(runtime->pool);
	if (runtime->phase != RUNNING)
		return;
	runtime->phase = REBORN;
	mill_dispatch_release(runtime->dispatch);
	mill_settle_forget(runtime->settle);
	mill_claim_forget(runtime->claim);
	mill_pool_kill(runtime->pool);
}

/* Nothing of the old life is left, not even an answer on its way. */
static void check_rebirth(struct mill_runtime *runtime)
{
	if (runtime->phase == REBORN && mill_dispatch_held(runtime->dispatch) == 0 &&
	    mill_claim_is_settled(runtime->claim)) {
		runtime->phase = REGISTERING;
		mill_lease_register(runtime->lease);
	}
}

static void on_work(struct mill_span topic, void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->claim != NULL)
		mill_claim_wake_topic(runtime->claim, topic);
}

static void on_manifest(const struct mill_manifest *manifest, void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->phase != LOADING)
		return;
	mill_manifest_copy(&runtime->manifest, manifest);
	runtime->has_manifest = true;
	if (mill_lanes_check_only(manifest, runtime->options.only, &runtime->err) != 0) {
		runtime->exit_code = 2;
		mill_runtime_stop(runtime);
		return;
	}
	struct mill_lease_options options = {
		.loop = runtime->options.loop,
		.store = runtime->store,
		.link = runtime->links[LEASE],
		.sweep_link = runtime->links[SWEEP],
		.manifest = &runtime->manifest,
		.generation = 1,
		.on_registered = on_registered,
		.on_renumbered = on_renumbered,
		.on_refused = on_lease_refused,
		.on_dead = on_dead,
		.on_work = on_work,
		.context = runtime,
	};
	runtime->lease = mill_lease_new(&options);
	runtime->phase = REGISTERING;
	mill_lease_register(runtime->lease);
}

/* ---- the links ----------------------------------------------------------------------------- */

static void on_wake_link_up(void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->claim != NULL)
		mill_claim_wake_all(runtime->claim);
}

static void on_lease_link_up(void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->lease != NULL)
		mill_lease_link_up(runtime->lease);
}

static void on_notify(const char *channel, const char *payload, void *context)
{
	struct mill_runtime *runtime = context;
	mill_listener_take(runtime->listener, channel, payload);
}

static void on_cancel(const uint8_t id[16], void *context)
{
	struct mill_runtime *runtime = context;
	mill_dispatch_cancel(runtime->dispatch, id);
}

static void start_listener(struct mill_runtime *runtime)
{
	struct mill_listener_options options = {
		.loop = runtime->options.loop,
		.store = runtime->store,
		.listen = runtime->links[LISTEN],
		.lease = runtime->links[LEASE],
		.queue_channel = runtime->queue_channel,
		.control_channel = runtime->control_channel,
		.on_work = on_work,
		.on_cancel = on_cancel,
		.context = runtime,
	};
	runtime->listener = mill_listener_new(&options);
}

static void start_links(struct mill_runtime *runtime)
{
	static const struct {
		const char *name;
		enum mill_store_use use;
		void (*on_up)(void *context);
	} links[LINKS] = {
		[WORK] = { "work", MILL_USE_WORK, on_wake_link_up },
		[LEASE] = { "lease", MILL_USE_LEASE, on_lease_link_up },
		[SWEEP] = { "sweep", MILL_USE_SWEEP, NULL },
		[PUBLISH] = { "publish", MILL_USE_PUBLISH, NULL },
		[LISTEN] = { "listen", MILL_USE_LISTEN, on_wake_link_up },
	};
	const struct mill_settings *settings = &runtime->settings.settings;
	const char *database =
	        runtime->options.database ? runtime->options.database : settings->database;
	for (size_t i = 0; i < LINKS; i++) {
		if (i == LISTEN && !settings->notify)
			continue;
		struct mill_link_options options = {
			.loop = runtime->options.loop,
			.name = links[i].name,
			.dsn = database,
			.deadline_secs = LINK_DEADLINE_SECS,
			.on_up = links[i].on_up,
			.context = runtime,
		};
		if (i == LEASE)
			options.deadline_secs =
			        fmin(LINK_DEADLINE_SECS, (double)settings->lease_secs / 2);
		if (i == LISTEN) {
			if (settings->listen_database != NULL)
				options.dsn = settings->listen_database;
			options.channels = runtime->channels;
			options.on_notify = on_notify;
		}
		mill_store_statements(runtime->store, links[i].use, &options);
		runtime->links[i] = mill_link_new(&options);
	}
}

/* ---- stopping ------------------------------------------------------------------------------ */

static void on_deadline(uv_timer_t *timer)
{
	struct mill_runtime *runtime = mill_container_of(timer, struct mill_runtime, deadline);
	if (!runtime->killing) {
		runtime->killing = true;
		mill_pool_kill(runtime->pool);
		uv_timer_start(&runtime->deadline, on_deadline, HASTY_MS, 0);
		return;
	}
	if (!mill_pool_is_empty(runtime->pool)) {
		uv_timer_start(&runtime->deadline, on_deadline, HASTY_MS, 0);
		return; /* killed, but not gone yet: until then its handlers may act */
	}
	/* The database did not take what is left. The lease frees those messages in time. */
	size_t held = mill_settle_held(runtime->settle);
	if (held > 0) {
		mill_err_set(
		        &runtime->err, MILL_ERR_UNREACHED,
		        "%zu outcomes could not be written before the stop: their messages run "
		        "again when this worker's lease is over",
		        held);
		mill_log(MILL_LOG_ERROR, "outcomes_unwritten", MILL_INT("messages", held));
		if (runtime->exit_code == 0)
			runtime->exit_code = 1;
	}
	begin_closing(runtime);
}

void mill_runtime_stop(struct mill_runtime *runtime)
{
	if (runtime->phase >= LEAVING)
		return;
	if (runtime->phase == DRAINING) {
		if (runtime->hasty)
			return;
		runtime->hasty = runtime->killing = true;
		if (runtime->exit_code == 0)
			runtime->exit_code = 3;
		mill_pool_kill(runtime->pool);
		uv_timer_start(&runtime->deadline, on_deadline, HASTY_MS, 0);
		return;
	}
	runtime->phase = DRAINING;
	mill_log(MILL_LOG_INFO, "stopping",
	         MILL_INT("running", mill_dispatch_held(runtime->dispatch)),
	         MILL_NUMBER("wait_secs", runtime->settings.settings.shutdown_secs));
	if (runtime->claim != NULL)
		mill_claim_stop(runtime->claim);
	mill_pool_drain(runtime->pool);
	uint64_t wait_ms = (uint64_t)(runtime->settings.settings.shutdown_secs * 1000);
	uv_timer_start(&runtime->deadline, on_deadline, wait_ms, 0);
}

static void on_left(void *context)
{
	begin_closing(context);
}

static void check_idle(struct mill_runtime *runtime)
{
	if (runtime->options.until_idle && runtime->phase == RUNNING && runtime->was_ready &&
	    mill_dispatch_held(runtime->dispatch) == 0 && mill_settle_held(runtime->settle) == 0 &&
	    mill_claim_is_idle(runtime->claim))
		mill_runtime_stop(runtime);
}

static void check_drained(struct mill_runtime *runtime)
{
	if (runtime->phase != DRAINING)
		return;
	mill_dispatch_release(runtime->dispatch);
	bool claimed = runtime->claim != NULL && !mill_claim_is_settled(runtime->claim);
	if (!mill_pool_is_empty(runtime->pool) || mill_dispatch_held(runtime->dispatch) > 0 ||
	    claimed || mill_settle_held(runtime->settle) > 0)
		return;
	MILL_KILL_POINT("leaving");
	runtime->phase = LEAVING;
	if (runtime->lease != NULL) {
		runtime->killing =
		        true; /* the deadline ends a farewell that is not answered, too */
		uv_timer_start(&runtime->deadline, on_deadline, HASTY_MS, 0);
		mill_lease_leave(runtime->lease, on_left, runtime);
	} else {
		begin_closing(runtime);
	}
}

static void on_all_closed(struct mill_runtime *runtime)
{
	mill_log(MILL_LOG_INFO, "stopped", MILL_INT("exit_code", runtime->exit_code));
	bool failed = runtime->err.kind != MILL_ERR_NONE;
	runtime->options.on_stopped(runtime->exit_code, failed ? &runtime->err : NULL,
	                            runtime->options.context);
}

static void on_closed(void *context)
{
	struct mill_runtime *runtime = context;
	if (--runtime->to_close == 0)
		on_all_closed(runtime);
}

static void on_deadline_closed(uv_handle_t *handle)
{
	on_closed(mill_container_of(handle, struct mill_runtime, deadline));
}

/* The links are closed, so nobody answers any more: the modules can go. */
static void close_modules(struct mill_runtime *runtime)
{
	/* A claim may have been answered when the end was decided already. */
	mill_dispatch_release(runtime->dispatch);
	mill_settle_forget(runtime->settle);
	mill_dispatch_free(runtime->dispatch);
	runtime->to_close = 4 + (runtime->claim != NULL) + (runtime->lease != NULL) +
	                    (runtime->listener != NULL);
	mill_settle_close(runtime->settle, on_closed, runtime);
	mill_relay_close(runtime->relay, on_closed, runtime);
	mill_pool_close(runtime->pool, on_closed, runtime);
	uv_close((uv_handle_t *)&runtime->deadline, on_deadline_closed);
	if (runtime->listener != NULL)
		mill_listener_close(runtime->listener, on_closed, runtime);
	if (runtime->claim != NULL)
		mill_claim_close(runtime->claim, on_closed, runtime);
	if (runtime->lease != NULL)
		mill_lease_close(runtime->lease, on_closed, runtime);
}

static void on_link_closed(void *context)
{
	struct mill_runtime *runtime = context;
	if (--runtime->to_close == 0)
		close_modules(runtime);
}

static void on_turn_closed(uv_handle_t *handle)
{
	struct mill_runtime *runtime = mill_container_of(handle, struct mill_runtime, turn);
	runtime->to_close = 0;
	for (size_t i = 0; i < LINKS; i++)
		runtime->to_close += runtime->links[i] != NULL;
	for (size_t i = 0; i < LINKS; i++)
		if (runtime->links[i] != NULL)
			mill_link_close(runtime->links[i], on_link_closed, runtime);
}

static void begin_closing(struct mill_runtime *runtime)
{
	if (runtime->phase == CLOSING)
		return;
	runtime->phase = CLOSING;
	uv_timer_stop(&runtime->deadline);
	uv_close((uv_handle_t *)&runtime->turn, on_turn_closed);
}

/* ---- the turn of the loop ------------------------------------------------------------------ */

static void on_turn(uv_prepare_t *prepare)
{
	struct mill_runtime *runtime = mill_container_of(prepare, struct mill_runtime, turn);
	if (runtime->lease != NULL)
		mill_lease_check(runtime->lease);
	check_rebirth(runtime);
	check_idle(runtime);
	check_drained(runtime);
	mill_settle_turn(runtime->settle);
	mill_relay_turn(runtime->relay);
	if (runtime->claim != NULL)
		mill_claim_turn(runtime->claim);
	mill_dispatch_send(runtime->dispatch, runtime->pool);
	mill_pool_flush(runtime->pool);
	if (mill_dispatch_held(runtime->dispatch) > 0)
		MILL_KILL_POINT("deliveries_sent");
	for (size_t i = 0; i < LINKS; i++)
		if (runtime->links[i] != NULL)
			mill_link_flush(runtime->links[i]);
}

/* ---- life ---------------------------------------------------------------------------------- */

static size_t executor_count(const struct mill_settings *settings)
{
	return settings->executors ? (size_t)settings->executors : uv_available_parallelism();
}

static void start_pool(struct mill_runtime *runtime)
{
	const struct mill_settings *settings = &runtime->settings.settings;
	struct mill_pool_options options = {
		.loop = runtime->options.loop,
		.program = mill_load_program(),
		.config_path = runtime->options.config_path,
		.generation = 1,
		.count = executor_count(settings),
		.concurrency = (size_t)settings->concurrency,
		.stall_secs = settings->stall_secs,
		.kill_grace_secs = settings->kill_grace_secs,
		.max_memory_mb = (size_t)settings->max_memory_mb,
		.max_deliveries = (uint64_t)settings->max_deliveries,
		.on_manifest = on_manifest,
		.on_ready = on_executor_ready,
		.on_outcome = on_outcome,
		.on_request = on_request,
		.on_gone = on_gone,
		.on_load_error = on_load_error,
		.context = runtime,
	};
	runtime->pool = mill_pool_start(&options);
}

int mill_runtime_start(const struct mill_runtime_options *options, struct mill_runtime **out,
                       struct mill_err *err)
{
	if (mill_load_program() == NULL)
		return mill_err_set(err, MILL_ERR_SYSTEM,
		                    "the program cannot find itself: is /proc mounted?");
	struct mill_runtime *runtime = mill_calloc(1, sizeof(*runtime));
	runtime->options = *options;
	mill_manifest_copy(&runtime->settings, options->manifest);
	const struct mill_settings *settings = &runtime->settings.settings;
	runtime->queue_channel = mill_sprintf("%s_queue", settings->prefix);
	runtime->control_channel = mill_sprintf("%s_control", settings->prefix);
	runtime->channels[0] = runtime->queue_channel;
	runtime->channels[1] = runtime->control_channel;
	struct mill_store_options store_options = {
		.schema = settings->schema,
		.table = settings->table,
		.prefix = settings->prefix,
		.max_payload_bytes = settings->max_payload_bytes,
		.shape = options->shape,
		.notify = settings->notify,
		.retain_hours = settings->lane.retain_hours,
	};
	runtime->store = mill_store_new(&store_options);
	runtime->lanes = mill_lanes_new();
	start_links(runtime);
	if (runtime->links[LISTEN] != NULL)
		start_listener(runtime);
	struct mill_settle_options settle_options = {
		.loop = options->loop,
		.store = runtime->store,
		.work = runtime->links[WORK],
		.publish = runtime->links[PUBLISH],
		.orphans = &runtime->orphans,
		.on_settled = on_settled,
		.context = runtime,
	};
	runtime->settle = mill_settle_new(&settle_options);
	runtime->relay = mill_relay_new(options->loop, runtime->store, runtime->links[PUBLISH],
	                                &runtime->orphans);
	struct mill_dispatch_options dispatch_options = { .on_finished = on_finished,
		                                          .context = runtime };
	runtime->dispatch = mill_dispatch_new(&dispatch_options);
	start_pool(runtime);
	MILL_ASSERT(uv_timer_init(options->loop, &runtime->deadline) == 0);
	MILL_ASSERT(uv_prepare_init(options->loop, &runtime->turn) == 0);
	uv_prepare_start(&runtime->turn, on_turn);
	*out = runtime;
	return 0;
}

void mill_runtime_free(struct mill_runtime *runtime)
{
	mill_store_free(runtime->store);
	mill_manifest_free(&runtime->settings);
	if (runtime->has_manifest)
		mill_manifest_free(&runtime->manifest);
	mill_lanes_free(runtime->lanes);
	free(runtime->queue_channel);
	free(runtime->control_channel);
	free(runtime);
}
