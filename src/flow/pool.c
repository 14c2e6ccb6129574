/* The set of executor processes: see pool.h; one of them: process.h. */
#include "flow/pool.h"

#include "core/clock.h"
#include "core/log.h"
#include "flow/process.h"

#define LOAD_LIMIT_SECS 60
#define WATCH_MS 100
#define RESTART_MOST_MS 5000
#define YOUNG_SECS 1.0 /* dying sooner than this after READY counts as failing to start */
#define MEMORY_CHECK_NS 500000000u
#define MEMORY_KILL_FACTOR 2 /* so many times the limit is far over: killed, not drained */
#define SECOND_NS 1e9

struct mill_pool {
	struct mill_pool_options options;
	struct mill_list processes;
	bool draining;
	bool loaded;       /* some executor got as far as a manifest */
	uint64_t digest;   /* of that manifest */
	unsigned failures; /* executors in a row that failed to start */
	uint64_t memory_checked_ns;
	uv_timer_t watch;
	uv_timer_t restart;
	int handles;
	void (*on_closed)(void *context);
	void *closed_context;
};

static struct mill_process *process_of(const struct mill_executor *executor)
{
	return (struct mill_process *)executor;
}

static struct mill_process *process_at(struct mill_link_node *node)
{
	return mill_container_of(node, struct mill_process, node);
}

/* ---- frames from an executor --------------------------------------------------------------- */

static int take_manifest(struct mill_process *process, struct mill_reader *body,
                         struct mill_err *err)
{
	struct mill_pool *pool = process->executor.pool;
	struct mill_manifest manifest;
	if (mill_manifest_read(body, &manifest, err) != 0)
		return -1;
	uint64_t digest = mill_manifest_digest(&manifest);
	bool first = !pool->loaded;
	bool agrees = first || digest == pool->digest;
	if (first) {
		pool->loaded = true;
		pool->digest = digest;
		pool->options.on_manifest(&manifest, pool->options.context);
	}
	mill_manifest_free(&manifest);
	if (!agrees)
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "the configuration on disk is no longer the one this program "
		                    "started with: restart it");
	if (process->state == MILL_PROCESS_STARTING) {
		process->state = MILL_PROCESS_READY;
		process->ready_ns = mill_clock_ns();
		pool->options.on_ready(&process->executor, pool->options.context);
	}
	return 0;
}

static int take_load_error(struct mill_process *process, struct mill_reader *body,
                           struct mill_err *err)
{
	struct mill_pool *pool = process->executor.pool;
	struct mill_span text;
	if (mill_load_error_read(body, &text, err) != 0)
		return -1;
	if (pool->loaded)
		mill_log(MILL_LOG_ERROR, "load_failed", MILL_TEXT_N("error", text.data, text.len));
	else
		pool->options.on_load_error(text, pool->options.context);
	mill_process_kill(process, MILL_KILL_LOAD);
	return 0;
}

static int on_frame(struct mill_process *process, struct mill_frame *frame, struct mill_err *err)
{
	const struct mill_pool_options *options = &process->executor.pool->options;
	struct mill_outcome outcome;
	struct mill_request request;
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
		                  .config_path = MILL_SPAN(pool->options.config_path) };
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

/* As many as configured, not counting those that only finish what they have. */
static void start_missing(struct mill_pool *pool)
{
	size_t count = 0;
	mill_list_each(node, &pool->processes)
	{
		if (!process_at(node)->solo && process_at(node)->state != MILL_PROCESS_DRAINING)
			count++;
	}
	while (!pool->draining && count++ < pool->options.count) {
		if (start_process(pool, false) == NULL) {
			uv_timer_start(&pool->restart, on_restart, RESTART_MOST_MS / 5, 0);
			return;
		}
	}
}

