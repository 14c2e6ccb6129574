/*
 * `tidemill publish --lines`: a message a line, many in one transaction.
 *
 * A batch is all or nothing, and batches go one after the other: whatever ends this, the messages
 * of whole batches are published and no others, and it is said at which line to go on. Memory is
 * that of one batch, which ends at so many lines or bytes, or when the input pauses: what somebody
 * types, or a program writes now and then, is published soon.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"
#include "pg/session.h"

#define BATCH_LINES 500
#define BATCH_BYTES (4 * 1024 * 1024)
#define READ_SIZE (256 * 1024)
#define PAUSE_MS 1000

struct lines {
	struct mill_cli *cli;
	struct mill_cli_database database;
	const char *name; /* of the input, for people */
	int fd;
	struct mill_buffer in; /* read, not taken yet */
	bool at_end;

	/* The batch: a text array for Postgres, and which line each of its messages is. */
	struct mill_buffer array;
	int count;
	int64_t numbers[BATCH_LINES];
	int64_t number; /* of the line that was taken last */

	int64_t begin; /* the first line that is not published */
	int64_t published, delivered;
	bool warned;
	struct mill_progress progress;
};

/* ---- reading --------------------------------------------------------------------------------- */

static int open_input(struct lines *lines, struct mill_err *err)
{
	const char *path = lines->cli->operand_count > 1 ? lines->cli->operands[1] : "-";
	lines->fd = STDIN_FILENO;
	lines->name = "standard input";
	if (strcmp(path, "-") == 0)
		return 0;
	lines->name = path;
	lines->fd = open(path, O_RDONLY | O_CLOEXEC);
	if (lines->fd >= 0)
		return 0;
	return mill_err_set(err, MILL_ERR_USAGE,
	                    "cannot read %s: %s; with --lines, what follows the topic is a file of "
	                    "messages, or `-`",
	                    path, strerror(errno));
}

/* Is there nothing to read, for so long that a batch should not wait for more? */
static bool input_pauses(const struct lines *lines)
{
	struct pollfd ready = { .fd = lines->fd, .events = POLLIN };
	return lines->count > 0 && poll(&ready, 1, PAUSE_MS) == 0;
}

/*
 * The next line, which lies in `in`, without its end. 1: one was taken; 0: there is none, or none
 * in time for this batch.
 */
static int take_line(struct lines *lines, size_t *at, struct mill_span *line, struct mill_err *err)
{
	size_t looked = *at;
	while (true) {
		char *data = lines->in.data;
		char *end = data ? memchr(data + looked, '\n', lines->in.len - looked) : NULL;
		if (end != NULL || (lines->at_end && lines->in.len > *at)) {
			size_t len = (end ? (size_t)(end - data) : lines->in.len) - *at;
			*line = (struct mill_span){ data + *at, len };
			*at += len + (end != NULL);
			lines->number++;
			return 1;
		}
		if (lines->at_end || mill_cli_interrupted() || input_pauses(lines))
			return 0;
		/* What was taken is forgotten before more is read. */
		mill_buffer_consume(&lines->in, *at);
		*at = 0;
		looked = lines->in.len;
		if (lines->in.len > MILL_FRAME_MAX)
			return mill_err_set(err, MILL_ERR_INPUT,
			                    "%s:%lld: the line is larger than any queue takes",
			                    lines->name, (long long)lines->number + 1);
		mill_buffer_reserve(&lines->in, READ_SIZE);
		ssize_t n = read(lines->fd, lines->in.data + lines->in.len, READ_SIZE);
		if (n < 0 && errno != EINTR)
			return mill_err_system(err, errno, "cannot read %s", lines->name);
		lines->in.len += n > 0 ? (size_t)n : 0;
		lines->at_end = n == 0;
	}
}

static bool is_blank(struct mill_span line)
{
	for (size_t i = 0; i < line.len; i++)
		if (strchr(" \t\r", line.data[i]) == NULL || line.data[i] == 0)
			return false;
	return true;
}

