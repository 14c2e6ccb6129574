/*
 * The statements of the runtime: see queries.h.
 *
 * Rules they all keep:
 * - every write about a held message is fenced by id, status = 'running' and its claimed_by;
 * - many rows are locked in a MATERIALIZED part with SKIP LOCKED and changed by ctid: never
 *   `IN (SELECT … LIMIT)`, which a nested loop may run again and so take every row;
 * - what returns to `pending` becomes due now or later, never in the past (the claim's low-water
 * mark relies on it);
 * - instants are compared with the database's clock only; durations come in as numbers.
 */
#include "pg/queries.h"

#include "core/frame.h"
#include "core/policy.h"

#define TABLE "{schema}.{table}"

/* Statements are laid out as SQL. */
/* clang-format off */

/* A message goes back to its lane, or ends there for good: the columns that say who holds it. */
#define UNHELD "claimed_by = NULL, claimed_at = NULL, updated_at = now()"

/*
 * `errors` with one more entry, at most five; an `errors` that somebody made something else is
 * begun anew. `q` is the row, the argument the text to add.
 */
#define WITH_HISTORY(text)                                                                         \
	"(SELECT jsonb_agg(h.entry ORDER BY h.n) FROM ("                                           \
	" SELECT e.entry, e.n FROM jsonb_array_elements("                                          \
	"  CASE WHEN jsonb_typeof(q.errors) = 'array' THEN q.errors ELSE '[]' END)"                \
	"  WITH ORDINALITY AS e(entry, n)"                                                         \
	" UNION ALL SELECT jsonb_build_object('attempt', q.attempts, 'at', now(),"                 \
	"  'by', q.claimed_by, 'error', " text "), 9223372036854775807"                            \
	" ORDER BY n DESC LIMIT 5) AS h)"

/* What every sweep returns of a row it changed. */
#define SWEPT "q.id, q.topic, q.subscriber, q.status = 'failed', q.attempts, q.error"

/*
 * What becomes of a message whose worker is gone: the attempt counts, so one that kills its worker
 * each time ends as a dead letter. `r` has tid and max_attempts.
 */
#define RECLAIM_UPDATE                                                                             \
	" UPDATE " TABLE " AS q SET"                                                               \
	"  status = CASE WHEN q.attempts >= r.max_attempts THEN 'failed' ELSE 'pending' END,"      \
	"  processed_at = CASE WHEN q.attempts >= r.max_attempts THEN now() END,"                  \
	"  available_at = CASE WHEN q.attempts >= r.max_attempts THEN q.available_at"              \
	"   ELSE greatest(q.available_at, now()) END,"                                             \
	"  error = 'the subscriber holding this message stopped responding',"                      \
	"  errors = " WITH_HISTORY("'the subscriber holding this message stopped responding'") ", " \
	UNHELD                                                                                     \
	" FROM held AS r WHERE q.ctid = r.tid"                                                     \
	" RETURNING " SWEPT

/* The lanes that have done rows, one index probe each; 0 stands for "none". */
#define FINISHED_LANES                                                                             \
	"lanes(lane) AS ("                                                                         \
	" (SELECT coalesce(q.lane, 0) AS lane FROM " TABLE " AS q"                                 \
	"  WHERE q.processed_at IS NOT NULL AND q.error IS NULL"                                   \
	"  ORDER BY coalesce(q.lane, 0) LIMIT 1)"                                                  \
	" UNION ALL SELECT (SELECT coalesce(q.lane, 0) FROM " TABLE " AS q"                        \
	"  WHERE q.processed_at IS NOT NULL AND q.error IS NULL"                                   \
	"   AND coalesce(q.lane, 0) > l.lane ORDER BY coalesce(q.lane, 0) LIMIT 1)"                \
	" FROM lanes AS l WHERE l.lane IS NOT NULL)"

/* Waiting for longer than a deploy takes, in a topic that live workers serve or to which its pair is
   registered again. */
#define ADOPTABLE                                                                                  \
	"q.processed_at IS NULL AND q.status = 'pending'"                                          \
	" AND q.updated_at < now() - least($2::int4, 60) * interval '1 second'"                    \
	" AND (q.topic IN (SELECT topic FROM served)"                                              \
	"  OR EXISTS (SELECT FROM {schema}.subscription AS s"                                      \
	"   WHERE s.topic = q.topic AND s.subscriber = q.subscriber))"                             \
	" AND " KEY_IS_FREE

