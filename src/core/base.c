/* Assertions and allocation: see base.h. */
#include "core/base.h"

#include <stdarg.h>
#include <stdio.h>

void mill_assert_failed(const char *condition, const char *file, int line)
{
	fprintf(stderr, "level=fatal event=assertion_failed at=%s:%d condition=\"%s\"\n", file,
	        line, condition);
	abort();
}

static void *checked(void *memory)
{
	if (memory == NULL) {
		fputs("level=fatal event=out_of_memory\n", stderr);
		abort();
	}
	return memory;
}

void *mill_alloc(size_t size)
{
	return checked(malloc(size ? size : 1));
}

void *mill_calloc(size_t count, size_t size)
{
	return checked(calloc(count ? count : 1, size ? size : 1));
}

void *mill_realloc(void *memory, size_t size)
{
	return checked(realloc(memory, size ? size : 1));
}

char *mill_strdup(const char *text)
{
	return mill_strndup(text, strlen(text));
}

char *mill_strndup(const char *text, size_t len)
{
	char *copy = mill_alloc(len + 1);
	memcpy(copy, text, len);
	copy[len] = '\0';
	return copy;
}

char *mill_sprintf(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	int len = vsnprintf(NULL, 0, format, args);
	va_end(args);
	MILL_ASSERT(len >= 0);
	char *text = mill_alloc((size_t)len + 1);
	va_start(args, format);
	vsnprintf(text, (size_t)len + 1, format, args);
	va_end(args);
	return text;
}
