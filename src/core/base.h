/*
 * What every file may rely on: standard headers, assertions, allocation, container_of.
 *
 * Must not know anything of the program. Both processes.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MILL_PRINTF(format_at, args_at) __attribute__((format(printf, format_at, args_at)))
#define MILL_NORETURN __attribute__((noreturn))
#define MILL_COUNT(array) (sizeof(array) / sizeof((array)[0]))

#define mill_container_of(pointer, type, member)                                                   \
	((type *)((char *)(pointer)-offsetof(type, member)))

/*
 * A programmer's mistake: prints where and aborts, in every build. Operating conditions (a lost
 * connection, a full disk, bad input) are errors instead: see err.h.
 */
#define MILL_ASSERT(condition)                                                                     \
	do {                                                                                       \
		if (!(condition))                                                                  \
			mill_assert_failed(#condition, __FILE__, __LINE__);                        \
	} while (0)

MILL_NORETURN void mill_assert_failed(const char *condition, const char *file, int line);

/*
 * Allocation that cannot fail: out of memory aborts the process. The runtime's memory is bounded by
 * configuration, so running out is not a condition it can do anything about. Freed with free().
 */
void *mill_alloc(size_t size);
void *mill_calloc(size_t count, size_t size);
void *mill_realloc(void *memory, size_t size);
char *mill_strdup(const char *text);
char *mill_strndup(const char *text, size_t len);
MILL_PRINTF(1, 2) char *mill_sprintf(const char *format, ...);
