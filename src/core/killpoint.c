/* Kill points for tests: see killpoint.h. */
#include "core/killpoint.h"

#ifdef MILL_KILL_POINTS

#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Does `at`, `NAME` or `NAME:COUNT`, mean this passing? */
static bool is_reached(const char *at, const char *name, unsigned long *passed)
{
	size_t len = strlen(name);
	if (at == NULL || strncmp(at, name, len) != 0 || (at[len] != '\0' && at[len] != ':'))
		return false;
	unsigned long wanted = at[len] == ':' ? strtoul(at + len + 1, NULL, 10) : 1;
	return ++*passed == wanted;
}

void mill_killpoint_pass(const char *name)
{
	static unsigned long kill_passed, stop_passed;
	if (is_reached(getenv("TIDEMILL_KILL_AT"), name, &kill_passed))
		raise(SIGKILL);
	if (is_reached(getenv("TIDEMILL_STOP_AT"), name, &stop_passed))
		raise(SIGSTOP);
}

#endif
