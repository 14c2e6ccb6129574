/* A private Postgres server as programs and files: see postmaster.h. */
#include "app/postmaster.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"

#define TRY_SECS 10      /* a program that only says its version */
#define CREATE_SECS 300  /* initdb writes 40 MB and waits for the disk */
#define READY_SECS 300   /* recovery after a crash may take its time */
#define LEFTOVER_SECS 10 /* backends of a killed server end by themselves */
#define FAST_SECS 30
#define IMMEDIATE_SECS 15
#define PAUSE_NS 10000000

/* ---- programs -------------------------------------------------------------------------------- */

/* The first line a program prints, or false. Searched in PATH when `program` has no slash. */
static bool first_line(const char *const *argv, char *line, size_t size)
{
	int pipe_fds[2];
	if (pipe2(pipe_fds, O_CLOEXEC) != 0)
		return false;
	bool by_path = strchr(argv[0], '/') != NULL;
	const char *through_env[8] = { "/usr/bin/env" };
	for (size_t i = 0; argv[i] != NULL && i < 6; i++)
		through_env[i + 1] = argv[i];
	struct mill_child_options options = {
		.program = by_path ? argv[0] : through_env[0],
		.argv = by_path ? argv : through_env,
		.fds = { -1, pipe_fds[1], -1, -1, -1 },
		.bare_environment = true,
	};
	pid_t pid = mill_child_start(&options, NULL);
	close(pipe_fds[1]);
	size_t len = 0;
	int status = -1;
	if (pid > 0) {
		if (mill_child_wait(pid, TRY_SECS, &status) != MILL_CHILD_ENDED)
			mill_child_kill(pid);
		ssize_t got;
		while (len < size - 1 && (got = read(pipe_fds[0], line + len, size - 1 - len)) > 0)
			len += (size_t)got;
	}
	close(pipe_fds[0]);
	line[len] = 0;
	line[strcspn(line, "\n")] = 0;
	return pid > 0 && status == 0 && line[0] != 0;
}

/* The major version of the server in folder `bin`, or −1. */
static int version_in(const char *bin)
{
	char initdb[PATH_MAX], postgres[PATH_MAX], line[200];
	if (snprintf(initdb, sizeof(initdb), "%s/initdb", bin) >= PATH_MAX ||
	    snprintf(postgres, sizeof(postgres), "%s/postgres", bin) >= PATH_MAX ||
	    access(initdb, X_OK) != 0 || access(postgres, X_OK) != 0)
		return -1;
	/* postgres (PostgreSQL) 15.20 (Debian 15.20-0+deb12u1) */
	const char *argv[] = { postgres, "--version", NULL };
	int major;
	if (!first_line(argv, line, sizeof(line)) ||
	    sscanf(line, "postgres (PostgreSQL) %d", &major) != 1)
		return -1;
	return major;
}

int mill_postmaster_find(int major, char bin[PATH_MAX], struct mill_err *err)
{
	/* Where distributions put servers of several versions beside each other. */
	static const char *const patterns[] = { "/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin",
		                                "/usr/local/pgsql/bin", "/usr/local/bin",
		                                "/usr/bin" };
	char candidate[PATH_MAX];
	const char *argv[] = { "pg_config", "--bindir", NULL };
	int best = -1;
	if (first_line(argv, candidate, sizeof(candidate))) {
		best = version_in(candidate);
		if (best > 0)
			snprintf(bin, PATH_MAX, "%s", candidate);
		if (best > 0 && (major <= 0 || best == major))
			return best;
	}
	best = -1;
	for (size_t i = 0; i < MILL_COUNT(patterns); i++) {
		glob_t found;
		if (glob(patterns[i], 0, NULL, &found) == 0)
			for (size_t j = 0; j < found.gl_pathc; j++) {
				int version = version_in(found.gl_pathv[j]);
				if (version > best && (major <= 0 || version == major)) {
					best = version;
					snprintf(bin, PATH_MAX, "%s", found.gl_pathv[j]);
				}
			}
		globfree(&found);
	}
	if (best > 0)
		return best;
	if (major > 0)
		return mill_err_set(err, MILL_ERR_SYSTEM,
		                    "the programs of Postgres %d are not installed: "
		                    "install the package postgresql-%d",
		                    major, major);
	return mill_err_set(
	        err, MILL_ERR_SYSTEM,
	        "no Postgres server is installed here: install the package `postgresql` "
	        "(Debian, Ubuntu) or `postgresql-server` (Fedora), or name a database with "
	        "--database");
}

