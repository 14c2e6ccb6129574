/*
 * The private Postgres of `tidemill dev`: made, started, found again and stopped.
 *
 * Blocking; runtime process, before and after its loop turns. Knows nothing of queues.
 */
#pragma once

#include "core/err.h"

struct mill_devdb;

/*
 * Make sure a private server for the app in folder `dir` runs, creating it in `dir/.tidemill` when
 * it is not there yet. A server left running by a killed `dev` is taken over; stale files are
 * recovered. A second `dev` in the folder is refused (MILL_ERR_USAGE).
 */
int mill_devdb_open(const char *dir, struct mill_devdb **devdb, struct mill_err *err);

/* Its conninfo, and where its data lies, for people. Valid until close. */
const char *mill_devdb_dsn(const struct mill_devdb *devdb);
const char *mill_devdb_folder(const struct mill_devdb *devdb);
/* The folders that all of it is in: `.tidemill`, and one elsewhere or NULL. */
const char *mill_devdb_own_folder(const struct mill_devdb *devdb);
const char *mill_devdb_outer_folder(const struct mill_devdb *devdb);

/*
 * Does it still run? To be called once a second, never waits long: a server that has ended is
 * started again, at the same address, which a later call sees through. −1: its folder is gone, or
 * it does not start.
 */
int mill_devdb_watch(struct mill_devdb *devdb, struct mill_err *err);

/* Stop the server (waits until it has ended) and free. */
void mill_devdb_close(struct mill_devdb *devdb);

/*
 * The conninfo of a private server that runs for `dir`, a new string for the caller to free, or
 * NULL when none does. `*closed` is NULL, or a new string that says, for people, what this account
 * may not look at.
 */
char *mill_devdb_find(const char *dir, char **closed);
