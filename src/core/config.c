/* The table of configuration keys, and the manifest: see config.h. */
#include "core/config.h"

#include <math.h>
#include <stdio.h>

#include "core/policy.h"

#define APP (1u << MILL_SCOPE_APP)
#define SUBSCRIPTION (1u << MILL_SCOPE_SUBSCRIPTION)

#define YEAR_SECS (366.0 * 86400)
#define MOST_ATTEMPTS 32767 /* smallint in the ledger */

/* A key of the app: its place in the settings. */
#define AT(member) .scopes = APP, .offset = offsetof(struct mill_settings, member)
/* A key of the app and of each subscription: its place in a lane's options. */
#define LANE(member)                                                                               \
	.scopes = APP | SUBSCRIPTION, .offset = offsetof(struct mill_lane_options, member)

static const struct mill_config_key keys[] = {
	{ "app", MILL_KEY_TEXT, AT(app), .max = 100, .preset_text = "app", .restart = true,
	  .doc = "The owner of these subscriptions; apps that share a database need names of their "
	         "own." },
	{ "database", MILL_KEY_TEXT, AT(database), .max = 4096, .restart = true,
	  .doc = "The database, as a libpq URI or conninfo; unset: the PG* environment "
	         "variables." },
	{ "listen_database", MILL_KEY_TEXT, AT(listen_database), .max = 4096, .restart = true,
	  .doc = "A direct address for LISTEN, when `database` leads through a connection "
	         "pooler." },
	{ "schema", MILL_KEY_TEXT, AT(schema), .max = MILL_IDENTIFIER_MAX,
	  .preset_text = "tidemill", .restart = true,
	  .doc = "The schema that holds the tables and functions." },
	{ "table", MILL_KEY_TEXT, AT(table), .max = MILL_IDENTIFIER_MAX,
	  .preset_text = "queue_message", .restart = true, .doc = "The ledger's table." },
	{ "prefix", MILL_KEY_TEXT, AT(prefix), .max = MILL_PREFIX_MAX, .preset_text = "tidemill",
	  .restart = true,
	  .doc = "Begins the names of the notification channels, `<prefix>_queue`." },
	{ "handlers", MILL_KEY_TEXT, AT(handlers), .max = 4096, .preset_text = "handlers",
	  .doc = "The folder handlers are required from, relative to config.lua." },
	{ "executors", MILL_KEY_INTEGER, AT(executors), .min = 0, .max = 256, .preset = 0,
	  .unit = "processes", .doc = "How many processes run handlers; 0: one per core." },
	{ "concurrency", MILL_KEY_INTEGER, AT(concurrency), .min = 1, .max = 100000, .preset = 64,
	  .unit = "deliveries", .doc = "Deliveries in flight per executor." },
	{ "sql_connections", MILL_KEY_INTEGER, AT(sql_connections), .min = 1, .max = 1000,
	  .preset = 4, .unit = "connections",
	  .doc = "The most database connections one executor opens for its handlers." },
	{ "sql_idle_secs", MILL_KEY_NUMBER, AT(sql_idle_secs), .min = 0.1, .max = 86400,
	  .preset = 60, .unit = "seconds",
	  .doc = "A connection of handlers that is unused for so long is closed." },
	{ "batch", MILL_KEY_INTEGER, AT(batch), .min = 1, .max = 10000, .preset = 100,
	  .unit = "messages", .doc = "The most messages one claim takes." },
	{ "poll_secs", MILL_KEY_NUMBER, AT(poll_secs), .min = 0.1, .max = 86400, .preset = 30,
	  .unit = "seconds", .doc = "How often to look for work when no notification arrives." },
	{ "lease_secs", MILL_KEY_INTEGER, AT(lease_secs), .min = 1, .max = 86400, .preset = 300,
	  .unit = "seconds",
	  .doc = "A worker that could not renew its lease for so long is dead to the others." },
	{ "shutdown_secs", MILL_KEY_NUMBER, AT(shutdown_secs), .min = 0, .max = 86400, .preset = 25,
	  .unit = "seconds", .doc = "How long an orderly stop waits for running handlers." },
	{ "stall_secs", MILL_KEY_NUMBER, AT(stall_secs), .min = 0.1, .max = 86400, .preset = 30,
	  .unit = "seconds",
	  .doc = "A handler that holds the processor so long without a break is killed." },
	{ "kill_grace_secs", MILL_KEY_NUMBER, AT(kill_grace_secs), .min = 0, .max = 3600,
	  .preset = 1, .unit = "seconds",
	  .doc = "How long past its limit before an executor is killed." },
	{ "max_memory_mb", MILL_KEY_INTEGER, AT(max_memory_mb), .min = 0, .max = 1024 * 1024,
	  .preset = 512, .unit = "megabytes",
	  .doc = "An executor that uses more is replaced, one that uses twice as much killed; 0: "
	         "no limit." },
	{ "max_deliveries", MILL_KEY_INTEGER, AT(max_deliveries), .min = 0, .max = 1000000000,
	  .preset = 0, .unit = "deliveries",
	  .doc = "An executor is replaced after so many; 0: never." },
	{ "max_payload_bytes", MILL_KEY_INTEGER, AT(max_payload_bytes), .min = 1,
	  .max = 128.0 * 1024 * 1024, .preset = 1024 * 1024, .unit = "bytes", .restart = true,
	  .doc = "The largest payload, measured on its text as Postgres prints it." },
	{ "migrate", MILL_KEY_BOOLEAN, AT(migrate), .preset = 1,
	  .doc = "Create or upgrade the schema at start." },
	{ "notify", MILL_KEY_BOOLEAN, AT(notify), .preset = 1, .restart = true,
	  .doc = "Listen for notifications; without, work is found by polling." },
	{ "watch", MILL_KEY_BOOLEAN, AT(watch), .preset = 1,
	  .doc = "Reload when config.lua, a handler or a file they require changes." },
	{ "subscribe", MILL_KEY_STRUCTURE, .scopes = APP,
	  .doc = "Which handlers get which topics." },
	{ "on_failed", MILL_KEY_STRUCTURE, .scopes = APP,
	  .doc = "Which handlers are told of each dead letter of this app." },
	{ "around", MILL_KEY_STRUCTURE, .scopes = APP | SUBSCRIPTION,
	  .doc = "Middleware: functions that run around the handlers." },

	{ "max_attempts", MILL_KEY_INTEGER, LANE(max_attempts), .min = 1, .max = MOST_ATTEMPTS,
	  .preset = 5, .unit = "attempts",
	  .doc = "How often a message is started before it becomes a dead letter." },
	{ "retry_backoff_secs", MILL_KEY_INTEGER, LANE(retry_backoff_secs), .min = 0,
	  .max = MILL_BACKOFF_MAX_SECS, .preset = 10, .unit = "seconds",
	  .doc = "The wait after the first failure; it doubles with each further one, up to an "
	         "hour." },
	{ "retry_jitter", MILL_KEY_NUMBER, LANE(retry_jitter), .min = 0, .max = 1, .preset = 0,
	  .unit = "share", .doc = "Adds at most this share to each wait, at random." },
	{ "timeout_secs", MILL_KEY_NUMBER, LANE(timeout_secs), .min = 0.001, .max = YEAR_SECS,
	  .preset = 300, .unit = "seconds", .doc = "The time limit of one attempt." },
	{ "retain_hours", MILL_KEY_INTEGER, LANE(retain_hours), .min = 0, .max = 24.0 * 366 * 100,
	  .preset = 24, .unit = "hours",
	  .doc = "How long finished messages are kept; 0 keeps them. Dead letters always stay." },

	{ "concurrency", MILL_KEY_INTEGER, .scopes = SUBSCRIPTION,
	  .offset = offsetof(struct mill_lane_options, concurrency), .min = 0, .max = 100000,
	  .preset = 0, .unit = "deliveries",
	  .doc = "The most of this subscription that run in one runtime at a time; 0: no limit of "
	         "its own." },
	{ "handler", MILL_KEY_STRUCTURE, .scopes = SUBSCRIPTION,
	  .doc = "The handler: a module's name or a function." },
};

