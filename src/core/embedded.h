/*
 * The files that the build puts into the program: the SQL migrations and the Lua library, so that
 * the program needs no file beside itself. The arrays are generated (script/embed.cmake); this
 * header only declares them. It knows nothing of what the files mean. Used by the runtime process
 * (migrations) and by executors (Lua modules).
 */
#pragma once

#include <stddef.h>

/* One file. */
struct mill_embedded {
	/* SQL: the base name, `0001_ledger.sql`. Lua: the module's name, `tidemill.json`. */
	const char *name;
	/* The bytes as they are in the source tree. One NUL follows data[len - 1], so text can be
	 * used as a C string. */
	const unsigned char *data;
	/* Bytes, without that NUL. */
	size_t len;
};

/* The files of sql/, by name in byte order, and how many. */
extern const struct mill_embedded mill_embedded_sql[];
extern const size_t mill_embedded_sql_count;

/* The files of lua/tidemill/, by module name in byte order, and how many. */
extern const struct mill_embedded mill_embedded_lua[];
extern const size_t mill_embedded_lua_count;
