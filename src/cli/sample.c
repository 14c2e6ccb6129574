/* A file of sample messages: see sample.h. */
#include "cli/sample.h"

#include <errno.h>
#include <stdio.h>

#include "cli/cli.h"

static bool is_blank(const char *line)
{
	return line[strspn(line, " \t\r\n")] == 0;
}

char *mill_sample_read(const char *path, struct mill_err *err)
{
	FILE *file = fopen(path, "re");
	if (file == NULL) {
		mill_err_set(err, MILL_ERR_USAGE,
		             "`--sample` publishes what is in %s: %s; write one {\"topic\": …, "
		             "\"message\": …} a line there, or leave it out",
		             path, strerror(errno));
		return NULL;
	}
	int result = 0;
	struct mill_buffer array = { 0 };
	char *line = NULL;
	size_t room = 0;
	ssize_t len;
	for (int number = 1; result == 0 && (len = getline(&line, &room, file)) >= 0; number++) {
		if (is_blank(line))
			continue;
		result = mill_cli_check_json(line, (size_t)len, err);
		if (result != 0)
			mill_err_wrap(err, "%s:%d", path, number);
		mill_buffer_text(&array, array.len ? "," : "[");
		mill_buffer_bytes(&array, line, (size_t)len);
	}
	mill_buffer_text(&array, array.len ? "]" : "[]");
	char *text = result == 0 ? mill_strndup(array.data, array.len) : NULL;
	free(line);
	fclose(file);
	mill_buffer_free(&array);
	return text;
}

/* ---- one line -------------------------------------------------------------------------------- */

/* Behind the string that begins at `at`, of text that is JSON. */
static const char *behind_string(const char *at)
{
	for (at++; *at != '"'; at++)
		if (*at == '\\')
			at++;
	return at + 1;
}

/* Behind the value that begins at `at`, of text that is JSON. */
static const char *behind_value(const char *at)
{
	int depth = 0;
	do {
		if (*at == '"') {
			at = behind_string(at);
			continue;
		}
		if (*at == '{' || *at == '[')
			depth++;
		else if (*at == '}' || *at == ']')
			depth--;
		at++;
	} while (depth > 0 || (*at != 0 && strchr(",}] \t\r\n", *at) == NULL));
	return at;
}

static const char *behind_blanks(const char *at)
{
	return at + strspn(at, " \t\r\n");
}

/* The value of a member of the object `line`, which is JSON, as JSON; a new string or NULL. */
static char *member(const char *line, const char *name)
{
	char *quoted = mill_sprintf("\"%s\"", name), *found = NULL;
	const char *at = behind_blanks(line);
	if (*at == '{')
		at = behind_blanks(at + 1);
	while (*at == '"') {
		const char *key = at;
		at = behind_string(at);
		bool wanted = strlen(quoted) == (size_t)(at - key) &&
		              memcmp(quoted, key, (size_t)(at - key)) == 0;
		const char *value = behind_blanks(behind_blanks(at) + 1);
		at = behind_value(value);
		if (wanted) {
			free(found);
			found = mill_strndup(value, (size_t)(at - value));
		}
		at = behind_blanks(at);
		if (*at == ',')
			at = behind_blanks(at + 1);
	}
	free(quoted);
	return found;
}

/* The topic and the message of one line. */
static int read_line(const char *line, char **topic, char **message)
{
	struct mill_err ignored = MILL_ERR_INIT;
	if (mill_cli_check_json(line, strlen(line), &ignored) != 0)
		return -1;
	char *quoted = member(line, "topic");
	size_t len = quoted ? strlen(quoted) : 0;
	if (len < 3 || quoted[0] != '"' || strchr(quoted, '\\') != NULL) {
		free(quoted);
		return -1;
	}
	*topic = mill_strndup(quoted + 1, len - 2);
	free(quoted);
	*message = member(line, "message");
	if (*message == NULL)
		*message = member(line, "payload");
	if (*message == NULL)
		*message = mill_strdup("{}");
	return 0;
}

int mill_sample_first(const char *path, char **topic, char **message)
{
	FILE *file = fopen(path, "re");
	char *line = NULL;
	size_t room = 0;
	int result = -1;
	while (file != NULL && result != 0 && getline(&line, &room, file) >= 0)
		if (!is_blank(line))
			result = read_line(line, topic, message);
	free(line);
	if (file != NULL)
		fclose(file);
	return result;
}
