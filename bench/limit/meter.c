/* What a run costs: see meter.h. */
#include "meter.h"

#include <dirent.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "core/clock.h"
#include "session.h"

/* Exact to the nanosecond, where /proc counts in hundredths of a second. 0 when it is gone. */
static double cpu_of(int pid)
{
	clockid_t clock;
	struct timespec at;
	if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &at) != 0)
		return 0;
	return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static int parent_of(int pid)
{
	char path[64], text[512];
	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	FILE *file = fopen(path, "r");
	if (file == NULL)
		return 0;
	size_t len = fread(text, 1, sizeof(text) - 1, file);
	fclose(file);
	text[len] = '\0';
	/* The name is in parentheses and may hold any byte. */
	const char *rest = strrchr(text, ')');
	return rest != NULL && strlen(rest) > 4 ? atoi(rest + 4) : 0;
}

/* The postmaster and its children that are there now: background processes and all sessions. */
static double cpu_of_server(int postmaster)
{
	double sum = cpu_of(postmaster);
	DIR *processes = opendir("/proc");
	if (processes == NULL)
		return sum;
	struct dirent *entry;
	while ((entry = readdir(processes)) != NULL) {
		int pid = atoi(entry->d_name);
		if (pid > 0 && parent_of(pid) == postmaster)
			sum += cpu_of(pid);
	}
	closedir(processes);
	return sum;
}

/* Of all processors together, idle and waiting left out. */
static double cpu_of_machine(void)
{
	double user = 0, nice = 0, system = 0, idle, wait, irq = 0, soft = 0, steal = 0;
	FILE *file = fopen("/proc/stat", "r");
	if (file == NULL)
		return 0;
	if (fscanf(file, "cpu %lf %lf %lf %lf %lf %lf %lf %lf", &user, &nice, &system, &idle, &wait,
	           &irq, &soft, &steal) != 8)
		steal = 0;
	fclose(file);
	return (user + nice + system + irq + soft + steal) / (double)sysconf(_SC_CLK_TCK);
}

static void read_all(const struct bench_meter *meter, struct bench_reading *reading)
{
	*reading = (struct bench_reading){
		.wal_bytes = bench_session_number(meter->probe, "public",
		                                  "SELECT pg_current_wal_insert_lsn() - '0/0'"),
		.self_secs = cpu_of(getpid()),
		.backend_secs = cpu_of(meter->backend),
		.server_secs = cpu_of_server(meter->postmaster),
		.machine_secs = cpu_of_machine(),
		.clock_ns = mill_clock_ns(),
	};
}

void bench_meter_init(struct bench_meter *meter, PGconn *probe, PGconn *measured)
{
	*meter = (struct bench_meter){ .probe = probe, .backend = PQbackendPID(measured) };
	meter->postmaster = parent_of(meter->backend);
	if (meter->postmaster == 0) {
		fprintf(stderr, "claim: the server's processes cannot be seen: it must run on this "
		                "machine\n");
		exit(1);
	}
}

void bench_meter_begin(struct bench_meter *meter)
{
	read_all(meter, &meter->begun);
}

void bench_meter_end(struct bench_meter *meter)
{
	uint64_t now = mill_clock_ns(); /* before the readings, which take time */
	read_all(meter, &meter->ended);
	meter->ended.clock_ns = now;
}

double bench_meter_secs(const struct bench_meter *meter)
{
	return (double)(meter->ended.clock_ns - meter->begun.clock_ns) / 1e9;
}

double bench_meter_other_cores(const struct bench_meter *meter)
{
	const struct bench_reading *begun = &meter->begun, *ended = &meter->ended;
	double others = (ended->machine_secs - begun->machine_secs) -
	                (ended->self_secs - begun->self_secs) -
	                (ended->server_secs - begun->server_secs);
	return others > 0 ? others / bench_meter_secs(meter) : 0;
}
