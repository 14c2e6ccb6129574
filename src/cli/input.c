/* What is given to commands: payloads, times, ids. See cli.h. */
#include <errno.h>
#include <regex.h>
#include <unistd.h>

#include "cli/cli.h"
#include "core/uuid.h"

static int read_stdin(struct mill_buffer *payload, struct mill_err *err)
{
	while (true) {
		mill_buffer_reserve(payload, 65536);
		ssize_t n = read(STDIN_FILENO, payload->data + payload->len, 65536);
		if (n == 0)
			return 0;
		if (n > 0)
			payload->len += (size_t)n;
		else if (errno != EINTR)
			return mill_err_system(err, errno, "cannot read standard input");
		if (payload->len > MILL_FRAME_MAX)
			return mill_err_set(err, MILL_ERR_INPUT,
			                    "the message is larger than any queue takes");
	}
}

int mill_cli_read_payload(const char *operand, struct mill_buffer *payload, struct mill_err *err)
{
	if (strcmp(operand, "-") != 0)
		mill_buffer_text(payload, operand);
	else if (read_stdin(payload, err) != 0)
		return -1;
	mill_buffer_reserve(payload, 1);
	payload->data[payload->len] = 0;
	return 0;
}

int mill_cli_check_time(const char *name, const char *at, struct mill_err *err)
{
	regex_t pattern;
	int code =
	        regcomp(&pattern,
	                "^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\\.[0-9]+)?)?"
	                "([Zz]|[+-][0-9]{2}(:?[0-9]{2})?)$",
	                REG_EXTENDED | REG_NOSUB);
	MILL_ASSERT(code == 0);
	code = regexec(&pattern, at, 0, NULL, 0);
	regfree(&pattern);
	if (code == 0)
		return 0;
	return mill_err_set(
	        err, MILL_ERR_USAGE,
	        "`--%s` is `%s`: give a time with its zone, such as 2030-01-31T08:00:00Z", name,
	        at);
}

int mill_cli_check_id(const char *id, struct mill_err *err)
{
	uint8_t bytes[16];
	if (mill_uuid_parse(id, strlen(id), bytes) == 0)
		return 0;
	return mill_err_set(err, MILL_ERR_USAGE,
	                    "`%s` is not the id of a message: one looks like "
	                    "0190b6d2-5e7c-7a41-9c3f-2b8d1f6e4a05",
	                    id);
}
