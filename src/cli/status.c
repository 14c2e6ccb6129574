/*
 * `tidemill status`: lanes and workers as they are this moment, once or again and again.
 *
 * Reads the views of sql/0003_operations.sql and nothing else, so a reader's grants are enough.
 */
#include <stdio.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"
#include "cli/table.h"
#include "pg/session.h"

#define WATCH_SECS 2

struct status {
	struct mill_cli *cli;
	struct mill_cli_database database;
	bool json;
};

/* Lanes that nobody serves first, then those that wait longest. */
#define LANE_ORDER "workers_alive > 0, oldest_due_age_secs desc nulls last, topic, subscriber"
#define WORKER_ORDER "alive desc, app, started_at, id"

static const char lanes_sql[] =
        "select topic, subscriber, waiting, oldest_due_age_secs, scheduled, running, failed,"
        " workers_alive, lane is null as strange from {schema}.lane_status order by " LANE_ORDER;

static const char workers_sql[] =
        "select id, app, host, pid, extract(epoch from lease_until - now()) as lease_left_secs,"
        " generation, lanes, alive from {schema}.worker_status order by " WORKER_ORDER;

static const char about_sql[] =
        "select to_char(now() at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS \"UTC\"'),"
        " (select max(version) from {schema}.migration)";

/* $1 the database, $2 the schema. */
static const char json_sql[] =
        "select json_build_object('database', $1::text, 'schema', $2::text, 'at', now(),"
        " 'lanes', (select coalesce(json_agg(json_build_object('lane', lane, 'topic', topic,"
        "   'subscriber', subscriber, 'app', app, 'waiting', waiting,"
        "   'due_since_secs', oldest_due_age_secs, 'scheduled', scheduled, 'running', running,"
        "   'failed', failed, 'workers', workers_alive) order by " LANE_ORDER "), '[]')"
        "  from {schema}.lane_status),"
        " 'workers', (select coalesce(json_agg(json_build_object('id', id, 'app', app,"
        "   'host', host, 'pid', pid, 'started_at', started_at, 'alive', alive,"
        "   'lease_left_secs', extract(epoch from lease_until - now()),"
        "   'generation', generation, 'lanes', lanes) order by " WORKER_ORDER "), '[]')"
        "  from {schema}.worker_status))";

/* ---- one look -------------------------------------------------------------------------------- */

static int print_json(struct status *status, FILE *out, struct mill_err *err)
{
	char *where = mill_session_describe(status->database.session);
	const char *params[] = { where, status->database.manifest.settings.schema };
	struct mill_rows *rows;
	int result = mill_cli_query(&status->database, json_sql, 2, params, &rows, err);
	free(where);
	if (result != 0)
		return -1;
	fprintf(out, "%s\n", mill_rows_text(rows, 0, 0));
	mill_rows_free(rows);
	return 0;
}

static int print_about(struct status *status, FILE *out, struct mill_err *err)
{
	struct mill_rows *rows;
	if (mill_cli_query(&status->database, about_sql, 0, NULL, &rows, err) != 0)
		return -1;
	char *where = mill_session_describe(status->database.session);
	fprintf(out, "%s, schema \"%s\" at version %s, %s\n", where,
	        status->database.manifest.settings.schema, mill_rows_text(rows, 0, 1),
	        mill_rows_text(rows, 0, 0));
	free(where);
	mill_rows_free(rows);
	return 0;
}

/* What a person should look at first. */
static const char *lane_note(const struct mill_rows *rows, int row)
{
	if (mill_rows_bool(rows, row, 8))
		return "not subscribed";
	return mill_rows_int8(rows, row, 7) == 0 ? "unserved" : "";
}

static void print_lane_rows(const struct mill_rows *rows, FILE *out)
{
	static const struct mill_column columns[] = {
		{ "topic", false },    { "subscriber", false }, { "waiting", true },
		{ "due since", true }, { "scheduled", true },   { "running", true },
		{ "failed", true },    { "workers", true },     { "", false },
	};
	struct mill_table table;
	mill_table_init(&table, columns, MILL_COUNT(columns));
	for (int i = 0; i < mill_rows_count(rows); i++) {
		const char *age = mill_rows_text(rows, i, 3);
		char due[32];
		mill_table_duration(age ? strtod(age, NULL) : 0, due);
		mill_table_cell(&table, mill_rows_text(rows, i, 0));
		mill_table_cell(&table, mill_rows_text(rows, i, 1));
		mill_table_cell(&table, mill_rows_text(rows, i, 2));
		mill_table_cell(&table, age ? due : NULL);
		for (int column = 4; column < 8; column++)
			mill_table_cell(&table, mill_rows_text(rows, i, column));
		mill_table_cell(&table, lane_note(rows, i));
	}
	mill_table_print(&table, out);
	mill_table_free(&table);
}

static int print_lanes(struct status *status, FILE *out, struct mill_err *err)
{
	struct mill_rows *rows;
	if (mill_cli_query(&status->database, lanes_sql, 0, NULL, &rows, err) != 0)
		return -1;
	if (mill_rows_count(rows) > 0)
		print_lane_rows(rows, out);
	else
		fputs("no subscriptions yet: `tidemill run` registers those of its config\n", out);
	mill_rows_free(rows);
	return 0;
}

