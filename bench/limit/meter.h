/*
 * What a stretch of time cost: the clock, processor time of ourselves, of one backend and of the
 * whole server, what everybody else used, and bytes of write-ahead log. The server must be on this
 * machine, in the same namespace of processes.
 */
#pragma once

#include <libpq-fe.h>

#include "core/base.h"

struct bench_meter {
	PGconn *probe; /* asked for the log's position; not the session that is measured */
	int backend, postmaster;
	struct bench_reading {
		uint64_t clock_ns;
		double self_secs, backend_secs, server_secs, machine_secs;
		double wal_bytes;
	} begun, ended;
};

/* Watch the server by `probe`, and the backend of `measured`. Both stay the caller's. */
void bench_meter_init(struct bench_meter *meter, PGconn *probe, PGconn *measured);
void bench_meter_begin(struct bench_meter *meter);
void bench_meter_end(struct bench_meter *meter);

/* Seconds between the two. */
double bench_meter_secs(const struct bench_meter *meter);
/* Cores that neither we nor the server used: the machine was not ours alone. */
double bench_meter_other_cores(const struct bench_meter *meter);
