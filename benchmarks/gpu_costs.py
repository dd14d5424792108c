"""Measures on one GPU the costs of the model of time that one GPU can tell, and writes them as `time_model.py --costs`
reads them. What NVLink and a NIC take, one GPU cannot tell.

Needs nvcc, and neither torch nor the native modules.

    python benchmarks/gpu_costs.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path(__file__).with_suffix(".cu")
# Hopper's machine code, and PTX for what is newer.
FLAGS = ("-std=c++20", "-O3", "-arch=sm_90", f"-I{ROOT / 'csrc'}")


def names() -> list[str]:
    """Of the costs that the program measures."""
    return re.findall(r"^ *EP_(?:NS|RATE)\((\w+), ", SOURCE.read_text(), re.MULTILINE)


def build(nvcc: str, program: Path) -> None:
    """Compiles the program."""
    subprocess.run([nvcc, *FLAGS, "-o", str(program), str(SOURCE)], check=True)


def costs_of(found: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """By name the median, and where it comes from.

    Args:
        found: what the program prints.

    Raises:
        ValueError: a median is not above 0, so it is the cost of nothing.
    """
    costs = {}
    for name, samples in found["samples"].items():
        median = statistics.median(samples)
        if not median > 0:
            raise ValueError(f"{name} is {median} on {found['device']}")
        source = (
            f"measured on {found['device']}, by benchmarks/{SOURCE.name}, median of {len(samples)}"
        )
        costs[name] = (round(median, 3), source)
    return costs


def quartiles(samples: Sequence[float]) -> str:
    """For people."""
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return f"{median:.1f} ({lower:.1f} to {upper:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nvcc", default="nvcc", metavar="PROGRAM")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deep_ep_costs_") as folder:
        program = Path(folder) / SOURCE.stem
        build(args.nvcc, program)
        done = subprocess.run([program], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{SOURCE.name} ended with {done.returncode}; it has said why")
    found = json.loads(done.stdout)
    costs = costs_of(found)
    if args.json is not None:
        args.json.write_text(json.dumps(costs, indent=1))
    for name, samples in found["samples"].items():
        print(f"{name}: {quartiles(samples)}")
    said = ", ".join(f"{name} {value:.1f}" for name, (value, _source) in costs.items())
    print(f"{found['device']}: {said}")


if __name__ == "__main__":
    main()
