/* Where the private Postgres of `tidemill dev` lies on disk: see devplace.h. */
#include "app/devplace.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/frame.h"
#include "core/log.h"

#define SOCKET_FOLDER_MAX 80 /* of 107 bytes for the whole path */

char *mill_devplace_path(const struct mill_devplace *place, const char *name)
{
	return mill_sprintf("%s/%s", place->folder, name);
}

/* ---- `where` --------------------------------------------------------------------------------- */

static void read_where(struct mill_devplace *place)
{
	char *path = mill_devplace_path(place, "where");
	FILE *file = fopen(path, "re");
	free(path);
	char line[PATH_MAX + 16];
	while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
		line[strcspn(line, "\n")] = 0;
		char **entry = strncmp(line, "data /", 6) == 0     ? &place->outer_data
		               : strncmp(line, "socket /", 8) == 0 ? &place->outer_socket
		                                                   : NULL;
		if (entry != NULL && *entry == NULL)
			*entry = mill_strdup(strchr(line, '/'));
	}
	if (file != NULL)
		fclose(file);
}

static int write_where(const struct mill_devplace *place, struct mill_err *err)
{
	char *path = mill_devplace_path(place, "where");
	char *fresh = mill_devplace_path(place, "where.new");
	struct mill_buffer text = { 0 };
	if (place->outer_data != NULL) {
		char *line = mill_sprintf("data %s\n", place->outer_data);
		mill_buffer_text(&text, line);
		free(line);
	}
	if (place->outer_socket != NULL) {
		char *line = mill_sprintf("socket %s\n", place->outer_socket);
		mill_buffer_text(&text, line);
		free(line);
	}
	int fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	bool written = fd >= 0 && write(fd, text.data, text.len) == (ssize_t)text.len &&
	               fsync(fd) == 0 && rename(fresh, path) == 0;
	int code = errno;
	if (fd >= 0)
		close(fd);
	mill_buffer_free(&text);
	int result = written ? 0 : mill_err_system(err, code, "cannot write %s", path);
	free(path);
	free(fresh);
	return result;
}

/* ---- folders --------------------------------------------------------------------------------- */

static uid_t server_uid(const struct mill_devplace *place)
{
	return place->as_account ? place->account.uid : geteuid();
}

/* A folder of `uid`, closed to others, and no link to one. errno says why not. */
static bool closed_folder_of(uid_t uid, const char *path)
{
	struct stat status;
	if (lstat(path, &status) != 0)
		return false;
	errno = EPERM;
	return S_ISDIR(status.st_mode) && status.st_uid == uid && (status.st_mode & 077) == 0;
}

static char *account_name(uid_t uid)
{
	struct passwd *found = getpwuid(uid);
	return found ? mill_strdup(found->pw_name) : mill_sprintf("number %u", (unsigned)uid);
}

