#!/bin/bash
# The tests without the slow ones, on two cores in about half the time: those of the hook and of the other doors, most of
# which wait for processes, beside all others; then, alone, those that time a network. PYTHON and the arguments of pytest
# are the caller's.
set -u
cd "$(dirname "$0")/.."
timed=(tests/package/test_netlab.py)
other=tests/ddp/test_reductions.py # behind the others, so that both halves take as long
also=(tests/doors tests/package/test_examples.py) # for the same reason beside those of the hook
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0

run() { # no tests left by the caller's choice (5) is no failure
    "${PYTHON:-python3}" -m pytest -q -m 'not slow' "$@"
    local status=$?
    [ $status = 5 ] || [ $status = 0 ] || return $status
}

run tests/ddp tests/native "${also[@]}" --ignore="$other" "${timed[@]/#/--ignore=}" -p no:cacheprovider "$@" >"$log" 2>&1 &
run tests --ignore=tests/ddp --ignore=tests/native "${also[@]/#/--ignore=}" "${timed[@]/#/--ignore=}" "$@" || failed=1
run "$other" "$@" || failed=1
wait $! || failed=1
echo "tests/ddp, tests/native, tests/doors, the examples:"
cat "$log"
run "${timed[@]}" "$@" || failed=1
exit $failed
