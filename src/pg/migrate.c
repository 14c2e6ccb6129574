/* Bringing a schema up to date: see migrate.h. */
#include "pg/migrate.h"

#include <inttypes.h>
#include <stdio.h>

#include "core/digest.h"
#include "core/embedded.h"
#include "core/frame.h"
#include "core/policy.h"
#include "pg/plain.h"
#include "pg/session.h"

/* How long to wait for another migration, and for a lock on a busy table. */
#define WAIT_FOR_OTHERS "5min"
#define WAIT_FOR_TABLE "10s"

/*
 * What the files run under, whatever the user's, role's or database's own settings are. A proxy
 * that shares connections is fine with it: everything is local to the transaction.
 */
static const char preamble[] = "set local search_path = pg_catalog, pg_temp;\n"
                               "set local standard_conforming_strings = on;\n"
                               "set local check_function_bodies = on;\n"
                               "set local default_table_access_method = heap;\n"
                               "set local client_min_messages = warning;\n"
                               "set local statement_timeout = 0;\n"
                               "set local idle_in_transaction_session_timeout = 0;\n"
                               "set local lock_timeout = '" WAIT_FOR_TABLE "';\n";

/* ---- the files -------------------------------------------------------------------------- */

int mill_migrate_newest(void)
{
	return (int)mill_embedded_sql_count;
}

static const struct mill_embedded *file_of(int version)
{
	MILL_ASSERT(version >= 1 && version <= mill_migrate_newest());
	const struct mill_embedded *file = &mill_embedded_sql[version - 1];
	/* Files are sorted by name: a gap or a number given twice shows here. */
	MILL_ASSERT(strtol(file->name, NULL, 10) == version);
	return file;
}

/*
 * A fingerprint of a file (FNV-1a, 64 bits, in hexadecimal). It tells apart two builds that carry
 * different files of one number; it is no protection against malice.
 */
static char *checksum_of(const struct mill_embedded *file)
{
	return mill_sprintf("%016" PRIx64,
	                    mill_digest_more(MILL_DIGEST_BEGIN, file->data, file->len));
}

static char *fill(const char *sql, const struct mill_migrate_options *options)
{
	return mill_query_fill(sql, options->schema, options->table, options->prefix);
}

/* ---- options ---------------------------------------------------------------------------- */

static int check_identifier(const char *key, const char *name, size_t max, struct mill_err *err)
{
	if (name != NULL && mill_policy_identifier(name, max))
		return 0;
	return mill_err_set(err, MILL_ERR_CONFIG,
	                    "%s: `%.80s` cannot be used: letters, digits and `_` only, not a digit "
	                    "first, 1 to %zu bytes",
	                    key, name ? name : "", max);
}

static int check_options(const struct mill_migrate_options *options, struct mill_err *err)
{
	if (check_identifier("schema", options->schema, MILL_IDENTIFIER_MAX, err) != 0 ||
	    check_identifier("table", options->table, MILL_IDENTIFIER_MAX, err) != 0 ||
	    check_identifier("prefix", options->prefix, MILL_PREFIX_MAX, err) != 0)
		return -1;
	/* The tables beside the ledger have fixed names. */
	static const char *const taken[] = { "subscription", "worker", "setting", "migration" };
	for (size_t i = 0; i < MILL_COUNT(taken); i++)
		if (strcmp(options->table, taken[i]) == 0)
			return mill_err_set(err, MILL_ERR_CONFIG,
			                    "table: `%s` is the name of another table of Tidemill: "
			                    "choose a different one",
			                    options->table);
	if (options->max_payload_bytes < 1)
		return mill_err_set(err, MILL_ERR_CONFIG, "max_payload_bytes: %d is not positive",
		                    options->max_payload_bytes);
	if (options->to_version < 0 || options->to_version > mill_migrate_newest())
		return mill_err_set(err, MILL_ERR_CONFIG,
		                    "there is no version %d: this program knows 1 to %d",
		                    options->to_version, mill_migrate_newest());
	return 0;
}

