/* The subscriptions of this runtime: see lanes.h. */
#include "flow/lanes.h"

struct own_lane {
	struct mill_lane lane; /* first: what the others hold a pointer to */
	struct mill_manifest_lane spec;
	struct own_lane *next_removed;
};

struct mill_lanes {
	struct own_lane **declared; /* in the manifest's order */
	size_t count;
	struct own_lane *removed;
};

struct mill_lanes *mill_lanes_new(void)
{
	return mill_calloc(1, sizeof(struct mill_lanes));
}

static void free_lane(struct own_lane *lane)
{
	free(lane->spec.topic);
	free(lane->spec.subscriber);
	free(lane->spec.handler);
	free(lane);
}

void mill_lanes_free(struct mill_lanes *lanes)
{
	for (size_t i = 0; i < lanes->count; i++)
		free_lane(lanes->declared[i]);
	while (lanes->removed != NULL) {
		struct own_lane *lane = lanes->removed;
		lanes->removed = lane->next_removed;
		free_lane(lane);
	}
	free(lanes->declared);
	free(lanes);
}

static bool is_pair(const struct mill_manifest_lane *a, const struct mill_manifest_lane *b)
{
	return strcmp(a->topic, b->topic) == 0 && strcmp(a->subscriber, b->subscriber) == 0;
}

/* Take it out of what there was, or make it. */
static struct own_lane *take_lane(struct mill_lanes *lanes, const struct mill_manifest_lane *spec)
{
	for (size_t i = 0; i < lanes->count; i++) {
		struct own_lane *lane = lanes->declared[i];
		if (lane == NULL || !is_pair(&lane->spec, spec))
			continue;
		lanes->declared[i] = NULL;
		return lane;
	}
	for (struct own_lane **at = &lanes->removed; *at != NULL; at = &(*at)->next_removed) {
		struct own_lane *lane = *at;
		if (!is_pair(&lane->spec, spec))
			continue;
		*at = lane->next_removed;
		lane->lane.removed = false;
		return lane;
	}
	struct own_lane *lane = mill_calloc(1, sizeof(*lane));
	lane->spec.topic = mill_strdup(spec->topic);
	lane->spec.subscriber = mill_strdup(spec->subscriber);
	lane->lane.spec = &lane->spec;
	return lane;
}

/* Does `only` name this lane? */
static bool is_named(const struct mill_manifest_lane *spec, const char *only)
{
	size_t len = strlen(spec->topic);
	if (strncmp(only, spec->topic, len) != 0)
		return false;
	return only[len] == '\0' ||
	       (only[len] == '/' && strcmp(only + len + 1, spec->subscriber) == 0);
}

void mill_lanes_declare(struct mill_lanes *lanes, const struct mill_manifest *manifest,
                        const int32_t *numbers, const char *only)
{
	struct own_lane **declared = mill_calloc(manifest->lane_count, sizeof(declared[0]));
	for (size_t i = 0; i < manifest->lane_count; i++) {
		const struct mill_manifest_lane *spec = &manifest->lanes[i];
		struct own_lane *lane = take_lane(lanes, spec);
		free(lane->spec.handler);
		lane->spec.handler = mill_strdup(spec->handler);
		lane->spec.options = spec->options;
		lane->lane.index = i;
		lane->lane.number = numbers[i];
		lane->lane.unclaimed = only != NULL && !is_named(spec, only);
		declared[i] = lane;
	}
	for (size_t i = 0; i < lanes->count; i++) {
		struct own_lane *lane = lanes->declared[i];
		if (lane == NULL)
			continue;
		lane->lane.removed = true;
		lane->next_removed = lanes->removed;
		lanes->removed = lane;
	}
	free(lanes->declared);
	lanes->declared = declared;
	lanes->count = manifest->lane_count;
}

void mill_lanes_renumber(struct mill_lanes *lanes, const int32_t *numbers)
{
	for (size_t i = 0; i < lanes->count; i++)
		lanes->declared[i]->lane.number = numbers[i];
}

size_t mill_lanes_count(const struct mill_lanes *lanes)
{
	return lanes->count;
}

struct mill_lane *mill_lanes_at(const struct mill_lanes *lanes, size_t i)
{
	return &lanes->declared[i]->lane;
}

void mill_lanes_tidy(struct mill_lanes *lanes)
{
	struct own_lane **at = &lanes->removed;
	while (*at != NULL) {
		struct own_lane *lane = *at;
		if (lane->lane.running > 0 || lane->lane.claiming != NULL) {
			at = &lane->next_removed;
			continue;
		}
		*at = lane->next_removed;
		free_lane(lane);
	}
}

int mill_lanes_check_only(const struct mill_manifest *manifest, const char *only,
                          struct mill_err *err)
{
	for (size_t i = 0; only != NULL && i < manifest->lane_count; i++)
		if (is_named(&manifest->lanes[i], only))
			return 0;
	if (only == NULL)
		return 0;
	return mill_err_set(err, MILL_ERR_USAGE,
	                    "--only %s: no such subscription; `tidemill check` lists them", only);
}
