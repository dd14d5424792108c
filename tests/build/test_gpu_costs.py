"""What one GPU tells of the model of time: names are those of its costs, and what is written is what a file of costs
holds. What a probe does is compared with what the model charges by tests/cpp/test_time_model.cpp."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import gpu_costs
import pytest

ROOT = Path(__file__).resolve().parents[2]
COSTS = ROOT / "csrc" / "device" / "host" / "costs.def"
# Costs of a link or of a NIC, what the code itself says, and what is no thing of a GPU.
NOT_TOLD = re.compile(r"nvlink_\w+|nic_\w+|step_ns")


def test_all_costs_that_one_gpu_can_tell_are_measured_once() -> None:
    costs = re.findall(r"^EP_COST\((\w+)\)", COSTS.read_text(), re.MULTILINE)
    assert sorted(gpu_costs.names()) == sorted(
        name for name in costs if not NOT_TOLD.fullmatch(name)
    )


def run(folder: Path, script: str) -> Path:
    """Runs gpu_costs.py with a stand-in for nvcc, which compiles everything to this shell script; returns its file."""
    nvcc, built, file = folder / "nvcc", folder / "built", folder / "costs.json"
    built.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {built} "$2"\n')
    for one in (nvcc, built):
        one.chmod(0o755)
    with mock.patch("sys.argv", ["gpu_costs.py", "--nvcc", str(nvcc), "--json", str(file)]):
        gpu_costs.main()
    return file


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_program_compiles(tmp_path: Path) -> None:
    gpu_costs.build("nvcc", tmp_path / "costs")


def test_a_cost_is_the_median_and_says_where_it_comes_from(tmp_path: Path) -> None:
    samples = {"load_ns": [3.0, 1.0, 2.0], "warp_ns": [9.0] * 3}
    file = run(tmp_path, f"echo '{json.dumps({'device': 'H200', 'samples': samples})}'")
    source = "measured on H200, by benchmarks/gpu_costs.cu, median of 3"
    assert json.loads(file.read_text()) == {"load_ns": [2.0, source], "warp_ns": [9.0, source]}


def test_what_takes_no_time_is_no_cost() -> None:
    with pytest.raises(ValueError, match=r"load_ns is -1\.0 on H200"):
        gpu_costs.costs_of({"device": "H200", "samples": {"load_ns": [-1.0, -2.0, 5.0]}})


def test_a_program_that_fails_leaves_no_costs(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"gpu_costs\.cu ended with 3"):
        run(tmp_path, "echo no GPU >&2; exit 3")
    assert not (tmp_path / "costs.json").exists()
