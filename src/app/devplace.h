/*
 * Where the private Postgres of `tidemill dev` lies on disk.
 *
 * What lies in `.tidemill` beside the config, which belongs to whoever runs dev:
 *
 *     lock          held while a dev runs, with its pid in it
 *     pg            the data folder, and the socket where its path is short enough
 *     where         folders elsewhere, if any: a line `data PATH`, a line `socket PATH`
 *     postgres.log  what the server and initdb say
 *     .gitignore    so that nothing of this gets into a repository
 *
 * Postgres refuses to run as root, so root's server runs under the account `postgres` (or
 * `nobody`). Where that account cannot reach the folder, the data goes to a folder of its own in
 * /var/tmp. A folder elsewhere is used only while it is that account's and closed to everyone else,
 * so nobody can put one of theirs in its place.
 *
 * Blocking; runtime process. Knows folders and accounts, no server.
 */
#pragma once

#include "app/child.h"
#include "core/err.h"

struct mill_devplace {
	char *folder; /* …/.tidemill */
	char *data;   /* the data folder; NULL until it is known */
	char *socket_folder;
	struct mill_account account;     /* that the server runs under … */
	bool as_account;                 /* … else it runs as we are */
	char *outer_data, *outer_socket; /* what `where` says, or NULL */
};

/*
 * Make `.tidemill` in the folder `dir`, make sure that it is ours, and choose the account. What is
 * in it is looked at by the functions below, with its lock held. Freed by mill_devplace_fini, also
 * after −1.
 */
int mill_devplace_init(struct mill_devplace *place, const char *dir, struct mill_err *err);
void mill_devplace_fini(struct mill_devplace *place);

/* A path in `.tidemill`; a new string. */
char *mill_devplace_path(const struct mill_devplace *place, const char *name);

/*
 * Find the data. 1: it is there, and `data` says where; 0: there is none yet; −1: there is
 * something that is not to be used.
 */
int mill_devplace_find(struct mill_devplace *place, struct mill_err *err);

/*
 * Making the data: an empty folder to make it in, of the server's account, then its renaming to
 * what it is found by, durably. What an interruption leaves is cleared away by the next prepare, or
 * by abandon. The path is a new string; NULL on failure.
 */
char *mill_devplace_prepare(struct mill_devplace *place, struct mill_err *err);
int mill_devplace_adopt(struct mill_devplace *place, const char *fresh, struct mill_err *err);
void mill_devplace_abandon(struct mill_devplace *place);

/*
 * Choose `socket_folder`: the data folder where its path is short enough for a socket and holds
 * nothing that separates hosts in a conninfo or folders in a setting; else a folder in /tmp.
 */
int mill_devplace_choose_socket(struct mill_devplace *place, struct mill_err *err);

/* The socket's folder elsewhere goes, once the server has ended; a next start makes another. */
void mill_devplace_drop_socket(struct mill_devplace *place);

/*
 * The data folder of `dir`, if it has one that we may look at, else NULL; a new string. `*closed`
 * is NULL, or a new string that says, for people, what we may not look at.
 */
char *mill_devplace_peek(const char *dir, char **closed);
