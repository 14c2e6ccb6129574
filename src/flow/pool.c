/*
 * The executor processes: see pool.h.
 *
 *     STARTING ──► READY ──► DRAINING ──► (exit) gone, freed
 *         └──────────┴───────────┴──► DYING (SIGKILL sent) ──► (exit) gone, freed
 *
 * An executor is over when waitpid has returned it, never before: until then its handlers may still
 * act. What it wrote before it died lies in the socket and is read first, so an outcome that was
 * sent counts.
 */
#include "flow/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/log.h"
#include "core/page.h"
#include "core/policy.h"

#define LOAD_LIMIT_SECS 60
#define WATCH_MS 100
#define RESTART_MOST_MS 5000
#define YOUNG_SECS 1.0 /* dying sooner than this after READY counts as failing to start */
#define MEMORY_CHECK_NS 500000000u
#define MEMORY_KILL_FACTOR 2 /* so many times the limit is far over: killed, not drained */
#define READ_CHUNK (256 * 1024)
#define SECOND_NS 1e9

enum process_state { STARTING, READY, DRAINING, DYING };

enum kill_reason {
	KILL_NONE,
	KILL_ORDERED,
	KILL_LIMIT,
	KILL_STALL,
	KILL_MEMORY,
	KILL_LOAD,
	KILL_PROTOCOL,
};

struct process {
	struct mill_executor executor; /* first: what the others hold a pointer to */
	struct mill_link_node node;    /* in pool->processes */
	enum process_state state;
	enum kill_reason kill_reason;
	uint64_t killed_ticket; /* LIMIT, STALL, MEMORY: whom the kill was meant for */
	bool solo;              /* for messages that run alone; not one of options.count */
	uv_process_t process;
	uv_pipe_t pipe;
	bool has_process; /* the handle was initialised */
	struct mill_page *page;
	struct mill_buffer in, out;
	uint64_t started_ns, ready_ns;
	int handles; /* open uv handles */
};

struct mill_pool {
	struct mill_pool_options options;
	struct mill_list processes;
	size_t ready_count;
	uint64_t memory_checked_ns;
	bool draining;
	bool loaded;       /* some executor got as far as a manifest */
	uint64_t digest;   /* of that manifest */
	unsigned failures; /* executors in a row that died young */
	uv_timer_t watch;
	uv_timer_t restart;
	int handles;
	void (*on_closed)(void *context);
	void *closed_context;
};

/* A write in flight: owns its bytes. */
struct pending_write {
	uv_write_t request;
	struct mill_buffer bytes;
};

static void start_process(struct mill_pool *pool, bool solo);
static void start_missing(struct mill_pool *pool);

static struct process *process_of(const struct mill_executor *executor)
{
	return (struct process *)executor;
}

static struct process *process_at(struct mill_link_node *node)
{
	return mill_container_of(node, struct process, node);
}

static void set_state(struct process *process, enum process_state state)
{
	struct mill_pool *pool = process->executor.pool;
	if (process->state == READY)
		pool->ready_count--;
	process->state = state;
	if (state == READY)
		pool->ready_count++;
}

static void kill_process(struct process *process, enum kill_reason reason)
{
	if (process->state == DYING)
		return;
	process->kill_reason = reason;
	set_state(process, DYING);
	if (process->has_process)
		uv_process_kill(&process->process, SIGKILL);
}

/* Let it finish what it has; it gets nothing more. */
static void drain_process(struct process *process)
{
	set_state(process, DRAINING);
	size_t at = mill_frame_begin(&process->out, MILL_FRAME_DRAIN);
	mill_frame_end(&process->out, at);
}

/* ---- frames from an executor --------------------------------------------------------------- */

static int take_manifest(struct process *process, struct mill_reader *body, struct mill_err *err)
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
		if (pool->options.on_manifest != NULL)
			pool->options.on_manifest(&manifest, pool->options.context);
	}
	mill_manifest_free(&manifest);
	if (!agrees)
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "the configuration on disk is no longer the one this program "
		                    "started with: restart it");
	if (process->state == STARTING) {
		set_state(process, READY);
		process->ready_ns = mill_clock_ns();
		pool->options.on_ready(&process->executor, pool->options.context);
	}
	return 0;
}