/* Make `.tidemill` and make sure that it is ours. */
static int open_folder(struct mill_devplace *place, struct mill_err *err)
{
	const char *path = place->folder;
	/* Root's server account must pass through to what is inside. */
	mode_t mode = geteuid() == 0 ? 0711 : 0700;
	if (mkdir(path, mode) != 0 && errno != EEXIST)
		return mill_err_system(
		        err, errno,
		        "cannot make %s (name a database with --database to do without)", path);
	struct stat status;
	if (lstat(path, &status) != 0)
		return mill_err_system(err, errno, "%s", path);
	if (!S_ISDIR(status.st_mode))
		return mill_err_set(err, MILL_ERR_SYSTEM, "%s is not a folder: move it away", path);
	if (status.st_uid != geteuid()) {
		char *owner = account_name(status.st_uid);
		mill_err_set(
		        err, MILL_ERR_SYSTEM,
		        "%s belongs to the account %s: run this as that account, or remove the "
		        "folder to start with an empty database",
		        path, owner);
		free(owner);
		return -1;
	}
	if (chmod(path, mode) != 0)
		return mill_err_system(err, errno, "cannot close %s to others", path);
	char *ignore = mill_devplace_path(place, ".gitignore");
	int fd = open(ignore, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	free(ignore);
	if (fd >= 0) {
		/* A convenience: without it the folder merely shows up in `git status`. */
		if (write(fd, "*\n", 2) != 2)
			mill_log(MILL_LOG_DEBUG, "gitignore_not_written",
			         MILL_TEXT("folder", path));
		close(fd);
	}
	return 0;
}

static int choose_account(struct mill_devplace *place, struct mill_err *err)
{
	if (geteuid() != 0)
		return 0;
	place->as_account = true;
	if (mill_account_find("postgres", &place->account, NULL) == 0 ||
	    mill_account_find("nobody", &place->account, NULL) == 0)
		return 0;
	return mill_err_set(
	        err, MILL_ERR_SYSTEM,
	        "Postgres does not run as root, and there is no account `postgres` to run it "
	        "under: install the package postgresql, or run this as another account");
}

int mill_devplace_init(struct mill_devplace *place, const char *dir, struct mill_err *err)
{
	*place = (struct mill_devplace){ 0 };
	char *path = realpath(dir, NULL);
	if (path == NULL)
		return mill_err_system(err, errno, "%s", dir);
	place->folder = mill_sprintf("%s/.tidemill", path);
	free(path);
	return open_folder(place, err) == 0 ? choose_account(place, err) : -1;
}

void mill_devplace_fini(struct mill_devplace *place)
{
	free(place->folder);
	free(place->data);
	free(place->socket_folder);
	free(place->outer_data);
	free(place->outer_socket);
	*place = (struct mill_devplace){ 0 };
}

/* ---- the data -------------------------------------------------------------------------------- */

/* A fresh folder for the server's account alone, or NULL (errno). */
static char *fresh_folder(const struct mill_devplace *place, const char *pattern)
{
	char *path = mill_strdup(pattern);
	if (mkdtemp(path) != NULL) {
		if (!place->as_account || chown(path, place->account.uid, place->account.gid) == 0)
			return path;
		int code = errno;
		rmdir(path);
		errno = code;
	}
	free(path);
	return NULL;
}

/* The folder to make the data in, inside or outside; `data` is set to its later place. */
static char *make_fresh(struct mill_devplace *place, struct mill_err *err)
{
	char *pattern = mill_devplace_path(place, "new-XXXXXX");
	char *fresh = place->outer_data ? NULL : fresh_folder(place, pattern);
	free(pattern);
	if (fresh != NULL &&
	    (!place->as_account || mill_account_can(&place->account, fresh, R_OK | W_OK | X_OK))) {
		place->data = mill_devplace_path(place, "pg");
		return fresh;
	}
	int code = errno;
	if (fresh != NULL)
		rmdir(fresh);
	free(fresh);
	if (!place->as_account) {
		mill_err_system(err, code, "cannot make a folder in %s", place->folder);
		return NULL;
	}
	if (place->outer_data == NULL) {
		char *outer = fresh_folder(place, "/var/tmp/tidemill-XXXXXX");
		if (outer == NULL) {
			mill_err_system(err, errno, "cannot make a folder in /var/tmp");
			return NULL;
		}
		place->outer_data = outer;
		if (write_where(place, err) != 0)
			return NULL;
	}
	place->data = mill_sprintf("%s/pg", place->outer_data);
	pattern = mill_sprintf("%s/new-XXXXXX", place->outer_data);
	fresh = fresh_folder(place, pattern);
	free(pattern);
	if (fresh == NULL)
		mill_err_system(err, errno, "cannot make a folder in %s", place->outer_data);
	return fresh;
}

/* Folders that an interrupted creation left. */
static void sweep(const char *folder)
{
	const char *argv[] = { "sh", "-c", "rm -rf -- \"$1\"/new-??????", "sh", folder, NULL };
	struct mill_child_options options = {
		.program = "/bin/sh",
		.argv = argv,
		.fds = { -1, -1, -1, -1, -1 },
		.bare_environment = true,
	};
	pid_t pid = mill_child_start(&options, NULL);
	if (pid > 0)
		mill_child_reap(pid);
}

static int sync_folder(const char *path)
{
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int result = fd < 0 ? -1 : fsync(fd);
	if (fd >= 0)
		close(fd);
	return result;
}

/* The folder that the data folder is in. */
static const char *holder(const struct mill_devplace *place)
{
	return place->outer_data ? place->outer_data : place->folder;
}

char *mill_devplace_prepare(struct mill_devplace *place, struct mill_err *err)
{
	sweep(holder(place));
	return make_fresh(place, err);
}

int mill_devplace_adopt(struct mill_devplace *place, const char *fresh, struct mill_err *err)
{
	if (rename(fresh, place->data) != 0)
		return mill_err_system(err, errno, "cannot rename %s", fresh);
	if (sync_folder(holder(place)) != 0)
		return mill_err_system(err, errno, "cannot write %s to disk", place->data);
	return 0;
}

void mill_devplace_abandon(struct mill_devplace *place)
{
	sweep(holder(place));
}

int mill_devplace_find(struct mill_devplace *place, struct mill_err *err)
{
	read_where(place);
	if (place->outer_data != NULL && !closed_folder_of(server_uid(place), place->outer_data)) {
		if (errno != ENOENT)
			return mill_err_set(
			        err, MILL_ERR_SYSTEM,
			        "%s, which %s/where names, is not what this program made there: "
			        "look what it is, or remove %s to start with an empty database",
			        place->outer_data, place->folder, place->folder);
		mill_log(MILL_LOG_WARN, "devdb_gone", MILL_TEXT("folder", place->outer_data));
		free(place->outer_data);
		place->outer_data = NULL;
		if (write_where(place, err) != 0)
			return -1;
	}
	char *data = mill_sprintf("%s/pg", holder(place));
	struct stat status;
	if (lstat(data, &status) != 0 && errno == ENOENT) {
		free(data);
		return 0;
	}
	place->data = data;
	if (!closed_folder_of(server_uid(place), data))
		return mill_err_set(
		        err, MILL_ERR_SYSTEM,
		        "%s is not a data folder of the account %s: remove %s to start with an "
		        "empty database",
		        data, place->as_account ? place->account.name : "that runs this",
		        place->folder);
	if (place->as_account && !mill_account_can(&place->account, data, R_OK | W_OK | X_OK))
		return mill_err_set(
		        err, MILL_ERR_SYSTEM,
		        "the account %s, which runs Postgres for root, can no longer reach %s: "
		        "give it passage (chmod o+x) through the folders above, or remove %s to "
		        "start with an empty database",
		        place->account.name, data, place->folder);
	return 1;
}

/* ---- the socket, and a look from outside ------------------------------------------------------
 */

int mill_devplace_choose_socket(struct mill_devplace *place, struct mill_err *err)
{
	if (strlen(place->data) <= SOCKET_FOLDER_MAX && strpbrk(place->data, ",\"\n") == NULL) {
		place->socket_folder = mill_strdup(place->data);
		return 0;
	}
	if (place->outer_socket == NULL ||
	    !closed_folder_of(server_uid(place), place->outer_socket)) {
		free(place->outer_socket);
		place->outer_socket = fresh_folder(place, "/tmp/tidemill-XXXXXX");
		if (place->outer_socket == NULL)
			return mill_err_system(err, errno, "cannot make a folder in /tmp");
		if (write_where(place, err) != 0)
			return -1;
	}
	place->socket_folder = mill_strdup(place->outer_socket);
	return 0;
}

void mill_devplace_drop_socket(struct mill_devplace *place)
{
	if (place->outer_socket == NULL || rmdir(place->outer_socket) != 0)
		return;
	free(place->outer_socket);
	place->outer_socket = NULL;
	/* A line that stays is harmless: the next start sees that the folder is gone. */
	write_where(place, NULL);
}

char *mill_devplace_peek(const char *dir, char **closed)
{
	*closed = NULL;
	char *path = realpath(dir, NULL);
	if (path == NULL)
		return NULL;
	struct mill_devplace place = { .folder = mill_sprintf("%s/.tidemill", path) };
	free(path);
	struct stat status;
	char *data = NULL;
	/* Somebody else's folder leads to somebody else's server; only root looks into all. */
	if (lstat(place.folder, &status) != 0) {
		if (errno == EACCES)
			*closed = mill_sprintf("this account may not look into %s", place.folder);
	} else if (S_ISDIR(status.st_mode) && status.st_uid != geteuid() && geteuid() != 0) {
		char *owner = account_name(status.st_uid);
		*closed = mill_sprintf(
		        "this account may not look into %s, where the `tidemill dev` of the "
		        "account %s has its database",
		        place.folder, owner);
		free(owner);
	} else if (S_ISDIR(status.st_mode)) {
		read_where(&place);
		data = mill_sprintf("%s/pg", holder(&place));
	}
	mill_devplace_fini(&place);
	return data;
}
