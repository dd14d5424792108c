"""NICs of machines that are made up from what /sys, /proc and nvidia-smi say."""

from __future__ import annotations

from pathlib import Path

import pytest

from deep_ep.doctor import network
from deep_ep.doctor.checks import FAIL, OK, WARN, Finding, examine
from made_up_host import DRIVER, MATRIX, all_named, made_up, named

OPEN_DRIVER = {
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64 570.86"
}
PORT = "/sys/class/infiniband/{}/ports/1"
MLX5 = "/usr/lib/x86_64-linux-gnu/libmlx5.so.1"
PARAMETERS = "/proc/driver/nvidia/params"


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


# One active NIC and all that IBGDA needs.
READY = {
    **device("mlx5_0"),
    **DRIVER,
    MLX5: "MLX5_1.24\0MLX5_1.25",
    PARAMETERS: 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"',
    "/proc/modules": "nvidia_peermem 16384 0 - Live 0x0",
    "/proc/sys/kernel/osrelease": "5.15.0-94-generic",
}


def look(tmp_path: Path, *files: dict[str, str], **environment: str) -> list[Finding]:
    """The network of a machine that is ready, where `files` say otherwise."""
    texts = {path: text for some in (READY, *files) for path, text in some.items()}
    return examine(network.CHECKS, made_up(tmp_path, texts, environment=environment))


def test_a_machine_with_all_that_ibgda_needs_is_ok(tmp_path: Path) -> None:
    findings = look(tmp_path)
    assert {finding.status for finding in findings} == {OK}
    found = named(findings, "RDMA ports").found
    assert "MT4129, firmware 28.39.1002" in found
    assert "ACTIVE, InfiniBand, 400 Gb/sec" in found


@pytest.mark.parametrize(
    ("environment", "status"),
    [({}, OK), ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, FAIL)],
)
def test_no_devices_fail_only_where_ranks_are_on_several_hosts(
    tmp_path: Path, environment: dict[str, str], status: str
) -> None:
    (found,) = examine(network.CHECKS, made_up(tmp_path, DRIVER, environment=environment))
    assert (found.name, found.status) == ("RDMA ports", status)


def test_a_port_that_is_down_is_named_and_all_down_fail(tmp_path: Path) -> None:
    findings = look(tmp_path / "one", device("mlx5_1", state="1: DOWN"))
    states = {finding.found[:6]: finding.status for finding in all_named(findings, "RDMA ports")}
    assert states == {"mlx5_0": OK, "mlx5_1": WARN}
    findings = look(tmp_path / "all", device("mlx5_0", state="1: DOWN"))
    assert named(findings, "RDMA ports").status == FAIL


def test_a_port_that_is_down_needs_no_gid(tmp_path: Path) -> None:
    findings = look(tmp_path, device("mlx5_1", link="Ethernet", state="1: DOWN"))
    assert not all_named(findings, "GID")


def test_devices_that_cannot_be_opened_fail(tmp_path: Path) -> None:
    files = {path: text for path, text in READY.items() if "uverbs" not in path}
    found = named(examine(network.CHECKS, made_up(tmp_path, files)), "RDMA access")
    assert (found.status, "--device=/dev/infiniband" in found.repair) == (FAIL, True)


ETHERNET = device("mlx5_0", link="Ethernet")
PORT_0 = PORT.format("mlx5_0")
GIDS = {
    **ETHERNET,
    f"{PORT_0}/gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001",
    f"{PORT_0}/gid_attrs/types/0": "IB/RoCE v1",
    f"{PORT_0}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001",
    f"{PORT_0}/gid_attrs/types/3": "RoCE v2",
    f"{PORT_0}/gids/4": "0000:0000:0000:0000:0000:0000:0000:0000",
    f"{PORT_0}/gid_attrs/types/4": "RoCE v2",
}
COUNTERS = {f"{PORT_0}/counters/link_downed": "3", f"{PORT_0}/hw_counters/req_cqe_error": "7"}


@pytest.mark.parametrize(
    ("files", "environment", "name", "status", "found", "repair"),
    [
        (GIDS, {}, "GID", OK, "mlx5_0 port 1: RoCE v2 at 3", ""),
        (
            *(GIDS, {"NVSHMEM_IB_GID_INDEX": "0"}, "GID", FAIL, "mlx5_0 port 1 has RoCE v2 at 3"),
            "export NVSHMEM_IB_GID_INDEX=3",
        ),
        (ETHERNET, {}, "GID", FAIL, "no GID of RoCE v2", "ip addr add"),
        (
            *(COUNTERS, {}, "RDMA errors", WARN),
            *("mlx5_0 port 1: link_downed 3, req_cqe_error 7", "flow control (PFC)"),
        ),
        ({MLX5: "MLX5_1.24"}, {}, "libmlx5", WARN, "no symbols MLX5_1.25", "rdma-core"),
        (
            *({PARAMETERS: "EnableStreamMemOPs: 1"}, {}, "driver options", WARN),
            *('lacks NVreg_RegistryDwords="PeerMappingOverride=1;"', "/etc/modprobe.d/"),
        ),
        (
            *({"/proc/modules": ""}, {}, "GPUDirect RDMA", FAIL),
            *("nvidia_peermem is not loaded; DMA-BUF does not", "modprobe nvidia_peermem"),
        ),
        (
            *({"/proc/modules": "", **OPEN_DRIVER}, {}, "GPUDirect RDMA", OK),
            *("nvidia_peermem is not loaded; DMA-BUF works", ""),
        ),
    ],
)
def test_what_a_network_lacks_is_named_with_what_repairs_it(
    tmp_path: Path,
    files: dict[str, str],
    environment: dict[str, str],
    name: str,
    status: str,
    found: str,
    repair: str,
) -> None:
    line = named(look(tmp_path, files, **environment), name)
    assert (line.status, found in line.found, repair in line.repair) == (status, True, True)


def test_the_libmlx5_is_the_one_that_the_loader_follows(tmp_path: Path) -> None:
    newer, older = f"{MLX5}.25.50.0", f"{MLX5}.9.40.0"
    link = tmp_path / MLX5.lstrip("/")
    link.parent.mkdir(parents=True)
    link.symlink_to(Path(newer).name)
    found = named(look(tmp_path, {newer: "MLX5_1.25", older: "MLX5_1.9"}), "libmlx5")
    assert (found.status, found.found) == (OK, newer)


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
    matrix = MATRIX.format(link="NV18", near=near)
    host = made_up(tmp_path, READY, {"nvidia-smi topo -m": matrix})
    found = named(examine(network.CHECKS, host), "NIC of each GPU")
    assert (found.status, said in found.found) == (status, True)
