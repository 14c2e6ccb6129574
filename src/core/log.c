/* Structured log lines: see log.h. */
#include "core/log.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/digest.h"
#include "core/frame.h"

#define PATIENCE_MS 100
#define IMPATIENCE_NS 1000000000u

static const char *const level_names[] = { "debug", "info", "warn", "error" };

/* Set once at start, before anything runs beside; `lost` alone changes later. */
static enum mill_log_level threshold = MILL_LOG_INFO;
static enum mill_log_format line_format = MILL_LOG_TEXT;
static int output = STDERR_FILENO;
static uint64_t lost;

/*
 * A pipe nobody reads must not stop the work. O_NONBLOCK on the inherited descriptor would change
 * it for whoever else holds it, so a pipe is opened once more for ourselves.
 */
static int open_output(void)
{
	struct stat status;
	if (fstat(STDERR_FILENO, &status) != 0 || !S_ISFIFO(status.st_mode))
		return STDERR_FILENO;
	int fd = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_CLOEXEC);
	return fd < 0 ? STDERR_FILENO : fd;
}

void mill_log_setup(enum mill_log_level level, enum mill_log_format format)
{
	threshold = level;
	line_format = format;
	if (output == STDERR_FILENO)
		output = open_output();
}

enum mill_log_level mill_log_threshold(void)
{
	return threshold;
}

enum mill_log_format mill_log_current_format(void)
{
	return line_format;
}

int mill_log_descriptor(void)
{
	return output;
}

bool mill_log_gate(struct mill_log_gate *gate, unsigned every_secs, uint64_t *skipped)
{
	uint64_t now = mill_clock_ns();
	if (gate->opened_ns != 0 && now - gate->opened_ns < (uint64_t)every_secs * 1000000000u) {
		gate->held_back++;
		return false;
	}
	gate->opened_ns = now;
	*skipped = gate->held_back;
	gate->held_back = 0;
	return true;
}

bool mill_log_gates(struct mill_log_gates *gates, const char *text, size_t len, unsigned every_secs,
                    uint64_t *skipped)
{
	uint64_t digest = mill_digest_more(MILL_DIGEST_BEGIN, text, len), now = mill_clock_ns();
	size_t found = MILL_LOG_GATES;
	for (size_t i = 0; i < MILL_LOG_GATES; i++) {
		const struct mill_log_gate *gate = &gates->places[i].gate;
		if (gate->opened_ns != 0 && gates->places[i].digest == digest) {
			found = i;
			break;
		}
		/* One whose time has passed can be another text's. */
		if (gate->opened_ns == 0 ||
		    now - gate->opened_ns >= (uint64_t)every_secs * 1000000000u)
			found = i;
	}
	if (found == MILL_LOG_GATES) {
		gates->held_back++;
		return false;
	}
	if (gates->places[found].digest != digest) {
		gates->held_back += gates->places[found].gate.held_back;
		gates->places[found].gate = (struct mill_log_gate){ 0 };
		gates->places[found].digest = digest;
	}
	if (!mill_log_gate(&gates->places[found].gate, every_secs, skipped))
		return false;
	*skipped += gates->held_back;
	gates->held_back = 0;
	return true;
}

/* The escapes that JSON asks for; they serve the quoted text form as well. */
static void append_escaped(struct mill_buffer *line, const char *text, size_t len)
{
	for (size_t i = 0; i < len; i++) {
		unsigned char c = (unsigned char)text[i];
		const char *named = c == '"'    ? "\\\""
		                    : c == '\\' ? "\\\\"
		                    : c == '\n' ? "\\n"
		                    : c == '\t' ? "\\t"
		                    : c == '\r' ? "\\r"
		                                : NULL;
		if (named != NULL) {
			mill_buffer_bytes(line, named, 2);
		} else if (c < 0x20 || c == 0x7F) {
			char code[7];
			snprintf(code, sizeof(code), "\\u%04x", c);
			mill_buffer_bytes(line, code, 6);
		} else {
			mill_buffer_bytes(line, text + i, 1);
		}
	}
}

static bool needs_quotes(const char *text, size_t len)
{
	if (len == 0)
		return true;
	for (size_t i = 0; i < len; i++) {
		unsigned char c = (unsigned char)text[i];
		if (c <= ' ' || c == '"' || c == '=' || c == '\\' || c == 0x7F)
			return true;
	}
	return false;
}

/* Its value as text; a number is written to `digits`. Without data: it is to be left out. */
static struct mill_span value_of(const struct mill_field *field, char digits[40])
{
	if (field->kind == MILL_FIELD_INT) {
		int len = snprintf(digits, 40, "%lld", (long long)field->integer);
		return (struct mill_span){ digits, (size_t)len };
	}
	if (field->kind == MILL_FIELD_NUMBER) {
		int len = snprintf(digits, 40, "%.6g", isfinite(field->number) ? field->number : 0);
		return (struct mill_span){ digits, (size_t)len };
	}
	if (field->text == NULL)
		return MILL_SPAN_NONE;
	return (struct mill_span){ field->text, field->text_len == SIZE_MAX ? strlen(field->text)
		                                                            : field->text_len };
}

