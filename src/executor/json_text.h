/*
 * What reader and writer of JSON both look for in a string, fast: where plain bytes end, and
 * whether a multi-byte character is valid. Included by json.c and json_write.c only.
 */
#pragma once

#include "core/base.h"

#define EVERY_BYTE(value) (0x0101010101010101ull * (value))

/* The high bit of each byte that is zero, exact up to and including the lowest such byte. */
static inline uint64_t zero_bytes(uint64_t word)
{
	return (word - EVERY_BYTE(1)) & ~word & EVERY_BYTE(0x80);
}

/*
 * The first byte in [at, end) that is not plain, or `end`. Not plain are control characters, `"`,
 * `\` and bytes from 0x80 on: all that a JSON string treats specially.
 */
static inline const char *plain_end(const char *at, const char *end)
{
	while (end - at >= 8) {
		uint64_t word;
		memcpy(&word, at, 8);
		uint64_t special = ((word - EVERY_BYTE(0x20)) & ~word) | word;
		special = (special & EVERY_BYTE(0x80)) | zero_bytes(word ^ EVERY_BYTE('"')) |
		          zero_bytes(word ^ EVERY_BYTE('\\'));
		if (special == 0) {
			at += 8;
			continue;
		}
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
		return at + (__builtin_ctzll(special) >> 3);
#else
		break; /* a borrow may have marked bytes before the first special one */
#endif
	}
	while (at < end && (unsigned char)*at >= 0x20 && (unsigned char)*at < 0x80 && *at != '"' &&
	       *at != '\\')
		at++;
	return at;
}

/*
 * The length of the UTF-8 sequence at `text`, whose first byte is ≥ 0x80; 0 when it is invalid:
 * overlong, cut off by `end`, a surrogate, or above U+10FFFF. Postgres refuses just those.
 */
static inline size_t utf8_sequence(const char *text, const char *end)
{
	const unsigned char *at = (const unsigned char *)text;
	size_t len = (size_t)(end - text);
#define CONTINUES(i) ((at[i] & 0xC0) == 0x80)
	if (at[0] < 0xC2)
		return 0;
	if (at[0] < 0xE0)
		return len >= 2 && CONTINUES(1) ? 2 : 0;
	if (at[0] < 0xF0) {
		if (len < 3 || !CONTINUES(1) || !CONTINUES(2))
			return 0;
		bool overlong = at[0] == 0xE0 && at[1] < 0xA0;
		bool surrogate = at[0] == 0xED && at[1] >= 0xA0;
		return overlong || surrogate ? 0 : 3;
	}
	if (at[0] > 0xF4 || len < 4 || !CONTINUES(1) || !CONTINUES(2) || !CONTINUES(3))
		return 0;
	bool overlong = at[0] == 0xF0 && at[1] < 0x90;
	bool beyond = at[0] == 0xF4 && at[1] >= 0x90;
	return overlong || beyond ? 0 : 4;
#undef CONTINUES
}
