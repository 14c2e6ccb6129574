/*
 * The files that the build puts into the program: the SQL migrations, the Lua library and what a
 * new app begins with, so that the program needs no file beside itself. The arrays are generated
 * (script/embed.cmake); this header only declares them. It knows nothing of what the files mean.
 * Used by the runtime process (migrations), by executors (Lua modules) and by commands.
 */
#pragma once

#include <stddef.h>

/* One file. */
struct mill_embedded {
	/* SQL: the base name, `0001_ledger.sql`. Lua: the module's name, `tidemill.json`. Others:
	 * the path, `handlers/hello.lua`. */
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

/* The files of template/, by path in byte order, and how many. */
extern const struct mill_embedded mill_embedded_template[];
extern const size_t mill_embedded_template_count;

/* The files of lua/tidemill/_meta/, by path in byte order, and how many. */
extern const struct mill_embedded mill_embedded_annotations[];
extern const size_t mill_embedded_annotations_count;
