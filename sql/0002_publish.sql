-- Publishing: publish, publish_many, execute and what they share.
--
-- The public functions are SECURITY DEFINER with a fixed search_path, so a publisher needs EXECUTE and no right on any
-- table. The functions they share are ordinary ones: they run with the rights and the search_path of the public function
-- that calls them, and nobody but the owner may execute them.
--
-- Every refusal has SQLSTATE 22023. Nothing here opens a subtransaction on the way of a good message: publishing from a
-- trigger should cost little above its insert.

create type {schema}.publication as (
  -- The first row: of several subscribers', the one of the lowest lane. Of a duplicate, the row that waits.
  id        uuid,
  topic     text,
  -- Rows written or rewritten.
  delivered integer,
  -- For at least one subscriber a message with this dedupe key was unfinished already.
  duplicate boolean
);

-- ---- the rules of a message -----------------------------------------------------------------------------------------

-- What is wrong with a message, or null. The topic comes trimmed. One expression, no SET clause: the planner puts it in
-- the place of the call, so that checking a thousand items costs no thousand calls.
create function {schema}.message_fault(
  topic text, payload jsonb, max_payload_bytes integer, available_at timestamptz, priority integer,
  dedupe_key text, on_duplicate text, max_attempts integer, published_by text, headers jsonb)
returns text
language sql stable
as $$
  select case
    when topic is null then '`topic` is required'
    when length(topic) > 200 then
      format('`%s…` is not a topic: it has %s characters, at most 200 are allowed', left(topic, 40), length(topic))
    when topic = '' or topic collate "C" ~ '[^A-Za-z0-9._:-]' then
      format('`%s` is not a topic: use letters, digits, `.`, `_`, `-` or `:`', topic)
    when octet_length(payload::text) > max_payload_bytes then
      format('the payload has %s bytes as text, at most %s are allowed (`max_payload_bytes`)',
             octet_length(payload::text), max_payload_bytes)
    when not isfinite(available_at) or available_at > now() + interval '100 years' then
      format('`available_at` is %s: it must be within 100 years from now', available_at)
    when priority not between -9 and 9 then
      format('`priority` is %s: it must be between -9 (first) and 9 (last)', priority)
    when dedupe_key = '' then '`dedupe_key` is empty: leave it out, or give 1 to 500 characters'
    when length(dedupe_key) > 500 then
      format('`dedupe_key` has %s characters: at most 500 are allowed', length(dedupe_key))
    when on_duplicate not in ('keep', 'replace') then
      format('`on_duplicate` is `%s`: it must be `keep` or `replace`', on_duplicate)
    when max_attempts not between 1 and 32767 then
      format('`max_attempts` is %s: it must be between 1 and 32767', max_attempts)
    when length(published_by) > 500 then
      format('`published_by` has %s characters: at most 500 are allowed', length(published_by))
    when jsonb_typeof(headers) not in ('object', 'null') then
      format('`headers` is a JSON %s: it must be an object', jsonb_typeof(headers))
    when octet_length(headers::text) > 65536 then
      format('`headers` has %s bytes as text: at most 65536 are allowed', octet_length(headers::text))
  end
$$;

-- ---- dedupe keys ----------------------------------------------------------------------------------------------------

-- Write a checked message that has a dedupe key. At most one unfinished row of a lane has the key; whoever is second
-- waits for the first one's transaction (the unique index sees to it) and then finds its row.
--
-- Between the conflict and the look at the row in the way, that row may finish; then the key is free again and the
-- insert is tried once more. Each round that fails means somebody else got on, so the bound is never reached by a few.
--
-- A row that runs is never locked here (no ON CONFLICT DO UPDATE): its worker must be able to finish it while the
-- publisher's transaction stays open.
create function {schema}.write_deduplicated(
  topic text, payload jsonb, due timestamptz, priority integer, dedupe_key text, on_duplicate text,
  max_attempts integer, published_by text, headers jsonb)
returns {schema}.publication
language plpgsql
-- A plan made while the table was empty may be kept for a connection's life. What is switched off counts as
-- expensive, and would be compiled each time.
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  replace     constant boolean := on_duplicate = 'replace';
  lanes       integer[];
  subscribers text[];
  open_lanes  integer[];
  written     record;
  result      {schema}.publication;
