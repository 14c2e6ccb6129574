/*
 * Listener: what notifications mean, and whether they still arrive.
 *
 * A connection can die in silence: the socket stays open and nothing comes any more. So the
 * listener sends itself a probe through another connection from time to time, and makes its link
 * reconnect when the probe does not come back. Until then the poll finds what was missed. Runtime
 * process.
 */
#pragma once

#include "pg/store.h"

struct mill_listener;

struct mill_listener_options {
	uv_loop_t *loop;
	struct mill_store *store;
	struct mill_link *listen;                    /* listens on both channels */
	struct mill_link *lease;                     /* sends the probe */
	const char *queue_channel, *control_channel; /* stay with the caller */
	/* Something may be claimable in this topic. */
	void (*on_work)(struct mill_span topic, void *context);
	/* Workers of this app are asked to reload. */
	void (*on_reload)(const char *app, void *context);
	/* A person cancelled this message while it ran. */
	void (*on_cancel)(const uint8_t id[16], void *context);
	void *context;
};

struct mill_listener *mill_listener_new(const struct mill_listener_options *options);
/* Only after both links are closed. */
void mill_listener_close(struct mill_listener *listener, void (*on_closed)(void *context),
                         void *context);

/* What the listen link received. */
void mill_listener_take(struct mill_listener *listener, const char *channel, const char *payload);
