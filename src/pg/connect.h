/*
 * One attempt to connect to Postgres without holding up the loop: names are resolved on a thread,
 * libpq takes its steps as the socket allows, and the whole has ten seconds.
 *
 * Runtime process. Knows nothing of what the connection is for.
 */
#pragma once

#include <libpq-fe.h>
#include <uv.h>

#include "core/err.h"

struct mill_connect;

/* A connection, which is the caller's from then on, or the reason why there is none. */
typedef void (*mill_connect_done)(PGconn *connection, const struct mill_err *err, void *context);

/*
 * Start an attempt. `dsn` NULL or "": PG* variables. NULL when it cannot be read. `done` comes
 * once, from the loop.
 */
struct mill_connect *mill_connect_start(uv_loop_t *loop, const char *dsn, const char *application,
                                        mill_connect_done done, void *context,
                                        struct mill_err *err);
/* Give it up: `done` does not come any more. Not after it has come. */
void mill_connect_abandon(struct mill_connect *connect);

/* What libpq says is wrong with a connection, as an error of its loss. */
void mill_connect_describe(const PGconn *connection, struct mill_err *err);
