/*
 * Generations and how one follows another: see reload.h.
 *
 *     asked for ──► its executors load ──► its lanes are declared ──► it serves
 *                          └──────────────────────┴── something is wrong: the one before goes on
 *
 * One reload at a time, and not more than a few a second, however often it is asked for.
 */
#include "app/reload.h"

#include "app/load.h"
#include "app/watch.h"
#include "core/clock.h"
#include "core/log.h"
#include "flow/lanes.h"

#define GAP_MS 250    /* between the beginnings of two reloads */
#define AGAIN_MS 1000 /* before a trial that failed by bad luck is repeated */
#define TRIALS_MOST 3 /* then it was no bad luck */

struct generation {
	struct mill_reload *reload;
	struct mill_pool *pool;
	uint32_t number;
	uint32_t tag; /* for its files: trials of the same number have their own */
	bool has_manifest;
	struct mill_manifest manifest;
	struct generation *next; /* in `old` */
};

struct mill_reload {
	struct mill_reload_options options;
	struct generation *serving;
	struct generation *coming; /* NULL: no reload is under way */
	bool complete;             /* its executors are ready, and its lanes are being declared */
	struct generation *old;    /* those that finish what they have */
	bool stopped;

	char *reason; /* of the reload under way, or of the next; NULL: none is wanted */
	enum mill_reload_cause cause;
	char *next_reason; /* of one that was asked for while another is under way */
	enum mill_reload_cause next_cause;
	uv_timer_t pause;  /* before the next begins */
	uint64_t begun_ns; /* the last one */
	unsigned trials;   /* of this reload */
	uint32_t last_tag;
	char *said; /* the last error told: not again for what tries by itself */
	struct mill_watch *watch;

	size_t closing; /* pools and timers */
	bool closed;
	void (*on_closed)(void *context);
	void *closed_context;
};

/* ---- the files it depends on --------------------------------------------------------------- */

static void on_file(struct mill_pool *pool, const struct mill_file *file, void *context)
{
	struct generation *generation = context;
	struct mill_reload *reload = generation->reload;
	(void)pool;
	if (generation != reload->serving && generation != reload->coming)
		return;
	/* Where another reload follows, a change has been told of that this one may have missed. */
	bool newest = generation == reload->coming && reload->next_reason == NULL;
	mill_watch_file(reload->watch, file, generation->tag, newest);
}

static void on_change(const char *path, void *context)
{
	mill_reload_ask(context, MILL_RELOAD_CHANGED, path);
}

/* As the settings of the generation that serves say. */
static void watch_files(struct mill_reload *reload, const struct mill_settings *settings)
{
	const char *config = reload->options.config_path, *slash = strrchr(config, '/');
	int folder_len =
	        settings->handlers[0] == '/' || slash == NULL ? 0 : (int)(slash - config) + 1;
	size_t len = strlen(settings->handlers);
	while (len > 1 && settings->handlers[len - 1] == '/')
		len--;
	char *tree = mill_sprintf("%.*s%.*s", folder_len, config, (int)len, settings->handlers);
	mill_watch_set(reload->watch, settings->watch && reload->options.may_watch, tree);
	mill_watch_keep(reload->watch, reload->serving->tag);
	free(tree);
}

/* ---- the end of a reload ------------------------------------------------------------------- */

/* Remember an error; is it a new one? */
static bool is_news(struct mill_reload *reload, struct mill_span error)
{
	bool same = reload->said != NULL && strlen(reload->said) == error.len &&
	            memcmp(reload->said, error.data, error.len) == 0;
	if (same)
		return false;
	free(reload->said);
	reload->said = mill_span_dup(error);
	return true;
}

static void forget_news(struct mill_reload *reload)
{
	free(reload->said);
	reload->said = NULL;
}

/* It finishes what it has, and is freed when its last process is gone. */
static void let_go(struct mill_reload *reload, struct generation *generation)
{
	mill_pool_drain(generation->pool);
	generation->next = reload->old;
	reload->old = generation;
}

static void schedule(struct mill_reload *reload, uint64_t least_ms);

static void give_up(struct mill_reload *reload)
{
	let_go(reload, reload->coming);
	reload->coming = NULL;
	reload->complete = false;
}

/* One was over, by whatever end: the next that was asked for meanwhile. */
static void conclude(struct mill_reload *reload)
{
	free(reload->reason);
	reload->reason = reload->next_reason;
	reload->cause = reload->next_cause;
	reload->next_reason = NULL;
	reload->trials = 0;
	if (reload->reason != NULL)
		schedule(reload, 0);
}