begin
  select array_agg(s.lane order by s.lane), array_agg(s.subscriber order by s.lane)
    into lanes, subscribers
    from {schema}.subscription as s
   where s.topic = write_deduplicated.topic;
  result.topic := topic;
  result.delivered := 0;
  result.duplicate := false;
  if lanes is null then
    insert into {schema}.{table}
           (topic, status, payload, available_at, processed_at, priority, max_attempts, published_by, dedupe_key, headers)
    values (write_deduplicated.topic, 'done', write_deduplicated.payload, due, now(), write_deduplicated.priority,
            write_deduplicated.max_attempts, write_deduplicated.published_by, write_deduplicated.dedupe_key,
            write_deduplicated.headers)
    returning id into result.id;
    return result;
  end if;
  open_lanes := lanes;
  for round in 1 .. 30 loop
    if replace then
      for written in
        update {schema}.{table} as m
           set payload = write_deduplicated.payload, priority = write_deduplicated.priority, available_at = due,
               headers = write_deduplicated.headers, published_by = write_deduplicated.published_by,
               updated_at = now()
         where m.lane = any (open_lanes) and m.dedupe_key = write_deduplicated.dedupe_key
           and m.processed_at is null and m.status = 'pending'
        returning m.id, m.lane
      loop
        open_lanes := array_remove(open_lanes, written.lane);
        result.delivered := result.delivered + 1;
        result.duplicate := true;
        if written.lane = lanes[1] then
          result.id := written.id;
        end if;
      end loop;
    end if;
    for written in
      insert into {schema}.{table} as m
             (topic, subscriber, lane, payload, available_at, priority, max_attempts, published_by, dedupe_key, headers)
      select write_deduplicated.topic, s.subscriber, s.lane, write_deduplicated.payload, due,
             write_deduplicated.priority, write_deduplicated.max_attempts, write_deduplicated.published_by,
             write_deduplicated.dedupe_key, write_deduplicated.headers
        from unnest(lanes, subscribers) as s (lane, subscriber)
       where s.lane = any (open_lanes)
      on conflict (lane, dedupe_key) where dedupe_key is not null and processed_at is null do nothing
      returning m.id, m.lane
    loop
      open_lanes := array_remove(open_lanes, written.lane);
      result.delivered := result.delivered + 1;
      if written.lane = lanes[1] then
        result.id := written.id;
      end if;
    end loop;
    if open_lanes = '{}' then
      return result;
    end if;
    for written in
      select m.id, m.lane, m.status
        from {schema}.{table} as m
       where m.lane = any (open_lanes) and m.dedupe_key = write_deduplicated.dedupe_key and m.processed_at is null
    loop
      -- One that has just gone back to waiting is replaced in the next round.
      if replace and written.status = 'pending' then
        continue;
      end if;
      open_lanes := array_remove(open_lanes, written.lane);
      result.duplicate := true;
      if written.lane = lanes[1] then
        result.id := written.id;
      end if;
    end loop;
    if open_lanes = '{}' then
      return result;
    end if;
  end loop;
  raise exception 'the message with dedupe key `%` changed with every look at it: try again', dedupe_key
    using errcode = 'serialization_failure';
end
$$;

-- ---- publish --------------------------------------------------------------------------------------------------------

create function {schema}.publish(
  topic        text,
  payload      jsonb       default '{}',
  delay        interval    default null,
  available_at timestamptz default null,
  priority     integer     default 0,
  dedupe_key   text        default null,
  on_duplicate text        default 'keep',
  max_attempts integer     default null,
  published_by text        default null,
  headers      jsonb       default null,
  notify       boolean     default true)
returns {schema}.publication
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  setting {schema}.setting;
  due     timestamptz := available_at;
  fault   text;
  written uuid;
  result  {schema}.publication;
