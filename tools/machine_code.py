"""Audits the machine code of the CUDA modules: docs/memory_model.md says what is checked.

Reads what `make cuda` has built; builds nothing.

Usage: python tools/machine_code.py [module.so | code.cubin ...]    default: deep_ep/_cuda*.so
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from disassembly import disassembled
from memory_order.audit import Audit, Findings
from memory_order.sources import ROOT, Source, working_tree

MOST_SHOWN = 20


def audit(module: Path, source: Source, *, whole: bool = True) -> Findings:
    """All facts about a module. `whole`: it has all kernels, so every source line must be in it."""
    check = Audit(source)
    check.run(disassembled(module))
    if whole:
        check.complete()
    return check.findings


def main() -> int:
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
