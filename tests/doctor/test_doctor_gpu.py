"""GPUs of machines that are made up from what nvidia-smi says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from deep_ep.doctor import gpu
from deep_ep.doctor.checks import FAIL, OK, WARN, Finding, examine
from deep_ep.doctor.host import Ran
from made_up_host import DRIVER, MATRIX, made_up, named

QUERY = "nvidia-smi --query-gpu={} --format=csv,noheader"
GPUS = QUERY.format("index,name,compute_cap,memory.total,mig.mode.current,driver_version")
FABRIC = QUERY.format("index,fabric.state")
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
HOPPER = "{}, NVIDIA H200, 9.0, 143771 MiB, Disabled, 570.86.15\n"
P2P = " \tGPU0\tGPU1\t\nGPU0\tX\t{0}\t\nGPU1\t{0}\tX\t\n\nLegend:\n\n  OK   = Status Ok\n"
HOPPERS: dict[str, str | Ran] = {
    GPUS: HOPPER.format(0) + HOPPER.format(1),
    "nvidia-smi": "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8 |",
    "nvidia-smi topo -m": MATRIX.format(link="NV18", near="PIX"),
    "nvidia-smi topo -p2p r": P2P.format("OK"),
    "nvidia-smi nvlink -s -i 0": "GPU 0: H200\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n",
}


def look(
    tmp_path: Path, commands: dict[str, str | Ran] | None = None, cuda: str = "12.8"
) -> list[Finding]:
    """The GPUs of a machine with two H200, where `commands` say something else."""
    torch = SimpleNamespace(version=SimpleNamespace(cuda=cuda))
    host = made_up(tmp_path, DRIVER, {**HOPPERS, **(commands or {})}, load=lambda name: torch)
    return examine(gpu.CHECKS, host)


def gpu_of(model: str) -> dict[str, str]:
    """What nvidia-smi says where there is one GPU."""
    return {GPUS: f"0, NVIDIA {model}, 570.86"}


def test_a_machine_without_gpus_is_ok(tmp_path: Path) -> None:
    (found,) = examine(gpu.CHECKS, made_up(tmp_path))
    assert (found.name, found.status) == ("GPU", OK)


def test_two_hoppers_with_nvlink_are_ok_and_their_bandwidth_is_told(tmp_path: Path) -> None:
    findings = look(tmp_path)
    assert {finding.status for finding in findings} == {OK}
    assert named(findings, "driver").found == "570.86.15, serves CUDA up to 12.8"
    assert named(findings, "GPU").found.startswith("0, 1: NVIDIA H200, compute capability 9.0")
    found = named(findings, "NVLink").found
    assert found == "between all 1 pairs: NV18; 53 GB/s each way are expected of a GPU"
    assert named(findings, "P2P").found == "allowed between all 1 pairs"


def test_a_torch_newer_than_the_driver_fails(tmp_path: Path) -> None:
    found = named(look(tmp_path, cuda="13.0"), "driver")
    assert found.status == FAIL
    assert found.found.endswith("serves CUDA up to 12.8; torch is built for CUDA 13.0")


@pytest.mark.parametrize(
    ("answers", "name", "status", "said"),
    [
        (dict.fromkeys(HOPPERS, Ran(18, MISMATCH)), "GPU", FAIL, MISMATCH),
        ({GPUS: ""}, "GPU", FAIL, "there is no GPU"),
        (gpu_of("A100, 8.0, 40960 MiB, Disabled"), "GPU", FAIL, "compute capability 8.0"),
        (gpu_of("B200, 10.0, 183359 MiB, Disabled"), "GPU", WARN, "compute capability 10.0"),
        (gpu_of("H100, 9.0, 81559 MiB, Enabled"), "GPU", WARN, "divided by MIG"),
        (
            {"nvidia-smi topo -m": MATRIX.format(link="SYS", near="PIX")},
            *("NVLink", WARN, "not between GPU0-GPU1 (SYS)"),
        ),
        ({"nvidia-smi topo -p2p r": P2P.format("CNS")}, "P2P", FAIL, "GPU0-GPU1 (CNS)"),
        ({FABRIC: "0, In Progress\n1, Completed\n"}, "fabric", FAIL, "GPU 0 is In Progress"),
    ],
)
def test_what_does_not_work_is_named(
    tmp_path: Path, answers: dict[str, str | Ran], name: str, status: str, said: str
) -> None:
    found = named(look(tmp_path, answers), name)
    assert (found.status, said in found.found) == (status, True)
    assert "GPU 1" not in found.found
