/*
 * The private Postgres of `tidemill dev`: see devdb.h.
 *
 * What lies in `.tidemill`, which belongs to whoever runs dev:
 *
 *     lock          held while a dev runs, with its pid in it
 *     pg            the data folder, and the socket where its path is short enough
 *     where         folders elsewhere, if any: a line `data PATH`, a line `socket PATH`
 *     postgres.log  what the server and initdb say
 *     .gitignore    so that nothing of this gets into a repository
 *
 * Postgres refuses to run as root, so root's server runs under the account `postgres` (or `nobody`).
 * Where that account cannot reach the folder, the data goes to a folder of its own in /var/tmp. A
 * folder elsewhere is used only while it is that account's and closed to everyone else, so nobody
 * can put one of theirs in its place.
 */
#include "app/devdb.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "app/postmaster.h"
#include "core/frame.h"
#include "core/log.h"

#define LOG_MAX_BYTES (8 * 1024 * 1024) /* a longer log is begun anew */
#define SOCKET_FOLDER_MAX 80		/* of 107 bytes for the whole path */

struct mill_devdb {
	char *folder; /* …/.tidemill */
	char *data;   /* NULL until it is known */
	char *socket_folder;
	int lock, log;
	struct mill_account account;
	bool as_account; /* else as ourselves */
	struct mill_postmaster server;
	char *dsn;
};

static char *inside(const char *folder, const char *name)
{
	return mill_sprintf("%s/%s", folder, name);
}

/* ---- `where` ----------------------------------------------------------------------------------- */

struct places {
	char *data, *socket;
};

static void free_places(struct places *places)
{
	free(places->data);
	free(places->socket);
}

static struct places read_places(const char *folder)
{
	struct places places = { 0 };
	char *path = inside(folder, "where");
	FILE *file = fopen(path, "re");
	free(path);
	char line[PATH_MAX + 16];
	while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
		line[strcspn(line, "\n")] = 0;
		char **place = strncmp(line, "data /", 6) == 0	   ? &places.data :
			       strncmp(line, "socket /", 8) == 0 ? &places.socket :
								     NULL;
		if (place != NULL && *place == NULL)
			*place = mill_strdup(strchr(line, '/'));
	}
	if (file != NULL)
		fclose(file);
	return places;
}

