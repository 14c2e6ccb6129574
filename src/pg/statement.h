/*
 * What the text of a statement says of itself, as far as the server does not say it in time.
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

/*
 * May it leave something behind in the session that no tag tells of: settings changed by a function
 * or by way of pg_settings, advisory locks, temporary tables, cursors; or anything, by the code in
 * a DO or a CALL?
 */
bool mill_statement_leaves_state(struct mill_span sql);
