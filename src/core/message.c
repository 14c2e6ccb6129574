/* The bodies of frames: see message.h. Each pair names its fields in the same order. */
#include "core/message.h"

static int finish(const struct mill_reader *body, const char *name, struct mill_err *err)
{
	if (mill_reader_finished(body))
		return 0;
	return mill_err_set(err, MILL_ERR_PROTOCOL, "a %s frame with a body that cannot be read",
	                    name);
}

void mill_load_write(struct mill_buffer *out, const struct mill_load *load)
{
	size_t at = mill_frame_begin(out, MILL_FRAME_LOAD);
	mill_write_u8(out, (uint8_t)load->mode);
	mill_write_u32(out, load->generation);
	mill_write_span(out, load->config_path);
	mill_write_span(out, load->call);
	mill_write_span(out, load->database);
	mill_write_u8(out, load->database_yields);
	mill_write_u8(out, load->plain_table);
	mill_frame_end(out, at);
}

int mill_load_read(struct mill_reader *body, struct mill_load *load, struct mill_err *err)
{
	load->mode = mill_read_u8(body);
	load->generation = mill_read_u32(body);
	load->config_path = mill_read_span(body);
	load->call = mill_read_span(body);
	load->database = mill_read_span(body);
	load->database_yields = mill_read_u8(body) != 0;
	load->plain_table = mill_read_u8(body) != 0;
	return finish(body, "LOAD", err);
}

void mill_load_error_write(struct mill_buffer *out, struct mill_span text)
{
	size_t at = mill_frame_begin(out, MILL_FRAME_LOAD_ERROR);
	mill_write_span(out, text);
	mill_frame_end(out, at);
}

int mill_load_error_read(struct mill_reader *body, struct mill_span *text, struct mill_err *err)
{
	*text = mill_read_span(body);
	return finish(body, "LOAD_ERROR", err);
}

void mill_file_write(struct mill_buffer *out, const struct mill_file *file)
{
	size_t at = mill_frame_begin(out, MILL_FRAME_FILE);
	mill_write_span(out, file->path);
	mill_write_u64(out, file->digest);
	mill_frame_end(out, at);
}

int mill_file_read(struct mill_reader *body, struct mill_file *file, struct mill_err *err)
{
	file->path = mill_read_span(body);
	file->digest = mill_read_u64(body);
	if (file->path.data == NULL)
		body->failed = true;
	return finish(body, "FILE", err);
}

void mill_deliver_write(struct mill_buffer *out, const struct mill_deliver *deliver)
{
	size_t at = mill_frame_begin(out, MILL_FRAME_DELIVER);
	mill_write_u64(out, deliver->ticket);
	mill_write_u32(out, deliver->lane);
	mill_buffer_bytes(out, deliver->id, sizeof(deliver->id));
	mill_write_u32(out, deliver->attempts);
	mill_write_u32(out, deliver->max_attempts);
	mill_write_u32(out, (uint32_t)deliver->priority);
	mill_write_i64(out, deliver->created_at);
	mill_write_span(out, deliver->published_by);
	mill_write_span(out, deliver->headers);
	mill_write_span(out, deliver->payload);
	mill_write_u8(out, deliver->wants_result);
	mill_write_span(out, deliver->fence);
	mill_frame_end(out, at);
}

void mill_deliver_set_lane(struct mill_buffer *out, uint32_t lane)
{
	size_t at = MILL_FRAME_HEADER + sizeof(uint64_t); /* behind the ticket */
	MILL_ASSERT(out->len >= at + sizeof(lane));
	memcpy(out->data + at, &lane, sizeof(lane));
}

int mill_deliver_read(struct mill_reader *body, struct mill_deliver *deliver, struct mill_err *err)
{
	deliver->ticket = mill_read_u64(body);
	deliver->lane = mill_read_u32(body);
	for (size_t i = 0; i < sizeof(deliver->id); i++)
		deliver->id[i] = mill_read_u8(body);
	deliver->attempts = mill_read_u32(body);
	deliver->max_attempts = mill_read_u32(body);
	deliver->priority = (int32_t)mill_read_u32(body);
	deliver->created_at = mill_read_i64(body);
	deliver->published_by = mill_read_span(body);
	deliver->headers = mill_read_span(body);
	deliver->payload = mill_read_span(body);
	deliver->wants_result = mill_read_u8(body) != 0;
	deliver->fence = mill_read_span(body);
	return finish(body, "DELIVER", err);
}

void mill_outcome_write(struct mill_buffer *out, const struct mill_outcome *outcome)
{
	size_t at = mill_frame_begin(out, MILL_FRAME_OUTCOME);
	mill_write_u64(out, outcome->ticket);
	mill_write_u8(out, (uint8_t)outcome->kind);
	mill_write_double(out, outcome->delay_secs);
	mill_write_span(out, outcome->error);
	mill_write_span(out, outcome->publications);
	mill_write_span(out, outcome->result);
	mill_frame_end(out, at);
}

int mill_outcome_read(struct mill_reader *body, struct mill_outcome *outcome, struct mill_err *err)
{
	outcome->ticket = mill_read_u64(body);
	uint8_t kind = mill_read_u8(body);
	outcome->kind = kind;
	outcome->delay_secs = mill_read_double(body);
	outcome->error = mill_read_span(body);
	outcome->publications = mill_read_span(body);
	outcome->result = mill_read_span(body);
	if (kind > MILL_OUTCOME_LAST)
		body->failed = true;
	return finish(body, "OUTCOME", err);
}

void mill_cancel_write(struct mill_buffer *out, const struct mill_cancel *cancel)
{
	size_t at = mill_frame_begin(out, MILL_FRAME_CANCEL);
	mill_write_u64(out, cancel->ticket);
	mill_write_span(out, cancel->reason);
	mill_frame_end(out, at);
}

int mill_cancel_read(struct mill_reader *body, struct mill_cancel *cancel, struct mill_err *err)
{
	cancel->ticket = mill_read_u64(body);
	cancel->reason = mill_read_span(body);
	return finish(body, "CANCEL", err);
}

void mill_request_write(struct mill_buffer *out, const struct mill_request *request)
{
	size_t at = mill_frame_begin(out, MILL_FRAME_REQUEST);
	mill_write_u64(out, request->request);
	mill_write_u64(out, request->ticket);
	mill_write_span(out, request->body);
	mill_write_span(out, request->published_by);
	mill_frame_end(out, at);
}

int mill_request_read(struct mill_reader *body, struct mill_request *request, struct mill_err *err)
{
	request->request = mill_read_u64(body);
	request->ticket = mill_read_u64(body);
	request->body = mill_read_span(body);
	request->published_by = mill_read_span(body);
	return finish(body, "REQUEST", err);
}

void mill_reply_write(struct mill_buffer *out, const struct mill_reply *reply)
{
	size_t at = mill_frame_begin(out, MILL_FRAME_REPLY);
	mill_write_u64(out, reply->request);
	mill_write_u8(out, reply->ok);
	mill_write_span(out, reply->body);
	mill_frame_end(out, at);
}

int mill_reply_read(struct mill_reader *body, struct mill_reply *reply, struct mill_err *err)
{
	reply->request = mill_read_u64(body);
	reply->ok = mill_read_u8(body) != 0;
	reply->body = mill_read_span(body);
	return finish(body, "REPLY", err);
}
