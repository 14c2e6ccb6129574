/*
 * Refusals that come as rows.
 *
 * In a plain table (queries.h) nothing of ours can raise an error: a statement that finds a fault
 * in what it was given writes nothing, and answers with the fault. Here that becomes the error it
 * would be elsewhere, so that nobody above knows the difference. Runtime process.
 */
#pragma once

#include "pg/link.h"

/* The columns in which such a statement says what was wrong, and to which topics nobody
 * subscribes (see mill_store_unwanted). Its rowset is number 1 of the exchange. */
enum { MILL_REFUSAL_FAULT = 1, MILL_REFUSAL_UNWANTED };

/*
 * As mill_link_end, for an exchange with such a statement. A fault arrives as MILL_ERR_DATABASE
 * with SQLSTATE 22023.
 */
void mill_refusal_end(struct mill_link *link, mill_link_done done, void *context);
