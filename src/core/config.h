/*
 * The configuration as both processes know it: one table of keys, and the manifest, which is what a
 * config.lua came to: settings, and a lane for each (topic, subscriber).
 *
 * An executor evaluates config.lua, checks each key against the table and sends the manifest; the
 * runtime only ever sees the manifest. Adding a key is a row in config.c, a member here, and a
 * section in docs/configuration.md (script/check-docs compares them).
 */
#pragma once

#include "core/frame.h"

/* Options that hold for one lane; config.lua may set each for the app and per subscription. */
struct mill_lane_options {
	int64_t max_attempts;
	int64_t retry_backoff_secs;
	double retry_jitter;
	double timeout_secs;
	int64_t retain_hours;
	int64_t concurrency; /* of this lane in this runtime, 0: no limit of its own */
};

struct mill_settings {
	char *app;
	char *database;        /* NULL: PG* variables */
	char *listen_database; /* NULL: as database */
	char *schema, *table, *prefix;
	char *handlers;          /* folder, relative to config.lua */
	int64_t executors;       /* 0: one per core */
	int64_t concurrency;     /* deliveries in flight per executor */
	int64_t sql_connections; /* per executor, for what handlers query */
	double sql_idle_secs;
	int64_t batch;
	double poll_secs;
	int64_t lease_secs;
	double shutdown_secs;
	double stall_secs;
	double kill_grace_secs;
	int64_t max_payload_bytes;
	int64_t max_memory_mb; /* of an executor, resident; 0: no limit */
	int64_t max_deliveries;
	bool migrate, notify, watch;
	struct mill_lane_options lane; /* what a subscription gets that does not say otherwise */
};

struct mill_manifest_lane {
	char *topic;
	char *subscriber;
	char *handler; /* for people: the module's name, or where the function stands */
	struct mill_lane_options options;
};

struct mill_manifest {
	struct mill_settings settings;
	struct mill_manifest_lane *lanes;
	size_t lane_count;
	uint64_t code; /* of the files it came from; of the same ones it is the same */
};

/* How the topic of an app's dead letters begins: the lanes of `on_failed` have it. */
#define MILL_FAILED_TOPIC "tidemill.failed:"

/* Where a key may stand in config.lua. */
enum mill_config_scope {
	MILL_SCOPE_APP,          /* at the top of config.lua */
	MILL_SCOPE_SUBSCRIPTION, /* in a subscription's table, or beside `handle` in a module */
};

enum mill_key_kind {
	MILL_KEY_TEXT,
	MILL_KEY_INTEGER,
	MILL_KEY_NUMBER,
	MILL_KEY_BOOLEAN,
	MILL_KEY_STRUCTURE, /* read by the executor itself: subscribe, handler */
};

struct mill_config_key {
	const char *name;
	enum mill_key_kind kind;
	unsigned scopes; /* bits: 1 << MILL_SCOPE_APP, 1 << MILL_SCOPE_SUBSCRIPTION */
	size_t offset;   /* in mill_settings; in mill_lane_options for a subscription's key */
	double min, max; /* of numbers; of a text, the longest */
	double preset;   /* the default of numbers and booleans */
	const char *preset_text; /* the default of a text; NULL: unset */
	const char *unit;        /* "seconds", "bytes" …, or NULL */
	bool restart;            /* a change needs a restart; a reload refuses it */
	const char *doc;         /* one sentence for people */
};

/* The whole table, for documentation and its check. */
const struct mill_config_key *mill_config_keys(size_t *count);

/* The row of a key that may stand in `scope`, or NULL. */
const struct mill_config_key *mill_config_find(enum mill_config_scope scope, const char *name);

/* The known key most like `name`, or NULL where none is close. */
const char *mill_config_suggest(enum mill_config_scope scope, const char *name);

/* A scalar as config.lua gave it. */
struct mill_value {
	enum { MILL_VALUE_TEXT, MILL_VALUE_NUMBER, MILL_VALUE_BOOLEAN, MILL_VALUE_OTHER } kind;
	double number;
	bool boolean;
	const char *text; /* TEXT: the bytes; OTHER: the type's name, for the error */
	size_t text_len;
};

/*
 * Check a value and put it into the settings, or into a lane's options. The error says what is
 * expected and what was found; the caller puts the key's path and line before it.
 */
int mill_config_set(struct mill_settings *settings, const struct mill_config_key *key,
                    const struct mill_value *value, struct mill_err *err);
int mill_config_set_lane(struct mill_lane_options *options, const struct mill_config_key *key,
                         const struct mill_value *value, struct mill_err *err);

/* Every setting at its default, no lanes. */
void mill_manifest_init(struct mill_manifest *manifest);
void mill_manifest_free(struct mill_manifest *manifest);
void mill_manifest_copy(struct mill_manifest *copy, const struct mill_manifest *manifest);

/*
 * Add a lane whose options begin as the app's defaults (so the settings come first). The topic is
 * checked and trimmed; a subscriber's name obeys the same rule. A pair that is there already is an
 * error. The lane returned is valid until the next call.
 */
int mill_manifest_add(struct mill_manifest *manifest, struct mill_span topic,
                      struct mill_span subscriber, const char *handler,
                      struct mill_manifest_lane **lane, struct mill_err *err);

/* Is anybody told of dead letters (on_failed)? */
bool mill_manifest_tells_failures(const struct mill_manifest *manifest);

/* Order lanes by topic and subscriber: the same config.lua gives the same manifest everywhere. */
void mill_manifest_sort(struct mill_manifest *manifest);

/* The MANIFEST frame. `mill_manifest_read` initialises `manifest`, and leaves nothing to free on
 * error. */
void mill_manifest_write(struct mill_buffer *out, const struct mill_manifest *manifest);
int mill_manifest_read(struct mill_reader *body, struct mill_manifest *manifest,
                       struct mill_err *err);

/*
 * The first key behind `after` (NULL: of all) that only a restart can change and in which the two
 * differ; NULL: there is none.
 */
const struct mill_config_key *mill_manifest_restart_key(const struct mill_manifest *manifest,
                                                        const struct mill_manifest *other,
                                                        const struct mill_config_key *after);

/* A digest of all that is in it: executors of one generation must agree on it. */
uint64_t mill_manifest_digest(const struct mill_manifest *manifest);
