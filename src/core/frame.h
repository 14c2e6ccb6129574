/*
 * Frames: what the runtime and its executors say to each other over a socket pair.
 *
 * A frame is a header (u32 length of what follows, u8 protocol version, u8 type) and a body of
 * fields in fixed order: integers in host order, since both ends are one program on one machine;
 * texts with a u32 length before them, any bytes inside. Many frames share one write.
 *
 *     runtime → executor    LOAD, DELIVER, CANCEL, REPLY, DRAIN, PING
 *     executor → runtime    FILE, MANIFEST, LOAD_ERROR, OUTCOME, REQUEST, BYE
 *
 * A reader never trusts the other end: every length is checked, and a frame that cannot be parsed
 * is an error for the caller to act upon (the runtime kills the executor that sent it).
 */
#pragma once

#include "core/err.h"

#define MILL_FRAME_VERSION 1
#define MILL_FRAME_HEADER 6
#define MILL_FRAME_MAX                                                                             \
	(256u * 1024 * 1024) /* longer is garbage: payloads end at max_payload_bytes */

enum mill_frame_type {
	MILL_FRAME_LOAD = 1,
	MILL_FRAME_DELIVER,
	MILL_FRAME_CANCEL,
	MILL_FRAME_REPLY,
	MILL_FRAME_DRAIN,
	MILL_FRAME_PING,
	MILL_FRAME_MANIFEST = 64,
	MILL_FRAME_LOAD_ERROR,
	MILL_FRAME_OUTCOME,
	MILL_FRAME_REQUEST,
	MILL_FRAME_BYE,
	MILL_FRAME_FILE,
};

/* A growing run of bytes. Zero-initialised is empty; the owner frees it. */
struct mill_buffer {
	char *data;
	size_t len, cap;
};

void mill_buffer_free(struct mill_buffer *buffer);
/* Room for `len` more bytes at `data + buffer->len`. */
void mill_buffer_reserve(struct mill_buffer *buffer, size_t len);
void mill_buffer_bytes(struct mill_buffer *buffer, const void *bytes, size_t len);
void mill_buffer_text(struct mill_buffer *buffer, const char *text); /* no length, no NUL */
/* Drop the first `len` bytes. */
void mill_buffer_consume(struct mill_buffer *buffer, size_t len);

/* A text that lies in somebody else's memory. `data` NULL means absent, which is not empty. */
struct mill_span {
	const char *data;
	size_t len;
};
#define MILL_SPAN(text) ((struct mill_span){ (text), strlen(text) })
#define MILL_SPAN_NONE ((struct mill_span){ NULL, 0 })

/* A new NUL-terminated copy; NULL for an absent span. */
char *mill_span_dup(struct mill_span span);

/* Fields, written one after the other. */
void mill_write_u8(struct mill_buffer *buffer, uint8_t value);
void mill_write_u32(struct mill_buffer *buffer, uint32_t value);
void mill_write_u64(struct mill_buffer *buffer, uint64_t value);
void mill_write_i64(struct mill_buffer *buffer, int64_t value);
void mill_write_double(struct mill_buffer *buffer, double value);
void mill_write_span(struct mill_buffer *buffer, struct mill_span span);

/*
 * Fields, read in the same order. Past the end, or where a length leads past the end, `failed` is
 * set and zeros come back: check it once after the last field.
 */
struct mill_reader {
	const char *at, *end;
	bool failed;
};
uint8_t mill_read_u8(struct mill_reader *reader);
uint32_t mill_read_u32(struct mill_reader *reader);
uint64_t mill_read_u64(struct mill_reader *reader);
int64_t mill_read_i64(struct mill_reader *reader);
double mill_read_double(struct mill_reader *reader);
struct mill_span mill_read_span(struct mill_reader *reader);
/* All was read and nothing is left over. */
bool mill_reader_finished(const struct mill_reader *reader);

/*
 * Write a frame: begin, the fields, end.
 *
 *     size_t at = mill_frame_begin(&out, MILL_FRAME_DRAIN);
 *     mill_frame_end(&out, at);
 */
size_t mill_frame_begin(struct mill_buffer *buffer, enum mill_frame_type type);
void mill_frame_end(struct mill_buffer *buffer, size_t at);

struct mill_frame {
	enum mill_frame_type type;
	struct mill_reader body;
};

/*
 * Parse the first frame of `len` bytes. Returns its whole size, 0 when more bytes are needed, −1
 * when this is no frame. The body points into `data`.
 */
int64_t mill_frame_parse(const char *data, size_t len, struct mill_frame *frame,
                         struct mill_err *err);
