/*
 * Child processes for the blocking parts of the program: started in a clean state, waited for with
 * a limit.
 *
 * A child gets default signals, the descriptors it is given and no others, and where asked another
 * account, a session of its own and a bare environment. Runtime process only, before its loop turns
 * or after; knows nothing of what it starts.
 */
#pragma once

#include <sys/types.h>

#include "core/err.h"

/* An account to run a program under, looked up before the fork. */
struct mill_account {
	char name[64];
	uid_t uid;
	gid_t gid;
	gid_t groups[64];
	int group_count;
};

#define MILL_CHILD_FDS 5

struct mill_child_options {
	const char *program;     /* a path; not looked up in PATH */
	const char *const *argv; /* ends with NULL */
	/* Descriptors 0 to 4 of the child. −1: /dev/null for 0 to 2, closed for the others. */
	int fds[MILL_CHILD_FDS];
	const struct mill_account *account; /* NULL: stay who we are */
	/* A session of its own, in folder `/`: neither the terminal's Ctrl-C nor its end reach it.
	 */
	bool own_session;
	/* Only PATH, TZ and LD_LIBRARY_PATH of our environment, which may hold secrets. */
	bool bare_environment;
	bool die_with_parent; /* SIGKILL when this process ends, however it ends */
};

/* Find `name` with its groups. −1 when there is no such account. */
int mill_account_find(const char *name, struct mill_account *account, struct mill_err *err);

/* Start a program. Returns its pid, or −1 also when it could not be executed. */
pid_t mill_child_start(const struct mill_child_options *options, struct mill_err *err);

/*
 * Keep descriptors from `first` on from every child there will be, those that whoever started us
 * left open included.
 */
void mill_child_keep_from(int first);
/* Close descriptors from `first` on, but for the log's: whoever started us left them open. */
void mill_child_close_from(int first);

enum mill_child_wait {
	MILL_CHILD_ENDED,       /* reaped: `status` is waitpid's */
	MILL_CHILD_RUNS,        /* still, after the limit */
	MILL_CHILD_INTERRUPTED, /* a SIGINT or SIGTERM waits for us, blocked */
};

/*
 * Wait for a child to end, at most `limit_secs`. A caller that holds SIGINT and SIGTERM back
 * (mill_signals_hold) is told when one arrives.
 */
enum mill_child_wait mill_child_wait(pid_t pid, double limit_secs, int *status);

/* Wait for a child that is sure to end, whatever signals come. */
void mill_child_reap(pid_t pid);

/* SIGKILL, and reap. */
void mill_child_kill(pid_t pid);

/* How a child ended, for people: "exit code 1", "signal 11 (Segmentation fault)", in a static text.
 */
const char *mill_child_status_text(int status);

/*
 * Can the account read (R_OK), write (W_OK), enter (X_OK) `path`? Tried in a child that becomes
 * that account, so it holds for every kind of file system and permission.
 */
bool mill_account_can(const struct mill_account *account, const char *path, int mode);

/*
 * Hold SIGINT and SIGTERM back: one that arrives waits until they are let through. For the time
 * between a program's start and the turning of its loop, so that no signal is lost or kills half
 * way, even as PID 1, where a signal without a handler does nothing.
 */
void mill_signals_hold(void);
void mill_signals_let_through(void);
/* Does one wait? */
bool mill_signals_waiting(void);