static int target_of(const struct mill_migrate_options *options)
{
	return options->to_version ? options->to_version : mill_migrate_newest();
}

/* ---- what is there ---------------------------------------------------------------------- */

/*
 * Looks into the catalogue, never at a name directly: a name that is missing or may not be used is
 * an answer here, not an error. Version 1 brought `migration`, so without that table it is 0.
 */
struct found {
	bool has_schema;
	bool has_table;     /* something of the ledger's name */
	bool has_columns;   /* it has every column of a plain queue */
	bool has_migration; /* our table of versions, beside a ledger of ours */
	bool is_utf8;
	char *ledger;     /* the ledger's real name, NULL when there is none */
	char *in_the_way; /* of version 0: a relation we would create, NULL when there is none */
};

static void free_found(struct found *found)
{
	free(found->ledger);
	free(found->in_the_way);
}

static int look(struct mill_session *session, const struct mill_migrate_options *options,
                struct found *found, struct mill_err *err)
{
	static const char sql[] =
	        "with thing as ("
	        "  select c.oid, c.relname, c.relkind"
	        "    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = "
	        "c.relnamespace"
	        "   where n.nspname = $1)"
	        "select exists (select from pg_catalog.pg_namespace where nspname = $1),"
	        "       exists (select from thing where relname = $2 and relkind in ('r', 'p', "
	        "'v')),"
	        "       (select count(*) from thing t join pg_catalog.pg_attribute a on a.attrelid "
	        "= t.oid"
	        "         where t.relname = $2 and not a.attisdropped and a.attname in ("
	        "           'id', 'topic', 'subscriber', 'status', 'payload', 'attempts', "
	        "'available_at',"
	        "           'claimed_at', 'claimed_by', 'processed_at', 'error', 'published_by',"
	        "           'created_at', 'updated_at')) = 14,"
	        "       (select count(*) from thing t join pg_catalog.pg_attribute a on a.attrelid "
	        "= t.oid"
	        "         where t.relname = 'migration' and t.relkind = 'r' and not a.attisdropped"
	        "           and a.attname in ('version', 'name', 'checksum', 'applied_at')) = 4,"
	        "       pg_catalog.current_setting('server_encoding') = 'UTF8',"
	        "       (select r.relname from thing t"
	        "          join pg_catalog.pg_index i on i.indexrelid = t.oid"
	        "          join pg_catalog.pg_class r on r.oid = i.indrelid"
	        "         where t.relname = 'message_pkey'),"
	        "       (select min(relname::text) from thing where relname::text in"
	        "         ($2, 'migration', 'subscription', 'worker', 'setting', 'message_seq',"
	        "          'message_pkey'))";
	const char *params[] = { options->schema, options->table };
	struct mill_rows *rows;
	if (mill_session_query(session, sql, 2, params, &rows, err) != 0)
		return -1;
	const char *ledger = mill_rows_text(rows, 0, 5), *in_the_way = mill_rows_text(rows, 0, 6);
	*found = (struct found){
		.has_schema = mill_rows_bool(rows, 0, 0),
		.has_table = mill_rows_bool(rows, 0, 1),
		.has_columns = mill_rows_bool(rows, 0, 2),
		.has_migration = mill_rows_bool(rows, 0, 3) && ledger != NULL,
		.is_utf8 = mill_rows_bool(rows, 0, 4),
		.ledger = ledger ? mill_strdup(ledger) : NULL,
		.in_the_way = in_the_way ? mill_strdup(in_the_way) : NULL,
	};
	mill_rows_free(rows);
	return 0;
}

static int ledger_is_missing(const struct found *found, const struct mill_migrate_options *options,
                             struct mill_err *err)
{
	return mill_err_database(
	        err, NULL,
	        "schema \"%s\" has no table \"%s\": its ledger is \"%s\"; set `table` to "
	        "that, or give `schema` another name",
	        options->schema, options->table, found->ledger);
}

/*
 * The version that the migration table tells, compared with the files of this program: newer or
 * different is an error.
 */
