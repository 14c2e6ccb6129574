/* Fences around the process: see fence.h. */
#include "executor/fence.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

static struct {
	int socket_fd;
	struct mill_page *page;
	bool is_copy;
} fence;

/*
 * In the child, before fork returns to the handler. Both ends of the socket, and the page, are the
 * executor's; the copy gets a page that nobody reads. os.execute and io.popen do not come this way.
 */
static void on_forked(void)
{
	fence.is_copy = true;
	close(fence.socket_fd);
	mmap(fence.page, sizeof(*fence.page), PROT_READ | PROT_WRITE,
	     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

void mill_fence_start(int socket_fd, struct mill_page *page)
{
	fence.socket_fd = socket_fd;
	fence.page = page;
	pthread_atfork(NULL, NULL, on_forked);
	/* Fails where it leads a process group already, which will do as well. */
	setsid();
}

/* They stand in the order of their start, separated by blanks. */
int mill_fence_newest_child(void)
{
	FILE *file = fopen("/proc/thread-self/children", "re");
	int pid = 0;
	if (file == NULL)
		return 0;
	while (fscanf(file, "%d", &pid) == 1)
		;
	fclose(file);
	return pid;
}

bool mill_fence_is_out_of_files(void)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return errno == EMFILE || errno == ENFILE;
	close(fd);
	return false;
}

bool mill_fence_is_copy(void)
{
	return fence.is_copy;
}
