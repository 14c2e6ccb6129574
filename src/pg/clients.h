/*
 * Clients: the connections of one executor, for as many handlers as there are.
 *
 * At most so many; made when one is wanted, closed when none was for a while. Who finds none free
 * waits, and is served in the order of asking. Who got one gives it back, and it is cleaned before
 * anybody else has it.
 *
 * Executor process, on the loop. Knows no Lua.
 */
#pragma once

#include "core/list.h"
#include "pg/client.h"

struct mill_clients;

struct mill_clients_options {
	uv_loop_t *loop;
	const char *dsn; /* NULL: PG* variables; copied */
	const char *application;
	size_t most;
	double idle_secs; /* an unused connection is closed after so long */
};

struct mill_clients *mill_clients_new(const struct mill_clients_options *options);
/* Close them all; the memory goes when the loop has turned. NULL is fine. */
void mill_clients_close(struct mill_clients *clients);

/* A place in the queue. Zero-initialised is ready; embedded in who waits. */
struct mill_clients_turn {
	struct mill_link_node node; /* while it waits */
	void (*on_turn)(struct mill_clients_turn *turn, struct mill_client *client);
};

/* A client, or NULL: then `on_turn` brings one later, unless the turn is left before. */
struct mill_client *mill_clients_take(struct mill_clients *clients, struct mill_clients_turn *turn);
/* Leave the queue; one that is not in it is ignored. */
void mill_clients_leave(struct mill_clients *clients, struct mill_clients_turn *turn);
/* Give it back, whatever it is in the middle of: then its connection is closed. */
void mill_clients_give(struct mill_clients *clients, struct mill_client *client);
