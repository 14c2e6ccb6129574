/* Call one handler, without the queue: see call.h. */
#include "app/call.h"

#include <errno.h>
#include <time.h>
#include <unistd.h>

#include "app/child.h"
#include "app/load.h"
#include "core/clock.h"
#include "core/uuid.h"

#define TICKET 1
#define PUBLISHED_BY "tidemill call"
#define NO_QUEUE "nothing can be published here: this handler is called without a queue"

/* ---- which handler --------------------------------------------------------------------------- */

static bool is_pair(const struct mill_manifest_lane *lane, const char *name)
{
	size_t len = strlen(lane->topic);
	return strncmp(name, lane->topic, len) == 0 && name[len] == '/' &&
	       strcmp(name + len + 1, lane->subscriber) == 0;
}

static bool is_subscriber(const struct mill_manifest_lane *lane, const char *name)
{
	return strcmp(lane->subscriber, name) == 0;
}

static bool is_module(const struct mill_manifest_lane *lane, const char *name)
{
	return strcmp(lane->handler, name) == 0;
}

static int ambiguous(const struct mill_manifest *manifest, const char *name,
                     bool (*matches)(const struct mill_manifest_lane *lane, const char *name),
                     struct mill_err *err)
{
	char *list = mill_strdup("");
	for (size_t i = 0; i < manifest->lane_count; i++) {
		const struct mill_manifest_lane *lane = &manifest->lanes[i];
		if (!matches(lane, name))
			continue;
		char *longer = mill_sprintf("%s%s%s/%s", list, list[0] ? ", " : "", lane->topic,
		                            lane->subscriber);
		free(list);
		list = longer;
	}
	mill_err_set(err, MILL_ERR_USAGE, "`%s` may mean several subscriptions: name one of %s",
	             name, list);
	free(list);
	return -1;
}

/* The lane that `name` means; the first way of naming that fits any decides. */
static int find_lane(const struct mill_manifest *manifest, const char *name, uint32_t *lane,
                     struct mill_err *err)
{
	static bool (*const ways[])(const struct mill_manifest_lane *lane,
	                            const char *name) = { is_pair, is_subscriber, is_module };
	for (size_t way = 0; way < MILL_COUNT(ways); way++) {
		size_t found = 0;
		for (size_t i = 0; i < manifest->lane_count; i++)
			if (ways[way](&manifest->lanes[i], name)) {
				*lane = (uint32_t)i;
				found++;
			}
		if (found == 1)
			return 0;
		if (found > 1)
			return ambiguous(manifest, name, ways[way], err);
	}
	return mill_err_set(err, MILL_ERR_USAGE,
	                    "there is no handler `%s`: `tidemill check` lists the subscriptions, "
	                    "write SUBSCRIBER or TOPIC/SUBSCRIBER",
	                    name);
}

/* ---- the call -------------------------------------------------------------------------------- */

static int deliver(struct mill_talk *talk, const struct mill_manifest_lane *lane, uint32_t index,
                   struct mill_span payload, struct mill_err *err)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	struct mill_deliver message = {
		.ticket = TICKET,
		.lane = index,
		.attempts = 1,
		.max_attempts = (uint32_t)lane->options.max_attempts,
		.created_at = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000,
		.published_by = MILL_SPAN(PUBLISHED_BY),
		.payload = payload,
		.wants_result = true,
	};
	mill_uuid_v7(message.id);
	struct mill_buffer out = { 0 };
	mill_deliver_write(&out, &message);
	int result = mill_talk_send(talk, &out, err);
	mill_buffer_free(&out);
	return result;
}

/* Whatever it asks for, there is none. */
static int refuse(struct mill_talk *talk, struct mill_frame *frame, struct mill_err *err)
{
	struct mill_request request;
	if (mill_request_read(&frame->body, &request, err) != 0)
		return -1;
	struct mill_buffer out = { 0 };
	mill_reply_write(&out, &(struct mill_reply){ .request = request.request,
	                                             .body = MILL_SPAN(NO_QUEUE) });
	int result = mill_talk_send(talk, &out, err);
	mill_buffer_free(&out);
	return result;
}

