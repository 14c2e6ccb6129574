/*
 * A private Postgres server as a set of programs and files: its programs found, a data folder made,
 * the server started in it, recognised again and stopped.
 *
 * Blocking; runtime process. Knows neither where an app keeps its data nor what is in it (devdb
 * does), and speaks no SQL to it.
 */
#pragma once

#include <limits.h>
#include <sys/types.h>

#include "app/child.h"
#include "core/err.h"

/* The superuser and the database that a new data folder has. */
#define MILL_POSTMASTER_USER "tidemill"
#define MILL_POSTMASTER_DATABASE "tidemill"
#define MILL_POSTMASTER_PORT 5432 /* part of the socket's name only: there is no TCP port */

/*
 * Find the folder with `initdb` and `postgres`: that of pg_config, else the newest installed; with
 * `major` above 0, one of that major version. Put into `bin`. Returns the major version found, or
 * −1: the error says which package to install.
 */
int mill_postmaster_find(int major, char bin[PATH_MAX], struct mill_err *err);

/* The major version that made the data folder `data`, or −1 when it is none. */
int mill_postmaster_data_version(const char *data);

/*
 * Make a data folder: `data` exists, is empty and belongs to the account (NULL: to us). Output of
 * the programs goes to the descriptor `log`. Durable: all is on disk when it returns 0.
 */
int mill_postmaster_create(const char *bin, const struct mill_account *account, const char *data,
                           int log, struct mill_err *err);

struct mill_postmaster {
	pid_t pid;
	bool child; /* ours to reap; false: left by another process of this program */
	bool ready; /* accepts connections */
	int port;
	char socket_folder[PATH_MAX];
};

/* Does a server run in `data`? Fills `found` and returns true when one does. */
bool mill_postmaster_running(const char *data, struct mill_postmaster *found);

/*
 * Start a server in `data`, which listens on a socket in `socket_folder` only, and wait until it
 * accepts connections. Leftovers of a server that was killed are cleared away first.
 */
int mill_postmaster_start(const char *bin, const struct mill_account *account, const char *data,
                          const char *socket_folder, int log, struct mill_postmaster *server,
                          struct mill_err *err);

/*
 * Start it and do not wait: mill_postmaster_running says when it is ready. Leftovers are waited for
 * even so, unless the folder is deserted.
 */
int mill_postmaster_launch(const char *bin, const struct mill_account *account, const char *data,
                           const char *socket_folder, int log, struct mill_postmaster *server,
                           struct mill_err *err);

/* Does no process of any server stand in `data`, which is there? */
bool mill_postmaster_deserted(const char *data);

/* Has the server ended? One that is a child of ours is reaped. */
bool mill_postmaster_ended(const char *data, const struct mill_postmaster *server);

/* Wait until a server that was found accepts connections. */
int mill_postmaster_wait_ready(const char *data, struct mill_postmaster *server,
                               struct mill_err *err);

/*
 * Stop it: connections are cut and all is written (30 s), then, or where its folder is gone, at
 * once. Returns −1 when it runs
 * even so.
 */
int mill_postmaster_stop(const char *data, struct mill_postmaster *server);
