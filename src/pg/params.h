/*
 * Parameters of a prepared statement, in Postgres' binary form.
 *
 * A builder that copies what it is given: numbers, texts, and arrays of them (one statement serves
 * a whole batch). Includes libpq's neighbourhood only; knows no statement.
 */
#pragma once

#include "core/frame.h"

#define MILL_PARAMS_MAX 16

/* Type numbers of Postgres' own types, fixed for ever in its catalogue. */
enum mill_type {
	MILL_TYPE_BOOL = 16,
	MILL_TYPE_INT2 = 21,
	MILL_TYPE_INT4 = 23,
	MILL_TYPE_INT8 = 20,
	MILL_TYPE_FLOAT8 = 701,
	MILL_TYPE_TEXT = 25,
	MILL_TYPE_UUID = 2950,
	MILL_TYPE_TIMESTAMPTZ = 1184,
};

/* Zero-initialised is empty; freed by mill_params_free. */
struct mill_params {
	struct mill_buffer bytes;
	size_t offsets[MILL_PARAMS_MAX];
	int lengths[MILL_PARAMS_MAX]; /* −1: SQL NULL */
	int count;
	size_t array_at; /* header of the array being written */
};

void mill_params_free(struct mill_params *params);
/* Empty it for the next statement; keeps the memory. */
void mill_params_clear(struct mill_params *params);

void mill_params_bool(struct mill_params *params, bool value);
void mill_params_int4(struct mill_params *params, int32_t value);
void mill_params_int8(struct mill_params *params, int64_t value);
void mill_params_float8(struct mill_params *params, double value);
/* An absent span is SQL NULL. */
void mill_params_text(struct mill_params *params, struct mill_span text);
void mill_params_uuid(struct mill_params *params, const uint8_t id[16]);

/*
 * An array: begin, its elements, end. Elements are written by the function of their type.
 *
 *     mill_params_array(&params, MILL_TYPE_INT4);
 *     mill_element_int4(&params, 7);
 *     mill_params_array_end(&params);
 */
void mill_params_array(struct mill_params *params, enum mill_type element);
void mill_element_int2(struct mill_params *params, int16_t value);
void mill_element_int4(struct mill_params *params, int32_t value);
void mill_element_int8(struct mill_params *params,
                       int64_t value); /* timestamptz too: µs since 2000 */
void mill_element_float8(struct mill_params *params, double value);
void mill_element_text(struct mill_params *params, struct mill_span text); /* absent: NULL */
void mill_element_uuid(struct mill_params *params, const uint8_t id[16]);
void mill_params_array_end(struct mill_params *params);

/* Microseconds between Postgres' epoch, 2000-01-01, and that of 1970. */
#define MILL_PG_EPOCH_US INT64_C(946684800000000)
/* The timestamptz value `-infinity`. */
#define MILL_PG_MINUS_INFINITY INT64_MIN
