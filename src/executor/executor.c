/*
 * The executor's process: its loop, its end of the socket, frames in and out. See executor.h.
 *
 * Frames are read in large pieces and handled where they lie. What goes out gathers in one buffer
 * that is written once a turn of the loop, so that under load many outcomes share one system call;
 * but an outcome does not wait behind a handler that may hold the processor for long.
 */
#include "executor/executor.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>
#include <uv.h>

#include "core/clock.h"
#include "core/killpoint.h"
#include "core/log.h"
#include "executor/op_sql.h"
#include "executor/task.h"

#define READ_SIZE (64 * 1024)
#define BUFFER_KEEP (1024 * 1024) /* a buffer that grew beyond is given back when it is empty */
#define OUTCOME_HOLD_NS 1000000   /* how long an outcome may wait for others to go with it */

struct executor {
	uv_loop_t loop;
	uv_pipe_t socket;
	uv_prepare_t turn;
	struct mill_page *page;
	struct mill_vm vm;
	struct mill_tasks tasks;
	struct mill_loaded loaded;
	bool load_seen, load_ok, draining, said_bye, stopped;
	int exit_code;

	struct mill_buffer in;
	struct mill_buffer out;     /* gathers */
	struct mill_buffer sending; /* libuv writes it */
	uv_write_t write;
	uint64_t out_since_ns; /* about when `out` got its first byte; 0: it is empty */
};

/* ---- the end ------------------------------------------------------------------------------ */

static void stop(struct executor *executor, int exit_code)
{
	if (executor->stopped)
		return;
	executor->stopped = true;
	executor->exit_code = exit_code;
	uv_stop(&executor->loop);
}

static void fail(struct executor *executor, const struct mill_err *err)
{
	mill_log(MILL_LOG_ERROR, "bad_frame", MILL_TEXT("error", err->message));
	stop(executor, 1);
}

/* ---- frames out --------------------------------------------------------------------------- */

static void release_if_large(struct mill_buffer *buffer)
{
	if (buffer->len == 0 && buffer->cap > BUFFER_KEEP)
		mill_buffer_free(buffer);
}

static void flush(struct executor *executor);

static void on_written(uv_write_t *write, int status)
{
	struct executor *executor = mill_container_of(write, struct executor, write);
	executor->sending.len = 0;
	release_if_large(&executor->sending);
	/* A runtime that reads no more is gone. */
	if (status != 0)
		return stop(executor, 0);
	flush(executor);
}

static void flush(struct executor *executor)
{
	if (executor->sending.len > 0 || executor->out.len == 0 || executor->stopped)
		return;
	uv_stream_t *stream = (uv_stream_t *)&executor->socket;
	uv_buf_t bytes = uv_buf_init(executor->out.data, (unsigned)executor->out.len);
	MILL_KILL_POINT("frames_begin");
	int written = uv_try_write(stream, &bytes, 1);
	if (written < 0 && written != UV_EAGAIN)
		return stop(executor, 0);
	MILL_KILL_POINT("frames_sent");
	executor->out_since_ns = 0;
	mill_buffer_consume(&executor->out, written > 0 ? (size_t)written : 0);
	release_if_large(&executor->out);
	if (executor->out.len == 0)
		return;
	struct mill_buffer rest = executor->out;
	executor->out = executor->sending;
	executor->sending = rest;
	bytes = uv_buf_init(executor->sending.data, (unsigned)executor->sending.len);
	if (uv_write(&executor->write, stream, &bytes, 1, on_written) != 0)
		stop(executor, 0);
}

/*
 * A handler gets the processor: what was finished before is not held up by it for long, and would
 * be lost with the process if it ended it.
 */
static void on_before_run(void *context, uint64_t now_ns, bool quick)
{
	struct executor *executor = context;
	if (executor->out.len == 0)
		return;
	if (executor->out_since_ns == 0)
		executor->out_since_ns = now_ns;
	if (!quick || now_ns - executor->out_since_ns > OUTCOME_HOLD_NS)
		flush(executor);
}

/* Once a turn, before the loop waits. */
static void on_turn(uv_prepare_t *turn)
{
	struct executor *executor = mill_container_of(turn, struct executor, turn);
	atomic_fetch_add_explicit(&executor->page->turns, 1, memory_order_relaxed);
	if (executor->draining && !executor->said_bye &&
	    mill_list_empty(&executor->tasks.running)) {
		mill_frame_end(&executor->out, mill_frame_begin(&executor->out, MILL_FRAME_BYE));
		executor->said_bye = true;
	}
	flush(executor);
	if (executor->said_bye && executor->out.len == 0 && executor->sending.len == 0)
		stop(executor, 0);
}

/* ---- frames in ---------------------------------------------------------------------------- */