static void fail(struct mill_reload *reload, struct mill_span error)
{
	bool news = is_news(reload, error);
	if (news || reload->cause != MILL_RELOAD_NECESSARY)
		mill_log(MILL_LOG_ERROR, "reload_failed",
		         MILL_INT("generation", reload->coming->number),
		         MILL_TEXT("reason", reload->reason),
		         MILL_INT("still_serving", reload->serving->number),
		         MILL_TEXT_N("error", error.data, error.len));
	give_up(reload);
	conclude(reload);
}

/* ---- what generations report --------------------------------------------------------------- */

/* What of a new generation's settings the program cannot follow. */
static int check_settings(const struct mill_reload *reload, const struct mill_manifest *manifest,
                          struct mill_err *err)
{
	const struct mill_config_key *key =
	        mill_manifest_restart_key(&reload->serving->manifest, manifest, NULL);
	if (key != NULL)
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "`%s` has changed, which only a restart can follow: restart, "
		                    "or set it back",
		                    key->name);
	return mill_lanes_check_only(manifest, reload->options.only, err);
}

static bool on_manifest(struct mill_pool *pool, const struct mill_manifest *manifest, void *context)
{
	struct generation *generation = context;
	struct mill_reload *reload = generation->reload;
	struct mill_err err = MILL_ERR_INIT;
	(void)pool;
	if (generation == reload->coming && check_settings(reload, manifest, &err) != 0) {
		fail(reload, MILL_SPAN(err.message));
		return false;
	}
	mill_manifest_copy(&generation->manifest, manifest);
	generation->has_manifest = true;
	if (generation == reload->serving) {
		watch_files(reload, &manifest->settings);
		reload->options.on_first(reload->options.context);
		if (reload->reason != NULL)
			schedule(reload, 0);
	}
	return true;
}

static void on_ready(struct mill_executor *executor, void *context)
{
	struct generation *generation = context;
	const struct mill_reload_options *options = &generation->reload->options;
	if (generation == generation->reload->serving)
		forget_news(generation->reload);
	options->on_ready(executor, options->context);
}

static void on_complete(struct mill_pool *pool, void *context)
{
	struct generation *generation = context;
	struct mill_reload *reload = generation->reload;
	(void)pool;
	if (generation != reload->coming)
		return;
	reload->complete = true;
	reload->options.on_complete(&generation->manifest, generation->number,
	                            reload->options.context);
}

static void on_outcome(struct mill_executor *executor, const struct mill_outcome *outcome,
                       void *context)
{
	const struct generation *generation = context;
	const struct mill_reload_options *options = &generation->reload->options;
	options->on_outcome(executor, outcome, options->context);
}

static void on_request(struct mill_executor *executor, const struct mill_request *request,
                       void *context)
{
	const struct generation *generation = context;
	const struct mill_reload_options *options = &generation->reload->options;
	options->on_request(executor, request, options->context);
}

static void on_gone(struct mill_executor *executor, const struct mill_executor_death *death,
                    void *context)
{
	const struct generation *generation = context;
	const struct mill_reload_options *options = &generation->reload->options;
	options->on_gone(executor, death, options->context);
}

/* An executor of a complete generation could not be replaced. The pool tries again by itself. */
static void miss(struct generation *generation, enum mill_setback setback, struct mill_span text)
{
	struct mill_reload *reload = generation->reload;
	if (setback == MILL_SETBACK_DIFFERS)
		mill_reload_ask(reload, MILL_RELOAD_NECESSARY, "an executor found other files");
	else if (is_news(reload, text))
		mill_log(MILL_LOG_ERROR, "load_failed", MILL_INT("generation", generation->number),
		         MILL_INT("executors_left", mill_pool_ready_count(generation->pool)),
		         MILL_TEXT_N("error", text.data, text.len));
}

static void on_setback(struct mill_pool *pool, enum mill_setback setback, struct mill_span text,
                       void *context)
{
	struct generation *generation = context;
	struct mill_reload *reload = generation->reload;
	(void)pool;
	if (text.data == NULL)
		text = MILL_SPAN("config.lua comes out differently in each executor: it must not "
		                 "depend on time or chance");
	if (generation == reload->serving && !generation->has_manifest) {
		reload->options.on_load_error(text, reload->options.context);
	} else if (generation != reload->coming || reload->complete) {
		miss(generation, setback, text);
	} else if (setback == MILL_SETBACK_LOAD || ++reload->trials >= TRIALS_MOST) {
		fail(reload, text);
	} else {
		give_up(reload);
		schedule(reload, AGAIN_MS);
	}
}

