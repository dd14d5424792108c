#!/usr/bin/env bash
# What single tests need from the system: those of the report page a headless Chromium and its driver, those
# of the protocol's model Spin, those of NVSHMEM's source cmake. On Debian, as root, they are installed,
# otherwise named. Without them those tests are skipped; CI_REQUIRE_TOOLS=1 makes that a failure, here and there.
set -euo pipefail

missing=()
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || missing+=(chromium)
command -v chromedriver >/dev/null || missing+=(chromium-driver)
command -v spin >/dev/null || missing+=(spin)
command -v cmake >/dev/null || missing+=(cmake)
((${#missing[@]})) || exit 0

# give_up WHY: say what is missing and what to run.
give_up() {
    printf 'deep_ep: %s missing, tests that need it are skipped: %s\n' "${missing[*]}" "$1" >&2
    [[ ${CI_REQUIRE_TOOLS:-0} == 0 ]] || exit 1
    exit 0
}

install="apt-get install -y --no-install-recommends ${missing[*]}"
command -v apt-get >/dev/null || give_up "install what your system calls them"
((EUID == 0)) || give_up "run: sudo $install"
printf 'deep_ep: %s missing, runs %s\n' "${missing[*]}" "$install"
apt-get update -q && $install || give_up "$install failed, see above"
