/* Load a config.lua by an executor of its own: see load.h. */
#include "app/load.h"

#include <errno.h>
#include <unistd.h>

#include "app/child.h"
#include "core/clock.h"
#include "core/log.h"

#define SAY_SECS 5 /* a config that loads for longer is said to */

/* The program itself, also while its file is being replaced by a newer one. */
const char *mill_load_program(void)
{
	return "/proc/self/exe";
}

/* The text has a line for each problem. */
static int report_load_error(struct mill_reader *body, struct mill_buffer *problems,
                             struct mill_err *err)
{
	struct mill_span text;
	if (mill_load_error_read(body, &text, err) != 0)
		return -1;
	if (text.data == NULL)
		text = MILL_SPAN("it does not load, and does not say why");
	if (problems != NULL)
		mill_buffer_bytes(problems, text.data, text.len);
	const char *line_end = memchr(text.data, '\n', text.len);
	size_t len = line_end ? (size_t)(line_end - text.data) : text.len;
	return mill_err_set(err, MILL_ERR_CONFIG, "%.*s", (int)len, text.data);
}

static int send_load(struct mill_talk *talk, const struct mill_load *load, struct mill_err *err)
{
	struct mill_buffer out = { 0 };
	mill_load_write(&out, load);
	int result = mill_talk_send(talk, &out, err);
	mill_buffer_free(&out);
	return result;
}

enum mill_talk_event mill_load_ask(struct mill_talk *talk, const char *path,
                                   const struct mill_load *load, double limit_secs,
                                   struct mill_manifest *manifest, struct mill_buffer *problems,
                                   struct mill_err *err)
{
	struct mill_frame frame;
	uint64_t end_ns = mill_clock_ns() + (uint64_t)(limit_secs * 1e9);
	if (send_load(talk, load, err) != 0)
		return MILL_TALK_FAILED;
	uint64_t say_ns = mill_clock_ns() + SAY_SECS * 1000000000ull;
	enum mill_talk_event event =
	        mill_talk_receive(talk, say_ns < end_ns ? say_ns : end_ns, &frame, err);
	if (event == MILL_TALK_LATE && say_ns < end_ns) {
		mill_log(MILL_LOG_WARN, "still_loading", MILL_TEXT("config", path),
		         MILL_NUMBER("limit_secs", limit_secs));
		event = mill_talk_receive(talk, end_ns, &frame, err);
	}
	if (event != MILL_TALK_FRAME)
		return event;
	if (frame.type == MILL_FRAME_MANIFEST &&
	    mill_manifest_read(&frame.body, manifest, err) == 0)
		return MILL_TALK_FRAME;
	if (frame.type == MILL_FRAME_LOAD_ERROR)
		report_load_error(&frame.body, problems, err);
	else if (frame.type != MILL_FRAME_MANIFEST)
		mill_err_set(err, MILL_ERR_PROTOCOL, "%s: unexpected frame %d", path, frame.type);
	return MILL_TALK_FAILED;
}

int mill_load_explain(enum mill_talk_event event, const char *path, double limit_secs, int status,
                      struct mill_err *err)
{
	if (event == MILL_TALK_ENDED)
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "%s ended its process while it was loaded: %s", path,
		                    mill_child_status_text(status));
	if (event == MILL_TALK_LATE)
		return mill_err_set(
		        err, MILL_ERR_CONFIG,
		        "%s has not loaded within %g s and was stopped: it, or a handler it "
		        "names, waits or loops outside of a function",
		        path, limit_secs);
	return -1;
}

int mill_load_manifest_listing(const char *path, enum mill_load_mode mode, double limit_secs,
                               struct mill_manifest *manifest, struct mill_buffer *problems,
                               struct mill_err *err)
{
	/* Looked at here first: the system's own words, and no process for nothing. */
	if (access(path, R_OK) != 0)
		return mill_err_set(err, MILL_ERR_CONFIG, "cannot read %s: %s", path,
		                    strerror(errno));
	struct mill_talk talk;
	if (mill_talk_start(&talk, mill_load_program(), err) != 0)
		return -1;
	struct mill_load load = { .mode = mode, .config_path = MILL_SPAN(path) };
	enum mill_talk_event event =
	        mill_load_ask(&talk, path, &load, limit_secs, manifest, problems, err);
	int status = mill_talk_end(&talk, event == MILL_TALK_FRAME || event == MILL_TALK_ENDED);
	return event == MILL_TALK_FRAME ? 0
	                                : mill_load_explain(event, path, limit_secs, status, err);
}

int mill_load_manifest(const char *path, enum mill_load_mode mode, double limit_secs,
                       struct mill_manifest *manifest, struct mill_err *err)
{
	return mill_load_manifest_listing(path, mode, limit_secs, manifest, NULL, err);
}
