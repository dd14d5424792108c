"""The checks of the network: can ranks on different hosts exchange rows?

Such rows go over RDMA with IBGDA, which means that a GPU kernel writes to the NIC itself. That takes four things:

- a NIC whose port is up and has an address (GID), and which counts no errors;
- permission to open the NIC;
- libmlx5 and options of the NVIDIA driver with which a kernel may write to it;
- a way for the NIC to read and write GPU memory.

There is a check for each, and one that says which NICs are nearest to each GPU. Nothing is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from deep_ep.doctor.checks import Finding, Table, fail, ok, warn
from deep_ep.doctor.gpu import topology
from deep_ep.doctor.host import Host, version_numbers

CHECKS = Table()
_SYS = "/sys/class/infiniband"
_MELLANOX = "0x15b3"
_WHY_RDMA = "ranks on different hosts are reached over RDMA alone"
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
_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
)
# The newest version of its symbols that NVSHMEM's IBGDA asks for.
_MLX5_SYMBOLS = "MLX5_1.25"
# What IBGDA wants of the driver, and how the driver says that it is set.
_DRIVER_OPTIONS = {
    "NVreg_EnableStreamMemOPs=1": r"^EnableStreamMemOPs: 1",
    'NVreg_RegistryDwords="PeerMappingOverride=1;"': r"^RegistryDwords:.*PeerMappingOverride=1",
}
# What is between a GPU and a NIC, from near to far.
_DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


def _ports(host: Host, *devices: str) -> list[tuple[str, str, str]]:
    """Device, number and folder of each port: of these devices, or of all."""
    return [
        (device, number, f"{_SYS}/{device}/ports/{number}")
        for device in devices or host.names(_SYS)
        for number in host.names(f"{_SYS}/{device}/ports")
    ]


def _has_rdma_and_gpus(host: Host) -> bool:
    return host.has_rdma() and host.has_gpu_driver()


# ---- NICs


@CHECKS.row("RDMA device", why="the rate of a port limits what ranks of other hosts can get")
def _devices(host: Host) -> Iterator[Finding]:
    for device in host.names(_SYS):
        folder = f"{_SYS}/{device}"
        ports = "; ".join(_state(host, number, port) for _, number, port in _ports(host, device))
        firmware = host.text(f"{folder}/fw_ver") or "unknown"
        model = host.text(f"{folder}/hca_type") or "unknown model"
        node = host.text(f"{folder}/device/numa_node") or "unknown"
        found = f"{device}: {model}, firmware {firmware}, NUMA node {node}; {ports}"
        agreed = {f"firmware of {device}": f"{model} {firmware}"}
        if "ACTIVE" not in ports:
            why = "NVSHMEM leaves it out, and a GPU beside it takes a NIC that is farther away"
            repair = f"ibstat {device}; check cable, switch and subnet manager, or ip link set dev NETDEV up"
            yield warn(found, why, repair, agreed=agreed)
        elif host.text(f"{folder}/device/vendor") not in ("", _MELLANOX):
            why = "IBGDA works with NICs of NVIDIA (ConnectX-4 and newer) alone"
            yield warn(found, why, "list the usable ones in NVSHMEM_HCA_LIST", agreed=agreed)
        else:
            yield ok(found, agreed=agreed)


def _state(host: Host, number: str, folder: str) -> str:
    state, link, rate = (
        host.text(f"{folder}/{name}") or "?" for name in ("state", "link_layer", "rate")
    )
    return f"port {number} {state.split(': ')[-1]}, {link}, {rate}"


@CHECKS.row("RDMA devices", why=_WHY_RDMA)
def _any_device(host: Host) -> Iterator[Finding]:
    world, local = host.variable("WORLD_SIZE"), host.variable("LOCAL_WORLD_SIZE")
    if host.has_rdma():
        if not any("ACTIVE" in host.text(f"{folder}/state") for _, _, folder in _ports(host)):
            repair = "ibstat; check cables, switch and subnet manager"
            yield fail("no port is ACTIVE", repair=repair)
    elif world is not None and local is not None and world > local and host.has_gpu_driver():
        yield fail(
            f"none, and WORLD_SIZE={world} ranks are on hosts of {local}",
            repair="load the driver (modprobe mlx5_ib); containers: --device=/dev/infiniband; pods: an RDMA resource",
        )
    else:
        yield ok("none")


@CHECKS.row(
    "RDMA access",
    why="queue pairs are made through these files (DEVX); without them NVSHMEM sees no NIC, or may not create queues",
    repair="containers: --device=/dev/infiniband --cap-add=IPC_LOCK; else chmod 666 /dev/infiniband/uverbs*",
    when=Host.has_rdma,
)
def _device_access(host: Host) -> Finding:
    names = [name for name in host.names("/dev/infiniband") if name.startswith("uverbs")]
    closed = host.closed([f"/dev/infiniband/{name}" for name in names])
    if not names:
        return fail("/dev/infiniband has no uverbs files")
    if closed:
        return fail(f"this process may not read and write {', '.join(closed)}")
    return ok(f"{len(names)} devices can be opened")


@CHECKS.row(
    "GID",
    why="on Ethernet a connection names the GID it leaves by; a wrong one ends in time-outs (status 110, 12)",
)
def _gids(host: Host) -> Iterator[Finding]:
    """GIDs of the Ethernet ports; InfiniBand routes without them."""
    asked = host.environment.get("NVSHMEM_IB_GID_INDEX", "")
    for device, number, folder in _ports(host):
        if host.text(f"{folder}/link_layer") != "Ethernet":
            continue
        usable = [
            index
            for index in sorted(host.names(f"{folder}/gids"), key=lambda name: (len(name), name))
            if host.text(f"{folder}/gids/{index}").strip("0:")
            and host.text(f"{folder}/gid_attrs/types/{index}") == "RoCE v2"
        ]
        listed = ", ".join(usable)
        if not usable:
            yield fail(
                f"{device} port {number} has no GID of RoCE v2",
                repair="give the network device an IP address: ip addr add ADDRESS dev NETDEV; show_gids lists them",
            )
        elif asked and asked not in usable:
            yield fail(
                f"NVSHMEM_IB_GID_INDEX={asked}, {device} port {number} has RoCE v2 at {listed}",
                repair=f"export NVSHMEM_IB_GID_INDEX={usable[-1]}",
            )
        else:
            agreed = {f"GID of {device}": listed}
            yield ok(f"{device} port {number}: RoCE v2 at {listed}", agreed=agreed)


@CHECKS.row(
    "RDMA errors",
    why="errors that nobody reports: retransmissions make a path slow, and a completion in error loses rows",
)
def _errors(host: Host) -> Iterator[Finding]:
    """Counters since the driver was loaded, where any is above 0."""
    for device in host.names(_SYS):
        grown = [
            f"port {number} {counter.split('/')[-1]} {count}"
            for _, number, folder in _ports(host, device)
            for counter in _ERRORS
            if (count := host.number(f"{folder}/{counter}"))
        ]
        if grown:
            yield warn(
                f"{device}: {', '.join(grown)} since its driver was loaded",
                repair=f"look again after a run, what grew is of that run: grep -H . {_SYS}/{device}/ports/*/*counters/*; "
                "then cable, transceiver and flow control (PFC) of that port",
            )


# ---- what IBGDA needs


@CHECKS.row(
    "libmlx5",
    why=f"NVSHMEM loads it for IBGDA and asks for the symbols {_MLX5_SYMBOLS}",
    repair="install a newer rdma-core or OFED: apt-get install --only-upgrade ibverbs-providers",
    when=Host.has_rdma,
)
def _libmlx5(host: Host) -> Finding:
    own = host.environment.get("LD_LIBRARY_PATH", "").split(":")
    for folder in (*filter(None, own), *_LIBRARY_FOLDERS):
        names = [name for name in host.names(folder) if name.startswith("libmlx5.so.1")]
        if not names:
            continue
        # The first one is the link that the loader follows.
        library = host.path(f"{folder}/{names[0]}").resolve()
        file = f"{folder}/{library.name}"
        try:
            has_symbols = _MLX5_SYMBOLS.encode() in library.read_bytes()
        except OSError as error:
            return fail(f"{file}: {error.strerror}")
        if has_symbols:
            return ok(file, agreed={"libmlx5": library.name})
        return warn(f"{file} has no symbols {_MLX5_SYMBOLS}")
    return fail("not found", repair="apt-get install ibverbs-providers")


@CHECKS.row(
    "driver options",
    why="with these options a GPU rings the NIC's doorbell itself; without, NVSHMEM takes a thread of the CPU, or fails",
    repair=f"echo 'options nvidia {' '.join(_DRIVER_OPTIONS)}' > /etc/modprobe.d/nvidia-ibgda.conf && update-initramfs -u && reboot",
    when=_has_rdma_and_gpus,
)
def _driver_options(host: Host) -> Finding:
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
    why="the NIC reads and writes GPU memory through one of the two (GPUDirect RDMA)",
    repair="modprobe nvidia_peermem; or the driver's open kernel modules, with Linux 5.12 or newer",
    when=_has_rdma_and_gpus,
)
def _peer_memory(host: Host) -> Finding:
    modules = {row.split(" ")[0] for row in host.text("/proc/modules").splitlines()}
    loaded = " and ".join(sorted(modules & {"nvidia_peermem", "nv_peer_mem"}))
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
    why="a path over the CPU's own links (SYS) has a fraction of a NIC's rate, and GPUs that share one share its rate",
    repair="NVSHMEM_ENABLE_NIC_PE_MAPPING=1 with NVSHMEM_HCA_PE_MAPPING chooses; see nvidia-smi topo -m",
    when=_has_rdma_and_gpus,
)
def _nearest_nics(host: Host) -> Iterator[Finding]:
    matrix = topology(host, "-m")
    nearest: dict[str, tuple[str, list[str]]] = {}
    for gpu, kinds in matrix.cells.items():
        near = {matrix.nics[nic]: kind for nic, kind in kinds.items() if nic in matrix.nics}
        distances = [kind for kind in _DISTANCES if kind in near.values()]
        if gpu.startswith("GPU") and distances:
            names = [nic for nic, kind in near.items() if kind == distances[0]]
            nearest[gpu] = (distances[0], names)
    alone = [nics[0] for _, nics in nearest.values() if len(nics) == 1]
    shared = sorted({nic for nic in alone if alone.count(nic) > 1})
    bad = [f"{gpu} has none on its side" for gpu, (kind, _) in nearest.items() if kind == "SYS"]
    bad += [f"{nic} is the only near one of {alone.count(nic)} GPUs" for nic in shared]
    found = ", ".join(f"{gpu} {'/'.join(nics)} ({kind})" for gpu, (kind, nics) in nearest.items())
    if bad:
        yield warn(f"{found}; {', '.join(bad)}")
    elif nearest:
        yield ok(found)
