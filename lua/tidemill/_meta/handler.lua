---@meta _
-- What a handler gets: `---@type tidemill.Handler` before its `return function(payload, ctx)`.

---Returning is success, whatever the value; raising anything fails the attempt.
---@alias tidemill.Handler fun(payload: any, ctx: tidemill.Context): any

---Runs around a handler: calls `next(payload, ctx)`, and returns what it returned.
---@alias tidemill.Middleware fun(next: tidemill.Handler, payload: any, ctx: tidemill.Context): any

---The message that is handled. Good while its delivery runs.
---@class tidemill.Context
---@field event string `"message"`; `"failed"` for a handler of `on_failed`.
---@field topic string
---@field subscriber string
---@field app string
---@field message_id string A UUID, the same for every attempt: the idempotency key.
---@field attempts integer Which attempt this is, from 1.
---@field max_attempts integer The last one there will be.
---@field priority integer -9 to 9; smaller goes first.
---@field created_at string When it was published, UTC: `2026-01-31T23:59:59.123456Z`.
---@field published_by string Who published it; `""` when nobody said so.
---@field principal_id string The same as `published_by`.
---@field headers? table<string, any> The publisher's headers.
---@field deadline number When the time limit passes, in the seconds of `tidemill.now()`.
---@field generation integer Which loading of config and handlers this is: one more with each reload.
---@field raw string The payload as JSON, as Postgres prints it.
local Context = {}

---Ends the delivery as a failed attempt; the next one starts after `secs` instead of the backoff.
---@param secs number 0 to 31622400
---@param why? string Kept in the message's `error`.
---@return nil
function Context:retry(secs, why) end

---Ends the delivery; the message comes again after `secs`, and the attempt is not counted.
---@param secs number 0 to 31622400
---@return nil
function Context:snooze(secs) end

---Ends the delivery: the message needs no more work.
---@param why? string Kept in the message's `error`.
---@return nil
function Context:discard(why) end

---Publishes in the transaction that marks this message done; nothing when the attempt fails.
---@param topic string
---@param payload? any `{}` when left out.
---@param options? tidemill.PublishOptions
function Context:publish(topic, payload, options) end

---A transaction that marks this message done as well: what `fn` does in this database happens exactly once. The
---delivery ends with it; raises only when it was rolled back.
---@param fn fun(tx: tidemill.Transaction)
---@param options? tidemill.TransactionOptions
---@return nil
function Context:finish(fn, options) end

---A line of level info in the log.
---@param text any
---@param fields? table<string, any> At most 32.
function Context:log(text, fields) end
