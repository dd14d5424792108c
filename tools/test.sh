#!/usr/bin/env bash
# Tests, with coverage: first those that compute or wait, several at once; then those that judge times, whose ranks need
# every core for themselves. Other arguments are pytest's, and make it one run of all tests without those two parts.
#
# Usage: tools/test.sh PYTHON [--all | argument ...]    without --all: those that are not exhaustive
set -euo pipefail
shopt -s extglob

python=$1
shift
together=(
    tests/api tests/base tests/build tests/checks tests/doctor tests/explore tests/hang
    tests/membership/test_!(missing_rank).py tests/memory_order tests/model tests/moe tests/ops/test_!(masks).py
    tests/tidy tests/tune
    tests/diagnose/analyze tests/diagnose/collect tests/diagnose/core tests/diagnose/render
    tests/diagnose/storage tests/diagnose/trace
    tests/native/test_cuda_host.py tests/native/test_nvshmem_library.py tests/observe/test_simulated_counters.py
)

# cover NAME ARGUMENT...: pytest, and build/coverage-NAME.json.
cover() {
    "$python" -m slipcover --source deep_ep --json --out "build/coverage-$1.json" -m pytest --durations=12 "${@:2}"
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
    cover together -n "$(($(nproc) + 1))" --dist worksteal "${selected[@]}" "${together[@]}" || status=$?
    cover alone "${selected[@]}" "${together[@]/#/--ignore=}" || status=$?
fi
"$python" -m slipcover --merge build/coverage-*.json --out build/coverage.json >/dev/null
exit "$status"
