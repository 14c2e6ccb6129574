/*
 * The private Postgres of `tidemill dev`: see devdb.h. Where it lies is devplace's business, how a
 * server is made and watched postmaster's.
 */
#include "app/devdb.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "app/devplace.h"
#include "app/postmaster.h"
#include "core/frame.h"
#include "core/log.h"

#define LOG_MAX_BYTES (8 * 1024 * 1024) /* a longer log is begun anew */

struct mill_devdb {
	struct mill_devplace place;
	int lock, log;
	off_t log_start; /* where this run's part of the log begins */
	struct mill_postmaster server;
	bool restarting; /* it ended by itself, and does not take connections again yet */
	char *dsn;
};

static int refuse_second(int lock, struct mill_err *err)
{
	char pid[32];
	ssize_t len = pread(lock, pid, sizeof(pid) - 1, 0);
	pid[len > 0 ? len : 0] = 0;
	pid[strcspn(pid, "\n")] = 0;
	return mill_err_set(
	        err, MILL_ERR_USAGE,
	        "`tidemill dev` already runs here (pid %s): stop it, or use another folder",
	        pid[0] ? pid : "unknown");
}

static int take_lock(struct mill_devdb *devdb, struct mill_err *err)
{
	char *path = mill_devplace_path(&devdb->place, "lock");
	int result = 0;
	devdb->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (devdb->lock < 0) {
		result = mill_err_system(err, errno, "cannot open %s", path);
	} else if (flock(devdb->lock, LOCK_EX | LOCK_NB) != 0) {
		result = errno == EWOULDBLOCK ? refuse_second(devdb->lock, err)
		                              : mill_err_system(err, errno, "cannot lock %s", path);
	} else {
		char pid[32];
		int len = snprintf(pid, sizeof(pid), "%d\n", (int)getpid());
		if (ftruncate(devdb->lock, 0) != 0 ||
		    pwrite(devdb->lock, pid, (size_t)len, 0) != len)
			result = mill_err_system(err, errno, "cannot write %s", path);
	}
	free(path);
	return result;
}

static int open_log(struct mill_devdb *devdb, struct mill_err *err)
{
	char *path = mill_devplace_path(&devdb->place, "postgres.log");
	devdb->log = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	struct stat status = { 0 };
	int result = 0;
	if (devdb->log < 0 || fstat(devdb->log, &status) != 0)
		result = mill_err_system(err, errno, "cannot open %s", path);
	else if (status.st_size <= LOG_MAX_BYTES)
		devdb->log_start = status.st_size;
	else if (ftruncate(devdb->log, 0) != 0)
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
	off_t from = devdb->log_start;
	if (err->code == EINTR)
		return -1;
	if (fstat(devdb->log, &status) == 0 && status.st_size - from > (off_t)sizeof(text) - 1)
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
	             complaint ? complaint : "", devdb->place.folder);
	free(said);
	return -1;
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

/* ---- open, find, close ----------------------------------------------------------------------- */

static const struct mill_account *server_account(const struct mill_devdb *devdb)
{
	return devdb->place.as_account ? &devdb->place.account : NULL;
}

static int start_server(struct mill_devdb *devdb, const char *bin, struct mill_err *err)
{
	struct mill_devplace *place = &devdb->place;
	if (mill_devplace_choose_socket(place, err) != 0)
		return -1;
	if (mill_postmaster_start(bin, server_account(devdb), place->data, place->socket_folder,
	                          devdb->log, &devdb->server, err) != 0)
		return explain_by_log(devdb, err);
	return 0;
}

static int create_data(struct mill_devdb *devdb, const char *bin, struct mill_err *err)
{
	struct mill_devplace *place = &devdb->place;
	const struct mill_account *account = server_account(devdb);
	char *fresh = mill_devplace_prepare(place, err);
	if (fresh == NULL)
		return -1;
	mill_log(MILL_LOG_INFO, "devdb_create", MILL_TEXT("folder", place->data),
	         MILL_TEXT("account", account ? account->name : NULL));
	int result = mill_postmaster_create(bin, account, fresh, devdb->log, err);
	if (result != 0)
		explain_by_log(devdb, err);
	else
		result = mill_devplace_adopt(place, fresh, err);
	if (result != 0)
		mill_devplace_abandon(place);
	free(fresh);
	return result;
}

static int take_over(struct mill_devdb *devdb, struct mill_err *err)
{
	mill_log(MILL_LOG_INFO, "devdb_taken_over", MILL_INT("pid", devdb->server.pid));
	if (mill_postmaster_wait_ready(devdb->place.data, &devdb->server, err) == 0)
		return 0;
	mill_postmaster_stop(devdb->place.data, &devdb->server);
	return -1;
}

/* The programs of the version that made the data. */
static int find_programs(const struct mill_devplace *place, char bin[PATH_MAX],
                         struct mill_err *err)
{
	int major = mill_postmaster_data_version(place->data);
	if (major < 0)
		return mill_err_set(
		        err, MILL_ERR_SYSTEM,
		        "%s is not a Postgres data folder: remove %s to start with an empty "
		        "database",
		        place->data, place->folder);
	if (mill_postmaster_find(major, bin, err) >= 0)
		return 0;
	char *said = mill_strdup(err->message);
	mill_err_set(err, err->kind,
	             "%s was made by Postgres %d: %s, or remove %s to start with an empty "
	             "database",
	             place->data, major, said, place->folder);
	free(said);
	return -1;
}

