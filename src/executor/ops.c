/* What a handler can wait for: see ops.h. */
#include "executor/ops.h"

#include <lauxlib.h>
#include <math.h>

#include "executor/http_client.h"
#include "executor/json.h"
#include "executor/op_http.h"
#include "executor/op_sql.h"

/* The longest sleep. lua/tidemill/init.lua names the same limit in its message. */
#define SLEEP_MAX_SECS (366.0 * 86400)

/* A request's frame must stay below MILL_FRAME_MAX, its other fields included. */
#define REQUEST_MAX (MILL_FRAME_MAX / 2)

void mill_wait_finish(struct mill_wait *wait, bool failed, struct mill_span reply)
{
	wait->ended = wait->op;
	wait->op = NULL;
	wait->failed = failed;
	wait->reply = reply;
	wait->ops->wake(wait);
}

/* ---- sleep(secs) -------------------------------------------------------------------------- */

static void on_slept(uv_timer_t *timer)
{
	mill_wait_finish(mill_container_of(timer, struct mill_wait, timer), false, MILL_SPAN_NONE);
}

static int sleep_start(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err)
{
	double secs = lua_type(co, first) == LUA_TNUMBER ? lua_tonumber(co, first) : -1;
	if (!(secs >= 0 && secs <= SLEEP_MAX_SECS))
		return mill_err_set(err, MILL_ERR_INPUT, "sleep: expected seconds from 0 to %.0f",
		                    SLEEP_MAX_SECS);
	/* The loop's idea of now is as old as its last turn; a sleep must not end early. */
	uv_update_time(wait->ops->loop);
	MILL_ASSERT(uv_timer_start(&wait->timer, on_slept, (uint64_t)ceil(secs * 1000), 0) == 0);
	return 0;
}

static void sleep_cancel(struct mill_wait *wait)
{
	uv_timer_stop(&wait->timer);
}

static int sleep_result(struct mill_wait *wait, lua_State *L)
{
	(void)wait;
	lua_pushboolean(L, 1);
	return 1;
}

/* ---- publish(json, named) → table; `named`: the request says itself who publishes ----------- */

static int publish_start(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err)
{
	if (lua_type(co, first) != LUA_TSTRING)
		return mill_err_set(err, MILL_ERR_INPUT, "publish: expected a JSON text");
	struct mill_span body;
	body.data = lua_tolstring(co, first, &body.len);
	bool named = lua_toboolean(co, first + 1);
	if (body.len > REQUEST_MAX)
		return mill_err_set(err, MILL_ERR_INPUT,
		                    "publish: a message of %zu bytes is too large", body.len);
	/* 0 is no request, also after four thousand million of them. */
	if (++wait->ops->requests == 0)
		wait->ops->requests = 1;
	wait->request = (uint64_t)wait->ops->requests << 32 | wait->slot;
	mill_request_write(wait->ops->out,
	                   &(struct mill_request){
	                           .request = wait->request,
	                           .ticket = wait->ticket,
	                           .body = body,
	                           .published_by = named ? MILL_SPAN_NONE : wait->published_by,
	                   });
	return 0;
}

/* The runtime publishes all the same; its reply will find no wait. */
static void publish_cancel(struct mill_wait *wait)
{
	wait->request = 0;
}

static int publish_result(struct mill_wait *wait, lua_State *L)
{
	struct mill_err err = MILL_ERR_INIT;
	if (mill_json_decode(L, wait->reply.data ? wait->reply.data : "", wait->reply.len, &err) !=
	    0)
		return luaL_error(L, "publish: the reply cannot be read: %s", err.message);
	return 1;
}

void mill_ops_reply(struct mill_ops *ops, const struct mill_reply *reply)
{
	uint32_t slot = (uint32_t)reply->request;
	struct mill_wait *wait = slot < ops->slot_count ? ops->slots[slot] : NULL;
	if (wait == NULL || wait->request == 0 || wait->request != reply->request)
		return;
	wait->request = 0;
	mill_wait_finish(wait, !reply->ok, reply->body);
}

/* ---- the table ---------------------------------------------------------------------------- */

static const struct mill_op ops_table[] = {
	{ "sleep", sleep_start, sleep_cancel, sleep_result },
	{ "publish", publish_start, publish_cancel, publish_result },
	{ "http", mill_op_http_start, mill_op_http_cancel, mill_op_http_result },
};

const struct mill_op *mill_op_find(const char *name)
{
	for (size_t i = 0; i < MILL_COUNT(ops_table); i++)
		if (strcmp(ops_table[i].name, name) == 0)
			return &ops_table[i];
	for (size_t i = 0; mill_sql_ops[i].name != NULL; i++)
		if (strcmp(mill_sql_ops[i].name, name) == 0)
			return &mill_sql_ops[i];
	return NULL;
}

/* ---- waits -------------------------------------------------------------------------------- */

void mill_ops_init(struct mill_ops *ops, uv_loop_t *loop, struct mill_buffer *out,
                   void (*wake)(struct mill_wait *wait))
{
	*ops = (struct mill_ops){ .loop = loop, .out = out, .wake = wake };
}

void mill_ops_close(struct mill_ops *ops)
{
	if (ops->http != NULL)
		mill_http_client_close(ops->http);
	ops->http = NULL;
	mill_sql_close(ops);
}

void mill_ops_fini(struct mill_ops *ops)
{
	free(ops->slots);
	*ops = (struct mill_ops){ 0 };
}

void mill_wait_init(struct mill_wait *wait, struct mill_ops *ops)
{
	*wait = (struct mill_wait){ .ops = ops, .slot = ops->slot_count };
	ops->slots = mill_realloc(ops->slots, (ops->slot_count + 1) * sizeof(struct mill_wait *));
	ops->slots[ops->slot_count++] = wait;
	MILL_ASSERT(uv_timer_init(ops->loop, &wait->timer) == 0);
}

void mill_wait_close(struct mill_wait *wait)
{
	MILL_ASSERT(wait->op == NULL);
	wait->ops->slots[wait->slot] = NULL;
	mill_sql_use_free(wait);
	uv_close((uv_handle_t *)&wait->timer, NULL);
}

int mill_wait_start(struct mill_wait *wait, const struct mill_op *op, lua_State *co, int first,
                    struct mill_err *err)
{
	MILL_ASSERT(wait->op == NULL);
	if (op->start(wait, co, first, err) != 0)
		return -1;
	wait->op = op;
	return 0;
}

void mill_wait_cancel(struct mill_wait *wait)
{
	if (wait->op == NULL)
		return;
	wait->op->cancel(wait);
	wait->op = NULL;
}

void mill_wait_release(struct mill_wait *wait)
{
	MILL_ASSERT(wait->op == NULL);
	if (wait->sql != NULL)
		mill_sql_release(wait);
}
