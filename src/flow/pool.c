/* The set of executor processes: see pool.h; one of them: process.h. */
#include "flow/pool.h"

#include <stdio.h>

#include "core/clock.h"
#include "core/log.h"
#include "flow/pool_state.h"

#define RESTART_MOST_MS 5000
#define YOUNG_SECS 1.0       /* dying sooner than this after READY counts as failing to start */
#define HOLD_NS 60000000000u /* no executor is recycled for so long after its successor failed */
#define SECOND_NS 1e9

/* ---- frames from an executor --------------------------------------------------------------- */

/* From the generation's own config. */
static void follow(struct mill_pool *pool, const struct mill_settings *settings)
{
	size_t cores = uv_available_parallelism();
	pool->count = settings->executors ? (size_t)settings->executors : cores;
	pool->concurrency = (size_t)settings->concurrency;
	pool->limits = (struct mill_process_limits){
		.stall_secs = settings->stall_secs,
		.kill_grace_secs = settings->kill_grace_secs,
		.max_memory_mb = (size_t)settings->max_memory_mb,
		.max_deliveries = (uint64_t)settings->max_deliveries,
	};
}

/* No successor can be had: what was to retire goes on, so that somebody serves. */
void mill_pool_keep_retiring(struct mill_pool *pool)
{
	mill_list_each(node, &pool->processes) mill_process_at(node)->retiring = false;
	pool->hold_until_ns = mill_clock_ns() + HOLD_NS;
}

void mill_pool_set_back(struct mill_pool *pool, enum mill_setback setback, struct mill_span text)
{
	if (pool->draining)
		return;
	mill_pool_keep_retiring(pool);
	pool->options.on_setback(pool, setback, text, pool->options.context);
}

/* A successor is there. */
static void retire_one(struct mill_pool *pool)
{
	mill_list_each(node, &pool->processes)
	{
		struct mill_process *process = mill_process_at(node);
		if (process->retiring && process->state == MILL_PROCESS_READY) {
			process->recycled = true;
			mill_process_drain(process);
			return;
		}
	}
}

static void become_ready(struct mill_process *process)
{
	struct mill_pool *pool = process->executor.pool;
	if (process->state != MILL_PROCESS_STARTING)
		return; /* the pool was drained meanwhile */
	process->state = MILL_PROCESS_READY;
	process->ready_ns = mill_clock_ns();
	if (!process->solo)
		retire_one(pool);
	pool->options.on_ready(&process->executor, pool->options.context);
	if (!pool->trial || mill_pool_ready_count(pool) < pool->count)
		return;
	pool->trial = false;
	pool->options.on_complete(pool, pool->options.context);
}

static int take_manifest(struct mill_process *process, struct mill_reader *body,
                         struct mill_err *err)
{
	struct mill_pool *pool = process->executor.pool;
	struct mill_manifest manifest;
	if (mill_manifest_read(body, &manifest, err) != 0)
		return -1;
	uint64_t digest = mill_manifest_digest(&manifest);
	bool first = !pool->loaded;
	if (first) {
		pool->loaded = true;
		pool->digest = digest;
		if (pool->options.on_manifest(pool, &manifest, pool->options.context)) {
			follow(pool, &manifest.settings);
			mill_pool_start_missing(pool);
		}
	}
	mill_manifest_free(&manifest);
	if (digest == pool->digest) {
		become_ready(process);
		return 0;
	}
	mill_process_kill(process, MILL_KILL_LOAD);
	mill_pool_set_back(pool, MILL_SETBACK_DIFFERS, MILL_SPAN_NONE);
	return 0;
}

static int take_load_error(struct mill_process *process, struct mill_reader *body,
                           struct mill_err *err)
{
	struct mill_span text;
	if (mill_load_error_read(body, &text, err) != 0)
		return -1;
	mill_process_kill(process, MILL_KILL_LOAD);
	mill_pool_set_back(process->executor.pool, MILL_SETBACK_LOAD, text);
	return 0;
}

