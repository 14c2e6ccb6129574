/* Child processes for the blocking parts of the program: see child.h. */
#include "app/child.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <pwd.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/log.h"

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC (1U << 2)
#endif

#define PAUSE_NS 5000000 /* between two looks at a child */

/* Where the descriptors of a child are gathered before they get their numbers. */
#define GATHER_FD 64

int mill_account_find(const char *name, struct mill_account *account, struct mill_err *err)
{
	errno = 0;
	struct passwd *found = getpwnam(name);
	if (found == NULL)
		return mill_err_set(err, MILL_ERR_SYSTEM, "there is no account `%s`", name);
	*account = (struct mill_account){ .uid = found->pw_uid, .gid = found->pw_gid };
	snprintf(account->name, sizeof(account->name), "%s", name);
	account->group_count = (int)MILL_COUNT(account->groups);
	if (getgrouplist(name, found->pw_gid, account->groups, &account->group_count) < 0) {
		/* More groups than there is room for: its own will do. */
		account->groups[0] = found->pw_gid;
		account->group_count = 1;
	}
	return 0;
}

void mill_child_keep_from(int first)
{
	if (syscall(SYS_close_range, (unsigned)first, ~0U, CLOSE_RANGE_CLOEXEC) == 0)
		return;
	/* Linux before 5.11. */
	for (int fd = first; fd < 1024; fd++)
		fcntl(fd, F_SETFD, FD_CLOEXEC);
}

static void close_range_of(int first, int last)
{
	if (first > last || syscall(SYS_close_range, (unsigned)first, (unsigned)last, 0) == 0)
		return;
	/* Linux before 5.9. */
	for (int fd = first; fd <= last && fd < 1024; fd++)
		close(fd);
}

void mill_child_close_from(int first)
{
	int log = mill_log_descriptor();
	close_range_of(first, log >= first ? log - 1 : INT_MAX);
	if (log >= first)
		close_range_of(log + 1, INT_MAX);
}

/* From here to exec only what is safe after a fork. */

static int become(const struct mill_account *account)
{
	if (setgroups((size_t)account->group_count, account->groups) != 0)
		return -1;
	if (setresgid(account->gid, account->gid, account->gid) != 0)
		return -1;
	return setresuid(account->uid, account->uid, account->uid);
}

