/*
 * Watch: notices when a file that the app depends on has changed.
 *
 * Change events of folders say when to look; beside them it looks every two seconds, because events
 * can be missing (a network file system, a limit of the system). What counts is what files hold: it
 * compares contents, once nothing has changed for a moment, so that a save in several steps is one
 * change and a touch is none. Looking is done in a thread.
 *
 * Runtime process. Knows nothing of generations; who asks says what is loaded.
 */
#pragma once

#include <uv.h>

#include "core/message.h"

struct mill_watch;

struct mill_watch_options {
	uv_loop_t *loop;
	/* Files have changed, one of them `path`. */
	void (*on_change)(const char *path, void *context);
	void *context;
};

/* Nothing is watched yet. */
struct mill_watch *mill_watch_new(const struct mill_watch_options *options);

/*
 * Watch this file from now on. What was read of it, or that it was not there, is no change: of a
 * file that is new, and, where `newest` says that what was read is to count, of one that nobody has
 * named under this tag. `tag` rises from one to the next who loads: see mill_watch_keep.
 */
void mill_watch_file(struct mill_watch *watch, const struct mill_file *file, uint32_t tag,
                     bool newest);
/* Forget the files that nobody has named since `tag`. */
void mill_watch_keep(struct mill_watch *watch, uint32_t tag);
/*
 * Watch, or rest. `tree` is the folder whose .lua files count, whoever loads them; what is there
 * now is no change. May be called again.
 */
void mill_watch_set(struct mill_watch *watch, bool on, const char *tree);

/* Comes when a look that is under way has ended. */
void mill_watch_close(struct mill_watch *watch, void (*on_closed)(void *context), void *context);
