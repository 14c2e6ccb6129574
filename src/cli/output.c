/* How commands speak: errors, tables, quoted words. See cli.h. */
#include <stdarg.h>
#include <stdio.h>

#include "cli/cli.h"
#include "core/policy.h"

/* Clusters of letters that stand in one column are not counted apart: names are ASCII. */
static int width_of(const char *text)
{
	return (int)strlen(text);
}

/* One write, so that lines of several processes do not mix. */
static void say(const char *kind, const char *text)
{
	char *line = mill_sprintf("tidemill: %s%s\n", kind, text);
	fputs(line, stderr);
	free(line);
}

int mill_cli_fail(const struct mill_err *err)
{
	say("", err->message);
	switch (err->kind) {
	case MILL_ERR_CONFIG:
	case MILL_ERR_USAGE:
	case MILL_ERR_INPUT:
		return MILL_EXIT_USAGE;
	default:
		return MILL_EXIT_FAILURE;
	}
}

void mill_cli_warn(const char *format, ...)
{
	char text[1024];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	say("warning: ", text);
}

void mill_cli_print_json(FILE *out, const char *text)
{
	char *clean = mill_policy_clean_text(text, strlen(text), SIZE_MAX);
	fputc('"', out);
	for (const char *at = clean; *at; at++) {
		unsigned char c = (unsigned char)*at;
		if (c == '"' || c == '\\')
			fprintf(out, "\\%c", c);
		else if (c < 0x20)
			fprintf(out, "\\u%04x", c);
		else
			fputc(c, out);
	}
	fputc('"', out);
	free(clean);
}

char *mill_cli_shell_word(const char *word)
{
	static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
	                            "_-./:,+@%=";
	if (word[0] != 0 && word[strspn(word, plain)] == 0)
		return mill_strdup(word);
	struct mill_buffer quoted = { 0 };
	mill_buffer_text(&quoted, "'");
	for (; *word; word++)
		if (*word == '\'')
			mill_buffer_text(&quoted, "'\\''");
		else
			mill_buffer_bytes(&quoted, word, 1);
	mill_buffer_bytes(&quoted, "'", 2);
	return quoted.data;
}

void mill_cli_print_lanes(FILE *out, const struct mill_manifest *manifest, int indent)
{
	int topic = width_of("topic"), subscriber = width_of("subscriber");
	for (size_t i = 0; i < manifest->lane_count; i++) {
		int this_topic = width_of(manifest->lanes[i].topic);
		int this_subscriber = width_of(manifest->lanes[i].subscriber);
		topic = this_topic > topic ? this_topic : topic;
		subscriber = this_subscriber > subscriber ? this_subscriber : subscriber;
	}
	fprintf(out, "%*s%-*s  %-*s  %s\n", indent, "", topic, "topic", subscriber, "subscriber",
	        "handler");
	for (size_t i = 0; i < manifest->lane_count; i++)
		fprintf(out, "%*s%-*s  %-*s  %s\n", indent, "", topic, manifest->lanes[i].topic,
		        subscriber, manifest->lanes[i].subscriber, manifest->lanes[i].handler);
}