int mill_postmaster_data_version(const char *data)
{
	char *path = mill_sprintf("%s/PG_VERSION", data);
	FILE *file = fopen(path, "re");
	free(path);
	int major = -1;
	if (file == NULL)
		return -1;
	if (fscanf(file, "%d", &major) != 1)
		major = -1;
	fclose(file);
	return major;
}

/* ---- making a data folder -------------------------------------------------------------------- */

/* Run a program of the server to its end. */
static int run_program(const char *const *argv, const struct mill_account *account, int input,
                       int log, struct mill_err *err)
{
	struct mill_child_options options = {
		.program = argv[0],
		.argv = argv,
		.fds = { input, log, log, -1, -1 },
		.account = account,
		.own_session = true,
		.bare_environment = true,
		.die_with_parent = true,
	};
	pid_t pid = mill_child_start(&options, err);
	if (pid < 0)
		return -1;
	int status;
	switch (mill_child_wait(pid, CREATE_SECS, &status)) {
	case MILL_CHILD_ENDED:
		if (status == 0)
			return 0;
		return mill_err_set(err, MILL_ERR_SYSTEM, "%s ended with %s", argv[0],
		                    mill_child_status_text(status));
	case MILL_CHILD_RUNS:
		mill_err_set(err, MILL_ERR_SYSTEM, "%s did not end within %d s", argv[0],
		             CREATE_SECS);
		break;
	case MILL_CHILD_INTERRUPTED:
		mill_err_system(err, EINTR, "%s", argv[0]);
		break;
	}
	/* With what it started itself, which is in its session. */
	kill(-pid, SIGKILL);
	mill_child_reap(pid);
	return -1;
}

int mill_postmaster_create(const char *bin, const struct mill_account *account, const char *data,
                           int log, struct mill_err *err)
{
	/* Sorts by code point and knows letters of all alphabets; where a system lacks it, bytes.
	 */
	locale_t utf8 = newlocale(LC_ALL_MASK, "C.UTF-8", (locale_t)0);
	const char *locale = utf8 != (locale_t)0 ? "--locale=C.UTF-8" : "--locale=C";
	if (utf8 != (locale_t)0)
		freelocale(utf8);

	char *initdb = mill_sprintf("%s/initdb", bin), *postgres = mill_sprintf("%s/postgres", bin);
	const char *create[] = { initdb, "-D",   data,   "-U", MILL_POSTMASTER_USER, "-A", "trust",
		                 "-E",   "UTF8", locale, NULL };
	int result = run_program(create, account, -1, log, err);
	if (result == 0) {
		/* The database too, before the folder gets its name: then a folder with that name
		 * is complete. */
		const char *single[] = { postgres, "--single", "-D", data, "template1", NULL };
		static const char statement[] = "create database " MILL_POSTMASTER_DATABASE "\n";
		int pipe_fds[2];
		if (pipe2(pipe_fds, O_CLOEXEC) != 0) {
			result = mill_err_system(err, errno, "cannot make a pipe");
		} else {
			/* Fits into the pipe, so this does not wait. */
			ssize_t written = write(pipe_fds[1], statement, sizeof(statement) - 1);
			MILL_ASSERT(written == (ssize_t)sizeof(statement) - 1);
			close(pipe_fds[1]);
			result = run_program(single, account, pipe_fds[0], log, err);
			close(pipe_fds[0]);
		}
	}
	free(initdb);
	free(postgres);
	return result;
}

/* ---- a running server ------------------------------------------------------------------------ */

static bool same_file(const char *path, const struct stat *wanted)
{
	struct stat status;
	return stat(path, &status) == 0 && status.st_dev == wanted->st_dev &&
	       status.st_ino == wanted->st_ino;
}

