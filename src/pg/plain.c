/* Looking at another program's table: see plain.h. */
#include "pg/plain.h"

#include "pg/session.h"

/*
 * $1 schema, $2 table. What is wrong, one row each, in the order to be told. A claim's token has up
 * to 100 characters.
 */
static const char faults[] =
        "with thing as ("
        "  select c.oid, c.relkind from pg_catalog.pg_class c"
        "    join pg_catalog.pg_namespace n on n.oid = c.relnamespace"
        "   where n.nspname = $1 and c.relname = $2),"
        "wanted(name, types, empties) as (values"
        "  ('id', array['uuid'], false),"
        "  ('topic', array['text', 'character varying'], false),"
        "  ('subscriber', array['text', 'character varying'], false),"
        "  ('status', array['text', 'character varying'], false),"
        "  ('payload', array['jsonb', 'json'], false),"
        "  ('attempts', array['integer', 'bigint', 'smallint'], false),"
        "  ('available_at', array['timestamp with time zone'], false),"
        "  ('claimed_at', array['timestamp with time zone'], true),"
        "  ('claimed_by', array['text', 'character varying'], true),"
        "  ('processed_at', array['timestamp with time zone'], true),"
        "  ('error', array['text', 'character varying'], true),"
        "  ('published_by', array['text', 'character varying'], false),"
        "  ('created_at', array['timestamp with time zone'], false),"
        "  ('updated_at', array['timestamp with time zone'], false))"
        "select 1, 'it must be an ordinary table, neither a view nor partitioned'"
        "  from thing where relkind <> 'r' "
        "union all "
        "select 2, pg_catalog.format('column \"%s\" is %s: it must be %s', w.name,"
        "         pg_catalog.format_type(a.atttypid, null),"
        "         pg_catalog.array_to_string(w.types, ' or '))"
        "  from wanted w join pg_catalog.pg_attribute a on a.attname = w.name and not "
        "a.attisdropped"
        "  join thing on thing.oid = a.attrelid"
        " where pg_catalog.format_type(a.atttypid, null) <> all (w.types) "
        "union all "
        "select 3, pg_catalog.format('column \"%s\" is NOT NULL: it must be able to be empty', "
        "w.name)"
        "  from wanted w join pg_catalog.pg_attribute a on a.attname = w.name and not "
        "a.attisdropped"
        "  join thing on thing.oid = a.attrelid where w.empties and a.attnotnull "
        "union all "
        "select 4, 'column \"claimed_by\" is too short: it must hold 100 characters'"
        "  from pg_catalog.pg_attribute a join thing on thing.oid = a.attrelid"
        " where a.attname = 'claimed_by' and a.atttypmod between 0 and 103 "
        "union all "
        "select 5, pg_catalog.format('%s may not %s: grant select, insert, update and delete on "
        "it',"
        "         current_user, pg_catalog.lower(r.name))"
        "  from thing, (values ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) as r(name)"
        " where not pg_catalog.has_table_privilege(thing.oid, r.name) "
        "order by 1, 2";

int mill_plain_check(struct mill_session *session, const char *schema, const char *table,
                     struct mill_err *err)
{
	const char *params[] = { schema, table };
	struct mill_rows *rows;
	if (mill_session_query(session, faults, 2, params, &rows, err) != 0)
		return -1;
	int outcome = 0;
	if (mill_rows_count(rows) > 0)
		outcome = mill_err_database(err, NULL,
		                            "table \"%s\".\"%s\" cannot be worked on: %s; see "
		                            "docs/foreign-table.md",
		                            schema, table, mill_rows_text(rows, 0, 1));
	mill_rows_free(rows);
	return outcome;
}