static int read_version(struct mill_session *session, const struct mill_migrate_options *options,
                        int *version, struct mill_err *err)
{
	char *sql = fill("select version, name, checksum from {schema}.migration order by version",
	                 options);
	struct mill_rows *rows;
	int outcome = mill_session_query(session, sql, 0, NULL, &rows, err);
	free(sql);
	if (outcome != 0)
		return mill_err_wrap(err, "reading the version of schema \"%s\"", options->schema);
	int count = mill_rows_count(rows);
	*version = count ? (int)mill_rows_int8(rows, count - 1, 0) : 0;
	if (*version > mill_migrate_newest())
		outcome =
		        mill_err_database(err, NULL,
		                          "schema \"%s\" is at version %d, this program knows %d: "
		                          "install a newer tidemill",
		                          options->schema, *version, mill_migrate_newest());
	else if (*version != count)
		outcome = mill_err_database(
		        err, NULL,
		        "table \"%s\".\"migration\" has %d rows for version %d: it "
		        "was changed by hand; restore a row for each version",
		        options->schema, count, *version);
	for (int i = 0; outcome == 0 && i < count; i++) {
		const struct mill_embedded *file = file_of(i + 1);
		char *checksum = checksum_of(file);
		const char *applied = mill_rows_text(rows, i, 2);
		if (applied == NULL || strcmp(applied, checksum) != 0)
			outcome = mill_err_database(
			        err, NULL,
			        "schema \"%s\" was made from another %s than this program carries: "
			        "use the "
			        "tidemill that made it, or migrate into a new schema",
			        options->schema, file->name);
		free(checksum);
	}
	mill_rows_free(rows);
	return outcome;
}

/* ---- running ---------------------------------------------------------------------------- */

static char *record_of(int version)
{
	const struct mill_embedded *file = file_of(version);
	char *checksum = checksum_of(file);
	char *sql = mill_sprintf("insert into {schema}.migration (version, name, checksum) "
	                         "values (%d, '%s', '%s');\n",
	                         version, file->name, checksum);
	free(checksum);
	return sql;
}

/* Where the settings differ, so that whoever may not write them is not refused for nothing. */
static char *settings_of(const struct mill_migrate_options *options)
{
	return mill_sprintf("update {schema}.setting"
	                    " set prefix = '{prefix}', max_payload_bytes = %d, notify = %s"
	                    " where (prefix, max_payload_bytes, notify)"
	                    " is distinct from ('{prefix}', %d, %s);\n",
	                    options->max_payload_bytes, options->notify ? "true" : "false",
	                    options->max_payload_bytes, options->notify ? "true" : "false");
}

static int run_filled(struct mill_session *session, const char *sql,
                      const struct mill_migrate_options *options, struct mill_err *err)
{
	char *filled = fill(sql, options);
	int outcome = mill_session_script(session, filled, err);
	free(filled);
	return outcome;
}

/* Whether a row of settings differs; a plain SELECT, for those who may not UPDATE. */
static int settings_differ(struct mill_session *session, const struct mill_migrate_options *options,
                           bool *differ, struct mill_err *err)
{
	char *bytes = mill_sprintf("%d", options->max_payload_bytes);
	const char *params[] = { options->prefix, bytes, options->notify ? "t" : "f" };
	char *sql = fill("select count(*) = 0 from {schema}.setting where prefix = $1 and "
	                 "max_payload_bytes = $2::integer and notify = $3::boolean",
	                 options);
	struct mill_rows *rows;
	int outcome = mill_session_query(session, sql, 3, params, &rows, err);
	if (outcome == 0) {
		*differ = mill_rows_bool(rows, 0, 0);
		mill_rows_free(rows);
	}
	free(sql);
	free(bytes);
	return outcome;
}

static int apply(struct mill_session *session, const struct mill_migrate_options *options,
                 int version, struct mill_err *err)
{
	const struct mill_embedded *file = file_of(version);
	if (run_filled(session, (const char *)file->data, options, err) != 0)
		return mill_err_wrap(err, "%s", file->name);
	char *record = record_of(version);
	int outcome = run_filled(session, record, options, err);
	free(record);
	return outcome;
}

