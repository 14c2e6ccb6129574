/*
 * One executor process as its runtime sees it: started, written to, read from, killed, reaped.
 *
 *     STARTING ──► READY ──► DRAINING ──► (exit) gone, freed
 *         └──────────┴───────────┴──► DYING (SIGKILL sent) ──► (exit) gone, freed
 *
 * It is over when waitpid has returned it, never before: until then its handlers may still act.
 * What it wrote before it died lies in the socket and is read first, so an outcome that was sent
 * counts.
 *
 * Private to the pool. Runtime process.
 */
#pragma once

#include "core/page.h"
#include "flow/pool.h"

enum mill_process_state {
	MILL_PROCESS_STARTING,
	MILL_PROCESS_READY,
	MILL_PROCESS_DRAINING,
	MILL_PROCESS_DYING,
};

/* Why it was killed, when we did it. */
enum mill_kill {
	MILL_KILL_NONE,
	MILL_KILL_ORDERED,  /* the program's end, or the lease's */
	MILL_KILL_LIMIT,    /* the delivery on the processor is past its time limit */
	MILL_KILL_STALL,    /* it holds the processor for too long */
	MILL_KILL_MEMORY,   /* far over max_memory_mb */
	MILL_KILL_FROZEN,   /* it has deliveries and does not react */
	MILL_KILL_LOAD,     /* config or handlers did not load */
	MILL_KILL_PROTOCOL, /* it sent what is no frame */
};

struct mill_process {
	struct mill_executor executor; /* first: what the others hold a pointer to */
	struct mill_link_node node;    /* in the pool's list */
	enum mill_process_state state;
	enum mill_kill kill;
	uint64_t killed_ticket; /* whom the kill was meant for; 0: nobody */
	bool solo;              /* for messages that run alone; not one of the pool's count */
	bool retiring;          /* READY, but a successor is on its way: it gets nothing more */
	bool recycled;          /* drained to be replaced, not because the pool ends */
	uint64_t started_ns, ready_ns;
	uint64_t idle_ns;    /* DRAINING: since when it has been seen with nothing left to do */
	uint64_t turns_seen; /* the pool's, while it looks for a sign of life */
	unsigned silent_looks;

	/* The rest is process.c's. */
	struct mill_page *page;
	struct mill_buffer in, out;
	uv_process_t handle;
	uv_pipe_t pipe;
	int handles; /* open uv handles */
	int (*on_frame)(struct mill_process *process, struct mill_frame *frame,
	                struct mill_err *err);
	void (*on_end)(struct mill_process *process, int64_t status, int signal_number);
};

struct mill_process_options {
	struct mill_pool *pool;
	uv_loop_t *loop;
	const char *program;
	const struct mill_load *load; /* its first frame */
	/* −1: this frame is not acceptable, the process is killed. */
	int (*on_frame)(struct mill_process *process, struct mill_frame *frame,
	                struct mill_err *err);
	/* Reaped; all it wrote was read. mill_process_close comes next. */
	void (*on_end)(struct mill_process *process, int64_t status, int signal_number);
};

/* Start one; NULL when the system does not let us, which is logged. On no list yet. */
struct mill_process *mill_process_start(const struct mill_process_options *options);
/* Close its handles and free it; after on_end, off every list. */
void mill_process_close(struct mill_process *process);

/* SIGKILL; on_end follows. The first reason stays. */
void mill_process_kill(struct mill_process *process, enum mill_kill kill);
/* Let it finish what it has; it gets nothing more. */
void mill_process_drain(struct mill_process *process);
/* Make its loop turn, which mill_process_turns tells, if it still does. */
void mill_process_ping(struct mill_process *process);
/* Send what was written into `out`. */
void mill_process_flush(struct mill_process *process);

/* What is on its processor. */
struct mill_on_processor {
	uint64_t ticket, since_ns, deadline_ns;
};
/* Read consistently; false when nothing is, or it changed this moment. */
bool mill_process_page(const struct mill_process *process, struct mill_on_processor *now);
/* How often its loop has turned. */
uint64_t mill_process_turns(const struct mill_process *process);
/* Has it said that it is to be replaced? */
bool mill_process_is_worn(const struct mill_process *process);
/* Its resident memory, 0 when it has just ended. */
size_t mill_process_memory_mb(const struct mill_process *process);

/* Within which limits an executor stays, or is ended. */
struct mill_process_limits {
	double stall_secs, kill_grace_secs;
	size_t max_memory_mb;    /* over it an executor is replaced; 0: no limit */
	uint64_t max_deliveries; /* after so many it is replaced; 0: never */
};

/* What a death means: whose fault it was and what that delivery is told. */
void mill_process_death(const struct mill_process *process, int64_t status, int signal_number,
                        const struct mill_process_limits *limits,
                        struct mill_executor_death *death);
