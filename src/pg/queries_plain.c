/*
 * The statements for a plain table: one of another program, which has the columns of a queue and
 * none of ours, no index we could rely on, and no other object of Tidemill beside it.
 *
 * Each answers in the columns of its namesake in queries.c, so that nobody but the store knows the
 * difference. Statements that are not here are the same for both. The rules at the head of
 * queries.c hold here too, and:
 * - only `status` says whether a row is finished: the owner may leave processed_at as it likes;
 * - there is no subscription: every statement that needs one is told the app's pairs of topic and
 *   subscriber, and touches no row of another pair;
 * - there is no worker: a row's own claimed_at is its lease, renewed for each held row;
 * - a value that a column of the owner's making may hold (NULL, infinity) disturbs no other row.
 */
#include "pg/queries.h"

#define TABLE "{schema}.{table}"

/* Statements are laid out as SQL. */
/* clang-format off */

#define UNHELD "claimed_by = NULL, claimed_at = NULL, updated_at = now()"

/* What every sweep returns of a row it changed. */
#define SWEPT                                                                                      \
	"q.id, q.topic::text, q.subscriber::text, q.status = 'failed', q.attempts::int4, q.error::text"

/* The app's pairs, as every sweep gets them. */
#define PAIRS                                                                                      \
	"unnest($3::text[], $4::text[], $5::int4[], $6::int4[])"                                   \
	" AS l(topic, subscriber, max_attempts, retain_hours)"

/* A duty that a plain table does not know. */
#define NO_SWEEP                                                                                   \
	"SELECT NULL::uuid, ''::text, ''::text, false, 0, NULL::text FROM " PAIRS                  \
	" WHERE $1::int4 > $2::int4 AND $7::int4 < 0 AND false"

/*
 * How often a message's executor has died while the message waited in it. There is no column for
 * that, so the error text keeps it.
 */
#define CRASHED "the executor crashed while this message waited in it, crashes so far: "
#define CRASHES(error) "coalesce(substring(" error "::text FROM '^" CRASHED "([0-9]{1,4})$')::int4, 0)"

/* A UUID of version 7, as {schema}.uuid7() makes it where it exists. */
#define UUID7                                                                                      \
	"(overlay(lpad(to_hex((date_part('epoch', clock_timestamp()) * 1000000)::bigint"           \
	"  * 512 / 125), 15, '0'), '7', 13, 0) || substr(gen_random_uuid()::text, 20))::uuid"

/*
 * ---- publishing ----
 *
 * The functions of sql/0002_publish.sql in one statement. A fault cannot be raised without a
 * function; it is returned, and nothing is written.
 */

/* Options that a plain table has no column for. */
#define UNAVAILABLE                                                                                \
	"('priority', 'dedupe_key', 'on_duplicate', 'max_attempts', 'headers', 'ordering_key')"

/*
 * What is wrong with one JSON message `i.item`, whose topic and payload are t.topic and t.payload;
 * or NULL. `by` is who publishes, NULL where the message may say so; `most` the largest payload.
 */
