"""The checks of the network: can ranks on different hosts exchange rows?

Such rows go over RDMA with IBGDA, which means that a GPU kernel writes to the NIC itself. That takes four things:

- a NIC whose port is up and has an address (GID), and which counts no errors;
- permission to open the NIC;
- libmlx5 and options of the NVIDIA driver with which a kernel may write to it;
- a way for the NIC to read and write GPU memory.

There is a check for each, and one that says which NICs are nearest to each GPU. Nothing is sent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from deep_ep.doctor.checks import Finding, Table, fail, ok, warn
from deep_ep.doctor.gpu import topology
from deep_ep.doctor.host import Host, version_numbers

CHECKS = Table()
_SYS = "/sys/class/infiniband"
_MELLANOX = "0x15b3"
# Counters of a port that only grow when something goes wrong.
_ERRORS = (
    "counters/symbol_error",
    "counters/link_downed",
    "counters/link_error_recovery",
    "counters/port_rcv_errors",
    "counters/local_link_integrity_errors",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/packet_seq_err",
    "hw_counters/out_of_sequence",
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/req_cqe_error",
    "hw_counters/resp_cqe_error",
)
_LIBRARY_FOLDERS = "/usr/lib/x86_64-linux-gnu:/usr/lib/aarch64-linux-gnu:/usr/lib64:/lib64:/usr/lib"
# The newest version of its symbols that NVSHMEM's IBGDA asks for.
_MLX5_SYMBOLS = b"MLX5_1.25"
# What IBGDA wants of the driver, and how the driver says that it is set.
_DRIVER_OPTIONS = {
    "NVreg_EnableStreamMemOPs=1": r"^EnableStreamMemOPs: 1",
    'NVreg_RegistryDwords="PeerMappingOverride=1;"': r"^RegistryDwords:.*PeerMappingOverride=1",
}
# What is between a GPU and a NIC, from near to far.
_DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


def _ports(host: Host) -> list[tuple[str, str]]:
    """Of all RDMA devices: "mlx5_0 port 1", and its folder."""
    return [
        (f"{device} port {number}", f"{_SYS}/{device}/ports/{number}")
        for device in host.names(_SYS)
        for number in host.names(f"{_SYS}/{device}/ports")
    ]


def _has_rdma_and_gpus(host: Host) -> bool:
    return host.has_rdma() and host.has_gpu_driver()


# ---- NICs


@CHECKS.row("RDMA ports")
def _port_states(host: Host) -> Iterator[Finding]:
    """Ranks on different hosts are reached over RDMA alone, at the rate of its ports."""
    ports = _ports(host)
    world, local = host.variable("WORLD_SIZE") or 0, host.variable("LOCAL_WORLD_SIZE") or 0
    if not ports and world > local > 0 and host.has_gpu_driver():
        found = f"none, and WORLD_SIZE={world} ranks are on hosts of {local}"
        repair = "load the driver (modprobe mlx5_ib); containers: --device=/dev/infiniband; pods: an RDMA resource"
        yield fail(found, repair=repair)
    elif not ports:
        yield ok("none")
    is_any_active = any("ACTIVE" in host.text(f"{folder}/state") for _, folder in ports)
    for name, folder in ports:
        device = f"{folder}/../.."
        model = f"{host.text(f'{device}/hca_type')}, firmware {host.text(f'{device}/fw_ver')}"
        said = [host.text(f"{folder}/{what}") for what in ("state", "link_layer", "rate")]
        numa_node = host.text(f"{device}/device/numa_node")
        found = f"{name}: {', '.join(said)}; {model}, NUMA node {numa_node}"
        agreed = {f"firmware of {name}": model}
        if "ACTIVE" not in said[0]:
            why = "NVSHMEM leaves it out, and a GPU beside it takes a NIC that is farther away"
            repair = "ibstat; check cable, switch and subnet manager, or ip link set dev NETDEV up"
            yield (warn if is_any_active else fail)(found, why, repair, agreed=agreed)
        elif host.text(f"{device}/device/vendor") not in ("", _MELLANOX):
            why = "IBGDA works with NICs of NVIDIA (ConnectX-4 and newer) alone"
            yield warn(found, why, "list the usable ones in NVSHMEM_HCA_LIST", agreed=agreed)
        else:
            yield ok(found, agreed=agreed)


@CHECKS.row(
    "RDMA access",
    repair="containers: --device=/dev/infiniband --cap-add=IPC_LOCK; else chmod 666 /dev/infiniband/uverbs*",
    when=Host.has_rdma,
)
def _device_access(host: Host) -> Finding:
    """Queue pairs are made through these files (DEVX); without them NVSHMEM sees no NIC, or may not create queues."""
    files = sorted(host.path("/dev/infiniband").glob("uverbs*"))
    closed = [file.name for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if not files:
        return fail("/dev/infiniband has no uverbs files")
    if closed:
        return fail(f"this process may not read and write {', '.join(closed)}")
    return ok(f"{len(files)} devices can be opened")


@CHECKS.row("GID")
def _gids(host: Host) -> Iterator[Finding]:
    """On Ethernet a connection names the GID it leaves by; a wrong one ends in time-outs (status 110, 12)."""
    asked = host.environment.get("NVSHMEM_IB_GID_INDEX", "")
    for name, folder in _ports(host):
        # InfiniBand routes without GIDs, and a port that is down has none.
        is_ethernet = host.text(f"{folder}/link_layer") == "Ethernet"
        if not is_ethernet or "ACTIVE" not in host.text(f"{folder}/state"):
            continue
        usable = [
            index
            for index in sorted(host.names(f"{folder}/gids"), key=int)
            if host.text(f"{folder}/gids/{index}").strip("0:")
            and host.text(f"{folder}/gid_attrs/types/{index}") == "RoCE v2"
        ]
        listed = ", ".join(usable)
        if not usable:
            repair = "give the network device an IP address: ip addr add ADDRESS dev NETDEV; show_gids lists them"
            yield fail(f"{name} has no GID of RoCE v2", repair=repair)
        elif asked and asked not in usable:
            found = f"NVSHMEM_IB_GID_INDEX={asked}, {name} has RoCE v2 at {listed}"
            yield fail(found, repair=f"export NVSHMEM_IB_GID_INDEX={usable[-1]}")
        else:
            yield ok(f"{name}: RoCE v2 at {listed}", agreed={f"GID of {name}": listed})


@CHECKS.row(
    "RDMA errors",
    repair=f"look again after a run, what grew is of that run: grep -H . {_SYS}/DEVICE/ports/*/*counters/*; "
    "then cable, transceiver and flow control (PFC) of that port",
)
def _errors(host: Host) -> Iterator[Finding]:
    """Errors that nobody reports: retransmissions make a path slow, and a completion in error loses rows."""
    for name, folder in _ports(host):
        grown = [
            f"{counter.split('/')[-1]} {count}"
            for counter in _ERRORS
            if (count := host.number(f"{folder}/{counter}"))
        ]
        if grown:
            yield warn(f"{name}: {', '.join(grown)} since its driver was loaded")


# ---- what IBGDA needs


@CHECKS.row(
    "libmlx5",
    repair="apt-get install ibverbs-providers; or a newer rdma-core or OFED",
    when=Host.has_rdma,
)
def _libmlx5(host: Host) -> Finding:
    """NVSHMEM loads it for IBGDA and asks for the symbols MLX5_1.25."""
    own = host.environment.get("LD_LIBRARY_PATH", "")
    for folder in filter(None, f"{own}:{_LIBRARY_FOLDERS}".split(":")):
        # The loader follows the link of this name.
        link = host.path(f"{folder}/libmlx5.so.1")
        if link.exists():
            file = link.resolve()
            found, agreed = f"{folder}/{file.name}", {"libmlx5": file.name}
            if _MLX5_SYMBOLS in file.read_bytes():
                return ok(found, agreed=agreed)
            return warn(f"{found} has no symbols {_MLX5_SYMBOLS.decode()}", agreed=agreed)
    return fail("not found")


@CHECKS.row(
    "driver options",
    repair=f"echo 'options nvidia {' '.join(_DRIVER_OPTIONS)}' > /etc/modprobe.d/nvidia-ibgda.conf && update-initramfs -u && reboot",
    when=_has_rdma_and_gpus,
)
def _driver_options(host: Host) -> Finding:
    """With these options a GPU rings the NIC's doorbell itself; without, NVSHMEM takes a thread of the CPU, or fails."""
    said = host.text("/proc/driver/nvidia/params")
    missing = [
        option
        for option, pattern in _DRIVER_OPTIONS.items()
        if not re.search(pattern, said, re.MULTILINE)
    ]
    if missing:
        found = f"/proc/driver/nvidia/params lacks {' and '.join(missing)}"
        return warn(found, agreed={"driver options": "not set"})
    return ok("set for IBGDA", agreed={"driver options": "set"})


