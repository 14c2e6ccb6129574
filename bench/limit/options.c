/* The command line of the claim experiment: see options.h. One table, for reading and printing. */
#include "options.h"

#include <errno.h>
#include <stdio.h>

#include "core/policy.h"

enum kind { NUMBER, SWITCH, NAME };

static const struct key {
	const char *name;
	enum kind kind;
	size_t offset;
	int64_t least, most;
	const char *doc;
} keys[] = {
#define AT(member) #member, NUMBER, offsetof(struct bench_options, member)
#define SW(member) #member, SWITCH, offsetof(struct bench_options, member), 0, 1
	{ AT(rows), 1, 100000000, "pending messages to claim and settle" },
	{ AT(batch), 1, 10000, "most rows a claim takes" },
	{ AT(done), 0, 100000000, "rows that are done already" },
	{ AT(future), 0, 100000000, "rows that are due tomorrow" },
	{ AT(lanes), 1, 100000, "lanes that the pending rows are spread over" },
	{ AT(per_call), 1, 1000000, "consecutive rows with the same due time" },
	{ AT(pad), 0, 1000000, "bytes of padding in each payload" },
	{ AT(secs), 1, 86400, "end after so long, finished or not" },
	{ SW(snapshot), "another session holds an old snapshot" },
	{ SW(stale), "the statistics say that the table is empty" },
	{ SW(pipeline), "settle and claim in one round trip" },
	{ SW(marks), "claims begin at a low-water mark" },
	{ SW(pin), "claims and settles pin their plan" },
	{ "schema", NAME, offsetof(struct bench_options, schema), 0, 0,
	  "dropped and made anew at the start" },
#undef AT
#undef SW
};

static void *place(struct bench_options *options, const struct key *key)
{
	return (char *)options + key->offset;
}

static MILL_NORETURN void refuse(const char *word, const char *why)
{
	const struct bench_options presets = bench_options_read(0, NULL);
	fprintf(stderr, "claim: `%s` %s\nusage: claim [key=value ...]\n", word, why);
	for (size_t i = 0; i < MILL_COUNT(keys); i++) {
		const void *at = (const char *)&presets + keys[i].offset;
		fprintf(stderr, "  %-9s %s", keys[i].name, keys[i].doc);
		if (keys[i].kind == NUMBER)
			fprintf(stderr, " (%lld)\n", (long long)*(const int64_t *)at);
		else if (keys[i].kind == SWITCH)
			fprintf(stderr, ": 0 or 1 (%d)\n", *(const bool *)at);
		else
			fprintf(stderr, " (%s)\n", *(const char *const *)at);
	}
	exit(2);
}

static const struct key *find(const char *word, const char **value)
{
	for (size_t i = 0; i < MILL_COUNT(keys); i++) {
		size_t len = strlen(keys[i].name);
		if (strncmp(word, keys[i].name, len) == 0 && word[len] == '=') {
			*value = word + len + 1;
			return &keys[i];
		}
	}
	refuse(word, "is no option");
}

static int64_t number(const struct key *key, const char *word, const char *value)
{
	char *end;
	errno = 0;
	long long found = strtoll(value, &end, 10);
	if (errno != 0 || *value == '\0' || *end != '\0' || found < key->least ||
	    found > key->most) {
		char why[100];
		snprintf(why, sizeof(why), "is no whole number from %lld to %lld",
		         (long long)key->least, (long long)key->most);
		refuse(word, why);
	}
	return found;
}

struct bench_options bench_options_read(int argc, char **argv)
{
	struct bench_options options = {
		.rows = 100000,
		.batch = 100,
		.lanes = 1,
		.per_call = 1000,
		.pad = 40,
		.secs = 120,
		.pipeline = true,
		.marks = true,
		.pin = true,
		.schema = "tidemill_bench",
	};
	for (int i = 1; i < argc; i++) {
		const char *value;
		const struct key *key = find(argv[i], &value);
		if (key->kind == NUMBER)
			*(int64_t *)place(&options, key) = number(key, argv[i], value);
		else if (key->kind == SWITCH)
			*(bool *)place(&options, key) = number(key, argv[i], value) != 0;
		else if (mill_policy_identifier(value, MILL_IDENTIFIER_MAX))
			*(const char **)place(&options, key) = value;
		else
			refuse(argv[i], "is no plain identifier");
	}
	return options;
}

void bench_options_print(const struct bench_options *options)
{
	for (size_t i = 0; i < MILL_COUNT(keys); i++) {
		const void *at = (const char *)options + keys[i].offset;
		if (keys[i].kind == NAME)
			continue;
		long long shown = keys[i].kind == NUMBER ? *(const int64_t *)at : *(const bool *)at;
		printf("%s\"%s\": %lld", i ? ", " : "", keys[i].name, shown);
	}
}
