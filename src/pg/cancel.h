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
