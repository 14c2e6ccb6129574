/* The version of LuaJIT: see version.h. */
#include "executor/version.h"

#include <luajit.h>

const char *mill_vm_version(void)
{
	/* The macro is "LuaJIT " and the number. */
	return &LUAJIT_VERSION[sizeof("LuaJIT ") - 1];
}