static int take_load_error(struct process *process, struct mill_reader *body, struct mill_err *err)
{
	struct mill_pool *pool = process->executor.pool;
	struct mill_span text;
	if (mill_load_error_read(body, &text, err) != 0)
		return -1;
	if (!pool->loaded) {
		pool->options.on_load_error(text, pool->options.context);
	} else {
		mill_log(MILL_LOG_ERROR, "load_failed", MILL_TEXT_N("error", text.data, text.len));
	}
	kill_process(process, KILL_LOAD);
	return 0;
}

static int take_frame(struct process *process, struct mill_frame *frame, struct mill_err *err)
{
	struct mill_pool *pool = process->executor.pool;
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
		pool->options.on_outcome(&process->executor, &outcome, pool->options.context);
		return 0;
	case MILL_FRAME_REQUEST:
		if (mill_request_read(&frame->body, &request, err) != 0)
			return -1;
		pool->options.on_request(&process->executor, &request, pool->options.context);
		return 0;
	case MILL_FRAME_BYE:
		return 0;
	default:
		return mill_err_set(err, MILL_ERR_PROTOCOL, "a frame of unknown type %d",
		                    frame->type);
	}
}

/* Parse all whole frames. An executor that sends what is none is no longer trusted: it dies. */
static void take_input(struct process *process)
{
	size_t used = 0;
	struct mill_err err = MILL_ERR_INIT;
	while (process->kill_reason != KILL_PROTOCOL) {
		struct mill_frame frame;
		int64_t size = mill_frame_parse(process->in.data + used, process->in.len - used,
		                                &frame, &err);
		if (size == 0)
			break;
		if (size < 0 || take_frame(process, &frame, &err) != 0) {
			mill_log(MILL_LOG_ERROR, "executor_refused",
			         MILL_INT("pid", process->process.pid),
			         MILL_TEXT("error", err.message));
			kill_process(process, KILL_PROTOCOL);
			process->kill_reason = KILL_PROTOCOL;
			break;
		}
		used += (size_t)size;
	}
	mill_buffer_consume(&process->in,
	                    process->kill_reason == KILL_PROTOCOL ? process->in.len : used);
}

static void on_allocate(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
	(void)suggested;
	struct process *process = handle->data;
	mill_buffer_reserve(&process->in, READ_CHUNK);
	*buffer = uv_buf_init(process->in.data + process->in.len, READ_CHUNK);
}

static void on_read(uv_stream_t *stream, ssize_t count, const uv_buf_t *buffer)
{
	(void)buffer;
	struct process *process = stream->data;
	if (count > 0) {
		process->in.len += (size_t)count;
		take_input(process);
	} else if (count < 0) {
		/* It closed its end: it is ending, or must. on_process_exit does the rest. */
		uv_read_stop(stream);
		if (process->state != DRAINING)
			kill_process(process, KILL_NONE);
	}
}

/* ---- the end of an executor ---------------------------------------------------------------- */

static const char *signal_name(int number)
{
	const char *name = sigabbrev_np(number);
	return name ? name : "?";
}

static void describe_death(const struct process *process, int64_t status, int signal_number,
                           struct mill_executor_death *death)
{
	double grace = process->executor.pool->options.kill_grace_secs;
	double stall = process->executor.pool->options.stall_secs;
	switch (process->kill_reason) {
	case KILL_LIMIT:
		snprintf(death->reason, sizeof(death->reason),
		         "handler exceeded its time limit and held the processor for %g s more: "
		         "its executor was killed",
		         grace);
		break;
	case KILL_MEMORY:
		snprintf(death->reason, sizeof(death->reason),
		         "handler used far more memory than max_memory_mb = %zu allows: its "
		         "executor was killed",
		         process->executor.pool->options.max_memory_mb);
		break;
	case KILL_STALL:
		snprintf(death->reason, sizeof(death->reason),
		         "handler held the processor for more than %g s without a break "
		         "(stall_secs): "
		         "its executor was killed",
		         stall);
		break;
	default:
		if (signal_number != 0)
			snprintf(death->reason, sizeof(death->reason),
			         "handler crashed its executor (signal %d, SIG%s)", signal_number,
			         signal_name(signal_number));
		else
			snprintf(death->reason, sizeof(death->reason),
			         "handler ended its executor (exit code %lld)", (long long)status);
		break;
	}
}