static int take_outcome(struct mill_frame *frame, struct mill_call_result *result,
                        struct mill_err *err)
{
	struct mill_outcome outcome;
	if (mill_outcome_read(&frame->body, &outcome, err) != 0)
		return -1;
	*result = (struct mill_call_result){
		.kind = outcome.kind,
		.delay_secs = outcome.delay_secs,
		.result = mill_span_dup(outcome.result),
		.error = mill_span_dup(outcome.error),
		.publications = mill_span_dup(outcome.publications),
	};
	return 0;
}

/* Answer the executor until the outcome is there. */
static enum mill_talk_event await_outcome(struct mill_talk *talk, double limit_secs,
                                          struct mill_call_result *result, struct mill_err *err)
{
	uint64_t end_ns = mill_clock_ns() + (uint64_t)(limit_secs * 1e9);
	while (true) {
		struct mill_frame frame;
		enum mill_talk_event event = mill_talk_receive(talk, end_ns, &frame, err);
		if (event != MILL_TALK_FRAME)
			return event;
		if (frame.type == MILL_FRAME_OUTCOME)
			return take_outcome(&frame, result, err) == 0 ? MILL_TALK_FRAME
			                                              : MILL_TALK_FAILED;
		if (frame.type != MILL_FRAME_REQUEST) {
			mill_err_set(err, MILL_ERR_PROTOCOL, "an executor sent frame %d unasked",
			             frame.type);
			return MILL_TALK_FAILED;
		}
		if (refuse(talk, &frame, err) != 0)
			return MILL_TALK_FAILED;
	}
}

static int call_lane(struct mill_talk *talk, const struct mill_manifest *manifest,
                     const struct mill_call_options *options, struct mill_call_result *result,
                     struct mill_err *err)
{
	uint32_t index = 0;
	if (find_lane(manifest, options->handler, &index, err) != 0) {
		mill_talk_end(talk, true);
		return -1;
	}
	const struct mill_manifest_lane *lane = &manifest->lanes[index];
	double limit = lane->options.timeout_secs;
	enum mill_talk_event event = MILL_TALK_FAILED;
	if (deliver(talk, lane, index, options->payload, err) == 0)
		/* One that waits past its limit is told so; one that does not is stopped. */
		event = await_outcome(talk, limit + manifest->settings.kill_grace_secs, result,
		                      err);
	int status = mill_talk_end(talk, event == MILL_TALK_FRAME || event == MILL_TALK_ENDED);
	if (event == MILL_TALK_ENDED)
		result->error = mill_sprintf("handler crashed its executor (%s)",
		                             mill_child_status_text(status));
	if (event == MILL_TALK_LATE)
		result->error = mill_sprintf("handler exceeded its time limit of %g s", limit);
	if (event == MILL_TALK_ENDED || event == MILL_TALK_LATE)
		result->kind = MILL_OUTCOME_RAISED;
	return event == MILL_TALK_FAILED ? -1 : 0;
}

int mill_call_run(const struct mill_call_options *options, struct mill_call_result *result,
                  struct mill_buffer *problems, struct mill_err *err)
{
	const char *path = options->config_path;
	*result = (struct mill_call_result){ 0 };
	if (access(path, R_OK) != 0)
		return mill_err_set(err, MILL_ERR_CONFIG, "cannot read %s: %s", path,
		                    strerror(errno));
	struct mill_talk talk;
	if (mill_talk_start(&talk, mill_load_program(), err) != 0)
		return -1;
	bool pair = strchr(options->handler, '/') != NULL;
	struct mill_load load = {
		.mode = MILL_LOAD_HANDLERS,
		.generation = 1,
		.config_path = MILL_SPAN(path),
		.call = pair ? MILL_SPAN_NONE : MILL_SPAN(options->handler),
		.database = options->database ? MILL_SPAN(options->database) : MILL_SPAN_NONE,
		.database_yields = options->database_yields,
	};
	struct mill_manifest manifest;
	enum mill_talk_event event =
	        mill_load_ask(&talk, path, &load, options->load_secs, &manifest, problems, err);
	if (event != MILL_TALK_FRAME) {
		int status = mill_talk_end(&talk, event == MILL_TALK_ENDED);
		return mill_load_explain(event, path, options->load_secs, status, err);
	}
	int outcome = call_lane(&talk, &manifest, options, result, err);
	mill_manifest_free(&manifest);
	return outcome;
}

void mill_call_free(struct mill_call_result *result)
{
	free(result->result);
	free(result->error);
	free(result->publications);
	*result = (struct mill_call_result){ 0 };
}
