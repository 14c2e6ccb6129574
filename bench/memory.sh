#!/usr/bin/env bash
# memory.sh: resident memory of the runtime and its executors, idle and with a deep backlog.
#
#   ROWS=1000000    pending messages
#   TIDEMILL_BUILD  the build that is measured (default: build/release)
#
# With PGHOST set it works in that server, in a database `tidemill_memory` that it drops and makes,
# otherwise in a private one (bench/with-server).
set -eu
cd "$(dirname "$0")/.."

program=$PWD/${TIDEMILL_BUILD:-build/release}/tidemill
if [ -z "${PGHOST:-}" ]; then
	exec bench/with-server "$PWD/bench/memory.sh"
fi

folder=$(mktemp -d)
worker=
trap '[ -z "$worker" ] || kill "$worker" 2>/dev/null; rm -rf "$folder"' EXIT

# config EXECUTORS CONCURRENCY SECS: handlers that sleep for SECS.
config() {
	cat >"$folder/config.lua" <<-END
	local tidemill = require "tidemill"
	return {
	  poll_secs = 3600,
	  executors = $1,
	  concurrency = $2,
	  subscribe = { backlog = { nap = function() tidemill.sleep($3) end } },
	}
	END
}

dropdb --if-exists tidemill_memory 2>/dev/null
createdb tidemill_memory

start() {
	"$program" run -c "$folder/config.lua" --database dbname=tidemill_memory 2>"$folder/log" &
	worker=$!
	until grep -q event=ready "$folder/log"; do sleep 0.05; done
}

# show TITLE: resident kilobytes of the runtime and of each executor.
show() {
	printf '%s: runtime %s kB, executors' "$1" "$(awk '/^VmRSS/ { print $2 }' "/proc/$worker/status")"
	for pid in $(pgrep -P "$worker"); do
		printf ' %s kB' "$(awk '/^VmRSS/ { print $2 }' "/proc/$pid/status")"
	done
	echo
}

config 2 64 2
start
show idle
kill "$worker" && wait "$worker"
psql -qAt -d tidemill_memory -o /dev/null -c "select count(*) from tidemill.publish_many(array['backlog'],
	(select array_agg(jsonb_build_object('id', n)) from generate_series(1, ${ROWS:-1000000}) n))"
start
sleep 10
show "with $(psql -qAt -d tidemill_memory -c "select count(*) from tidemill.queue_message
	where status = 'pending'") pending, 128 handlers asleep"
kill "$worker" && wait "$worker"
config 1 1000 3600
start
sleep 3
show "$(psql -qAt -d tidemill_memory -c "select count(*) from tidemill.queue_message
	where status = 'running'") handlers asleep in one executor"
# The second signal does not wait for the handlers.
kill "$worker" && sleep 0.2 && kill "$worker" && wait "$worker" || true
worker=
