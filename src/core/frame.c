/* Frames on the wire: see frame.h. */
#include "core/frame.h"

void mill_buffer_free(struct mill_buffer *buffer)
{
	free(buffer->data);
	*buffer = (struct mill_buffer){ 0 };
}

void mill_buffer_reserve(struct mill_buffer *buffer, size_t len)
{
	if (buffer->cap - buffer->len >= len)
		return;
	size_t cap = buffer->cap ? buffer->cap : 256;
	while (cap - buffer->len < len)
		cap *= 2;
	buffer->data = mill_realloc(buffer->data, cap);
	buffer->cap = cap;
}

void mill_buffer_bytes(struct mill_buffer *buffer, const void *bytes, size_t len)
{
	if (len == 0)
		return;
	mill_buffer_reserve(buffer, len);
	memcpy(buffer->data + buffer->len, bytes, len);
	buffer->len += len;
}

void mill_buffer_text(struct mill_buffer *buffer, const char *text)
{
	mill_buffer_bytes(buffer, text, strlen(text));
}

void mill_buffer_consume(struct mill_buffer *buffer, size_t len)
{
	MILL_ASSERT(len <= buffer->len);
	buffer->len -= len;
	if (buffer->len > 0 && len > 0)
		memmove(buffer->data, buffer->data + len, buffer->len);
}

char *mill_span_dup(struct mill_span span)
{
	return span.data == NULL ? NULL : mill_strndup(span.data, span.len);
}

void mill_write_u8(struct mill_buffer *buffer, uint8_t value)
{
	mill_buffer_bytes(buffer, &value, sizeof(value));
}

void mill_write_u32(struct mill_buffer *buffer, uint32_t value)
{
	mill_buffer_bytes(buffer, &value, sizeof(value));
}

void mill_write_u64(struct mill_buffer *buffer, uint64_t value)
{
	mill_buffer_bytes(buffer, &value, sizeof(value));
}

void mill_write_i64(struct mill_buffer *buffer, int64_t value)
{
	mill_buffer_bytes(buffer, &value, sizeof(value));
}

void mill_write_double(struct mill_buffer *buffer, double value)
{
	mill_buffer_bytes(buffer, &value, sizeof(value));
}

#define SPAN_ABSENT UINT32_MAX

void mill_write_span(struct mill_buffer *buffer, struct mill_span span)
{
	MILL_ASSERT(span.len < SPAN_ABSENT);
	mill_write_u32(buffer, span.data == NULL ? SPAN_ABSENT : (uint32_t)span.len);
	if (span.data != NULL)
		mill_buffer_bytes(buffer, span.data, span.len);
}

static void read_bytes(struct mill_reader *reader, void *value, size_t len)
{
	if (reader->failed || (size_t)(reader->end - reader->at) < len) {
		reader->failed = true;
		memset(value, 0, len);
		return;
	}
	memcpy(value, reader->at, len);
	reader->at += len;
}

uint8_t mill_read_u8(struct mill_reader *reader)
{
	uint8_t value;
	read_bytes(reader, &value, sizeof(value));
	return value;
}

uint32_t mill_read_u32(struct mill_reader *reader)
{
	uint32_t value;
	read_bytes(reader, &value, sizeof(value));
	return value;
}

uint64_t mill_read_u64(struct mill_reader *reader)
{
	uint64_t value;
	read_bytes(reader, &value, sizeof(value));
	return value;
}

int64_t mill_read_i64(struct mill_reader *reader)
{
	int64_t value;
	read_bytes(reader, &value, sizeof(value));
	return value;
}

double mill_read_double(struct mill_reader *reader)
{
	double value;
	read_bytes(reader, &value, sizeof(value));
	return value;
}

struct mill_span mill_read_span(struct mill_reader *reader)
{
	uint32_t len = mill_read_u32(reader);
	if (reader->failed || len == SPAN_ABSENT)
		return MILL_SPAN_NONE;
	if ((size_t)(reader->end - reader->at) < len) {
		reader->failed = true;
		return MILL_SPAN_NONE;
	}
	struct mill_span span = { reader->at, len };
	reader->at += len;
	return span;
}

bool mill_reader_finished(const struct mill_reader *reader)
{
	return !reader->failed && reader->at == reader->end;
}

size_t mill_frame_begin(struct mill_buffer *buffer, enum mill_frame_type type)
{
	size_t at = buffer->len;
	mill_write_u32(buffer, 0);
	mill_write_u8(buffer, MILL_FRAME_VERSION);
	mill_write_u8(buffer, (uint8_t)type);
	return at;
}

void mill_frame_end(struct mill_buffer *buffer, size_t at)
{
	size_t len = buffer->len - at - sizeof(uint32_t);
	MILL_ASSERT(len <= MILL_FRAME_MAX);
	uint32_t value = (uint32_t)len;
	memcpy(buffer->data + at, &value, sizeof(value));
}

int64_t mill_frame_parse(const char *data, size_t len, struct mill_frame *frame,
                         struct mill_err *err)
{
	uint32_t rest;
	if (len < sizeof(rest))
		return 0;
	memcpy(&rest, data, sizeof(rest));
	if (rest < MILL_FRAME_HEADER - sizeof(rest) || rest > MILL_FRAME_MAX)
		return mill_err_set(err, MILL_ERR_PROTOCOL, "a frame of %u bytes is not possible",
		                    rest);
	if (len < MILL_FRAME_HEADER)
		return 0;
	if ((uint8_t)data[4] != MILL_FRAME_VERSION)
		return mill_err_set(err, MILL_ERR_PROTOCOL,
		                    "a frame of version %u, this program speaks %u",
		                    (uint8_t)data[4], MILL_FRAME_VERSION);
	size_t whole = sizeof(rest) + rest;
	if (len < whole)
		return 0;
	frame->type = (uint8_t)data[5];
	frame->body = (struct mill_reader){ .at = data + MILL_FRAME_HEADER, .end = data + whole };
	return (int64_t)whole;
}
