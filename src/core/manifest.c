/* The manifest, what a config.lua came to: see config.h. */
#include "core/config.h"

#include "core/digest.h"
#include "core/policy.h"

/* Visit the place of each key that has a value, in the table's order. */
struct visit {
	const struct mill_config_key *key;
	void *place;
};

/* The keys whose value lies in the settings, or (lane) in one lane's options. */
static bool next_key(size_t *i, bool lane, void *base, struct visit *visit)
{
	size_t count;
	const struct mill_config_key *keys = mill_config_keys(&count);
	unsigned lane_bit = 1u << MILL_SCOPE_SUBSCRIPTION;
	while (*i < count) {
		const struct mill_config_key *key = &keys[(*i)++];
		if (key->kind == MILL_KEY_STRUCTURE || lane != ((key->scopes & lane_bit) != 0))
			continue;
		*visit = (struct visit){ key, (char *)base + key->offset };
		return true;
	}
	return false;
}

static void preset(void *base, bool lane)
{
	struct visit at;
	for (size_t i = 0; next_key(&i, lane, base, &at);) {
		switch (at.key->kind) {
		case MILL_KEY_TEXT:
			*(char **)at.place =
			        at.key->preset_text ? mill_strdup(at.key->preset_text) : NULL;
			break;
		case MILL_KEY_INTEGER:
			*(int64_t *)at.place = (int64_t)at.key->preset;
			break;
		case MILL_KEY_NUMBER:
			*(double *)at.place = at.key->preset;
			break;
		case MILL_KEY_BOOLEAN:
			*(bool *)at.place = at.key->preset != 0;
			break;
		case MILL_KEY_STRUCTURE:
			break;
		}
	}
}

static void write_values(struct mill_buffer *out, const void *base, bool lane)
{
	struct visit at;
	for (size_t i = 0; next_key(&i, lane, (void *)base, &at);) {
		switch (at.key->kind) {
		case MILL_KEY_TEXT: {
			const char *text = *(char **)at.place;
			mill_write_span(out, text ? MILL_SPAN(text) : MILL_SPAN_NONE);
			break;
		}
		case MILL_KEY_INTEGER:
			mill_write_i64(out, *(int64_t *)at.place);
			break;
		case MILL_KEY_NUMBER:
			mill_write_double(out, *(double *)at.place);
			break;
		case MILL_KEY_BOOLEAN:
			mill_write_u8(out, *(bool *)at.place);
			break;
		case MILL_KEY_STRUCTURE:
			break;
		}
	}
}

/*
 * Values pass the same checks as in config.lua: the runtime does not trust an executor, in which a
 * user's code runs.
 */
static int read_values(struct mill_reader *body, void *base, bool lane, struct mill_err *err)
{
	struct visit at;
	for (size_t i = 0; next_key(&i, lane, base, &at);) {
		struct mill_value value = { 0 };
		bool unset = false;
		switch (at.key->kind) {
		case MILL_KEY_TEXT: {
			struct mill_span span = mill_read_span(body);
			value.kind = MILL_VALUE_TEXT;
			value.text = span.data;
			value.text_len = span.len;
			unset = span.data == NULL && at.key->preset_text == NULL;
			break;
		}
		case MILL_KEY_INTEGER:
			value.kind = MILL_VALUE_NUMBER;
			value.number = (double)mill_read_i64(body);
			break;
		case MILL_KEY_NUMBER:
			value.kind = MILL_VALUE_NUMBER;
			value.number = mill_read_double(body);
			break;
		case MILL_KEY_BOOLEAN:
			value.kind = MILL_VALUE_BOOLEAN;
			value.boolean = mill_read_u8(body) != 0;
			break;
		case MILL_KEY_STRUCTURE:
			break;
		}
		if (unset || body->failed)
			continue;
		int failed = lane ? mill_config_set_lane(base, at.key, &value, err)
		                  : mill_config_set(base, at.key, &value, err);
		if (failed)
			return mill_err_wrap(err, "manifest: %s", at.key->name);
	}
	return 0;
}

