/*
 * The rows a prepared statement returned, in Postgres' binary form. Borrowed: valid as long as the
 * call that handed them over.
 */
#pragma once

#include "core/frame.h"

struct mill_rowset;

int mill_rowset_count(const struct mill_rowset *rows);
int mill_rowset_affected(const struct mill_rowset *rows);
bool mill_rowset_null(const struct mill_rowset *rows, int row, int column);
bool mill_rowset_bool(const struct mill_rowset *rows, int row, int column);
int32_t mill_rowset_int(const struct mill_rowset *rows, int row, int column); /* int2 or int4 */
int64_t mill_rowset_int8(const struct mill_rowset *rows, int row, int column);
double mill_rowset_float8(const struct mill_rowset *rows, int row, int column);
/* Text, or the 16 bytes of a uuid; SQL NULL is an absent span. */
struct mill_span mill_rowset_span(const struct mill_rowset *rows, int row, int column);
