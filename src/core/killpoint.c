/* Kill points for tests: see killpoint.h. */
#include "core/killpoint.h"

#ifdef MILL_KILL_POINTS

#include <signal.h>
#include <stdlib.h>
#include <string.h>

void mill_killpoint_pass(const char *name)
{
	static unsigned long passed;
	const char *at = getenv("TIDEMILL_KILL_AT");
	size_t len = strlen(name);
	if (at == NULL || strncmp(at, name, len) != 0 || (at[len] != '\0' && at[len] != ':'))
		return;
	unsigned long wanted = at[len] == ':' ? strtoul(at + len + 1, NULL, 10) : 1;
	if (++passed >= wanted)
		raise(SIGKILL);
}

#endif
