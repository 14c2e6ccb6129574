/* Clocks and random numbers: see clock.h. */
#include "core/clock.h"

#include <errno.h>
#include <stdio.h>
#include <sys/random.h>
#include <time.h>

uint64_t mill_clock_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void mill_clock_text(char text[25])
{
	struct timespec now;
	struct tm utc;
	clock_gettime(CLOCK_REALTIME, &now);
	gmtime_r(&now.tv_sec, &utc);
	char second[20];
	strftime(second, sizeof(second), "%Y-%m-%dT%H:%M:%S", &utc);
	snprintf(text, 25, "%s.%03uZ", second, (unsigned)(now.tv_nsec / 1000000) % 1000);
}

void mill_clock_random_bytes(void *bytes, size_t len)
{
	char *at = bytes;
	while (len > 0) {
		ssize_t got = getrandom(at, len, 0);
		if (got < 0) {
			MILL_ASSERT(errno == EINTR);
			continue;
		}
		at += got;
		len -= (size_t)got;
	}
}

double mill_clock_random(void)
{
	uint64_t bits;
	mill_clock_random_bytes(&bits, sizeof(bits));
	return (double)(bits >> 11) / (double)(1ull << 53);
}
