/*
 * The poll handle of a libpq socket.
 *
 * libpq closes and reopens sockets while it connects, often under the same number, which a handle
 * that stays would not notice: so one is closed before each step of a connect, and another made
 * after it. Each lives on the heap, as closing takes a turn of the loop.
 */
#pragma once

#include <uv.h>

#include "core/base.h"

/* Zero-initialised: watches nothing. */
struct mill_watch {
	uv_poll_t *poll;
};

/*
 * Watch `fd` instead of whatever was watched; `on_event` gets a handle whose data is `context`. −1
 * when the loop cannot.
 */
int mill_watch_start(struct mill_watch *watch, uv_loop_t *loop, int fd, int events,
                     uv_poll_cb on_event, void *context);
/* Wait for other events, if anything is watched. */
void mill_watch_change(struct mill_watch *watch, int events, uv_poll_cb on_event);
/* No event comes any more. */
void mill_watch_stop(struct mill_watch *watch);
