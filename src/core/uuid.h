/*
 * UUIDs: new ones of version 7, which sort by the time of their making, and their text form.
 *
 * Both processes.
 */
#pragma once

#include "core/base.h"

/*
 * A new UUIDv7 into 16 bytes, most significant first: 48 bits of Unix milliseconds, 12 bits of the
 * millisecond's fraction, the rest random. The wall clock is read; nothing is decided by it.
 */
void mill_uuid_v7(uint8_t id[16]);

/* The 36 characters of the usual form, lower case, and a NUL. */
void mill_uuid_text(const uint8_t id[16], char text[37]);

/*
 * Reads the usual form, 8-4-4-4-12 hexadecimal digits of either case. Returns 0, or -1 when `text`
 * is anything else; `id` is then undefined.
 */
int mill_uuid_parse(const char *text, size_t len, uint8_t id[16]);
