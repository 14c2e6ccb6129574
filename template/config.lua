-- What this app is, and which handler gets which topic.
-- `tidemill check` says whether all is in order here.

---@type tidemill.Config
return {
  app = "@app@", -- the owner of these subscriptions; apps that share a database differ in it

  -- The database of `tidemill run`. `tidemill dev` starts one of its own where none is named.
  -- database = os.getenv "DATABASE_URL",

  -- A message is tried this often before it is set aside as failed.
  max_attempts = 5,

  subscribe = {
    -- A topic, and the handlers that get its messages: "hello" is handlers/hello.lua.
    ["greeting.wanted"] = { "hello" },
  },
}