static void append_field(struct mill_buffer *line, const struct mill_field *field)
{
	char digits[40];
	struct mill_span value = value_of(field, digits);
	const char *text = value.data;
	size_t len = value.len;
	if (text == NULL)
		return;
	bool json = line_format == MILL_LOG_JSON;
	bool quoted = field->kind == MILL_FIELD_TEXT && (json || needs_quotes(text, len));
	mill_buffer_text(line, json ? ",\"" : " ");
	mill_buffer_text(line, field->name);
	mill_buffer_text(line, json ? "\":" : "=");
	if (quoted)
		mill_buffer_text(line, "\"");
	if (field->kind == MILL_FIELD_TEXT)
		append_escaped(line, text, len);
	else
		mill_buffer_bytes(line, text, len);
	if (quoted)
		mill_buffer_text(line, "\"");
}

/* ---- for a person at a terminal ------------------------------------------------------------ */

/* As it is, but for what a terminal would obey; further lines are indented. */
static void append_readable(struct mill_buffer *line, struct mill_span value)
{
	for (size_t i = 0; i < value.len; i++) {
		const char *at = value.data + i;
		if (*at == '\n')
			mill_buffer_text(line, "\n    ");
		else if (*at == '\t')
			mill_buffer_text(line, "  ");
		else if ((unsigned char)*at < 0x20 || *at == 0x7F)
			append_escaped(line, at, 1);
		else
			mill_buffer_bytes(line, at, 1);
	}
}

enum place { FIRST, IN_LINE, LAST_IN_LINE, BELOW };

/* What a person looks for comes first, what is there to be copied last, and tracebacks below. */
static enum place place_of(const char *event, const struct mill_field *field)
{
	char digits[40];
	struct mill_span value = value_of(field, digits);
	if (strcmp(event, "log") == 0 && strcmp(field->name, "text") == 0)
		return FIRST;
	if (strcmp(field->name, "message_id") == 0)
		return LAST_IN_LINE;
	return value.data != NULL && memchr(value.data, '\n', value.len) != NULL ? BELOW : IN_LINE;
}

static void append_fields(struct mill_buffer *line, const char *event,
                          const struct mill_field *fields, enum place place)
{
	char digits[40];
	for (const struct mill_field *field = fields; field->kind != MILL_FIELD_END; field++) {
		if (place_of(event, field) != place)
			continue;
		if (place == BELOW) {
			mill_buffer_text(line, "\n    ");
			mill_buffer_text(line, field->name);
			mill_buffer_text(line, ": ");
		}
		if (place == BELOW || place == FIRST)
			append_readable(line, value_of(field, digits));
		else
			append_field(line, field);
	}
}

static void append_for_person(struct mill_buffer *line, enum mill_log_level level,
                              const char *event, const struct mill_field *fields)
{
	time_t now = time(NULL);
	struct tm local;
	char clock[16];
	strftime(clock, sizeof(clock), "%H:%M:%S ", localtime_r(&now, &local));
	mill_buffer_text(line, clock);
	if (level != MILL_LOG_INFO) {
		mill_buffer_text(line, level_names[level]);
		mill_buffer_text(line, " ");
	}
	if (strcmp(event, "log") != 0)
		mill_buffer_text(line, event);
	append_fields(line, event, fields, FIRST);
	append_fields(line, event, fields, IN_LINE);
	append_fields(line, event, fields, LAST_IN_LINE);
	append_fields(line, event, fields, BELOW);
}

/* ---- writing ------------------------------------------------------------------------------- */

static void append_for_program(struct mill_buffer *line, enum mill_log_level level,
                               const char *event, const struct mill_field *fields)
{
	bool json = line_format == MILL_LOG_JSON;
	char time[25];
	mill_clock_text(time);
	mill_buffer_text(line, json ? "{\"time\":\"" : "time=");
	mill_buffer_text(line, time);
	mill_buffer_text(line, json ? "\",\"level\":\"" : " level=");
	mill_buffer_text(line, level_names[level]);
	mill_buffer_text(line, json ? "\",\"event\":\"" : " event=");
	mill_buffer_text(line, event);
	if (json)
		mill_buffer_text(line, "\"");
	for (const struct mill_field *field = fields; field->kind != MILL_FIELD_END; field++)
		append_field(line, field);
}

/*
 * A reader that is only slow is waited for, a moment. One that does not read at all costs that
 * moment once a second, not once a line: it must not stop the work.
 */
static bool output_is_ready(void)
{
	static uint64_t impatient_until;
	uint64_t now = mill_clock_ns();
	struct pollfd ready = { .fd = output, .events = POLLOUT };
	if (poll(&ready, 1, now < impatient_until ? 0 : PATIENCE_MS) != 0)
		return true; /* an error too: the write tells */
	if (now >= impatient_until)
		impatient_until = now + IMPATIENCE_NS;
	return false;
}

/* One write per line, so that lines of several processes do not mix. */
static bool write_line(const struct mill_buffer *line)
{
	if (!output_is_ready())
		return false;
	ssize_t written;
	do {
		written = write(output, line->data, line->len);
	} while (written < 0 && errno == EINTR);
	return written >= 0;
}

void mill_log_write(enum mill_log_level level, const char *event, const struct mill_field *fields)
{
	if (level < threshold)
		return;
	struct mill_buffer line = { 0 };
	if (line_format == MILL_LOG_TERMINAL)
		append_for_person(&line, level, event, fields);
	else
		append_for_program(&line, level, event, fields);
	if (lost > 0)
		append_field(&line, &MILL_INT("lines_lost", lost));
	mill_buffer_text(&line, line_format == MILL_LOG_JSON ? "}\n" : "\n");
	lost = write_line(&line) ? 0 : lost + 1;
	mill_buffer_free(&line);
}
