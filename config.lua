-- The sample app, and a config that shows every key. A line that is commented out shows the default.
-- docs/configuration.md says more about each, docs/handlers.md what a handler can do.

return {
  app = "shop",                       -- owner of these subscriptions

  -- The database. Unset, the PG* environment variables; `tidemill dev` starts a Postgres of its own.
  -- database = os.getenv "DATABASE_URL",  -- a libpq URI or conninfo
  -- listen_database = nil,           -- a direct address for LISTEN, when `database` is a pooler
  -- schema = "tidemill",             -- holds the tables and functions
  -- table = "queue_message",         -- the ledger: a row is a message for one subscriber
  -- prefix = "tidemill",             -- of notification channels
  -- migrate = true,                  -- create or upgrade the schema at start
  -- notify = true,                   -- listen for notifications, do not only poll
  -- watch = true,                    -- reload when this file or a handler changes

  -- handlers = "handlers",           -- folder, relative to this file

  -- How much at once.
  -- executors = 0,                   -- processes that run handlers; 0: one per core
  -- concurrency = 64,                -- deliveries in flight per executor
  -- sql_connections = 4,             -- database connections of an executor, for its handlers
  -- sql_idle_secs = 60,              -- one that is unused for so long is closed
  -- batch = 100,                     -- most messages one claim takes
  -- max_payload_bytes = 1048576,     -- of the JSON text, as Postgres prints it
  -- max_memory_mb = 512,             -- of an executor; over it, it is replaced; 0: no limit
  -- max_deliveries = 0,              -- an executor is replaced after so many; 0: never

  -- Times, in seconds.
  -- poll_secs = 30,                  -- how often to look when no notification arrives
  -- lease_secs = 300,                -- a worker silent for so long is dead to the others
  -- shutdown_secs = 25,              -- how long a stop waits for running handlers
  -- stall_secs = 30,                 -- a handler that keeps the processor so long is killed
  -- kill_grace_secs = 1,             -- how long past its limit before that

  -- Defaults of subscriptions; each may say otherwise.
  -- max_attempts = 5,                -- starts before a message is a dead letter
  -- retry_backoff_secs = 10,         -- wait after the first failure; doubles with each further one
  -- retry_jitter = 0,                -- adds at most this share to a wait, at random: 0 to 1
  -- timeout_secs = 300,              -- time limit of one attempt
  retain_hours = 48,                  -- how long finished messages are kept; 0: for ever; default 24

  -- around = nil,                    -- middleware: function(next, payload, ctx), or a list of them
  -- on_failed = nil,                 -- a handler that is told of each dead letter

  subscribe = {
    -- A subscription is a handler's name, a list of names, or a map from the subscriber's name to a
    -- handler or to a table of options.
    ["order.placed"] = {
      charge_card = {
        handler = "charge_card",      -- default: the subscriber's name
        max_attempts = 8,
        retry_backoff_secs = 1,
        retry_jitter = 0.5,
        timeout_secs = 20,
        concurrency = 10,             -- of this subscription in one runtime; 0: no limit of its own
      },
    },
    ["order.paid"] = { "fulfil_order", "notify_ops" },
    ["order.shipped"] = "notify_ops",
    ["user.signed_up"] = "welcome",
  },
}
