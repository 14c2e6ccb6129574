/*
 * A plain table: one that another program made, found fit to be worked on.
 *
 * Knows which columns the statements of queries_plain.c need, and of which types. Blocking; for
 * migrate.c, which looks before a worker starts.
 */
#pragma once

#include "core/err.h"

struct mill_session;

/*
 * Whether a worker can use the table, which exists and has all columns of a plain queue. -1: the
 * error says which column or right is in the way.
 */
int mill_plain_check(struct mill_session *session, const char *schema, const char *table,
                     struct mill_err *err);
