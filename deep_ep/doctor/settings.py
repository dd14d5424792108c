"""Environment variables: those that are set, unknown, out of range or contradictory, and what they mean for a job."""

from __future__ import annotations

import difflib
import re
from typing import Any, Callable

from deep_ep.base import env
from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.host import Host
from deep_ep.errors import EPArgumentError

# Read by setup.py.
_OF_THE_BUILD = ("DEEP_EP_CPU_ARCH", "DEEP_EP_WERROR", "DEEP_EP_CUDA")
# What deep_ep writes before it starts NVSHMEM; csrc/transport/cuda/nvshmem_world.cpp.
_WRITTEN = (
    "NVSHMEM_DISABLE_P2P",
    "NVSHMEM_IB_ENABLE_IBGDA",
    "NVSHMEM_IBGDA_NUM_RC_PER_PE",
    "NVSHMEM_MAX_TEAMS",
    "NVSHMEM_DISABLE_NVLS",
    "NVSHMEM_CUMEM_GRANULARITY",
    "NVSHMEM_DISABLE_MNNVL",
)
_OURS = re.compile(r"DEEP_?EP_\w+")
_SHOWN = re.compile(
    r"(DEEP_?EP|NVSHMEM|NCCL|TORCH_NCCL|UCX)_\w+|CUDA_(VISIBLE|DEVICE|LAUNCH)_\w+|LD_PRELOAD"
)
# Each rank has its own.
_PER_RANK = {"CUDA_VISIBLE_DEVICES"}
# Each raises an error that names the variable and what it may be.
_READERS: tuple[Callable[[], Any], ...] = (
    env.backend,
    env.timeout_s,
    env.ranks_per_node,
    env.cpu_clock,
    lambda: env.clock_interval_s(0.0),
    env.verify,
    env.recorder,
    env.recorder_frames,
    env.dump_signal,
    env.warn_s,
    lambda: env.bulk_copies(default=True),
    env.schedule,
    env.delivery,
    lambda: env.launch_shape(max_warps=32, max_threads=1 << 31),
    env.diagnose,
    env.phases,
    env.tuned,
    env.classic,
    env.nvshmem_qp_depth,
    env.local_world_size,
)
# Shorter ones are ended by a rank that compiles kernels, seconds.
_PATIENT_S = 600.0
# Where programs keep what they have compiled: variable, folder below the home.
_CACHES = (
    ("DG_JIT_CACHE_DIR", ".deep_gemm"),
    ("TRITON_CACHE_DIR", ".triton/cache"),
)


def check(host: Host) -> list[Finding]:
    """All findings on variables."""
    with env.read_from(host.environment):
        wrong = _out_of_range()
        findings = [_set(host), *_unknown(host), *wrong]
        if not wrong:
            findings += [
                *_contradictions(host),
                _timeout(host),
                _verify(),
                _other_kernels(host),
            ]
    return findings


def _set(host: Host) -> Finding:
    shown = {
        name: value for name, value in sorted(host.environment.items()) if _SHOWN.fullmatch(name)
    }
    return Finding(
        "variables",
        OK,
        ", ".join(f"{name}={value}" for name, value in shown.items()) or "none is set",
        "ranks with different settings disagree when they meet",
        agreed={name: value for name, value in shown.items() if name not in _PER_RANK},
    )


def _unknown(host: Host) -> list[Finding]:
    known = {variable.name for variable in env.VARIABLES}.union(_OF_THE_BUILD)
    findings = []
    for name in sorted(host.environment):
        if not _OURS.fullmatch(name) or name in known:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1)
        meant = f"; {near[0]} may be meant" if near else ""
        repair = f"unset {name}" + (f"; export {near[0]}={host.environment[name]}" if near else "")
        why = "nobody reads it, so what it was to change stays as it is"
        findings.append(Finding("unknown variable", WARN, f"{name}{meant}", why, repair))
    return findings


def _out_of_range() -> list[Finding]:
    findings = []
    for read in _READERS:
        try:
            read()
        except EPArgumentError as error:
            said = str(error).removeprefix("environment: ")
            found, _, repair = said.partition(". ")
            why = "the first Buffer raises EPArgumentError"
            findings.append(Finding("variable out of range", FAIL, found, why, repair))
    return findings


