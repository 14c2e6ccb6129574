-- A table of another program: the columns of a plain queue in a schema of its own, made and written
-- by plain SQL. Beside it the database holds nothing.
--
--   local app = foreign.app { config = { subscribe = { t = "work" } }, handlers = { work = "…" } }
--   app:start()
--   local id = foreign.insert(app, "t", "work", '{"n": 1}')
--   foreign.wait_for_status(app, id, "done")
--
-- Handlers are bodies, as those of spec.support.journal.

local journal = require "spec.support.journal"

local foreign = {}

foreign.TABLE = [[
  create schema other;
  create table other.queue_message (
    id uuid primary key,
    topic text not null,
    subscriber text not null,
    status text not null,
    payload jsonb not null,
    attempts integer not null,
    available_at timestamptz not null,
    claimed_at timestamptz,
    claimed_by text,
    processed_at timestamptz,
    error text,
    published_by text,
    created_at timestamptz not null,
    updated_at timestamptz not null,
    constraint status_is_known check (status in ('pending', 'running', 'done', 'failed'))
  );
]]

foreign.INDEX = "create index on other.queue_message (status, available_at);"

-- An app on such a table. `ddl` makes the table (foreign.TABLE and foreign.INDEX); `config` has
-- migrate = false, schema and table already.
function foreign.app(options)
  local config = { schema = "other", table = "queue_message", prefix = "shop", migrate = false }
  for key, value in pairs(options.config) do
    config[key] = value
  end
  local app = journal.app { config = config, handlers = options.handlers }
  app.order = "created_at, id"
  app.db:exec(options.ddl or foreign.TABLE .. foreign.INDEX)
  return app
end

-- Writes one row as that program would, and returns its id. `columns` are SQL texts by name, for
-- other values than those of a new message.
function foreign.insert_silently(app, topic, subscriber, payload, columns)
  local values = {
    id = "gen_random_uuid()", topic = "$1", subscriber = "$2", payload = "$3", status = "'pending'", attempts = "0",
    available_at = "now()", published_by = "'ann'", created_at = "now()", updated_at = "now()",
  }
  for name, value in pairs(columns or {}) do
    values[name] = value
  end
  local names, texts = {}, {}
  for name, value in pairs(values) do
    table.insert(names, name)
    table.insert(texts, value)
  end
  return app.db:value(("with parameters as (select $1::text, $2::text, $3::jsonb) "
    .. "insert into other.queue_message (%s) values (%s) returning id"):format(
      table.concat(names, ", "), table.concat(texts, ", ")), topic, subscriber, payload or "{}")
end

-- The same, and tells whoever listens.
function foreign.insert(app, topic, subscriber, payload, columns)
  app.db:exec "begin"
  local id = foreign.insert_silently(app, topic, subscriber, payload, columns)
  app.db:query("select pg_notify('shop_queue', $1)", topic)
  app.db:exec "commit"
  return id
end

-- `count` messages {"n": 1} … in one statement, and one notification.
function foreign.insert_many(app, topic, subscriber, count)
  app.db:query([[insert into other.queue_message
      (id, topic, subscriber, status, payload, attempts, available_at, created_at, updated_at)
    select gen_random_uuid(), $1, $2, 'pending', jsonb_build_object('n', n), 0, now(), now(), now()
      from generate_series(1, $3::int) as n]], topic, subscriber, count)
  app.db:query("select pg_notify('shop_queue', $1)", topic)
end

foreign.row = journal.row
foreign.wait_for_status = journal.wait_for_status

function foreign.count(app, where)
  return tonumber(app.db:value("select count(*) from other.queue_message where " .. where))
end

function foreign.wait_until_finished(app, secs)
  app:wait_until(function()
    return foreign.count(app, "status in ('pending', 'running')") == 0
  end, secs, "all messages are finished")
end

-- Everything that a program could have made in a database, as texts.
function foreign.objects(app)
  local rows = app.db:query [[
    select format('relation %s.%s', relnamespace::regnamespace, relname) as name from pg_class
     where relnamespace::regnamespace::text !~ '^pg_(toast_)?temp'
    union all select format('column %s.%s %s', attrelid::regclass, attname, attnum) from pg_attribute
     where attrelid::regclass::text like '%queue_message%'
    union all select format('schema %s', nspname) from pg_namespace where nspname !~ '^pg_(toast_)?temp'
    union all select format('function %s', oid::regprocedure) from pg_proc
    union all select format('type %s', oid::regtype) from pg_type
    union all select format('trigger %s', tgname) from pg_trigger
    union all select format('extension %s', extname) from pg_extension
    order by 1]]
  local names = {}
  for i, row in ipairs(rows) do
    names[i] = row.name
  end
  return table.concat(names, "\n")
end

return foreign
