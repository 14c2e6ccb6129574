/* UUIDs: see uuid.h. */
#include "core/uuid.h"

#include <time.h>

#include "core/clock.h"

void mill_uuid_v7(uint8_t id[16])
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	uint64_t ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
	uint32_t fraction = (uint32_t)((uint64_t)now.tv_nsec % 1000000 * 4096 / 1000000);
	for (int i = 0; i < 6; i++)
		id[i] = (uint8_t)(ms >> (40 - 8 * i));
	id[6] = (uint8_t)(0x70 | fraction >> 8);
	id[7] = (uint8_t)fraction;
	mill_clock_random_bytes(id + 8, 8);
	id[8] = (uint8_t)(0x80 | (id[8] & 0x3F));
}

static bool dash_follows(int byte)
{
	return byte == 3 || byte == 5 || byte == 7 || byte == 9;
}

void mill_uuid_text(const uint8_t id[16], char text[37])
{
	static const char hex[] = "0123456789abcdef";
	char *at = text;
	for (int i = 0; i < 16; i++) {
		*at++ = hex[id[i] >> 4];
		*at++ = hex[id[i] & 15];
		if (dash_follows(i))
			*at++ = '-';
	}
	*at = '\0';
}

static int hex_value(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	if (c >= 'A' && c <= 'F')
		return c - 'A' + 10;
	return -1;
}

int mill_uuid_parse(const char *text, size_t len, uint8_t id[16])
{
	if (len != 36)
		return -1;
	const char *at = text;
	for (int i = 0; i < 16; i++) {
		int high = hex_value(at[0]), low = hex_value(at[1]);
		if (high < 0 || low < 0)
			return -1;
		id[i] = (uint8_t)(high << 4 | low);
		at += 2;
		if (dash_follows(i) && *at++ != '-')
			return -1;
	}
	return 0;
}