begin
  select s.* into strict setting from {schema}.setting as s;
  result.topic := btrim(topic, E' \t\n\r\x0B\f');
  payload := coalesce(payload, '{}');
  priority := coalesce(priority, 0);
  on_duplicate := coalesce(on_duplicate, 'keep');
  published_by := coalesce(published_by, session_user);
  if delay is not null then
    if due is not null then
      fault := 'give `delay` or `available_at`, not both';
    elsif delay < interval '0' or delay > interval '1000 years' then
      fault := format('`delay` is %s: it must be between 0 and 100 years', delay);
    elsif now() + delay > now() + interval '100 years' then
      fault := format('`delay` is %s: it must be between 0 and 100 years', delay);
    else
      due := now() + delay;
    end if;
  end if;
  fault := coalesce({schema}.message_fault(result.topic, payload, setting.max_payload_bytes, available_at, priority,
                                           dedupe_key, on_duplicate, max_attempts, published_by, headers), fault);
  if fault is not null then
    raise exception '%', fault using errcode = 'invalid_parameter_value';
  end if;
  -- A time that has passed means now, so that nothing overtakes what has waited longer.
  due := greatest(due, now());
  headers := nullif(headers, 'null');
  if dedupe_key is not null then
    result := {schema}.write_deduplicated(result.topic, payload, due, priority, dedupe_key, on_duplicate,
                                          max_attempts, published_by, headers);
  else
    result.delivered := 0;
    result.duplicate := false;
    for written in
      insert into {schema}.{table}
             (topic, subscriber, lane, payload, available_at, priority, max_attempts, published_by, headers)
      select s.topic, s.subscriber, s.lane, publish.payload, due, publish.priority, publish.max_attempts,
             publish.published_by, publish.headers
        from {schema}.subscription as s
       where s.topic = result.topic
       order by s.lane
      returning id
    loop
      if result.delivered = 0 then
        result.id := written;
      end if;
      result.delivered := result.delivered + 1;
    end loop;
    if result.delivered = 0 then
      -- A record, not work: born finished, so that there is evidence of a message that nobody wanted.
      insert into {schema}.{table}
             (topic, status, payload, available_at, processed_at, priority, max_attempts, published_by, headers)
      values (result.topic, 'done', publish.payload, due, now(), publish.priority, publish.max_attempts,
              publish.published_by, publish.headers)
      returning id into result.id;
    end if;
  end if;
  if result.delivered > 0 then
    if setting.notify and coalesce(notify, true) then
      perform pg_notify(setting.prefix || '_queue', result.topic);
    end if;
  elsif not result.duplicate then
    raise warning 'nobody subscribes to `%`: the message is recorded as done, no handler will see it', result.topic;
  end if;
  return result;
end
$$;

comment on function {schema}.publish is
  'Publish a message in the caller''s transaction: one row for each subscriber of the topic.';

-- ---- publish_many ---------------------------------------------------------------------------------------------------

-- Both forms of publish_many end here: arrays of one length that begin at 1 (or null), an element of each is a message.
-- Fills in defaults, refuses the first bad item by its position, writes, notifies each topic once.
create function {schema}.write_many(
  topics text[], payloads jsonb[], available_ats timestamptz[], priorities integer[], dedupe_keys text[],
  on_duplicates text[], max_attempts integer[], published_bys text[], headers jsonb[], notify boolean)
returns setof {schema}.publication
language plpgsql
as $$
#variable_conflict use_column
declare
  setting {schema}.setting;
  fault   text;
  item    record;
  result  {schema}.publication;
  -- Topics of which every message was a duplicate: there is nothing new to announce.
  silent  text[] := '{}';