/* Where the SQL of handlers goes. */
static void open_database(struct executor *executor, const struct mill_load *load)
{
	const struct mill_settings *settings = &executor->loaded.manifest.settings;
	struct mill_sql_options options = {
		.database = load->database,
		.settings = settings,
		.plain_table = load->plain_table,
	};
	if (settings->database != NULL && (load->database.data == NULL || load->database_yields))
		options.database = MILL_SPAN(settings->database);
	mill_sql_open(&executor->tasks.ops, &options);
}

static int on_load(struct executor *executor, struct mill_frame *frame, struct mill_err *err)
{
	struct mill_load load;
	if (mill_load_read(&frame->body, &load, err) != 0)
		return -1;
	if (executor->load_seen || load.config_path.data == NULL || load.mode > MILL_LOAD_HANDLERS)
		return mill_err_set(err, MILL_ERR_PROTOCOL, "a LOAD frame that makes no sense");
	executor->load_seen = true;
	struct mill_buffer problems = { 0 };
	if (mill_load_run(&executor->vm, &load, &executor->loaded, &problems) == 0) {
		executor->load_ok = true;
		open_database(executor, &load);
		executor->loaded.manifest.code = executor->tasks.code;
		mill_manifest_write(&executor->out, &executor->loaded.manifest);
	} else {
		mill_load_error_write(&executor->out,
		                      (struct mill_span){ problems.data, problems.len });
	}
	mill_buffer_free(&problems);
	atomic_store_explicit(&executor->page->heap_bytes, mill_vm_heap_bytes(&executor->vm),
	                      memory_order_relaxed);
	return 0;
}

static int on_deliver(struct executor *executor, struct mill_frame *frame, struct mill_err *err)
{
	struct mill_deliver deliver;
	if (mill_deliver_read(&frame->body, &deliver, err) != 0)
		return -1;
	if (!executor->load_ok || !executor->loaded.handlers ||
	    deliver.lane >= executor->loaded.manifest.lane_count || deliver.payload.data == NULL)
		return mill_err_set(err, MILL_ERR_PROTOCOL, "a DELIVER frame for no handler");
	if (!executor->draining) {
		mill_tasks_deliver(&executor->tasks, &deliver);
		return 0;
	}
	mill_outcome_write(&executor->out, &(struct mill_outcome){ .ticket = deliver.ticket,
	                                                           .kind = MILL_OUTCOME_RETURNED });
	return 0;
}

static int on_cancel(struct executor *executor, struct mill_frame *frame, struct mill_err *err)
{
	struct mill_cancel cancel;
	if (mill_cancel_read(&frame->body, &cancel, err) != 0)
		return -1;
	mill_tasks_cancel(&executor->tasks, &cancel);
	return 0;
}

static int on_reply(struct executor *executor, struct mill_frame *frame, struct mill_err *err)
{
	struct mill_reply reply;
	if (mill_reply_read(&frame->body, &reply, err) != 0)
		return -1;
	mill_ops_reply(&executor->tasks.ops, &reply);
	return 0;
}

static int on_drain(struct executor *executor, struct mill_frame *frame, struct mill_err *err)
{
	if (!mill_reader_finished(&frame->body))
		return mill_err_set(err, MILL_ERR_PROTOCOL, "a DRAIN frame with a body");
	executor->draining = true;
	return 0;
}

/* To have come this far is the answer: the loop has turned, and the page says so. */
static int on_ping(struct executor *executor, struct mill_frame *frame, struct mill_err *err)
{
	(void)executor;
	if (!mill_reader_finished(&frame->body))
		return mill_err_set(err, MILL_ERR_PROTOCOL, "a PING frame with a body");
	return 0;
}

static int (*const on_frame[])(struct executor *, struct mill_frame *, struct mill_err *) = {
	[MILL_FRAME_LOAD] = on_load,     [MILL_FRAME_DELIVER] = on_deliver,
	[MILL_FRAME_CANCEL] = on_cancel, [MILL_FRAME_REPLY] = on_reply,
	[MILL_FRAME_DRAIN] = on_drain,   [MILL_FRAME_PING] = on_ping,
};

