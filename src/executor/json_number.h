/*
 * Numbers as JSON writes them: reading, the question whether a double keeps the value, and writing.
 * Independent of the locale, which a handler may change at any moment.
 *
 * Pure: must not know Lua. Executor process, and the module `tidemill.native`.
 */
#pragma once

#include "core/err.h"

/* Room for any double that mill_number_write writes. */
#define MILL_NUMBER_TEXT 32

/*
 * The value of a number text, without copying it: ±0.DIGITS × 10^exponent, where DIGITS are the
 * digits in [first, last), which may have the decimal point between them, begin and end with
 * something else than 0 and are `count`. Zero has count 0.
 */
struct mill_number {
	bool negative;
	const char *first, *last;
	size_t count;
	int64_t exponent;
};

/*
 * Reads the number at the start of `text` by the grammar of JSON. Returns the bytes it takes, or 0
 * with `*bad_at` the offset where it stops being a number (which may be `len`). An exponent of more
 * than 15 digits is not read: `*bad_at` is then where the exponent's digits start.
 */
size_t mill_number_scan(const char *text, size_t len, struct mill_number *number, size_t *bad_at);

/*
 * The double that keeps the value: mill_number_write would write the same value again. Returns
 * false when there is none.
 */
bool mill_number_exact(const struct mill_number *number, double *value);

/*
 * Reads the number at the start of `text` and asks mill_number_exact at once, by a short cut where
 * few digits make the answer certain. Returns as mill_number_scan does; `*exact` tells whether
 * `*value` was set.
 */
size_t mill_number_read(const char *text, size_t len, double *value, bool *exact, size_t *bad_at);

/* The nearest double; an infinity beyond the largest. */
double mill_number_nearest(const struct mill_number *number);

/* Compares values of any size exactly: < 0, 0, > 0. −0 equals 0. */
int mill_number_compare(const struct mill_number *a, const struct mill_number *b);

/*
 * Writes a finite double as the shortest JSON number that reads back as the same double; integers
 * up to 2^53 without exponent. Returns the length; no NUL is added.
 */
size_t mill_number_write(double value, char text[MILL_NUMBER_TEXT]);

/* Writes a whole number in decimal digits, at most 20. Returns the length; no NUL is added. */
size_t mill_number_write_digits(uint64_t value, char *text);
