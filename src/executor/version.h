/*
 * Which LuaJIT the program was built with and runs. Apart from the state itself, so that layers
 * that do not see lua.h can ask. Any process.
 */
#pragma once

/* Such as "2.1.0-beta3"; a constant. */
const char *mill_vm_version(void);