@CHECKS.row(
    "GPUDirect RDMA",
    repair="modprobe nvidia_peermem; or the driver's open kernel modules, with Linux 5.12 or newer",
    when=_has_rdma_and_gpus,
)
def _peer_memory(host: Host) -> Finding:
    """The NIC reads and writes GPU memory through one of the two."""
    modules = host.text("/proc/modules")
    loaded = " and ".join(re.findall(r"^(nvidia_peermem|nv_peer_mem) ", modules, re.MULTILINE))
    kernel = version_numbers(host.text("/proc/sys/kernel/osrelease"))
    is_open = "Open Kernel Module" in host.text("/proc/driver/nvidia/version")
    has_dma_buf = is_open and kernel >= (5, 12)
    found = (
        f"{loaded or 'nvidia_peermem is not loaded'}; "
        f"DMA-BUF {'works' if has_dma_buf else 'does not'}"
    )
    return ok(found) if loaded or has_dma_buf else fail(found)


@CHECKS.row(
    "NIC of each GPU",
    repair="NVSHMEM_ENABLE_NIC_PE_MAPPING=1 with NVSHMEM_HCA_PE_MAPPING chooses; see nvidia-smi topo -m",
    when=_has_rdma_and_gpus,
)
def _nearest_nics(host: Host) -> Iterator[Finding]:
    """A path over the CPU's own links (SYS) has a fraction of a NIC's rate, and GPUs that share one share its rate."""
    near: dict[str, dict[str, str]] = {}
    for (gpu, other), kind in topology(host, "-m").items():
        if kind in _DISTANCES and not other.startswith("GPU"):
            near.setdefault(gpu, {})[other] = kind
    nearest = {
        gpu: (kind, [nic for nic in kinds if kinds[nic] == kind])
        for gpu, kinds in near.items()
        for kind in [min(kinds.values(), key=_DISTANCES.index)]
    }
    alone = [nics[0] for _, nics in nearest.values() if len(nics) == 1]
    shared = sorted({nic for nic in alone if alone.count(nic) > 1})
    bad = [f"{gpu} has none on its side" for gpu, (kind, _) in nearest.items() if kind == "SYS"]
    bad += [f"{nic} is the only near one of {alone.count(nic)} GPUs" for nic in shared]
    found = ", ".join(f"{gpu} {'/'.join(nics)} ({kind})" for gpu, (kind, nics) in nearest.items())
    if nearest:
        yield warn(f"{found}; {', '.join(bad)}") if bad else ok(found)