#define ITEM_FAULT(by, most)                                                                       \
	"CASE WHEN jsonb_typeof(i.item) <> 'object' THEN"                                          \
	"  format('a JSON %s is not a message: give an object with `topic`', jsonb_typeof(i.item))"\
	" WHEN coalesce(i.item ->> 'op', 'publish') <> 'publish' THEN"                             \
	"  format('`%s` is not a queue operation; expected `publish`', left(i.item ->> 'op', 100))"\
	" WHEN i.item ? 'message' AND i.item ? 'payload' THEN"                                     \
	"  '`message` and `payload` are two names of one thing: give one'"                         \
	" WHEN i.item ? 'published_by' AND " by " IS NOT NULL THEN"                                \
	"  '`published_by` is given for all already: leave it out here'"                           \
	" ELSE coalesce("                                                                          \
	" (SELECT format('`%s` is not an option: known are `topic`, `message` (or `payload`),"     \
	"   `delay_secs`, `at` and `published_by`', left(min(k.key), 100))"                        \
	"  FROM jsonb_object_keys(i.item) AS k(key) WHERE k.key NOT IN ('op', 'topic', 'message'," \
	"   'payload', 'delay_secs', 'at', 'published_by') AND k.key NOT IN " UNAVAILABLE          \
	"  HAVING count(*) > 0),"                                                                  \
	" (SELECT format('`%s` is not available: the table {table} has no column for it',"         \
	"   min(k.key))"                                                                           \
	"  FROM jsonb_object_keys(i.item) AS k(key) WHERE k.key IN " UNAVAILABLE                   \
	"   AND jsonb_typeof(i.item -> k.key) <> 'null' HAVING count(*) > 0),"                     \
	" (SELECT format('`%s` is a JSON %s: it must be a %s', o.key, jsonb_typeof(i.item -> o.key),"\
	"   o.type)"                                                                               \
	"  FROM (VALUES ('at', 'string'), ('delay_secs', 'number'), ('published_by', 'string'),"   \
	"   ('topic', 'string')) AS o(key, type)"                                                  \
	"  WHERE jsonb_typeof(i.item -> o.key) NOT IN (o.type, 'null') LIMIT 1),"                  \
	" CASE WHEN t.topic IS NULL THEN '`topic` is required'"                                    \
	"  WHEN length(t.topic) > 200 THEN format("                                                \
	"   '`%s…` is not a topic: it has %s characters, at most 200 are allowed',"                \
	"   left(t.topic, 40), length(t.topic))"                                                   \
	"  WHEN t.topic = '' OR t.topic COLLATE \"C\" ~ '[^A-Za-z0-9._:-]' THEN format("           \
	"   '`%s` is not a topic: use letters, digits, `.`, `_`, `-` or `:`', t.topic)"            \
	"  WHEN octet_length(t.payload::text) > " most " THEN format("                             \
	"   'the payload has %s bytes as text, at most %s are allowed (`max_payload_bytes`)',"     \
	"   octet_length(t.payload::text), " most ")"                                              \
	"  WHEN i.item ->> 'delay_secs' IS NOT NULL AND i.item ->> 'at' IS NOT NULL THEN"          \
	"   'give `delay_secs` or `at`, not both'"                                                 \
	"  WHEN (i.item ->> 'delay_secs')::numeric NOT BETWEEN 0 AND 3153600000 THEN format("      \
	"   '`delay_secs` is %s: it must be between 0 and 3153600000 (100 years)',"                \
	"   left(i.item ->> 'delay_secs', 100))"                                                   \
	"  WHEN i.item ->> 'at' !~ '^\\d{4}-\\d\\d-\\d\\d[Tt ]\\d\\d:\\d\\d(:\\d\\d(\\.\\d{1,9})?)?"\
	"([Zz]|[+-]\\d\\d(:?\\d\\d)?)$' THEN format("                                              \
	"   '`at` is `%s`: give a time with its zone, such as 2030-01-31T08:00:00Z',"              \
	"   left(i.item ->> 'at', 100))"                                                           \
	"  WHEN length(i.item ->> 'published_by') > 500 THEN format("                              \
	"   '`published_by` has %s characters: at most 500 are allowed',"                          \
	"   length(i.item ->> 'published_by')) END) END"

/* `checked`: the messages of `item` (item, n), each with what is wrong with it. */
#define CHECKED(by, most)                                                                          \
	"checked AS MATERIALIZED ("                                                                \
	" SELECT i.n, i.item, t.topic, t.payload, " ITEM_FAULT(by, most) " AS fault FROM item AS i"\
	" CROSS JOIN LATERAL ("                                                                    \
	"  SELECT btrim(i.item ->> 'topic', E' \\t\\n\\r\\x0B\\f') AS topic,"                        \
	"   coalesce(i.item -> 'message', i.item -> 'payload', '{}') AS payload OFFSET 0) AS t)"

/*
 * Write a row for each subscriber of each message, or one that is born done where nobody
 * subscribes, and announce the topics. `may` says whether at all; the pairs are in two parameters.
 */
