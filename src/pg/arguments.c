/* Arguments as one run of bytes: see arguments.h. Each is a span with a NUL at its end. */
#include "pg/arguments.h"

void mill_arguments_add(struct mill_buffer *out, struct mill_span text)
{
	if (text.data == NULL) {
		mill_write_span(out, text);
		return;
	}
	mill_write_u32(out, (uint32_t)(text.len + 1));
	mill_buffer_bytes(out, text.data, text.len);
	mill_write_u8(out, 0);
}

static bool is_text(struct mill_span span)
{
	return span.len > 0 && memchr(span.data, 0, span.len) == span.data + span.len - 1;
}

int mill_arguments_read(struct mill_span encoded, struct mill_arguments *arguments)
{
	*arguments = (struct mill_arguments){ 0 };
	struct mill_reader reader = { encoded.data, encoded.data + encoded.len, false };
	int room = 0;
	while (reader.at != reader.end) {
		struct mill_span span = mill_read_span(&reader);
		if (reader.failed || arguments->count == MILL_ARGUMENTS_MAX ||
		    (span.data != NULL && !is_text(span))) {
			mill_arguments_free(arguments);
			return -1;
		}
		if (arguments->count == room) {
			room = room ? room * 2 : 8;
			arguments->list = mill_realloc(arguments->list,
			                               (size_t)room * sizeof(arguments->list[0]));
		}
		arguments->list[arguments->count++] = span.data;
	}
	return 0;
}

void mill_arguments_free(struct mill_arguments *arguments)
{
	free(arguments->list);
	*arguments = (struct mill_arguments){ 0 };
}