static void on_restart(uv_timer_t *timer)
{
	start_missing(mill_container_of(timer, struct mill_pool, restart));
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

static void on_end(struct mill_process *process, int64_t status, int signal_number)
{
	struct mill_pool *pool = process->executor.pool;
	struct mill_executor_death death;
	mill_process_death(process, status, signal_number, &pool->options, &death);
	/* Of one that drained, a successor runs already. */
	bool replace = !pool->draining && !process->solo && process->state != MILL_PROCESS_DRAINING;
	process->state = MILL_PROCESS_DYING;
	mill_list_remove(&pool->processes, &process->node);
	bool explained = death.blamed || process->kill == MILL_KILL_MEMORY ||
	                 process->kill == MILL_KILL_FROZEN;
	if (!death.ordered && process->kill != MILL_KILL_LOAD)
		mill_log(MILL_LOG_ERROR, "executor_died", MILL_INT("pid", process->handle.pid),
		         MILL_TEXT("reason", explained ? death.reason : NULL),
		         signal_number != 0 ? MILL_INT("signal", signal_number)
		                            : MILL_INT("exit_code", status),
		         MILL_INT("deliveries", process->executor.sent.len));
	pool->options.on_gone(&process->executor, &death, pool->options.context);
	MILL_ASSERT(mill_list_empty(&process->executor.sent));
	if (replace)
		schedule_restart(pool, process, &death);
	mill_process_close(process);
}

/* ---- watching ------------------------------------------------------------------------------ */

static void watch_load(struct mill_process *process, uint64_t now)
{
	/* One that was started a moment ago, by this very walk, is younger than `now`. */
	if (process->state != MILL_PROCESS_STARTING || now <= process->started_ns ||
	    (double)(now - process->started_ns) <= LOAD_LIMIT_SECS * SECOND_NS)
		return;
	mill_log(MILL_LOG_ERROR, "load_hangs", MILL_INT("pid", process->handle.pid),
	         MILL_INT("secs", LOAD_LIMIT_SECS));
	mill_process_kill(process, MILL_KILL_LOAD);
}

static void watch_processor(struct mill_process *process, uint64_t now)
{
	const struct mill_pool_options *options = &process->executor.pool->options;
	struct mill_on_processor on;
	if (process->state == MILL_PROCESS_DYING || !mill_process_page(process, &on))
		return;
	double grace = options->kill_grace_secs * SECOND_NS;
	/* A limit that passed while another had the processor counts from when this one got it. */
	uint64_t late_from = on.deadline_ns > on.since_ns ? on.deadline_ns : on.since_ns;
	bool late = on.deadline_ns != 0 && now > late_from && (double)(now - late_from) > grace;
	bool stalls = now > on.since_ns &&
	              (double)(now - on.since_ns) > options->stall_secs * SECOND_NS + grace;
	if (!late && !stalls)
		return;
	process->killed_ticket = on.ticket;
	mill_process_kill(process, late ? MILL_KILL_LIMIT : MILL_KILL_STALL);
}

static unsigned looks_in(double secs)
{
	return (unsigned)(secs * 1000 / WATCH_MS) + 1;
}

/*
 * The time limit of a handler that waits is its executor's to keep, and one that was stopped keeps
 * none. So an executor that has deliveries and shows no sign of life is asked for one, and killed
 * if it gives none. Counted in looks: while the whole machine stands still, nobody is silent.
 */
static void watch_reaction(struct mill_process *process)
{
	const struct mill_pool_options *options = &process->executor.pool->options;
	struct mill_on_processor on;
	uint64_t turns = mill_process_turns(process);
	bool expected =
	        process->state == MILL_PROCESS_READY || process->state == MILL_PROCESS_DRAINING;
	if (!expected || mill_list_empty(&process->executor.sent) || turns != process->turns_seen ||
	    mill_process_page(process, &on)) {
		process->turns_seen = turns;
		process->silent_looks = 0;
		return;
	}
	process->silent_looks++;
	unsigned patience = looks_in(options->stall_secs);
	if (process->silent_looks == patience)
		mill_process_ping(process);
	else if (process->silent_looks > 2 * patience + looks_in(options->kill_grace_secs))
		mill_process_kill(process, MILL_KILL_FROZEN);
}

/* Its successor takes what comes; it ends when what it has is done. */
static void recycle(struct mill_process *process)
{
	process->recycled = true;
	mill_process_drain(process);
	start_missing(process->executor.pool);
}

/* Over the limit an executor is drained and replaced; far over, its handler is not waited for. */
static void watch_memory(struct mill_process *process)
{
	struct mill_pool *pool = process->executor.pool;
	size_t limit = pool->options.max_memory_mb;
	size_t used = limit == 0 ? 0 : mill_process_memory_mb(process);
	if (used <= limit || process->state == MILL_PROCESS_DYING)
		return;
	if (used > limit * MEMORY_KILL_FACTOR) {
		struct mill_on_processor on;
		process->killed_ticket = mill_process_page(process, &on) ? on.ticket : 0;
		mill_process_kill(process, MILL_KILL_MEMORY);
	} else if (process->state == MILL_PROCESS_READY) {
		mill_log(MILL_LOG_INFO, "executor_recycled", MILL_INT("pid", process->handle.pid),
		         MILL_INT("memory_mb", used), MILL_INT("max_memory_mb", limit));
		recycle(process);
	}
}

static void check_deliveries(struct mill_process *process)
{
	struct mill_pool *pool = process->executor.pool;
	uint64_t limit = pool->options.max_deliveries;
	if (limit == 0 || process->executor.delivered < limit ||
	    process->state != MILL_PROCESS_READY)
		return;
	mill_log(MILL_LOG_INFO, "executor_recycled", MILL_INT("pid", process->handle.pid),
	         MILL_INT("deliveries", process->executor.delivered));
	recycle(process);
}

static void on_watch(uv_timer_t *timer)
{
	struct mill_pool *pool = mill_container_of(timer, struct mill_pool, watch);
	uint64_t now = mill_clock_ns();
	bool needed = false;
	bool memory = now - pool->memory_checked_ns > MEMORY_CHECK_NS;
	if (memory)
		pool->memory_checked_ns = now;
	mill_list_each(node, &pool->processes)
	{
		struct mill_process *process = process_at(node);
		watch_load(process, now);
		watch_processor(process, now);
		watch_reaction(process);
		if (memory)
			watch_memory(process);
		needed |= process->state == MILL_PROCESS_STARTING ||
		          !mill_list_empty(&process->executor.sent);
	}
	if (!needed)
		uv_timer_stop(timer); /* an idle pool wakes nobody; a flush starts it again */
}

/* ---- the interface ------------------------------------------------------------------------- */

struct mill_pool *mill_pool_start(const struct mill_pool_options *options)
{
	struct mill_pool *pool = mill_calloc(1, sizeof(*pool));
	pool->options = *options;
	pool->options.program = mill_strdup(options->program);
	pool->options.config_path = mill_strdup(options->config_path);
	mill_list_init(&pool->processes);
	MILL_ASSERT(uv_timer_init(options->loop, &pool->watch) == 0);
	MILL_ASSERT(uv_timer_init(options->loop, &pool->restart) == 0);
	pool->handles = 2;
	start_missing(pool);
	return pool;
}

struct mill_executor *mill_pool_next(struct mill_pool *pool, struct mill_executor *after)
{
	struct mill_link_node *node =
	        after ? process_of(after)->node.next : pool->processes.head.next;
	for (; node != &pool->processes.head; node = node->next)
		if (process_at(node)->state == MILL_PROCESS_READY && !process_at(node)->solo)
			return &process_at(node)->executor;
	return NULL;
}

struct mill_executor *mill_pool_solo(struct mill_pool *pool, bool wanted)
{
	struct mill_process *solo = NULL;
	mill_list_each(node, &pool->processes)
	{
		if (process_at(node)->solo && process_at(node)->state != MILL_PROCESS_DRAINING)
			solo = process_at(node);
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

size_t mill_executor_room(const struct mill_executor *executor)
{
	const struct mill_pool_options *options = &executor->pool->options;
	if (process_of(executor)->state != MILL_PROCESS_READY ||
	    executor->sent.len >= options->concurrency)
		return 0;
	uint64_t room = options->concurrency - executor->sent.len;
	uint64_t left = options->max_deliveries - executor->delivered;
	return options->max_deliveries != 0 && left < room ? left : room;
}

size_t mill_pool_room(struct mill_pool *pool)
{
	size_t most = pool->options.count * pool->options.concurrency, held = 0, room = 0;
	mill_list_each(node, &pool->processes)
	{
		const struct mill_process *process = process_at(node);
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
	if (!mill_process_page(process_of(executor), &on))
		return 0;
	uint64_t now = mill_clock_ns();
	return now > on.since_ns ? now - on.since_ns : 0;
}

int mill_executor_pid(const struct mill_executor *executor)
{
	return process_of(executor)->handle.pid;
}

struct mill_buffer *mill_executor_out(struct mill_executor *executor)
{
	return &process_of(executor)->out;
}

void mill_pool_flush(struct mill_pool *pool)
{
	bool any = false;
	mill_list_each(node, &pool->processes)
	{
		check_deliveries(process_at(node));
		any |= process_at(node)->out.len > 0;
		mill_process_flush(process_at(node));
	}
	if (any && !uv_is_active((uv_handle_t *)&pool->watch))
		uv_timer_start(&pool->watch, on_watch, WATCH_MS, WATCH_MS);
}

void mill_pool_drain(struct mill_pool *pool)
{
	pool->draining = true;
	uv_timer_stop(&pool->restart);
	mill_list_each(node, &pool->processes)
	{
		struct mill_process *process = process_at(node);
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
		mill_process_kill(process_at(node), MILL_KILL_ORDERED);
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
