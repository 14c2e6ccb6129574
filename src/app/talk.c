/* A talk with one executor: see talk.h. */
#include "app/talk.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "app/child.h"
#include "core/clock.h"
#include "core/page.h"

/* Once its socket is closed, an executor ends by itself; one that does not is killed. */
#define END_SECS 1.0
#define SLICE_MS 100 /* how often a signal that is held back is looked for */
#define READ_SIZE 65536

int mill_talk_start(struct mill_talk *talk, const char *program, struct mill_err *err)
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
		.program = program,
		.argv = argv,
		/* What a config or a handler prints goes to stderr: stdout belongs to the command.
		 */
		.fds = { -1, STDERR_FILENO, STDERR_FILENO, pair[1], page },
	};
	_Static_assert(MILL_EXECUTOR_SOCKET_FD == 3 && MILL_EXECUTOR_PAGE_FD == 4, "places in fds");
	pid_t pid = mill_child_start(&options, err);
	if (pid < 0)
		goto failed;
	close(page);
	close(pair[1]);
	*talk = (struct mill_talk){ .pid = pid, .fd = pair[0] };
	return 0;

failed:
	if (page >= 0)
		close(page);
	close(pair[0]);
	close(pair[1]);
	return -1;
}

int mill_talk_send(struct mill_talk *talk, const struct mill_buffer *out, struct mill_err *err)
{
	for (size_t sent = 0; sent < out->len;) {
		ssize_t n = send(talk->fd, out->data + sent, out->len - sent, MSG_NOSIGNAL);
		if (n > 0)
			sent += (size_t)n;
		else if (errno == EPIPE || errno == ECONNRESET)
			return 0;
		else if (errno != EINTR)
			return mill_err_system(err, errno, "cannot speak to an executor");
	}
	return 0;
}

enum mill_talk_event mill_talk_receive(struct mill_talk *talk, uint64_t end_ns,
                                       struct mill_frame *frame, struct mill_err *err)
{
	mill_buffer_consume(&talk->in, talk->taken);
	talk->taken = 0;
	while (true) {
		int64_t size = mill_frame_parse(talk->in.data, talk->in.len, frame, err);
		if (size < 0)
			return MILL_TALK_FAILED;
		if (size > 0 && frame->type == MILL_FRAME_FILE) {
			mill_buffer_consume(&talk->in, (size_t)size);
			continue;
		}
		if (size > 0) {
			talk->taken = (size_t)size;
			return MILL_TALK_FRAME;
		}
		uint64_t now = mill_clock_ns();
		if (now >= end_ns)
			return MILL_TALK_LATE;
		struct pollfd ready = { .fd = talk->fd, .events = POLLIN };
		uint64_t left_ms = (end_ns - now) / 1000000 + 1;
		int got = poll(&ready, 1, left_ms < SLICE_MS ? (int)left_ms : SLICE_MS);
		if (mill_signals_waiting()) {
			mill_err_system(err, EINTR, "stopped");
			return MILL_TALK_FAILED;
		}
		if (got <= 0)
			continue;
		mill_buffer_reserve(&talk->in, READ_SIZE);
		ssize_t n = read(talk->fd, talk->in.data + talk->in.len, READ_SIZE);
		if (n > 0)
			talk->in.len += (size_t)n;
		else if (n == 0 || errno == ECONNRESET)
			return MILL_TALK_ENDED;
	}
}

int mill_talk_end(struct mill_talk *talk, bool expected)
{
	int status = 0;
	close(talk->fd);
	mill_buffer_free(&talk->in);
	if (!expected || mill_child_wait(talk->pid, END_SECS, &status) != MILL_CHILD_ENDED)
		mill_child_kill(talk->pid);
	/* What a handler has started and not waited for. */
	kill(-talk->pid, SIGKILL);
	return status;
}
