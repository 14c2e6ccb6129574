/* Notifications and the probe: see listener.h. */
#include "flow/listener.h"

#include <stdio.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/log.h"
#include "core/uuid.h"

#define PROBE_EVERY_MS 15000
#define PROBE_PATIENCE_MS 5000

struct mill_listener {
	struct mill_listener_options options;
	uv_timer_t timer;
	char token[40]; /* tells our probes from those of other workers */
	uint64_t sent, received;
	uint64_t reconnects; /* of the listen link, when the last was sent */
	bool in_flight;
	void (*on_closed)(void *context);
	void *closed_context;
};

static void on_time_to_probe(uv_timer_t *timer);

static void on_probe_sent(struct mill_results *results, const struct mill_err *err, void *context)
{
	(void)results;
	struct mill_listener *listener = context;
	listener->in_flight = false;
	if (err != NULL)
		listener->received = listener->sent; /* it was never sent: proves nothing */
}

static void on_patience_over(uv_timer_t *timer)
{
	struct mill_listener *listener = mill_container_of(timer, struct mill_listener, timer);
	struct mill_link *listen = listener->options.listen;
	bool heard = listener->received >= listener->sent || listener->in_flight;
	/* One that was made anew meanwhile missed it without being at fault. */
	bool same = mill_link_reconnects(listen) == listener->reconnects;
	if (!heard && same && mill_link_is_up(listen)) {
		struct mill_err err;
		mill_err_set(&err, MILL_ERR_UNREACHED, "a notification of our own did not arrive");
		mill_link_reset(listen, &err);
	}
	uv_timer_start(timer, on_time_to_probe, PROBE_EVERY_MS, 0);
}

static void on_time_to_probe(uv_timer_t *timer)
{
	struct mill_listener *listener = mill_container_of(timer, struct mill_listener, timer);
	if (!mill_link_is_up(listener->options.listen) ||
	    !mill_link_is_up(listener->options.lease) || listener->in_flight) {
		uv_timer_start(timer, on_time_to_probe, PROBE_EVERY_MS, 0);
		return;
	}
	char payload[80];
	listener->sent++;
	listener->reconnects = mill_link_reconnects(listener->options.listen);
	listener->in_flight = true;
	snprintf(payload, sizeof(payload), "probe %s %llu", listener->token,
	         (unsigned long long)listener->sent);
	mill_store_notify_control(listener->options.store, listener->options.lease,
	                          MILL_SPAN(payload), on_probe_sent, listener);
	uv_timer_start(timer, on_patience_over, PROBE_PATIENCE_MS, 0);
}

struct mill_listener *mill_listener_new(const struct mill_listener_options *options)
{
	struct mill_listener *listener = mill_calloc(1, sizeof(*listener));
	listener->options = *options;
	uint64_t random;
	mill_clock_random_bytes(&random, sizeof(random));
	snprintf(listener->token, sizeof(listener->token), "%016llx", (unsigned long long)random);
	MILL_ASSERT(uv_timer_init(options->loop, &listener->timer) == 0);
	uv_timer_start(&listener->timer, on_time_to_probe, PROBE_EVERY_MS, 0);
	return listener;
}

static void on_timer_closed(uv_handle_t *handle)
{
	struct mill_listener *listener = mill_container_of(handle, struct mill_listener, timer);
	void (*on_closed)(void *) = listener->on_closed;
	void *context = listener->closed_context;
	free(listener);
	on_closed(context);
}

void mill_listener_close(struct mill_listener *listener, void (*on_closed)(void *context),
                         void *context)
{
	listener->on_closed = on_closed;
	listener->closed_context = context;
	uv_close((uv_handle_t *)&listener->timer, on_timer_closed);
}

static void take_probe(struct mill_listener *listener, const char *text)
{
	size_t len = strlen(listener->token);
	if (strncmp(text, listener->token, len) != 0 || text[len] != ' ')
		return; /* another worker's */
	uint64_t number = strtoull(text + len + 1, NULL, 10);
	if (number <= listener->received || number > listener->sent)
		return;
	listener->received = number;
	/* The next one counts from here: a connection that dies now is not to be waited for longer.
	 */
	if (number == listener->sent)
		uv_timer_start(&listener->timer, on_time_to_probe, PROBE_EVERY_MS, 0);
}

/* Anybody may notify on these channels: what is not understood is passed over. */
static void take_control(struct mill_listener *listener, const char *payload)
{
	static const char probe[] = "probe ", cancel[] = "cancel ", reload[] = "reload ";
	uint8_t id[16];
	if (strncmp(payload, probe, sizeof(probe) - 1) == 0)
		take_probe(listener, payload + sizeof(probe) - 1);
	else if (strncmp(payload, cancel, sizeof(cancel) - 1) == 0 &&
	         mill_uuid_parse(payload + sizeof(cancel) - 1,
	                         strlen(payload) - (sizeof(cancel) - 1), id) == 0)
		listener->options.on_cancel(id, listener->options.context);
	else if (strncmp(payload, reload, sizeof(reload) - 1) == 0)
		listener->options.on_reload(payload + sizeof(reload) - 1,
		                            listener->options.context);
}

void mill_listener_take(struct mill_listener *listener, const char *channel, const char *payload)
{
	if (strcmp(channel, listener->options.queue_channel) == 0)
		listener->options.on_work(MILL_SPAN(payload), listener->options.context);
	else if (strcmp(channel, listener->options.control_channel) == 0)
		take_control(listener, payload);
}