static int on_frame(struct mill_process *process, struct mill_frame *frame, struct mill_err *err)
{
	const struct mill_pool_options *options = &process->executor.pool->options;
	struct mill_outcome outcome;
	struct mill_request request;
	struct mill_file file;
	switch (frame->type) {
	case MILL_FRAME_MANIFEST:
		return take_manifest(process, &frame->body, err);
	case MILL_FRAME_LOAD_ERROR:
		return take_load_error(process, &frame->body, err);
	case MILL_FRAME_OUTCOME:
		if (mill_outcome_read(&frame->body, &outcome, err) != 0)
			return -1;
		options->on_outcome(&process->executor, &outcome, options->context);
		return 0;
	case MILL_FRAME_REQUEST:
		if (mill_request_read(&frame->body, &request, err) != 0)
			return -1;
		options->on_request(&process->executor, &request, options->context);
		return 0;
	case MILL_FRAME_FILE:
		if (mill_file_read(&frame->body, &file, err) != 0)
			return -1;
		options->on_file(process->executor.pool, &file, options->context);
		return 0;
	case MILL_FRAME_BYE:
		return 0;
	default:
		return mill_err_set(err, MILL_ERR_PROTOCOL, "a frame of unknown type %d",
		                    frame->type);
	}
}

/* ---- starting and replacing ---------------------------------------------------------------- */

static void on_end(struct mill_process *process, int64_t status, int signal_number);

static struct mill_process *start_process(struct mill_pool *pool, bool solo)
{
	struct mill_load load = { .mode = MILL_LOAD_HANDLERS,
		                  .generation = pool->options.generation,
		                  .config_path = MILL_SPAN(pool->options.config_path),
		                  .database = pool->options.database
		                                      ? MILL_SPAN(pool->options.database)
		                                      : MILL_SPAN_NONE,
		                  .plain_table = pool->options.plain_table };
	struct mill_process_options options = {
		.pool = pool,
		.loop = pool->options.loop,
		.program = pool->options.program,
		.load = &load,
		.on_frame = on_frame,
		.on_end = on_end,
	};
	struct mill_process *process = mill_process_start(&options);
	if (process != NULL) {
		process->solo = solo;
		mill_list_push(&pool->processes, &process->node);
	}
	return process;
}

static void on_restart(uv_timer_t *timer);

/* As many as configured, not counting those that are about to go. */
void mill_pool_start_missing(struct mill_pool *pool)
{
	size_t count = 0;
	mill_list_each(node, &pool->processes)
	{
		const struct mill_process *process = mill_process_at(node);
		count += !process->solo && !process->retiring &&
		         process->state != MILL_PROCESS_DRAINING;
	}
	while (!pool->draining && count++ < pool->count) {
		if (start_process(pool, false) == NULL) {
			uv_timer_start(&pool->restart, on_restart, RESTART_MOST_MS / 5, 0);
			return;
		}
	}
}

static void on_restart(uv_timer_t *timer)
{
	mill_pool_start_missing(mill_container_of(timer, struct mill_pool, restart));
}

/*
 * Replace at once what a handler brought down, or what died after a useful life; wait longer each
 * time for what does not get that far.
 */
static void schedule_restart(struct mill_pool *pool, const struct mill_process *process,
                             const struct mill_executor_death *death)
{
	bool useful = process->ready_ns != 0 &&
	              (death->blamed != 0 ||
	               (double)(mill_clock_ns() - process->ready_ns) > YOUNG_SECS * SECOND_NS);
	pool->failures = useful || death->ordered ? 0 : pool->failures + 1;
	uint64_t wait_ms = 0;
	for (unsigned i = 1; i < pool->failures && wait_ms < RESTART_MOST_MS; i++)
		wait_ms = wait_ms ? wait_ms * 2 : 50;
	if (wait_ms > RESTART_MOST_MS)
		wait_ms = RESTART_MOST_MS;
	uv_timer_start(&pool->restart, on_restart, wait_ms, 0);
}

/* On trial, whatever ends an executor ends the trial. */
static void tell_end(struct mill_process *process, int64_t status, int signal_number)
{
	struct mill_pool *pool = process->executor.pool;
	char text[160], how[64];
	if (process->kill == MILL_KILL_MEMORY) {
		snprintf(text, sizeof(text),
		         "config and handlers need far more memory than max_memory_mb = %zu allows "
		         "while they are loaded",
		         pool->limits.max_memory_mb);
		mill_pool_set_back(pool, MILL_SETBACK_LOAD, MILL_SPAN(text));
		return;
	}
	if (signal_number != 0)
		snprintf(how, sizeof(how), "signal %d, SIG%s", signal_number,
		         sigabbrev_np(signal_number) ? sigabbrev_np(signal_number) : "?");
	else
		snprintf(how, sizeof(how), "exit code %lld", (long long)status);
	snprintf(text, sizeof(text), "an executor ended while it loaded config and handlers (%s)",
	         how);
	mill_pool_set_back(pool, MILL_SETBACK_ENDED, MILL_SPAN(text));
}

