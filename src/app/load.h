/*
 * Load a config.lua: ask an executor that lives for this alone, since the runtime never runs Lua.
 *
 * Blocking; used by commands before their loop turns.
 */
#pragma once

#include "app/talk.h"
#include "core/config.h"
#include "core/err.h"
#include "core/message.h"

/*
 * Evaluate the config at `path`; mode HANDLERS loads every handler too. On success `manifest` is
 * the caller's to free. A config or handler at fault is MILL_ERR_CONFIG with `file:line: …`; one
 * that has not ended after `limit_secs` is killed and reported.
 */
int mill_load_manifest(const char *path, enum mill_load_mode mode, double limit_secs,
                       struct mill_manifest *manifest, struct mill_err *err);

/*
 * The same, and all that is wrong where that is MILL_ERR_CONFIG: a line each is added to
 * `problems`, of which `err` has the first.
 */
int mill_load_manifest_listing(const char *path, enum mill_load_mode mode, double limit_secs,
                               struct mill_manifest *manifest, struct mill_buffer *problems,
                               struct mill_err *err);

/*
 * The same as two steps of a talk that goes on. Ask: FRAME is success, and `manifest` the caller's
 * to free. Anything else: end the talk, then explain what happened with its status, in which `err`
 * stays as it is where it says so already. Explain returns −1.
 */
enum mill_talk_event mill_load_ask(struct mill_talk *talk, const char *path,
                                   const struct mill_load *load, double limit_secs,
                                   struct mill_manifest *manifest, struct mill_buffer *problems,
                                   struct mill_err *err);
int mill_load_explain(enum mill_talk_event event, const char *path, double limit_secs, int status,
                      struct mill_err *err);

/* Which program executors are started from: this one. Returns a static path. */
const char *mill_load_program(void);