begin
  select s.* into strict setting from {schema}.setting as s;
  if cardinality(payloads) = 1 then
    -- Many callers have one; the queries below cost more than its insert.
    fault := {schema}.message_fault(btrim(topics[1], E' \t\n\r\x0B\f'), payloads[1], setting.max_payload_bytes,
                                    available_ats[1], priorities[1], dedupe_keys[1], on_duplicates[1],
                                    write_many.max_attempts[1], published_bys[1], write_many.headers[1]);
    if fault is not null then
      raise exception 'item 1: %', fault using errcode = 'invalid_parameter_value';
    end if;
    return next {schema}.publish(topics[1], payloads[1], null, available_ats[1], priorities[1], dedupe_keys[1],
                                 on_duplicates[1], write_many.max_attempts[1], published_bys[1], write_many.headers[1],
                                 write_many.notify);
    return;
  end if;
  topics := array(select btrim(t.topic, E' \t\n\r\x0B\f')
                    from unnest(topics) with ordinality as t (topic, position)
                   order by t.position);

  select format('item %s: %s', i.position, f.fault)
    into fault
    from unnest(topics, payloads, available_ats, priorities, dedupe_keys, on_duplicates, write_many.max_attempts,
                published_bys, write_many.headers)
         with ordinality as i (topic, payload, available_at, priority, dedupe_key, on_duplicate, max_attempts,
                               published_by, headers, position),
         lateral (select {schema}.message_fault(i.topic, i.payload, setting.max_payload_bytes, i.available_at,
                                                i.priority, i.dedupe_key, i.on_duplicate, i.max_attempts,
                                                i.published_by, i.headers) as fault) as f
   where f.fault is not null
   order by i.position
   limit 1;
  if fault is not null then
    raise exception '%', fault using errcode = 'invalid_parameter_value';
  end if;

  if exists (select from unnest(dedupe_keys) as k (dedupe_key) where k.dedupe_key is not null) then
    -- An item may be a duplicate of one before it: one after the other.
    silent := topics;
    for item in
      select i.topic, coalesce(i.payload, '{}') as payload, greatest(i.available_at, now()) as due,
             coalesce(i.priority, 0) as priority, i.dedupe_key, coalesce(i.on_duplicate, 'keep') as on_duplicate,
             i.max_attempts, coalesce(i.published_by, session_user) as published_by,
             nullif(i.headers, 'null') as headers
        from unnest(topics, payloads, available_ats, priorities, dedupe_keys, on_duplicates,
                    write_many.max_attempts, published_bys, write_many.headers)
             with ordinality as i (topic, payload, available_at, priority, dedupe_key, on_duplicate, max_attempts,
                                   published_by, headers, position)
       order by i.position
    loop
      result := {schema}.write_deduplicated(item.topic, item.payload, item.due, item.priority, item.dedupe_key,
                                            item.on_duplicate, item.max_attempts, item.published_by, item.headers);
      if result.delivered > 0 and item.topic = any (silent) then
        silent := array_remove(silent, item.topic);
      end if;
      return next result;
    end loop;
  else
    return query
      with message as materialized (
        select i.position, {schema}.uuid7() as id, i.topic, s.lane, s.subscriber, i.payload, i.available_at, i.priority,
               i.max_attempts, i.published_by, i.headers
          from unnest(topics, payloads, available_ats, priorities, write_many.max_attempts, published_bys,
                      write_many.headers)
               with ordinality as i (topic, payload, available_at, priority, max_attempts, published_by, headers,
                                     position)
               left join {schema}.subscription as s on s.topic = i.topic
         order by i.position, s.lane
      ), written as (
        insert into {schema}.{table}
               (id, topic, subscriber, lane, status, processed_at, payload, available_at, priority, max_attempts,
                published_by, headers)
        select m.id, m.topic, coalesce(m.subscriber, ''), m.lane,
               case when m.lane is null then 'done' else 'pending' end,
               case when m.lane is null then now() end,
               coalesce(m.payload, '{}'), greatest(m.available_at, now()), coalesce(m.priority, 0), m.max_attempts,
               coalesce(m.published_by, session_user), nullif(m.headers, 'null')
          from message as m
      )
      select (array_agg(m.id order by m.lane))[1], min(m.topic), count(m.lane)::integer, false
        from message as m
       group by m.position
       order by m.position;
  end if;

  for item in
    select t.topic, exists (select from {schema}.subscription as s where s.topic = t.topic) as wanted
      from (select distinct u.topic from unnest(topics) as u (topic)) as t
  loop
    if not item.wanted then
      raise warning 'nobody subscribes to `%`: its messages are recorded as done, no handler will see them', item.topic;
    elsif setting.notify and coalesce(write_many.notify, true) and item.topic <> all (silent) then
      perform pg_notify(setting.prefix || '_queue', item.topic);
    end if;
  end loop;
end
$$;

