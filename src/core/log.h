/*
 * Structured log lines on stderr: one write a line, event first, then fields.
 *
 *     mill_log(MILL_LOG_WARN, "lease_lost", MILL_TEXT("topic", topic), MILL_INT("attempt", n));
 *     time=… level=warn event=lease_lost topic=order.paid attempt=3
 *
 * Payloads and passwords are never logged. Both processes; each writes its own lines. A stderr that
 * is closed or full loses lines, never work: the count of lost lines is told when it can be.
 */
#pragma once

#include "core/err.h"

enum mill_log_level { MILL_LOG_DEBUG, MILL_LOG_INFO, MILL_LOG_WARN, MILL_LOG_ERROR };
/* TERMINAL: laid out for reading, a local time, a traceback in lines of its own. */
enum mill_log_format { MILL_LOG_TEXT, MILL_LOG_JSON, MILL_LOG_TERMINAL };

enum mill_field_kind { MILL_FIELD_END, MILL_FIELD_TEXT, MILL_FIELD_INT, MILL_FIELD_NUMBER };

struct mill_field {
	const char *name;
	enum mill_field_kind kind;
	const char *text; /* NULL: the field is left out */
	size_t text_len;  /* SIZE_MAX: text ends with NUL */
	int64_t integer;
	double number;
};

#define MILL_TEXT(field, value)                                                                    \
	((struct mill_field){                                                                      \
	        .name = (field), .kind = MILL_FIELD_TEXT, .text = (value), .text_len = SIZE_MAX })
#define MILL_TEXT_N(field, value, value_len)                                                       \
	((struct mill_field){ .name = (field),                                                     \
	                      .kind = MILL_FIELD_TEXT,                                             \
	                      .text = (value),                                                     \
	                      .text_len = (value_len) })
#define MILL_INT(field, value)                                                                     \
	((struct mill_field){                                                                      \
	        .name = (field), .kind = MILL_FIELD_INT, .integer = (int64_t)(value) })
#define MILL_NUMBER(field, value)                                                                  \
	((struct mill_field){ .name = (field), .kind = MILL_FIELD_NUMBER, .number = (value) })

/* One line. `event` is a snake_case name that never varies; what varies goes into the fields. */
#define mill_log(level, ...) mill_log_pick(level, __VA_ARGS__, MILL_FIELD_LAST)
#define mill_log_pick(level, event, ...)                                                           \
	mill_log_write((level), (event), (const struct mill_field[]){ __VA_ARGS__ })
#define MILL_FIELD_LAST ((struct mill_field){ .kind = MILL_FIELD_END })

/* `fields` ends with one of kind MILL_FIELD_END. */
void mill_log_write(enum mill_log_level level, const char *event, const struct mill_field *fields);

/* Lines below `level` are dropped. Defaults: info, text. Set once at start. */
void mill_log_setup(enum mill_log_level level, enum mill_log_format format);
enum mill_log_level mill_log_threshold(void);
enum mill_log_format mill_log_current_format(void);
/* Where lines are written; never to be closed by others. */
int mill_log_descriptor(void);

/*
 * A gate for events that come in storms: mill_log_gate returns true at most once in `every_secs`,
 * and then `*skipped` says how many were held back since.
 */
struct mill_log_gate {
	uint64_t opened_ns;
	uint64_t held_back;
};
bool mill_log_gate(struct mill_log_gate *gate, unsigned every_secs, uint64_t *skipped);

/*
 * The same for each text by itself: zero-initialised is ready. When more texts than there are
 * places come in `every_secs`, the rest is held back and counted for the next line.
 */
enum { MILL_LOG_GATES = 32 };
struct mill_log_gates {
	struct {
		uint64_t digest; /* of the text; two that share one share the gate */
		struct mill_log_gate gate;
	} places[MILL_LOG_GATES];
	uint64_t held_back;
};
bool mill_log_gates(struct mill_log_gates *gates, const char *text, size_t len, unsigned every_secs,
                    uint64_t *skipped);