/*
 * Whom to blame: the delivery on the processor. A kill was meant for one delivery; the page may by
 * then name its successor, which got there in the moment between and is innocent.
 */
static uint64_t blamed_ticket(const struct process *process)
{
	if (process->killed_ticket != 0)
		return process->killed_ticket;
	return atomic_load(&process->page->ticket);
}

static void read_last_words(struct process *process)
{
	uv_os_fd_t fd;
	if (uv_fileno((uv_handle_t *)&process->pipe, &fd) != 0)
		return;
	uv_read_stop((uv_stream_t *)&process->pipe);
	for (;;) {
		mill_buffer_reserve(&process->in, READ_CHUNK);
		ssize_t got =
		        recv(fd, process->in.data + process->in.len, READ_CHUNK, MSG_DONTWAIT);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return;
		process->in.len += (size_t)got;
		take_input(process);
	}
}

static void on_process_closed(uv_handle_t *handle)
{
	struct process *process = handle->data;
	if (--process->handles > 0)
		return;
	munmap(process->page, sizeof(*process->page));
	mill_buffer_free(&process->in);
	mill_buffer_free(&process->out);
	free(process);
}

static void close_process(struct process *process)
{
	uv_close((uv_handle_t *)&process->process, on_process_closed);
	uv_close((uv_handle_t *)&process->pipe, on_process_closed);
}

static void on_restart(uv_timer_t *timer)
{
	struct mill_pool *pool = mill_container_of(timer, struct mill_pool, restart);
	start_missing(pool);
}

/* Replace at once what died after a useful life; wait longer each time for what dies young. */
static void schedule_restart(struct mill_pool *pool, const struct process *process)
{
	if (pool->draining)
		return;
	bool lived = process->ready_ns != 0 &&
	             (double)(mill_clock_ns() - process->ready_ns) > YOUNG_SECS * SECOND_NS;
	pool->failures = lived ? 0 : pool->failures + 1;
	uint64_t wait_ms = 0;
	for (unsigned i = 1; i < pool->failures && wait_ms < RESTART_MOST_MS; i++)
		wait_ms = wait_ms ? wait_ms * 2 : 50;
	if (wait_ms > RESTART_MOST_MS)
		wait_ms = RESTART_MOST_MS;
	uv_timer_start(&pool->restart, on_restart, wait_ms, 0);
}

static void bury(struct process *process, int64_t status, int signal_number)
{
	struct mill_pool *pool = process->executor.pool;
	struct mill_executor_death death = { 0 };
	bool orderly_exit = process->state == DRAINING && status == 0 && signal_number == 0;
	death.ordered = orderly_exit || process->kill_reason == KILL_ORDERED;
	if (!death.ordered)
		death.blamed = blamed_ticket(process);
	describe_death(process, status, signal_number, &death);
	bool replaced = process->state == DRAINING; /* its successor runs already */
	set_state(process, DYING);
	mill_list_remove(&pool->processes, &process->node);
	if (!death.ordered && process->kill_reason != KILL_LOAD)
		mill_log(MILL_LOG_ERROR, "executor_died", MILL_INT("pid", process->process.pid),
		         MILL_TEXT("reason", death.blamed ? death.reason : NULL),
		         MILL_INT("exit_code", status), MILL_INT("signal", signal_number),
		         MILL_INT("deliveries", process->executor.sent.len));
	pool->options.on_gone(&process->executor, &death, pool->options.context);
	MILL_ASSERT(mill_list_empty(&process->executor.sent));
	if (!replaced && !process->solo)
		schedule_restart(pool, process);
	close_process(process);
}

