"""benchmarks/time_model.py in the module that it asks for, and the costs that it reads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from build.test_operation_counts import load

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
COSTS = ROOT / "csrc" / "device" / "host" / "costs.def"
KERNELS = {
    "normal": {"normal_notify", "normal_pack", "normal_dispatch", "normal_combine"},
    "low-latency": {"low_latency_dispatch", "low_latency_combine"},
}
# Prints the exact time of each launch before the program prints its tables.
PROGRAM = """
import sys
from pathlib import Path
import _time_model
import time_model

tables = time_model.tables

def print_and_make_tables(title, operations, costs):
    for operation in operations.values():
        for kernel, launch in operation.launches.items():
            print("launch", kernel, launch.us.hex())
    return tables(title, operations, costs)

_time_model.MODULE_FOLDER = Path(sys.argv.pop(1))
time_model.tables = print_and_make_tables
time_model.main()
"""
TIMEOUT_S = 300


def test_each_gpu_has_all_costs_and_says_where_they_come_from() -> None:
    names = re.findall(r"^EP_COST\((\w+)\)", COSTS.read_text(), re.MULTILINE)
    module = load("_time_model")
    for gpu in module.gpus():
        assert sorted(module.costs_of(gpu)) == sorted(names)
    for costs in json.loads(module.GPUS.read_text()).values():
        for value, source in costs.values():
            assert value >= 0
            assert source


def test_measured_costs_take_the_place_of_known_ones(tmp_path: Path) -> None:
    module = load("_time_model")
    measured = tmp_path / "costs.json"
    measured.write_text(json.dumps({"load_ns": [321, "measured on this GPU"]}))
    known = module.costs_of("H800")
    assert module.costs_of("H800", measured) == {**known, "load_ns": 321.0}


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


def times_of(module_folder: Path, operation: str) -> list[tuple[str, float]]:
    """The kernels of a small group, in the order of their launches, and what they take in us."""
    sizes = ["--ranks", "1x2", "--num-tokens", "8", "--num-topk", "2", "--num-experts", "8"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(module_folder), "--operation", operation, *sizes],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^launch (\w+) (\S+)$", done.stdout, re.MULTILINE)
    return [(kernel, float.fromhex(us)) for kernel, us in found]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", KERNELS)
def test_an_operation_takes_the_same_time_in_each_run(module_folder: Path, operation: str) -> None:
    times = times_of(module_folder, operation)
    assert {kernel for kernel, _ in times} == KERNELS[operation]
    assert all(us > 0 for _, us in times)
    assert times_of(module_folder, operation) == times
