-- What a person does to one message (retry, discard, cancel, reschedule), what a person looks at (the views), and who
-- may do what (grant_to).
--
-- Each operation locks the row, looks at its state and then changes it or says why not; pressing twice is harmless. It
-- may wait a moment for a worker that is writing the same row.

create type {schema}.operation as (
  changed boolean,
  message text
);

-- ---- what the operations share --------------------------------------------------------------------------------------

-- `text`, cut to at most `max_bytes` bytes and `…` added when it was longer. Never cuts a character in half.
create function {schema}.cut_text(text text, max_bytes integer) returns text
language plpgsql stable
as $$
declare
  cut text := left(text, max_bytes);
begin
  if octet_length(text) <= max_bytes then
    return text;
  end if;
  while octet_length(cut) > max_bytes loop
    -- No character has more than four bytes, so this never cuts too much.
    cut := left(cut, -((octet_length(cut) - max_bytes + 3) / 4));
  end loop;
  return cut || '…';
end
$$;

-- The history of a message (column `errors`) with one more entry, at most 5; unchanged when its last entry says the same.
create function {schema}.remember_error(errors jsonb, attempt integer, at timestamptz, by text, error text) returns jsonb
language plpgsql stable
as $$
declare
  past  jsonb := case when jsonb_typeof(errors) = 'array' then errors else '[]' end;
  entry jsonb := jsonb_build_object('attempt', attempt, 'at', at, 'by', by, 'error', {schema}.cut_text(error, 500));
begin
  if error is null or (past -> -1 -> 'attempt' = entry -> 'attempt'
                       and starts_with(error, rtrim(past -> -1 ->> 'error', '…'))) then
    return errors;
  end if;
  past := past || jsonb_build_array(entry);
  while jsonb_array_length(past) > 5 loop
    past := past - 0;
  end loop;
  return past;
end
$$;

-- Tell the workers that `topic` has something new, unless notifications are switched off.
create function {schema}.wake(topic text) returns void
language plpgsql
as $$
begin
  perform pg_notify(s.prefix || '_queue', wake.topic) from {schema}.setting as s where s.notify;
end
$$;