static void on_process_exit(uv_process_t *handle, int64_t status, int signal_number)
{
	struct process *process = handle->data;
	read_last_words(process);
	bury(process, status, signal_number);
}

/* ---- starting ------------------------------------------------------------------------------ */

static int make_page(struct process *process)
{
	int fd = memfd_create("tidemill page", MFD_CLOEXEC);
	if (fd < 0)
		return -1;
	void *memory = MAP_FAILED;
	if (ftruncate(fd, sizeof(struct mill_page)) == 0)
		memory = mmap(NULL, sizeof(struct mill_page), PROT_READ | PROT_WRITE, MAP_SHARED,
		              fd, 0);
	if (memory == MAP_FAILED) {
		close(fd);
		return -1;
	}
	process->page = memory;
	return fd;
}

static int spawn(struct process *process, int socket_fd, int page_fd)
{
	struct mill_pool *pool = process->executor.pool;
	char parent[16];
	snprintf(parent, sizeof(parent), "%d", (int)getpid());
	char *args[] = { (char *)pool->options.program, (char *)"executor", parent, NULL };
	uv_stdio_container_t stdio[] = {
		{ .flags = UV_IGNORE },
		{ .flags = UV_INHERIT_FD, .data.fd = STDOUT_FILENO },
		{ .flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO },
		[MILL_EXECUTOR_SOCKET_FD] = { .flags = UV_INHERIT_FD, .data.fd = socket_fd },
		[MILL_EXECUTOR_PAGE_FD] = { .flags = UV_INHERIT_FD, .data.fd = page_fd },
	};
	uv_process_options_t options = {
		.file = pool->options.program,
		.args = args,
		.stdio = stdio,
		.stdio_count = MILL_COUNT(stdio),
		.exit_cb = on_process_exit,
	};
	return uv_spawn(pool->options.loop, &process->process, &options);
}

static void send_load(struct process *process)
{
	const struct mill_pool_options *options = &process->executor.pool->options;
	struct mill_load load = { .mode = MILL_LOAD_HANDLERS,
		                  .generation = options->generation,
		                  .config_path = MILL_SPAN(options->config_path) };
	mill_load_write(&process->out, &load);
}

static void start_process(struct mill_pool *pool, bool solo)
{
	struct process *process = mill_calloc(1, sizeof(*process));
	process->executor.pool = pool;
	process->solo = solo;
	mill_list_init(&process->executor.sent);
	process->started_ns = mill_clock_ns();
	int sockets[2] = { -1, -1 };
	int page_fd = make_page(process);
	int code = page_fd < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0
	                   ? -errno
	                   : 0;
	if (code == 0)
		code = spawn(process, sockets[1], page_fd);
	if (page_fd >= 0)
		close(page_fd);
	if (sockets[1] >= 0)
		close(sockets[1]);
	if (code != 0) {
		mill_log(MILL_LOG_ERROR, "executor_not_started",
		         MILL_TEXT("error", uv_strerror(code)));
		if (sockets[0] >= 0)
			close(sockets[0]);
		if (process->page != NULL)
			munmap(process->page, sizeof(*process->page));
		free(process);
		uv_timer_start(&pool->restart, on_restart, RESTART_MOST_MS / 5, 0);
		return;
	}
	process->has_process = true;
	MILL_ASSERT(uv_pipe_init(pool->options.loop, &process->pipe, 0) == 0);
	MILL_ASSERT(uv_pipe_open(&process->pipe, sockets[0]) == 0);
	process->process.data = process->pipe.data = process;
	process->handles = 2;
	mill_list_push(&pool->processes, &process->node);
	uv_read_start((uv_stream_t *)&process->pipe, on_allocate, on_read);
	send_load(process);
}

/* As many as configured, not counting those that only finish what they have. */
static void start_missing(struct mill_pool *pool)
{
	size_t count = 0;
	mill_list_each(node, &pool->processes) count +=
	        !process_at(node)->solo && process_at(node)->state != DRAINING;
	for (; !pool->draining && count < pool->options.count; count++) {
		size_t before = pool->processes.len;
		start_process(pool, false);
		if (pool->processes.len == before)
			return; /* it could not be started: the restart timer tries again */
	}
}

