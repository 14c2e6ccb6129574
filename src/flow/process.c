/* One executor process: see process.h. */
#include "flow/process.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/log.h"

#define READ_CHUNK (256 * 1024)

/* A write in flight: owns its bytes. */
struct pending_write {
	uv_write_t request;
	struct mill_buffer bytes;
};

/* ---- reading ------------------------------------------------------------------------------- */

/* Parse all whole frames. An executor that sends what is none is no longer trusted: it dies. */
static void take_input(struct mill_process *process)
{
	size_t used = 0;
	struct mill_err err = MILL_ERR_INIT;
	while (process->kill != MILL_KILL_PROTOCOL) {
		struct mill_frame frame;
		int64_t size = mill_frame_parse(process->in.data + used, process->in.len - used,
		                                &frame, &err);
		if (size == 0)
			break;
		if (size < 0 || process->on_frame(process, &frame, &err) != 0) {
			mill_log(MILL_LOG_ERROR, "executor_refused",
			         MILL_INT("pid", process->handle.pid),
			         MILL_TEXT("error", err.message));
			mill_process_kill(process, MILL_KILL_PROTOCOL);
			process->kill = MILL_KILL_PROTOCOL;
			used = process->in.len;
			break;
		}
		used += (size_t)size;
	}
	mill_buffer_consume(&process->in, used);
}

static void on_allocate(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
	(void)suggested;
	struct mill_process *process = handle->data;
	mill_buffer_reserve(&process->in, READ_CHUNK);
	*buffer = uv_buf_init(process->in.data + process->in.len, READ_CHUNK);
}

static void on_read(uv_stream_t *stream, ssize_t count, const uv_buf_t *buffer)
{
	(void)buffer;
	struct mill_process *process = stream->data;
	if (count > 0) {
		process->in.len += (size_t)count;
		take_input(process);
	} else if (count < 0) {
		/* It closed its end: it is ending, or must. on_process_exit does the rest. */
		uv_read_stop(stream);
		if (process->state != MILL_PROCESS_DRAINING)
			mill_process_kill(process, MILL_KILL_NONE);
	}
}

static void read_last_words(struct mill_process *process)
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

/* ---- writing ------------------------------------------------------------------------------- */

static void on_written(uv_write_t *request, int status)
{
	(void)status; /* a dead executor is noticed by its exit */
	struct pending_write *pending = mill_container_of(request, struct pending_write, request);
	mill_buffer_free(&pending->bytes);
	free(pending);
}

void mill_process_flush(struct mill_process *process)
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

/* ---- starting ------------------------------------------------------------------------------ */

static int make_page(struct mill_process *process)
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

static void on_process_exit(uv_process_t *handle, int64_t status, int signal_number)
{
	struct mill_process *process = handle->data;
	/* What its handlers started, and did not give a session of its own, ends with it. */
	kill(-handle->pid, SIGKILL);
	read_last_words(process);
	process->on_end(process, status, signal_number);
}

static int spawn(struct mill_process *process, const struct mill_process_options *options,
                 int socket_fd, int page_fd)
{
	char parent[16];
	snprintf(parent, sizeof(parent), "%d", (int)getpid());
	char *args[] = { (char *)options->program, (char *)"executor", parent, NULL };
	uv_stdio_container_t stdio[] = {
		{ .flags = UV_IGNORE },
		{ .flags = UV_INHERIT_FD, .data.fd = STDOUT_FILENO },
		{ .flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO },
		[MILL_EXECUTOR_SOCKET_FD] = { .flags = UV_INHERIT_FD, .data.fd = socket_fd },
		[MILL_EXECUTOR_PAGE_FD] = { .flags = UV_INHERIT_FD, .data.fd = page_fd },
	};
	uv_process_options_t process_options = {
		.file = options->program,
		.args = args,
		.stdio = stdio,
		.stdio_count = MILL_COUNT(stdio),
		.exit_cb = on_process_exit,
	};
	return uv_spawn(options->loop, &process->handle, &process_options);
}

static void on_handle_closed(uv_handle_t *handle)
{
	struct mill_process *process = handle->data;
	if (--process->handles > 0)
		return;
	if (process->page != NULL)
		munmap(process->page, sizeof(*process->page));
	mill_buffer_free(&process->in);
	mill_buffer_free(&process->out);
	free(process);
}

struct mill_process *mill_process_start(const struct mill_process_options *options)
{
	struct mill_process *process = mill_calloc(1, sizeof(*process));
	process->executor.pool = options->pool;
	process->on_frame = options->on_frame;
	process->on_end = options->on_end;
	process->started_ns = mill_clock_ns();
	mill_list_init(&process->executor.sent);
	/* The pipe comes first: uv_spawn leaves a handle to be closed even where it fails. */
	MILL_ASSERT(uv_pipe_init(options->loop, &process->pipe, 0) == 0);
	process->pipe.data = process->handle.data = process;
	process->handles = 1;
	int sockets[2] = { -1, -1 };
	int page_fd = make_page(process);
	int code = 0;
	if (page_fd < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
		code = -errno;
	} else {
		process->handles = 2;
		code = spawn(process, options, sockets[1], page_fd);
	}
	if (page_fd >= 0)
		close(page_fd);
	if (sockets[1] >= 0)
		close(sockets[1]);
	if (code != 0) {
		mill_log(MILL_LOG_ERROR, "executor_not_started",
		         MILL_TEXT("error", uv_strerror(code)));
		if (sockets[0] >= 0)
			close(sockets[0]);
		mill_process_close(process);
		return NULL;
	}
	MILL_ASSERT(uv_pipe_open(&process->pipe, sockets[0]) == 0);
	uv_read_start((uv_stream_t *)&process->pipe, on_allocate, on_read);
	mill_load_write(&process->out, options->load);
	return process;
}

