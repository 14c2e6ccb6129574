/*
 * Time as processes may use it: a monotonic clock for timers and measured durations, and random
 * numbers for jitter. Whether a message is due, or a lease over, only the database clock decides.
 *
 * Both processes.
 */
#pragma once

#include "core/base.h"

/* CLOCK_MONOTONIC in nanoseconds: the same for all processes of a machine. */
uint64_t mill_clock_ns(void);

/* Wall clock as text for log lines, `2026-01-31T23:59:59.123Z`, into 25 bytes. */
void mill_clock_text(char text[25]);

/* `len` bytes no one can guess, from the kernel. */
void mill_clock_random_bytes(void *bytes, size_t len);

/* A random number in [0, 1). */
double mill_clock_random(void);
