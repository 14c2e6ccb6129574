/*
 * HTTP requests on the executor's loop: libcurl's multi interface, fed by libuv.
 *
 * One client serves all deliveries of an executor, so they share its connections. A transfer is one
 * request and its reply; it follows no redirect (lua/tidemill/http.lua does) and keeps no cookie.
 * Only http and https, and a server's certificate is always verified.
 *
 * Executor process only. Knows nothing of Lua.
 */
#pragma once

#include <uv.h>

#include "core/frame.h"

struct mill_http_client;
struct mill_transfer;

/* Make a client; it loads libcurl. NULL: `err` says why not. */
struct mill_http_client *mill_http_client_new(uv_loop_t *loop, struct mill_err *err);
/* Closes its connections and handles. No transfer may be left; the loop must turn once more. */
void mill_http_client_close(struct mill_http_client *client);

struct mill_http_request {
	const char *method, *url;
	struct mill_span headers; /* `Name: value` lines, each ended by \n */
	struct mill_span body; /* not copied: it must stay until the transfer is freed. Or absent */
	const char *ca_file;   /* trust these certificates instead of the system's; or NULL */
	double timeout_secs, connect_timeout_secs;
	size_t max_bytes; /* of the reply's body, after it was decompressed */
};

/* How it ended. Everything is valid until the transfer is freed. */
struct mill_http_reply {
	bool failed; /* no reply; then only `failure` is set */
	struct mill_span failure;
	int status;
	struct mill_span headers; /* lines of the last header, as they came */
	struct mill_span body;
	struct mill_span redirect_url; /* where `location` leads, absolute; or absent */
	double secs;                   /* it took */
};

/*
 * Start a request. `on_done` is called once, later, unless the transfer is freed before. NULL:
 * `err` says why it cannot be started.
 */
struct mill_transfer *mill_http_start(struct mill_http_client *client,
                                      const struct mill_http_request *request,
                                      void (*on_done)(struct mill_transfer *transfer),
                                      void *context, struct mill_err *err);
void *mill_transfer_context(const struct mill_transfer *transfer);
const struct mill_http_reply *mill_transfer_reply(const struct mill_transfer *transfer);
/*
 * Its time is over: it ends as any that timed out, on_done is called. libcurl does that by itself
 * but for those that wait for a free connection.
 */
void mill_transfer_expire(struct mill_transfer *transfer);
/* Abort it if it is under way, its connection with it, and free it. */
void mill_transfer_free(struct mill_transfer *transfer);
