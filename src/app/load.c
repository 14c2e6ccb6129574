/* Load a config.lua by an executor of its own: see load.h. */
#include "app/load.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "app/child.h"
#include "core/clock.h"
#include "core/log.h"
#include "core/page.h"

/* Once its socket is closed, an executor ends by itself; one that does not is killed. */
#define END_SECS 1.0

/* The program itself, also while its file is being replaced by a newer one. */
const char *mill_load_program(void)
{
	return "/proc/self/exe";
}

/* Start an executor with its end of a socket pair and its page. Returns our end; −1 on failure. */
static int start_executor(pid_t *pid, struct mill_err *err)
{
	int pair[2];
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
		return mill_err_system(err, errno, "cannot make a socket pair");
	int page = memfd_create("tidemill-page", MFD_CLOEXEC);
	if (page < 0 || ftruncate(page, sizeof(struct mill_page)) != 0) {
		mill_err_system(err, errno, "cannot make shared memory");
		goto failed;
	}
	char parent[24];
	snprintf(parent, sizeof(parent), "%d", (int)getpid());
	const char *argv[] = { "tidemill", "executor", parent, NULL };
	struct mill_child_options options = {
		.program = mill_load_program(),
		.argv = argv,
		/* What a config prints goes to stderr: stdout belongs to the command. */
		.fds = { -1, STDERR_FILENO, STDERR_FILENO, pair[1], page },
	};
	_Static_assert(MILL_EXECUTOR_SOCKET_FD == 3 && MILL_EXECUTOR_PAGE_FD == 4, "places in fds");
	*pid = mill_child_start(&options, err);
	if (*pid < 0)
		goto failed;
	close(page);
	close(pair[1]);
	return pair[0];

failed:
	if (page >= 0)
		close(page);
	close(pair[0]);
	close(pair[1]);
	return -1;
}

static int send_load(int fd, const char *path, enum mill_load_mode mode, struct mill_err *err)
{
	struct mill_buffer out = { 0 };
	mill_load_write(&out, &(struct mill_load){ .mode = mode, .config_path = MILL_SPAN(path) });
	int result = 0;
	for (size_t sent = 0; sent < out.len && result == 0;) {
		ssize_t n = send(fd, out.data + sent, out.len - sent, MSG_NOSIGNAL);
		if (n > 0)
			sent += (size_t)n;
		else if (errno == EPIPE || errno == ECONNRESET)
			break; /* it is gone: reading tells */
		else if (errno != EINTR)
			result = mill_err_system(err, errno, "cannot speak to an executor");
	}
	mill_buffer_free(&out);
	return result;
}

/* The text has a line for each problem. */
static int report_load_error(struct mill_reader *body, struct mill_buffer *problems,
                             struct mill_err *err)
{
	struct mill_span text;
	if (mill_load_error_read(body, &text, err) != 0)
		return -1;
	if (text.data == NULL)
		text = MILL_SPAN("it does not load, and does not say why");
	if (problems != NULL)
		mill_buffer_bytes(problems, text.data, text.len);
	const char *line_end = memchr(text.data, '\n', text.len);
	size_t len = line_end ? (size_t)(line_end - text.data) : text.len;
	return mill_err_set(err, MILL_ERR_CONFIG, "%.*s", (int)len, text.data);
}

enum answer { ANSWERED, ENDED, LATE, FAILED };

/* Wait for the answer, a MANIFEST or a LOAD_ERROR. FAILED: `err` is set. */
static enum answer await_answer(int fd, const char *path, double limit_secs,
                                struct mill_manifest *manifest, struct mill_buffer *problems,
                                struct mill_err *err)
{
	struct mill_buffer in = { 0 };
	uint64_t end = mill_clock_ns() + (uint64_t)(limit_secs * 1e9);
	enum answer answer = FAILED;
	while (true) {
		struct mill_frame frame;
		int64_t size = mill_frame_parse(in.data, in.len, &frame, err);
		if (size < 0)
			break;
		if (size > 0) {
			if (frame.type == MILL_FRAME_MANIFEST)
				answer = mill_manifest_read(&frame.body, manifest, err) == 0
				                 ? ANSWERED
				                 : FAILED;
			else if (frame.type == MILL_FRAME_LOAD_ERROR)
				report_load_error(&frame.body, problems, err);
			else
				mill_err_set(err, MILL_ERR_PROTOCOL, "%s: unexpected frame %d",
				             path, frame.type);
			break;
		}
		uint64_t now = mill_clock_ns();
		if (now >= end) {
			answer = LATE;
			break;
		}
		/* In slices, so that a signal held back is noticed. */
		struct pollfd ready = { .fd = fd, .events = POLLIN };
		int left_ms = (int)((end - now) / 1000000 + 1);
		int got = poll(&ready, 1, left_ms < 100 ? left_ms : 100);
		if (mill_signals_waiting()) {
			mill_err_system(err, EINTR, "%s", path);
			break;
		}
		if (got <= 0)
			continue;
		mill_buffer_reserve(&in, 65536);
		ssize_t n = read(fd, in.data + in.len, 65536);
		if (n > 0) {
			in.len += (size_t)n;
		} else if (n == 0 || errno == ECONNRESET) {
			answer = ENDED;
			break;
		}
	}
	mill_buffer_free(&in);
	return answer;
}

int mill_load_manifest_listing(const char *path, enum mill_load_mode mode, double limit_secs,
                               struct mill_manifest *manifest, struct mill_buffer *problems,
                               struct mill_err *err)
{
	/* Looked at here first: the system's own words, and no process for nothing. */
	if (access(path, R_OK) != 0)
		return mill_err_set(err, MILL_ERR_CONFIG, "cannot read %s: %s", path,
		                    strerror(errno));
	pid_t pid = -1;
	int fd = start_executor(&pid, err);
	if (fd < 0)
		return -1;
	enum answer answer = FAILED;
	if (send_load(fd, path, mode, err) == 0)
		answer = await_answer(fd, path, limit_secs, manifest, problems, err);
	close(fd);

	int status = 0;
	bool by_itself = answer == ANSWERED || answer == ENDED;
	if (!by_itself || mill_child_wait(pid, END_SECS, &status) != MILL_CHILD_ENDED)
		mill_child_kill(pid);
	switch (answer) {
	case ANSWERED:
		return 0;
	case ENDED:
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "%s ended its process while it was loaded: %s", path,
		                    mill_child_status_text(status));
	case LATE:
		return mill_err_set(
		        err, MILL_ERR_CONFIG,
		        "%s has not loaded within %g s and was stopped: it, or a handler it "
		        "names, waits or loops outside of a function",
		        path, limit_secs);
	case FAILED:
		break;
	}
	return -1;
}

int mill_load_manifest(const char *path, enum mill_load_mode mode, double limit_secs,
                       struct mill_manifest *manifest, struct mill_err *err)
{
	return mill_load_manifest_listing(path, mode, limit_secs, manifest, NULL, err);
}
