/*
 * A session: one blocking connection to Postgres, for commands.
 *
 * Never used on an event loop: a command such as `tidemill migrate` opens one, asks, waits, closes.
 * Values travel as text both ways. Knows libpq and no table. Must not print anything: notices go to
 * a callback, errors are values, and no error shows any part of a password.
 *
 * Runtime process and plain commands.
 */
#pragma once

#include "core/err.h"
#include "pg/answer.h"

struct mill_session;
struct mill_rows;

/* Can a DSN be read? The error, MILL_ERR_CONFIG, shows nothing of it: it may hold a password. */
int mill_session_check_dsn(const char *dsn, struct mill_err *err);

/*
 * Connect and wait for it, at most 10 s a host unless the DSN or PGCONNECT_TIMEOUT says otherwise.
 * `dsn` is a libpq URI or key=value text; NULL or "": the PG* variables. Of several hosts the one
 * that takes writes is chosen, unless it says otherwise. `application_name` is what the server
 * shows unless the user named one. The session speaks UTF-8 and reads '\' in a string literal as
 * itself.
 *
 * On success `*session` is the caller's to close. An address that cannot be read is
 * MILL_ERR_CONFIG, a server that cannot be reached or refuses us MILL_ERR_UNREACHED, one older than
 * 13 MILL_ERR_DATABASE.
 */
int mill_session_open(const char *dsn, const char *application_name, struct mill_session **session,
                      struct mill_err *err);

/* Close the connection and free the session; NULL is fine. An open transaction is rolled back. */
void mill_session_close(struct mill_session *session);

/*
 * Run several statements given in one text (one transaction, unless they say otherwise), dropping
 * their rows. The error of a statement names its line in `sql`, counted from 1.
 */
int mill_session_script(struct mill_session *session, const char *sql, struct mill_err *err);

/*
 * Run one statement with the parameters $1 … as text; a NULL in `params` is SQL NULL. `rows` may be
 * NULL when nobody wants them; otherwise `*rows` is the caller's to free.
 *
 * A refusal by the server is MILL_ERR_DATABASE with its SQLSTATE; a connection lost on the way is
 * MILL_ERR_UNREACHED, and whether the statement took effect is then unknown.
 */
int mill_session_query(struct mill_session *session, const char *sql, int n_params,
                       const char *const *params, struct mill_rows **rows, struct mill_err *err);

/*
 * Run one statement that a script wrote, with arguments as arguments.h has them, and fill `answer`,
 * which must be empty. `answer->failure.lost` tells that the session is of no use any more.
 */
void mill_session_ask(struct mill_session *session, struct mill_span sql,
                      struct mill_span arguments, struct mill_answer *answer);
/* Is a transaction open, perhaps a failed one? */
bool mill_session_in_transaction(const struct mill_session *session);

int mill_rows_count(const struct mill_rows *rows);
/* How many rows the statement wrote, or for a SELECT read. */
int64_t mill_rows_affected(const struct mill_rows *rows);
/* One value, NULL for SQL NULL. Valid until mill_rows_free. `row` and `column` must exist. */
const char *mill_rows_text(const struct mill_rows *rows, int row, int column);
/* Its bytes, without the NUL; 0 for SQL NULL. */
size_t mill_rows_len(const struct mill_rows *rows, int row, int column);
/* Values written as Postgres writes numbers and booleans; SQL NULL is 0 and false. */
int64_t mill_rows_int8(const struct mill_rows *rows, int row, int column);
bool mill_rows_bool(const struct mill_rows *rows, int row, int column);
/* NULL is fine. */
void mill_rows_free(struct mill_rows *rows);

/*
 * Who hears the server's notices and warnings; nobody does at first. `severity` is `WARNING`,
 * `NOTICE` …; both texts are valid during the call. Called from within mill_session_script and
 * mill_session_query, and must use neither.
 */
typedef void (*mill_session_notice)(const char *severity, const char *text, void *context);
void mill_session_on_notice(struct mill_session *session, mill_session_notice on_notice,
                            void *context);

/* The server's version, such as 150020 for 15.20. */
int mill_session_server_version(const struct mill_session *session);

/* "user@host:port/dbname" for people; a new string for the caller to free. */
char *mill_session_describe(const struct mill_session *session);