void mill_process_close(struct mill_process *process)
{
	bool has_process = process->handles == 2;
	uv_close((uv_handle_t *)&process->pipe, on_handle_closed);
	if (has_process)
		uv_close((uv_handle_t *)&process->handle, on_handle_closed);
}

/* ---- ending -------------------------------------------------------------------------------- */

void mill_process_kill(struct mill_process *process, enum mill_kill kill)
{
	if (process->state == MILL_PROCESS_DYING)
		return;
	process->kill = kill;
	process->state = MILL_PROCESS_DYING;
	uv_process_kill(&process->handle, SIGKILL);
}

void mill_process_drain(struct mill_process *process)
{
	process->state = MILL_PROCESS_DRAINING;
	size_t at = mill_frame_begin(&process->out, MILL_FRAME_DRAIN);
	mill_frame_end(&process->out, at);
}

void mill_process_ping(struct mill_process *process)
{
	size_t at = mill_frame_begin(&process->out, MILL_FRAME_PING);
	mill_frame_end(&process->out, at);
}

static void describe_signal(int number, int64_t status, struct mill_executor_death *death)
{
	const char *name = sigabbrev_np(number);
	if (number != 0)
		snprintf(death->reason, sizeof(death->reason),
		         "handler crashed its executor (signal %d, SIG%s)", number,
		         name ? name : "?");
	else
		snprintf(death->reason, sizeof(death->reason),
		         "handler ended its executor (exit code %lld)", (long long)status);
}

void mill_process_death(const struct mill_process *process, int64_t status, int signal_number,
                        const struct mill_process_limits *limits, struct mill_executor_death *death)
{
	*death = (struct mill_executor_death){ 0 };
	bool orderly_exit =
	        process->state == MILL_PROCESS_DRAINING && status == 0 && signal_number == 0;
	death->ordered = orderly_exit || process->kill == MILL_KILL_ORDERED;
	/*
	 * The delivery on the processor is to blame. A kill was meant for one delivery; the page
	 * may by then name its successor, which got there in the moment between and is innocent.
	 */
	if (!death->ordered && process->kill != MILL_KILL_FROZEN)
		death->blamed = process->killed_ticket ? process->killed_ticket
		                                       : atomic_load(&process->page->ticket);
	switch (process->kill) {
	case MILL_KILL_LIMIT:
		snprintf(death->reason, sizeof(death->reason),
		         "handler exceeded its time limit and held the processor for %g s more: "
		         "its executor was killed",
		         limits->kill_grace_secs);
		break;
	case MILL_KILL_STALL:
		snprintf(death->reason, sizeof(death->reason),
		         "handler held the processor for more than %g s without a break "
		         "(stall_secs): its executor was killed",
		         limits->stall_secs);
		break;
	case MILL_KILL_MEMORY:
		snprintf(death->reason, sizeof(death->reason),
		         "handler used far more memory than max_memory_mb = %zu allows: its "
		         "executor was killed",
		         limits->max_memory_mb);
		break;
	case MILL_KILL_FROZEN:
		snprintf(
		        death->reason, sizeof(death->reason),
		        "its executor did not react for more than %g s (stall_secs): it was killed",
		        limits->stall_secs);
		break;
	default:
		describe_signal(signal_number, status, death);
		break;
	}
}

/* ---- looking at it ------------------------------------------------------------------------- */

bool mill_process_page(const struct mill_process *process, struct mill_on_processor *now)
{
	const struct mill_page *page = process->page;
	now->ticket = atomic_load(&page->ticket);
	now->since_ns = atomic_load(&page->since_ns);
	now->deadline_ns = atomic_load(&page->deadline_ns);
	return now->ticket != 0 && now->ticket == atomic_load(&page->ticket);
}

uint64_t mill_process_turns(const struct mill_process *process)
{
	return atomic_load(&process->page->turns);
}

bool mill_process_is_worn(const struct mill_process *process)
{
	return atomic_load(&process->page->worn) != 0;
}

size_t mill_process_memory_mb(const struct mill_process *process)
{
	char path[40];
	snprintf(path, sizeof(path), "/proc/%d/statm", process->handle.pid);
	FILE *file = fopen(path, "re");
	unsigned long pages = 0;
	if (file != NULL) {
		if (fscanf(file, "%*u %lu", &pages) != 1)
			pages = 0;
		fclose(file);
	}
	return pages * (unsigned long)sysconf(_SC_PAGESIZE) / (1024 * 1024);
}
