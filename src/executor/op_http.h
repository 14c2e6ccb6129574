/*
 * The op `http`: one request and its reply, for lua/tidemill/http.lua. See ops.h.
 *
 * Executor process only.
 */
#pragma once

#include "executor/ops.h"

/*
 * http(method, url, headers, body, ca_file, timeout_secs, connect_timeout_secs, max_bytes) →
 * { status, headers, body, redirect_url, secs }. The request's headers are lines ended by \n, the
 * reply's as they came; `redirect_url` is where its `location` leads, absolute, and `secs` how long
 * all took. body, ca_file and redirect_url may be nil.
 */
int mill_op_http_start(struct mill_wait *wait, lua_State *co, int first, struct mill_err *err);
void mill_op_http_cancel(struct mill_wait *wait);
int mill_op_http_result(struct mill_wait *wait, lua_State *L);
