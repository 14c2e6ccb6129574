/* What nobody subscribes to: see orphan.h. */
#include "flow/orphan.h"

#define TELL_EVERY_SECS 60

static void tell(struct mill_orphans *orphans, struct mill_span orphan, const char *message_id,
                 const char *topic, const char *subscriber)
{
	uint64_t skipped;
	if (!mill_log_gates(&orphans->gates, orphan.data, orphan.len, TELL_EVERY_SECS, &skipped))
		return;
	mill_log(MILL_LOG_WARN, "nobody_subscribes",
	         MILL_TEXT_N("published_topic", orphan.data, orphan.len),
	         MILL_TEXT("message_id", message_id), MILL_TEXT("topic", topic),
	         MILL_TEXT("subscriber", subscriber), MILL_INT("skipped", skipped));
}

void mill_orphans_tell(struct mill_orphans *orphans, struct mill_span topics,
                       const char *message_id, const char *topic, const char *subscriber)
{
	const char *at = topics.data, *end = topics.data + topics.len;
	while (at < end) {
		const char *blank = memchr(at, ' ', (size_t)(end - at));
		size_t len = (size_t)((blank ? blank : end) - at);
		tell(orphans, (struct mill_span){ at, len }, message_id, topic, subscriber);
		at += len + 1;
	}
}
