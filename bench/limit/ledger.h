/*
 * The ledger of a run: the program's own schema, made anew, and filled as the options say.
 */
#pragma once

#include "options.h"
#include "session.h"

void bench_ledger_make(PGconn *connection, const struct bench_options *options);

/*
 * Open a session that holds an old snapshot: one that has its own transaction id, so that whatever
 * dies from now on cannot be cleaned up. Closing it ends that.
 */
PGconn *bench_ledger_hold_snapshot(void);

/* Messages that are done now, those that were at the start not counted. */
int64_t bench_ledger_settled(PGconn *connection, const struct bench_options *options);

/* Dead row versions in the table, counted one by one. */
int64_t bench_ledger_dead(PGconn *connection, const struct bench_options *options);

/* Drop the schema. */
void bench_ledger_drop(PGconn *connection, const struct bench_options *options);
