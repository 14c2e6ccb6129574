-- Who is told of dead letters.
--
-- `on_failed` of an app's config.lua is a subscription to the topic `tidemill.failed:APP`. Whatever makes a message
-- `failed` (a worker, a sweep, a statement by hand), in the same transaction each such subscription of the app gets a
-- message that tells of it.

-- The few lanes that are told.
create index subscription_on_failed on {schema}.subscription (app, lane) where starts_with(topic, 'tidemill.failed:');

-- Whose dead letter it is: the app of its lane or, where that lane is gone, of its pair, or else every app that
-- subscribes to its topic. A failure that no app would answer for is told to all that listen.
create function {schema}.apps_of(lane integer, topic text, subscriber text) returns text[]
language sql stable
as $$
  select coalesce(
    (select array[s.app] from {schema}.subscription as s where s.lane = apps_of.lane),
    (select array[s.app] from {schema}.subscription as s
      where s.topic = apps_of.topic and s.subscriber = apps_of.subscriber),
    (select array_agg(distinct s.app) from {schema}.subscription as s where s.topic = apps_of.topic))
$$;

-- What is told. An error, and a history, that somebody else wrote may be of any size; what is larger than a payload may
-- be is told in fewer words, for nobody would be told otherwise.
create function {schema}.failure(failed {schema}.{table}, app text, max_attempts integer) returns jsonb
language sql stable
as $$
  with report as (
    select jsonb_build_object(
      'id', failed.id, 'topic', failed.topic, 'subscriber', failed.subscriber, 'app', failure.app,
      'attempts', failed.attempts, 'max_attempts', failure.max_attempts,
      'error', {schema}.cut_text(failed.error, 4000),
      'errors', case when jsonb_typeof(failed.errors) = 'array' and octet_length(failed.errors::text) <= 65536
                     then failed.errors else '[]' end,
      'published_by', failed.published_by,
      'created_at', to_char(failed.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
      'failed_at', to_char(failed.processed_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')) as whole)
  select form.told
    from report, {schema}.setting,
         lateral (values
           (1, report.whole),
           (2, report.whole || jsonb_build_object('errors', '[]'::jsonb, 'error', {schema}.cut_text(failed.error, 500))),
           (3, jsonb_build_object('id', failed.id))) as form(place, told)
   where octet_length(form.told::text) <= setting.max_payload_bytes or form.place = 3
   order by form.place
   limit 1
$$;

-- Whoever may change the row need have no right to anything here.
create function {schema}.tell_of_failure() returns trigger
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  apps text[];
  most integer;
begin
  if not exists (select from {schema}.subscription as s where starts_with(s.topic, 'tidemill.failed:')) then
    return null;
  end if;
  apps := {schema}.apps_of(new.lane, new.topic, new.subscriber);
  select coalesce(new.max_attempts, (select s.max_attempts from {schema}.subscription as s where s.lane = new.lane))
    into most;
  insert into {schema}.{table} (topic, subscriber, lane, payload, published_by, headers)
  select s.topic, s.subscriber, s.lane,
         {schema}.failure(new, case when cardinality(apps) = 1 then apps[1] end, most), 'tidemill',
         case when jsonb_typeof(new.headers) = 'object' and octet_length(new.headers::text) <= 65536
              then new.headers end
    from {schema}.subscription as s
   where starts_with(s.topic, 'tidemill.failed:') and (apps is null or s.app = any (apps))
   order by s.lane;
  perform {schema}.wake(s.topic)
     from (select distinct s.topic from {schema}.subscription as s
            where starts_with(s.topic, 'tidemill.failed:') and (apps is null or s.app = any (apps))) as s;
  return null;
end
$$;

-- A failed message about a failure tells nobody: it would go round for ever. The condition is judged before anything is
-- queued, so that claims and good outcomes do not get as far as the function.
create trigger tell_of_failure
  after update of status on {schema}.{table}
  for each row
  when (new.status = 'failed' and old.status is distinct from 'failed' and not starts_with(new.topic, 'tidemill.failed:'))
  execute function {schema}.tell_of_failure();

revoke all on function {schema}.apps_of, {schema}.failure, {schema}.tell_of_failure from public;
