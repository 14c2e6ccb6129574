/*
 * The standard streams: a command whose output has nowhere to go says so before it does anything,
 * and one whose output was lost says what it did all the same. See cli.h.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"

static bool stdout_is_writable = true;

void mill_cli_take_streams(void)
{
	int flags = fcntl(STDOUT_FILENO, F_GETFL);
	stdout_is_writable = flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
	/* A descriptor of ours must not get the number of a standard stream that was closed. */
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (fcntl(fd, F_GETFD) < 0 &&
		    open("/dev/null", fd == STDIN_FILENO ? O_RDONLY : O_WRONLY) < 0)
			abort();
}

int mill_cli_check_output(struct mill_err *err)
{
	if (stdout_is_writable)
		return 0;
	return mill_err_set(err, MILL_ERR_SYSTEM,
	                    "standard output is closed, and nothing was done: where its output is "
	                    "not wanted, send it to /dev/null");
}

void mill_cli_did(struct mill_cli *cli, const char *format, ...)
{
	char text[512];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	free(cli->did);
	cli->did = mill_strdup(text);
}

/* Nobody reads the pipe or socket any more. */
static bool reader_is_gone(void)
{
	struct pollfd stream = { .fd = STDOUT_FILENO, .events = POLLOUT };
	return poll(&stream, 1, 0) == 1 && (stream.revents & (POLLERR | POLLHUP)) != 0;
}

int mill_cli_end_output(const struct mill_cli *cli, struct mill_err *err)
{
	bool lost_before = ferror(stdout) != 0;
	errno = 0;
	if (fflush(stdout) == 0 && !lost_before)
		return 0;
	int code = errno;
	/* One who reads the first lines and goes away does so on purpose. */
	if (code == EPIPE || reader_is_gone())
		return 0;
	mill_err_system(err, code ? code : EIO, "cannot write the output");
	char *cause = mill_strdup(err->message);
	if (cli->did != NULL)
		mill_err_set(err, MILL_ERR_SYSTEM, "%s, but %s", cause, cli->did);
	free(cause);
	return -1;
}
