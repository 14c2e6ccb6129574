/*
 * The statements one connection knows: which SQL texts were used on it, and which of them are
 * prepared on the server.
 *
 * Bounded: the text that was used longest ago goes first. Knows no libpq; the client sends what is
 * decided here.
 */
#pragma once

#include "core/list.h"
#include "core/frame.h"

struct mill_prepared_statement {
	struct mill_link_node node;
	char *sql;
	uint64_t hash;
	char name[24];
	uint64_t uses;
	bool on_server; /* prepared there under `name` */
};

/* Zero-initialised is not ready: call mill_prepared_init. */
struct mill_prepared {
	struct mill_list statements; /* used last: first */
	struct mill_buffer stale; /* "DEALLOCATE s1;…": prepared there, and known here no more */
	uint64_t names;
};

void mill_prepared_init(struct mill_prepared *prepared);
/* The server's end knows nothing any more. */
void mill_prepared_clear(struct mill_prepared *prepared);

/* The statement of this text, which becomes the one used last. NULL: it is too long to keep. */
struct mill_prepared_statement *mill_prepared_use(struct mill_prepared *prepared,
                                                  struct mill_span sql);
/* It cannot be used any more. */
void mill_prepared_forget(struct mill_prepared *prepared,
                          struct mill_prepared_statement *statement);
