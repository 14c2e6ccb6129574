/* Values out of libpq's results: see rowset.h. */
#include "pg/rowset.h"

#include <libpq-fe.h>

static const PGresult *rowset(const struct mill_rowset *rows)
{
	return (const PGresult *)rows;
}

int mill_rowset_count(const struct mill_rowset *rows)
{
	return PQntuples(rowset(rows));
}

int mill_rowset_affected(const struct mill_rowset *rows)
{
	return atoi(PQcmdTuples((PGresult *)rows));
}

bool mill_rowset_null(const struct mill_rowset *rows, int row, int column)
{
	return PQgetisnull(rowset(rows), row, column);
}

/* A number of `len` bytes in network order, sign extended. */
static int64_t integer_at(const struct mill_rowset *rows, int row, int column)
{
	const unsigned char *bytes = (const unsigned char *)PQgetvalue(rowset(rows), row, column);
	int len = PQgetlength(rowset(rows), row, column);
	if (len == 0)
		return 0;
	uint64_t value = bytes[0] & 0x80 ? UINT64_MAX : 0;
	for (int i = 0; i < len; i++)
		value = value << 8 | bytes[i];
	return (int64_t)value;
}

bool mill_rowset_bool(const struct mill_rowset *rows, int row, int column)
{
	return integer_at(rows, row, column) != 0;
}

int32_t mill_rowset_int(const struct mill_rowset *rows, int row, int column)
{
	return (int32_t)integer_at(rows, row, column);
}

int64_t mill_rowset_int8(const struct mill_rowset *rows, int row, int column)
{
	return integer_at(rows, row, column);
}

double mill_rowset_float8(const struct mill_rowset *rows, int row, int column)
{
	int64_t bits = integer_at(rows, row, column);
	double value;
	memcpy(&value, &bits, sizeof(value));
	return value;
}

struct mill_span mill_rowset_span(const struct mill_rowset *rows, int row, int column)
{
	if (PQgetisnull(rowset(rows), row, column))
		return MILL_SPAN_NONE;
	return (struct mill_span){ PQgetvalue(rowset(rows), row, column),
		                   (size_t)PQgetlength(rowset(rows), row, column) };
}