/* Handle the whole frames in `in`; what is left of the last one stays there. */
static void handle_frames(struct executor *executor)
{
	size_t at = 0;
	struct mill_err err = MILL_ERR_INIT;
	while (!executor->stopped) {
		struct mill_frame frame;
		int64_t size = mill_frame_parse(executor->in.data + at, executor->in.len - at,
		                                &frame, &err);
		if (size == 0)
			break;
		bool known = size > 0 && frame.type < MILL_COUNT(on_frame) && on_frame[frame.type];
		if (size > 0 && !known)
			size = mill_err_set(&err, MILL_ERR_PROTOCOL, "a frame of type %d",
			                    frame.type);
		if (size < 0 || on_frame[frame.type](executor, &frame, &err) != 0)
			return fail(executor, &err);
		at += (size_t)size;
	}
	mill_buffer_consume(&executor->in, at);
	release_if_large(&executor->in);
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buffer)
{
	(void)suggested;
	struct executor *executor = mill_container_of(handle, struct executor, socket);
	mill_buffer_reserve(&executor->in, READ_SIZE);
	size_t room = executor->in.cap - executor->in.len;
	*buffer = uv_buf_init(executor->in.data + executor->in.len, (unsigned)room);
}

static void on_read(uv_stream_t *stream, ssize_t len, const uv_buf_t *buffer)
{
	(void)buffer;
	struct executor *executor = mill_container_of(stream, struct executor, socket);
	/* End of file, or a reset: the runtime is gone, and nobody is left to tell. */
	if (len < 0)
		return stop(executor, 0);
	executor->in.len += (size_t)len;
	if (len > 0)
		handle_frames(executor);
}

/* ---- the process -------------------------------------------------------------------------- */

static void on_ignored(int signal_number)
{
	(void)signal_number;
}

/*
 * A terminal's Ctrl-C and a service manager's SIGTERM reach the whole process group, but when an
 * executor ends is its runtime's decision. The signals are caught rather than ignored, because a
 * program that a handler starts would inherit an ignored one.
 */
static void prepare_process(int fd)
{
	struct sigaction action = { .sa_handler = on_ignored, .sa_flags = SA_RESTART };
	static const int signals[] = { SIGINT, SIGTERM, SIGHUP, SIGPIPE };
	sigemptyset(&action.sa_mask);
	for (size_t i = 0; i < MILL_COUNT(signals); i++)
		MILL_ASSERT(sigaction(signals[i], &action, NULL) == 0);
	/* Nor may such a program hold the socket open when this process is dead. */
	MILL_ASSERT(fcntl(fd, F_SETFD, FD_CLOEXEC) == 0);
	int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (null > STDIN_FILENO) {
		dup2(null, STDIN_FILENO);
		close(null);
	}
}

static int start(struct executor *executor, int fd, struct mill_err *err)
{
	int code = uv_pipe_open(&executor->socket, fd);
	if (code == 0)
		code = uv_read_start((uv_stream_t *)&executor->socket, on_alloc, on_read);
	if (code != 0)
		return mill_err_system(err, code, "cannot read from the runtime's socket");
	if (mill_vm_init(&executor->vm, err) != 0)
		return -1;
	struct mill_tasks_options options = {
		.loop = &executor->loop,
		.vm = &executor->vm,
		.loaded = &executor->loaded,
		.page = executor->page,
		.out = &executor->out,
		.before_run = on_before_run,
		.context = executor,
	};
	if (mill_tasks_init(&executor->tasks, &options, err) == 0)
		return 0;
	mill_vm_fini(&executor->vm);
	return -1;
}

int mill_executor_run(int fd, struct mill_page *page)
{
	struct executor *executor = mill_calloc(1, sizeof(*executor));
	struct mill_err err = MILL_ERR_INIT;
	executor->page = page;
	prepare_process(fd);
	MILL_ASSERT(uv_loop_init(&executor->loop) == 0);
	MILL_ASSERT(uv_pipe_init(&executor->loop, &executor->socket, 0) == 0);
	MILL_ASSERT(uv_prepare_init(&executor->loop, &executor->turn) == 0);
	MILL_ASSERT(uv_prepare_start(&executor->turn, on_turn) == 0);
	bool started = start(executor, fd, &err) == 0;
	if (started) {
		uv_run(&executor->loop, UV_RUN_DEFAULT);
		mill_tasks_close(&executor->tasks);
	} else {
		mill_log(MILL_LOG_ERROR, "executor_failed", MILL_TEXT("error", err.message));
		executor->exit_code = 1;
	}
	executor->stopped = true;
	uv_close((uv_handle_t *)&executor->socket, NULL);
	uv_close((uv_handle_t *)&executor->turn, NULL);
	uv_run(&executor->loop, UV_RUN_DEFAULT);
	MILL_ASSERT(uv_loop_close(&executor->loop) == 0);
	if (started) {
		mill_tasks_fini(&executor->tasks);
		if (executor->load_ok)
			mill_load_release(&executor->vm, &executor->loaded);
		mill_vm_fini(&executor->vm);
	}
	mill_buffer_free(&executor->in);
	mill_buffer_free(&executor->out);
	mill_buffer_free(&executor->sending);
	int exit_code = executor->exit_code;
	free(executor);
	return exit_code;
}
