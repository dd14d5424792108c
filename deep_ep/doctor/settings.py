"""Environment variables: those that are set, unknown, out of range or contradictory, and what they mean for a job."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from deep_ep.base import env
from deep_ep.doctor.checks import Finding, Table, fail, ok, warn
from deep_ep.doctor.host import Host
from deep_ep.errors import EPArgumentError

CHECKS = Table()
# Read by setup.py.
_OF_THE_BUILD = ("DEEP_EP_CPU_ARCH", "DEEP_EP_WERROR", "DEEP_EP_CUDA", "DEEP_EP_TIME_MODEL")
_OURS = re.compile(r"DEEP_?EP_\w+")
_SHOWN = re.compile(
    r"(DEEP_?EP|NVSHMEM|NCCL|TORCH_NCCL|UCX)_\w+|CUDA_(VISIBLE|DEVICE|LAUNCH)_\w+|LD_PRELOAD"
)
# Each rank has its own.
_PER_RANK = {"CUDA_VISIBLE_DEVICES"}
# Launchers set these for every rank; only `deep_ep.utils.envs.init_dist` gives them a meaning of its own.
OF_LAUNCHERS = (env.master_addr, env.master_port, env.world_size, env.node_rank)
# Shorter ones are ended by a rank that compiles kernels, seconds.
_PATIENT_S = 600.0
# Where programs keep what they have compiled: variable, folder below the home.
_CACHES = (
    ("DG_JIT_CACHE_DIR", ".deep_gemm"),
    ("TRITON_CACHE_DIR", ".triton/cache"),
)


@CHECKS.row("variables")
def _set(host: Host) -> Finding:
    """Ranks with different settings disagree when they meet."""
    shown = {
        name: value for name, value in sorted(host.environment.items()) if _SHOWN.fullmatch(name)
    }
    found = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none is set"
    return ok(found, agreed={name: shown[name] for name in shown if name not in _PER_RANK})


@CHECKS.row("unknown variable")
def _unknown(host: Host) -> Iterator[Finding]:
    """Nobody reads it, so what it was to change stays as it is."""
    known = sorted({variable.name for variable in env.VARIABLES}.union(_OF_THE_BUILD))
    for name in sorted(host.environment):
        if _OURS.fullmatch(name) and name not in known:
            found, repair = name, f"unset {name}"
            for near in difflib.get_close_matches(name, known, n=1):
                found += f"; {near} may be meant"
                repair += f"; export {near}={host.environment[name]}"
            yield warn(found, repair=repair)


@CHECKS.row("variable out of range")
def _out_of_range(host: Host) -> Iterator[Finding]:
    """The first Buffer raises EPArgumentError."""
    for variable in env.VARIABLES:
        try:
            if variable not in OF_LAUNCHERS:
                variable()
        except EPArgumentError as error:
            found, _, repair = str(error).removeprefix("environment: ").partition(". ")
            yield fail(found, repair=repair)


def _all_in_range(host: Host) -> bool:
    return not any(_out_of_range(host))


@CHECKS.row("contradiction", when=_all_in_range)
def _contradictions(host: Host) -> Iterator[Finding]:
    # Also what has no effect, and what is meant for tests.
    wanted, has_gpu = env.backend(), host.has_gpu_driver()
    if wanted == "cuda" and not has_gpu:
        yield fail(
            "DEEP_EP_BACKEND=cuda, and no driver of a GPU is loaded",
            "a Buffer raises EPNotBuiltError",
            "unset DEEP_EP_BACKEND, or install NVIDIA's driver",
        )
    if wanted == "cpu" and has_gpu:
        why = "the cpu backend is for tests and far slower"
        yield warn("DEEP_EP_BACKEND=cpu, and there is a GPU", why, "unset DEEP_EP_BACKEND")
    if env.diagnose_dir() is not None and env.diagnose().mode == "off":
        found = "DEEP_EP_DIAGNOSE_DIR is set, and DEEP_EP_DIAGNOSE is off"
        yield warn(found, "no record is written", "export DEEP_EP_DIAGNOSE=1")
    if env.inject():
        found, why = f"DEEP_EP_INJECT={env.inject()}", "every Buffer injects these faults"
        yield warn(found, why, "unset DEEP_EP_INJECT, unless this is a test")
    if host.environment.get("NVSHMEM_IBGDA_NIC_HANDLER") == "cpu":
        why = "a thread of the CPU rings every doorbell, which is slow"
        yield warn("NVSHMEM_IBGDA_NIC_HANDLER=cpu", why, "unset NVSHMEM_IBGDA_NIC_HANDLER")
    local = env.local_world_size()
    visible = host.environment.get("CUDA_VISIBLE_DEVICES", "")
    if local and 1 < len(visible.split(",")) < local:
        yield fail(
            f"CUDA_VISIBLE_DEVICES={visible} for LOCAL_WORLD_SIZE={local} ranks",
            "some ranks have no GPU of their own",
            "unset CUDA_VISIBLE_DEVICES, or start as many ranks as there are GPUs",
        )


@CHECKS.row(
    "timeout",
    repair="export DEEP_EP_TIMEOUT_S=1800, or compile on all ranks before the first operation and meet at a barrier",
    when=_all_in_range,
)
def _timeout(host: Host) -> Finding:
    """A rank that compiles kernels (minutes where nothing is cached), loads weights or has raised is waited for this long;
    then the others raise EPTimeoutError, which names it.
    """
    seconds = env.timeout_s()
    home = host.environment.get("HOME", "")
    folders = [host.environment.get(name, f"{home}/{default}") for name, default in _CACHES]
    cached = ", ".join(folder for folder in folders if host.names(folder))
    compiled = f"compiled kernels in {cached}" if cached else "no compiled kernels are cached"
    found = f"DEEP_EP_TIMEOUT_S={seconds:g}; {compiled}"
    is_cold = not cached and host.has_gpu_driver()
    return warn(found) if seconds < (_PATIENT_S if is_cold else 10) else ok(found)


@CHECKS.row(
    "kernels of others",
    repair="unset CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS, or call everything in the same order "
    "on all ranks; export NCCL_MAX_CTAS=16 leaves SMs to others",
    when=_all_in_range,
)
def _other_kernels(host: Host) -> Finding:
    """Operations wait on the GPU for other ranks: behind a kernel that waits for those ranks in turn (NCCL, in another
    order on another rank, or on all SMs) none of them ends.
    """
    names = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_MAX_CTAS")
    values = [host.environment.get(name, "") for name in names]
    found = ", ".join(f"{name} {value or 'unset'}" for name, value in zip(names, values))
    return warn(found) if "1" in values[:2] else ok(found)
