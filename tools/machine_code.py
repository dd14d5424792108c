"""Audits the machine code of the CUDA modules: docs/memory_model.md says what is checked.

Reads what `make cuda` has built; builds nothing. Takes nvdisasm and cuobjdump from PATH, from the toolkit of
CUDA_HOME or nvcc, or from the packages nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump.

Usage: python tools/machine_code.py [module.so | code.cubin ...]    default: deep_ep/_cuda*.so
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from memory_order.audit import Audit, Findings
from memory_order.sass import read
from memory_order.sources import ROOT, Source, working_tree

MOST_SHOWN = 20


def find_tool(name: str) -> str:
    """Path of a tool of the CUDA toolkit."""
    folders = [os.environ.get("PATH", "")]
    if home := os.environ.get("CUDA_HOME"):
        folders.append(str(Path(home) / "bin"))
    if nvcc := shutil.which("nvcc"):
        folders.append(str(Path(nvcc).resolve().parent))
    for site in (sysconfig.get_path("purelib"), *sys.path):
        folders += [str(folder) for folder in Path(site).glob("nvidia/*/bin")]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise FileNotFoundError(
            f"{name} is neither on PATH nor in the CUDA toolkit. Install it: pip install nvidia-cuda-{name}"
        )
    return found


def cubins(module: Path, folder: Path) -> list[Path]:
    """The machine code in a module, as files in a folder; a .cubin is its own."""
    if module.suffix == ".cubin":
        return [module]
    command = [find_tool("cuobjdump"), "-xelf", "all", str(module.resolve())]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return sorted(folder.glob("*.cubin"))


def audit(module: Path, source: Source, *, whole: bool = True) -> Findings:
    """All facts about a module. `whole`: it has all kernels, so every source line must be in it."""
    check = Audit(source)
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins(module, Path(folder)):
            command = [find_tool("nvdisasm"), "-c", "-gi", str(cubin)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                check.run(read(process.stdout))
            if process.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}.")
    if whole:
        check.complete()
    return check.findings


def main() -> int:
    """Audit the modules and print how many facts hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="*", type=Path)
    args = parser.parse_args()
    modules = args.modules or sorted((ROOT / "deep_ep").glob("_cuda*.so"))
    total = 0
    faults = []
    for module in modules:
        findings = audit(module, working_tree())
        total += sum(findings.facts.values())
        faults += [f"{module.name}: {fault}" for fault in findings.faults]
        rules = ", ".join(f"{count} {rule}" for rule, count in findings.facts.items())
        print(f"{module.name.split('.')[0]}: {len(findings.functions)} kernels, ", end="")
        print(f"{findings.instructions} instructions; {rules}")
    for fault in faults[:MOST_SHOWN]:
        print(fault)
    print(f"machine code: {total} facts checked, {len(faults)} do not hold")
    if not modules:
        print("no CUDA module found; build first: make cuda")
    return 1 if faults or not modules else 0


if __name__ == "__main__":
    sys.exit(main())
