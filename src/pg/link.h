/*
 * A link: one asynchronous connection to Postgres that keeps itself alive.
 *
 * It connects, prepares its statements, reports `up`, and after a loss reports `down` and tries
 * again with backoff for ever. Work is sent as exchanges: a transaction of one or more prepared
 * statements that travels in one piece (pipeline mode) and is answered by one callback. Many
 * exchanges may be in flight; they are answered in order.
 *
 * An exchange that was in flight when the connection broke is answered with MILL_ERR_UNREACHED:
 * whether it was committed is then unknown, and finding out is the caller's business (fencing).
 *
 * Runtime process, on the loop. Knows libpq, no statement's meaning.
 */
#pragma once

#include <uv.h>

#include "core/err.h"
#include "pg/params.h"
#include "pg/rowset.h"

struct mill_link;
struct mill_results;

/* A statement by name; `sql` has its identifiers filled in. */
struct mill_statement {
	const char *name;
	const char *sql;
};

struct mill_link_options {
	uv_loop_t *loop;
	const char *name; /* "work", "lease" …: for logs and application_name */
	const char *dsn;  /* NULL or "": PG* variables */
	/* An exchange names them by index. Must outlive the link. */
	const struct mill_statement *statements;
	size_t statement_count;
	uint64_t prepared; /* bits: which of them are prepared at each connect, before `up` */
	/* Channels to LISTEN on before `up`, NULL-terminated; or NULL. Plain identifiers. */
	const char *const *channels;
	/* An exchange unanswered for so long is cancelled and the connection given up. */
	double deadline_secs;

	void (*on_up)(void *context);
	/* Once per loss, and once for each new kind of refusal while it is down. */
	void (*on_down)(const struct mill_err *err, void *context);
	void (*on_notify)(const char *channel, const char *payload, void *context);
	void *context;
};

/* Starts connecting; callbacks come from the loop only. Copies the options, not the statements. */
struct mill_link *mill_link_new(const struct mill_link_options *options);

/*
 * Close the connection, answer what is in flight with MILL_ERR_UNREACHED, and free everything;
 * `on_closed` comes when that is done and may be NULL.
 */
void mill_link_close(struct mill_link *link, void (*on_closed)(void *context), void *context);

/* Give this connection up and make a new one; `err` says why. Only when the link is up. */
void mill_link_reset(struct mill_link *link, const struct mill_err *err);

/* From the next exchange on. */
void mill_link_set_deadline(struct mill_link *link, double deadline_secs);

bool mill_link_is_up(const struct mill_link *link);
/* Exchanges sent and not yet answered. */
size_t mill_link_in_flight(const struct mill_link *link);
/* How often the connection came up again after the first time. */
uint64_t mill_link_reconnects(const struct mill_link *link);

/*
 * An exchange: begin, one or more statements, end. The callback comes exactly once, never before
 * mill_link_end returns: `err` NULL with the results of all statements in order, valid during the
 * call; or the first error, with nothing changed in the database (unless UNREACHED).
 * Only when the link is up. What was ended is sent by mill_link_flush, once a turn of the loop: so
 * that all of a turn travels together. An error that means the connection or server is no good (see
 * mill_err_database_reaction) makes the link reconnect after the callback.
 */
typedef void (*mill_link_done)(struct mill_results *results, const struct mill_err *err,
                               void *context);
void mill_link_begin(struct mill_link *link);
void mill_link_add(struct mill_link *link, size_t statement, const struct mill_params *params);
void mill_link_end(struct mill_link *link, mill_link_done done, void *context);
void mill_link_flush(struct mill_link *link);

/* The rows of statement `n` of the exchange; read them with rowset.h. */
const struct mill_rowset *mill_results_at(const struct mill_results *results, size_t n);
