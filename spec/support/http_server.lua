-- A real HTTP server, spec/support/http_server.py, and certificates for it.
--
--   local server = http_server.start { plain = "plain", tls = "tls:" .. certificates.good }
--   server:url("tls", "/echo")          --> https://localhost:PORT/echo
--   server:wait_for "closed /hang"
--
-- `http_server.stop_all` belongs into after_each.

local clock = require "spec.support.clock"
local folder = require "spec.support.folder"
local process = require "spec.support.process"

local http_server = {}

local Server = {}
Server.__index = Server

local running = {}

-- Debian's own, whatever other one is found first.
local PYTHON = "/usr/bin/python3"

-- No proxy of whoever runs the specs comes between.
http_server.ENV = {
  http_proxy = false, https_proxy = false, HTTPS_PROXY = false, all_proxy = false, ALL_PROXY = false,
  no_proxy = false, NO_PROXY = false,
}

-- Starts the listeners named by the keys; the values are the kinds that http_server.py knows.
function http_server.start(listeners)
  local argv = { PYTHON, "spec/support/http_server.py" }
  for name, kind in pairs(listeners) do
    table.insert(argv, name .. "=" .. kind)
  end
  local self = setmetatable({ process = process.spawn { argv = argv }, kinds = listeners, ports = {} }, Server)
  table.insert(running, self)
  for name in pairs(listeners) do
    self.ports[name] = self.process:wait_for("listening " .. name .. " (%d+)")
  end
  return self
end

function Server:url(name, path)
  local scheme = self.kinds[name]:find "^tls:" and "https" or "http"
  return ("%s://localhost:%s%s"):format(scheme, self.ports[name], path or "/")
end

-- Waits until it has printed a line that the Lua pattern matches.
function Server:wait_for(pattern)
  return self.process:wait_for(pattern)
end

-- Waits until it has printed `n` such lines.
function Server:wait_for_many(pattern, n)
  clock.wait_until(function()
    return self:count(pattern) >= n
  end, 30, function()
    return ("%d lines like %q of the server\n%s"):format(n, pattern, self.process:output())
  end)
end

-- How many lines like that it has printed.
function Server:count(pattern)
  local _, n = self.process:stdout():gsub(pattern, "")
  return n
end

function Server:stop()
  self.process:destroy()
end

function http_server.stop_all()
  for _, self in ipairs(running) do
    self:stop()
  end
  running = {}
end

-- ---- certificates -------------------------------------------------------------------------------

local SCRIPT = [[
set -e
new_key="-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
openssl req -x509 $new_key -keyout ca.key -out ca.pem -days 30 -subj "/CN=Spec CA"
openssl req -x509 $new_key -keyout other.key -out other.pem -days 30 -subj "/CN=Another CA"
sign() { # NAME SUBJECT_ALT_NAME DAYS
  openssl req $new_key -keyout "$1.key" -out "$1.csr" -subj "/CN=$1"
  printf 'subjectAltName=%s\n' "$2" >"$1.extensions"
  openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days "$3" \
    -extfile "$1.extensions" -out "$1.certificate"
  cat "$1.certificate" "$1.key" >"$1.pem"
}
sign good "DNS:localhost,IP:127.0.0.1" 30
sign expired "DNS:localhost" -1
sign stranger "DNS:other.example" 30
openssl req -x509 $new_key -keyout self.key -out self.certificate -days 30 -subj "/CN=localhost" \
  -addext "subjectAltName=DNS:localhost"
cat self.certificate self.key >self.pem
]]

-- Makes a folder of certificates: `ca` and `other_ca` to trust, and `good`, `expired`, `stranger` (of
-- another host) and `self` (signed by itself) for servers, each a path. `remove` removes it.
function http_server.certificates()
  local dir = folder.temp "tidemill-certificates"
  local made = process.run { "bash", "-c", SCRIPT, cwd = dir }
  if made.code ~= 0 then
    error("openssl made no certificates:\n" .. made.stderr, 2)
  end
  return {
    ca = dir .. "/ca.pem", other_ca = dir .. "/other.pem", good = dir .. "/good.pem", self = dir .. "/self.pem",
    expired = dir .. "/expired.pem", stranger = dir .. "/stranger.pem",
    remove = function()
      folder.remove(dir)
    end,
  }
end

return http_server
