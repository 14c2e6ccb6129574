---@meta tidemill
-- `require "tidemill"`.

---@class tidemill
---@field json tidemill.json
---@field null tidemill.Null JSON's null. It counts as true: write `x ~= tidemill.null`.
---@field log tidemill.log
---@field http tidemill.http
local tidemill = {}

---@class tidemill.Null: userdata

---A number of any size. `tostring` gives its digits; decimals compare by value; no arithmetic.
---@class tidemill.Decimal: userdata
local Decimal = {}

---The nearest Lua number.
---@return number
function Decimal:number() end

---@class tidemill.PublishOptions
---@field at? number|string When it is due: seconds since 1970, or a time with its zone.
---@field dedupe_key? string One unfinished message per subscriber has a given key.
---@field delay_secs? number Due so many seconds from now; not together with `at`.
---@field headers? table<string, any>
---@field max_attempts? integer 1 to 32767
---@field on_duplicate? "keep"|"replace" Default: `"keep"`.
---@field priority? integer -9 to 9; smaller goes first.
---@field published_by? string

---@class tidemill.PublishResult
---@field id string Of a duplicate, the message that waits already.
---@field topic string
---@field delivered integer How many subscribers will get it.
---@field duplicate boolean

---Publishes at once, in a transaction of its own: it stays published when this delivery fails. Waits.
---@param topic string
---@param payload? any `{}` when left out.
---@param options? tidemill.PublishOptions
---@return tidemill.PublishResult
function tidemill.publish(topic, payload, options) end

---A message of `publish_many`: its options stand beside topic and payload.
---@class tidemill.PublishItem: tidemill.PublishOptions
---@field topic string
---@field payload? any `{}` when left out.

---Publishes a list in one statement and a transaction of its own; the results come in its order. Waits.
---@param list tidemill.PublishItem[]
---@return tidemill.PublishResult[]
function tidemill.publish_many(list) end

---Rows are tables by column name; NULL is no key.
---@class tidemill.Rows
---@field affected integer How many rows were written, or read.
---@field fields string[] The names of the columns.
---@field [integer] table<string, any>

---What the database said: raised by `query`, `transaction` and what belongs to them.
---@class tidemill.SqlError
---@field message string
---@field sqlstate? string
---@field detail? string
---@field hint? string
---@field constraint? string
---@field schema? string
---@field table? string
---@field column? string
---@field where? string The line that asked: `file:line`.
---@field lost? boolean The connection broke.
---@field unknown? boolean Nobody knows whether the statement took effect.

---One SQL statement with the arguments `$1` … Waits.
---@param sql string
---@param ... any nil, boolean, number, text, decimal, or a table that becomes JSON.
---@return tidemill.Rows
function tidemill.query(sql, ...) end

---@class tidemill.TransactionOptions
---@field isolation? "read committed"|"repeatable read"|"serializable"
---@field read_only? boolean
---@field retries? integer How often to begin anew after a serialization failure or a deadlock, 0 to 100. Default: 0.

---Good until the function it was given to returns.
---@class tidemill.Transaction
local Transaction = {}

---@param sql string
---@param ... any
---@return tidemill.Rows
function Transaction:query(sql, ...) end

---Published when the transaction commits.
---@param topic string
---@param payload? any
---@param options? tidemill.PublishOptions
---@return tidemill.PublishResult
function Transaction:publish(topic, payload, options) end

---@param list tidemill.PublishItem[]
---@return tidemill.PublishResult[]
function Transaction:publish_many(list) end

---Committed when `fn` returns, rolled back when it raises. Returns what `fn` returned. Waits.
---@param fn fun(tx: tidemill.Transaction): any
---@param options? tidemill.TransactionOptions
---@return any
function tidemill.transaction(fn, options) end

---A connection of a program that is no handler. Its functions block until the answer is there.
---@class tidemill.Connection
local Connection = {}

---@param sql string
---@param ... any
---@return tidemill.Rows
function Connection:query(sql, ...) end

---@param topic string
---@param payload? any
---@param options? tidemill.PublishOptions
---@return tidemill.PublishResult
function Connection:publish(topic, payload, options) end

---@param list tidemill.PublishItem[]
---@return tidemill.PublishResult[]
function Connection:publish_many(list) end

---@param fn fun(tx: tidemill.Transaction): any
---@param options? tidemill.TransactionOptions
---@return any
function Connection:transaction(fn, options) end