#define WRITTEN(may, by, topics, subscribers, notify)                                              \
	"fresh AS MATERIALIZED ("                                                                  \
	" SELECT c.n, s.n AS place, " UUID7 " AS id, c.topic, coalesce(s.subscriber, '')"          \
	"   AS subscriber, c.payload,"                                                             \
	"  greatest(now(), (c.item ->> 'at')::timestamptz,"                                        \
	"   now() + (c.item ->> 'delay_secs')::float8 * interval '1 second') AS due,"              \
	"  coalesce(" by ", c.item ->> 'published_by', session_user) AS published_by"              \
	" FROM checked AS c LEFT JOIN unnest(" topics ", " subscribers ") WITH ORDINALITY"         \
	"  AS s(topic, subscriber, n) ON s.topic = c.topic"                                        \
	" WHERE " may " ORDER BY c.n, s.n),"                                                       \
	" written AS ("                                                                            \
	" INSERT INTO " TABLE " (id, topic, subscriber, status, payload, attempts, available_at,"  \
	"  processed_at, published_by, created_at, updated_at)"                                    \
	" SELECT f.id, f.topic, f.subscriber, CASE f.subscriber WHEN '' THEN 'done' ELSE 'pending'"\
	"  END, f.payload, 0, f.due, CASE f.subscriber WHEN '' THEN now() END, f.published_by,"    \
	"  now(), now() FROM fresh AS f),"                                                         \
	" told AS MATERIALIZED ("                                                                  \
	" SELECT pg_notify('{prefix}_queue', f.topic) FROM (SELECT DISTINCT topic FROM fresh"      \
	"  WHERE subscriber <> '') AS f WHERE " notify ")"

#define NO_FAULT "NOT EXISTS (SELECT FROM checked WHERE fault IS NOT NULL)"
/* Topics that nobody subscribes to, for the log. */
#define UNWANTED "(SELECT string_agg(DISTINCT f.topic, ' ') FROM fresh AS f WHERE f.subscriber = '')"