/* ---- one generation after the other -------------------------------------------------------- */

static struct generation *start_generation(struct mill_reload *reload, uint32_t number,
                                           const struct mill_settings *settings)
{
	struct generation *generation = mill_calloc(1, sizeof(*generation));
	generation->reload = reload;
	generation->number = number;
	generation->tag = ++reload->last_tag;
	struct mill_pool_options options = {
		.loop = reload->options.loop,
		.program = mill_load_program(),
		.config_path = reload->options.config_path,
		.database = reload->options.database,
		.plain_table = reload->options.plain_table,
		.generation = number,
		.settings = settings,
		.trial_memory_mb =
		        settings ? 0 : (size_t)reload->serving->manifest.settings.max_memory_mb,
		.on_manifest = on_manifest,
		.on_ready = on_ready,
		.on_complete = on_complete,
		.on_setback = on_setback,
		.on_outcome = on_outcome,
		.on_request = on_request,
		.on_file = on_file,
		.on_gone = on_gone,
		.context = generation,
	};
	generation->pool = mill_pool_start(&options);
	return generation;
}

static void on_pause_over(uv_timer_t *timer)
{
	struct mill_reload *reload = mill_container_of(timer, struct mill_reload, pause);
	if (reload->coming != NULL || reload->reason == NULL || !reload->serving->has_manifest)
		return;
	bool quiet = reload->cause == MILL_RELOAD_NECESSARY && reload->said != NULL;
	uint32_t number = reload->serving->number + 1;
	mill_log(quiet ? MILL_LOG_DEBUG : MILL_LOG_INFO, "reload_begun",
	         MILL_INT("generation", number), MILL_TEXT("reason", reload->reason));
	reload->begun_ns = mill_clock_ns();
	reload->coming = start_generation(reload, number, NULL);
}

static void schedule(struct mill_reload *reload, uint64_t least_ms)
{
	uint64_t since_ms = (mill_clock_ns() - reload->begun_ns) / 1000000;
	uint64_t wait_ms = since_ms < GAP_MS ? GAP_MS - since_ms : 0;
	uv_timer_start(&reload->pause, on_pause_over, wait_ms > least_ms ? wait_ms : least_ms, 0);
}

void mill_reload_ask(struct mill_reload *reload, enum mill_reload_cause cause, const char *reason)
{
	if (reload->stopped)
		return;
	bool busy = reload->coming != NULL;
	/* What is under way reads the same disk. */
	if (busy && cause == MILL_RELOAD_NECESSARY)
		return;
	char **wanted = busy ? &reload->next_reason : &reload->reason;
	enum mill_reload_cause *wanted_cause = busy ? &reload->next_cause : &reload->cause;
	if (*wanted == NULL || cause < *wanted_cause) {
		free(*wanted);
		*wanted = mill_strdup(reason);
		*wanted_cause = cause;
	}
	if (!busy && !uv_is_active((uv_handle_t *)&reload->pause))
		schedule(reload, 0);
}

bool mill_reload_declared(struct mill_reload *reload)
{
	if (reload->coming == NULL || !reload->complete)
		return false;
	let_go(reload, reload->serving);
	reload->serving = reload->coming;
	reload->coming = NULL;
	reload->complete = false;
	forget_news(reload);
	const struct generation *generation = reload->serving;
	watch_files(reload, &generation->manifest.settings);
	mill_log(MILL_LOG_INFO, "reloaded", MILL_INT("generation", generation->number),
	         MILL_TEXT("reason", reload->reason),
	         MILL_NUMBER("secs", (double)(mill_clock_ns() - reload->begun_ns) / 1e9),
	         MILL_INT("lanes", generation->manifest.lane_count),
	         MILL_INT("executors", mill_pool_ready_count(generation->pool)));
	conclude(reload);
	return true;
}

void mill_reload_refused(struct mill_reload *reload, const struct mill_err *err)
{
	if (reload->coming != NULL && reload->complete)
		fail(reload, MILL_SPAN(err->message));
}

/* ---- looking ------------------------------------------------------------------------------- */

uint32_t mill_reload_generation(const struct mill_reload *reload)
{
	return reload->serving->number;
}

