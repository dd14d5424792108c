#!/usr/bin/env bash
# Puts NVSHMEM where setup.py finds it: third-party/nvshmem. See --help.
set -euo pipefail
[[ -z ${CUDA_HOME:-} ]] || PATH=$CUDA_HOME/bin:$PATH

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
third_party=$root/third-party
link=$third_party/nvshmem
lock=$third_party/nvshmem.lock
oldest=3.5  # First version with the queue-pair API.

usage() {
    cat <<'HELP'
Usage: ./install_nvshmem.sh [--cuda MAJOR]    the pinned PyPI wheel for this CUDA (default)
       ./install_nvshmem.sh --prefix DIR      an NVSHMEM that is installed already; nothing is fetched
       ./install_nvshmem.sh --source DIR      build this NVSHMEM source tree with CMake
       ./install_nvshmem.sh --check           look at what third-party/nvshmem has
       ./install_nvshmem.sh --repair [--cuda MAJOR]
                                              put the pinned wheel into PYTHON's environment, in place of
                                              the older one that torch brought there

Afterwards third-party/nvshmem points to it, and setup.py builds deep_ep._cuda_nvshmem against it.
NVSHMEM is only needed when ranks do not all reach each other over NVLink.

A process has one libnvshmem_host.so.3. CUDA builds of torch load their own, which may be too old for the
module built here. --repair replaces it by the pinned one, which serves torch as well.

  --cuda MAJOR   12 or 13; default: what nvcc says, else nvidia-smi
  PYTHON         interpreter whose pip fetches or installs the wheel (default .venv/bin/python, else python3)
  CUDA_HOME      toolkit for --source (default: the one of nvcc on PATH)
  CMAKE_ARGS     further options for --source, e.g. -DNVSHMEM_UCX_SUPPORT=ON
  MAX_JOBS       parallel compilations for --source (default: number of cores)
HELP
}

say() { printf 'nvshmem: %s\n' "$*"; }
fail() {
    printf 'nvshmem: %s\n' "$@" >&2
    exit 1
}

