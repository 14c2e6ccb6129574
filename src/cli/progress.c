/* Long work: how far it is, and how it is interrupted. See cli.h. */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "cli/cli.h"
#include "core/clock.h"

#define REDRAW_NS 500000000u

void mill_progress_show(struct mill_progress *progress, const char *format, ...)
{
	uint64_t now = mill_clock_ns();
	if (now < progress->next_ns || !isatty(STDERR_FILENO))
		return;
	progress->next_ns = now + REDRAW_NS;
	progress->drawn = true;
	char text[200];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	fprintf(stderr, "\r\033[K%s", text);
}

void mill_progress_end(struct mill_progress *progress)
{
	if (progress->drawn)
		fputs("\r\033[K", stderr);
	*progress = (struct mill_progress){ 0 };
}

static volatile sig_atomic_t interrupted;

static void on_interrupt(int number)
{
	(void)number;
	interrupted = 1;
}

void mill_cli_note_interrupts(void)
{
	/* Without SA_RESTART, so that a wait ends; with SA_RESETHAND, so that the second one kills.
	 */
	struct sigaction action = { .sa_handler = on_interrupt, .sa_flags = SA_RESETHAND };
	sigemptyset(&action.sa_mask);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
}

bool mill_cli_interrupted(void)
{
	return interrupted;
}