/* ---- watching ------------------------------------------------------------------------------ */

/* What is on the processor, read consistently; false when nothing is, or it just changed. */
static bool read_page(const struct mill_page *page, uint64_t *ticket, uint64_t *since,
                      uint64_t *deadline)
{
	*ticket = atomic_load(&page->ticket);
	*since = atomic_load(&page->since_ns);
	*deadline = atomic_load(&page->deadline_ns);
	return *ticket != 0 && *ticket == atomic_load(&page->ticket);
}

static void watch_process(struct process *process, uint64_t now)
{
	const struct mill_pool_options *options = &process->executor.pool->options;
	if (process->state == STARTING &&
	    (double)(now - process->started_ns) > LOAD_LIMIT_SECS * SECOND_NS) {
		mill_log(MILL_LOG_ERROR, "load_hangs", MILL_INT("pid", process->process.pid),
		         MILL_INT("secs", LOAD_LIMIT_SECS));
		kill_process(process, KILL_LOAD);
		return;
	}
	uint64_t ticket, since, deadline;
	if (process->state == DYING || !read_page(process->page, &ticket, &since, &deadline))
		return;
	double grace = options->kill_grace_secs * SECOND_NS;
	/* A limit that passed while another had the processor counts from when this one got it. */
	uint64_t late_from = deadline > since ? deadline : since;
	bool late = deadline != 0 && now > deadline && now > late_from &&
	            (double)(now - late_from) > grace;
	bool stalls =
	        now > since && (double)(now - since) > options->stall_secs * SECOND_NS + grace;
	if (!late && !stalls)
		return;
	process->killed_ticket = ticket;
	kill_process(process, late ? KILL_LIMIT : KILL_STALL);
}

/* Resident memory in megabytes, 0 when it cannot be read (it has just ended). */
static size_t resident_mb(int pid)
{
	char path[40];
	snprintf(path, sizeof(path), "/proc/%d/statm", pid);
	FILE *file = fopen(path, "re");
	unsigned long pages = 0;
	if (file != NULL) {
		if (fscanf(file, "%*u %lu", &pages) != 1)
			pages = 0;
		fclose(file);
	}
	return pages * (unsigned long)sysconf(_SC_PAGESIZE) / (1024 * 1024);
}

/* Over the limit an executor is drained and replaced; far over, its handler is not waited for. */
static void check_memory(struct process *process)
{
	struct mill_pool *pool = process->executor.pool;
	size_t limit = pool->options.max_memory_mb;
	size_t used = resident_mb(process->process.pid);
	if (limit == 0 || used <= limit || process->state == DYING)
		return;
	if (used > limit * MEMORY_KILL_FACTOR) {
		process->killed_ticket = atomic_load(&process->page->ticket);
		kill_process(process, KILL_MEMORY);
	} else if (process->state == READY) {
		mill_log(MILL_LOG_INFO, "executor_recycled", MILL_INT("pid", process->process.pid),
		         MILL_INT("memory_mb", used), MILL_INT("max_memory_mb", limit));
		drain_process(process);
		start_missing(pool);
	}
}

static void check_deliveries(struct process *process)
{
	struct mill_pool *pool = process->executor.pool;
	uint64_t limit = pool->options.max_deliveries;
	if (limit == 0 || process->executor.delivered < limit || process->state != READY)
		return;
	mill_log(MILL_LOG_INFO, "executor_recycled", MILL_INT("pid", process->process.pid),
	         MILL_INT("deliveries", process->executor.delivered));
	drain_process(process);
	start_missing(pool);
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
		struct process *process = process_at(node);
		watch_process(process, now);
		if (memory)
			check_memory(process);
		needed |= process->state == STARTING || !mill_list_empty(&process->executor.sent);
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
		if (process_at(node)->state == READY && !process_at(node)->solo)
			return &process_at(node)->executor;
	return NULL;
}