/* Another program's things under our names, or a database that cannot hold ours. */
static int check_ground(const struct found *found, const struct mill_migrate_options *options,
                        struct mill_err *err)
{
	if (!found->is_utf8)
		return mill_err_database(
		        err, NULL,
		        "the database is not encoded in UTF8, which Tidemill needs: "
		        "create one with `encoding 'UTF8'`");
	if (found->has_migration)
		return found->has_table ? 0 : ledger_is_missing(found, options, err);
	if (found->in_the_way != NULL)
		return mill_err_database(
		        err, NULL,
		        "schema \"%s\" holds a \"%s\" that Tidemill did not make: give "
		        "`schema` a name of its own, or set `migrate = false` to work with "
		        "another program's table",
		        options->schema, found->in_the_way);
	return 0;
}

/* Inside the transaction, with the lock held. */
static int bring_up(struct mill_session *session, const struct mill_migrate_options *options,
                    struct mill_migrate_result *result, struct mill_err *err)
{
	struct found found;
	if (look(session, options, &found, err) != 0)
		return -1;
	int outcome = check_ground(&found, options, err);
	bool has_schema = found.has_schema, has_migration = found.has_migration;
	free_found(&found);
	if (outcome != 0)
		return -1;

	int version = 0;
	if (has_migration && read_version(session, options, &version, err) != 0)
		return -1;
	int target = target_of(options);
	if (options->to_version != 0 && version > target)
		return mill_err_database(
		        err, NULL,
		        "schema \"%s\" is at version %d already: there is no way back "
		        "to %d",
		        options->schema, version, target);
	result->from_version = version;
	result->to_version = version > target ? version : target;

	/* Not IF NOT EXISTS: that needs CREATE on the database even when the schema is there. */
	if (!has_schema && run_filled(session, "create schema {schema}", options, err) != 0)
		return mill_err_wrap(err, "creating schema \"%s\"", options->schema);
	while (version < target)
		if (apply(session, options, ++version, err) != 0)
			return -1;

	bool differ;
	if (settings_differ(session, options, &differ, err) != 0)
		return -1;
	if (differ) {
		char *settings = settings_of(options);
		outcome = run_filled(session, settings, options, err);
		free(settings);
		if (outcome != 0)
			return mill_err_wrap(
			        err,
			        "writing prefix, max_payload_bytes and notify into schema "
			        "\"%s\"",
			        options->schema);
	}
	return 0;
}

static void say_where(const struct mill_session *session, struct mill_err *err)
{
	char *where = mill_session_describe(session);
	mill_err_wrap(err, "%s", where);
	free(where);
}

/* Begin the transaction and wait until no other migration of this schema runs. */
static int begin(struct mill_session *session, const char *schema, struct mill_err *err)
{
	/* Read committed: whoever waited for the lock must see what was committed meanwhile. */
	static const char sql[] = "begin transaction isolation level read committed read write;"
	                          "set local statement_timeout = 0;"
	                          "set local lock_timeout = '" WAIT_FOR_OTHERS "'";
	if (mill_session_script(session, sql, err) != 0)
		return -1;
	if (mill_session_query(session,
	                       "select pg_catalog.pg_advisory_xact_lock("
	                       "pg_catalog.hashtextextended('tidemill schema ' || $1, 0))",
	                       1, &schema, NULL, err) != 0) {
		if (mill_err_is_lock_timeout(err))
			mill_err_wrap(err,
			              "another migration of schema \"%s\" has not ended "
			              "for " WAIT_FOR_OTHERS,
			              schema);
		return -1;
	}
	return mill_session_script(session, preamble, err);
}

