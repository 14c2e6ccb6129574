-- JSON without loss, for handlers and producers: what is decoded and encoded again untouched is the
-- same value to Postgres. The work is done in C, see src/executor/json.h.
--
--   decode(text)     the value; raises with the byte where the text stops being JSON
--   encode(value)    the text; raises with the path of what cannot be written. Tables are read raw,
--                    without their metamethods
--   null             JSON's null; `value == json.null` tells it from everything else
--   array(t)         marks `t` as an array and returns it, so that it stays `[]` when it is empty;
--                    without an argument a new one. Decoded arrays are marked
--   is_array(value)  whether it is marked so
--   decimal(number)  a number of any size from its text (or a Lua number): digits by tostring,
--                    nearest Lua number by `:number()`, compared by value with other decimals; no
--                    arithmetic. Decoding makes one of each number that a Lua number would change
--   is_decimal(value)

local native = require "tidemill.native"

return {
  decode = native.decode,
  encode = native.encode,
  null = native.null,
  array = native.array,
  is_array = native.is_array,
  decimal = native.decimal,
  is_decimal = native.is_decimal,
}