const struct mill_config_key *mill_config_keys(size_t *count)
{
	*count = MILL_COUNT(keys);
	return keys;
}

const struct mill_config_key *mill_config_find(enum mill_config_scope scope, const char *name)
{
	for (size_t i = 0; i < MILL_COUNT(keys); i++)
		if ((keys[i].scopes & (1u << scope)) && strcmp(keys[i].name, name) == 0)
			return &keys[i];
	return NULL;
}

const char *mill_config_suggest(enum mill_config_scope scope, const char *name)
{
	const char *names[MILL_COUNT(keys)];
	size_t count = 0;
	for (size_t i = 0; i < MILL_COUNT(keys); i++)
		if (keys[i].scopes & (1u << scope))
			names[count++] = keys[i].name;
	return mill_policy_closest(name, names, count);
}

/* How an error shows the value that was found. */
static void show_value(const struct mill_value *value, char *shown, size_t size)
{
	switch (value->kind) {
	case MILL_VALUE_TEXT: {
		char *clean = mill_policy_clean_text(value->text, value->text_len, 40);
		snprintf(shown, size, "\"%s\"", clean);
		free(clean);
		break;
	}
	case MILL_VALUE_NUMBER:
		snprintf(shown, size, "%.14g", value->number);
		break;
	case MILL_VALUE_BOOLEAN:
		snprintf(shown, size, "%s", value->boolean ? "true" : "false");
		break;
	case MILL_VALUE_OTHER:
		snprintf(shown, size, "a %s", value->text);
		break;
	}
}