-- An instant for people: UTC, to the second.
create function {schema}.shown_time(at timestamptz) returns text
language sql stable
as $$
  select to_char(at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
$$;

-- ---- lanes ----------------------------------------------------------------------------------------------------------

-- Give rows that have a dedupe key their lane, and return those that got it. At most one unfinished row of a lane has a
-- given key: of several the oldest gets the lane, and one whose key is taken stays as it is and waits for its turn. A key
-- that a stranger's open transaction may be about to take is not waited for either, as the worker that calls this has
-- leases to renew; and where that happens again and again, the rest is left to the next call.
create function {schema}.place(ids uuid[], lanes integer[]) returns setof uuid
language plpgsql
set lock_timeout = '20ms'
as $$
#variable_conflict use_column
declare
  item     record;
  timeouts integer := 0;
begin
  for item in
    select o.id, o.lane
      from (select distinct on (i.lane, m.dedupe_key) i.id, i.lane
              from unnest(ids, lanes) as i (id, lane)
                   join {schema}.{table} as m on m.id = i.id
             order by i.lane, m.dedupe_key, m.seq) as o
     -- So that no row always comes behind those that time out.
     order by random()
  loop
    begin
      update {schema}.{table} as m set lane = item.lane, updated_at = now() where m.id = item.id;
      return next item.id;
    exception
      when unique_violation then
        null;
      when lock_not_available then
        timeouts := timeouts + 1;
        exit when timeouts = 10;
    end;
  end loop;
end
$$;

-- ---- operations -----------------------------------------------------------------------------------------------------

-- A failed or discarded message gets a new life: no attempts spent, due now, its past kept in `errors`. Its lane is
-- looked up again: the one it had may have been given up meanwhile.
create function {schema}.retry(id uuid) returns {schema}.operation
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  message record;
  live    integer;
begin
  if retry.id is null then
    raise exception '`id` is required' using errcode = 'invalid_parameter_value';
  end if;
  select m.status, m.topic, m.subscriber, m.dedupe_key into message
    from {schema}.{table} as m where m.id = retry.id for update;
  if not found then
    return (false, format('there is no message %s', retry.id))::{schema}.operation;
  elsif message.status not in ('failed', 'discarded') then
    return (false, format('message %s is %s: only a failed or discarded one can be retried', retry.id, message.status)
           )::{schema}.operation;
  end if;
  select s.lane into live
    from {schema}.subscription as s where s.topic = message.topic and s.subscriber = message.subscriber;
  begin
    update {schema}.{table} as m
       set status = 'pending', attempts = 0, crashes = 0, available_at = now(), lane = live,
           errors = {schema}.remember_error(m.errors, m.attempts, m.processed_at, m.claimed_by, m.error),
           error = null, processed_at = null, claimed_at = null, claimed_by = null, updated_at = now()
     where m.id = retry.id;
  exception when unique_violation then
    return (false, format('message %s stays %s: another one with the dedupe key `%s` is unfinished',
                          retry.id, message.status, message.dedupe_key))::{schema}.operation;
  end;
  perform {schema}.wake(message.topic);
  if live is null then
    return (true, format('message %s is pending again, but `%s` is not subscribed to `%s` now',
                         retry.id, message.subscriber, message.topic))::{schema}.operation;
  end if;
  return (true, format('message %s is pending again', retry.id))::{schema}.operation;
end
$$;

comment on function {schema}.retry(uuid) is 'Give a failed or discarded message a new life.';

-- A failed message needs no more work. The error it failed with moves to `errors`.
create function {schema}.discard(id uuid, why text default null) returns {schema}.operation
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  message record;
  reason  constant text := coalesce(nullif(btrim(why, E' \t\n\r\x0B\f'), ''), 'discarded');
begin
  if discard.id is null then
    raise exception '`id` is required' using errcode = 'invalid_parameter_value';
  end if;
  select m.status into message from {schema}.{table} as m where m.id = discard.id for update;
  if not found then
    return (false, format('there is no message %s', discard.id))::{schema}.operation;
  elsif message.status in ('pending', 'running') then
    return (false, format('message %s is %s: only a failed one can be discarded; cancel it instead',
                          discard.id, message.status))::{schema}.operation;
  elsif message.status <> 'failed' then
    return (false, format('message %s is %s: only a failed one can be discarded', discard.id, message.status)
           )::{schema}.operation;
  end if;
  update {schema}.{table} as m
     set status = 'discarded', error = {schema}.cut_text(reason, 4000), processed_at = now(),
         errors = {schema}.remember_error(m.errors, m.attempts, m.processed_at, m.claimed_by, m.error),
         updated_at = now()
   where m.id = discard.id;
  return (true, format('message %s is discarded', discard.id))::{schema}.operation;
end
$$;

comment on function {schema}.discard(uuid, text) is 'Declare that a failed message needs no more work.';

-- An unfinished message needs no more work. If it runs, its worker is told to stop it; from here on, whatever that
-- worker writes about it is refused.
create function {schema}.cancel(id uuid) returns {schema}.operation
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  message record;
begin
  if cancel.id is null then
    raise exception '`id` is required' using errcode = 'invalid_parameter_value';
  end if;
  select m.status into message from {schema}.{table} as m where m.id = cancel.id for update;
  if not found then
    return (false, format('there is no message %s', cancel.id))::{schema}.operation;
  elsif message.status not in ('pending', 'running') then
    return (false, format('message %s is %s: only a pending or running one can be cancelled', cancel.id, message.status)
           )::{schema}.operation;
  end if;
  update {schema}.{table} as m
     set status = 'discarded', error = 'cancelled', processed_at = now(),
         errors = {schema}.remember_error(m.errors, m.attempts, m.updated_at, m.claimed_by, m.error),
         claimed_by = null, updated_at = now()
   where m.id = cancel.id;
  if message.status = 'running' then
    -- Not switchable: without it the handler would go on to its end for nothing.
    perform pg_notify(s.prefix || '_control', 'cancel ' || cancel.id) from {schema}.setting as s;
    return (true, format('message %s is discarded; its handler, which was running, is told to stop', cancel.id)
           )::{schema}.operation;
  end if;
  return (true, format('message %s is discarded', cancel.id))::{schema}.operation;
end
$$;

comment on function {schema}.cancel(uuid) is 'Discard a pending or running message.';

-- A pending message becomes due at another time; one that has passed means now.
create function {schema}.reschedule(id uuid, at timestamptz) returns {schema}.operation
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  message record;
  due     constant timestamptz := greatest(at, now());
begin
  if reschedule.id is null or at is null then
    raise exception '`%` is required', case when reschedule.id is null then 'id' else 'at' end
      using errcode = 'invalid_parameter_value';
  elsif not isfinite(at) or at > now() + interval '100 years' then
    raise exception '`at` is %: it must be within 100 years from now', at using errcode = 'invalid_parameter_value';
  end if;
  select m.status, m.topic, m.available_at into message
    from {schema}.{table} as m where m.id = reschedule.id for update;
  if not found then
    return (false, format('there is no message %s', reschedule.id))::{schema}.operation;
  elsif message.status <> 'pending' then
    return (false, format('message %s is %s: only a pending one can be rescheduled', reschedule.id, message.status)
           )::{schema}.operation;
  elsif message.available_at = due or greatest(message.available_at, due) <= now() then
    return (false, format('message %s is due at %s already', reschedule.id, {schema}.shown_time(message.available_at))
           )::{schema}.operation;
  end if;
  update {schema}.{table} as m set available_at = due, updated_at = now() where m.id = reschedule.id;
  perform {schema}.wake(message.topic);
  return (true, format('message %s is due at %s', reschedule.id, {schema}.shown_time(due)))::{schema}.operation;
end
$$;

comment on function {schema}.reschedule(uuid, timestamptz) is 'Change when a pending message becomes due.';

-- ---- views ----------------------------------------------------------------------------------------------------------

-- Lanes as they are this moment. It counts every unfinished and every failed row, so it is for people and for minutes,
-- not for each second of a ledger with millions waiting. Rows that no lane owns (written by hand, or their lane was
-- given up) stand in lines of their own, without an app.
create view {schema}.lane_status as
  with tally as (
    select m.lane, m.topic, m.subscriber,
           count(*) filter (where m.status = 'pending' and m.available_at <= now()) as waiting,
           count(*) filter (where m.status = 'pending' and m.available_at > now()) as scheduled,
           count(*) filter (where m.status = 'running') as running,
           0::bigint as failed,
           min(m.available_at) filter (where m.status = 'pending' and m.available_at <= now()) as oldest_due_at
      from {schema}.{table} as m
     where m.processed_at is null
     group by m.lane, m.topic, m.subscriber
    union all
    select m.lane, m.topic, m.subscriber, 0, 0, 0, count(*), null
      from {schema}.{table} as m
     where m.processed_at is not null and m.error is not null and m.status = 'failed'
     group by m.lane, m.topic, m.subscriber
  ), total as (
    select s.lane, t.topic, t.subscriber, sum(t.waiting) as waiting, sum(t.scheduled) as scheduled,
           sum(t.running) as running, sum(t.failed) as failed, min(t.oldest_due_at) as oldest_due_at
      from tally as t
           left join {schema}.subscription as s
             on s.lane = t.lane and s.topic = t.topic and s.subscriber = t.subscriber
     group by s.lane, t.topic, t.subscriber
  )
  select s.lane, coalesce(s.topic, t.topic) as topic, coalesce(s.subscriber, t.subscriber) as subscriber, s.app,
         coalesce(t.waiting, 0)::bigint as waiting,
         coalesce(t.scheduled, 0)::bigint as scheduled,
         coalesce(t.running, 0)::bigint as running,
         coalesce(t.failed, 0)::bigint as failed,
         extract(epoch from now() - t.oldest_due_at)::double precision as oldest_due_age_secs,
         (select count(*) from {schema}.worker as w where w.lease_until > now() and s.lane = any (w.lanes))
           as workers_alive
    from {schema}.subscription as s
         full join total as t on t.lane = s.lane;

comment on view {schema}.lane_status is 'Messages of each subscription by state, counted live.';

create view {schema}.worker_status as
  select w.id, w.app, w.host, w.pid, w.started_at, w.generation, w.lease_secs, w.lease_until,
         w.lease_until > now() as alive,
         cardinality(w.lanes) as lanes,
         w.counters
    from {schema}.worker as w;

comment on view {schema}.worker_status is 'Workers and whether their lease holds.';

-- Dead letters, without their payloads: those may be personal, and big.
create view {schema}.failed_message as
  select m.id, m.topic, m.subscriber, m.lane, m.attempts, m.error, m.errors, m.processed_at as failed_at, m.created_at,
         m.published_by, m.priority, m.max_attempts, m.dedupe_key, m.ordering_key
    from {schema}.{table} as m
   where m.processed_at is not null and m.error is not null and m.status = 'failed';

comment on view {schema}.failed_message is 'Messages that are out of attempts, without payload.';

-- ---- who may --------------------------------------------------------------------------------------------------------

-- Grant a role what its duty needs and nothing else. Roles belong to the whole cluster, so none is created here. Runs
-- with the rights of its caller, who must own the schema's objects.
create function {schema}.grant_to(role name, duty text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  publishing constant text :=
    '{schema}.publish, {schema}.publish_item, {schema}.execute(jsonb, text), {schema}.execute(text, text), '
    '{schema}.publish_many(text[], jsonb[], timestamptz[], integer[], text[], text, integer[], text, jsonb[], boolean), '
    '{schema}.publish_many(jsonb, text, boolean)';
  operations constant text := '{schema}.retry, {schema}.discard, {schema}.cancel, {schema}.reschedule';
  views      constant text := '{schema}.lane_status, {schema}.worker_status, {schema}.failed_message';
begin
  if role is null or not exists (select from pg_roles as r where r.rolname = role) then
    raise exception 'there is no role `%`: create it first', role using errcode = 'undefined_object';
  end if;
  if duty is null or duty not in ('publisher', 'worker', 'reader', 'operator') then
    raise exception '`%` is not a duty: it must be `publisher`, `worker`, `reader` or `operator`', duty
      using errcode = 'invalid_parameter_value';
  end if;
  execute format('grant usage on schema {schema} to %I', role);
  if duty in ('publisher', 'worker') then
    execute format('grant execute on function %s to %I', publishing, role);
  end if;
  if duty in ('operator', 'worker') then
    execute format('grant execute on function %s to %I', operations, role);
  end if;
  if duty in ('reader', 'operator', 'worker') then
    execute format('grant select on %s, {schema}.migration to %I', views, role);
  end if;
  if duty = 'worker' then
    execute format('grant select, insert, update, delete on {schema}.{table}, {schema}.subscription, {schema}.worker '
                   'to %I', role);
    execute format('grant select on {schema}.setting to %I', role);
    execute format('grant execute on function {schema}.remember_error, {schema}.cut_text, {schema}.place to %I', role);
  end if;
end
$$;

comment on function {schema}.grant_to(name, text) is
  'Grant a role what a `publisher`, `worker`, `reader` or `operator` needs.';

revoke all on function
  {schema}.cut_text, {schema}.remember_error, {schema}.wake, {schema}.shown_time, {schema}.place, {schema}.retry,
  {schema}.discard, {schema}.cancel, {schema}.reschedule, {schema}.grant_to
  from public;
