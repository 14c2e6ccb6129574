/* `tidemill failed list` and `failed show`: looking at dead letters. change.c acts on them. */
#include <stdio.h>

#include "cli/cli.h"
#include "cli/table.h"
#include "pg/session.h"

#define LIMIT_PRESET 50
#define LIMIT_MAX 10000
#define ERROR_WIDTH 80 /* characters of an error in the list */
#define LABEL_WIDTH 14

/* ---- list ------------------------------------------------------------------------------------ */

/* $1 a topic or NULL, $2 how many. Newest first, which is an index order. */
#define NEWEST                                                                                     \
	" from {schema}.failed_message as f where ($1::text is null or f.topic = $1::text)"        \
	" order by f.failed_at desc, f.id desc limit $2::bigint"

static const char list_sql[] =
        "select f.id, f.topic, f.subscriber, f.attempts,"
        " to_char(f.failed_at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'),"
        " split_part(f.error, E'\\n', 1)" NEWEST;

static const char list_json_sql[] = "select row_to_json(f)" NEWEST;

static void print_list(const struct mill_rows *rows, int count)
{
	static const struct mill_column columns[] = {
		{ "id", false },      { "topic", false },  { "subscriber", false },
		{ "attempts", true }, { "failed", false }, { "error", false },
	};
	struct mill_table table;
	mill_table_init(&table, columns, MILL_COUNT(columns));
	for (int i = 0; i < count; i++) {
		for (int column = 0; column < 5; column++)
			mill_table_cell(&table, mill_rows_text(rows, i, column));
		char *error = mill_table_cut(mill_rows_text(rows, i, 5), ERROR_WIDTH);
		mill_table_cell(&table, error);
		free(error);
	}
	mill_table_print(&table, stdout);
	mill_table_free(&table);
}

/* One array, an element a line. */
static void print_list_json(const struct mill_rows *rows, int count)
{
	for (int i = 0; i < count; i++)
		printf("%s%s", i ? ",\n" : "[", mill_rows_text(rows, i, 0));
	puts(count ? "]" : "[]");
}

int mill_cli_failed_list(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	const char *topic = mill_cli_value(cli, "topic");
	bool json = mill_cli_value(cli, "json") != NULL;
	double limit;
	struct mill_cli_database database;
	if (mill_cli_number(cli, "limit", true, 1, LIMIT_MAX, LIMIT_PRESET, &limit, &err) != 0 ||
	    mill_cli_open_database(cli, &database, &err) != 0)
		return mill_cli_fail(&err);
	/* One more than is shown, to know whether there is more. */
	char most[24];
	snprintf(most, sizeof(most), "%.0f", limit + 1);
	const char *params[] = { topic, most };
	struct mill_rows *rows;
	int code = MILL_EXIT_OK;
	if (mill_cli_query_pinned(&database, json ? list_json_sql : list_sql, 2, params, &rows,
	                          &err) == 0) {
		int found = mill_rows_count(rows), count = found > limit ? (int)limit : found;
		if (json)
			print_list_json(rows, count);
		else if (count > 0)
			print_list(rows, count);
		else
			printf("no message%s%s%s has failed\n", topic ? " of topic `" : "",
			       topic ? topic : "", topic ? "`" : "");
		if (found > count && !json)
			printf("\nthere are more: --limit N shows the last N\n");
		mill_rows_free(rows);
	} else {
		code = mill_cli_fail(&err);
	}
	mill_cli_free_database(&database);
	return code;
}

/* ---- show ------------------------------------------------------------------------------------ */

/* Every column there is, what is looked for first; documents laid out for reading. */
static const char show_sql[] =
        "select e.key, case when e.key in ('payload', 'headers') then jsonb_pretty(e.value::jsonb)"
        "  else e.value #>> '{}' end"
        " from {schema}.{table} as q,"
        "  json_each(row_to_json(q)) with ordinality as e(key, value, place)"
        " where q.id = $1::uuid and e.key <> 'errors'"
        "  and (e.key = 'payload' or e.value::text <> 'null')"
        " order by array_position(array['id', 'topic', 'subscriber', 'status', 'attempts', "
        "  'error', 'payload'], e.key), e.place";

static const char show_errors_sql[] =
        "select e ->> 'attempt', e ->> 'at', e ->> 'by', e ->> 'error'"
        " from {schema}.{table} as q, jsonb_array_elements("
        "  case when jsonb_typeof(q.errors) = 'array' then q.errors else '[]' end) as e"
        " where q.id = $1::uuid";

static const char show_json_sql[] =
        "select row_to_json(q) from {schema}.{table} as q where q.id = $1::uuid";

static void print_field(const char *label, const char *text)
{
	printf("%-*s", LABEL_WIDTH, label);
	mill_table_print_text(stdout, text ? text : "-", LABEL_WIDTH);
	putchar('\n');
}

static int print_errors(struct mill_cli_database *database, const char *id, struct mill_err *err)
{
	struct mill_rows *rows;
	if (mill_cli_query(database, show_errors_sql, 1, &id, &rows, err) != 0)
		return -1;
	for (int i = 0; i < mill_rows_count(rows); i++) {
		const char *attempt = mill_rows_text(rows, i, 0), *at = mill_rows_text(rows, i, 1);
		const char *by = mill_rows_text(rows, i, 2), *error = mill_rows_text(rows, i, 3);
		char *text = mill_sprintf("attempt %s, %s%s%s\n%s", attempt ? attempt : "?",
		                          at ? at : "?", by ? ", by " : "", by ? by : "",
		                          error ? error : "");
		print_field(i == 0 ? "errors" : "", text);
		free(text);
	}
	mill_rows_free(rows);
	return 0;
}

static int show(struct mill_cli_database *database, const char *id, bool json, struct mill_err *err)
{
	struct mill_rows *rows;
	if (mill_cli_query(database, json ? show_json_sql : show_sql, 1, &id, &rows, err) != 0)
		return -1;
	int count = mill_rows_count(rows);
	for (int i = 0; i < count; i++)
		if (json)
			puts(mill_rows_text(rows, i, 0));
		else
			print_field(mill_rows_text(rows, i, 0), mill_rows_text(rows, i, 1));
	mill_rows_free(rows);
	if (count == 0)
		return mill_err_set(err, MILL_ERR_DATABASE, "there is no message %s", id);
	return json ? 0 : print_errors(database, id, err);
}

int mill_cli_failed_show(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	struct mill_cli_database database;
	const char *id = cli->operands[0];
	if (mill_cli_check_id(id, &err) != 0 || mill_cli_open_database(cli, &database, &err) != 0)
		return mill_cli_fail(&err);
	bool json = mill_cli_value(cli, "json") != NULL;
	int code = show(&database, id, json, &err) == 0 ? MILL_EXIT_OK : mill_cli_fail(&err);
	mill_cli_free_database(&database);
	return code;
}