int mill_migrate_run(const struct mill_migrate_options *options, struct mill_migrate_result *result,
                     struct mill_err *err)
{
	if (check_options(options, err) != 0)
		return -1;
	struct mill_session *session;
	if (mill_session_open(options->dsn, "tidemill migrate", &session, err) != 0)
		return -1;
	int outcome = begin(session, options->schema, err);
	if (outcome == 0) {
		outcome = bring_up(session, options, result, err);
		if (outcome != 0 && mill_err_is_lock_timeout(err))
			mill_err_wrap(err,
			              "a table of schema \"%s\" is in use: try again when it is "
			              "less busy",
			              options->schema);
	}
	if (outcome == 0)
		outcome = mill_session_script(session, "commit", err);
	if (outcome != 0)
		say_where(session, err);
	mill_session_close(session);
	return outcome;
}

/* ---- printing and checking -------------------------------------------------------------- */

static void append_filled(struct mill_buffer *text, const char *sql,
                          const struct mill_migrate_options *options)
{
	char *filled = fill(sql, options);
	mill_buffer_text(text, filled);
	free(filled);
}

char *mill_migrate_print(const struct mill_migrate_options *options, struct mill_err *err)
{
	if (check_options(options, err) != 0)
		return NULL;
	int target = target_of(options);
	struct mill_buffer text = { 0 };
	char *head = mill_sprintf("-- Makes a new Tidemill schema, version %d. Run it with\n"
	                          "--   psql -v ON_ERROR_STOP=1 -f FILE\n"
	                          "begin transaction isolation level read committed read write;\n"
	                          "%s",
	                          target, preamble);
	mill_buffer_text(&text, head);
	free(head);
	append_filled(&text, "create schema if not exists {schema};\n", options);
	for (int version = 1; version <= target; version++) {
		const struct mill_embedded *file = file_of(version);
		mill_buffer_text(&text, "\n-- ==== ");
		mill_buffer_text(&text, file->name);
		mill_buffer_text(&text, " ====\n\n");
		append_filled(&text, (const char *)file->data, options);
		char *record = record_of(version);
		append_filled(&text, record, options);
		free(record);
	}
	char *settings = settings_of(options);
	append_filled(&text, settings, options);
	free(settings);
	mill_buffer_text(&text, "commit;\n");
	mill_buffer_bytes(&text, "", 1);
	return text.data;
}

static int check_found(struct mill_session *session, const struct mill_migrate_options *options,
                       const struct found *found, enum mill_shape *shape, struct mill_err *err)
{
	if (!found->has_migration) {
		*shape = MILL_SHAPE_PLAIN;
		if (found->has_columns)
			return mill_plain_check(session, options->schema, options->table, err);
		if (found->has_table)
			return mill_err_database(
			        err, NULL,
			        "table \"%s\".\"%s\" has not the columns of a queue: see "
			        "docs/foreign-table.md, or let `tidemill migrate` make one under "
			        "another name",
			        options->schema, options->table);
		return mill_err_database(err, NULL,
		                         "there is no table \"%s\".\"%s\": run `tidemill migrate`",
		                         options->schema, options->table);
	}
	*shape = MILL_SHAPE_LEDGER;
	if (!found->has_table)
		return ledger_is_missing(found, options, err);
	int version;
	if (read_version(session, options, &version, err) != 0)
		return -1;
	if (version < mill_migrate_newest())
		return mill_err_database(
		        err, NULL,
		        "schema \"%s\" is at version %d, this program needs %d: run "
		        "`tidemill migrate`",
		        options->schema, version, mill_migrate_newest());
	return 0;
}

int mill_migrate_check(const struct mill_migrate_options *options, enum mill_shape *shape,
                       struct mill_err *err)
{
	if (check_options(options, err) != 0)
		return -1;
	struct mill_session *session;
	if (mill_session_open(options->dsn, "tidemill", &session, err) != 0)
		return -1;
	struct found found;
	int outcome = look(session, options, &found, err);
	if (outcome == 0) {
		outcome = check_found(session, options, &found, shape, err);
		free_found(&found);
	}
	if (outcome != 0)
		say_where(session, err);
	mill_session_close(session);
	return outcome;
}
