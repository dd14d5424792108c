"""Driver and GPUs as nvidia-smi tells of them: versions, NVLink, and whether one GPU may reach another's memory."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.host import Host, version_numbers

_QUERY = "index,name,compute_cap,memory.total,mig.mode.current,driver_version"
_OLDEST_SM = (9, 0)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
# What `nvidia-smi topo -p2p` says of pairs that may not.
_P2P_STATES = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the PCIe topology does not support it",
    "DR": "a registry key of the driver forbids it",
    "NS": "it is not supported",
    "U": "unknown",
}
_NVLINK_WHY = (
    "ranks of a node write into each other's memory over NVLink; without it low latency takes RDMA, and "
    "normal operations do not work within the node"
)


class Gpu(NamedTuple):
    """One GPU, in nvidia-smi's words."""

    number: str
    name: str
    compute_capability: str
    memory: str
    mig: str
    driver: str


def check(host: Host) -> list[Finding]:
    """All findings on GPUs."""
    gpus = _gpus(host)
    if isinstance(gpus, Finding):
        return [gpus]
    findings = [_driver(host, gpus), *_models(gpus), *_device_files(host)]
    if len(gpus) > 1:
        findings += [_nvlink(host), _peer_access(host)]
    return [*findings, *_fabric(host)]


def _gpus(host: Host) -> list[Gpu] | Finding:
    """The GPUs, or what stands for all other findings."""
    ran = host.run(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"])
    if ran.status == 0:
        rows = [[cell.strip() for cell in line.split(",")] for line in ran.text.splitlines()]
        gpus = [Gpu(*row) for row in rows if len(row) == len(_QUERY.split(","))]
        if gpus:
            return gpus
    why = "without a GPU the cpu backend runs the kernels, which is for tests and far slower"
    said = " ".join(ran.text.split()) or "there is no GPU"
    if not host.has_gpu_driver():
        found = "none: NVIDIA's driver is not loaded"
        if any(name.startswith("nvidia") for name in host.names("/dev")):
            found += ", but /dev has its files"
            repair = "start the container with --gpus all, or load the driver: modprobe nvidia"
            return Finding("GPU", WARN, found, why, repair)
        return Finding("GPU", OK, found, why)
    return Finding(
        "GPU",
        FAIL,
        f"the driver is loaded, and nvidia-smi says: {said}",
        "CUDA does not start either",
        "nvidia-smi; after an update of the driver: reboot, or reload it; in a container: --gpus all",
    )


def _driver(host: Host, gpus: list[Gpu]) -> Finding:
    version = gpus[0].driver
    banner = re.search(r"CUDA Version:\s*([\d.]+)", host.run(["nvidia-smi"]).text)
    serves = banner.group(1) if banner else ""
    found = f"{version}, serves CUDA up to {serves or 'an unknown version'}"
    why = "a driver serves programs of its own and of older versions of CUDA"
    built_for = _cuda_of_torch(host)
    if built_for and serves and version_numbers(built_for)[:1] > version_numbers(serves)[:1]:
        return Finding(
            "driver",
            FAIL,
            f"{found}; torch is built for CUDA {built_for}",
            why,
            f"install a newer driver, or a torch for CUDA {serves}",
            agreed={"driver": version},
        )
    return Finding("driver", OK, found, why, agreed={"driver": version})


def _cuda_of_torch(host: Host) -> str:
    try:
        return str(host.load("torch").version.cuda or "")
    except (ImportError, OSError):
        return ""  # package.py says so


def _models(gpus: list[Gpu]) -> list[Finding]:
    numbers: dict[tuple[str, ...], list[str]] = {}
    for gpu in gpus:
        numbers.setdefault(gpu[1:-1], []).append(gpu.number)
    findings = []
    for (name, capability, memory, mig), which in numbers.items():
        found = f"{', '.join(which)}: {name}, compute capability {capability}, {memory}"
        why = "the kernels use instructions that compute capability 9.0 is the first to have"
        status, repair = OK, ""
        if version_numbers(capability) < _OLDEST_SM:
            status, repair = FAIL, "use Hopper or newer, or DEEP_EP_BACKEND=cpu for tests"
        elif version_numbers(capability) > _OLDEST_SM:
            status, why = WARN, "code for sm_90a, the default of a build, runs on 9.0 alone"
            major, minor = version_numbers(capability)[:2]
            repair = f"build for it, unless that is done: TORCH_CUDA_ARCH_LIST={major}.{minor}a make cuda"
        elif mig == "Enabled":
            status, found = WARN, f"{found}, divided by MIG"
            why = "instances of a GPU that is divided cannot reach other GPUs' memory"
            repair = "nvidia-smi -mig 0"
        agreed = {"GPU": f"{name} {capability}"}
        findings.append(Finding("GPU", status, found, why, repair, agreed=agreed))
    return findings


def _device_files(host: Host) -> list[Finding]:
    files = [f"/dev/{name}" for name in host.names("/dev") if re.fullmatch(r"nvidia\d+", name)]
    closed = [file for file in files if not os.access(host.path(file), os.R_OK | os.W_OK)]
    if not closed:
        return []
    found = f"this process may not read and write {', '.join(closed)}"
    why = "CUDA finds no GPU then, and does not say why"
    repair = (
        "join the group that owns them (ls -l /dev/nvidia*), or start the container with --gpus all"
    )
    return [Finding("device files", FAIL, found, why, repair)]


class Matrix(NamedTuple):
    """What `nvidia-smi topo` prints.

    Attributes:
        cells: by row, then by column.
        nics: RDMA device by name of a column.
    """

    cells: dict[str, dict[str, str]]
    nics: dict[str, str]

    def pairs(self) -> dict[tuple[str, str], str]:
        """What is between two GPUs, each pair once."""
        return {
            (row, column): kind
            for row, kinds in self.cells.items()
            for column, kind in kinds.items()
            if row.startswith("GPU") and re.fullmatch(r"GPU\d+", column) and row < column
        }


def topology(host: Host, *what: str) -> Matrix:
    """The matrix of `nvidia-smi topo WHAT`; empty if there is none."""
    ran = host.run(["nvidia-smi", "topo", *what])
    text = _ESCAPE.sub("", ran.text) if ran.status == 0 else ""
    rows = [[cell.strip() for cell in line.split("\t")] for line in text.splitlines()]
    header = next((row for row in rows if "GPU0" in row[1:]), [])
    cells = {
        row[0]: {name: kind for name, kind in zip(header[1:], row[1:]) if name and kind}
        for row in rows
        if re.fullmatch(r"(GPU|NIC)\d+", row[0]) and len(row) > 1
    }
    return Matrix(cells, dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", text, re.MULTILINE)))


def _nvlink(host: Host) -> Finding:
    pairs = topology(host, "-m").pairs()
    kinds = sorted(set(pairs.values()))
    without = [pair for pair, kind in pairs.items() if not kind.startswith("NV")]
    rates = re.findall(
        r"Link \d+: ([\d.]+) GB/s", host.run(["nvidia-smi", "nvlink", "-s", "-i", "0"]).text
    )
    expected = sum(map(float, rates))
    rate = f"; {expected:.0f} GB/s each way are expected of a GPU" if expected else ""
    repair = "nvidia-smi nvlink -s and nvidia-smi topo -m; set DEEP_EP_RANKS_PER_NODE to the ranks that NVLink joins"
    if not pairs:
        found = "nvidia-smi topo -m shows no matrix"
        return Finding("NVLink", WARN, found, _NVLINK_WHY, repair)
    if without:
        listed = ", ".join(f"{one}-{other} ({pairs[one, other]})" for one, other in without)
        return Finding("NVLink", WARN, f"not between {listed}{rate}", _NVLINK_WHY, repair)
    return Finding(
        "NVLink",
        OK,
        f"between all {len(pairs)} pairs: {', '.join(kinds)}{rate}",
        _NVLINK_WHY,
        agreed={"NVLink": ", ".join(kinds)},
    )


def _peer_access(host: Host) -> Finding:
    why = "P2P and CUDA IPC, with which ranks of a node map each other's memory, are not allowed otherwise"
    pairs = topology(host, "-p2p", "r").pairs()
    closed = {pair: kind for pair, kind in pairs.items() if kind != "OK"}
    if not pairs:
        return Finding(
            "P2P", WARN, "nvidia-smi topo -p2p r shows no matrix", why, "update the driver"
        )
    if closed:
        (first, second), kind = next(iter(closed.items()))
        found = f"not between {len(closed)} of {len(pairs)} pairs, first {first}-{second}: {_P2P_STATES.get(kind, kind)}"
        repair = "disable ACS and the IOMMU for the GPUs (iommu=pt), give the container all GPUs and --ipc=host"
        return Finding("P2P", FAIL, found, why, repair)
    return Finding("P2P", OK, f"allowed between all {len(pairs)} pairs", why)


def _fabric(host: Host) -> list[Finding]:
    """Whether NVSwitches have let the GPUs in; older drivers do not tell."""
    ran = host.run(["nvidia-smi", "--query-gpu=index,fabric.state", "--format=csv,noheader"])
    states = re.findall(r"^(\d+), *(.+?)\s*$", ran.text, re.MULTILINE) if ran.status == 0 else []
    waiting = [
        f"GPU {index} is {state}"
        for index, state in states
        if state in ("In Progress", "Not Started")
    ]
    if not waiting:
        return []
    why = "GPUs behind NVSwitches do not start CUDA before the fabric manager has let them in"
    repair = "systemctl restart nvidia-fabricmanager, of the same version as the driver"
    return [Finding("fabric", FAIL, ", ".join(waiting), why, repair)]
