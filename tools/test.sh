#!/usr/bin/env bash
# Tests, with coverage: first most of them, several at once; then those that judge times or have short timeouts, whose
# ranks need every core for themselves. Other arguments are pytest's, and make it one run of all tests without those two parts.
#
# Usage: tools/test.sh PYTHON [--all | argument ...]    without --all: those that are not exhaustive
set -euo pipefail

python=$1
shift
alone=(
    tests/device/test_gpu.py tests/diagnose/live/test_monitor.py tests/diagnose/test_compat.py tests/diagnose/test_run.py
    tests/membership/test_missing_rank.py tests/observe/test_clock.py tests/observe/test_counters.py
    tests/observe/test_parts.py tests/observe/test_phases.py tests/observe/test_wall_time.py tests/ops/test_low_latency_program.py
    tests/ops/test_masks.py tests/test_elastic.py tests/test_internode.py tests/test_intranode.py tests/trials
)

# cover NAME ARGUMENT...: pytest, and build/coverage-NAME.json. Slipcover would take its probes out of lines that it has seen
# often, and while it does, a line that another thread meets first is an error in the program (Python before 3.12).
cover() {
    "$python" -m slipcover --threshold 1000000000 --source deep_ep --json --out "build/coverage-$1.json" -m pytest --durations=12 "${@:2}"
}

mkdir -p build
rm -f build/coverage*.json
status=0
selected=(-m "not exhaustive")
if [[ ${1-} == --all ]]; then
    selected=()
    shift
fi
if (($#)); then
    cover all "$@" || status=$?
else
    cover together -n "$(($(nproc) + 1))" --dist worksteal "${selected[@]}" "${alone[@]/#/--ignore=}" || status=$?
    cover alone "${selected[@]}" "${alone[@]}" || status=$?
fi
"$python" -m slipcover --merge build/coverage-*.json --out build/coverage.json >/dev/null
exit "$status"
