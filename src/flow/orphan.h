/*
 * Orphans: what handlers publish to a topic nobody subscribes to. It is recorded and no error, and
 * most often a misspelt topic, so the log says once in a while who did it.
 *
 * Runtime process.
 */
#pragma once

#include "core/delivery.h"
#include "core/log.h"

/* Zero-initialised is ready. */
struct mill_orphans {
	struct mill_log_gates gates;
};

/*
 * Warn of `topics` (separated by blanks; absent: there are none), which the handler of a message
 * published to; each topic at most once a minute. `message_id` is a text.
 */
void mill_orphans_tell(struct mill_orphans *orphans, struct mill_span topics,
                       const char *message_id, const char *topic, const char *subscriber);