/*
 * No unfinished row of the lane that `q` belongs to has its dedupe key: then it may be given that
 * lane. One that has to wait for another of its key waits here.
 */
#define KEY_IS_FREE                                                                                \
	"(q.dedupe_key IS NULL OR NOT EXISTS ("                                                    \
	" SELECT FROM {schema}.subscription AS o JOIN " TABLE " AS d ON d.lane = o.lane"           \
	" WHERE o.topic = q.topic AND o.subscriber = q.subscriber"                                 \
	"  AND d.dedupe_key = q.dedupe_key AND d.processed_at IS NULL))"

/*
 * The rows of `f` with a dedupe key get their lane one by one, so that one whose key was taken this
 * moment is left as it is and costs the others nothing.
 */
#define PLACE_KEYED                                                                                \
	"SELECT f.id, f.topic, f.subscriber, false, f.attempts, f.error FROM ("                    \
	" SELECT array_agg(k.id) AS ids, array_agg(k.lane) AS lanes FROM found AS k WHERE k.keyed)"\
	"  AS a CROSS JOIN LATERAL {schema}.place(a.ids, a.lanes) AS p(id)"                        \
	" JOIN found AS f ON f.id = p.id"

/* The fence. */
#define STILL_HELD "q.status = 'running' AND q.claimed_by = o.by"

/* How a handled message ends. */
#define DONE_SET "status = 'done', processed_at = now(), error = NULL, " UNHELD
#define DONE_PARAMS "unnest($1::uuid[], $2::text[]) AS o(id, by)"

/*
 * Every other end: $1 ids, $2 their claimed_by, $3 statuses, $4 seconds to wait, $5 errors (NULL:
 * as it was), $6 the same cut for the history, $7 attempts to refund, $8 crashes to add.
 */
#define BACK_PARAMS                                                                                \
	"unnest($1::uuid[], $2::text[], $3::text[], $4::float8[], $5::text[], $6::text[],"         \
	" $7::int4[], $8::int4[]) AS o(id, by, status, delay, error, short, refund, crashed)"
#define BACK_SET                                                                                   \
	"status = o.status,"                                                                       \
	" available_at = CASE WHEN o.status = 'pending'"                                           \
	"  THEN now() + o.delay * interval '1 second' ELSE q.available_at END,"                    \
	" processed_at = CASE WHEN o.status <> 'pending' THEN now() END,"                          \
	" attempts = q.attempts - o.refund, crashes = least(q.crashes + o.crashed, 32767),"        \
	" error = coalesce(o.error, q.error),"                                                     \
	" errors = CASE WHEN o.short IS NULL THEN q.errors ELSE " WITH_HISTORY("o.short") " END, " \
	UNHELD

