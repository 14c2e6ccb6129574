/* The poll handle of a libpq socket: see watch.h. */
#include "pg/watch.h"

static void on_closed(uv_handle_t *handle)
{
	free(handle);
}

void mill_watch_stop(struct mill_watch *watch)
{
	if (watch->poll != NULL)
		uv_close((uv_handle_t *)watch->poll, on_closed);
	watch->poll = NULL;
}

int mill_watch_start(struct mill_watch *watch, uv_loop_t *loop, int fd, int events,
                     uv_poll_cb on_event, void *context)
{
	mill_watch_stop(watch);
	uv_poll_t *poll = mill_calloc(1, sizeof(*poll));
	if (uv_poll_init(loop, poll, fd) != 0) {
		free(poll);
		return -1;
	}
	poll->data = context;
	watch->poll = poll;
	uv_poll_start(poll, events, on_event);
	return 0;
}

void mill_watch_change(struct mill_watch *watch, int events, uv_poll_cb on_event)
{
	if (watch->poll != NULL)
		uv_poll_start(watch->poll, events, on_event);
}
