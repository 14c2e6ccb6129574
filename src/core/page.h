/*
 * The blame page: memory an executor shares with its runtime, where it says which delivery is on
 * the processor and since when.
 *
 * The runtime reads it when the executor dies (that delivery answers for the death), when it seems
 * to stall, and to send new deliveries elsewhere while it is busy. One writer, one reader; the
 * words are read one after the other, so the reader takes `ticket` before and after the others and
 * trusts them only when it did not change.
 */
#pragma once

#include <stdatomic.h>

#include "core/base.h"

struct mill_page {
	_Atomic uint64_t ticket;      /* the delivery on the processor; 0: none */
	_Atomic uint64_t since_ns;    /* mill_clock_ns when it got there */
	_Atomic uint64_t deadline_ns; /* mill_clock_ns when its time limit passes; 0: none */
	_Atomic uint64_t heap_bytes;  /* what the Lua heap holds, for max_memory_mb */
	_Atomic uint64_t turns;       /* of its loop: whether it reacts to anything */
	_Atomic uint64_t worn;        /* 1: it can open no more files, and is to be replaced */
};

/* The descriptors an executor process finds open. */
#define MILL_EXECUTOR_SOCKET_FD 3
#define MILL_EXECUTOR_PAGE_FD 4
