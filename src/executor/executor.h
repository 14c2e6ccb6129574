/*
 * The executor: the process that runs handlers.
 *
 * Its life: it reads a LOAD frame, evaluates config.lua and (mode HANDLERS) loads every handler,
 * answers MANIFEST or LOAD_ERROR, then runs one coroutine per DELIVER and answers each with exactly
 * one OUTCOME. DRAIN: it finishes what it has started, gives back what it has not, says BYE and
 * returns. End of file on the socket means the runtime is gone: it returns at once.
 *
 * Executor process only. Knows nothing of claims, leases or the ledger.
 */
#pragma once

#include "core/base.h"
#include "core/page.h"

/*
 * Run an executor until it is told to end. `fd` is its end of the socket pair, taken over; `page`
 * is the blame page it shares with the runtime. Returns the process's exit code.
 */
int mill_executor_run(int fd, struct mill_page *page);