-- The fast form. One topic serves for all payloads; every other array has an element for each payload (null: the
-- default) or is left out.
create function {schema}.publish_many(
  topics        text[],
  payloads      jsonb[],
  available_ats timestamptz[] default null,
  priorities    integer[]     default null,
  dedupe_keys   text[]        default null,
  on_duplicate  text          default 'keep',
  max_attempts  integer[]     default null,
  published_by  text          default null,
  headers       jsonb[]       default null,
  notify        boolean       default true)
returns setof {schema}.publication
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
  count constant integer := cardinality(payloads);
  wrong record;
begin
  if topics is null or payloads is null then
    raise exception '`%` is required', case when topics is null then 'topics' else 'payloads' end
      using errcode = 'invalid_parameter_value';
  end if;
  if on_duplicate not in ('keep', 'replace') then
    raise exception '`on_duplicate` is `%`: it must be `keep` or `replace`', on_duplicate
      using errcode = 'invalid_parameter_value';
  end if;
  if cardinality(topics) = 1 then
    topics := array_fill(topics[array_lower(topics, 1)], array[count]);
  end if;
  -- Which array does not fit is looked for only where one does not.
  if cardinality(topics) <> count
     or cardinality(available_ats) <> count or cardinality(priorities) <> count or cardinality(dedupe_keys) <> count
     or cardinality(max_attempts) <> count or cardinality(headers) <> count
     or greatest(array_ndims(topics), array_ndims(payloads), array_ndims(available_ats), array_ndims(priorities),
                 array_ndims(dedupe_keys), array_ndims(max_attempts), array_ndims(headers)) > 1 then
    select a.name, a.length, a.dimensions into wrong
      from (values (1, 'payloads', count, array_ndims(payloads)),
                   (2, 'topics', cardinality(topics), array_ndims(topics)),
                   (3, 'available_ats', cardinality(available_ats), array_ndims(available_ats)),
                   (4, 'priorities', cardinality(priorities), array_ndims(priorities)),
                   (5, 'dedupe_keys', cardinality(dedupe_keys), array_ndims(dedupe_keys)),
                   (6, 'max_attempts', cardinality(max_attempts), array_ndims(max_attempts)),
                   (7, 'headers', cardinality(headers), array_ndims(headers))) as a (position, name, length, dimensions)
     where a.length <> count or a.dimensions > 1
     order by a.position
     limit 1;
    if wrong.dimensions > 1 then
      raise exception '`%` has % dimensions: it must be a plain array', wrong.name, wrong.dimensions
        using errcode = 'invalid_parameter_value';
    elsif wrong.name = 'topics' then
      raise exception '`topics` has % elements and `payloads` %: give one topic for all, or one for each payload',
        wrong.length, count using errcode = 'invalid_parameter_value';
    end if;
    raise exception '`%` has % elements and `payloads` %: give one for each payload, or leave it out',
      wrong.name, wrong.length, count using errcode = 'invalid_parameter_value';
  end if;
  if count = 0 then
    return;
  end if;
  -- [:] counts from 1, wherever the caller's array begins.
  return query
    select * from {schema}.write_many(topics[:], payloads[:], available_ats[:], priorities[:], dedupe_keys[:],
                                      array_fill(on_duplicate, array[count]), max_attempts[:],
                                      array_fill(published_by, array[count]), headers[:], notify);
end
$$;

comment on function {schema}.publish_many(text[], jsonb[], timestamptz[], integer[], text[], text, integer[], text,
                                          jsonb[], boolean) is
  'Publish many messages in one statement; results in the order of the payloads.';

-- What is wrong with one item of the JSON form before its values can be read, or null. Values are judged afterwards, by
-- message_fault.
create function {schema}.item_fault(item jsonb, publisher_given boolean) returns text
language plpgsql
as $$
declare
  option record;
