/* `tidemill keys`, hidden: the table of configuration keys, for script/check-docs. */
#include <math.h>
#include <stdio.h>

#include "cli/cli.h"

/* Large whole numbers with all their digits. */
static void print_number(double number)
{
	printf(number == floor(number) ? "%.0f" : "%.14g", number);
}

static void print_preset(const struct mill_config_key *key)
{
	switch (key->kind) {
	case MILL_KEY_TEXT:
		printf("%s", key->preset_text ? key->preset_text : "unset");
		break;
	case MILL_KEY_BOOLEAN:
		printf("%s", key->preset != 0 ? "true" : "false");
		break;
	case MILL_KEY_INTEGER:
	case MILL_KEY_NUMBER:
		print_number(key->preset);
		break;
	case MILL_KEY_STRUCTURE:
		printf("unset");
		break;
	}
}

int mill_cli_keys(struct mill_cli *cli)
{
	static const char *const kinds[] = { "text", "integer", "number", "boolean", "structure" };
	size_t count;
	const struct mill_config_key *keys = mill_config_keys(&count);
	(void)cli;
	puts("name\tkind\tscope\tunit\tdefault\tmin\tmax\trestart\tdoc");
	for (size_t i = 0; i < count; i++) {
		const struct mill_config_key *key = &keys[i];
		bool app = key->scopes & (1u << MILL_SCOPE_APP);
		bool subscription = key->scopes & (1u << MILL_SCOPE_SUBSCRIPTION);
		printf("%s\t%s\t%s\t%s\t", key->name, kinds[key->kind],
		       app && subscription ? "both"
		       : app               ? "app"
		                           : "subscription",
		       key->unit ? key->unit : "");
		print_preset(key);
		printf("\t");
		print_number(key->min);
		printf("\t");
		print_number(key->max);
		printf("\t%s\t%s\n", key->restart ? "restart" : "", key->doc);
	}
	return MILL_EXIT_OK;
}
