"""GPUs and NICs of machines that are made up from what nvidia-smi and /sys say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deep_ep.doctor import gpu, network
from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.host import Ran
from made_up_host import all_named, made_up, named

DRIVER = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module 570.86"}
OPEN_DRIVER = {
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64 570.86"
}
QUERY = "nvidia-smi --query-gpu=index,name,compute_cap,memory.total,mig.mode.current,driver_version --format=csv,noheader"
HOPPER = "{}, NVIDIA H200, 9.0, 143771 MiB, Disabled, 570.86.15\n"
# As the driver prints it: tabs, and an underlined header.
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \t{link}\tPIX\t{far}\t0-47\t0\n"
    "GPU1\t{link}\t X \t{far}\t{near}\t48-95\t1\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\n"
    "NIC1\tSYS\tPIX\tSYS\t X \t\t\n\n"
    "Legend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
P2P = " \tGPU0\tGPU1\t\nGPU0\tX\t{0}\t\nGPU1\t{0}\tX\t\n\nLegend:\n\n  OK   = Status Ok\n"
HOPPERS: dict[str, str | Ran] = {
    QUERY: HOPPER.format(0) + HOPPER.format(1),
    "nvidia-smi": "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8 |",
    "nvidia-smi topo -m": MATRIX.format(link="NV18", far="SYS", near="PIX"),
    "nvidia-smi topo -p2p r": P2P.format("OK"),
    "nvidia-smi nvlink -s -i 0": "GPU 0: H200\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n",
}


def torch_for(cuda: str) -> dict[str, Any]:
    return {"load": lambda name: SimpleNamespace(version=SimpleNamespace(cuda=cuda))}


def look(
    tmp_path: Path, cuda: str = "12.8", commands: dict[str, str] | None = None
) -> list[Finding]:
    """The GPUs of a machine with two H200, where `commands` say something else."""
    return gpu.check(made_up(tmp_path, DRIVER, {**HOPPERS, **(commands or {})}, **torch_for(cuda)))


def test_a_machine_without_gpus_is_ok(tmp_path: Path) -> None:
    (found,) = gpu.check(made_up(tmp_path))
    assert (found.name, found.status) == ("GPU", OK)


def test_a_driver_that_does_not_answer_fails_in_its_own_words(tmp_path: Path) -> None:
    words = "Failed to initialize NVML: Driver/library version mismatch"
    (found,) = gpu.check(made_up(tmp_path, DRIVER, {"nvidia-smi": Ran(18, words)}))
    assert (found.status, words in found.found) == (FAIL, True)


def test_a_driver_that_lists_no_gpu_fails(tmp_path: Path) -> None:
    (found,) = look(tmp_path, commands={QUERY: ""})
    assert (found.status, "there is no GPU" in found.found) == (FAIL, True)


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
    ("row", "status", "said"),
    [
        ("0, NVIDIA A100, 8.0, 40960 MiB, Disabled, 570.86", FAIL, "compute capability 8.0"),
        ("0, NVIDIA B200, 10.0, 183359 MiB, Disabled, 570.86", WARN, "compute capability 10.0"),
        ("0, NVIDIA H100, 9.0, 81559 MiB, Enabled, 570.86", WARN, "divided by MIG"),
    ],
)
def test_gpus_that_the_build_does_not_fit_are_named(
    tmp_path: Path, row: str, status: str, said: str
) -> None:
    found = named(look(tmp_path, commands={QUERY: row}), "GPU")
    assert (found.status, said in found.found) == (status, True)


def test_a_pair_without_nvlink_is_named(tmp_path: Path) -> None:
    found = named(
        look(
            tmp_path,
            commands={"nvidia-smi topo -m": MATRIX.format(link="SYS", far="SYS", near="PIX")},
        ),
        "NVLink",
    )
    assert (found.status, found.found.startswith("not between GPU0-GPU1 (SYS)")) == (WARN, True)


def test_a_pair_that_may_not_reach_each_other_fails_with_the_reason(tmp_path: Path) -> None:
    found = named(look(tmp_path, commands={"nvidia-smi topo -p2p r": P2P.format("CNS")}), "P2P")
    assert found.status == FAIL
    assert "GPU0-GPU1: the chipset does not support it" in found.found
    assert "ACS" in found.repair


def test_a_fabric_that_has_not_started_fails(tmp_path: Path) -> None:
    query = "nvidia-smi --query-gpu=index,fabric.state --format=csv,noheader"
    found = named(look(tmp_path, commands={query: "0, In Progress\n1, Completed\n"}), "fabric")
    assert (found.status, found.found) == (FAIL, "GPU 0 is In Progress")


# ---- network

PORT = "/sys/class/infiniband/{}/ports/1"


def device(name: str, link: str = "InfiniBand", state: str = "4: ACTIVE") -> dict[str, str]:
    """What /sys says of a ConnectX-7."""
    port = PORT.format(name)
    return {
        f"/sys/class/infiniband/{name}/fw_ver": "28.39.1002",
        f"/sys/class/infiniband/{name}/hca_type": "MT4129",
        f"/sys/class/infiniband/{name}/device/vendor": "0x15b3",
        f"/sys/class/infiniband/{name}/device/numa_node": "0",
        f"{port}/state": state,
        f"{port}/link_layer": link,
        f"{port}/rate": "400 Gb/sec (4X NDR)",
        f"/dev/infiniband/uverbs{name[-1]}": "",
    }


HOST_FILES = {
    "/usr/lib/x86_64-linux-gnu/libmlx5.so.1.25.50.0": "MLX5_1.24\0MLX5_1.25",
    "/proc/driver/nvidia/params": 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"',
    "/proc/modules": "nvidia_peermem 16384 0 - Live 0x0",
    "/proc/sys/kernel/osrelease": "5.15.0-94-generic",
}


def network_of(
    tmp_path: Path, *files: dict[str, str], driver: dict[str, str] = DRIVER, **environment: str
) -> list[Finding]:
    """Findings on a machine with one active NIC and all that IBGDA needs, where `files` say otherwise."""
    texts = {**device("mlx5_0"), **HOST_FILES, **driver}
    for changed in files:
        texts.update(changed)
    return network.check(made_up(tmp_path, texts, environment=environment))


def test_a_machine_with_all_that_ibgda_needs_is_ok(tmp_path: Path) -> None:
    findings = network_of(tmp_path)
    assert {finding.status for finding in findings} == {OK}
    found = named(findings, "RDMA device").found
    assert "MT4129, firmware 28.39.1002" in found
    assert "ACTIVE, InfiniBand, 400 Gb/sec" in found


def test_no_devices_fail_only_where_ranks_are_on_several_hosts(tmp_path: Path) -> None:
    one = made_up(tmp_path / "one", DRIVER)
    assert named(network.check(one), "RDMA devices").status == OK
    world = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    several = made_up(tmp_path / "several", DRIVER, environment=world)
    assert named(network.check(several), "RDMA devices").status == FAIL


def test_a_port_that_is_down_is_named_and_all_down_fail(tmp_path: Path) -> None:
    findings = network_of(tmp_path / "one", device("mlx5_1", state="1: DOWN"))
    states = {finding.found[:6]: finding.status for finding in all_named(findings, "RDMA device")}
    assert states == {"mlx5_0": OK, "mlx5_1": WARN}
    findings = network_of(tmp_path / "all", device("mlx5_0", state="1: DOWN"))
    assert named(findings, "RDMA devices").status == FAIL


def test_devices_that_cannot_be_opened_fail(tmp_path: Path) -> None:
    files = {**device("mlx5_0"), **HOST_FILES}
    del files["/dev/infiniband/uverbs0"]
    found = named(network.check(made_up(tmp_path, files)), "RDMA access")
    assert (found.status, "DEVX" in found.why) == (FAIL, True)
    assert "--device=/dev/infiniband" in found.repair


def test_gids_of_ethernet_are_compared_with_the_variable(tmp_path: Path) -> None:
    port = PORT.format("mlx5_0")
    gids = {
        **device("mlx5_0", link="Ethernet"),
        f"{port}/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001",
        f"{port}/gid_attrs/types/0": "IB/RoCE v1",
        f"{port}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001",
        f"{port}/gid_attrs/types/3": "RoCE v2",
        f"{port}/gids/4": "0000:0000:0000:0000:0000:0000:0000:0000",
        f"{port}/gid_attrs/types/4": "RoCE v2",
    }
    right = named(network_of(tmp_path / "right", gids), "GID")
    assert (right.status, right.found) == (OK, "mlx5_0 port 1: RoCE v2 at 3")
    wrong = named(network_of(tmp_path / "wrong", gids, NVSHMEM_IB_GID_INDEX="0"), "GID")
    assert (wrong.status, wrong.repair) == (FAIL, "export NVSHMEM_IB_GID_INDEX=3")
    none = named(network_of(tmp_path / "none", device("mlx5_0", link="Ethernet")), "GID")
    assert (none.status, "no GID of RoCE v2" in none.found) == (FAIL, True)


def test_error_counters_above_zero_are_named(tmp_path: Path) -> None:
    port = PORT.format("mlx5_0")
    counters = {f"{port}/counters/link_downed": "3", f"{port}/hw_counters/req_cqe_error": "7"}
    found = named(network_of(tmp_path, counters), "RDMA errors")
    assert found.status == WARN
    assert "port 1 link_downed 3, port 1 req_cqe_error 7" in found.found
    assert "loses rows" in found.why


def test_an_old_libmlx5_is_named(tmp_path: Path) -> None:
    old = {"/usr/lib/x86_64-linux-gnu/libmlx5.so.1.25.50.0": "MLX5_1.24"}
    found = named(network_of(tmp_path, old), "libmlx5")
    assert (found.status, "no symbols MLX5_1.25" in found.found) == (WARN, True)


def test_missing_options_of_the_driver_are_named_with_the_line_that_sets_them(
    tmp_path: Path,
) -> None:
    found = named(
        network_of(tmp_path, {"/proc/driver/nvidia/params": "EnableStreamMemOPs: 1"}),
        "driver options",
    )
    assert found.status == WARN
    assert 'lacks NVreg_RegistryDwords="PeerMappingOverride=1;"' in found.found
    assert "/etc/modprobe.d/" in found.repair


@pytest.mark.parametrize(
    ("driver", "modules", "status"),
    [
        (DRIVER, "nvidia_peermem 16384 0", OK),
        (DRIVER, "", FAIL),
        (OPEN_DRIVER, "", OK),
    ],
)
def test_gpu_memory_is_registered_by_peermem_or_dma_buf(
    tmp_path: Path, driver: dict[str, str], modules: str, status: str
) -> None:
    findings = network_of(tmp_path, {"/proc/modules": modules}, driver=driver)
    found = named(findings, "GPUDirect RDMA")
    assert found.status == status
    assert ("modprobe nvidia_peermem" in found.repair) == (status == FAIL)


@pytest.mark.parametrize(
    ("near", "status", "said"),
    [
        ("PIX", OK, "GPU0 mlx5_0 (PIX), GPU1 mlx5_1 (PIX)"),
        ("SYS", WARN, "GPU1 has none on its side"),
    ],
)
def test_the_nearest_nic_of_each_gpu_is_told(
    tmp_path: Path, near: str, status: str, said: str
) -> None:
    matrix = MATRIX.format(link="NV18", far="SYS", near=near)
    files = {**device("mlx5_0"), **HOST_FILES, **DRIVER}
    host = made_up(tmp_path, files, {"nvidia-smi topo -m": matrix})
    found = named(network.check(host), "NIC of each GPU")
    assert (found.status, said in found.found) == (status, True)