static void on_end(struct mill_process *process, int64_t status, int signal_number)
{
	struct mill_pool *pool = process->executor.pool;
	struct mill_executor_death death;
	mill_process_death(process, status, signal_number, &pool->limits, &death);
	bool told = death.ordered || process->kill == MILL_KILL_LOAD;
	bool on_trial = pool->trial && !told;
	/* Of one that drained, a successor runs already. */
	bool replace = !pool->draining && !pool->trial && process->state != MILL_PROCESS_DRAINING;
	process->state = MILL_PROCESS_DYING;
	mill_list_remove(&pool->processes, &process->node);
	bool explained = death.blamed || process->kill == MILL_KILL_MEMORY ||
	                 process->kill == MILL_KILL_FROZEN;
	if (!told && !on_trial)
		mill_log(MILL_LOG_ERROR, "executor_died", MILL_INT("pid", process->handle.pid),
		         MILL_TEXT("reason", explained ? death.reason : NULL),
		         signal_number != 0 ? MILL_INT("signal", signal_number)
		                            : MILL_INT("exit_code", status),
		         MILL_INT("deliveries", process->executor.sent.len));
	pool->options.on_gone(&process->executor, &death, pool->options.context);
	MILL_ASSERT(mill_list_empty(&process->executor.sent));
	if (replace)
		schedule_restart(pool, process, &death);
	else if (on_trial)
		tell_end(process, status, signal_number);
	mill_process_close(process);
}

/* ---- the interface ------------------------------------------------------------------------- */

struct mill_pool *mill_pool_start(const struct mill_pool_options *options)
{
	struct mill_pool *pool = mill_calloc(1, sizeof(*pool));
	pool->options = *options;
	pool->options.program = mill_strdup(options->program);
	pool->options.config_path = mill_strdup(options->config_path);
	pool->options.database = options->database ? mill_strdup(options->database) : NULL;
	pool->options.settings = NULL;
	pool->trial = options->settings == NULL;
	pool->count = 1;
	pool->limits.max_memory_mb = options->trial_memory_mb;
	if (!pool->trial)
		follow(pool, options->settings);
	mill_list_init(&pool->processes);
	MILL_ASSERT(uv_timer_init(options->loop, &pool->watch) == 0);
	MILL_ASSERT(uv_timer_init(options->loop, &pool->restart) == 0);
	pool->handles = 2;
	mill_pool_start_missing(pool);
	return pool;
}

struct mill_executor *mill_pool_next(struct mill_pool *pool, struct mill_executor *after)
{
	struct mill_link_node *node =
	        after ? mill_process_of(after)->node.next : pool->processes.head.next;
	for (; node != &pool->processes.head; node = node->next)
		if (mill_process_at(node)->state == MILL_PROCESS_READY &&
		    !mill_process_at(node)->solo)
			return &mill_process_at(node)->executor;
	return NULL;
}

struct mill_executor *mill_pool_solo(struct mill_pool *pool, bool wanted)
{
	struct mill_process *solo = NULL;
	mill_list_each(node, &pool->processes)
	{
		if (mill_process_at(node)->solo &&
		    mill_process_at(node)->state != MILL_PROCESS_DRAINING)
			solo = mill_process_at(node);
	}
	bool waiting = uv_is_active((uv_handle_t *)&pool->restart);
	if (solo == NULL && wanted && pool->loaded && !pool->draining && !waiting)
		start_process(pool, true);
	bool ready = solo != NULL && solo->state == MILL_PROCESS_READY;
	if (ready && !wanted && mill_list_empty(&solo->executor.sent)) {
		mill_process_drain(solo);
		ready = false;
	}
	return ready ? &solo->executor : NULL;
}

