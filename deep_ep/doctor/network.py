"""The doctor's checks of the network: can ranks on different hosts exchange rows over RDMA?

Rows between hosts go over RDMA with IBGDA: GPU kernels write to the NIC themselves, without the CPU. `check` looks
whether the host has RDMA devices, whether their ports are up, have GIDs and count no errors, and whether this user
may open them. Then it looks at what IBGDA needs besides: a new enough libmlx5, options of the NVIDIA driver, and
GPU memory that a NIC can read. It also says which NICs are nearest to each GPU. Everything is read from the files
and tools of a `Host`; nothing is sent.
"""

from __future__ import annotations

import os
import re

from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.gpu import topology
from deep_ep.doctor.host import Host, version_numbers

_SYS = "/sys/class/infiniband"
_MELLANOX = "0x15b3"
_WHY_RDMA = "ranks on different hosts are reached over RDMA alone"
# Counters of a port that only grow when something goes wrong.
_ERRORS = {
    "counters": (
        "symbol_error",
        "link_downed",
        "link_error_recovery",
        "port_rcv_errors",
        "local_link_integrity_errors",
    ),
    "hw_counters": (
        "local_ack_timeout_err",
        "packet_seq_err",
        "out_of_sequence",
        "rnr_nak_retry_err",
        "req_cqe_error",
        "resp_cqe_error",
    ),
}
_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
)
# The newest version of its symbols that NVSHMEM's IBGDA asks for.
_MLX5_SYMBOLS = "MLX5_1.25"
# What is between a GPU and a NIC, from near to far.
_DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


def check(host: Host) -> list[Finding]:
    """All findings on the network."""
    devices = host.names(_SYS)
    if not devices:
        return [_no_devices(host)]
    findings = [*_state(host, devices), _device_access(host)]
    for device in devices:
        findings += [*_gids(host, device), *_errors(host, device)]
    findings.append(_libmlx5(host))
    if host.has_gpu_driver():
        findings += [_driver_options(host), _peer_memory(host), *_nearest(host)]
    return findings


