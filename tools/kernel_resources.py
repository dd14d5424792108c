"""Prints what ptxas reported for each kernel of the CUDA modules: registers, shared memory, stack, spills.

Reads the logs that setup.py leaves beside the objects; builds nothing.

Usage: python tools/kernel_resources.py [--check] [log ...]
    --check  exit status 1 if a kernel spills or has local memory, or if there is no kernel at all
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
FUNCTION = re.compile(r"Function properties for (\S+)")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
LOCAL = re.compile(r"(\d+) bytes lmem")


@dataclass
class Kernel:
    """One entry function for one architecture; sizes in bytes."""

    module: str
    symbol: str
    arch: str
    registers: int = 0
    shared: int = 0
    local: int = 0
    spills: int = 0


def read_log(text: str, module: str) -> list[Kernel]:
    """The kernels of one log. ptxas also lists device functions, which are not ours to count."""
    kernels: list[Kernel] = []
    current: Kernel | None = None
    in_entry = False
    for line in text.splitlines():
        if match := ENTRY.search(line):
            current = Kernel(module, match.group(1), match.group(2))
            kernels.append(current)
        elif match := FUNCTION.search(line):
            in_entry = current is not None and match.group(1) == current.symbol
        elif current is None or not in_entry:
            continue
        elif match := MEMORY.search(line):
            current.local = max(current.local, int(match.group(1)))
            current.spills = int(match.group(2)) + int(match.group(3))
        elif match := USED.search(line):
            current.registers = int(match.group(1))
            if shared := SHARED.search(line):
                current.shared = int(shared.group(1))
            if local := LOCAL.search(line):
                current.local = max(current.local, int(local.group(1)))
    return kernels


def names(symbols: list[str]) -> list[str]:
    """Readable names, without argument lists; as they are where there is no c++filt."""
    tool = shutil.which("c++filt")
    if tool is None or not symbols:
        return symbols
    # nvcc renames what has internal linkage: a prefix, and the file's name in the namespace's.
    plain = [re.sub(r"^__nv_static_.*?_(?=_Z)", "", symbol) for symbol in symbols]
    command = [tool, "--no-params"]
    result = subprocess.run(
        command, input="\n".join(plain), capture_output=True, text=True, check=True
    )
    return [
        re.sub(
            r"_GLOBAL__N__\w+|\(anonymous namespace\)", "{anonymous}", line.removeprefix("void ")
        )
        for line in result.stdout.splitlines()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("logs", nargs="*", type=Path)
    args = parser.parse_args()
    logs = args.logs or sorted((ROOT / "build").glob("native-*/cuda/*/*.log"))
    kernels = [kernel for log in logs for kernel in read_log(log.read_text(), log.parent.name)]

    rows = [("module", "arch", "registers", "static shared", "local", "spills", "kernel")]
    for kernel, name in zip(kernels, names([kernel.symbol for kernel in kernels])):
        sizes = (kernel.registers, kernel.shared, kernel.local, kernel.spills)
        rows.append((kernel.module, kernel.arch, *map(str, sizes), name))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())

    bad = [kernel for kernel in kernels if kernel.local or kernel.spills]
    print(f"{len(kernels)} kernels, {len(bad)} with spills or local memory (bytes)")
    if not kernels:
        print("no ptxas output found; build first: make cuda")
    return 1 if args.check and (bad or not kernels) else 0


if __name__ == "__main__":
    sys.exit(main())