struct mill_executor *mill_pool_solo(struct mill_pool *pool, bool wanted)
{
	struct process *solo = NULL;
	mill_list_each(node, &pool->processes) if (process_at(node)->solo &&
	                                           process_at(node)->state != DRAINING) solo =
	        process_at(node);
	if (solo == NULL && wanted && !pool->draining && pool->loaded && pool->failures == 0)
		start_process(pool, true);
	else if (solo != NULL && !wanted && solo->state == READY &&
	         mill_list_empty(&solo->executor.sent))
		drain_process(solo);
	return solo != NULL && solo->state == READY ? &solo->executor : NULL;
}

size_t mill_pool_ready_count(const struct mill_pool *pool)
{
	return pool->ready_count;
}

size_t mill_executor_room(const struct mill_executor *executor)
{
	const struct process *process = process_of(executor);
	size_t most = executor->pool->options.concurrency;
	if (process->state != READY || executor->sent.len >= most)
		return 0;
	return most - executor->sent.len;
}

uint64_t mill_executor_busy_ns(const struct mill_executor *executor)
{
	uint64_t ticket, since, deadline;
	if (!read_page(process_of(executor)->page, &ticket, &since, &deadline))
		return 0;
	uint64_t now = mill_clock_ns();
	return now > since ? now - since : 0;
}

int mill_executor_pid(const struct mill_executor *executor)
{
	return process_of(executor)->process.pid;
}

struct mill_buffer *mill_executor_out(struct mill_executor *executor)
{
	return &process_of(executor)->out;
}

static void on_written(uv_write_t *request, int status)
{
	(void)status; /* a dead executor is noticed by its exit */
	struct pending_write *pending = mill_container_of(request, struct pending_write, request);
	mill_buffer_free(&pending->bytes);
	free(pending);
}

static void flush_process(struct process *process)
{
	if (process->out.len == 0)
		return;
	uv_buf_t buffer = uv_buf_init(process->out.data, (unsigned)process->out.len);
	int written = uv_try_write((uv_stream_t *)&process->pipe, &buffer, 1);
	if (written > 0)
		mill_buffer_consume(&process->out, (size_t)written);
	if (process->out.len == 0)
		return;
	struct pending_write *pending = mill_calloc(1, sizeof(*pending));
	pending->bytes = process->out;
	process->out = (struct mill_buffer){ 0 };
	buffer = uv_buf_init(pending->bytes.data, (unsigned)pending->bytes.len);
	if (uv_write(&pending->request, (uv_stream_t *)&process->pipe, &buffer, 1, on_written) != 0)
		on_written(&pending->request, 0);
}

void mill_pool_flush(struct mill_pool *pool)
{
	bool any = false;
	mill_list_each(node, &pool->processes)
	{
		check_deliveries(process_at(node));
		any |= process_at(node)->out.len > 0;
		flush_process(process_at(node));
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
		struct process *process = process_at(node);
		if (process->state == STARTING) {
			kill_process(process, KILL_ORDERED);
		} else if (process->state == READY) {
			drain_process(process);
		}
	}
}

void mill_pool_kill(struct mill_pool *pool)
{
	mill_list_each(node, &pool->processes) kill_process(process_at(node), KILL_ORDERED);
}

bool mill_pool_is_empty(const struct mill_pool *pool)
{
	return mill_list_empty(&pool->processes);
}

static void on_pool_closed(uv_handle_t *handle)
{
	struct mill_pool *pool = handle->data;
	if (--pool->handles > 0)
		return;
	void (*on_closed)(void *) = pool->on_closed;
	void *context = pool->closed_context;
	free((char *)pool->options.program);
	free((char *)pool->options.config_path);
	free(pool);
	if (on_closed != NULL)
		on_closed(context);
}

void mill_pool_close(struct mill_pool *pool, void (*on_closed)(void *context), void *context)
{
	MILL_ASSERT(mill_pool_is_empty(pool));
	pool->on_closed = on_closed;
	pool->closed_context = context;
	pool->watch.data = pool->restart.data = pool;
	uv_close((uv_handle_t *)&pool->watch, on_pool_closed);
	uv_close((uv_handle_t *)&pool->restart, on_pool_closed);
}
