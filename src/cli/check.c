/* `tidemill check`: load everything and show what is wired to what. */
#include <stdio.h>

#include "cli/cli.h"
#include "pg/session.h"

static void print_option(const struct mill_config_key *key, const struct mill_lane_options *options)
{
	const void *place = (const char *)options + key->offset;
	if (key->kind == MILL_KEY_INTEGER)
		printf(",\"%s\":%lld", key->name, (long long)*(const int64_t *)place);
	else if (key->kind == MILL_KEY_NUMBER)
		printf(",\"%s\":%.17g", key->name, *(const double *)place);
}

static void print_json(const struct mill_manifest *manifest)
{
	size_t count;
	const struct mill_config_key *keys = mill_config_keys(&count);
	printf("{\"app\":");
	mill_cli_print_json(stdout, manifest->settings.app);
	printf(",\"subscriptions\":[");
	for (size_t i = 0; i < manifest->lane_count; i++) {
		const struct mill_manifest_lane *lane = &manifest->lanes[i];
		printf("%s{\"topic\":", i ? "," : "");
		mill_cli_print_json(stdout, lane->topic);
		printf(",\"subscriber\":");
		mill_cli_print_json(stdout, lane->subscriber);
		printf(",\"handler\":");
		mill_cli_print_json(stdout, lane->handler);
		for (size_t k = 0; k < count; k++)
			if (keys[k].scopes & (1u << MILL_SCOPE_SUBSCRIPTION))
				print_option(&keys[k], &lane->options);
		printf("}");
	}
	printf("]}\n");
}

/* Can the config's addresses be read? Whether they lead anywhere is not asked. */
static int check_addresses(const struct mill_cli *cli, const struct mill_settings *settings,
                           struct mill_err *err)
{
	const struct {
		const char *key, *dsn;
	} addresses[] = { { "database", settings->database },
		          { "listen_database", settings->listen_database } };
	for (size_t i = 0; i < MILL_COUNT(addresses); i++)
		if (addresses[i].dsn != NULL && mill_session_check_dsn(addresses[i].dsn, err) != 0)
			return mill_err_wrap(err, "%s: %s", cli->config_path, addresses[i].key);
	return 0;
}

int mill_cli_check(struct mill_cli *cli)
{
	struct mill_manifest manifest;
	struct mill_err err = MILL_ERR_INIT;
	if (mill_cli_load(cli, MILL_LOAD_HANDLERS, &manifest, &err) != 0)
		return mill_cli_fail(&err);
	if (check_addresses(cli, &manifest.settings, &err) != 0) {
		mill_manifest_free(&manifest);
		return mill_cli_fail(&err);
	}
	const char *app = manifest.settings.app;
	if (mill_cli_value(cli, "json") != NULL) {
		print_json(&manifest);
	} else if (manifest.lane_count == 0) {
		printf("%s is good: app \"%s\", which subscribes to nothing\n", cli->config_path,
		       app);
	} else {
		mill_cli_print_lanes(stdout, &manifest, 0);
		printf("\n%s is good: app \"%s\", %zu subscription%s, all handlers load\n",
		       cli->config_path, app, manifest.lane_count,
		       manifest.lane_count == 1 ? "" : "s");
	}
	mill_manifest_free(&manifest);
	return MILL_EXIT_OK;
}
