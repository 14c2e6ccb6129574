/*
 * Where a DSN leads, made ready for an asynchronous connect: keywords and values for libpq, with
 * host names resolved off the loop, since libpq itself would block on DNS.
 *
 * Runtime process, on the loop.
 */
#pragma once

#include <uv.h>

#include "core/err.h"

#define MILL_ADDRESS_KEYWORDS 64

/* Keywords and values, NULL-terminated, as PQconnectStartParams takes them. */
struct mill_address {
	const char *keywords[MILL_ADDRESS_KEYWORDS + 1];
	char *values[MILL_ADDRESS_KEYWORDS + 1];
	size_t count;
};

/*
 * Read a DSN (NULL or "": PG* variables alone) and add what every connection of ours sets:
 * application_name, client encoding, keepalives that notice a dead peer within half a minute.
 */
int mill_address_parse(const char *dsn, const char *application_name, struct mill_address *address,
                       struct mill_err *err);
void mill_address_free(struct mill_address *address);

/* Set or replace one keyword. */
void mill_address_set(struct mill_address *address, const char *keyword, const char *value);
/* The value of a keyword: of the DSN, or else the environment's or libpq's default. New string or
 * NULL. */
char *mill_address_get(const struct mill_address *address, const char *keyword);

/*
 * Fill in `hostaddr` for the host names of `address`, which must stay until the callback. A name
 * that cannot be resolved is left out when others remain. The callback comes exactly once, later.
 */
struct mill_resolve;
struct mill_resolve *mill_address_resolve(uv_loop_t *loop, struct mill_address *address,
                                          void (*done)(const struct mill_err *err, void *context),
                                          void *context);
/* Forget about it: the callback will not come, `address` may go. */
void mill_resolve_abandon(struct mill_resolve *resolve);
