/* Numbers for pairs of topic and subscriber: see pairs.h. */
#include "pg/pairs.h"

struct pair {
	char *topic, *subscriber;
	int32_t max_attempts, retain_hours;
	bool declared;
};

struct mill_pairs {
	struct pair *list; /* number n is at n − 1 */
	size_t count;
};

struct mill_pairs *mill_pairs_new(void)
{
	return mill_calloc(1, sizeof(struct mill_pairs));
}

void mill_pairs_free(struct mill_pairs *pairs)
{
	if (pairs == NULL)
		return;
	for (size_t i = 0; i < pairs->count; i++) {
		free(pairs->list[i].topic);
		free(pairs->list[i].subscriber);
	}
	free(pairs->list);
	free(pairs);
}

static struct pair *find(const struct mill_pairs *pairs, const char *topic, const char *subscriber)
{
	for (size_t i = 0; i < pairs->count; i++)
		if (strcmp(pairs->list[i].topic, topic) == 0 &&
		    strcmp(pairs->list[i].subscriber, subscriber) == 0)
			return &pairs->list[i];
	return NULL;
}

static struct pair *add(struct mill_pairs *pairs, const char *topic, const char *subscriber)
{
	pairs->list = mill_realloc(pairs->list, (pairs->count + 1) * sizeof(pairs->list[0]));
	struct pair *pair = &pairs->list[pairs->count++];
	*pair = (struct pair){ .topic = mill_strdup(topic), .subscriber = mill_strdup(subscriber) };
	return pair;
}

void mill_pairs_declare(struct mill_pairs *pairs, const struct mill_manifest *manifest)
{
	for (size_t i = 0; i < pairs->count; i++)
		pairs->list[i].declared = false;
	for (size_t i = 0; i < manifest->lane_count; i++) {
		const struct mill_manifest_lane *lane = &manifest->lanes[i];
		struct pair *pair = find(pairs, lane->topic, lane->subscriber);
		if (pair == NULL)
			pair = add(pairs, lane->topic, lane->subscriber);
		pair->max_attempts = (int32_t)lane->options.max_attempts;
		pair->retain_hours = (int32_t)lane->options.retain_hours;
		pair->declared = true;
	}
}

int32_t mill_pairs_number(const struct mill_pairs *pairs, const char *topic, const char *subscriber)
{
	const struct pair *pair = find(pairs, topic, subscriber);
	MILL_ASSERT(pair != NULL);
	return (int32_t)(pair - pairs->list) + 1;
}

void mill_pairs_params_of(const struct mill_pairs *pairs, struct mill_params *params,
                          const int32_t *numbers, size_t count)
{
	mill_params_array(params, MILL_TYPE_TEXT);
	for (size_t i = 0; i < count; i++) {
		MILL_ASSERT(numbers[i] >= 1 && (size_t)numbers[i] <= pairs->count);
		mill_element_text(params, MILL_SPAN(pairs->list[numbers[i] - 1].topic));
	}
	mill_params_array_end(params);
	mill_params_array(params, MILL_TYPE_TEXT);
	for (size_t i = 0; i < count; i++)
		mill_element_text(params, MILL_SPAN(pairs->list[numbers[i] - 1].subscriber));
	mill_params_array_end(params);
}

void mill_pairs_params(const struct mill_pairs *pairs, struct mill_params *params)
{
	int32_t *numbers = mill_alloc(pairs->count * sizeof(numbers[0]));
	size_t count = 0;
	for (size_t i = 0; i < pairs->count; i++)
		if (pairs->list[i].declared)
			numbers[count++] = (int32_t)i + 1;
	mill_pairs_params_of(pairs, params, numbers, count);
	free(numbers);
}

void mill_pairs_option_params(const struct mill_pairs *pairs, struct mill_params *params)
{
	mill_params_array(params, MILL_TYPE_INT4);
	for (size_t i = 0; i < pairs->count; i++)
		if (pairs->list[i].declared)
			mill_element_int4(params, pairs->list[i].max_attempts);
	mill_params_array_end(params);
	mill_params_array(params, MILL_TYPE_INT4);
	for (size_t i = 0; i < pairs->count; i++)
		if (pairs->list[i].declared)
			mill_element_int4(params, pairs->list[i].retain_hours);
	mill_params_array_end(params);
}