struct mill_pool *mill_reload_pool(const struct mill_reload *reload)
{
	return reload->serving->pool;
}

const struct mill_manifest *mill_reload_manifest(const struct mill_reload *reload)
{
	return reload->serving->has_manifest ? &reload->serving->manifest : NULL;
}

static size_t capacity(const struct generation *generation)
{
	return mill_pool_count(generation->pool) * mill_pool_concurrency(generation->pool);
}

/* One that is stuck does not keep its successor from working; many that are do. */
size_t mill_reload_most(const struct mill_reload *reload)
{
	size_t own = capacity(reload->serving), largest = own;
	for (const struct generation *old = reload->old; old != NULL; old = old->next)
		if (capacity(old) > largest)
			largest = capacity(old);
	return own + largest;
}

bool mill_reload_is_empty(const struct mill_reload *reload)
{
	for (const struct generation *old = reload->old; old != NULL; old = old->next)
		if (!mill_pool_is_empty(old->pool))
			return false;
	return reload->coming == NULL && mill_pool_is_empty(reload->serving->pool);
}

/* ---- life ---------------------------------------------------------------------------------- */

struct mill_reload *mill_reload_start(const struct mill_reload_options *options)
{
	struct mill_reload *reload = mill_calloc(1, sizeof(*reload));
	reload->options = *options;
	reload->options.config_path = mill_strdup(options->config_path);
	reload->options.database = options->database ? mill_strdup(options->database) : NULL;
	MILL_ASSERT(uv_timer_init(options->loop, &reload->pause) == 0);
	struct mill_watch_options watch_options = {
		.loop = options->loop,
		.on_change = on_change,
		.context = reload,
	};
	reload->watch = mill_watch_new(&watch_options);
	reload->serving = start_generation(reload, 1, &options->settings->settings);
	return reload;
}

static void check_closed(struct mill_reload *reload)
{
	if (--reload->closing > 0 || !reload->closed)
		return;
	void (*on_closed)(void *) = reload->on_closed;
	void *context = reload->closed_context;
	free((char *)reload->options.config_path);
	free((char *)reload->options.database);
	free(reload->reason);
	free(reload->next_reason);
	free(reload->said);
	free(reload);
	on_closed(context);
}

static void on_pool_closed(void *context)
{
	struct generation *generation = context;
	struct mill_reload *reload = generation->reload;
	if (generation->has_manifest)
		mill_manifest_free(&generation->manifest);
	free(generation);
	check_closed(reload);
}

static void close_generation(struct mill_reload *reload, struct generation *generation)
{
	reload->closing++;
	mill_pool_close(generation->pool, on_pool_closed, generation);
}

void mill_reload_flush(struct mill_reload *reload)
{
	mill_pool_flush(reload->serving->pool);
	if (reload->coming != NULL)
		mill_pool_flush(reload->coming->pool);
	struct generation **at = &reload->old;
	while (*at != NULL) {
		struct generation *old = *at;
		mill_pool_flush(old->pool);
		/* Once stopped, the lease may still look at what was to be declared. */
		if (!mill_pool_is_empty(old->pool) || reload->stopped) {
			at = &old->next;
			continue;
		}
		*at = old->next;
		close_generation(reload, old);
	}
}

void mill_reload_drain(struct mill_reload *reload)
{
	reload->stopped = true;
	uv_timer_stop(&reload->pause);
	if (reload->coming != NULL)
		give_up(reload);
	mill_pool_drain(reload->serving->pool);
}

void mill_reload_kill(struct mill_reload *reload)
{
	mill_pool_kill(reload->serving->pool);
	for (struct generation *old = reload->old; old != NULL; old = old->next)
		mill_pool_kill(old->pool);
}

static void on_watch_closed(void *context)
{
	check_closed(context);
}

static void on_pause_closed(uv_handle_t *handle)
{
	check_closed(mill_container_of(handle, struct mill_reload, pause));
}

void mill_reload_close(struct mill_reload *reload, void (*on_closed)(void *context), void *context)
{
	reload->on_closed = on_closed;
	reload->closed_context = context;
	reload->closed = true;
	reload->closing += 2;
	uv_close((uv_handle_t *)&reload->pause, on_pause_closed);
	mill_watch_close(reload->watch, on_watch_closed, reload);
	close_generation(reload, reload->serving);
	while (reload->old != NULL) {
		struct generation *old = reload->old;
		reload->old = old->next;
		close_generation(reload, old);
	}
}