/* Is process `pid` a Postgres program that stands in the data folder? All its processes do. */
static bool stands_in(pid_t pid, const struct stat *data)
{
	char path[64], name[32] = "";
	snprintf(path, sizeof(path), "/proc/%d/comm", (int)pid);
	FILE *file = fopen(path, "re");
	if (file == NULL)
		return false;
	bool read = fgets(name, sizeof(name), file) != NULL;
	fclose(file);
	if (!read || strncmp(name, "postgres", 8) != 0)
		return false;
	snprintf(path, sizeof(path), "/proc/%d/cwd", (int)pid);
	return same_file(path, data);
}

/* Does any process of a server stand there? */
static bool anyone_stands_in(const struct stat *data)
{
	DIR *proc = opendir("/proc");
	bool found = false;
	for (struct dirent *entry; proc != NULL && !found && (entry = readdir(proc)) != NULL;) {
		int pid = atoi(entry->d_name);
		found = pid > 0 && stands_in(pid, data);
	}
	if (proc != NULL)
		closedir(proc);
	return found;
}

/*
 * postmaster.pid, line by line: pid, data folder, start time, port, socket folder, address, shared
 * memory, status. The later lines appear as the server gets on.
 */
static bool read_pid_file(const char *data, struct mill_postmaster *found)
{
	char *path = mill_sprintf("%s/postmaster.pid", data);
	FILE *file = fopen(path, "re");
	free(path);
	*found = (struct mill_postmaster){ .port = MILL_POSTMASTER_PORT };
	if (file == NULL)
		return false;
	char line[PATH_MAX];
	for (int number = 1; fgets(line, sizeof(line), file) != NULL; number++) {
		line[strcspn(line, "\n")] = 0;
		if (number == 1)
			found->pid = atoi(line);
		else if (number == 4)
			found->port = atoi(line);
		else if (number == 5)
			memcpy(found->socket_folder, line, sizeof(line));
		else if (number == 8)
			found->ready = strncmp(line, "ready", 5) == 0; /* padded with blanks */
	}
	fclose(file);
	return found->pid > 0;
}

bool mill_postmaster_running(const char *data, struct mill_postmaster *found)
{
	struct stat folder;
	return stat(data, &folder) == 0 && read_pid_file(data, found) &&
	       stands_in(found->pid, &folder);
}

bool mill_postmaster_deserted(const char *data)
{
	struct stat folder;
	return stat(data, &folder) == 0 && !anyone_stands_in(&folder);
}

/*
 * A killed server leaves backends, which end by themselves, and files with its pid. A server copes
 * with such files, unless that number belongs to some other process by now. Nobody else uses these
 * folders, and that no process stands there has been looked at.
 */
static int clear_leftovers(const char *data, const char *socket_folder, struct mill_err *err)
{
	struct stat folder;
	if (stat(data, &folder) != 0)
		return mill_err_system(err, errno, "%s", data);
	for (uint64_t end = mill_clock_ns() + LEFTOVER_SECS * 1000000000ull;
	     anyone_stands_in(&folder);) {
		if (mill_signals_waiting())
			return mill_err_system(err, EINTR, "%s", data);
		if (mill_clock_ns() > end)
			return mill_err_set(
			        err, MILL_ERR_SYSTEM,
			        "processes of an earlier Postgres still use %s: end them, "
			        "`ps -eo pid,args | grep postgres` shows which",
			        data);
		nanosleep(&(struct timespec){ .tv_nsec = PAUSE_NS }, NULL);
	}
	char *paths[] = { mill_sprintf("%s/postmaster.pid", data),
		          mill_sprintf("%s/.s.PGSQL.%d", socket_folder, MILL_POSTMASTER_PORT),
		          mill_sprintf("%s/.s.PGSQL.%d.lock", socket_folder,
		                       MILL_POSTMASTER_PORT) };
	for (size_t i = 0; i < MILL_COUNT(paths); i++) {
		unlink(paths[i]);
		free(paths[i]);
	}
	return 0;
}

/* A setting's value that is a list of one folder. */
static char *quoted_folder(const char *folder)
{
	return mill_sprintf("unix_socket_directories=\"%s\"", folder);
}

