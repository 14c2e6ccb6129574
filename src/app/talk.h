/*
 * A talk with one executor that lives for it alone: for commands, which have no loop and want an
 * answer. The runtime's own executors are in flow/.
 *
 * Blocking; runtime process and plain commands. Knows frames, not what they are about.
 */
#pragma once

#include <sys/types.h>

#include "core/frame.h"

struct mill_talk {
	pid_t pid;
	int fd;
	struct mill_buffer in;
	size_t taken; /* bytes of `in` that were handed out */
};

/*
 * Start an executor of `program`, which is this one. −1: there is nothing to end. What it prints
 * goes to stderr.
 */
int mill_talk_start(struct mill_talk *talk, const char *program, struct mill_err *err);

/* Send frames. An executor that is gone is no error here: receiving tells. */
int mill_talk_send(struct mill_talk *talk, const struct mill_buffer *out, struct mill_err *err);

enum mill_talk_event {
	MILL_TALK_FRAME,
	MILL_TALK_ENDED,  /* the executor closed its end, most likely by ending */
	MILL_TALK_LATE,   /* nothing until `end_ns` */
	MILL_TALK_FAILED, /* `err` says why; also when a signal that is held back arrives (EINTR) */
};

/*
 * Wait for the next frame until mill_clock_ns() is `end_ns`. It lies in the talk's memory until the
 * next call.
 */
enum mill_talk_event mill_talk_receive(struct mill_talk *talk, uint64_t end_ns,
                                       struct mill_frame *frame, struct mill_err *err);

/*
 * Hang up. An executor ends by itself then, unless it does not look: `expected` gives it a second,
 * otherwise it is killed at once. Returns the status of waitpid.
 */
int mill_talk_end(struct mill_talk *talk, bool expected);