begin
  if jsonb_typeof(item) <> 'object' then
    return format('a JSON %s is not a message: give an object with `topic`', jsonb_typeof(item));
  end if;
  if item ? 'message' and item ? 'payload' then
    return '`message` and `payload` are two names of one thing: give one';
  end if;
  if publisher_given and item ? 'published_by' then
    return '`published_by` is given for all already: leave it out here';
  end if;
  -- Most messages are found good by this alone; what is left needs a closer look.
  if item - array['topic', 'message', 'payload', 'dedupe_key', 'published_by'] = '{}'
     and jsonb_typeof(coalesce(item -> 'topic', 'null')) in ('string', 'null')
     and jsonb_typeof(coalesce(item -> 'dedupe_key', 'null')) in ('string', 'null')
     and jsonb_typeof(coalesce(item -> 'published_by', 'null')) in ('string', 'null') then
    return null;
  end if;
  for option in
    select e.key, e.value, jsonb_typeof(e.value) as type, k.type as expected, k.whole
      from jsonb_each(item) as e
           left join (values ('topic', 'string', false), ('message', null, false), ('payload', null, false),
                             ('delay_secs', 'number', false), ('at', 'string', false), ('priority', 'number', true),
                             ('dedupe_key', 'string', false), ('on_duplicate', 'string', false),
                             ('max_attempts', 'number', true), ('published_by', 'string', false),
                             ('headers', 'object', false)) as k (key, type, whole)
             on k.key = e.key
     where k.key is null or jsonb_typeof(e.value) not in (k.type, 'null') or k.whole
     order by k.key is not null, e.key
  loop
    if option.whole is null then
      return format('`%s` is not an option: known are `topic`, `message` (or `payload`), `delay_secs`, `at`, '
                    '`priority`, `dedupe_key`, `on_duplicate`, `max_attempts`, `published_by` and `headers`',
                    left(option.key, 100));
    elsif option.type not in (option.expected, 'null') then
      return format('`%s` is a JSON %s: it must be %s %s', option.key, option.type,
                    case option.expected when 'object' then 'an' else 'a' end, option.expected);
    elsif option.type = 'number' and option.value::numeric <> trunc(option.value::numeric) then
      return format('`%s` is %s: it must be a whole number', option.key, left(option.value::text, 100));
    elsif option.type = 'number' and abs(option.value::numeric) > 100000 then
      return format('`%s` is %s: that is out of range', option.key, left(option.value::text, 100));
    end if;
  end loop;
  if jsonb_typeof(item -> 'delay_secs') = 'number' then
    if jsonb_typeof(item -> 'at') = 'string' then
      return 'give `delay_secs` or `at`, not both';
    elsif (item ->> 'delay_secs')::numeric not between 0 and 3153600000 then
      return format('`delay_secs` is %s: it must be between 0 and 3153600000 (100 years)',
                    left(item ->> 'delay_secs', 100));
    end if;
  end if;
  if item ->> 'at' !~ '^\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?([Zz]|[+-]\d\d(:?\d\d)?)$' then
    return format('`at` is `%s`: give a time with its zone, such as 2030-01-31T08:00:00Z', left(item ->> 'at', 100));
  elsif item ->> 'at' is not null then
    begin
      perform (item ->> 'at')::timestamptz;
    exception when data_exception then
      return format('`at` is `%s`: there is no such time', item ->> 'at');
    end;
  end if;
  return null;
end
$$;

-- When a checked item is due; null: now.
create function {schema}.item_due(item jsonb) returns timestamptz
language sql stable
as $$
  select coalesce((item ->> 'at')::timestamptz,
                  now() + make_interval(secs => (item ->> 'delay_secs')::double precision))
$$;

-- One message as a JSON object {"topic", "message", options}: for callers that have one as text.
create function {schema}.publish_item(
  item         jsonb,
  published_by text    default null,
  notify       boolean default true)
returns {schema}.publication
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
  fault text := {schema}.item_fault(coalesce(item, 'null'), published_by is not null);
begin
  if fault is not null then
    raise exception '%', fault using errcode = 'invalid_parameter_value';
  end if;
  return {schema}.publish(item ->> 'topic', coalesce(item -> 'message', item -> 'payload'), null,
                          {schema}.item_due(item), (item ->> 'priority')::integer, item ->> 'dedupe_key',
                          item ->> 'on_duplicate', (item ->> 'max_attempts')::integer,
                          coalesce(published_by, item ->> 'published_by'), item -> 'headers', notify);
end
$$;

comment on function {schema}.publish_item(jsonb, text, boolean) is
  'Publish one JSON object {"topic", "message", options}.';

-- ---- the JSON request surface ---------------------------------------------------------------------------------------