void mill_manifest_init(struct mill_manifest *manifest)
{
	*manifest = (struct mill_manifest){ 0 };
	preset(&manifest->settings, false);
	preset(&manifest->settings.lane, true);
}

void mill_manifest_free(struct mill_manifest *manifest)
{
	struct visit at;
	for (size_t i = 0; next_key(&i, false, &manifest->settings, &at);)
		if (at.key->kind == MILL_KEY_TEXT)
			free(*(char **)at.place);
	for (size_t i = 0; i < manifest->lane_count; i++) {
		free(manifest->lanes[i].topic);
		free(manifest->lanes[i].subscriber);
		free(manifest->lanes[i].handler);
	}
	free(manifest->lanes);
	*manifest = (struct mill_manifest){ 0 };
}

static bool same(const char *text, const char *other, size_t other_len)
{
	return strlen(text) == other_len && memcmp(text, other, other_len) == 0;
}

int mill_manifest_add(struct mill_manifest *manifest, struct mill_span topic,
                      struct mill_span subscriber, const char *handler,
                      struct mill_manifest_lane **lane, struct mill_err *err)
{
	const char *topic_text, *name;
	size_t topic_len, name_len;
	if (mill_policy_topic(topic.data, topic.len, &topic_text, &topic_len, err) != 0)
		return -1;
	if (mill_policy_topic(subscriber.data, subscriber.len, &name, &name_len, NULL) != 0 ||
	    name_len != subscriber.len) {
		char *shown =
		        mill_policy_clean_text(subscriber.data, subscriber.len, MILL_TOPIC_MAX);
		mill_err_set(err, MILL_ERR_CONFIG,
		             "`%s` is not a subscriber's name: use letters, digits, `.`, `_`, `-` "
		             "or `:`",
		             shown);
		free(shown);
		return -1;
	}
	for (size_t i = 0; i < manifest->lane_count; i++)
		if (same(manifest->lanes[i].topic, topic_text, topic_len) &&
		    same(manifest->lanes[i].subscriber, name, name_len))
			return mill_err_set(err, MILL_ERR_CONFIG,
			                    "`%.*s` subscribes to `%.*s` twice", (int)name_len,
			                    name, (int)topic_len, topic_text);
	manifest->lanes = mill_realloc(manifest->lanes,
	                               (manifest->lane_count + 1) * sizeof(manifest->lanes[0]));
	*lane = &manifest->lanes[manifest->lane_count++];
	**lane = (struct mill_manifest_lane){
		.topic = mill_strndup(topic_text, topic_len),
		.subscriber = mill_strndup(name, name_len),
		.handler = mill_strdup(handler),
		.options = manifest->settings.lane,
	};
	(*lane)->options.concurrency = 0;
	return 0;
}

bool mill_manifest_tells_failures(const struct mill_manifest *manifest)
{
	for (size_t i = 0; i < manifest->lane_count; i++)
		if (strncmp(manifest->lanes[i].topic, MILL_FAILED_TOPIC,
		            strlen(MILL_FAILED_TOPIC)) == 0)
			return true;
	return false;
}

static int compare_lanes(const void *a, const void *b)
{
	const struct mill_manifest_lane *left = a, *right = b;
	int order = strcmp(left->topic, right->topic);
	return order ? order : strcmp(left->subscriber, right->subscriber);
}

void mill_manifest_sort(struct mill_manifest *manifest)
{
	if (manifest->lane_count > 1)
		qsort(manifest->lanes, manifest->lane_count, sizeof(manifest->lanes[0]),
		      compare_lanes);
}

static void write_body(struct mill_buffer *out, const struct mill_manifest *manifest)
{
	write_values(out, &manifest->settings, false);
	write_values(out, &manifest->settings.lane, true);
	mill_write_u32(out, (uint32_t)manifest->lane_count);
	for (size_t i = 0; i < manifest->lane_count; i++) {
		const struct mill_manifest_lane *lane = &manifest->lanes[i];
		mill_write_span(out, MILL_SPAN(lane->topic));
		mill_write_span(out, MILL_SPAN(lane->subscriber));
		mill_write_span(out, MILL_SPAN(lane->handler));
		write_values(out, &lane->options, true);
	}
	mill_write_u64(out, manifest->code);
}

