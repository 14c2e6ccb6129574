#!/usr/bin/env bash
# claim.sh [OPTION=VALUE…]: the matrix of the claim experiment, and a Markdown table of its medians.
#
# Batches of 100 and 500, each with an empty table around the work, a million done rows, a million
# future rows, an old snapshot held open, and statistics from when the table was empty. The cases take
# turns within a round, so that a drift of the machine meets them all. Options of bench_claim given
# here hold for every case.
#
#   RUNS=3          rounds
#   ROWS=100000     messages of a run
#   MANY=1000000    done and future rows
#   BATCHES="100 500"
#   OUT=FILE        keeps the JSON line of each run (default: build/bench/claim.jsonl, begun anew)
#   TIDEMILL_BUILD  the build that bench_claim is taken from (default: build/release)
#
# With PGHOST set it works in that server, otherwise in a private one (bench/with-server).
set -eu
cd "$(dirname "$0")/.."

program=${TIDEMILL_BUILD:-build/release}/bench/bench_claim
if [ ! -x "$program" ]; then
	echo "claim.sh: there is no $program: make bench-claim builds it" >&2
	exit 2
fi
if [ -z "${PGHOST:-}" ]; then
	exec bench/with-server "$PWD/bench/claim.sh" "$@"
fi

runs=${RUNS:-3} rows=${ROWS:-100000} many=${MANY:-1000000}
out=${OUT:-build/bench/claim.jsonl}
mkdir -p "$(dirname "$out")"
: >"$out"

for ((round = 1; round <= runs; round++)); do
	for batch in ${BATCHES:-100 500}; do
		for case in '' "done=$many" "future=$many" snapshot=1 stale=1; do
			echo "round $round: batch=$batch $case $*" >&2
			"$program" rows="$rows" batch="$batch" $case "$@" >>"$out"
		done
	done
done
luajit bench/limit/medians.lua "$out"
