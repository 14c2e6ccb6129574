/*
 * Exchanges with the server in the form that the runtime's links use: a transaction in pipeline
 * mode, `BEGIN statement… Sync COMMIT Sync`. Here they block, and any failure ends the program.
 */
#pragma once

#include "options.h"
#include "pg/params.h"
#include "pg/queries.h"
#include "session.h"

/* Prepare what claims and settles need, and enter pipeline mode. */
void bench_exchange_prepare(PGconn *connection, const struct bench_options *options);

/* Queue an exchange of one statement, with the plan pinned where `pin` is set. Sends nothing yet.
 */
void bench_exchange_queue(PGconn *connection, enum mill_query query, bool pin,
                          const struct mill_params *params);

/* Send all that is queued. */
void bench_exchange_flush(PGconn *connection);

/* Wait for the oldest exchange that is not answered; its statement's rows are the caller's. */
PGresult *bench_exchange_take(PGconn *connection, bool pin);
