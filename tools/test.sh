#!/usr/bin/env bash
# Tests, with coverage: first those that only compute, one on each core; then all others, whose ranks need
# every core for themselves. Other arguments are pytest's, and make it one run of all tests without those two parts.
#
# Usage: tools/test.sh PYTHON [--all | argument ...]    without --all: those that are not exhaustive
set -euo pipefail

python=$1
shift
computing=(
    tests/test_gpu_runner.py tests/test_sanitizers.py tests/test_mutants.py tests/test_cuda_host.py
    tests/test_build.py tests/test_install_nvshmem.py tests/test_nvshmem_library.py
    tests/test_explore.py tests/test_simulated_counters.py tests/test_operation_counts.py
    tests/diagnose/analyze tests/diagnose/collect tests/diagnose/core tests/diagnose/render
    tests/diagnose/storage tests/diagnose/trace tests/doctor tests/hang tests/memory_order tests/model
    tests/tidy
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
    cover computing -n "$(nproc)" --dist worksteal "${selected[@]}" "${computing[@]}" || status=$?
    cover others "${selected[@]}" "${computing[@]/#/--ignore=}" || status=$?
fi
"$python" -m slipcover --merge build/coverage-*.json --out build/coverage.json >/dev/null
exit "$status"
