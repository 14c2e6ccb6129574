/*
 * Cancel what a connection's server is doing. The call blocks, so it runs on a thread.
 */
#pragma once

#include <libpq-fe.h>
#include <uv.h>

/*
 * Ask the server to give up the running statement of `connection`. The request lives on by itself:
 * the connection may be finished right after. Nobody is told whether it helped.
 */
void mill_cancel_running(uv_loop_t *loop, PGconn *connection);
/*
 * The same, and the connection is taken over, to be finished when the request has been made: a
 * pooler in between forwards it only while it still knows the connection.
 */
void mill_cancel_and_finish(uv_loop_t *loop, PGconn *connection);