const struct mill_query_text mill_plain_queries[MILL_QUERY_COUNT] = {
	/*
	 * An index on (status, available_at) is used where there is one, whatever the statistics say,
	 * and read only as far as needed: enable_sort does not mean the incremental sort of its ties.
	 */
	[MILL_QUERY_PIN] = { "pin",
		"SELECT set_config('enable_indexscan', 'on', true),"
		" set_config('enable_nestloop', 'on', true),"
		" set_config('enable_tidscan', 'on', true),"
		" set_config('enable_seqscan', 'off', true),"
		" set_config('enable_bitmapscan', 'off', true),"
		" set_config('enable_incremental_sort', 'on', true),"
		" set_config('enable_sort', 'off', true),"
		" set_config('jit', 'off', true),"
		" set_config('plan_cache_mode', 'force_generic_plan', true)" },

	/*
	 * $1 lanes in rotation order, $2 how many of each, $3 and $4 their topics and subscribers,
	 * $5 the due times to begin at. $6 most rows in all, $7 the token, $8 the largest payload.
	 */
	[MILL_QUERY_CLAIM] = { "claim",
		"WITH picked AS MATERIALIZED ("
		" SELECT l.* FROM unnest($1::int4[], $2::int4[], $3::text[], $4::text[],"
		"   $5::timestamptz[]) AS want(lane, n, topic, subscriber, low)"
		" CROSS JOIN LATERAL ("
		"  SELECT q.ctid AS tid, want.lane, q.available_at, q.created_at, q.id,"
		"   " CRASHES("q.error") " AS crashes FROM " TABLE " AS q"
		"  WHERE q.status = 'pending' AND q.topic = want.topic"
		"   AND q.subscriber = want.subscriber"
		"   AND q.available_at >= want.low AND q.available_at <= now()"
		"  ORDER BY q.available_at, q.created_at, q.id LIMIT want.n"
		"  FOR UPDATE SKIP LOCKED) AS l"
		" LIMIT $6::int4),"
		" numbered AS MATERIALIZED ("
		" SELECT p.tid, p.lane, p.crashes,"
		"  row_number() OVER (ORDER BY p.available_at, p.created_at, p.id) AS seq"
		" FROM picked AS p)"
		" UPDATE " TABLE " AS q SET status = 'running', attempts = coalesce(q.attempts, 0) + 1,"
		"  claimed_at = now(), claimed_by = $7::text, updated_at = now()"
		" FROM numbered AS p WHERE q.ctid = p.tid"
		" RETURNING q.id, p.lane, 0, q.available_at, p.seq, q.attempts::int4, 0, p.crashes,"
		"  CASE WHEN isfinite(q.created_at) THEN q.created_at ELSE now() END,"
		"  coalesce(q.published_by, '')::text, NULL::text,"
		"  (SELECT CASE WHEN octet_length(t.text) <= $8::int4 THEN t.text END"
		"   FROM (SELECT coalesce(q.payload::text, '{}') AS text OFFSET 0) AS t)" },

	/* $1 lanes, $2 and $3 their topics and subscribers. */
	[MILL_QUERY_DUE] = { "due",
		"SELECT l.lane, extract(epoch FROM greatest(least(d.due, now() + interval '7 days'),"
		"  now() - interval '1 day') - clock_timestamp())::float8"
		" FROM unnest($1::int4[], $2::text[], $3::text[]) AS l(lane, topic, subscriber)"
		" CROSS JOIN LATERAL ("
		"  SELECT q.available_at AS due FROM " TABLE " AS q"
		"  WHERE q.status = 'pending' AND q.topic = l.topic AND q.subscriber = l.subscriber"
		"   AND q.available_at IS NOT NULL"
		"  ORDER BY q.available_at LIMIT 1) AS d" },

	/* $1 the token of a claim whose reply was lost. */
	[MILL_QUERY_UNDO_CLAIM] = { "undo_claim",
		"WITH held AS MATERIALIZED ("
		" SELECT q.ctid AS tid FROM " TABLE " AS q"
		" WHERE q.status = 'running' AND q.claimed_by = $1::text FOR UPDATE SKIP LOCKED),"
		" undone AS ("
		" UPDATE " TABLE " AS q SET status = 'pending', attempts = q.attempts - 1,"
		"  available_at = greatest(q.available_at, now()), " UNHELD
		" FROM held WHERE q.ctid = held.tid RETURNING q.topic)"
		" SELECT (SELECT count(*) FROM undone), false,"
		"  (SELECT count(pg_notify('{prefix}_queue', t.topic))"
		"   FROM (SELECT DISTINCT topic FROM undone) AS t)" },

	/*
	 * $1 ids, $2 their claimed_by, $3 statuses, $4 seconds to wait, $5 errors, $6 (a history is
	 * not kept), $7 attempts to refund, $8 crashes to add. There is no status for a message that
	 * its handler discarded: it is done, with the reason as its error.
	 */
	[MILL_QUERY_SETTLE_BACK] = { "settle_back",
		"WITH held AS MATERIALIZED ("
		" SELECT q.ctid AS tid, o.*"
		" FROM unnest($1::uuid[], $2::text[], $3::text[], $4::float8[], $5::text[], $6::text[],"
		"  $7::int4[], $8::int4[]) AS o(id, by, status, delay, error, short, refund, crashed)"
		" JOIN " TABLE " AS q ON q.id = o.id"
		" WHERE q.status = 'running' AND q.claimed_by = o.by FOR UPDATE OF q SKIP LOCKED)"
		" UPDATE " TABLE " AS q SET"
		"  status = CASE o.status WHEN 'discarded' THEN 'done' ELSE o.status END,"
		"  available_at = CASE WHEN o.status = 'pending'"
		"   THEN now() + o.delay * interval '1 second' ELSE q.available_at END,"
		"  processed_at = CASE WHEN o.status <> 'pending' THEN now() END,"
		"  attempts = q.attempts - o.refund,"
		"  error = CASE WHEN o.crashed > 0"
		"    THEN '" CRASHED "' || least(" CRASHES("q.error") " + o.crashed, 9999)"
		"   WHEN o.status = 'discarded' THEN 'discarded: ' || o.error"
		"   ELSE coalesce(o.error, q.error::text) END, " UNHELD
		" FROM held AS o WHERE q.ctid = o.tid RETURNING q.id" },

	/*
	 * $1 id, $2 its claimed_by, $3 what its handler published, $4 and $5 the app's topics and
	 * subscribers, $6 the largest payload, $7 whether to notify. Besides the id: what was wrong
	 * with a publication, and then nothing is written.
	 */
	[MILL_QUERY_SETTLE_PUBLISHING] = { "settle_publishing",
		"WITH item AS MATERIALIZED ("
		" SELECT e.item, e.n FROM jsonb_array_elements($3::text::jsonb) WITH ORDINALITY"
		"  AS e(item, n)),"
		CHECKED("NULL::text", "$6::int4") ","
		" held AS MATERIALIZED ("
		" SELECT q.ctid AS tid FROM " TABLE " AS q"
		" WHERE q.id = $1::uuid AND q.status = 'running' AND q.claimed_by = $2::text"
		"  AND " NO_FAULT " FOR UPDATE SKIP LOCKED),"
		" settled AS ("
		" UPDATE " TABLE " AS q SET status = 'done', processed_at = now(), error = NULL, " UNHELD
		" FROM held WHERE q.ctid = held.tid RETURNING q.id),"
		WRITTEN("EXISTS (SELECT FROM settled)", "NULL::text", "$4::text[]", "$5::text[]",
			"$7::bool")
		" SELECT s.id, x.fault, x.unwanted, x.told FROM ("
		"  SELECT (SELECT 'item ' || c.n || ': ' || c.fault FROM checked AS c"
		"    WHERE c.fault IS NOT NULL ORDER BY c.n LIMIT 1) AS fault,"
		"   " UNWANTED " AS unwanted, (SELECT count(*) FROM told) AS told) AS x"
		" LEFT JOIN settled AS s ON true WHERE s.id IS NOT NULL OR x.fault IS NOT NULL" },

	/* $1 the JSON request, $2 who publishes, $3 to $6 as $4 to $7 above. */
	[MILL_QUERY_PUBLISH] = { "publish",
		"WITH item AS MATERIALIZED ("
		" SELECT coalesce($1::text::jsonb, 'null') AS item, 1 AS n),"
		CHECKED("$2::text", "$5::int4") ","
		WRITTEN(NO_FAULT, "$2::text", "$3::text[]", "$4::text[]", "$6::bool")
		" SELECT json_build_object('id', (array_agg(f.id ORDER BY f.place))[1],"
		"  'topic', min(f.topic), 'delivered', count(*) FILTER (WHERE f.subscriber <> ''),"
		"  'duplicate', false)::text,"
		"  (SELECT c.fault FROM checked AS c), " UNWANTED ", (SELECT count(*) FROM told)"
		" FROM fresh AS f" },

	/* Nothing is registered; the parameters are those of the ledger. */
	[MILL_QUERY_REGISTER_LANES] = { "register_lanes",
		"SELECT 1 WHERE $1::text IS NULL AND $2::text[] IS NULL AND $3::text[] IS NULL"
		" AND $4::int4[] IS NULL AND $5::int4[] IS NULL AND $6::int4[] IS NULL" },

	/* $1 topics, $2 subscribers, $3 their numbers in the store, $4 app: all pairs are its own. */
	[MILL_QUERY_READ_LANES] = { "read_lanes",
		"SELECT d.lane, $4::text FROM unnest($1::text[], $2::text[], $3::int4[]) WITH ORDINALITY"
		"  AS d(topic, subscriber, lane, n) ORDER BY d.n" },

	[MILL_QUERY_REGISTER_WORKER] = { "register_worker",
		"SELECT 1 WHERE $1::text IS NULL AND $2::text IS NULL AND $3::text IS NULL"
		" AND $4::int4 IS NULL AND $5::int4 IS NULL AND $6::int4[] IS NULL AND $7::int4 IS NULL" },

	[MILL_QUERY_DECLARE_WORKER] = { "declare_worker",
		"SELECT $1::text WHERE $2::int4 IS NOT NULL AND $3::int4[] IS NOT NULL"
		" AND $4::int4 IS NOT NULL" },

	/*
	 * $1 id. Always one row: nobody declares a worker dead, its messages are taken one by one.
	 * A row that somebody has locked is left to the next renewal; there are two more in time.
	 */
	[MILL_QUERY_RENEW] = { "renew",
		"WITH held AS MATERIALIZED ("
		" SELECT q.ctid AS tid FROM " TABLE " AS q"
		" WHERE q.status = 'running' AND split_part(q.claimed_by, '#', 1) = $1::text"
		" FOR UPDATE SKIP LOCKED),"
		" renewed AS ("
		" UPDATE " TABLE " AS q SET claimed_at = now() FROM held WHERE q.ctid = held.tid)"
		" SELECT $1::text, true" },

	[MILL_QUERY_LEAVE] = { "leave", "SELECT 1 WHERE $1::text IS NULL" },

	/*
	 * The sweeps: $1 most rows, $2 lease_secs, $3 to $6 the app's pairs with their options, $7
	 * for how many hours to keep what was published to nobody.
	 */
	[MILL_QUERY_STAMP] = { "stamp", NO_SWEEP },

	/* Rows of our pairs whose lease is over, whoever had it. */
	[MILL_QUERY_RECLAIM_DEAD] = { "reclaim_dead",
		"WITH held AS MATERIALIZED ("
		" SELECT q.ctid AS tid, l.max_attempts FROM " TABLE " AS q JOIN " PAIRS
		"  ON l.topic = q.topic AND l.subscriber = q.subscriber"
		" WHERE q.status = 'running' AND $7::int4 IS NOT NULL"
		"  AND coalesce(q.claimed_at, q.updated_at, '-infinity')"
		"   < now() - $2::int4 * interval '1 second'"
		" LIMIT $1::int4 FOR UPDATE OF q SKIP LOCKED)"
		" UPDATE " TABLE " AS q SET"
		"  status = CASE WHEN q.attempts >= r.max_attempts THEN 'failed' ELSE 'pending' END,"
		"  processed_at = CASE WHEN q.attempts >= r.max_attempts THEN now() END,"
		"  available_at = CASE WHEN q.attempts >= r.max_attempts THEN q.available_at"
		"   ELSE greatest(q.available_at, now()) END,"
		"  error = 'the subscriber holding this message stopped responding', " UNHELD
		" FROM held AS r WHERE q.ctid = r.tid RETURNING " SWEPT },

	[MILL_QUERY_RECLAIM_UNKNOWN] = { "reclaim_unknown", NO_SWEEP },

	[MILL_QUERY_BURY] = { "bury", "SELECT 1 WHERE false" },

	/*
	 * A message is not done before it is due, so the index that the owner may have on (status,
	 * available_at) leads past those that are too young.
	 */
	[MILL_QUERY_PRUNE] = { "prune",
		"WITH old AS MATERIALIZED ("
		" SELECT a.tid FROM ("
		"  SELECT q.ctid AS tid FROM " TABLE " AS q JOIN " PAIRS
		"   ON l.topic = q.topic AND l.subscriber = q.subscriber"
		"  WHERE q.status = 'done' AND l.retain_hours > 0 AND $2::int4 > 0"
		"   AND q.processed_at < now() - l.retain_hours * interval '1 hour'"
		"   AND q.available_at < now() - (SELECT min(l.retain_hours) FROM " PAIRS
		"    WHERE l.retain_hours > 0) * interval '1 hour'"
		"  LIMIT $1::int4 FOR UPDATE OF q SKIP LOCKED) AS a"
		" UNION ALL SELECT b.tid FROM ("
		"  SELECT q.ctid AS tid FROM " TABLE " AS q"
		"  WHERE q.status = 'done' AND q.subscriber = '' AND $7::int4 > 0"
		"   AND q.processed_at < now() - $7::int4 * interval '1 hour'"
		"   AND q.available_at < now() - $7::int4 * interval '1 hour'"
		"  LIMIT $1::int4 FOR UPDATE SKIP LOCKED) AS b)"
		" DELETE FROM " TABLE " AS q USING old WHERE q.ctid = old.tid RETURNING " SWEPT },

	[MILL_QUERY_PRUNE_DISCARDED] = { "prune_discarded", NO_SWEEP },
	[MILL_QUERY_REMOVE_LANES] = { "remove_lanes", NO_SWEEP },
	[MILL_QUERY_ADOPT] = { "adopt", NO_SWEEP },
};

/* clang-format on */
