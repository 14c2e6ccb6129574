/*
 * The ops that speak SQL: statements, and transactions that a delivery holds over many of them.
 *
 *     query(transaction or false, sql, arguments)   rows
 *     begin(sql)                                    the transaction's number
 *     commit(transaction), rollback(transaction)
 *     finish(transaction)     commit together with this message's `done`: ends the delivery
 *
 * Results are values or nil and a table that says why not (sql_value.h). A delivery is in one
 * transaction at most, which holds a connection of its own until it ends, or the delivery does.
 *
 * Executor process only.
 */
#pragma once

#include "core/config.h"
#include "executor/ops.h"

struct mill_sql_options {
	struct mill_span database; /* absent: PG* variables */
	const struct mill_settings *settings;
	bool plain_table;
};
/* From now on there is a database, to which nothing connects before it is asked something. */
void mill_sql_open(struct mill_ops *ops, const struct mill_sql_options *options);
/* After every wait was closed. */
void mill_sql_close(struct mill_ops *ops);

/* Ends with one without a name. */
extern const struct mill_op mill_sql_ops[];

/* The delivery is over: what it left open is rolled back. */
void mill_sql_release(struct mill_wait *wait);
/* With the wait. */
void mill_sql_use_free(struct mill_wait *wait);
