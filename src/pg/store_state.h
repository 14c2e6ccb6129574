/*
 * What a store is made of, for the files that implement it.
 *
 * Private to the store. Runtime process.
 */
#pragma once

#include "pg/pairs.h"
#include "pg/store.h"

struct mill_store {
	struct mill_statement statements[MILL_QUERY_COUNT];
	int64_t max_payload_bytes;
	struct mill_pairs *pairs; /* NULL: a ledger, which knows its lanes itself */
	bool notify;              /* this and the next: of a plain table */
	int32_t retain_hours;
	char *worker_id;
	struct mill_params params; /* reused by every call */
};

/* The store's own parameters, emptied: until the next call. */
struct mill_params *mill_store_params(struct mill_store *store);
/* The id in a column of an answer. */
void mill_store_copy_id(const struct mill_rowset *rows, int row, int column, uint8_t id[16]);
