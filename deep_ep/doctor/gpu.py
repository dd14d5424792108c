"""Driver and GPUs as nvidia-smi tells of them: versions, NVLink, and whether one GPU may reach another's memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

from deep_ep.doctor.checks import Finding, Table, fail, ok, warn
from deep_ep.doctor.host import Host, version_numbers
from deep_ep.doctor.package import cuda_of_torch

CHECKS = Table()
_COLUMNS = "index,name,compute_cap,memory.total,mig.mode.current,driver_version"
_OLDEST_SM = (9, 0)
_GPU = re.compile(r"GPU\d+")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def _gpus(host: Host, columns: str = _COLUMNS) -> list[list[str]]:
    """The rows of `nvidia-smi --query-gpu=COLUMNS`; none if it fails."""
    text = host.output("nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader")
    rows = [[cell.strip() for cell in row.split(",")] for row in text.splitlines()]
    return [row for row in rows if len(row) == len(columns.split(","))]


def _has_pairs(host: Host) -> bool:
    return len(_gpus(host)) > 1


@CHECKS.row("driver", when=_gpus)
def _driver(host: Host) -> Finding:
    """A driver serves programs of its own and of older versions of CUDA."""
    *_, version = _gpus(host)[0]
    banner = re.search(r"CUDA Version:\s*([\d.]+)", host.run("nvidia-smi").text)
    serves, built_for = banner[1] if banner else "", cuda_of_torch(host)
    found = f"{version}, serves CUDA up to {serves or 'an unknown version'}"
    agreed = {"driver": version}
    if built_for and serves and version_numbers(built_for)[:1] > version_numbers(serves)[:1]:
        repair = f"install a newer driver, or a torch for CUDA {serves}"
        return fail(f"{found}; torch is built for CUDA {built_for}", repair=repair, agreed=agreed)
    return ok(found, agreed=agreed)


@CHECKS.row("GPU")
def _models(host: Host) -> Iterator[Finding]:
    """The kernels use instructions that compute capability 9.0 is the first to have."""
    numbers: dict[tuple[str, ...], list[str]] = {}
    for number, *model, _ in _gpus(host):
        numbers.setdefault(tuple(model), []).append(number)
    if not numbers:
        yield _no_gpu(host)
    for (name, capability, memory, mig), which in numbers.items():
        found = f"{', '.join(which)}: {name}, compute capability {capability}, {memory}"
        judge, why, repair = ok, "", ""
        sm = version_numbers(capability)
        if sm < _OLDEST_SM:
            judge, repair = fail, "use Hopper or newer, or DEEP_EP_BACKEND=cpu for tests"
        elif sm > _OLDEST_SM:
            judge, why = warn, "code for sm_90a, the default of a build, runs on 9.0 alone"
            repair = f"build for it, unless that is done: TORCH_CUDA_ARCH_LIST={sm[0]}.{sm[1]}a make cuda"
        elif mig == "Enabled":
            found += ", divided by MIG"
            judge, repair = warn, "nvidia-smi -mig 0"
            why = "instances of a GPU that is divided cannot reach other GPUs' memory"
        yield judge(found, why, repair, agreed={"GPU": f"{name} {capability}"})


def _no_gpu(host: Host) -> Finding:
    if host.has_gpu_driver():
        said = host.run("nvidia-smi", f"--query-gpu={_COLUMNS}", "--format=csv,noheader").text
        return fail(
            f"the driver is loaded, and nvidia-smi says: {' '.join(said.split()) or 'there is no GPU'}",
            "CUDA does not start either",
            "nvidia-smi; after an update of the driver: reboot, or reload it; in a container: --gpus all",
        )
    found = "none: NVIDIA's driver is not loaded"
    why = "without a GPU the cpu backend runs the kernels, which is for tests and far slower"
    if any(name.startswith("nvidia") for name in host.names("/dev")):
        repair = "start the container with --gpus all, or load the driver: modprobe nvidia"
        return warn(f"{found}, but /dev has its files", why, repair)
    return ok(found, why)


def topology(host: Host, *what: str) -> dict[tuple[str, str], str]:
    """What `nvidia-smi topo WHAT` says is between two GPUs, each pair once, and between a GPU and an RDMA device."""
    text = _ESCAPE.sub("", host.output("nvidia-smi", "topo", *what))
    nics = dict(re.findall(r"^\s*(NIC\d+):\s*(\S+)", text, re.MULTILINE))
    rows = [[cell.strip() for cell in row.split("\t")] for row in text.splitlines()]
    header = next((row for row in rows if "GPU0" in row[1:]), [])
    return {
        (row[0], nics.get(name, name)): kind
        for row in rows
        if _GPU.fullmatch(row[0])
        for name, kind in zip(header[1:], row[1:])
        if name in nics or (_GPU.fullmatch(name) and row[0] < name)
    }


@CHECKS.row(
    "NVLink",
    repair="nvidia-smi nvlink -s and nvidia-smi topo -m; set DEEP_EP_RANKS_PER_NODE to the ranks that NVLink joins",
    when=_has_pairs,
)
def _nvlink(host: Host) -> Finding:
    """Ranks of a node write into each other's memory over NVLink; without it low latency takes RDMA, and normal
    operations do not work within the node.
    """
    matrix = topology(host, "-m")
    pairs = {pair: kind for pair, kind in matrix.items() if _GPU.fullmatch(pair[1])}
    if not pairs:
        return warn("nvidia-smi topo -m shows no matrix")
    links = host.run("nvidia-smi", "nvlink", "-s", "-i", "0").text
    expected = sum(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", links)))
    rate = f"; {expected:.0f} GB/s each way are expected of a GPU" if expected else ""
    without = [f"{a}-{b} ({kind})" for (a, b), kind in pairs.items() if not kind.startswith("NV")]
    if without:
        return warn(f"not between {', '.join(without)}{rate}")
    kinds = ", ".join(sorted(set(pairs.values())))
    return ok(f"between all {len(pairs)} pairs: {kinds}{rate}", agreed={"NVLink": kinds})


@CHECKS.row(
    "P2P",
    repair="nvidia-smi topo -p2p r says what the letters mean; disable ACS and the IOMMU for the GPUs (iommu=pt), give "
    "the container all GPUs and --ipc=host",
    when=_has_pairs,
)
def _peer_access(host: Host) -> Finding:
    """P2P and CUDA IPC, with which ranks of a node map each other's memory, are not allowed otherwise."""
    pairs = topology(host, "-p2p", "r")
    if not pairs:
        return warn("nvidia-smi topo -p2p r shows no matrix", repair="update the driver")
    closed = [f"{a}-{b} ({kind})" for (a, b), kind in pairs.items() if kind != "OK"]
    if closed:
        return fail(f"not between {len(closed)} of {len(pairs)} pairs: {', '.join(closed)}")
    return ok(f"allowed between all {len(pairs)} pairs")


@CHECKS.row(
    "fabric",
    repair="systemctl restart nvidia-fabricmanager, of the same version as the driver",
    when=_gpus,
)
def _fabric(host: Host) -> Iterator[Finding]:
    """GPUs behind NVSwitches do not start CUDA before the fabric manager has let them in."""
    # Older drivers do not tell.
    waiting = [
        f"GPU {number} is {state}"
        for number, state in _gpus(host, "index,fabric.state")
        if state in ("In Progress", "Not Started")
    ]
    if waiting:
        yield fail(", ".join(waiting))
