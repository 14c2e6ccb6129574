/*
 * A digest of bytes: FNV-1a, 64 bit. It tells apart what differs by accident, not what an enemy
 * forged.
 *
 * Pure; both processes.
 */
#pragma once

#include "core/base.h"

#define MILL_DIGEST_BEGIN 0xcbf29ce484222325u

/* Go on from a digest of what came before. */
static inline uint64_t mill_digest_more(uint64_t digest, const void *bytes, size_t len)
{
	const unsigned char *at = bytes;
	for (size_t i = 0; i < len; i++)
		digest = (digest ^ at[i]) * 0x100000001b3u;
	return digest;
}

/* Of a file's content; never 0, which stands for a file that is not there. */
static inline uint64_t mill_digest_content(const void *bytes, size_t len)
{
	uint64_t digest = mill_digest_more(MILL_DIGEST_BEGIN, bytes, len);
	return digest ? digest : 1;
}