# The toolkit decides, not the driver: a driver runs code of older toolkits.
cuda_major() {
    local found=""
    if command -v nvcc >/dev/null; then
        found=$(nvcc --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    elif command -v nvidia-smi >/dev/null; then
        found=$(nvidia-smi | sed -n 's/.*CUDA Version: \([0-9]*\)\..*/\1/p')
    fi
    [[ -n $found ]] || fail "found neither nvcc nor nvidia-smi, so the CUDA version is unknown." \
        "Say it: ./install_nvshmem.sh --cuda 13   (or 12)"
    printf '%s' "$found"
}

pick_python() {
    local candidate=${PYTHON:-}
    if [[ -z $candidate ]]; then
        candidate=python3
        [[ ! -x $root/.venv/bin/python ]] || candidate=$root/.venv/bin/python
    fi
    "$candidate" -m pip --version >/dev/null 2>&1 || fail "$candidate has no pip." \
        "Run make install first, or set PYTHON to an interpreter with pip."
    printf '%s' "$candidate"
}

version_of() {
    local part
    for part in MAJOR MINOR PATCH; do
        sed -n "s/^#define NVSHMEM_VENDOR_${part}_VERSION *\([0-9]*\).*/\1/p" "$1"
    done | paste -sd.
}

# Everything setup.py links and the kernels call, in one place; says what is wrong and stops.
check() {
    local prefix=$1 header version lib
    [[ -d $prefix ]] || fail "$prefix is not a directory."
    header=$prefix/include/non_abi/nvshmem_version.h
    [[ -f $header ]] || fail "$prefix has no include/non_abi/nvshmem_version.h, so it is no NVSHMEM prefix." \
        "Give the folder that holds include/ and lib/."
    version=$(version_of "$header")
    [[ $(printf '%s\n' "$oldest" "$version" | sort -V | head -n 1) == "$oldest" ]] ||
        fail "$prefix is NVSHMEM $version; $oldest or newer is needed for its queue pairs." \
            "Without --prefix this script fetches one."
    grep -rqs nvshmemx_qp_create "$prefix/include" ||
        fail "NVSHMEM $version in $prefix declares no nvshmemx_qp_create: its queue-pair API is missing."
    lib=$prefix/lib
    [[ -d $lib ]] || lib=$prefix/lib64
    [[ -f $lib/libnvshmem_device.a ]] || fail "$lib has no libnvshmem_device.a (the device library)." \
        "Install NVSHMEM's development package, or build it with --source."
    [[ -e $lib/libnvshmem_host.so.3 ]] || fail "$lib has no libnvshmem_host.so.3 (the host library)."
    compgen -G "$lib/nvshmem_transport_ibgda.so*" >/dev/null ||
        fail "$lib has no nvshmem_transport_ibgda.so: this NVSHMEM was built without IBGDA." \
            "Build it with -DNVSHMEM_IBGDA_SUPPORT=ON, as --source does."
    say "NVSHMEM $version in $prefix"
    say "  device library  $lib/libnvshmem_device.a"
    say "  host library    $lib/libnvshmem_host.so.3"
    say "  IBGDA transport $(compgen -G "$lib/nvshmem_transport_ibgda.so*" | tail -n 1)"
    offer_repair "$version"
}

# What a program run by $1 loads where torch brings an NVSHMEM; empty if it brings none.
version_in_environment() {
    "$1" - 2>/dev/null <<'PY' || true
from importlib.metadata import distributions
for found in distributions():
    if (found.metadata["Name"] or "").startswith("nvidia-nvshmem-cu"):
        print(found.version)
        break
PY
}

is_older() {
    [[ $1 != "$2" && $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]
}

# torch loads the wheel of its environment before ours is asked for.
offer_repair() {
    local version=$1 python found
    python=$(pick_python 2>/dev/null) || return 0
    found=$(version_in_environment "$python")
    [[ -n $found ]] || return 0
    if is_older "${found%.*}" "${version%.*}"; then
        say "the environment of $python has NVSHMEM $found, which torch loads first; $version does not run with it."
        say "Replace it: ./install_nvshmem.sh --repair"
    fi
}

# A link is replaced; a folder that somebody put there is not ours to delete.
point_to() {
    [[ ! -e $link || -L $link ]] || fail "$link is a folder, not a link. Move it away first."
    ln -sfn "$1" "$link"
    say "linked third-party/nvshmem"
    say "setup.py finds it there. For other programs, or to be explicit:"
    printf 'export NVSHMEM_DIR=%q\n' "$1"
}

pin_of() {
    grep "^nvidia-nvshmem-cu$1==" "$lock" || fail "third-party/nvshmem.lock pins no nvidia-nvshmem-cu$1." \
        "There is one for CUDA 12 and 13; for another, build NVSHMEM with --source."
}

repair() {
    local major=$1 pin python work
    pin=$(pin_of "$major")
    python=$(pick_python)
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # The folder of now, not of the moment of exit.
    trap "rm -rf '$work'" EXIT
    printf '%s\n' "$pin" >"$work/requirements.txt"
    # Without dependencies: torch asks for its own version, and pip would put that back.
    "$python" -m pip install --disable-pip-version-check -q --no-deps --only-binary=:all: \
        --require-hashes -r "$work/requirements.txt" ||
        fail "pip could not install ${pin%% *} into the environment of $python, see above." \
            "Without a network: start programs with LD_PRELOAD=<prefix>/lib/libnvshmem_host.so.3"
    say "installed ${pin%% *} into the environment of $python"
}

from_wheel() {
    local major=$1 pin package version target python work
    package=nvidia-nvshmem-cu$major
    pin=$(pin_of "$major")
    version=${pin#*==}
    version=${version%% *}
    target=$third_party/nvshmem-$version-cu$major
    if [[ ! -d $target ]]; then
        python=$(pick_python)
        work=$(mktemp -d)
        # shellcheck disable=SC2064  # The folder of now, not of the moment of exit.
        trap "rm -rf '$work'" EXIT
        printf '%s\n' "$pin" >"$work/requirements.txt"
        say "fetches $package $version"
        "$python" -m pip download --disable-pip-version-check -q --no-deps --only-binary=:all: \
            --require-hashes -r "$work/requirements.txt" -d "$work" ||
            fail "could not fetch $package $version with the pinned hash, see above." \
                "Without a network: ./install_nvshmem.sh --prefix DIR"
        "$python" -m zipfile -e "$work"/*.whl "$work/wheel"
        mv "$work/wheel" "$target"
    fi
    check "$target/nvidia/nvshmem"
    point_to "$target/nvidia/nvshmem"
}

from_source() {
    local source=$1 build=$root/build/nvshmem prefix=$third_party/nvshmem-source
    [[ -f $source/CMakeLists.txt ]] || fail "$source has no CMakeLists.txt, so it is no NVSHMEM source tree."
    command -v cmake >/dev/null || fail "cmake not found. Install it: apt-get install cmake"
    local options=(
        -DCMAKE_BUILD_TYPE=Release
        "-DCMAKE_INSTALL_PREFIX=$prefix"
        -DNVSHMEM_IBGDA_SUPPORT=ON
        # One GPU per rank and a bootstrap by unique id: nothing here needs an MPI or a second transport.
        -DNVSHMEM_MPI_SUPPORT=OFF
        -DNVSHMEM_SHMEM_SUPPORT=OFF
        -DNVSHMEM_PMIX_SUPPORT=OFF
        -DNVSHMEM_UCX_SUPPORT=OFF
        -DNVSHMEM_LIBFABRIC_SUPPORT=OFF
        -DNVSHMEM_USE_NCCL=OFF
        -DNVSHMEM_USE_GDRCOPY=OFF
        -DNVSHMEM_BUILD_TESTS=OFF
        -DNVSHMEM_BUILD_EXAMPLES=OFF
        -DNVSHMEM_BUILD_PACKAGES=OFF
        -DNVSHMEM_BUILD_PYTHON_LIB=OFF
        "-DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-90}"
    )
    [[ -z ${CUDA_HOME:-} ]] || options+=("-DCUDA_HOME=$CUDA_HOME")
    local extra=()
    read -ra extra <<<"${CMAKE_ARGS:-}"
    say "builds $source"
    cmake -S "$source" -B "$build" "${options[@]}" "${extra[@]}" ||
        fail "cmake refused $source, see above. Options are added with CMAKE_ARGS=..."
    cmake --build "$build" --parallel "${MAX_JOBS:-$(nproc)}" || fail "the build failed, see above."
    cmake --install "$build" >/dev/null || fail "cmake --install failed, see above."
    check "$prefix"
    point_to "$prefix"
}

mode=wheel
argument=""
major=""
while (($#)); do
    case $1 in
        --prefix | --source | --cuda)
            (($# >= 2)) || fail "$1 needs a value. See ./install_nvshmem.sh --help"
            if [[ $1 == --cuda ]]; then
                major=$2
            else
                mode=${1#--}
                [[ -d $2 ]] || fail "$2 is not a directory."
                # Through links: $link may be named, and would point to itself.
                argument=$(cd -P "$2" && pwd)
            fi
            shift 2
            ;;
        --check | --repair)
            mode=${1#--}
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) fail "unknown argument $1. See ./install_nvshmem.sh --help" ;;
    esac
done

case $mode in
    wheel)
        [[ -n $major ]] || major=$(cuda_major)
        from_wheel "$major"
        ;;
    repair)
        [[ -n $major ]] || major=$(cuda_major)
        repair "$major"
        ;;
    source) from_source "$argument" ;;
    check)
        [[ -e $link ]] || fail "there is no $link. Run ./install_nvshmem.sh"
        check "$(cd -P "$link" && pwd)"
        ;;
    prefix)
        check "$argument"
        point_to "$argument"
        ;;
esac
