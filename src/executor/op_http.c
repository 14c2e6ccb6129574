/* One HTTP request as a wait: see op_http.h. */
#include "executor/op_http.h"

#include <lauxlib.h>
#include <math.h>

#include "executor/http_client.h"

#define SECS_MAX (366.0 * 86400)
#define BYTES_MAX 1e12
#define OVERDUE_MS 500 /* after its time libcurl has not ended a transfer */

/* ---- arguments, which nobody has checked ---------------------------------------------------- */

/* A text on the coroutine's stack, where it stays until the wait is over; or absent. */
static struct mill_span text_at(lua_State *co, int index)
{
	struct mill_span span = MILL_SPAN_NONE;
	if (lua_type(co, index) == LUA_TSTRING)
		span.data = lua_tolstring(co, index, &span.len);
	return span;
}

static bool is_c_text(struct mill_span span)
{
	return span.data != NULL && strlen(span.data) == span.len;
}

static double number_at(lua_State *co, int index)
{
	return lua_type(co, index) == LUA_TNUMBER ? lua_tonumber(co, index) : -1;
}

static int read_request(lua_State *co, int first, struct mill_http_request *request,
                        struct mill_err *err)
{
	struct mill_span method = text_at(co, first), url = text_at(co, first + 1);
	struct mill_span ca_file = text_at(co, first + 4);
	double max_bytes = number_at(co, first + 7);
	*request = (struct mill_http_request){
		.method = method.data,
		.url = url.data,
		.headers = text_at(co, first + 2),
		.body = text_at(co, first + 3),
		.ca_file = ca_file.data,
		.timeout_secs = number_at(co, first + 5),
		.connect_timeout_secs = number_at(co, first + 6),
	};
	if (!is_c_text(method) || !is_c_text(url) || request->headers.data == NULL ||
	    (ca_file.data != NULL && !is_c_text(ca_file)) || !(request->timeout_secs > 0) ||
	    !(request->timeout_secs <= SECS_MAX) || !(request->connect_timeout_secs > 0) ||
	    !(request->connect_timeout_secs <= SECS_MAX) || !(max_bytes >= 0) ||
	    !(max_bytes <= BYTES_MAX))
		return mill_err_set(err, MILL_ERR_INPUT, "http: an argument is wrong");
	request->max_bytes = (size_t)max_bytes;
	return 0;
}

/* ---- the op ------------------------------------------------------------------------------------
 */

static void on_done(struct mill_transfer *transfer)
{
	struct mill_wait *wait = mill_transfer_context(transfer);
	const struct mill_http_reply *reply = mill_transfer_reply(transfer);
	uv_timer_stop(&wait->timer);
	mill_wait_finish(wait, reply->failed, reply->failure);
	/* By now the wait may be on another transfer. */
	if (wait->transfer == transfer)
		wait->transfer = NULL;
	mill_transfer_free(transfer);
}

static void on_overdue(uv_timer_t *timer)
{
	mill_transfer_expire(mill_container_of(timer, struct mill_wait, timer)->transfer);
}

int mill_op_http_start(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err)
{
	struct mill_ops *ops = wait->ops;
	struct mill_http_request request;
	if (read_request(co, first, &request, err) != 0)
		return -1;
	if (ops->http == NULL && (ops->http = mill_http_client_new(ops->loop, err)) == NULL)
		return mill_err_wrap(err, "http");
	struct mill_transfer *transfer = mill_http_start(ops->http, &request, on_done, wait, err);
	if (transfer == NULL)
		return -1;
	wait->transfer = transfer;
	uint64_t ms = (uint64_t)ceil(request.timeout_secs * 1000) + OVERDUE_MS;
	uv_update_time(ops->loop);
	MILL_ASSERT(uv_timer_start(&wait->timer, on_overdue, ms, 0) == 0);
	return 0;
}

void mill_op_http_cancel(struct mill_wait *wait)
{
	uv_timer_stop(&wait->timer);
	mill_transfer_free(wait->transfer);
	wait->transfer = NULL;
}

static void set_span(lua_State *L, const char *name, struct mill_span span)
{
	lua_pushlstring(L, span.data ? span.data : "", span.len);
	lua_setfield(L, -2, name);
}

int mill_op_http_result(struct mill_wait *wait, lua_State *L)
{
	const struct mill_http_reply *reply = mill_transfer_reply(wait->transfer);
	luaL_checkstack(L, 3, "a reply");
	lua_createtable(L, 0, 5);
	lua_pushinteger(L, reply->status);
	lua_setfield(L, -2, "status");
	set_span(L, "headers", reply->headers);
	set_span(L, "body", reply->body);
	if (reply->redirect_url.data != NULL)
		set_span(L, "redirect_url", reply->redirect_url);
	lua_pushnumber(L, reply->secs);
	lua_setfield(L, -2, "secs");
	return 1;
}