int mill_postmaster_wait_ready(const char *data, struct mill_postmaster *server,
                               struct mill_err *err)
{
	pid_t pid = server->pid;
	bool child = server->child;
	for (uint64_t end = mill_clock_ns() + READY_SECS * 1000000000ull; mill_clock_ns() < end;) {
		int status;
		if (child && waitpid(pid, &status, WNOHANG) == pid)
			return mill_err_set(err, MILL_ERR_SYSTEM,
			                    "Postgres ended at its start with %s",
			                    mill_child_status_text(status));
		struct mill_postmaster seen;
		if (mill_postmaster_running(data, &seen) && seen.pid == pid) {
			*server = seen;
			server->child = child;
			if (seen.ready)
				return 0;
		} else if (!child) {
			return mill_err_set(err, MILL_ERR_SYSTEM,
			                    "the Postgres that ran in %s has just ended: try again",
			                    data);
		}
		if (mill_signals_waiting())
			return mill_err_system(err, EINTR, "waiting for Postgres");
		nanosleep(&(struct timespec){ .tv_nsec = PAUSE_NS }, NULL);
	}
	return mill_err_set(err, MILL_ERR_SYSTEM,
	                    "Postgres (pid %d) took no connections within %d s", (int)pid,
	                    READY_SECS);
}

int mill_postmaster_launch(const char *bin, const struct mill_account *account, const char *data,
                           const char *socket_folder, int log, struct mill_postmaster *server,
                           struct mill_err *err)
{
	if (clear_leftovers(data, socket_folder, err) != 0)
		return -1;
	char *postgres = mill_sprintf("%s/postgres", bin), *folder = quoted_folder(socket_folder);
	char *port = mill_sprintf("port=%d", MILL_POSTMASTER_PORT);
	/* Here and not in postgresql.conf, which stays free for a user's own settings. */
	const char *argv[] = { postgres,
		               "-D",
		               data,
		               "-c",
		               "listen_addresses=",
		               "-c",
		               folder,
		               "-c",
		               "unix_socket_permissions=0700",
		               "-c",
		               port,
		               "-c",
		               "max_connections=50",
		               NULL };
	struct mill_child_options options = {
		.program = postgres,
		.argv = argv,
		.fds = { -1, log, log, -1, -1 },
		.account = account,
		.own_session = true,
		.bare_environment = true,
	};
	struct mill_postmaster started = { .child = true, .port = MILL_POSTMASTER_PORT };
	snprintf(started.socket_folder, sizeof(started.socket_folder), "%s", socket_folder);
	started.pid = mill_child_start(&options, err);
	free(postgres);
	free(folder);
	free(port);
	*server = started;
	return server->pid < 0 ? -1 : 0;
}

int mill_postmaster_start(const char *bin, const struct mill_account *account, const char *data,
                          const char *socket_folder, int log, struct mill_postmaster *server,
                          struct mill_err *err)
{
	if (mill_postmaster_launch(bin, account, data, socket_folder, log, server, err) != 0)
		return -1;
	if (mill_postmaster_wait_ready(data, server, err) != 0) {
		mill_postmaster_stop(data, server);
		return -1;
	}
	return 0;
}

bool mill_postmaster_ended(const char *data, const struct mill_postmaster *server)
{
	if (server->child)
		return waitpid(server->pid, NULL, WNOHANG) != 0;
	if (kill(server->pid, 0) != 0)
		return true;
	struct stat folder;
	return stat(data, &folder) == 0 && !stands_in(server->pid, &folder);
}

static bool wait_ended(const char *data, const struct mill_postmaster *server, unsigned secs)
{
	for (uint64_t end = mill_clock_ns() + secs * 1000000000ull;
	     !mill_postmaster_ended(data, server);) {
		if (mill_clock_ns() > end)
			return false;
		nanosleep(&(struct timespec){ .tv_nsec = PAUSE_NS }, NULL);
	}
	return true;
}

int mill_postmaster_stop(const char *data, struct mill_postmaster *server)
{
	struct stat folder;
	if (mill_postmaster_ended(data, server))
		return 0;
	/* Where its files are gone there is nothing to write. */
	if (stat(data, &folder) == 0) {
		kill(server->pid, SIGINT);
		if (wait_ended(data, server, FAST_SECS))
			return 0;
	}
	kill(server->pid, SIGQUIT);
	return wait_ended(data, server, IMMEDIATE_SECS) ? 0 : -1;
}