/* An element of an array, in quotes. */
static void add_element(struct mill_buffer *array, struct mill_span text)
{
	mill_buffer_text(array, array->len ? ",\"" : "{\"");
	const char *at = text.data, *end = text.data + text.len;
	while (at < end) {
		const char *plain = at;
		while (plain < end && *plain != '"' && *plain != '\\')
			plain++;
		mill_buffer_bytes(array, at, (size_t)(plain - at));
		if (plain < end) {
			char escaped[2] = { '\\', *plain++ };
			mill_buffer_bytes(array, escaped, 2);
		}
		at = plain;
	}
	mill_buffer_text(array, "\"");
}

/* The place in the input instead of the place in the text, which is one line. */
static int no_json(const struct lines *lines, struct mill_err *err)
{
	static const char here[] = "line 1, ";
	char *at = strstr(err->message, here);
	if (at != NULL)
		memmove(at, at + sizeof(here) - 1, strlen(at + sizeof(here) - 1) + 1);
	return mill_err_wrap(err, "%s:%lld", lines->name, (long long)lines->number);
}

/* Gather a batch; `count` is 0 at the end of the input. */
static int read_batch(struct lines *lines, struct mill_err *err)
{
	size_t at = 0;
	int got = 1;
	lines->count = 0;
	lines->array.len = 0;
	while (lines->count < BATCH_LINES && lines->array.len < BATCH_BYTES) {
		struct mill_span line = MILL_SPAN_NONE;
		got = take_line(lines, &at, &line, err);
		if (got <= 0)
			break;
		if (is_blank(line))
			continue;
		if (mill_cli_check_json(line.data, line.len, err) != 0)
			return no_json(lines, err);
		lines->numbers[lines->count++] = lines->number;
		add_element(&lines->array, line);
	}
	mill_buffer_consume(&lines->in, at);
	if (lines->count > 0)
		mill_buffer_bytes(&lines->array, "}", 2);
	return got < 0 ? -1 : 0;
}

/* ---- publishing ------------------------------------------------------------------------------ */

/*
 * $1 topic, $2 payloads and $3 how many, $4 seconds from now, $5 a time, $6 priority, $7 attempts,
 * $8 who. An array has an element for each payload, or is left out.
 */
static const char publish_sql[] =
        "select count(*), sum(p.delivered) from (select array[$3::integer] as size) as n"
        " cross join lateral {schema}.publish_many(array[$1::text], $2::text[]::jsonb[],"
        " available_ats => case"
        "  when $4::double precision is not null"
        "   then array_fill(now() + make_interval(secs => $4::double precision), n.size)"
        "  when $5::timestamptz is not null then array_fill($5::timestamptz, n.size) end,"
        " priorities => case when $6::double precision is not null"
        "  then array_fill($6::double precision::integer, n.size) end,"
        " max_attempts => case when $7::double precision is not null"
        "  then array_fill($7::double precision::integer, n.size) end,"
        " published_by => $8::text) as p";

static int query_batch(struct lines *lines, struct mill_rows **rows, struct mill_err *err)
{
	struct mill_cli *cli = lines->cli;
	char count[16];
	snprintf(count, sizeof(count), "%d", lines->count);
	const char *params[] = { cli->operands[0],
		                 lines->array.data,
		                 count,
		                 mill_cli_value(cli, "delay"),
		                 mill_cli_value(cli, "at"),
		                 mill_cli_value(cli, "priority"),
		                 mill_cli_value(cli, "max-attempts"),
		                 mill_cli_value(cli, "by") };
	return mill_cli_query(&lines->database, publish_sql, MILL_COUNT(params), params, rows, err);
}

/*
 * The message of a batch that the server refuses. publish_many names it by its place; what is no
 * jsonb for the server, such as a number of a million digits, is named by nobody and looked for.
 */
static int64_t find_refused(struct lines *lines, const struct mill_err *err)
{
	static const char sql[] = "select octet_length((($1::text[])[$2::integer])::jsonb::text)";
	int item = 0;
	if (sscanf(err->message, "item %d: ", &item) == 1 && item >= 1 && item <= lines->count)
		return lines->numbers[item - 1];
	for (int i = 0; i < lines->count; i++) {
		struct mill_err ignored = MILL_ERR_INIT;
		char place[16];
		snprintf(place, sizeof(place), "%d", i + 1);
		const char *params[] = { lines->array.data, place };
		if (mill_cli_query(&lines->database, sql, 2, params, NULL, &ignored) != 0)
			return ignored.kind == MILL_ERR_INPUT ? lines->numbers[i] : 0;
	}
	return 0;
}