size_t mill_pool_ready_count(struct mill_pool *pool)
{
	size_t count = 0;
	for (struct mill_executor *e = mill_pool_next(pool, NULL); e; e = mill_pool_next(pool, e))
		count++;
	return count;
}

size_t mill_pool_count(const struct mill_pool *pool)
{
	return pool->count;
}

size_t mill_pool_concurrency(const struct mill_pool *pool)
{
	return pool->concurrency;
}

size_t mill_executor_room(const struct mill_executor *executor)
{
	const struct mill_process *process = (const struct mill_process *)executor;
	const struct mill_pool *pool = executor->pool;
	if (process->state != MILL_PROCESS_READY || process->retiring ||
	    executor->sent.len >= pool->concurrency)
		return 0;
	uint64_t room = pool->concurrency - executor->sent.len, most = pool->limits.max_deliveries;
	/* One that has no successor goes on. */
	if (most == 0 || mill_clock_ns() < pool->hold_until_ns)
		return room;
	uint64_t left = executor->delivered < most ? most - executor->delivered : 0;
	return left < room ? left : room;
}

size_t mill_pool_room(struct mill_pool *pool)
{
	size_t most = pool->count * pool->concurrency, held = 0, room = 0;
	mill_list_each(node, &pool->processes)
	{
		const struct mill_process *process = mill_process_at(node);
		if (process->solo)
			continue;
		if (process->state == MILL_PROCESS_READY || process->recycled)
			held += process->executor.sent.len;
		room += mill_executor_room(&process->executor);
	}
	size_t left = held < most ? most - held : 0;
	return room < left ? room : left;
}

uint64_t mill_executor_busy_ns(const struct mill_executor *executor)
{
	struct mill_on_processor on;
	if (!mill_process_page(mill_process_of(executor), &on))
		return 0;
	uint64_t now = mill_clock_ns();
	return now > on.since_ns ? now - on.since_ns : 0;
}

int mill_executor_pid(const struct mill_executor *executor)
{
	return mill_process_of(executor)->handle.pid;
}

struct mill_buffer *mill_executor_out(struct mill_executor *executor)
{
	return &mill_process_of(executor)->out;
}

void mill_pool_flush(struct mill_pool *pool)
{
	bool any = false;
	mill_list_each(node, &pool->processes)
	{
		mill_pool_check_deliveries(mill_process_at(node));
		any |= mill_process_at(node)->out.len > 0;
		mill_process_flush(mill_process_at(node));
	}
	if (any && !uv_is_active((uv_handle_t *)&pool->watch))
		uv_timer_start(&pool->watch, mill_pool_on_watch, MILL_POOL_WATCH_MS,
		               MILL_POOL_WATCH_MS);
}

void mill_pool_drain(struct mill_pool *pool)
{
	pool->draining = true;
	uv_timer_stop(&pool->restart);
	mill_list_each(node, &pool->processes)
	{
		struct mill_process *process = mill_process_at(node);
		if (process->state == MILL_PROCESS_STARTING)
			mill_process_kill(process, MILL_KILL_ORDERED);
		else if (process->state == MILL_PROCESS_READY)
			mill_process_drain(process);
	}
}

void mill_pool_kill(struct mill_pool *pool)
{
	mill_list_each(node, &pool->processes)
	{
		mill_process_kill(mill_process_at(node), MILL_KILL_ORDERED);
	}
}

bool mill_pool_is_empty(const struct mill_pool *pool)
{
	return mill_list_empty(&pool->processes);
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct mill_pool *pool = handle->data;
	if (--pool->handles > 0)
		return;
	void (*on_closed)(void *) = pool->on_closed;
	void *context = pool->closed_context;
	free((char *)pool->options.program);
	free((char *)pool->options.config_path);
	free((char *)pool->options.database);
	free(pool);
	on_closed(context);
}

void mill_pool_close(struct mill_pool *pool, void (*on_closed)(void *context), void *context)
{
	MILL_ASSERT(mill_pool_is_empty(pool));
	pool->on_closed = on_closed;
	pool->closed_context = context;
	pool->watch.data = pool->restart.data = pool;
	uv_close((uv_handle_t *)&pool->watch, on_timer_closed);
	uv_close((uv_handle_t *)&pool->restart, on_timer_closed);
}