---Closing twice is no error.
function Connection:close() end

---@class tidemill.ConnectOptions
---@field schema? string Of the queue. Default: `tidemill`.
---@field application_name? string What the server shows. Default: `tidemill script`.

---Connects a program of your own to the queue's database; not for handlers.
---@param dsn? string A libpq URI or conninfo; nothing: the PG* variables.
---@param options? tidemill.ConnectOptions
---@return tidemill.Connection
function tidemill.connect(dsn, options) end

---Suspends this delivery alone; 0 lets others run that are ready.
---@param secs number 0 to 31622400, with a fraction.
function tidemill.sleep(secs) end

---Seconds since 1970 by this machine's clock, with a fraction.
---@return number
function tidemill.now() end

---A new UUID of version 7.
---@return string
function tidemill.uuid() end

---Marks a table as an array, so that it stays `[]` when it is empty; without an argument a new one.
---@generic T: table
---@param t? T
---@return T
function tidemill.array(t) end

---@param value string|number|tidemill.Decimal A number as JSON writes it.
---@return tidemill.Decimal
function tidemill.decimal(value) end

---@class tidemill.json
---@field null tidemill.Null
tidemill.json = {}

---Raises with the byte where the text stops being JSON.
---@param text string
---@return any
function tidemill.json.decode(text) end

---Raises with the path of what cannot be written.
---@param value any
---@return string
function tidemill.json.encode(value) end

---@generic T: table
---@param t? T
---@return T
function tidemill.json.array(t) end

---@param value any
---@return boolean
function tidemill.json.is_array(value) end

---@param value string|number|tidemill.Decimal
---@return tidemill.Decimal
function tidemill.json.decimal(value) end

---@param value any
---@return boolean
function tidemill.json.is_decimal(value) end

---@class tidemill.http
tidemill.http = {}

---@class tidemill.HttpOptions
---@field body? string
---@field ca_file? string Certificates (PEM) to trust instead of the system's.
---@field connect_timeout_secs? number Default: 10.
---@field follow? integer Redirects that are followed. Default: 0.
---@field headers? table<string, string|number|(string|number)[]>
---@field json? any A value to be sent as JSON, instead of `body`.
---@field max_bytes? integer The largest body of a reply. Default: 10485760.
---@field query? table<string, string|number|boolean|(string|number|boolean)[]>
---@field timeout_secs? number For all of it, redirects included. Default: 30.

---@class tidemill.HttpCall: tidemill.HttpOptions
---@field method? string Default: `"GET"`.
---@field url string

---@class tidemill.HttpReply
---@field status integer
---@field headers table<string, string> Found under names in any case; `set-cookie` is a list.
---@field body string
---@field url string Where it came from, after redirects.
local HttpReply = {}

---The body decoded; raises when it is no JSON.
---@return any
function HttpReply:json() end

---One request, whatever its method. Waits; raises when there is no reply. Any status is a reply.
---@param request tidemill.HttpCall
---@return tidemill.HttpReply
function tidemill.http.request(request) end

---@param url string
---@param options? tidemill.HttpOptions
---@return tidemill.HttpReply
function tidemill.http.get(url, options) end

---@param url string
---@param options? tidemill.HttpOptions
---@return tidemill.HttpReply
function tidemill.http.head(url, options) end

---@param url string
---@param options? tidemill.HttpOptions
---@return tidemill.HttpReply
function tidemill.http.post(url, options) end

---@param url string
---@param options? tidemill.HttpOptions
---@return tidemill.HttpReply
function tidemill.http.put(url, options) end

---@param url string
---@param options? tidemill.HttpOptions
---@return tidemill.HttpReply
function tidemill.http.patch(url, options) end

---@param url string
---@param options? tidemill.HttpOptions
---@return tidemill.HttpReply
function tidemill.http.delete(url, options) end

---@class tidemill.log
tidemill.log = {}

---@param text any
---@param fields? table<string, any> At most 32.
function tidemill.log.debug(text, fields) end

---@param text any
---@param fields? table<string, any> At most 32.
function tidemill.log.info(text, fields) end

---@param text any
---@param fields? table<string, any> At most 32.
function tidemill.log.warn(text, fields) end

---@param text any
---@param fields? table<string, any> At most 32.
function tidemill.log.error(text, fields) end

return tidemill
