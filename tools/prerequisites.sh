#!/usr/bin/env bash
# What a virtual environment and a C++ extension need from the system: venv and Python.h. Debian and
# Ubuntu package both apart from python3; there, as root, they are installed, otherwise named.
set -euo pipefail
python=${1:-python3}

fail() {
    printf 'deep_ep: %s\n' "$@" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "$python not found. Install Python 3.9 or newer, or set PYTHON."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' || fail "$python is older than 3.9."
# As setup.py does: it may have a launcher before it, such as ccache.
read -ra compiler <<<"${CXX:-}"
((${#compiler[@]})) || compiler=(g++)
command -v "${compiler[0]}" >/dev/null || fail "${compiler[0]} not found. Install g++ 12 or newer, or set CXX."
if "${compiler[@]}" --version | head -n 1 | grep -qi 'g++\|gcc'; then
    major=$("${compiler[@]}" -dumpversion | cut -d. -f1)
    ((major >= 12)) || fail "${compiler[*]} is version $major; 12 or newer is needed. Set CXX to a newer one."
fi

missing=()
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing+=(python3-dev)
((${#missing[@]})) || exit 0

install="apt-get install -y --no-install-recommends ${missing[*]}"
command -v apt-get >/dev/null || fail "$python lacks what Debian calls ${missing[*]}. Install its counterpart."
((EUID == 0)) || fail "${missing[*]} missing. Run: sudo $install"
printf 'deep_ep: %s missing, runs %s\n' "${missing[*]}" "$install"
apt-get update -q
$install
