/*
 * A plain libpq session for the parts around the measurement. A statement that fails ends the
 * program: a benchmark that goes on after an error measures something else.
 */
#pragma once

#include <libpq-fe.h>

#include "core/base.h"

/* Connect by the PG* variables. */
PGconn *bench_session_open(void);

/*
 * Run a text of statements in which {schema} stands for `schema` and {table} for the ledger's
 * table.
 */
void bench_session_run(PGconn *connection, const char *schema, const char *sql);

/* The same, and the first value of its last row; 0 where there is none. */
double bench_session_number(PGconn *connection, const char *schema, const char *sql);

/* End the program with what the connection says, where `good` is false. */
void bench_session_check(PGconn *connection, bool good, const char *what);
