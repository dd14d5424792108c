"""benchmarks/time_model.py in the module that it asks for, and the costs that it reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import _time_model
import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
COSTS = ROOT / "csrc" / "device" / "host" / "costs.def"
KERNELS = {
    "normal": {"normal_notify", "normal_pack", "normal_dispatch", "normal_combine"},
    "low-latency": {"low_latency_dispatch", "low_latency_combine"},
}
# Of a token that comes back to a rank or leaves it, at most; a tenth, of looks in vain a quarter, above what was counted.
BOUNDS = {
    "normal_dispatch": {"in vain": 3.5, "steps": 0.24, "signals": 0.082, "fences": 0.082},
    "normal_combine": {"in vain": 0.47, "steps": 0.2, "signals": 0.078, "fences": 0.078},
}
# Prints the exact figures before the program prints its tables.
PROGRAM = """
import json
import sys
from pathlib import Path
import _time_model
import time_model

tables = time_model.tables

def print_and_make_tables(title, operations, costs):
    found = {
        name: {
            "us": {kernel: launch.us for kernel, launch in operation.launches.items()},
            "per_row": time_model.counts_per_row(name, operation),
        }
        for name, operation in operations.items()
    }
    print(json.dumps(found))
    return tables(title, operations, costs)

_time_model.MODULE_FOLDER = Path(sys.argv.pop(1))
time_model.tables = print_and_make_tables
time_model.main()
"""
TIMEOUT_S = 300


def test_each_gpu_has_all_costs_and_says_where_they_come_from() -> None:
    names = re.findall(r"^EP_COST\((\w+)\)", COSTS.read_text(), re.MULTILINE)
    for gpu in _time_model.gpus():
        assert sorted(_time_model.costs_of(gpu)) == sorted(names)
    for costs in json.loads(_time_model.GPUS.read_text()).values():
        for value, source in costs.values():
            assert value >= 0
            assert source


def test_measured_costs_take_the_place_of_known_ones(tmp_path: Path) -> None:
    measured = tmp_path / "costs.json"
    measured.write_text(json.dumps({"load_ns": [321, "measured on this GPU"]}))
    known = _time_model.costs_of("H800")
    assert _time_model.costs_of("H800", measured) == {**known, "load_ns": 321.0}


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the module is that tells the time of a GPU."""
    folder = tmp_path_factory.mktemp("time_model")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder)],
        cwd=ROOT,
        env={**os.environ, "DEEP_EP_TIME_MODEL": "1", "DEEP_EP_CUDA": "0"},
        check=True,
    )
    return folder / "deep_ep"


def operations_of(module_folder: Path, operation: str, *options: str) -> dict[str, dict[str, Any]]:
    """What takes how long, in us, and what is done for each row, by the operation's kernel."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(module_folder), "--operation", operation, *options],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[0])
    return found


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", KERNELS)
def test_an_operation_takes_the_same_time_in_each_run(module_folder: Path, operation: str) -> None:
    sizes = ("--ranks", "1x2", "--num-tokens", "8", "--num-topk", "2", "--num-experts", "8")
    found = operations_of(module_folder, operation, *sizes)
    times = {kernel: us for one in found.values() for kernel, us in one["us"].items()}
    assert set(times) == KERNELS[operation]
    assert all(us > 0 for us in times.values())
    assert operations_of(module_folder, operation, *sizes) == found


@pytest.mark.slow
@pytest.mark.exhaustive
def test_looks_and_steps_of_a_row_stay_below_their_bounds(module_folder: Path) -> None:
    found = operations_of(module_folder, "normal", "--num-tokens", "512", "--shrink", "7")
    for kernel, bounds in BOUNDS.items():
        counts = found[kernel]["per_row"]
        assert counts["looks"] == pytest.approx(counts["in vain"] + counts["steps"])
        for name, most in bounds.items():
            assert most / 2 < counts[name] <= most, (kernel, name)