def _contradictions(host: Host) -> list[Finding]:
    found: list[tuple[str, str, str, str]] = []  # status, what, why, repair
    wanted, has_gpu = env.backend(), host.has_gpu_driver()
    if wanted == "cuda" and not has_gpu:
        what, why = (
            "DEEP_EP_BACKEND=cuda, and no driver of a GPU is loaded",
            "a Buffer raises EPNotBuiltError",
        )
        found.append((FAIL, what, why, "unset DEEP_EP_BACKEND, or install NVIDIA's driver"))
    if wanted == "cpu" and has_gpu:
        what, why = (
            "DEEP_EP_BACKEND=cpu, and there is a GPU",
            "the cpu backend is for tests and far slower",
        )
        found.append((WARN, what, why, "unset DEEP_EP_BACKEND"))
    if wanted == "cuda" or (has_gpu and wanted != "cpu"):
        for variable in (env.SCHEDULE, env.DELIVERY, env.CPU_CLOCK):
            if variable.name in host.environment:
                what, why = (
                    f"{variable.name} is set, and the backend is cuda",
                    "only the cpu backend reads it",
                )
                found.append((WARN, what, why, f"unset {variable.name}"))
    if env.diagnose_dir() is not None and env.diagnose().mode == "off":
        what = "DEEP_EP_DIAGNOSE_DIR is set, and DEEP_EP_DIAGNOSE is off"
        found.append((WARN, what, "no record is written", "export DEEP_EP_DIAGNOSE=1"))
    if env.inject():
        what, why = f"DEEP_EP_INJECT={env.inject()}", "every Buffer injects these faults"
        found.append((WARN, what, why, "unset DEEP_EP_INJECT, unless this is a test"))
    for name in _WRITTEN:
        if name in host.environment:
            what, why = f"{name} is set", "deep_ep writes it itself, from the arguments of Buffer"
            found.append((WARN, what, why, f"unset {name}"))
    if host.environment.get("NVSHMEM_IBGDA_NIC_HANDLER") == "cpu":
        what, why = (
            "NVSHMEM_IBGDA_NIC_HANDLER=cpu",
            "a thread of the CPU rings every doorbell, which is slow",
        )
        found.append((WARN, what, why, "unset NVSHMEM_IBGDA_NIC_HANDLER"))
    found += _contradictory_sizes(host)
    return [Finding("contradiction", *parts) for parts in found]


def _contradictory_sizes(host: Host) -> list[tuple[str, str, str, str]]:
    found = []
    per_node, local = env.ranks_per_node(), env.local_world_size()
    world = int(text) if (text := host.environment.get("WORLD_SIZE", "")).isdecimal() else None
    if per_node and world and per_node < world and world % per_node:
        found.append(
            (
                FAIL,
                f"DEEP_EP_RANKS_PER_NODE={per_node} does not divide WORLD_SIZE={world}",
                "normal operations need nodes of equal size",
                "unset DEEP_EP_RANKS_PER_NODE, or set it to a divisor",
            )
        )
    visible = host.environment.get("CUDA_VISIBLE_DEVICES", "")
    if local and visible and 1 < len(visible.split(",")) < local:
        found.append(
            (
                FAIL,
                f"CUDA_VISIBLE_DEVICES={visible} for LOCAL_WORLD_SIZE={local} ranks",
                "some ranks have no GPU of their own",
                "unset CUDA_VISIBLE_DEVICES, or start as many ranks as there are GPUs",
            )
        )
    return found


def _timeout(host: Host) -> Finding:
    seconds = env.timeout_s()
    home = host.environment.get("HOME", "")
    cached = [
        folder
        for name, default in _CACHES
        if host.names(folder := host.environment.get(name, f"{home}/{default}"))
    ]
    compiled = (
        f"compiled kernels in {', '.join(cached)}" if cached else "no compiled kernels are cached"
    )
    found = f"DEEP_EP_TIMEOUT_S={seconds:g}; {compiled}"
    why = (
        "a rank that compiles kernels (minutes where nothing is cached), loads weights or has raised is "
        "waited for this long; then the others raise EPTimeoutError, which names it"
    )
    repair = "export DEEP_EP_TIMEOUT_S=1800, or compile on all ranks before the first operation and meet at a barrier"
    if seconds < 10 or (not cached and host.has_gpu_driver() and seconds < _PATIENT_S):
        return Finding("timeout", WARN, found, why, repair)
    return Finding("timeout", OK, found, why)


def _verify() -> Finding:
    is_on = env.verify()
    return Finding(
        "verification of rows",
        OK,
        "DEEP_EP_VERIFY=1" if is_on else "off (DEEP_EP_VERIFY=1 switches it on)",
        "where results are wrong, it says which row was overwritten, and who sent it: buffers that are "
        "shared by two modes, graphs that are replayed with old sizes, memory, wires",
    )


def _other_kernels(host: Host) -> Finding:
    names = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MAX_CTAS")
    values = {name: host.environment.get(name, "") for name in names}
    found = ", ".join(f"{name} {value or 'unset'}" for name, value in values.items())
    why = (
        "operations wait on the GPU for other ranks: behind a kernel that waits for those ranks in turn "
        "(NCCL, in another order on another rank, or on all SMs) none of them ends"
    )
    if values["CUDA_LAUNCH_BLOCKING"] == "1" or values["CUDA_DEVICE_MAX_CONNECTIONS"] == "1":
        repair = (
            "unset CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS, or call everything in the same order "
            "on all ranks; export NCCL_MAX_CTAS=16 leaves SMs to others"
        )
        return Finding("kernels of others", WARN, found, why, repair)
    return Finding("kernels of others", OK, found, why)
