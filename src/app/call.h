/*
 * Call one handler, without the queue: by an executor that lives for this alone.
 *
 * Blocking; for commands. Nothing is published: there is no queue to publish to. What the handler
 * logs goes to stderr.
 */
#pragma once

#include "core/config.h"
#include "core/message.h"

struct mill_call_options {
	const char *config_path;
	const char *database; /* where the handler's SQL goes; NULL: as the config says */
	bool database_yields; /* one that the config names goes before it */
	/*
	 * A subscriber's name, TOPIC/SUBSCRIBER where several topics have such a one, or a module's
	 * name, subscribed or not.
	 */
	const char *handler;
	struct mill_span payload; /* JSON */
	double load_secs;         /* how long config and handlers may take to load */
};

/* How it ended. Texts are the caller's to free, by mill_call_free; NULL where there is none. */
struct mill_call_result {
	enum mill_outcome_kind kind;
	double delay_secs;  /* RETRY, SNOOZE */
	char *result;       /* DONE: what it returned, as JSON */
	char *error;        /* RAISED, RETRY, DISCARD; may be many lines */
	char *publications; /* DONE: a JSON array of what ctx:publish would have published */
};

/*
 * Call it. 0: it was called, and `result` says what came of it; a handler that ended its process
 * or had to be stopped at its time limit has RAISED. −1: it was not, for the reason in `err`; when
 * several things are wrong with the config, `problems` gets a line for each.
 */
int mill_call_run(const struct mill_call_options *options, struct mill_call_result *result,
                  struct mill_buffer *problems, struct mill_err *err);
void mill_call_free(struct mill_call_result *result);