static int open_server(struct mill_devdb *devdb, struct mill_err *err)
{
	char bin[PATH_MAX];
	int found = mill_devplace_find(&devdb->place, err);
	if (found < 0)
		return -1;
	if (found == 0) {
		if (mill_postmaster_find(0, bin, err) < 0 || create_data(devdb, bin, err) != 0)
			return -1;
	} else if (mill_postmaster_running(devdb->place.data, &devdb->server)) {
		return take_over(devdb, err);
	} else if (find_programs(&devdb->place, bin, err) != 0) {
		return -1;
	}
	return start_server(devdb, bin, err);
}

static void free_devdb(struct mill_devdb *devdb)
{
	if (devdb->log >= 0)
		close(devdb->log);
	if (devdb->lock >= 0)
		close(devdb->lock);
	mill_devplace_fini(&devdb->place);
	free(devdb->dsn);
	free(devdb);
}

int mill_devdb_open(const char *dir, struct mill_devdb **opened, struct mill_err *err)
{
	struct mill_devdb *devdb = mill_calloc(1, sizeof(*devdb));
	devdb->lock = devdb->log = -1;
	if (mill_devplace_init(&devdb->place, dir, err) != 0 || take_lock(devdb, err) != 0 ||
	    open_log(devdb, err) != 0 || open_server(devdb, err) != 0) {
		free_devdb(devdb);
		return -1;
	}
	devdb->dsn = server_dsn(&devdb->server);
	*opened = devdb;
	return 0;
}

/* ---- while it runs --------------------------------------------------------------------------- */

/* Removed while it is in use; the server may not have noticed. */
static int folder_gone(const struct mill_devdb *devdb, struct mill_err *err)
{
	const struct mill_devplace *place = &devdb->place;
	const char *gone = NULL;
	struct stat status;
	if (stat(place->folder, &status) != 0)
		gone = place->folder;
	else if (stat(place->data, &status) != 0)
		gone = place->data;
	if (gone == NULL)
		return 0;
	mill_err_set(err, MILL_ERR_SYSTEM,
	             "%s was removed while `tidemill dev` ran, and the database with it: start "
	             "`tidemill dev` again for an empty one",
	             gone);
	if (gone == place->folder && place->outer_data != NULL)
		mill_err_set(err, MILL_ERR_SYSTEM,
		             "%s was removed while `tidemill dev` ran; what is left of its "
		             "database, in %s, can be removed, too",
		             gone, place->outer_data);
	return -1;
}

static int restart(struct mill_devdb *devdb, struct mill_err *err)
{
	char bin[PATH_MAX], socket_folder[PATH_MAX];
	struct mill_devplace *place = &devdb->place;
	/* Its address stays. */
	memcpy(socket_folder, devdb->server.socket_folder, sizeof(socket_folder));
	if (find_programs(place, bin, err) != 0)
		return -1;
	struct stat status;
	if (fstat(devdb->log, &status) == 0)
		devdb->log_start = status.st_size;
	return mill_postmaster_launch(bin, server_account(devdb), place->data, socket_folder,
	                              devdb->log, &devdb->server, err);
}

int mill_devdb_watch(struct mill_devdb *devdb, struct mill_err *err)
{
	const char *data = devdb->place.data;
	if (folder_gone(devdb, err) != 0)
		return -1;
	struct mill_postmaster seen;
	if (devdb->server.pid > 0 && !mill_postmaster_ended(data, &devdb->server)) {
		if (devdb->restarting && mill_postmaster_running(data, &seen) && seen.ready &&
		    seen.pid == devdb->server.pid) {
			devdb->restarting = false;
			mill_log(MILL_LOG_WARN, "database_restarted",
			         MILL_INT("pid", devdb->server.pid));
		}
		return 0;
	}
	if (devdb->restarting && devdb->server.pid > 0) {
		mill_err_set(err, MILL_ERR_SYSTEM,
		             "Postgres ended by itself and does not start again");
		return explain_by_log(devdb, err);
	}
	if (!devdb->restarting)
		mill_log(MILL_LOG_WARN, "database_ended", MILL_INT("pid", devdb->server.pid));
	devdb->restarting = true;
	devdb->server.pid = -1;
	/* What a killed server leaves ends by itself, and may keep a new one from starting. */
	return mill_postmaster_deserted(data) ? restart(devdb, err) : 0;
}

const char *mill_devdb_dsn(const struct mill_devdb *devdb)
{
	return devdb->dsn;
}

const char *mill_devdb_folder(const struct mill_devdb *devdb)
{
	return devdb->place.data;
}

const char *mill_devdb_own_folder(const struct mill_devdb *devdb)
{
	return devdb->place.folder;
}

const char *mill_devdb_outer_folder(const struct mill_devdb *devdb)
{
	return devdb->place.outer_data;
}

void mill_devdb_close(struct mill_devdb *devdb)
{
	if (devdb->server.pid > 0 && mill_postmaster_stop(devdb->place.data, &devdb->server) != 0)
		mill_log(MILL_LOG_ERROR, "devdb_does_not_stop", MILL_INT("pid", devdb->server.pid));
	else
		mill_devplace_drop_socket(&devdb->place);
	free_devdb(devdb);
}

char *mill_devdb_find(const char *dir, char **closed)
{
	char *data = mill_devplace_peek(dir, closed), *dsn = NULL;
	struct mill_postmaster server;
	if (data != NULL && mill_postmaster_running(data, &server) &&
	    server.socket_folder[0] == '/')
		dsn = server_dsn(&server);
	free(data);
	return dsn;
}
