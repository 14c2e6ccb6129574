/*
 * The rules of the queue that need neither a clock nor a database: what a topic is, how long a
 * retry waits, how an error is cut, how an identifier is quoted.
 *
 * Pure functions; both processes and the unit specs (spec/unit/policy_spec.lua) use them.
 */
#pragma once

#include "core/err.h"

#define MILL_TOPIC_MAX 200     /* characters of a topic */
#define MILL_IDENTIFIER_MAX 63 /* bytes of a schema's or table's name (NAMEDATALEN - 1) */
#define MILL_PREFIX_MAX 50     /* bytes of a channel prefix: "<prefix>_control" must fit in 63 */
#define MILL_ERROR_MAX 4000    /* bytes of an error as the ledger keeps it */
#define MILL_BACKOFF_MAX_SECS 3600 /* the longest wait before a retry */

/*
 * Check a topic: 1 to 200 characters of letters, digits, `.`, `_`, `-` or `:`, after white space
 * around it is dropped. On success `*start` and `*trimmed_len` name the part of `text` that counts.
 */
int mill_policy_topic(const char *text, size_t len, const char **start, size_t *trimmed_len,
                      struct mill_err *err);

/*
 * Seconds to wait after failed attempt number `attempts` (from 1): base × 2^(attempts−1), at most
 * 3600, in integers that cannot overflow. `jitter` (0 to 1) adds up to that share, scaled by
 * `random` (0 to 1), and never subtracts.
 */
uint32_t mill_policy_backoff_secs(uint32_t base_secs, uint32_t attempts, double jitter,
                                  double random);

/*
 * The largest length ≤ max at which UTF-8 `text` of `len` bytes can be cut without halving a
 * character.
 */
size_t mill_policy_boundary(const char *text, size_t len, size_t max);

/*
 * A text that every UTF-8 database column accepts: NUL bytes and bytes that are no UTF-8 become
 * U+FFFD, and what is longer than `max` bytes is cut on a character boundary with `…` added.
 * Returns a new NUL-terminated string for the caller to free.
 */
char *mill_policy_clean_text(const char *text, size_t len, size_t max);

/* Is `name` a plain identifier, `^[A-Za-z_][A-Za-z0-9_]*$`, of at most `max` bytes? */
bool mill_policy_identifier(const char *name, size_t max);

/* `"name"`, a new string for the caller to free. `name` must be a plain identifier. */
char *mill_policy_quote_identifier(const char *name);

/*
 * The entry of `names` most like `word`, or else one that begins with it, or NULL where none is
 * close: what somebody who mistyped probably meant.
 */
const char *mill_policy_closest(const char *word, const char *const *names, size_t count);
