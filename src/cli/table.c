/* Tables for people: see table.h. */
#include "cli/table.h"

#include <stdarg.h>

#define GAP 2 /* blanks between columns */

void mill_table_init(struct mill_table *table, const struct mill_column *columns, size_t count)
{
	*table = (struct mill_table){ .columns = columns, .column_count = count };
}

void mill_table_free(struct mill_table *table)
{
	for (size_t i = 0; i < table->count; i++)
		free(table->cells[i]);
	free(table->cells);
	*table = (struct mill_table){ 0 };
}

/* ---- text ------------------------------------------------------------------------------------ */

/* A control character at `at`, those of two bytes (U+0080 to U+009F) included: its length, or 0. */
static int control_len(const char *at)
{
	unsigned char c = (unsigned char)at[0], next = (unsigned char)at[1];
	if (c < 0x20 || c == 0x7F)
		return 1;
	return c == 0xC2 && next >= 0x80 && next <= 0x9F ? 2 : 0;
}

void mill_table_print_text(FILE *out, const char *text, int indent)
{
	for (const char *at = text; *at;) {
		int len = control_len(at);
		if (*at == '\n') {
			fprintf(out, "\n%*s", at[1] ? indent : 0, "");
		} else if (*at == '\t') {
			fputs("  ", out);
		} else if (len > 0) {
			fprintf(out, "\\x%02x", (unsigned char)at[len - 1]);
		} else {
			fputc(*at, out);
			len = 1;
		}
		at += len;
	}
}

/* The same on one line. */
static char *shown_cell(const char *text)
{
	char *line = mill_strdup(text), *shown;
	for (char *at = line; *at; at++)
		if (*at == '\n' || *at == '\t' || *at == '\r')
			*at = ' ';
	size_t len;
	FILE *out = open_memstream(&shown, &len);
	MILL_ASSERT(out != NULL);
	mill_table_print_text(out, line, 0);
	fclose(out);
	free(line);
	return shown;
}

/* Characters, not bytes. */
static int width_of(const char *text)
{
	int width = 0;
	for (; *text; text++)
		width += ((unsigned char)*text & 0xC0) != 0x80;
	return width;
}

char *mill_table_cut(const char *text, int width)
{
	if (width_of(text) <= width)
		return mill_strdup(text);
	const char *end = text;
	for (int left = width - 1; left > 0; left--)
		for (end++; ((unsigned char)*end & 0xC0) == 0x80; end++)
			continue;
	return mill_sprintf("%.*s…", (int)(end - text), text);
}

void mill_table_duration(double secs, char text[32])
{
	if (!(secs >= 0))
		secs = 0;
	if (secs < 0.9995) {
		snprintf(text, 32, "%.0f ms", secs * 1000);
		return;
	}
	/* Beyond a million years nobody counts. */
	long long whole = secs < 3e13 ? (long long)(secs + 0.5) : 30000000000000LL;
	if (whole < 60)
		snprintf(text, 32, "%lld s", whole);
	else if (whole < 3600)
		snprintf(text, 32, "%lld m %02lld s", whole / 60, whole % 60);
	else if (whole < 86400)
		snprintf(text, 32, "%lld h %02lld m", whole / 3600, whole / 60 % 60);
	else
		snprintf(text, 32, "%lld d %lld h", whole / 86400, whole / 3600 % 24);
}

/* ---- tables ---------------------------------------------------------------------------------- */

void mill_table_cell(struct mill_table *table, const char *text)
{
	if (table->count == table->room) {
		table->room = table->room ? table->room * 2 : 64;
		table->cells = mill_realloc(table->cells, table->room * sizeof(table->cells[0]));
	}
	table->cells[table->count++] = text ? shown_cell(text) : mill_strdup("-");
}

void mill_table_cellf(struct mill_table *table, const char *format, ...)
{
	char text[200];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	mill_table_cell(table, text);
}

static void print_row(const struct mill_table *table, char *const *cells, const int *widths,
                      FILE *out)
{
	/* Blanks behind the last text are of no use to anyone. */
	size_t count = table->column_count;
	while (count > 0 && cells[count - 1][0] == 0)
		count--;
	for (size_t c = 0; c < count; c++) {
		bool number = table->columns[c].number, last = c + 1 == count;
		int blanks = widths[c] - width_of(cells[c]);
		fprintf(out, "%*s%s%*s", number ? blanks : 0, "", cells[c],
		        last ? 0 : (number ? 0 : blanks) + GAP, "");
	}
	fputc('\n', out);
}

void mill_table_print(const struct mill_table *table, FILE *out)
{
	size_t columns = table->column_count;
	MILL_ASSERT(table->count % columns == 0);
	char **titles = mill_calloc(columns, sizeof(titles[0]));
	int *widths = mill_calloc(columns, sizeof(widths[0]));
	for (size_t c = 0; c < columns; c++) {
		titles[c] = (char *)table->columns[c].title;
		widths[c] = width_of(titles[c]);
	}
	for (size_t i = 0; i < table->count; i++) {
		int width = width_of(table->cells[i]);
		if (width > widths[i % columns])
			widths[i % columns] = width;
	}
	print_row(table, titles, widths, out);
	for (size_t i = 0; i < table->count; i += columns)
		print_row(table, table->cells + i, widths, out);
	free(titles);
	free(widths);
}
