/*
 * Named points at which a test can have this process killed or stopped, as if the machine had
 * picked that very moment. Compiled in with MILL_KILL_POINTS (debug and sanitizer builds); nothing
 * otherwise.
 *
 *     TIDEMILL_KILL_AT=claim_begin      SIGKILL at the first passing
 *     TIDEMILL_KILL_AT=claim_begin:5    at the fifth
 *     TIDEMILL_STOP_AT=claim_begin      SIGSTOP, until somebody sends SIGCONT
 */
#pragma once

#ifdef MILL_KILL_POINTS
void mill_killpoint_pass(const char *name);
#define MILL_KILL_POINT(name) mill_killpoint_pass(name)
#else
#define MILL_KILL_POINT(name) ((void)0)
#endif