static int refuse(const struct mill_config_key *key, const struct mill_value *value,
                  struct mill_err *err)
{
	char found[160];
	show_value(value, found, sizeof(found));
	switch (key->kind) {
	case MILL_KEY_TEXT:
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "expected a text of 1 to %.0f bytes, found %s", key->max,
		                    found);
	case MILL_KEY_BOOLEAN:
		return mill_err_set(err, MILL_ERR_CONFIG, "expected true or false, found %s",
		                    found);
	default:
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "expected %s from %.14g to %.14g%s%s%s, found %s",
		                    key->kind == MILL_KEY_INTEGER ? "a whole number" : "a number",
		                    key->min, key->max, key->unit ? " (" : "",
		                    key->unit ? key->unit : "", key->unit ? ")" : "", found);
	}
}

/* Identifiers become part of statements, so they are checked rather than trusted. */
static int check_identifier(const struct mill_config_key *key, const char *text,
                            struct mill_err *err)
{
	bool identifier = strcmp(key->name, "schema") == 0 || strcmp(key->name, "table") == 0 ||
	                  strcmp(key->name, "prefix") == 0;
	if (!identifier || mill_policy_identifier(text, (size_t)key->max))
		return 0;
	return mill_err_set(
	        err, MILL_ERR_CONFIG,
	        "`%s` is not a name: use letters, digits and `_`, at most %.0f, no digit first",
	        text, key->max);
}

static int set_text(char **place, const struct mill_config_key *key, const struct mill_value *value,
                    struct mill_err *err)
{
	if (value->kind != MILL_VALUE_TEXT || value->text_len == 0 ||
	    (double)value->text_len > key->max || memchr(value->text, 0, value->text_len) != NULL)
		return refuse(key, value, err);
	char *copy = mill_strndup(value->text, value->text_len);
	char *clean = mill_policy_clean_text(value->text, value->text_len, value->text_len);
	bool is_utf8 = strcmp(clean, copy) == 0;
	free(clean);
	if (!is_utf8 || check_identifier(key, copy, err) != 0) {
		free(copy);
		return is_utf8 ? -1 : mill_err_set(err, MILL_ERR_CONFIG, "expected UTF-8 text");
	}
	free(*place);
	*place = copy;
	return 0;
}

static int set_at(void *base, const struct mill_config_key *key, const struct mill_value *value,
                  struct mill_err *err)
{
	void *place = (char *)base + key->offset;
	if (key->kind == MILL_KEY_TEXT)
		return set_text(place, key, value, err);
	if (key->kind == MILL_KEY_BOOLEAN) {
		if (value->kind != MILL_VALUE_BOOLEAN)
			return refuse(key, value, err);
		*(bool *)place = value->boolean;
		return 0;
	}
	/* The comparison is written so that NaN fails it. */
	if (value->kind != MILL_VALUE_NUMBER ||
	    !(value->number >= key->min && value->number <= key->max))
		return refuse(key, value, err);
	if (key->kind == MILL_KEY_NUMBER) {
		*(double *)place = value->number;
		return 0;
	}
	if (value->number != floor(value->number))
		return refuse(key, value, err);
	*(int64_t *)place = (int64_t)value->number;
	return 0;
}

/* Where the app keeps a key: lane options have their defaults inside the settings. */
static void *app_base(struct mill_settings *settings, const struct mill_config_key *key)
{
	return key->scopes & SUBSCRIPTION ? (void *)&settings->lane : (void *)settings;
}

int mill_config_set(struct mill_settings *settings, const struct mill_config_key *key,
                    const struct mill_value *value, struct mill_err *err)
{
	MILL_ASSERT(key->kind != MILL_KEY_STRUCTURE && (key->scopes & APP));
	return set_at(app_base(settings, key), key, value, err);
}

int mill_config_set_lane(struct mill_lane_options *options, const struct mill_config_key *key,
                         const struct mill_value *value, struct mill_err *err)
{
	MILL_ASSERT(key->kind != MILL_KEY_STRUCTURE && (key->scopes & SUBSCRIPTION));
	return set_at(options, key, value, err);
}
