/*
 * Everything wired together: see runtime.h.
 *
 * Messages flow claim → dispatch → executors → dispatch → settle. Starting goes from the sink to
 * the source, stopping from the source to the sink: claim stops, dispatch gives back, the executors
 * drain, settle writes, the lease leaves, the links close. Each turn of the loop ends in on_turn,
 * where what the turn gathered is sent in one go.
 *
 *     LOADING ──► REGISTERING ──► RUNNING ◄──► REBORN (the lease was lost)
 *         └────────────┴─────────────┴──────────┴──► DRAINING ──► LEAVING ──► CLOSING ──►
 * on_stopped
 */
#include "app/runtime.h"

#include "app/load.h"
#include "app/runtime_state.h"
#include "core/killpoint.h"
#include "core/log.h"

/* Outcomes the database has not taken yet, in batches: beyond, nothing more is claimed. */
#define UNSETTLED_BATCHES 4

const struct mill_settings *mill_runtime_settings(const struct mill_runtime *runtime)
{
	const struct mill_manifest *manifest = mill_reload_manifest(runtime->reload);
	return manifest ? &manifest->settings : &runtime->settings.settings;
}

/* Is what is claimed and finished now still ours to write? */
static bool is_alive(const struct mill_runtime *runtime)
{
	return runtime->phase == RUNNING || runtime->phase == DRAINING || runtime->phase == LEAVING;
}

/* ---- readiness ----------------------------------------------------------------------------- */

static void check_ready(struct mill_runtime *runtime)
{
	if (runtime->was_ready || runtime->phase != RUNNING ||
	    mill_pool_ready_count(mill_reload_pool(runtime->reload)) == 0)
		return;
	runtime->was_ready = true;
	if (runtime->options.on_ready != NULL)
		runtime->options.on_ready(runtime->options.context);
}

/* ---- claim → dispatch ---------------------------------------------------------------------- */

static size_t room(void *context)
{
	struct mill_runtime *runtime = context;
	size_t unsettled = (size_t)mill_runtime_settings(runtime)->batch * UNSETTLED_BATCHES;
	if (runtime->phase != RUNNING || mill_settle_held(runtime->settle) > unsettled)
		return 0;
	size_t most = mill_reload_most(runtime->reload);
	size_t held = mill_dispatch_held(runtime->dispatch);
	size_t own = mill_dispatch_room(runtime->dispatch, mill_reload_pool(runtime->reload));
	size_t all = held < most ? most - held : 0; /* what older generations still have counts */
	return own < all ? own : all;
}

