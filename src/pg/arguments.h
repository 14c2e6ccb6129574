/*
 * The arguments $1 … of a statement that a handler or a script wrote: texts, or SQL NULL.
 *
 * They are encoded where the language's values are known and decoded where libpq takes them; in
 * between they are one run of bytes. Knows no value's meaning: the server infers the types.
 */
#pragma once

#include "core/frame.h"

#define MILL_ARGUMENTS_MAX 65535 /* of the protocol */

/* Append one argument. An absent span is SQL NULL. A text must hold no NUL byte. */
void mill_arguments_add(struct mill_buffer *out, struct mill_span text);

/* As libpq takes them. The texts lie in what was read; the list is freed by the caller. */
struct mill_arguments {
	const char **list; /* NULL: none */
	int count;
};

/* Decode. −1: these bytes were not written by mill_arguments_add. */
int mill_arguments_read(struct mill_span encoded, struct mill_arguments *arguments);
void mill_arguments_free(struct mill_arguments *arguments);
