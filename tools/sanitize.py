"""Builds tests/cpp/test_*.cpp with the host target's sources under sanitizers, and runs them.

Each test is a program; exit status 0 is a pass. Without a word from the file it runs under address and
undefined ("address") and under ThreadSanitizer ("thread"). A line in the file chooses otherwise, and
may ask for a variant whose sanitizer must object, which proves that the check can fail:

    // sanitize: thread thread-must-fail:-DEP_WEAKEN_SIGNAL=1

ThreadSanitizer must also object to each case that is a RACE() and not a TEST(); those run one by one.

pytest runs the same programs case by case (tests/support/native.py), also without a sanitizer ("plain").

Usage: python tools/sanitize.py [name ...]   with parts of test names, e.g. `executor`
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
TESTS = ROOT / "tests" / "cpp"
FLAGS = {
    "plain": "-O1",
    "address": "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-O1 -fsanitize=thread",
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=0",  # Its fake stacks do not follow fibers.
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1",
}
TIMEOUT_S = 600
SANITIZER_WORDS = ("Sanitizer", "runtime error:")


@dataclass(frozen=True)
class Program:
    """One test in one variant."""

    source: Path
    sanitizer: str
    defines: str
    must_fail: bool
    case: str = ""  # runs alone; else all

    @property
    def variant(self) -> str:
        """The folder it is built in."""
        return re.sub(r"\W+", "-", self.sanitizer + self.defines).strip("-")

    @property
    def path(self) -> str:
        return f"{self.variant}/{self.source.stem}"


def programs(selection: list[str]) -> list[Program]:
    """All tests in all their variants, or those whose file name contains a word of `selection`."""
    found = []
    for source in sorted(TESTS.glob("test_*.cpp")):
        if selection and not any(word in source.name for word in selection):
            continue
        match = re.search(r"^// sanitize: (.+)$", source.read_text(), re.MULTILINE)
        for item in (match.group(1) if match else "address thread").split():
            name, _, defines = item.partition(":")
            sanitizer = name.removesuffix("-must-fail")
            if sanitizer not in FLAGS:
                raise SystemExit(f"{source}: {item!r} is neither of {', '.join(FLAGS)}")
            found.append(Program(source, sanitizer, defines, name.endswith("-must-fail")))
            if name == "thread":
                races = re.findall(r"^RACE\((\w+)\)", source.read_text(), re.MULTILINE)
                found += [Program(source, sanitizer, defines, True, race) for race in races]
    return found


def plain(source: Path) -> Program:
    """A test without a sanitizer."""
    return Program(source, "plain", "", must_fail=False)


def without_comments(source: Path) -> str:
    """What a compiler reads of a file, but for comments behind code."""
    return re.sub(r"^//.*", "", source.read_text(), flags=re.MULTILINE)


def runtime_sources(test: Path) -> list[Path]:
    """Those of csrc/runtime that a test needs: all, where it runs whole operations; their kernels compile longest."""
    headers = (TESTS / name for name in re.findall(r'#include "(\w+\.h)"', test.read_text()))
    texts = [test.read_text(), *(path.read_text() for path in headers)]
    used = set(re.findall(r'#include "runtime/(\w+)\.h"', "\n".join(texts)))
    sources = sorted((CSRC / "runtime").glob("*.cpp"))
    return [path for path in sources if used & {"runtime", path.stem}]


def ninja_text(selected: list[Program]) -> str:
    """Objects per sanitizer, shared by all programs but where a define of a variant matters."""
    compiler = os.environ.get("CXX") or "g++"
    # The instruction set of setup.py, so that the same code is tested.
    default = "x86-64-v3" if platform.machine() == "x86_64" else ""
    arch = os.environ.get("DEEP_EP_CPU_ARCH", default)
    # Reports name lines; more than these takes a quarter of the compiler's time.
    common = "-std=c++20 -g1 -fno-omit-frame-pointer -pthread -Wall -Wextra -Wno-restrict"
    common += f" -I{CSRC} -I{TESTS}" + (f" -march={arch}" if arch else "")
    target = [
        path
        for folder in ("device/host", "transport/host")
        for path in sorted((CSRC / folder).glob("*.cpp"))
    ]
    lines = [
        "rule compile",
        f"  command = {compiler} {common} $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler} -pthread $flags $in -o $out -lrt",
        "rule precompile",
        f"  command = {compiler} {common} $flags -x c++-header $in -o $out",
    ]
    # Reading the standard library is a third of what small files take.
    for sanitizer, flags in FLAGS.items():
        lines.append(f"build {sanitizer}/standard.h.gch: precompile {TESTS / 'standard.h'}")
        lines.append(f"  flags = {flags}")
    # What headers of the target ask for changes the kernels, which the runtime's objects hold.
    of_target = "".join(path.read_text() for path in sorted((CSRC / "device").rglob("*.*h")))
    done = set()
    for program in selected:
        names = re.findall(r"-D(\w+)", program.defines)
        objects = []
        for source in [*runtime_sources(program.source), *target, program.source]:
            has_kernels = source.parent.name == "runtime" or source == program.source
            own = without_comments(source)
            concerned = any(name in own or (has_kernels and name in of_target) for name in names)
            defines = program.defines if concerned else ""
            folder = program.variant if concerned else program.sanitizer
            built = f"{folder}/{source.relative_to(ROOT)}.o"
            objects.append(built)
            if built not in done:
                done.add(built)
                header = f"{program.sanitizer}/standard.h"
                lines.append(f"build {built}: compile {source} | {header}.gch")
                lines.append(f"  flags = {FLAGS[program.sanitizer]} {defines} -include {header}")
        if program.path not in done:
            done.add(program.path)
            lines.append(f"build {program.path}: link {' '.join(objects)}")
            lines.append(f"  flags = {FLAGS[program.sanitizer]}")
    return "\n".join(lines) + "\n"


def build(selected: list[Program]) -> Path:
    """Build the programs, compiling only what changed, and return the folder they are in."""
    folder = ROOT / "build" / "sanitize"
    folder.mkdir(parents=True, exist_ok=True)
    ninja = shutil.which(
        "ninja", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    )
    if ninja is None:
        raise SystemExit("ninja not found. Install it: pip install ninja")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Two builds of one tree would write the same objects.
        # All programs every time: ninja forgets what a build file no longer names.
        everything = {*programs([]), *(plain(source) for source in TESTS.glob("test_*.cpp"))}
        ordered = sorted(
            everything, key=lambda program: (program.path, program.defines, program.case)
        )
        (folder / "build.ninja").write_text(ninja_text(ordered))
        targets = [program.path for program in selected]
        subprocess.run([ninja, "-C", str(folder), "--quiet", *targets], check=True)
    return folder


def execute(program: Program, folder: Path, arguments: list[str]) -> tuple[list[str], int, str]:
    """Run a program: the command, its exit status (-1: too long) and all it wrote."""
    command = [str(folder / program.path), *arguments]
    if program.sanitizer == "thread" and shutil.which("setarch"):
        # GCC 12's shadow mapping dislikes some random layouts.
        command = ["setarch", "-R", *command]
    try:
        result = subprocess.run(
            command,
            env={**OPTIONS, **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return command, -1, str(error)
    return command, result.returncode, result.stdout


def run(program: Program, folder: Path) -> bool:
    """Run one program; true if it did what it must."""
    start = time.monotonic()
    command, status, output = execute(program, folder, [program.case] if program.case else [])
    objected = any(word in output for word in SANITIZER_WORDS)
    passed = objected if program.must_fail else status == 0 and not objected
    expectation = " (must be reported)" if program.must_fail else ""
    seconds = time.monotonic() - start
    print(
        f"{'passed' if passed else 'FAILED'}  {program.path} {program.case}{expectation}  {seconds:.1f} s",
        flush=True,
    )
    if not passed:
        print("\n".join(telling(output.splitlines())))
        print(f"again: {shlex.join(command)}")
    return passed


def telling(lines: list[str]) -> list[str]:
    """The sanitizer's report from its first line on, else the end of the output."""
    for number, line in enumerate(lines):
        if any(word in line for word in SANITIZER_WORDS):
            return lines[number : number + 60]
    return lines[-60:]


def main() -> int:
    selected = programs(sys.argv[1:])
    if not selected:
        print("no tests/cpp/test_*.cpp match")
        return 1
    folder = build(selected)
    passed = sum(run(program, folder) for program in selected)
    print(f"{passed} passed, {len(selected) - passed} failed")
    return 0 if passed == len(selected) else 1


if __name__ == "__main__":
    sys.exit(main())