-- One request of a program that speaks JSON: {"op": "publish", "topic", "message", options}. The answer is JSON too.
create function {schema}.execute(request jsonb, published_by text default null) returns jsonb
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
begin
  if jsonb_typeof(request) = 'object' then
    if coalesce(request ->> 'op', 'publish') <> 'publish' then
      raise exception '`%` is not a queue operation; expected `publish`', left(request ->> 'op', 100)
        using errcode = 'invalid_parameter_value';
    end if;
    request := request - 'op';
  end if;
  return to_jsonb({schema}.publish_item(request, published_by));
end
$$;

comment on function {schema}.execute(jsonb, text) is
  'Carry out a JSON request {"op": "publish", "topic", "message", options}.';

-- The same for a text that may turn out to be no JSON. A bare literal means this form.
create function {schema}.execute(request text, published_by text default null) returns jsonb
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
  read   jsonb;
  reason text;
begin
  begin
    read := request::jsonb;
  -- No JSON, what jsonb cannot hold (\u0000, numbers without end), nested too deeply.
  exception when data_exception or program_limit_exceeded then
    get stacked diagnostics reason = pg_exception_detail;
    raise exception 'not JSON: %', left(coalesce(nullif(reason, ''), sqlerrm), 500)
      using errcode = 'invalid_parameter_value';
  end;
  return {schema}.execute(read, published_by);
end
$$;

comment on function {schema}.execute(text, text) is 'The same for a request given as text.';

-- ---- publish_many as JSON -------------------------------------------------------------------------------------------

-- The convenient form: a JSON array of objects, each {"topic", "message", options}.
create function {schema}.publish_many(
  items        jsonb,
  published_by text    default null,
  notify       boolean default true)
returns setof {schema}.publication
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_variable
declare
  item          jsonb;
  position      integer := 0;
  fault         text;
  topics        text[] := '{}';
  payloads      jsonb[] := '{}';
  available_ats timestamptz[] := '{}';
  priorities    integer[] := '{}';
  dedupe_keys   text[] := '{}';
  on_duplicates text[] := '{}';
  max_attempts  integer[] := '{}';
  publishers    text[] := '{}';
  headers       jsonb[] := '{}';
begin
  if items is null or jsonb_typeof(items) <> 'array' then
    raise exception '`items` must be a JSON array of objects such as {"topic": "order.paid", "message": {}}'
      using errcode = 'invalid_parameter_value';
  end if;
  for item in select e.value from jsonb_array_elements(items) as e loop
    position := position + 1;
    fault := {schema}.item_fault(item, published_by is not null);
    if fault is not null then
      raise exception 'item %: %', position, fault using errcode = 'invalid_parameter_value';
    end if;
    topics := topics || (item ->> 'topic');
    payloads := payloads || coalesce(item -> 'message', item -> 'payload');
    available_ats := available_ats || {schema}.item_due(item);
    priorities := priorities || (item ->> 'priority')::integer;
    dedupe_keys := dedupe_keys || (item ->> 'dedupe_key');
    on_duplicates := on_duplicates || (item ->> 'on_duplicate');
    max_attempts := max_attempts || (item ->> 'max_attempts')::integer;
    publishers := publishers || coalesce(published_by, item ->> 'published_by');
    headers := headers || (item -> 'headers');
  end loop;
  if position = 0 then
    return;
  end if;
  return query
    select * from {schema}.write_many(topics, payloads, available_ats, priorities, dedupe_keys, on_duplicates,
                                      max_attempts, publishers, headers, notify);
end
$$;

comment on function {schema}.publish_many(jsonb, text, boolean) is
  'Publish a JSON array of {"topic", "message", options}; results in its order.';

-- ---- who may --------------------------------------------------------------------------------------------------------

-- Postgres lets everybody execute a new function. The schema itself is left alone: it may have been there before us.
revoke all on function
  {schema}.message_fault, {schema}.write_deduplicated, {schema}.write_many, {schema}.item_fault, {schema}.item_due,
  {schema}.publish, {schema}.publish_item, {schema}.execute(jsonb, text), {schema}.execute(text, text),
  {schema}.publish_many(text[], jsonb[], timestamptz[], integer[], text[], text, integer[], text, jsonb[], boolean),
  {schema}.publish_many(jsonb, text, boolean)
  from public;
