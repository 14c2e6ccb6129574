/* One attempt to connect: see connect.h. */
#include "pg/connect.h"

#include "core/base.h"
#include "pg/address.h"
#include "pg/watch.h"

#define DEADLINE_MS 10000

struct mill_connect {
	uv_loop_t *loop;
	struct mill_address address;
	struct mill_resolve *resolve; /* while names are looked up */
	PGconn *connection;           /* then */
	struct mill_watch watch;
	uv_timer_t deadline;
	mill_connect_done done;
	void *context;
};

void mill_connect_describe(const PGconn *connection, struct mill_err *err)
{
	const char *text = connection ? PQerrorMessage(connection) : "";
	mill_err_set(err, MILL_ERR_UNREACHED, "%s", text[0] ? text : "the connection was lost");
}

static void on_deadline_closed(uv_handle_t *handle)
{
	free(mill_container_of(handle, struct mill_connect, deadline));
}

/* Close what is its own and free it, when the loop turns. */
static void end(struct mill_connect *connect)
{
	if (connect->resolve != NULL)
		mill_resolve_abandon(connect->resolve);
	mill_watch_stop(&connect->watch);
	mill_address_free(&connect->address);
	uv_close((uv_handle_t *)&connect->deadline, on_deadline_closed);
}

void mill_connect_abandon(struct mill_connect *connect)
{
	PQfinish(connect->connection);
	end(connect);
}

static void fail(struct mill_connect *connect, const struct mill_err *err)
{
	PQfinish(connect->connection);
	end(connect);
	connect->done(NULL, err, connect->context);
}

static void fail_as_described(struct mill_connect *connect)
{
	struct mill_err err;
	mill_connect_describe(connect->connection, &err);
	fail(connect, &err);
}

static void step(struct mill_connect *connect);

static void on_event(uv_poll_t *poll, int status, int events)
{
	(void)status; /* a refused connect shows as UV_EBADF here; libpq knows the reason */
	(void)events;
	step(poll->data);
}

/* Where the loop cannot watch, the deadline ends the attempt. */
static void wait_for(struct mill_connect *connect, int event)
{
	mill_watch_start(&connect->watch, connect->loop, PQsocket(connect->connection), event,
	                 on_event, connect);
}

static void step(struct mill_connect *connect)
{
	mill_watch_stop(&connect->watch);
	switch (PQconnectPoll(connect->connection)) {
	case PGRES_POLLING_READING:
		wait_for(connect, UV_READABLE);
		break;
	case PGRES_POLLING_WRITING:
		wait_for(connect, UV_WRITABLE);
		break;
	case PGRES_POLLING_OK:
		end(connect);
		connect->done(connect->connection, NULL, connect->context);
		break;
	default:
		fail_as_described(connect);
		break;
	}
}

static void on_deadline(uv_timer_t *timer)
{
	struct mill_err err;
	mill_err_set(&err, MILL_ERR_UNREACHED, "no connection within %d s", DEADLINE_MS / 1000);
	fail(mill_container_of(timer, struct mill_connect, deadline), &err);
}

static void on_resolved(const struct mill_err *err, void *context)
{
	struct mill_connect *connect = context;
	connect->resolve = NULL;
	if (err != NULL) {
		fail(connect, err);
		return;
	}
	connect->connection = PQconnectStartParams(connect->address.keywords,
	                                           (const char *const *)connect->address.values, 0);
	if (connect->connection == NULL || PQstatus(connect->connection) == CONNECTION_BAD)
		fail_as_described(connect);
	else
		wait_for(connect, UV_WRITABLE);
}

struct mill_connect *mill_connect_start(uv_loop_t *loop, const char *dsn, const char *application,
                                        mill_connect_done done, void *context, struct mill_err *err)
{
	struct mill_connect *connect = mill_calloc(1, sizeof(*connect));
	if (mill_address_parse(dsn, application, &connect->address, err) != 0) {
		mill_address_free(&connect->address);
		free(connect);
		return NULL;
	}
	connect->loop = loop;
	connect->done = done;
	connect->context = context;
	MILL_ASSERT(uv_timer_init(loop, &connect->deadline) == 0);
	uv_timer_start(&connect->deadline, on_deadline, DEADLINE_MS, 0);
	connect->resolve = mill_address_resolve(loop, &connect->address, on_resolved, connect);
	return connect;
}
