/*
 * Relay: publishes on behalf of handlers. An executor asks with a REQUEST frame, the runtime's
 * publish link does it, the REPLY goes back to the delivery that waits.
 *
 * Runtime process.
 */
#pragma once

#include "flow/orphan.h"
#include "flow/pool.h"
#include "pg/store.h"

struct mill_relay;

/* `orphans` is borrowed. */
struct mill_relay *mill_relay_new(uv_loop_t *loop, struct mill_store *store,
                                  struct mill_link *publish, struct mill_orphans *orphans);
/* Only after the publish link is closed. */
void mill_relay_close(struct mill_relay *relay, void (*on_closed)(void *context), void *context);

/*
 * Take a request; its spans are copied. It waits while the link is down. `delivery` is the one that
 * asks, read during the call; NULL when it is over already.
 */
void mill_relay_take(struct mill_relay *relay, struct mill_executor *executor,
                     const struct mill_request *request, const struct mill_delivery *delivery);
/* Send what waits; once a turn of the loop. */
void mill_relay_turn(struct mill_relay *relay);
/* This executor is gone: nobody waits for its replies any more. */
void mill_relay_forget(struct mill_relay *relay, const struct mill_executor *executor);