static int write_places(const char *folder, const struct places *places, struct mill_err *err)
{
	char *path = inside(folder, "where"), *fresh = inside(folder, "where.new");
	struct mill_buffer text = { 0 };
	if (places->data != NULL) {
		char *line = mill_sprintf("data %s\n", places->data);
		mill_buffer_text(&text, line);
		free(line);
	}
	if (places->socket != NULL) {
		char *line = mill_sprintf("socket %s\n", places->socket);
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

/* ---- folders ----------------------------------------------------------------------------------- */

static uid_t server_uid(const struct mill_devdb *devdb)
{
	return devdb->as_account ? devdb->account.uid : geteuid();
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
static int open_folder(struct mill_devdb *devdb, struct mill_err *err)
{
	const char *path = devdb->folder;
	/* Root's server account must pass through to what is inside. */
	mode_t mode = geteuid() == 0 ? 0711 : 0700;
	if (mkdir(path, mode) != 0 && errno != EEXIST)
		return mill_err_system(err, errno,
				       "cannot make %s (name a database with --database to do without)",
				       path);
	struct stat status;
	if (lstat(path, &status) != 0)
		return mill_err_system(err, errno, "%s", path);
	if (!S_ISDIR(status.st_mode))
		return mill_err_set(err, MILL_ERR_SYSTEM, "%s is not a folder: move it away", path);
	if (status.st_uid != geteuid()) {
		char *owner = account_name(status.st_uid);
		mill_err_set(err, MILL_ERR_SYSTEM,
			     "%s belongs to the account %s: run this as that account, or remove the "
			     "folder to start with an empty database",
			     path, owner);
		free(owner);
		return -1;
	}
	if (chmod(path, mode) != 0)
		return mill_err_system(err, errno, "cannot close %s to others", path);
	char *ignore = inside(path, ".gitignore");
	int fd = open(ignore, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	free(ignore);
	if (fd >= 0) {
		/* A convenience: without it the folder merely shows up in `git status`. */
		if (write(fd, "*\n", 2) != 2)
			mill_log(MILL_LOG_DEBUG, "gitignore_not_written", MILL_TEXT("folder", path));
		close(fd);
	}
	return 0;
}

static int refuse_second(int lock, struct mill_err *err)
{
	char pid[32];
	ssize_t len = pread(lock, pid, sizeof(pid) - 1, 0);
	pid[len > 0 ? len : 0] = 0;
	pid[strcspn(pid, "\n")] = 0;
	return mill_err_set(err, MILL_ERR_USAGE,
			    "`tidemill dev` already runs here (pid %s): stop it, or use another folder",
			    pid[0] ? pid : "unknown");
}

static int take_lock(struct mill_devdb *devdb, struct mill_err *err)
{
	char *path = inside(devdb->folder, "lock");
	int result = 0;
	devdb->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (devdb->lock < 0) {
		result = mill_err_system(err, errno, "cannot open %s", path);
	} else if (flock(devdb->lock, LOCK_EX | LOCK_NB) != 0) {
		result = errno == EWOULDBLOCK ? refuse_second(devdb->lock, err) :
						mill_err_system(err, errno, "cannot lock %s", path);
	} else {
		char pid[32];
		int len = snprintf(pid, sizeof(pid), "%d\n", (int)getpid());
		if (ftruncate(devdb->lock, 0) != 0 || pwrite(devdb->lock, pid, (size_t)len, 0) != len)
			result = mill_err_system(err, errno, "cannot write %s", path);
	}
	free(path);
	return result;
}

static int open_log(struct mill_devdb *devdb, struct mill_err *err)
{
	char *path = inside(devdb->folder, "postgres.log");
	devdb->log = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	struct stat status;
	int result = 0;
	if (devdb->log < 0)
		result = mill_err_system(err, errno, "cannot open %s", path);
	else if (fstat(devdb->log, &status) == 0 && status.st_size > LOG_MAX_BYTES &&
		 ftruncate(devdb->log, 0) != 0)
		result = mill_err_system(err, errno, "cannot shorten %s", path);
	free(path);
	return result;
}

/* Add what the server complained of last, and where the rest is. */
static int explain_by_log(const struct mill_devdb *devdb, struct mill_err *err)
{
	static const char *const marks[] = { "FATAL: ", "PANIC: ", "ERROR: ", "error: " };
	char text[4096];
	struct stat status;
	off_t from = 0;
	if (err->code == EINTR)
		return -1;
	if (fstat(devdb->log, &status) == 0 && status.st_size > (off_t)sizeof(text) - 1)
		from = status.st_size - (off_t)sizeof(text) + 1;
	ssize_t len = pread(devdb->log, text, sizeof(text) - 1, from);
	text[len > 0 ? len : 0] = 0;
	const char *complaint = NULL;
	char *rest = text;
	for (char *line; (line = strsep(&rest, "\n")) != NULL;)
		for (size_t i = 0; i < MILL_COUNT(marks); i++) {
			const char *mark = strstr(line, marks[i]);
			if (mark != NULL)
				complaint = mark + strlen(marks[i]);
		}
	char *said = mill_strdup(err->message);
	mill_err_set(err, err->kind, "%s%s%s (see %s/postgres.log)", said, complaint ? ": " : "",
		     complaint ? complaint : "", devdb->folder);
	free(said);
	return -1;
}

/* ---- where the data lies ----------------------------------------------------------------------- */

static int choose_account(struct mill_devdb *devdb, struct mill_err *err)
{
	if (geteuid() != 0)
		return 0;
	devdb->as_account = true;
	if (mill_account_find("postgres", &devdb->account, NULL) == 0 ||
	    mill_account_find("nobody", &devdb->account, NULL) == 0)
		return 0;
	return mill_err_set(err, MILL_ERR_SYSTEM,
			    "Postgres does not run as root, and there is no account `postgres` to run it "
			    "under: install the package postgresql, or run this as another account");
}

/* A fresh folder for the server's account alone, or NULL (errno). */
static char *fresh_folder(const struct mill_devdb *devdb, const char *pattern)
{
	char *path = mill_strdup(pattern);
	if (mkdtemp(path) != NULL) {
		if (!devdb->as_account || chown(path, devdb->account.uid, devdb->account.gid) == 0)
			return path;
		int code = errno;
		rmdir(path);
		errno = code;
	}
	free(path);
	return NULL;
}

/*
 * An empty folder to make the database in, beside where it will be; its place becomes devdb->data.
 * NULL on failure.
 */
static char *prepare_data(struct mill_devdb *devdb, struct places *places, struct mill_err *err)
{
	char *pattern = inside(devdb->folder, "new-XXXXXX");
	char *fresh = places->data ? NULL : fresh_folder(devdb, pattern);
	free(pattern);
	if (fresh != NULL && (!devdb->as_account ||
			      mill_account_can(&devdb->account, fresh, R_OK | W_OK | X_OK))) {
		devdb->data = inside(devdb->folder, "pg");
		return fresh;
	}
	int code = errno;
	if (fresh != NULL)
		rmdir(fresh);
	free(fresh);
	if (!devdb->as_account) {
		mill_err_system(err, code, "cannot make a folder in %s", devdb->folder);
		return NULL;
	}
	if (places->data == NULL) {
		char *outer = fresh_folder(devdb, "/var/tmp/tidemill-XXXXXX");
		if (outer == NULL) {
			mill_err_system(err, errno, "cannot make a folder in /var/tmp");
			return NULL;
		}
		places->data = outer;
		if (write_places(devdb->folder, places, err) != 0)
			return NULL;
	}
	devdb->data = inside(places->data, "pg");
	pattern = inside(places->data, "new-XXXXXX");
	fresh = fresh_folder(devdb, pattern);
	free(pattern);
	if (fresh == NULL)
		mill_err_system(err, errno, "cannot make a folder in %s", places->data);
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

static int create_data(struct mill_devdb *devdb, struct places *places, char bin[PATH_MAX],
		       struct mill_err *err)
{
	if (mill_postmaster_find(0, bin, err) < 0)
		return -1;
	sweep(places->data ? places->data : devdb->folder);
	char *fresh = prepare_data(devdb, places, err);
	if (fresh == NULL)
		return -1;
	const struct mill_account *account = devdb->as_account ? &devdb->account : NULL;
	mill_log(MILL_LOG_INFO, "devdb_create", MILL_TEXT("folder", devdb->data),
		 MILL_TEXT("account", account ? account->name : NULL));
	int result = mill_postmaster_create(bin, account, fresh, devdb->log, err);
	if (result != 0)
		explain_by_log(devdb, err);
	else if (rename(fresh, devdb->data) != 0)
		result = mill_err_system(err, errno, "cannot rename %s", fresh);
	else if (sync_folder(places->data ? places->data : devdb->folder) != 0)
		result = mill_err_system(err, errno, "cannot write %s to disk", devdb->data);
	if (result != 0)
		sweep(places->data ? places->data : devdb->folder);
	free(fresh);
	return result;
}

/*
 * Find the data that is there. 1: devdb->data is set; 0: there is none yet; −1: there is something
 * that is not to be used.
 */
static int find_data(struct mill_devdb *devdb, struct places *places, struct mill_err *err)
{
	if (places->data != NULL && !closed_folder_of(server_uid(devdb), places->data)) {
		if (errno != ENOENT)
			return mill_err_set(err, MILL_ERR_SYSTEM,
					    "%s, which %s/where names, is not what this program made there: "
					    "look what it is, or remove %s to start with an empty database",
					    places->data, devdb->folder, devdb->folder);
		mill_log(MILL_LOG_WARN, "devdb_gone", MILL_TEXT("folder", places->data));
		free(places->data);
		places->data = NULL;
		if (write_places(devdb->folder, places, err) != 0)
			return -1;
	}
	char *data = inside(places->data ? places->data : devdb->folder, "pg");
	struct stat status;
	if (lstat(data, &status) != 0 && errno == ENOENT) {
		free(data);
		return 0;
	}
	devdb->data = data;
	if (!closed_folder_of(server_uid(devdb), data))
		return mill_err_set(err, MILL_ERR_SYSTEM,
				    "%s is not a data folder of the account %s: remove %s to start with an "
				    "empty database",
				    data, devdb->as_account ? devdb->account.name : "that runs this",
				    devdb->folder);
	if (devdb->as_account && !mill_account_can(&devdb->account, data, R_OK | W_OK | X_OK))
		return mill_err_set(err, MILL_ERR_SYSTEM,
				    "the account %s, which runs Postgres for root, can no longer reach %s: "
				    "give it passage (chmod o+x) through the folders above, or remove %s to "
				    "start with an empty database",
				    devdb->account.name, data, devdb->folder);
	return 1;
}

/* ---- the socket -------------------------------------------------------------------------------- */

/*
 * The data folder itself where its path is short enough for a socket, and free of what separates
 * hosts in a conninfo and folders in a setting; else a folder in /tmp.
 */
static int choose_socket_folder(struct mill_devdb *devdb, struct places *places, struct mill_err *err)
{
	if (strlen(devdb->data) <= SOCKET_FOLDER_MAX && strpbrk(devdb->data, ",\"\n") == NULL) {
		devdb->socket_folder = mill_strdup(devdb->data);
		return 0;
	}
	if (places->socket == NULL || !closed_folder_of(server_uid(devdb), places->socket)) {
		free(places->socket);
		places->socket = fresh_folder(devdb, "/tmp/tidemill-XXXXXX");
		if (places->socket == NULL)
			return mill_err_system(err, errno, "cannot make a folder in /tmp");
		if (write_places(devdb->folder, places, err) != 0)
			return -1;
	}
	devdb->socket_folder = mill_strdup(places->socket);
	return 0;
}

/* The conninfo of a server. A value in quotes may hold anything; a plain one is easier to read. */
static char *server_dsn(const struct mill_postmaster *server)
{
	const char *folder = server->socket_folder;
	bool quoted = strpbrk(folder, " '\\\t") != NULL;
	struct mill_buffer host = { 0 };
	for (const char *at = folder; *at; at++) {
		if (*at == '\'' || *at == '\\')
			mill_buffer_bytes(&host, "\\", 1);
		mill_buffer_bytes(&host, at, 1);
	}
	const char *quote = quoted ? "'" : "";
	char *dsn = mill_sprintf("host=%s%.*s%s port=%d user=" MILL_POSTMASTER_USER
				 " dbname=" MILL_POSTMASTER_DATABASE,
				 quote, (int)host.len, host.data, quote, server->port);
	mill_buffer_free(&host);
	return dsn;
}

/* ---- open, find, close ------------------------------------------------------------------------- */

static int start_server(struct mill_devdb *devdb, struct places *places, const char *bin,
			struct mill_err *err)
{
	if (choose_socket_folder(devdb, places, err) != 0)
		return -1;
	if (mill_postmaster_start(bin, devdb->as_account ? &devdb->account : NULL, devdb->data,
				  devdb->socket_folder, devdb->log, &devdb->server, err) != 0)
		return explain_by_log(devdb, err);
	return 0;
}

static int open_server(struct mill_devdb *devdb, struct places *places, struct mill_err *err)
{
	char bin[PATH_MAX];
	int found = find_data(devdb, places, err);
	if (found < 0)
		return -1;
	if (found == 0)
		return create_data(devdb, places, bin, err) == 0 ?
			       start_server(devdb, places, bin, err) :
			       -1;
	if (mill_postmaster_running(devdb->data, &devdb->server)) {
		mill_log(MILL_LOG_INFO, "devdb_taken_over", MILL_INT("pid", devdb->server.pid));
		return mill_postmaster_wait_ready(devdb->data, &devdb->server, err);
	}
	int major = mill_postmaster_data_version(devdb->data);
	if (major < 0)
		return mill_err_set(err, MILL_ERR_SYSTEM,
				    "%s is not a Postgres data folder: remove %s to start with an empty "
				    "database",
				    devdb->data, devdb->folder);
	if (mill_postmaster_find(major, bin, err) < 0) {
		char *said = mill_strdup(err->message);
		mill_err_set(err, err->kind,
			     "%s was made by Postgres %d: %s, or remove %s to start with an empty database",
			     devdb->data, major, said, devdb->folder);
		free(said);
		return -1;
	}
	return start_server(devdb, places, bin, err);
}

static void free_devdb(struct mill_devdb *devdb)
{
	if (devdb->log >= 0)
		close(devdb->log);
	if (devdb->lock >= 0)
		close(devdb->lock);
	free(devdb->folder);
	free(devdb->data);
	free(devdb->socket_folder);
	free(devdb->dsn);
	free(devdb);
}

int mill_devdb_open(const char *dir, struct mill_devdb **opened, struct mill_err *err)
{
	char *path = realpath(dir, NULL);
	if (path == NULL)
		return mill_err_system(err, errno, "%s", dir);
	struct mill_devdb *devdb = mill_calloc(1, sizeof(*devdb));
	devdb->lock = devdb->log = -1;
	devdb->folder = inside(path, ".tidemill");
	free(path);
	struct places places = { 0 };
	int result = -1;
	if (open_folder(devdb, err) == 0 && take_lock(devdb, err) == 0 && open_log(devdb, err) == 0 &&
	    choose_account(devdb, err) == 0) {
		places = read_places(devdb->folder);
		result = open_server(devdb, &places, err);
	}
	free_places(&places);
	if (result != 0) {
		free_devdb(devdb);
		return -1;
	}
	devdb->dsn = server_dsn(&devdb->server);
	*opened = devdb;
	return 0;
}

const char *mill_devdb_dsn(const struct mill_devdb *devdb)
{
	return devdb->dsn;
}

const char *mill_devdb_folder(const struct mill_devdb *devdb)
{
	return devdb->data;
}

void mill_devdb_close(struct mill_devdb *devdb)
{
	if (mill_postmaster_stop(devdb->data, &devdb->server) != 0)
		mill_log(MILL_LOG_ERROR, "devdb_does_not_stop", MILL_INT("pid", devdb->server.pid));
	free_devdb(devdb);
}

char *mill_devdb_find(const char *dir)
{
	char *path = realpath(dir, NULL);
	if (path == NULL)
		return NULL;
	char *folder = inside(path, ".tidemill");
	free(path);
	struct stat status;
	char *dsn = NULL;
	/* Somebody else's folder leads to somebody else's server; only root looks into all. */
	if (lstat(folder, &status) == 0 && S_ISDIR(status.st_mode) &&
	    (status.st_uid == geteuid() || geteuid() == 0)) {
		struct places places = read_places(folder);
		char *data = inside(places.data ? places.data : folder, "pg");
		struct mill_postmaster server;
		if (mill_postmaster_running(data, &server) && server.socket_folder[0] == '/')
			dsn = server_dsn(&server);
		free(data);
		free_places(&places);
	}
	free(folder);
	return dsn;
}
