/*
 * A client: one asynchronous connection for statements that handlers write, one at a time.
 *
 *     CLOSED ──► CONNECTING ──► READY ──► lost: CLOSED again
 *
 * It connects when it is first needed and tells of a connection that breaks; it never reconnects
 * behind the back of a transaction. Statements used twice are prepared, unless a pooler stands
 * between: then the server's end is not ours alone, and nothing is left there.
 *
 * Executor process, on the loop. Knows neither Lua nor who waits.
 */
#pragma once

#include <uv.h>

#include "pg/answer.h"

struct mill_client;

struct mill_client_options {
	uv_loop_t *loop;
	const char *dsn;         /* NULL or "": PG* variables; must outlive the client */
	const char *application; /* what the server shows; a literal */
	/* The connection broke while nothing was asked. */
	void (*on_idle_loss)(struct mill_client *client, void *context);
	void *context;
};

struct mill_client *mill_client_new(const struct mill_client_options *options);

/*
 * Close the connection and free the client, in the middle of whatever it does: a statement that
 * runs is cancelled on the server, a transaction is rolled back there, and `done` never comes.
 */
void mill_client_close(struct mill_client *client);

struct mill_client_statement {
	struct mill_span sql;       /* holds no NUL byte */
	struct mill_span arguments; /* see arguments.h; absent: none */
	bool continues; /* a transaction that this client is in: no new connection will do */
	bool commits;   /* if the connection breaks, it may have taken effect */
};

/*
 * Ask. Only when nothing is asked. `done` comes exactly once, from the loop; the answer is valid
 * during the call, in which the next statement may be asked already. Copies what it is given.
 */
typedef void (*mill_client_done)(struct mill_answer *answer, void *context);
void mill_client_ask(struct mill_client *client, const struct mill_client_statement *statement,
                     mill_client_done done, void *context);

/* Has it something to do? */
bool mill_client_is_busy(const struct mill_client *client);
/* Is there a connection, as far as is known? */
bool mill_client_is_open(const struct mill_client *client);
/* Is a transaction open on it, perhaps a failed one? */
bool mill_client_in_transaction(const struct mill_client *client);

/*
 * Make it fit for somebody else: end a transaction, reset what statements left in the session. Only
 * when nothing is asked. Returns true when nothing has to be done; otherwise `cleaned` comes
 * later, with false when the client is no good any more.
 */
bool mill_client_clean(struct mill_client *client,
                       void (*cleaned)(struct mill_client *client, bool good, void *context));
