/*
 * Migrations: bring a schema to the version that this program knows.
 *
 * The numbered files of sql/ are embedded in the program; version N is file N. All that is missing
 * is applied in one transaction under an advisory lock, so two programs that start at once do it
 * once, and one that fails leaves nothing behind. There is no way back to an older version.
 *
 * Blocking; runtime process before its loop turns, and commands. Knows the files' names and
 * numbers, not what is in them.
 */
#pragma once

#include "core/err.h"
#include "pg/queries.h"

struct mill_migrate_options {
	const char *dsn;    /* NULL or "": PG* variables */
	const char *schema; /* plain identifiers, checked here */
	const char *table;
	const char *prefix;
	int max_payload_bytes;
	bool notify;
	int to_version; /* 0: the newest */
};

struct mill_migrate_result {
	int from_version; /* 0: there was nothing */
	int to_version;
};

/* The newest version this program knows. */
int mill_migrate_newest(void);

/*
 * Migrate, and write the settings that the SQL functions follow (prefix, max_payload_bytes, notify)
 * where they differ. Doing it again changes nothing. Needs the owner of the schema's objects, or
 * for a new schema CREATE on the database; when nothing has to change, SELECT on two tables is
 * enough.
 *
 * Bad identifiers and versions are MILL_ERR_CONFIG, a database that cannot be migrated (newer than
 * the program, changed files, something else of that name in the way) is MILL_ERR_DATABASE.
 */
int mill_migrate_run(const struct mill_migrate_options *options, struct mill_migrate_result *result,
                     struct mill_err *err);

/*
 * The SQL that makes a new schema of to_version, to be read or run with psql. The DSN is not used.
 * Returns a new string for the caller to free, or NULL when an option is bad.
 */
char *mill_migrate_print(const struct mill_migrate_options *options, struct mill_err *err);

/*
 * For `migrate = false`: look whether the database can be used as it is. 0 with what was found: our
 * ledger at the newest version, or a plain table that another program made. Otherwise the error
 * says what is wrong and what to run. Changes nothing.
 */
int mill_migrate_check(const struct mill_migrate_options *options, enum mill_shape *shape,
                       struct mill_err *err);
