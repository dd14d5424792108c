"""The host half of the CUDA modules (streams, events, captures, memory, NVSHMEM's world) on a stand-in driver.

g++ compiles that half against tests/cuda/include, so neither a toolkit nor a GPU is needed. The stand-in
(tests/cuda/driver.h) records what is called and refuses what CUDA's documentation forbids.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC, TESTS = ROOT / "csrc", ROOT / "tests" / "cuda"
PROGRAMS = sorted(TESTS.glob("test_*.cpp"))
CASES = [
    (source.stem, case)
    for source in PROGRAMS
    for case in re.findall(r"^TEST\((\w+)\)", source.read_text(), re.MULTILINE)
]


def ninja_text() -> str:
    """Objects with and without NVSHMEM; a program is linked with those that its `needs:` line names."""
    compiler = os.environ.get("CXX", "g++")
    compiler += " -std=c++20 -O0 -g1 -pthread -Wall -Wextra -Wno-restrict -Wno-psabi"
    lines = [
        "rule precompile",
        f"  command = {compiler} -x c++-header $in -o $out",
        f"build standard.h.gch: precompile {ROOT / 'tests/cpp/standard.h'}",
        "rule compile",
        f"  command = {compiler} -include standard.h "
        f"-DEP_CUDA_HOST_HALF=1 $flags -I{TESTS}/include -I{CSRC} -I{TESTS} -I{ROOT}/tests/cpp "
        "-MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler} $in -o $out",
    ]
    common = [*sorted((CSRC / "device/host").glob("*.cpp")), TESTS / "driver.cpp"]
    concerned = {
        "plain": [CSRC / f"runtime/{name}.cpp" for name in ("call_log", "normal", "runtime")],
        "nvshmem": [CSRC / "transport/cuda/nvshmem_world.cpp"],
    }
    for variant, flags in (("plain", ""), ("nvshmem", "-DEP_WITH_NVSHMEM=1")):
        sources = [
            *concerned[variant],
            CSRC / "device/cuda/device_runtime.cpp",
            CSRC / "transport/cuda/symmetric_memory.cpp",
        ]
        programs = [p for p in PROGRAMS if ("// needs: nvshmem" in p.read_text()) == bool(flags)]
        for source in [*sources, *programs]:
            lines.append(f"build {variant}/{source.name}.o: compile {source} | standard.h.gch")
            lines.append(f"  flags = {flags}")
        objects = [f"{variant}/{source.name}.o" for source in sources]
        objects += [f"common/{source.name}.o" for source in common]
        for program in programs:
            linked = " ".join([f"{variant}/{program.name}.o", *objects])
            lines.append(f"build {program.stem}: link {linked}")
    lines += [
        f"build common/{source.name}.o: compile {source} | standard.h.gch" for source in common
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def folder() -> Path:
    """Builds all programs, compiling only what changed."""
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if ninja is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and ninja: apt-get install g++; pip install ninja")
    built = ROOT / "build" / "cuda_host"
    built.mkdir(parents=True, exist_ok=True)
    with (built / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds of one tree would write the same objects
        (built / "build.ninja").write_text(ninja_text())
        result = subprocess.run(
            [ninja, "-C", str(built), "--quiet"], capture_output=True, text=True, check=False
        )
    if result.returncode != 0:
        pytest.fail(result.stdout[-4000:], pytrace=False)
    return built


@pytest.mark.exhaustive
@pytest.mark.parametrize(("program", "case"), CASES, ids=lambda value: value)
def test_case(program: str, case: str) -> None:
    command = [str(folder() / program), case]
    env = {name: value for name, value in os.environ.items() if not name.startswith("NVSHMEM_")}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, timeout=120
    )
    if result.returncode != 0:
        pytest.fail(result.stdout + result.stderr, pytrace=False)
