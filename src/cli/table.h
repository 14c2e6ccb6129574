/*
 * Tables for people: rows of cells in aligned columns.
 *
 * Cells are gathered first, since a column is as wide as its widest cell. What comes out of a queue
 * may hold anything, so control characters are shown as escapes and never reach the terminal.
 */
#pragma once

#include <stdio.h>

#include "core/base.h"

struct mill_column {
	const char *title;
	bool number; /* set to the right */
};

struct mill_table {
	const struct mill_column *columns; /* the caller's */
	size_t column_count;
	char **cells; /* row by row */
	size_t count, room;
};

void mill_table_init(struct mill_table *table, const struct mill_column *columns, size_t count);
void mill_table_free(struct mill_table *table);

/* The next cell of the row; NULL is shown as `-`. A row ends with its last column. */
void mill_table_cell(struct mill_table *table, const char *text);
MILL_PRINTF(2, 3) void mill_table_cellf(struct mill_table *table, const char *format, ...);

/* Titles and rows. */
void mill_table_print(const struct mill_table *table, FILE *out);

/* One line of text, or several with `indent` blanks before all but the first; made safe to show. */
void mill_table_print_text(FILE *out, const char *text, int indent);

/* The first `width` characters of a text, `…` in the place of the last where it is longer; a new
 * string for the caller to free. */
char *mill_table_cut(const char *text, int width);

/* "850 ms", "12 s", "3 m 20 s", "2 h 05 m", "3 d 4 h"; into 32 bytes. */
void mill_table_duration(double secs, char text[32]);
