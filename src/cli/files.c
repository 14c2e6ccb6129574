/* Files that commands write into an app's folder: see cli.h. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/cli.h"

char *mill_cli_in_folder(const char *folder, const char *name)
{
	if (strcmp(folder, ".") == 0)
		return mill_strdup(name);
	const char *slash = folder[strlen(folder) - 1] == '/' ? "" : "/";
	return mill_sprintf("%s%s%s", folder, slash, name);
}

int mill_cli_make_folders(const char *path, struct mill_err *err)
{
	char *made = mill_strdup(path);
	int result = 0;
	for (char *at = made + (made[0] == '/'); *at != 0 && result == 0; at++) {
		if (*at != '/')
			continue;
		*at = 0;
		if (mkdir(made, 0777) != 0 && errno != EEXIST)
			result = mill_err_system(err, errno, "cannot make the folder %s", made);
		*at = '/';
	}
	free(made);
	return result;
}

int mill_cli_write_file(const char *path, const char *text, bool replace, struct mill_err *err)
{
	int how = replace ? O_TRUNC : O_EXCL;
	int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | how, 0666);
	if (fd < 0)
		return mill_err_system(err, errno, "cannot make %s", path);
	size_t len = strlen(text), done = 0;
	int result = 0;
	while (result == 0 && done < len) {
		ssize_t n = write(fd, text + done, len - done);
		if (n > 0)
			done += (size_t)n;
		else if (errno != EINTR)
			result = mill_err_system(err, errno, "cannot write %s", path);
	}
	if (close(fd) != 0 && result == 0)
		result = mill_err_system(err, errno, "cannot write %s", path);
	return result;
}
