#!/usr/bin/env bash
# peers.sh [OPTION…]: Tidemill and other queues in the same rounds, by the peers harness.
#
#   PEERS=FOLDER          the harness: the folder with run.mjs (needed)
#   PEERS_MODULES=FOLDER  the folder whose node_modules has the peers and their node (needed)
#   TIDEMILL_BIN=FILE     the program measured (default: build/release/tidemill)
#   OUT=FILE              keeps the JSON line of each run (default: build/bench/peers.jsonl, added to)
#   SCALE=100             a hundredth of the jobs: a look whether all works, no measurement
#
# Options are those of run.mjs: --runs 3, --only tm.drain,gw.drain, --sync off … With PGHOST set it
# works in that server, otherwise in a private one (bench/with-server). Prints a table of medians.
set -eu
cd "$(dirname "$0")/.."

if [ -z "${PEERS:-}" ] || [ ! -f "$PEERS/run.mjs" ] || [ -z "${PEERS_MODULES:-}" ]; then
	echo "peers.sh: set PEERS and PEERS_MODULES, see bench/README.md" >&2
	exit 2
fi
export TIDEMILL_BIN=${TIDEMILL_BIN:-$PWD/build/release/tidemill}
if [ ! -x "$TIDEMILL_BIN" ]; then
	echo "peers.sh: there is no $TIDEMILL_BIN: make build BUILD=build/release" >&2
	exit 2
fi
if [ -z "${PGHOST:-}" ]; then
	exec bench/with-server "$PWD/bench/peers.sh" "$@"
fi

node=$PEERS_MODULES/node_modules/node/bin/node
[ -x "$node" ] || node=node
out=${OUT:-build/bench/peers.jsonl}
mkdir -p "$(dirname "$out")"
code=0
"$node" "$PEERS/run.mjs" --plan bench/peers/plan.mjs --out "$out" "$@" || code=$?
"$node" "$PEERS/../report.mjs" peers "$out"
exit "$code"