static void print_worker_rows(const struct mill_rows *rows, FILE *out)
{
	static const struct mill_column columns[] = {
		{ "worker", false },    { "app", false },       { "host", false }, { "pid", true },
		{ "lease left", true }, { "generation", true }, { "lanes", true },
	};
	struct mill_table table;
	mill_table_init(&table, columns, MILL_COUNT(columns));
	for (int i = 0; i < mill_rows_count(rows); i++) {
		double left = strtod(mill_rows_text(rows, i, 4), NULL);
		char shown[32];
		mill_table_duration(left < 0 ? -left : left, shown);
		for (int column = 0; column < 4; column++)
			mill_table_cell(&table, mill_rows_text(rows, i, column));
		mill_table_cellf(&table, left < 0 ? "over for %s" : "%s", shown);
		mill_table_cell(&table, mill_rows_text(rows, i, 5));
		mill_table_cell(&table, mill_rows_text(rows, i, 6));
	}
	mill_table_print(&table, out);
	mill_table_free(&table);
}

static int print_workers(struct status *status, FILE *out, struct mill_err *err)
{
	struct mill_rows *rows;
	if (mill_cli_query(&status->database, workers_sql, 0, NULL, &rows, err) != 0)
		return -1;
	if (mill_rows_count(rows) > 0)
		print_worker_rows(rows, out);
	else
		fputs("no worker is there: `tidemill run` starts one\n", out);
	mill_rows_free(rows);
	return 0;
}

/* One whole look, as a new text for the caller to free, or NULL. */
static char *look(struct status *status, struct mill_err *err)
{
	char *text;
	size_t len;
	FILE *out = open_memstream(&text, &len);
	MILL_ASSERT(out != NULL);
	int result;
	if (status->json) {
		result = print_json(status, out, err);
	} else {
		result = print_about(status, out, err);
		fputc('\n', out);
		if (result == 0)
			result = print_lanes(status, out, err);
		fputc('\n', out);
		if (result == 0)
			result = print_workers(status, out, err);
	}
	fclose(out);
	if (result == 0)
		return text;
	free(text);
	return NULL;
}

/* ---- again and again ------------------------------------------------------------------------- */

/* Over the last look, without a flicker; what does not fit on the terminal is left out. */
static void draw(const char *text)
{
	struct winsize size = { 0 };
	if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row < 3 || size.ws_col < 20)
		size = (struct winsize){ .ws_row = 24, .ws_col = 80 };
	fputs("\033[H", stdout);
	int rows = 0;
	while (*text && rows < size.ws_row - 1) {
		const char *end = strchrnul(text, '\n');
		int column = 0;
		for (const char *at = text; at < end; at++) {
			column += ((unsigned char)*at & 0xC0) != 0x80;
			if (column <= size.ws_col)
				fputc(*at, stdout);
		}
		fputs("\033[K\n", stdout);
		text = *end ? end + 1 : end;
		rows++;
	}
	fputs(*text ? "… more than fits here\033[K\033[J" : "\033[J", stdout);
}

/* Until Ctrl-C. A database that goes away is tried again. */
static int watch(struct status *status, struct mill_err *err)
{
	bool terminal = !status->json && isatty(STDOUT_FILENO);
	mill_cli_note_interrupts();
	if (terminal)
		fputs("\033[2J", stdout);
	while (!mill_cli_interrupted()) {
		char *text = NULL;
		if (status->database.session != NULL ||
		    mill_cli_connect(status->cli, &status->database, err) == 0)
			text = look(status, err);
		if (text == NULL && err->kind != MILL_ERR_UNREACHED)
			return -1;
		if (text == NULL) {
			mill_session_close(status->database.session);
			status->database.session = NULL;
			if (terminal)
				text = mill_sprintf("%s; trying again\n", err->message);
			else
				mill_cli_fail(err);
		}
		if (text != NULL && terminal)
			draw(text);
		else if (text != NULL)
			printf("%s%s", text, status->json ? "" : "\n");
		free(text);
		/* A reader that went away is an end like Ctrl-C. */
		if (fflush(stdout) != 0)
			return 0;
		if (!mill_cli_interrupted())
			nanosleep(&(struct timespec){ .tv_sec = WATCH_SECS }, NULL);
	}
	if (terminal)
		fputc('\n', stdout);
	return 0;
}

int mill_cli_status(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	struct status status = { .cli = cli, .json = mill_cli_value(cli, "json") != NULL };
	if (mill_cli_open_database(cli, &status.database, &err) != 0)
		return mill_cli_fail(&err);
	int code = MILL_EXIT_OK;
	if (mill_cli_value(cli, "watch") != NULL) {
		if (watch(&status, &err) != 0)
			code = mill_cli_fail(&err);
	} else {
		char *text = look(&status, &err);
		if (text != NULL)
			fputs(text, stdout);
		else
			code = mill_cli_fail(&err);
		free(text);
	}
	mill_cli_free_database(&status.database);
	return code;
}
