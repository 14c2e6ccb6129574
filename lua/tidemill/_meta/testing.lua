---@meta tidemill.testing
-- `require "tidemill.testing"`, in specs.

---@class tidemill.testing
local testing = {}

---@class tidemill.RunOptions
---@field app? string Default: `app`.
---@field attempts? integer Which attempt it is. Default: 1.
---@field config? string The path of a config.lua: then a handler is a subscriber's name.
---@field created_at? string
---@field event? "message"|"failed" Default: `"message"`.
---@field generation? integer Default: 1.
---@field headers? table<string, any>
---@field max_attempts? integer Default: what stands beside the module's `handle`, or 5.
---@field message_id? string Default: a new UUID.
---@field now? number When it starts, in seconds since 1970. Default: now.
---@field priority? integer Default: 0.
---@field published_by? string Default: `""`.
---@field subscriber? string Default: the module's name.
---@field timeout_secs? number Default: what stands beside the module's `handle`, or 300.
---@field topic? string Default: `test`.

---@class tidemill.Published
---@field topic string
---@field payload any
---@field options tidemill.PublishOptions
---@field at_once? boolean By `tidemill.publish`, whatever became of the delivery.

---@class tidemill.LogLine
---@field level "debug"|"info"|"warn"|"error"
---@field event string `log`, or `print`.
---@field text string
---@field fields table<string, string|number>

---@class tidemill.Query
---@field sql string Any white space in it is one blank.
---@field arguments any[] With their number in `n`.
---@field transaction? integer Which one of the run it was in.

---@class tidemill.HttpRequest
---@field method string
---@field url string
---@field headers table<string, string|string[]> Names are in lower case.
---@field body? string
---@field json any The body decoded, when its content type is JSON.

---What a service of a spec answers.
---@class tidemill.HttpAnswer
---@field status? integer Default: 200.
---@field headers? table<string, string|string[]>
---@field body? string Default: `""`.
---@field json? any Instead of `body`.
---@field secs? number How long it takes. Default: 0.

---What a handler did.
---@class tidemill.Run
---@field outcome "done"|"raised"|"retry"|"snooze"|"discard"
---@field status "done"|"pending"|"failed"|"discarded" What the message is then.
---@field error? string With its traceback; or why it was retried or discarded.
---@field delay_secs? number Of a retry or a snooze.
---@field result any What the handler returned.
---@field published tidemill.Published[]
---@field queries tidemill.Query[] What was asked of the database, BEGIN, COMMIT and ROLLBACK included.
---@field requests tidemill.HttpRequest[] What was asked of `tidemill.http`.
---@field log tidemill.LogLine[]
---@field elapsed_secs number How long the handler waited.

---Runs a handler once, with no database, no queue and a clock that moves only while it waits.
---@param handler string|tidemill.Handler|tidemill.Module
---@param payload? any `{}` when left out.
---@param options? tidemill.RunOptions
---@return tidemill.Run
function testing.run(handler, payload, options) end

---What `tidemill.publish` to a topic returns: fields that replace those of the usual reply, or a function that
---returns them, or nil and an error.
---@param topic string
---@param reply table|fun(payload: any, options: tidemill.PublishOptions): table?, string?
function testing.publish(topic, reply) end

---What the database answers.
---@param what string A part of the statement, with any white space as one blank; or a Lua pattern.
---@param reply table[]|tidemill.Rows|fun(...: any): table[]?, string|tidemill.SqlError|nil
function testing.query(what, reply) end

---What an HTTP service answers.
---@param what string A part of `METHOD URL`, or a Lua pattern.
---@param reply tidemill.HttpAnswer|fun(request: tidemill.HttpRequest): tidemill.HttpAnswer?, string?
function testing.http(what, reply) end

---Lets time pass while the handler computes, or inside of a stub.
---@param secs number
function testing.advance(secs) end

---Forgets all stubs, and the modules that were loaded by name.
function testing.reset() end

return testing
