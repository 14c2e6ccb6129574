/*
 * `tidemill executor [PID]`, hidden: how the runtime starts an executor of itself.
 *
 * The socket is descriptor 3, the shared page descriptor 4. PID is the parent's, which may be gone
 * before this process could ask the kernel to die with it.
 */
#include "executor/executor.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "app/child.h"
#include "cli/cli.h"
#include "executor/fence.h"

/* Nothing is to be done; unlike SIG_IGN, it does not reach what a handler starts. */
static void on_ignored(int number)
{
	(void)number;
}

/*
 * A terminal's Ctrl-C, or a service manager's stop, reaches all processes of the group. Only the
 * runtime acts on it, and tells its executors.
 */
static void leave_signals_to_parent(void)
{
	static const int numbers[] = { SIGINT, SIGTERM, SIGHUP };
	struct sigaction action = { .sa_handler = on_ignored, .sa_flags = SA_RESTART };
	sigemptyset(&action.sa_mask);
	for (size_t i = 0; i < MILL_COUNT(numbers); i++)
		sigaction(numbers[i], &action, NULL);
}

int mill_cli_executor(struct mill_cli *cli)
{
	struct mill_err err = MILL_ERR_INIT;
	long parent = getppid();
	char *end = "";
	if (cli->operand_count > 0)
		parent = strtol(cli->operands[0], &end, 10);
	if (*end != 0 || parent < 0) {
		mill_err_set(&err, MILL_ERR_USAGE, "`%s` is not a process number",
		             cli->operands[0]);
		return mill_cli_fail(&err);
	}
	mill_child_close_from(MILL_EXECUTOR_PAGE_FD + 1);
	mill_child_keep_from(MILL_EXECUTOR_SOCKET_FD);
	leave_signals_to_parent();
	prctl(PR_SET_NAME, "tidemill-exec");
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		return MILL_EXIT_FAILURE;
	struct mill_page *page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED,
	                              MILL_EXECUTOR_PAGE_FD, 0);
	if (page == MAP_FAILED) {
		mill_err_system(&err, errno, "an executor is started by the program itself only");
		return mill_cli_fail(&err);
	}
	close(MILL_EXECUTOR_PAGE_FD);
	mill_fence_start(MILL_EXECUTOR_SOCKET_FD, page);
	return mill_executor_run(MILL_EXECUTOR_SOCKET_FD, page);
}