static int refused(struct lines *lines, struct mill_err *err)
{
	if (err->kind != MILL_ERR_INPUT)
		return -1;
	int64_t number = find_refused(lines, err);
	char *message = mill_strdup(err->message);
	const char *text = message;
	if (strncmp(text, "item ", 5) == 0 && strstr(text, ": ") != NULL)
		text = strstr(text, ": ") + 2;
	mill_err_set(err, MILL_ERR_INPUT, "%s:%lld: %s", lines->name,
	             (long long)(number ? number : lines->begin), text);
	free(message);
	return -1;
}

static int publish_batch(struct lines *lines, struct mill_err *err)
{
	struct mill_rows *rows;
	if (query_batch(lines, &rows, err) != 0)
		return refused(lines, err);
	lines->published += mill_rows_int8(rows, 0, 0);
	lines->delivered += mill_rows_int8(rows, 0, 1);
	lines->begin = lines->number + 1;
	mill_rows_free(rows);
	mill_progress_show(&lines->progress, "%lld published…", (long long)lines->published);
	return 0;
}

static int publish_all(struct lines *lines, struct mill_err *err)
{
	while (true) {
		if (read_batch(lines, err) != 0)
			return -1;
		if (lines->count == 0 && !mill_cli_interrupted())
			return 0;
		if (mill_cli_interrupted())
			return mill_err_set(err, MILL_ERR_SYSTEM, "interrupted");
		if (publish_batch(lines, err) != 0)
			return -1;
	}
}

/* ---- the command ----------------------------------------------------------------------------- */

/* One warning for all batches. */
static void on_notice(const char *severity, const char *text, void *context)
{
	struct lines *lines = context;
	if (lines->warned || strcmp(severity, "WARNING") != 0)
		return;
	lines->warned = true;
	mill_progress_end(&lines->progress);
	mill_cli_warn("%s", text);
}

/* Where to go on, which is what a person wants to know. */
static void add_place(const struct lines *lines, struct mill_err *err)
{
	char *message = mill_strdup(err->message);
	long long published = lines->published, begin = lines->begin;
	if (err->kind == MILL_ERR_UNREACHED && lines->count > 0)
		mill_err_set(
		        err, err->kind,
		        "%s; what stands before line %lld is published, and of the %d messages "
		        "from there on that were on their way it is not known",
		        message, begin, lines->count);
	else if (published == 0)
		mill_err_set(err, err->kind, "%s; nothing is published", message);
	else
		mill_err_set(
		        err, err->kind,
		        "%s; what stands before line %lld is published, and nothing from there "
		        "on",
		        message, begin);
	free(message);
}

int mill_cli_publish_lines(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	struct lines lines = { .cli = cli, .begin = 1 };
	if (mill_cli_value(cli, "dedupe-key") != NULL)
		mill_err_set(&err, MILL_ERR_USAGE,
		             "`--dedupe-key` is for one message, and `--lines` publishes many");
	if (err.kind != MILL_ERR_NONE || mill_cli_check_publish(cli, &err) != 0 ||
	    open_input(&lines, &err) != 0)
		return mill_cli_fail(&err);
	int code = MILL_EXIT_OK;
	if (mill_cli_open_database(cli, &lines.database, &err) != 0) {
		code = mill_cli_fail(&err);
	} else {
		mill_session_on_notice(lines.database.session, on_notice, &lines);
		mill_cli_note_interrupts();
		int result = publish_all(&lines, &err);
		mill_progress_end(&lines.progress);
		if (result != 0) {
			add_place(&lines, &err);
			code = mill_cli_fail(&err);
		}
		mill_cli_did(cli, "of the lines %lld were published", (long long)lines.published);
		printf("{\"published\":%lld,\"delivered\":%lld}\n", (long long)lines.published,
		       (long long)lines.delivered);
	}
	mill_cli_free_database(&lines.database);
	mill_buffer_free(&lines.in);
	mill_buffer_free(&lines.array);
	if (lines.fd != STDIN_FILENO)
		close(lines.fd);
	return code;
}