const struct mill_query_text mill_queries[MILL_QUERY_COUNT] = {
	/*
	 * Index plans only, in index order, by nested loops: statistics taken while the table was
	 * empty would cost a hundredfold, and a DBA's own switches are not for these statements.
	 */
	[MILL_QUERY_PIN] = { "pin",
		"SELECT set_config('enable_indexscan', 'on', true),"
		" set_config('enable_nestloop', 'on', true),"
		" set_config('enable_tidscan', 'on', true),"
		" set_config('enable_seqscan', 'off', true),"
		" set_config('enable_bitmapscan', 'off', true),"
		" set_config('enable_sort', 'off', true),"
		" set_config('enable_incremental_sort', 'off', true),"
		" set_config('enable_hashjoin', 'off', true),"
		" set_config('enable_mergejoin', 'off', true),"
		" set_config('enable_material', 'off', true),"
		" set_config('jit', 'off', true),"
		" set_config('plan_cache_mode', 'force_generic_plan', true)" },

	/*
	 * $1 lanes in rotation order, $2 how many of each, $3 and $4 the first and last probe of
	 * each in $5 and $6: a priority and the low-water mark to begin at. $7 most rows in all, $8
	 * the token, $9 the largest payload. What other programs may have written too large does not
	 * come along: a payload as NULL, headers as ''. A probe is one range of the claim index, read in its
	 * order, so that the future rows of one priority hide nothing of the next. Both LIMITs stop
	 * the nested loops, so no row is locked that is not taken.
	 */
	[MILL_QUERY_CLAIM] = { "claim",
		"WITH picked AS MATERIALIZED ("
		" SELECT l.tid FROM unnest($1::int4[], $2::int4[], $3::int4[], $4::int4[])"
		"   AS want(lane, n, first, last)"
		" CROSS JOIN LATERAL ("
		"  SELECT p.tid FROM generate_series(want.first, want.last) AS i"
		"  CROSS JOIN LATERAL ("
		"   SELECT q.ctid AS tid FROM " TABLE " AS q"
		"   WHERE q.lane = want.lane AND q.priority = ($5::int2[])[i]"
		"    AND q.available_at >= ($6::timestamptz[])[i] AND q.available_at <= now()"
		"    AND q.processed_at IS NULL AND q.status = 'pending'"
		"   ORDER BY q.available_at, q.seq LIMIT want.n FOR UPDATE SKIP LOCKED) AS p"
		"  LIMIT want.n) AS l"
		" LIMIT $7::int4)"
		" UPDATE " TABLE " AS q SET status = 'running',"
		"  attempts = least(greatest(q.attempts, 0), 2147483646) + 1,"
		"  claimed_at = now(), claimed_by = $8::text, updated_at = now()"
		" FROM picked WHERE q.ctid = picked.tid"
		" RETURNING q.id, q.lane, q.priority, q.available_at, q.seq, q.attempts, q.max_attempts,"
		"  q.crashes, q.created_at, left(coalesce(q.published_by, ''), 500),"
		"  CASE WHEN octet_length(q.headers::text) <= 65536 THEN q.headers::text"
		"   WHEN q.headers IS NOT NULL THEN '' END,"
		"  (SELECT CASE WHEN octet_length(t.text) <= $9::int4 THEN t.text END"
		"   FROM (SELECT q.payload::text AS text OFFSET 0) AS t)" },

	/* $1 lanes: for each that has something waiting, in how many seconds the first is due. */
	[MILL_QUERY_DUE] = { "due",
		"SELECT l.lane, extract(epoch FROM d.due - clock_timestamp())::float8"
		" FROM unnest($1::int4[]) AS l(lane) CROSS JOIN LATERAL ("
		"  SELECT min(p.available_at) AS due FROM generate_series(-9, 9) AS g(priority)"
		"  CROSS JOIN LATERAL ("
		"   SELECT q.available_at FROM " TABLE " AS q"
		"   WHERE q.lane = l.lane AND q.priority = g.priority"
		"    AND q.processed_at IS NULL AND q.status = 'pending'"
		"   ORDER BY q.available_at, q.seq LIMIT 1) AS p) AS d"
		" WHERE d.due IS NOT NULL" },

	/*
	 * $1 the token of a claim whose reply was lost, $2 to $4 where it looked: lanes, priorities,
	 * low-water marks. Others may have room for what comes back. What somebody has locked is left
	 * to the next try.
	 *
	 * No index knows who holds a message, so a range is walked from its mark, and no farther than
	 * past $5 messages that wait: a claim takes those that come first, so what it took lies before
	 * them, but for others that were committed later or were locked. Behind so many of these it is
	 * out of reach until they have been claimed, which comes first in any case. Returned: how many
	 * went back, and whether a range was cut short.
	 */
	[MILL_QUERY_UNDO_CLAIM] = { "undo_claim",
		"WITH range AS MATERIALIZED ("
		" SELECT r.lane, r.priority, r.low, coalesce(e.available_at, 'infinity') AS until,"
		"  coalesce(e.seq, 9223372036854775807) AS seq, e.seq IS NOT NULL AS cut"
		" FROM unnest($2::int4[], $3::int2[], $4::timestamptz[]) AS r(lane, priority, low)"
		" LEFT JOIN LATERAL ("
		"  SELECT q.available_at, q.seq FROM " TABLE " AS q"
		"  WHERE q.lane = r.lane AND q.priority = r.priority AND q.available_at >= r.low"
		"   AND q.available_at <= now() AND q.processed_at IS NULL AND q.status = 'pending'"
		"  ORDER BY q.available_at, q.seq OFFSET $5::int4 LIMIT 1) AS e ON true),"
		" held AS MATERIALIZED ("
		" SELECT h.tid FROM range AS r CROSS JOIN LATERAL ("
		"  SELECT q.ctid AS tid FROM " TABLE " AS q"
		"  WHERE q.lane = r.lane AND q.priority = r.priority AND q.available_at >= r.low"
		"   AND q.available_at <= now() AND (q.available_at, q.seq) <= (r.until, r.seq)"
		"   AND q.processed_at IS NULL AND q.status = 'running' AND q.claimed_by = $1::text"
		"  FOR UPDATE SKIP LOCKED) AS h),"
		" undone AS ("
		" UPDATE " TABLE " AS q SET status = 'pending', attempts = q.attempts - 1,"
		"  available_at = greatest(q.available_at, now()), " UNHELD
		" FROM held WHERE q.ctid = held.tid RETURNING q.topic)"
		" SELECT (SELECT count(*) FROM undone) AS undone, EXISTS (SELECT FROM range WHERE cut) AS cut,"
		"  (SELECT count(pg_notify('{prefix}_queue', t.topic))"
		"   FROM (SELECT DISTINCT topic FROM undone) AS t)" },

	/* $1 ids, $2 their claimed_by. Returns the ids that were still ours, and not locked. */
	[MILL_QUERY_SETTLE_DONE] = { "settle_done",
		"WITH held AS MATERIALIZED ("
		" SELECT q.ctid AS tid FROM " DONE_PARAMS
		" JOIN " TABLE " AS q ON q.id = o.id WHERE " STILL_HELD " FOR UPDATE OF q SKIP LOCKED)"
		" UPDATE " TABLE " AS q SET " DONE_SET
		" FROM held WHERE q.ctid = held.tid RETURNING q.id" },

	[MILL_QUERY_SETTLE_BACK] = { "settle_back",
		"WITH held AS MATERIALIZED ("
		" SELECT q.ctid AS tid, o.* FROM " BACK_PARAMS
		" JOIN " TABLE " AS q ON q.id = o.id WHERE " STILL_HELD " FOR UPDATE OF q SKIP LOCKED)"
		" UPDATE " TABLE " AS q SET " BACK_SET
		" FROM held AS o WHERE q.ctid = o.tid RETURNING q.id" },

	/*
	 * $1 id, $2 its claimed_by, $3 what its handler published. The publications are written
	 * only where the message was still ours.
	 */
	[MILL_QUERY_SETTLE_PUBLISHING] = { "settle_publishing",
		"WITH held AS MATERIALIZED ("
		" SELECT q.ctid AS tid FROM " TABLE " AS q"
		" WHERE q.id = $1::uuid AND q.status = 'running' AND q.claimed_by = $2::text"
		" FOR UPDATE SKIP LOCKED),"
		" settled AS ("
		" UPDATE " TABLE " AS q SET " DONE_SET
		" FROM held WHERE q.ctid = held.tid RETURNING q.id)"
		" SELECT settled.id, NULL::text, string_agg(DISTINCT p.topic, ' ')"
		"  FILTER (WHERE p.delivered = 0 AND NOT p.duplicate) FROM settled"
		" CROSS JOIN LATERAL {schema}.publish_many($3::text::jsonb) AS p GROUP BY settled.id" },

	/*
	 * $1 ids, $2 their claimed_by, none of which could be written: those that are ours all the
	 * same. Somebody has them locked.
	 */
	[MILL_QUERY_STILL_HELD] = { "still_held",
		"SELECT q.id FROM " DONE_PARAMS " JOIN " TABLE " AS q ON q.id = o.id WHERE " STILL_HELD },

	/*
	 * In a transaction of the handler's, just before its end: $1 id, $2 its claimed_by. No SKIP
	 * LOCKED: whoever has the row locked is waited for, and what the row is then decides.
	 */
	[MILL_QUERY_FINISH] = { "finish",
		"UPDATE " TABLE " AS q SET " DONE_SET
		" WHERE q.id = $1::uuid AND q.status = 'running' AND q.claimed_by = $2::text"
		" RETURNING q.id" },

	/* The same with $3, what its handler published. */
	[MILL_QUERY_FINISH_PUBLISHING] = { "finish_publishing",
		"WITH settled AS ("
		" UPDATE " TABLE " AS q SET " DONE_SET
		" WHERE q.id = $1::uuid AND q.status = 'running' AND q.claimed_by = $2::text"
		" RETURNING q.id)"
		" SELECT settled.id, string_agg(DISTINCT p.topic, ' ')"
		"  FILTER (WHERE p.delivered = 0 AND NOT p.duplicate) FROM settled"
		" CROSS JOIN LATERAL {schema}.publish_many($3::text::jsonb) AS p GROUP BY settled.id" },

	/*
	 * Before what may meet a stranger's transaction (a dedupe key that it publishes): others share
	 * the connection, so it is not waited for; who sends it tries again. That nobody subscribes to
	 * a topic is told by a column of the answer, not by a warning for each.
	 */
	[MILL_QUERY_PATIENCE] = { "patience",
		"SELECT set_config('lock_timeout', '10ms', true),"
		" set_config('client_min_messages', 'error', true)" },

	/* $1 topics whose rows came back. */
	[MILL_QUERY_NOTIFY] = { "notify",
		"SELECT pg_notify('{prefix}_queue', topic) FROM unnest($1::text[]) AS t(topic)" },

	[MILL_QUERY_NOTIFY_CONTROL] = { "notify_control",
		"SELECT pg_notify('{prefix}_control', $1::text)" },

	/* $1 the JSON request, $2 who publishes (NULL: as the request says). */
	[MILL_QUERY_PUBLISH] = { "publish",
		"SELECT e.reply::text, NULL::text, CASE WHEN (e.reply ->> 'delivered')::int4 = 0"
		"  AND NOT (e.reply ->> 'duplicate')::bool THEN e.reply ->> 'topic' END"
		" FROM {schema}.execute($1::text, $2::text) AS e(reply)" },

	/* $1 app, then an array a column of the lanes it declares. Another app's pair stays. */
	[MILL_QUERY_REGISTER_LANES] = { "register_lanes",
		"WITH declared AS MATERIALIZED ("
		" SELECT * FROM unnest($2::text[], $3::text[], $4::int4[], $5::int4[], $6::int4[])"
		"  AS d(topic, subscriber, max_attempts, retry_backoff_secs, retain_hours))"
		" INSERT INTO {schema}.subscription AS s"
		"  (app, topic, subscriber, max_attempts, retry_backoff_secs, retain_hours)"
		" SELECT $1::text, d.* FROM declared AS d WHERE NOT EXISTS ("
		"  SELECT FROM declared AS c JOIN {schema}.subscription AS t"
		"   ON t.topic = c.topic AND t.subscriber = c.subscriber AND t.app <> $1::text)"
		" ORDER BY d.topic, d.subscriber"
		" ON CONFLICT (topic, subscriber) DO UPDATE SET max_attempts = excluded.max_attempts,"
		"  retry_backoff_secs = excluded.retry_backoff_secs,"
		"  retain_hours = excluded.retain_hours, updated_at = now()"
		" WHERE s.app = excluded.app" },

	/* $1 topics, $2 subscribers: their lanes, in this order. */
	[MILL_QUERY_READ_LANES] = { "read_lanes",
		"SELECT s.lane, s.app FROM unnest($1::text[], $2::text[]) WITH ORDINALITY"
		"  AS d(topic, subscriber, n)"
		" LEFT JOIN {schema}.subscription AS s"
		"  ON s.topic = d.topic AND s.subscriber = d.subscriber ORDER BY d.n" },

	/* $1 id, $2 app, $3 host, $4 pid, $5 lease_secs, $6 lanes, $7 generation. */
	[MILL_QUERY_REGISTER_WORKER] = { "register_worker",
		"INSERT INTO {schema}.worker (id, app, host, pid, lease_secs, lease_until, lanes, generation)"
		" VALUES ($1::text, $2::text, $3::text, $4::int4, $5::int4,"
		"  clock_timestamp() + $5::int4 * interval '1 second', $6::int4[], $7::int4)" },

	/* $1 id, $2 lease_secs, $3 lanes, $4 generation: a renewal that changes what is declared. */
	[MILL_QUERY_DECLARE_WORKER] = { "declare_worker",
		"UPDATE {schema}.worker SET lease_secs = $2::int4, lanes = $3::int4[],"
		"  generation = $4::int4,"
		"  lease_until = clock_timestamp() + $2::int4 * interval '1 second'"
		" WHERE id = $1::text AND lease_until > clock_timestamp() RETURNING id" },

	/*
	 * $1 id. A lease that is over cannot be renewed: others may be taking its messages this
	 * moment. clock_timestamp, because the row may have to be waited for and now() stands
	 * still. Besides: whether all its lanes are still registered.
	 */
	[MILL_QUERY_RENEW] = { "renew",
		"UPDATE {schema}.worker AS w"
		" SET lease_until = clock_timestamp() + lease_secs * interval '1 second'"
		" WHERE id = $1::text AND lease_until > clock_timestamp()"
		" RETURNING w.id, cardinality(w.lanes) = (SELECT count(*) FROM {schema}.subscription AS s"
		"  WHERE s.lane = ANY (w.lanes))" },

	/* $1 id: an orderly end. */
	[MILL_QUERY_LEAVE] = { "leave",
		"DELETE FROM {schema}.worker WHERE id = $1::text" },

	/* The sweeps: $1 most rows, $2 lease_secs. Rows written by hand get the lane of their pair. */
	[MILL_QUERY_STAMP] = { "stamp",
		"WITH found AS MATERIALIZED ("
		" SELECT q.ctid AS tid, q.id, q.topic, q.subscriber, q.attempts, q.error, s.lane,"
		"  q.dedupe_key IS NOT NULL AS keyed"
		" FROM " TABLE " AS q JOIN {schema}.subscription AS s"
		"  ON s.topic = q.topic AND s.subscriber = q.subscriber"
		" WHERE q.lane IS NULL AND q.processed_at IS NULL AND $2::int4 > 0 AND " KEY_IS_FREE
		" LIMIT $1::int4 FOR UPDATE OF q SKIP LOCKED),"
		" stamped AS ("
		" UPDATE " TABLE " AS q SET lane = f.lane FROM found AS f"
		" WHERE q.ctid = f.tid AND NOT f.keyed RETURNING " SWEPT ")"
		" SELECT * FROM stamped UNION ALL " PLACE_KEYED },

	/*
	 * The workers' rows are locked first: a renewal that is under way wins, and of several
	 * reclaiming workers one does the work.
	 */
	[MILL_QUERY_RECLAIM_DEAD] = { "reclaim_dead",
		"WITH dead AS MATERIALIZED ("
		" SELECT id FROM {schema}.worker WHERE lease_until < clock_timestamp() AND $2::int4 > 0"
		" ORDER BY id FOR UPDATE SKIP LOCKED),"
		" held AS MATERIALIZED ("
		" SELECT h.tid, coalesce(h.max_attempts, s.max_attempts, 5) AS max_attempts"
		" FROM dead CROSS JOIN LATERAL ("
		"  SELECT q.ctid AS tid, q.max_attempts, q.lane FROM " TABLE " AS q"
		"  WHERE q.processed_at IS NULL AND q.status = 'running'"
		"   AND split_part(q.claimed_by, '#', 1) = dead.id"
		"  LIMIT $1::int4 FOR UPDATE SKIP LOCKED) AS h"
		" LEFT JOIN {schema}.subscription AS s ON s.lane = h.lane LIMIT $1::int4)"
		RECLAIM_UPDATE },

	/* Messages whose holder nobody knows. */
	[MILL_QUERY_RECLAIM_UNKNOWN] = { "reclaim_unknown",
		"WITH held AS MATERIALIZED ("
		" SELECT q.ctid AS tid, coalesce(q.max_attempts, s.max_attempts, 5) AS max_attempts"
		" FROM " TABLE " AS q LEFT JOIN {schema}.subscription AS s ON s.lane = q.lane"
		" WHERE q.processed_at IS NULL AND q.status = 'running'"
		"  AND coalesce(q.claimed_at, q.updated_at) < now() - $2::int4 * interval '1 second'"
		"  AND NOT EXISTS (SELECT FROM {schema}.worker AS w"
		"   WHERE w.id = split_part(q.claimed_by, '#', 1))"
		" LIMIT $1::int4 FOR UPDATE OF q SKIP LOCKED)"
		RECLAIM_UPDATE },

	/* Dead workers that hold nothing any more; no parameters. */
	[MILL_QUERY_BURY] = { "bury",
		"WITH dead AS MATERIALIZED ("
		" SELECT w.id FROM {schema}.worker AS w WHERE w.lease_until < clock_timestamp()"
		"  AND NOT EXISTS (SELECT FROM " TABLE " AS q WHERE q.processed_at IS NULL"
		"   AND q.status = 'running' AND split_part(q.claimed_by, '#', 1) = w.id)"
		" ORDER BY w.id FOR UPDATE OF w SKIP LOCKED)"
		" DELETE FROM {schema}.worker AS w USING dead WHERE w.id = dead.id RETURNING w.id" },

	/*
	 * Done rows past their lane's retention, a range of message_finished per lane. Rows without a
	 * lane (published to nobody) and those of removed lanes stay a day.
	 */
	[MILL_QUERY_PRUNE] = { "prune",
		"WITH RECURSIVE " FINISHED_LANES ","
		" old AS MATERIALIZED ("
		" SELECT o.tid FROM lanes AS l LEFT JOIN {schema}.subscription AS s ON s.lane = l.lane"
		" CROSS JOIN LATERAL ("
		"  SELECT q.ctid AS tid FROM " TABLE " AS q"
		"  WHERE coalesce(q.lane, 0) = l.lane AND q.processed_at IS NOT NULL AND q.error IS NULL"
		"   AND q.processed_at < now() - coalesce(s.retain_hours, 24) * interval '1 hour'"
		"   AND q.status IN ('done', 'discarded')"
		"  ORDER BY q.processed_at LIMIT $1::int4 FOR UPDATE SKIP LOCKED) AS o"
		" WHERE coalesce(s.retain_hours, 24) > 0 AND $2::int4 > 0 LIMIT $1::int4)"
		" DELETE FROM " TABLE " AS q USING old WHERE q.ctid = old.tid RETURNING " SWEPT },

	/* The few that were discarded lie among the dead letters, which stay. */
	[MILL_QUERY_PRUNE_DISCARDED] = { "prune_discarded",
		"WITH old AS MATERIALIZED ("
		" SELECT q.ctid AS tid FROM " TABLE " AS q"
		" LEFT JOIN {schema}.subscription AS s ON s.lane = q.lane"
		" WHERE q.processed_at IS NOT NULL AND q.error IS NOT NULL"
		"  AND q.status IN ('done', 'discarded') AND coalesce(s.retain_hours, 24) > 0"
		"  AND q.processed_at < now() - coalesce(s.retain_hours, 24) * interval '1 hour'"
		"  AND q.processed_at < now() - interval '1 hour' AND $2::int4 > 0"
		" ORDER BY q.processed_at LIMIT $1::int4 FOR UPDATE OF q SKIP LOCKED)"
		" DELETE FROM " TABLE " AS q USING old WHERE q.ctid = old.tid RETURNING " SWEPT },

	/*
	 * A lane goes when its app has live workers and none of them declares it: so neither a rolling
	 * deploy nor a total outage removes one. The pause covers a worker between registering its
	 * lanes and itself.
	 */
	[MILL_QUERY_REMOVE_LANES] = { "remove_lanes",
		"DELETE FROM {schema}.subscription AS s"
		" WHERE s.updated_at < now() - least($2::int4, 60) * interval '1 second' AND $1::int4 > 0"
		" AND EXISTS (SELECT FROM {schema}.worker AS w"
		"  WHERE w.app = s.app AND w.lease_until > clock_timestamp())"
		" AND NOT EXISTS (SELECT FROM {schema}.worker AS w"
		"  WHERE w.app = s.app AND w.lease_until > clock_timestamp() AND s.lane = ANY (w.lanes))"
		" RETURNING NULL::uuid, s.topic, s.subscriber, false, 0, NULL::text" },

	/*
	 * What waits in a lane that was removed: to the lane its pair has now, or, where live workers
	 * serve its topic without it, to the dead letters. The same for a pair nobody ever registered.
	 */
	[MILL_QUERY_ADOPT] = { "adopt",
		"WITH RECURSIVE lanes(lane) AS ("
		" (SELECT q.lane FROM " TABLE " AS q WHERE q.processed_at IS NULL AND q.lane IS NOT NULL"
		"  ORDER BY q.lane LIMIT 1)"
		" UNION ALL SELECT (SELECT q.lane FROM " TABLE " AS q"
		"  WHERE q.processed_at IS NULL AND q.lane > l.lane ORDER BY q.lane LIMIT 1)"
		" FROM lanes AS l WHERE l.lane IS NOT NULL),"
		" served AS MATERIALIZED ("
		" SELECT DISTINCT s.topic FROM {schema}.subscription AS s JOIN {schema}.worker AS w"
		"  ON w.lease_until > clock_timestamp() AND s.lane = ANY (w.lanes)),"
		" lost AS MATERIALIZED ("
		" SELECT a.tid FROM lanes AS l CROSS JOIN LATERAL ("
		"  SELECT q.ctid AS tid FROM " TABLE " AS q"
		"  WHERE q.lane = l.lane AND " ADOPTABLE
		"  LIMIT $1::int4 FOR UPDATE SKIP LOCKED) AS a"
		" WHERE NOT EXISTS (SELECT FROM {schema}.subscription AS s WHERE s.lane = l.lane)"
		" UNION ALL SELECT b.tid FROM ("
		"  SELECT q.ctid AS tid FROM " TABLE " AS q"
		"  WHERE q.lane IS NULL AND q.subscriber <> '' AND " ADOPTABLE
		"  LIMIT $1::int4 FOR UPDATE SKIP LOCKED) AS b),"
		" found AS MATERIALIZED ("
		" SELECT x.tid, m.id, m.topic, m.subscriber, m.attempts, m.error, s.lane,"
		"  s.lane IS NOT NULL AND m.dedupe_key IS NOT NULL AS keyed"
		" FROM lost AS x JOIN " TABLE " AS m ON m.ctid = x.tid"
		"  LEFT JOIN {schema}.subscription AS s"
		"   ON s.topic = m.topic AND s.subscriber = m.subscriber),"
		" adopted AS ("
		" UPDATE " TABLE " AS q SET lane = coalesce(f.lane, q.lane), updated_at = now(),"
		"  status = CASE WHEN f.lane IS NULL THEN 'failed' ELSE 'pending' END,"
		"  processed_at = CASE WHEN f.lane IS NULL THEN now() END,"
		"  error = CASE WHEN f.lane IS NULL THEN '`' || q.subscriber || '` is subscribed to `'"
		"   || q.topic || '` but no such handler is loaded' ELSE q.error END"
		" FROM found AS f WHERE q.ctid = f.tid AND NOT f.keyed RETURNING " SWEPT ")"
		" SELECT * FROM adopted UNION ALL " PLACE_KEYED },
};

/* clang-format on */

char *mill_query_fill(const char *sql, const char *schema, const char *table, const char *prefix)
{
	char *quoted_schema = mill_policy_quote_identifier(schema);
	char *quoted_table = mill_policy_quote_identifier(table);
	MILL_ASSERT(mill_policy_identifier(prefix, MILL_PREFIX_MAX));
	const struct {
		const char *placeholder, *value;
	} fills[] = { { "{schema}", quoted_schema },
		      { "{table}", quoted_table },
		      { "{prefix}", prefix } };
	struct mill_buffer out = { 0 };
	while (*sql != '\0') {
		size_t i = 0;
		while (i < MILL_COUNT(fills) &&
		       strncmp(sql, fills[i].placeholder, strlen(fills[i].placeholder)) != 0)
			i++;
		if (i < MILL_COUNT(fills)) {
			mill_buffer_text(&out, fills[i].value);
			sql += strlen(fills[i].placeholder);
		} else {
			mill_buffer_bytes(&out, sql++, 1);
		}
	}
	mill_buffer_bytes(&out, "", 1);
	free(quoted_schema);
	free(quoted_table);
	return out.data;
}
