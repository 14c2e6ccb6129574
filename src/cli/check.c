/* `tidemill check`: load everything and show what is wired to what. */
#include <stdio.h>

#include "cli/cli.h"

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

int mill_cli_check(struct mill_cli *cli)
{
	struct mill_manifest manifest;
	struct mill_err err = MILL_ERR_INIT;
	if (mill_cli_load(cli, MILL_LOAD_HANDLERS, &manifest, &err) != 0)
		return mill_cli_fail(&err);
	if (mill_cli_value(cli, "json") != NULL) {
		print_json(&manifest);
	} else if (manifest.lane_count == 0) {
		printf("%s is good, and subscribes to nothing\n", cli->config_path);
	} else {
		mill_cli_print_lanes(stdout, &manifest, 0);
		printf("\n%s is good: %zu subscription%s, all handlers load\n", cli->config_path,
		       manifest.lane_count, manifest.lane_count == 1 ? "" : "s");
	}
	mill_manifest_free(&manifest);
	return MILL_EXIT_OK;
}
