#!/bin/sh
# bench.sh BIN [ARGUMENT...]: measure lookups, copies and jobs, with these arguments, against a daemon of its own.
# BIN is the directory of the commands. Started by `make bench`.
set -eu
bin=$1
shift
directory=$(mktemp -d)

"$bin/kvoffd" serve --directory "$directory" --pool-size 1GiB --http-address "" --log-level warning &
daemon=$!
trap 'kill $daemon 2>/dev/null || true; wait $daemon 2>/dev/null || true; rm -rf "$directory"' EXIT
trap 'exit 130' INT TERM HUP

tries=0
until "$bin/kvoffd-cli" health --directory "$directory" >/dev/null 2>&1; do
    tries=$((tries + 1))
    kill -0 $daemon 2>/dev/null || { echo "bench: the daemon ended; its own words are above" >&2; exit 1; }
    [ $tries -lt 60 ] || { echo "bench: the daemon was not ready after 60 tries" >&2; exit 1; }
    sleep 0.2
done
"$bin/python" -m tests.bench.daemon lookup copy jobs --directory "$directory" "$@"
