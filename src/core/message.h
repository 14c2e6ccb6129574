/*
 * What is inside the frames: one struct and a pair of functions (write a frame, read a body) per
 * frame type that has fields. Spans point into the frame that was read.
 *
 * Both processes. The manifest has its own pair in config.h. DRAIN, PING and BYE have no body.
 */
#pragma once

#include "core/frame.h"

/* LOAD: the first frame an executor gets. */
enum mill_load_mode {
	MILL_LOAD_CONFIG,   /* evaluate config.lua only, answer MANIFEST */
	MILL_LOAD_HANDLERS, /* and load every handler before the MANIFEST: the executor is ready
	                       then */
};
struct mill_load {
	enum mill_load_mode mode;
	uint32_t generation;
	struct mill_span config_path; /* as the user named it */
	struct mill_span call;        /* HANDLERS: a name that must be a subscriber's or a module's;
	                                 a module without a subscription gets one. Or absent */
	struct mill_span database;    /* where handlers' SQL goes; absent: as the config says */
	bool database_yields;         /* one that the config names goes before it */
	bool plain_table;             /* the ledger is a table of another program */
};
void mill_load_write(struct mill_buffer *out, const struct mill_load *load);
int mill_load_read(struct mill_reader *body, struct mill_load *load, struct mill_err *err);

/* LOAD_ERROR: one text, `file:line: …`, possibly with a traceback in further lines. */
void mill_load_error_write(struct mill_buffer *out, struct mill_span text);
int mill_load_error_read(struct mill_reader *body, struct mill_span *text, struct mill_err *err);

/*
 * FILE: what an executor has loaded, or looked for in vain; each once. Those it loads by come
 * before MANIFEST or LOAD_ERROR.
 */
struct mill_file {
	struct mill_span path; /* from the working directory that both processes share */
	uint64_t digest;       /* of its content; 0: it is not there */
};
void mill_file_write(struct mill_buffer *out, const struct mill_file *file);
int mill_file_read(struct mill_reader *body, struct mill_file *file, struct mill_err *err);

/* DELIVER: one message to handle. */
struct mill_deliver {
	uint64_t ticket;   /* names the delivery between these two processes */
	uint32_t lane;     /* index into the manifest's lanes */
	uint8_t id[16];    /* the message */
	uint32_t attempts; /* from 1 */
	uint32_t max_attempts;
	int32_t priority;
	int64_t created_at;            /* microseconds since 1970, UTC */
	struct mill_span published_by; /* never absent */
	struct mill_span headers;      /* JSON object or absent */
	struct mill_span payload;      /* JSON text as Postgres prints it */
	bool wants_result;             /* what the handler returns is to come with the outcome */
	struct mill_span fence;        /* claimed_by of its row, for ctx:finish; absent: no row */
};
void mill_deliver_write(struct mill_buffer *out, const struct mill_deliver *deliver);
/* Change the lane in a DELIVER frame that `out` holds alone. */
void mill_deliver_set_lane(struct mill_buffer *out, uint32_t lane);
int mill_deliver_read(struct mill_reader *body, struct mill_deliver *deliver, struct mill_err *err);

/* OUTCOME: how a delivery ended. */
enum mill_outcome_kind {
	MILL_OUTCOME_DONE,     /* the handler returned */
	MILL_OUTCOME_RAISED,   /* it raised, or passed its time limit: retried with backoff */
	MILL_OUTCOME_RETRY,    /* ctx:retry: as raised, after delay_secs */
	MILL_OUTCOME_SNOOZE,   /* ctx:snooze: after delay_secs, the attempt not counted */
	MILL_OUTCOME_DISCARD,  /* ctx:discard */
	MILL_OUTCOME_RETURNED, /* never started (the executor drains): back now, the attempt not
	                          counted */
	MILL_OUTCOME_FINISHED, /* ctx:finish: done, and the executor has written that already */
};
#define MILL_OUTCOME_LAST MILL_OUTCOME_FINISHED
struct mill_outcome {
	uint64_t ticket;
	enum mill_outcome_kind kind;
	double delay_secs;             /* RETRY, SNOOZE */
	struct mill_span error;        /* RAISED, RETRY, DISCARD: any bytes, any length */
	struct mill_span publications; /* ctx:publish: a JSON array for publish_many, or absent */
	struct mill_span result;       /* DONE, where it was wanted: JSON; otherwise absent */
};
void mill_outcome_write(struct mill_buffer *out, const struct mill_outcome *outcome);
int mill_outcome_read(struct mill_reader *body, struct mill_outcome *outcome, struct mill_err *err);

/* CANCEL: stop this delivery at its next wait; its outcome no longer matters. */
struct mill_cancel {
	uint64_t ticket;
	struct mill_span reason;
};
void mill_cancel_write(struct mill_buffer *out, const struct mill_cancel *cancel);
int mill_cancel_read(struct mill_reader *body, struct mill_cancel *cancel, struct mill_err *err);

/* REQUEST: the executor asks the runtime for something (a publish) on behalf of a delivery. */
struct mill_request {
	uint64_t request;      /* the executor's number, repeated in the REPLY */
	uint64_t ticket;       /* on whose behalf */
	struct mill_span body; /* the JSON request: {"op": "publish", "topic": …, "message": …} */
	struct mill_span published_by;
};
void mill_request_write(struct mill_buffer *out, const struct mill_request *request);
int mill_request_read(struct mill_reader *body, struct mill_request *request, struct mill_err *err);

/* REPLY: what became of it: a JSON text, or an error text. */
struct mill_reply {
	uint64_t request;
	bool ok;
	struct mill_span body;
};
void mill_reply_write(struct mill_buffer *out, const struct mill_reply *reply);
int mill_reply_read(struct mill_reader *body, struct mill_reply *reply, struct mill_err *err);
