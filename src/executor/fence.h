/*
 * Fences around an executor's process: what of its surroundings a handler, or a program that one
 * starts, cannot get hold of by accident.
 *
 * Executor process only. Knows nothing of Lua; lua/tidemill/fences.lua is its other half.
 */
#pragma once

#include "core/page.h"

/*
 * A session of its own, so that what handlers start can be ended with it by its process group; and
 * if a handler should fork, the copy loses the socket and the page, which it must not write to.
 */
void mill_fence_start(int socket_fd, struct mill_page *page);

/* The child that this process has started last and not waited for; 0: none, or it cannot be told.
 */
int mill_fence_newest_child(void);

/* Can no file be opened any more? */
bool mill_fence_is_out_of_files(void);

/* Is this the copy that a handler's fork has made? It has no runtime, and must end. */
bool mill_fence_is_copy(void);