/* A reload took its lane away while it was being claimed. */
static void give_back(struct mill_runtime *runtime, struct mill_delivery *delivery)
{
	const struct mill_outcome returned = { .kind = MILL_OUTCOME_RETURNED };
	mill_delivery_conclude(delivery, &returned, 0);
	mill_settle_take(runtime->settle, delivery);
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
	if (!is_alive(runtime))
		drop(delivery);
	else if (delivery->lane->removed)
		give_back(runtime, delivery);
	else
		mill_dispatch_take(runtime->dispatch, delivery, deliver);
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

/* ---- the executors ------------------------------------------------------------------------- */

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

/* ---- the lease ----------------------------------------------------------------------------- */

static void follow_lanes(struct mill_runtime *runtime)
{
	const struct mill_settings *settings = mill_runtime_settings(runtime);
	if (runtime->claim != NULL)
		mill_claim_follow(runtime->claim, (size_t)settings->batch, settings->poll_secs);
}

static void on_renumbered(const int32_t *numbers, void *context)
{
	struct mill_runtime *runtime = context;
	mill_lanes_renumber(runtime->lanes, numbers);
	follow_lanes(runtime);
}

/* The next generation takes over: what it has no lanes for is given back. */
static void on_declared(const int32_t *numbers, void *context)
{
	struct mill_runtime *runtime = context;
	if (!mill_reload_declared(runtime->reload))
		return;
	mill_lanes_declare(runtime->lanes, mill_reload_manifest(runtime->reload), numbers,
	                   runtime->options.only);
	mill_links_follow(runtime->links, mill_runtime_settings(runtime));
	follow_lanes(runtime);
	mill_dispatch_release_removed(runtime->dispatch);
}

static void on_declare_refused(const struct mill_err *err, void *context)
{
	struct mill_runtime *runtime = context;
	mill_reload_refused(runtime->reload, err);
}

static void start_claim(struct mill_runtime *runtime)
{
	const struct mill_settings *settings = mill_runtime_settings(runtime);
	struct mill_claim_options options = {
		.loop = runtime->options.loop,
		.store = runtime->store,
		.work = runtime->links[MILL_LINK_WORK],
		.lanes = runtime->lanes,
		.batch = (size_t)settings->batch,
		.poll_secs = settings->poll_secs,
		.room = room,
		.on_claimed = on_claimed,
		.on_refused = on_refused_message,
		.context = runtime,
	};
	runtime->claim = mill_claim_new(&options);
}

static void on_registered(const int32_t *numbers, void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->phase != REGISTERING && runtime->phase != REBORN)
		return;
	runtime->phase = RUNNING;
	mill_lanes_declare(runtime->lanes, mill_reload_manifest(runtime->reload), numbers,
	                   runtime->options.only);
	if (runtime->claim == NULL)
		start_claim(runtime);
	else
		follow_lanes(runtime);
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
		mill_reload_kill(runtime->reload);
	if (runtime->phase != RUNNING)
		return;
	runtime->phase = REBORN;
	mill_dispatch_release(runtime->dispatch);
	mill_settle_forget(runtime->settle);
	mill_claim_forget(runtime->claim);
	mill_reload_kill(runtime->reload);
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

static void refuse_start(struct mill_runtime *runtime)
{
	runtime->exit_code = 2;
	mill_runtime_stop(runtime);
}

/*
 * The connections were made for the settings that config.lua had a moment ago. One of them may have
 * been left out on purpose, by the caller.
 */
static int check_start(struct mill_runtime *runtime, const struct mill_manifest *manifest)
{
	const struct mill_config_key *key = NULL;
	while ((key = mill_manifest_restart_key(&runtime->settings, manifest, key)) != NULL)
		if (strcmp(key->name, "listen_database") != 0)
			return mill_err_set(&runtime->err, MILL_ERR_CONFIG,
			                    "`%s` changed in %s while the program started: start "
			                    "it again",
			                    key->name, runtime->options.config_path);
	return mill_lanes_check_only(manifest, runtime->options.only, &runtime->err);
}

static void on_first(void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->phase != LOADING)
		return;
	const struct mill_manifest *manifest = mill_reload_manifest(runtime->reload);
	if (check_start(runtime, manifest) != 0) {
		refuse_start(runtime);
		return;
	}
	struct mill_lease_options options = {
		.loop = runtime->options.loop,
		.store = runtime->store,
		.link = runtime->links[MILL_LINK_LEASE],
		.sweep_link = runtime->links[MILL_LINK_SWEEP],
		.manifest = manifest,
		.generation = mill_reload_generation(runtime->reload),
		.on_registered = on_registered,
		.on_declared = on_declared,
		.on_declare_refused = on_declare_refused,
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

static void on_load_error(struct mill_span text, void *context)
{
	struct mill_runtime *runtime = context;
	if (runtime->phase != LOADING)
		return;
	mill_log(MILL_LOG_ERROR, "load_failed", MILL_TEXT_N("error", text.data, text.len));
	mill_err_set(&runtime->err, MILL_ERR_CONFIG, "%.*s", (int)text.len, text.data);
	refuse_start(runtime);
}

/* A new generation has loaded; its lanes come before it serves. */
static void on_complete(const struct mill_manifest *manifest, uint32_t generation, void *context)
{
	struct mill_runtime *runtime = context;
	mill_lease_declare(runtime->lease, manifest, generation);
}

void mill_runtime_reload(struct mill_runtime *runtime, const char *reason)
{
	mill_reload_ask(runtime->reload, MILL_RELOAD_ASKED, reason);
}

static void start_reload(struct mill_runtime *runtime)
{
	struct mill_reload_options options = {
		.loop = runtime->options.loop,
		.config_path = runtime->options.config_path,
		.database = runtime->options.database ? runtime->options.database
		                                      : runtime->settings.settings.database,
		.plain_table = runtime->options.shape == MILL_SHAPE_PLAIN,
		.only = runtime->options.only,
		.settings = &runtime->settings,
		.may_watch = !runtime->options.until_idle,
		.on_ready = on_executor_ready,
		.on_outcome = on_outcome,
		.on_request = on_request,
		.on_gone = on_gone,
		.on_first = on_first,
		.on_load_error = on_load_error,
		.on_complete = on_complete,
		.context = runtime,
	};
	runtime->reload = mill_reload_start(&options);
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

/* `tidemill reload` asks all workers of an app. */
static void on_reload(const char *app, void *context)
{
	struct mill_runtime *runtime = context;
	if (strcmp(app, runtime->settings.settings.app) == 0)
		mill_runtime_reload(runtime, "tidemill reload");
}

static void start_listener(struct mill_runtime *runtime)
{
	struct mill_listener_options options = {
		.loop = runtime->options.loop,
		.store = runtime->store,
		.listen = runtime->links[MILL_LINK_LISTEN],
		.lease = runtime->links[MILL_LINK_LEASE],
		.queue_channel = runtime->queue_channel,
		.control_channel = runtime->control_channel,
		.on_work = on_work,
		.on_cancel = on_cancel,
		.on_reload = on_reload,
		.context = runtime,
	};
	runtime->listener = mill_listener_new(&options);
}

static void start_links(struct mill_runtime *runtime)
{
	struct mill_links_options options = {
		.loop = runtime->options.loop,
		.store = runtime->store,
		.settings = &runtime->settings.settings,
		.database = runtime->options.database,
		.channels = runtime->channels,
		.on_wake = on_wake_link_up,
		.on_lease_up = on_lease_link_up,
		.on_notify = on_notify,
		.context = runtime,
	};
	mill_links_start(&options, runtime->links);
	if (runtime->links[MILL_LINK_LISTEN] != NULL)
		start_listener(runtime);
}

/* ---- the turn of the loop ------------------------------------------------------------------ */

static void check_idle(struct mill_runtime *runtime)
{
	if (runtime->options.until_idle && runtime->phase == RUNNING && runtime->was_ready &&
	    mill_dispatch_held(runtime->dispatch) == 0 && mill_settle_held(runtime->settle) == 0 &&
	    mill_claim_is_idle(runtime->claim))
		mill_runtime_stop(runtime);
}

static void on_turn(uv_prepare_t *prepare)
{
	struct mill_runtime *runtime = mill_container_of(prepare, struct mill_runtime, turn);
	if (runtime->lease != NULL)
		mill_lease_check(runtime->lease);
	check_rebirth(runtime);
	check_idle(runtime);
	mill_runtime_check_drained(runtime);
	mill_settle_turn(runtime->settle);
	mill_relay_turn(runtime->relay);
	if (runtime->claim != NULL)
		mill_claim_turn(runtime->claim);
	mill_dispatch_send(runtime->dispatch, mill_reload_pool(runtime->reload));
	mill_reload_flush(runtime->reload);
	if (mill_dispatch_held(runtime->dispatch) > 0)
		MILL_KILL_POINT("deliveries_sent");
	mill_links_flush(runtime->links);
	mill_lanes_tidy(runtime->lanes);
}

/* ---- life ---------------------------------------------------------------------------------- */

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
	struct mill_settle_options settle_options = {
		.loop = options->loop,
		.store = runtime->store,
		.work = runtime->links[MILL_LINK_WORK],
		.publish = runtime->links[MILL_LINK_PUBLISH],
		.orphans = &runtime->orphans,
		.on_settled = on_settled,
		.context = runtime,
	};
	runtime->settle = mill_settle_new(&settle_options);
	runtime->relay = mill_relay_new(options->loop, runtime->store,
	                                runtime->links[MILL_LINK_PUBLISH], &runtime->orphans);
	struct mill_dispatch_options dispatch_options = { .on_finished = on_finished,
		                                          .context = runtime };
	runtime->dispatch = mill_dispatch_new(&dispatch_options);
	start_reload(runtime);
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
	mill_lanes_free(runtime->lanes);
	free(runtime->queue_channel);
	free(runtime->control_channel);
	free(runtime);
}