def _no_devices(host: Host) -> Finding:
    world, local = (host.environment.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if (
        world.isdecimal()
        and local.isdecimal()
        and int(world) > int(local)
        and host.has_gpu_driver()
    ):
        found = f"none, and WORLD_SIZE={world} ranks are on hosts of {local}"
        repair = "load the driver (modprobe mlx5_ib); containers: --device=/dev/infiniband; pods: an RDMA resource"
        return Finding("RDMA devices", FAIL, found, _WHY_RDMA, repair)
    return Finding("RDMA devices", OK, "none", _WHY_RDMA)


# ---- devices


def _state(host: Host, devices: list[str]) -> list[Finding]:
    findings, active = [], 0
    for device in devices:
        ports = {port: _port(host, device, port) for port in host.names(f"{_SYS}/{device}/ports")}
        is_active = any("ACTIVE" in text for text in ports.values())
        active += is_active
        firmware = host.text(f"{_SYS}/{device}/fw_ver") or "unknown"
        model = host.text(f"{_SYS}/{device}/hca_type") or "unknown model"
        vendor = host.text(f"{_SYS}/{device}/device/vendor") or ""
        node = host.text(f"{_SYS}/{device}/device/numa_node") or "unknown"
        found = (
            f"{device}: {model}, firmware {firmware}, NUMA node {node}; {'; '.join(ports.values())}"
        )
        why, status, repair = "the rate of a port limits what ranks of other hosts can get", OK, ""
        if not is_active:
            why, status = (
                "NVSHMEM leaves it out, and a GPU beside it takes a NIC that is farther away",
                WARN,
            )
            repair = f"ibstat {device}; check cable, switch and subnet manager, or ip link set dev NETDEV up"
        elif vendor and vendor != _MELLANOX:
            why, status = "IBGDA works with NICs of NVIDIA (ConnectX-4 and newer) alone", WARN
            repair = "list the usable ones in NVSHMEM_HCA_LIST"
        agreed = {f"firmware of {device}": f"{model} {firmware}"}
        findings.append(Finding("RDMA device", status, found, why, repair, agreed=agreed))
    if not active:
        repair = "ibstat; check cables, switch and subnet manager"
        findings.append(Finding("RDMA devices", FAIL, "no port is ACTIVE", _WHY_RDMA, repair))
    return findings


def _port(host: Host, device: str, port: str) -> str:
    folder = f"{_SYS}/{device}/ports/{port}"
    state, link, rate = (
        host.text(f"{folder}/{name}") or "?" for name in ("state", "link_layer", "rate")
    )
    return f"port {port} {state.split(': ')[-1]}, {link}, {rate}"


def _device_access(host: Host) -> Finding:
    names = [name for name in host.names("/dev/infiniband") if name.startswith("uverbs")]
    files = [f"/dev/infiniband/{name}" for name in names]
    closed = [file for file in files if not os.access(host.path(file), os.R_OK | os.W_OK)]
    why = "queue pairs are made through these files (DEVX); without them NVSHMEM sees no NIC, or may not create queues"
    repair = "containers: --device=/dev/infiniband --cap-add=IPC_LOCK; else chmod 666 /dev/infiniband/uverbs*"
    if not files:
        return Finding("RDMA access", FAIL, "/dev/infiniband has no uverbs files", why, repair)
    if closed:
        found = f"this process may not read and write {', '.join(closed)}"
        return Finding("RDMA access", FAIL, found, why, repair)
    return Finding("RDMA access", OK, f"{len(files)} devices can be opened", why)


def _gids(host: Host, device: str) -> list[Finding]:
    """GIDs of the Ethernet ports; InfiniBand routes without them."""
    findings = []
    for port in host.names(f"{_SYS}/{device}/ports"):
        folder = f"{_SYS}/{device}/ports/{port}"
        if host.text(f"{folder}/link_layer") != "Ethernet":
            continue
        usable = [
            index
            for index in sorted(host.names(f"{folder}/gids"), key=lambda name: (len(name), name))
            if (host.text(f"{folder}/gids/{index}") or "").strip("0:")
            and host.text(f"{folder}/gid_attrs/types/{index}") == "RoCE v2"
        ]
        asked = host.environment.get("NVSHMEM_IB_GID_INDEX", "")
        why = "on Ethernet a connection names the GID it leaves by; a wrong one ends in time-outs (status 110, 12)"
        if not usable:
            found = f"{device} port {port} has no GID of RoCE v2"
            repair = "give the network device an IP address: ip addr add ADDRESS dev NETDEV; show_gids lists them"
            findings.append(Finding("GID", FAIL, found, why, repair))
        elif asked and asked not in usable:
            found = f"NVSHMEM_IB_GID_INDEX={asked}, {device} port {port} has RoCE v2 at {', '.join(usable)}"
            repair = f"export NVSHMEM_IB_GID_INDEX={usable[-1]}"
            findings.append(Finding("GID", FAIL, found, why, repair))
        else:
            found = f"{device} port {port}: RoCE v2 at {', '.join(usable)}"
            findings.append(
                Finding("GID", OK, found, why, agreed={f"GID of {device}": ", ".join(usable)})
            )
    return findings


def _errors(host: Host, device: str) -> list[Finding]:
    """Counters since the driver was loaded, if any is above 0."""
    grown = [
        f"port {port} {name} {count}"
        for port in host.names(f"{_SYS}/{device}/ports")
        for kind, names in _ERRORS.items()
        for name in names
        if (count := host.number(f"{_SYS}/{device}/ports/{port}/{kind}/{name}"))
    ]
    if not grown:
        return []
    return [
        Finding(
            "RDMA errors",
            WARN,
            f"{device}: {', '.join(grown)} since its driver was loaded",
            "errors that nobody reports: retransmissions make a path slow, and a completion in error loses rows",
            f"look again after a run, what grew is of that run: grep -H . {_SYS}/{device}/ports/*/*counters/*; "
            "then cable, transceiver and flow control (PFC) of that port",
        )
    ]


# ---- what IBGDA needs


def _libmlx5(host: Host) -> Finding:
    why = f"NVSHMEM loads it for IBGDA and asks for the symbols {_MLX5_SYMBOLS}"
    repair = "install a newer rdma-core or OFED: apt-get install --only-upgrade ibverbs-providers"
    own = host.environment.get("LD_LIBRARY_PATH", "").split(":")
    for folder in (*filter(None, own), *_LIBRARY_FOLDERS):
        files = [name for name in host.names(folder) if name.startswith("libmlx5.so.1")]
        if not files:
            continue
        file = f"{folder}/{files[-1]}"
        try:
            has_symbols = _MLX5_SYMBOLS.encode() in host.path(file).read_bytes()
        except OSError as error:
            return Finding("libmlx5", FAIL, f"{file}: {error.strerror}", why, repair)
        if not has_symbols:
            return Finding("libmlx5", WARN, f"{file} has no symbols {_MLX5_SYMBOLS}", why, repair)
        return Finding("libmlx5", OK, file, why, agreed={"libmlx5": files[-1]})
    return Finding("libmlx5", FAIL, "not found", why, "apt-get install ibverbs-providers")


def _driver_options(host: Host) -> Finding:
    parameters = host.text("/proc/driver/nvidia/params") or ""
    missing = [
        wanted
        for wanted, pattern in (
            ("NVreg_EnableStreamMemOPs=1", r"^EnableStreamMemOPs: 1"),
            (
                'NVreg_RegistryDwords="PeerMappingOverride=1;"',
                r"^RegistryDwords:.*PeerMappingOverride=1",
            ),
        )
        if not re.search(pattern, parameters, re.MULTILINE)
    ]
    why = "with these options a GPU rings the NIC's doorbell itself; without, NVSHMEM takes a thread of the CPU, or fails"
    if not missing:
        return Finding("driver options", OK, "set for IBGDA", why, agreed={"driver options": "set"})
    options = (
        'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;"'
    )
    return Finding(
        "driver options",
        WARN,
        f"/proc/driver/nvidia/params lacks {' and '.join(missing)}",
        why,
        f"echo '{options}' > /etc/modprobe.d/nvidia-ibgda.conf && update-initramfs -u && reboot",
        agreed={"driver options": "not set"},
    )


def _peer_memory(host: Host) -> Finding:
    modules = {line.split(" ")[0] for line in (host.text("/proc/modules") or "").splitlines()}
    loaded = sorted(modules & {"nvidia_peermem", "nv_peer_mem"})
    kernel = host.text("/proc/sys/kernel/osrelease") or ""
    is_open = "Open Kernel Module" in (host.text("/proc/driver/nvidia/version") or "")
    has_dma_buf = is_open and version_numbers(kernel) >= (5, 12)
    found = f"{' and '.join(loaded) or 'nvidia_peermem is not loaded'}; DMA-BUF {'works' if has_dma_buf else 'does not'}"
    why = "the NIC reads and writes GPU memory through one of the two (GPUDirect RDMA)"
    if loaded or has_dma_buf:
        return Finding("GPUDirect RDMA", OK, found, why)
    repair = (
        "modprobe nvidia_peermem; or the driver's open kernel modules, with Linux 5.12 or newer"
    )
    return Finding("GPUDirect RDMA", FAIL, found, why, repair)


def _nearest(host: Host) -> list[Finding]:
    """For each GPU the NICs that are nearest to it."""
    matrix = topology(host, "-m")
    nearest = {}
    for gpu, kinds in matrix.cells.items():
        far = {
            nic: _DISTANCES.index(kind)
            for nic, kind in kinds.items()
            if nic in matrix.nics and kind in _DISTANCES
        }
        if gpu.startswith("GPU") and far:
            least = min(far.values())
            nics = [matrix.nics[nic] for nic, distance in far.items() if distance == least]
            nearest[gpu] = (_DISTANCES[least], nics)
    if not nearest:
        return []
    found = ", ".join(f"{gpu} {'/'.join(nics)} ({kind})" for gpu, (kind, nics) in nearest.items())
    why = "a path over the CPU's own links (SYS) has a fraction of a NIC's rate, and GPUs that share one share its rate"
    alone = [nics[0] for _, nics in nearest.values() if len(nics) == 1]
    shared = sorted({nic for nic in alone if alone.count(nic) > 1})
    bad = [f"{gpu} has none on its side" for gpu, (kind, _) in nearest.items() if kind == "SYS"]
    bad += [f"{nic} is the only near one of {alone.count(nic)} GPUs" for nic in shared]
    if not bad:
        return [Finding("NIC of each GPU", OK, found, why)]
    repair = "NVSHMEM_ENABLE_NIC_PE_MAPPING=1 with NVSHMEM_HCA_PE_MAPPING chooses; see nvidia-smi topo -m"
    return [Finding("NIC of each GPU", WARN, f"{found}; {', '.join(bad)}", why, repair)]
