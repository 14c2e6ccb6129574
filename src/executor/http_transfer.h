/*
 * One transfer from the inside: for http_client.c, which moves it along, and http_transfer.c, which
 * tells libcurl what to do and makes a reply of what came of it.
 *
 * Executor process only.
 */
#pragma once

#include "executor/curl_library.h"
#include "executor/http_client.h"

/* How far it got, for the text of a timeout. */
enum mill_transfer_phase {
	MILL_TRANSFER_LOOKUP,
	MILL_TRANSFER_CONNECT,
	MILL_TRANSFER_HANDSHAKE,
	MILL_TRANSFER_WAIT,
	MILL_TRANSFER_READ,
};

struct mill_transfer {
	const struct mill_curl *curl;
	struct mill_http_client *client; /* NULL: it is not under way */
	CURL *easy;
	struct curl_slist *header_list;
	void (*on_done)(struct mill_transfer *transfer);
	void *context;

	enum mill_transfer_phase phase;
	bool queued; /* when it was started all connections were taken */
	double timeout_secs, connect_timeout_secs;
	size_t max_bytes, request_bytes;
	struct mill_buffer headers, body;
	bool header_ended; /* what follows is the body, or trailers */
	bool headers_too_large, body_too_large;
	char detail[CURL_ERROR_SIZE]; /* libcurl's own words */
	struct mill_err failure;
	struct mill_http_reply reply;
};

/* Make the easy handle that is described by `request`. −1: `err` says what is wrong with it. */
int mill_transfer_prepare(struct mill_transfer *transfer, const struct mill_http_request *request,
                          struct mill_err *err);
/* It has ended with this code: fill `reply`. */
void mill_transfer_conclude(struct mill_transfer *transfer, CURLcode code);
