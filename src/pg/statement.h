/*
 * What the text of a statement says of itself, as far as it must be known before the server is
 * asked.
 *
 * Reads words and comments, no grammar. Pure: any process.
 */
#pragma once

#include "core/frame.h"

/*
 * Does it end the transaction it stands in: COMMIT, END, ABORT, ROLLBACK, PREPARE TRANSACTION, with
 * whatever follows? ROLLBACK TO a savepoint does not.
 */
bool mill_statement_ends_transaction(struct mill_span sql);