static void reset_signals(void)
{
	for (int number = 1; number < NSIG; number++)
		signal(number, SIG_DFL);
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

static int take_descriptors(const int fds[MILL_CHILD_FDS], int *report)
{
	int gathered[MILL_CHILD_FDS];
	for (int i = 0; i < MILL_CHILD_FDS; i++) {
		gathered[i] = -1;
		int from = fds[i];
		if (from < 0 && i <= STDERR_FILENO)
			from = open("/dev/null", O_RDWR | O_CLOEXEC);
		if (from < 0)
			continue;
		gathered[i] = fcntl(from, F_DUPFD_CLOEXEC, GATHER_FD);
		if (gathered[i] < 0)
			return -1;
	}
	*report = fcntl(*report, F_DUPFD_CLOEXEC, GATHER_FD);
	if (*report < 0)
		return -1;
	for (int i = 0; i < MILL_CHILD_FDS; i++) {
		if (gathered[i] < 0)
			close(i);
		else if (dup2(gathered[i], i) < 0)
			return -1;
	}
	mill_child_keep_from(MILL_CHILD_FDS);
	return 0;
}

MILL_NORETURN static void run_child(const struct mill_child_options *options,
                                    char *const *environment, pid_t parent, int report)
{
	reset_signals();
	if (options->own_session && (setsid() < 0 || chdir("/") != 0))
		goto failed;
	if (take_descriptors(options->fds, &report) != 0)
		goto failed;
	if (options->account != NULL && become(options->account) != 0)
		goto failed;
	if (options->die_with_parent) {
		/* After the change of account, which would clear it. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			_exit(127);
	}
	execve(options->program, (char *const *)options->argv, environment);
failed:;
	int code = errno;
	while (write(report, &code, sizeof(code)) < 0 && errno == EINTR)
		;
	_exit(127);
}

/* Variables a bare environment keeps. LC_ALL is added: messages of the program are looked at. */
static char **bare_environment(void)
{
	static const char *const kept[] = { "PATH", "TZ", "LD_LIBRARY_PATH" };
	char **list = mill_calloc(MILL_COUNT(kept) + 2, sizeof(*list));
	size_t count = 0;
	for (size_t i = 0; i < MILL_COUNT(kept); i++)
		if (getenv(kept[i]) != NULL)
			list[count++] = mill_sprintf("%s=%s", kept[i], getenv(kept[i]));
	list[count] = mill_strdup("LC_ALL=C");
	return list;
}

static void free_environment(char **list)
{
	for (char **variable = list; *variable != NULL; variable++)
		free(*variable);
	free(list);
}

pid_t mill_child_start(const struct mill_child_options *options, struct mill_err *err)
{
	int report[2];
	if (pipe2(report, O_CLOEXEC) != 0)
		return mill_err_system(err, errno, "cannot start %s", options->program);
	char **bare = options->bare_environment ? bare_environment() : NULL;
	pid_t parent = getpid();
	pid_t pid = fork();
	if (pid == 0)
		run_child(options, bare ? bare : environ, parent, report[1]);
	int code = errno;
	close(report[1]);
	if (bare != NULL)
		free_environment(bare);
	if (pid > 0) {
		/* Nothing comes, and the end of the pipe, once the program runs. */
		ssize_t got;
		do {
			got = read(report[0], &code, sizeof(code));
		} while (got < 0 && errno == EINTR);
		if (got == (ssize_t)sizeof(code)) {
			waitpid(pid, NULL, 0);
			pid = -1;
		}
	}
	close(report[0]);
	if (pid < 0)
		return mill_err_system(err, code, "cannot start %s", options->program);
	return pid;
}

enum mill_child_wait mill_child_wait(pid_t pid, double limit_secs, int *status)
{
	uint64_t end = mill_clock_ns() + (uint64_t)(limit_secs * 1e9);
	while (true) {
		pid_t got = waitpid(pid, status, WNOHANG);
		if (got == pid)
			return MILL_CHILD_ENDED;
		MILL_ASSERT(got == 0 || errno == EINTR);
		if (mill_signals_waiting())
			return MILL_CHILD_INTERRUPTED;
		if (mill_clock_ns() >= end)
			return MILL_CHILD_RUNS;
		nanosleep(&(struct timespec){ .tv_nsec = PAUSE_NS }, NULL);
	}
}

void mill_child_reap(pid_t pid)
{
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
}

void mill_child_kill(pid_t pid)
{
	kill(pid, SIGKILL);
	mill_child_reap(pid);
}

const char *mill_child_status_text(int status)
{
	static char text[80];
	if (WIFSIGNALED(status))
		snprintf(text, sizeof(text), "signal %d (%s)", WTERMSIG(status),
		         strsignal(WTERMSIG(status)));
	else
		snprintf(text, sizeof(text), "exit code %d", WEXITSTATUS(status));
	return text;
}

bool mill_account_can(const struct mill_account *account, const char *path, int mode)
{
	pid_t pid = fork();
	if (pid < 0)
		return false;
	if (pid == 0)
		_exit(become(account) == 0 && access(path, mode) == 0 ? 0 : 1);
	int status = 0;
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static sigset_t stop_signals(void)
{
	sigset_t set;
	sigemptyset(&set);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGTERM);
	return set;
}

void mill_signals_hold(void)
{
	sigset_t set = stop_signals();
	sigprocmask(SIG_BLOCK, &set, NULL);
}

void mill_signals_let_through(void)
{
	sigset_t set = stop_signals();
	sigprocmask(SIG_UNBLOCK, &set, NULL);
}

bool mill_signals_waiting(void)
{
	sigset_t pending;
	return sigpending(&pending) == 0 &&
	       (sigismember(&pending, SIGINT) == 1 || sigismember(&pending, SIGTERM) == 1);
}