void mill_manifest_write(struct mill_buffer *out, const struct mill_manifest *manifest)
{
	size_t at = mill_frame_begin(out, MILL_FRAME_MANIFEST);
	write_body(out, manifest);
	mill_frame_end(out, at);
}

static int read_lane(struct mill_reader *body, struct mill_manifest *manifest, struct mill_err *err)
{
	struct mill_span topic = mill_read_span(body), subscriber = mill_read_span(body);
	char *handler = mill_span_dup(mill_read_span(body));
	int result = -1;
	struct mill_manifest_lane *lane;
	if (topic.data == NULL || subscriber.data == NULL || handler == NULL)
		body->failed = true;
	else if (mill_manifest_add(manifest, topic, subscriber, handler, &lane, err) == 0)
		result = read_values(body, &lane->options, true, err);
	free(handler);
	return body->failed ? 0 : result;
}

int mill_manifest_read(struct mill_reader *body, struct mill_manifest *manifest,
                       struct mill_err *err)
{
	mill_manifest_init(manifest);
	int result = read_values(body, &manifest->settings, false, err);
	if (result == 0)
		result = read_values(body, &manifest->settings.lane, true, err);
	uint32_t count = result == 0 ? mill_read_u32(body) : 0;
	for (uint32_t i = 0; i < count && result == 0 && !body->failed; i++)
		result = read_lane(body, manifest, err);
	manifest->code = mill_read_u64(body);
	if (result == 0 && !mill_reader_finished(body))
		result = mill_err_set(err, MILL_ERR_PROTOCOL,
		                      "a MANIFEST frame with a body that cannot be read");
	if (result != 0)
		mill_manifest_free(manifest);
	return result;
}

void mill_manifest_copy(struct mill_manifest *copy, const struct mill_manifest *manifest)
{
	struct mill_buffer bytes = { 0 };
	write_body(&bytes, manifest);
	struct mill_reader body = { .at = bytes.data, .end = bytes.data + bytes.len };
	MILL_ASSERT(mill_manifest_read(&body, copy, NULL) == 0);
	mill_buffer_free(&bytes);
}

uint64_t mill_manifest_digest(const struct mill_manifest *manifest)
{
	struct mill_buffer bytes = { 0 };
	write_body(&bytes, manifest);
	uint64_t digest = mill_digest_more(MILL_DIGEST_BEGIN, bytes.data, bytes.len);
	mill_buffer_free(&bytes);
	return digest;
}

static bool is_same_value(const struct mill_config_key *key, const void *place, const void *other)
{
	switch (key->kind) {
	case MILL_KEY_TEXT: {
		const char *text = *(char *const *)place, *other_text = *(char *const *)other;
		return text == other_text ||
		       (text != NULL && other_text != NULL && strcmp(text, other_text) == 0);
	}
	case MILL_KEY_INTEGER:
		return *(const int64_t *)place == *(const int64_t *)other;
	case MILL_KEY_NUMBER:
		return *(const double *)place == *(const double *)other;
	case MILL_KEY_BOOLEAN:
		return *(const bool *)place == *(const bool *)other;
	case MILL_KEY_STRUCTURE:
		break;
	}
	return true;
}

const struct mill_config_key *mill_manifest_restart_key(const struct mill_manifest *manifest,
                                                        const struct mill_manifest *other,
                                                        const struct mill_config_key *after)
{
	bool behind = after == NULL;
	struct visit at;
	for (size_t i = 0; next_key(&i, false, (void *)&manifest->settings, &at);) {
		const char *same_place = (const char *)&other->settings + at.key->offset;
		if (behind && at.key->restart && !is_same_value(at.key, at.place, same_place))
			return at.key;
		behind = behind || at.key == after;
	}
	return NULL;
}
