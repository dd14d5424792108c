"""Machines that are made up: files in a folder, an environment, limits, and what commands say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deep_ep.doctor.checks import OK, Finding
from deep_ep.doctor.host import Host, Ran

DRIVER = {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module 570.86"}
RDMA = {"/sys/class/infiniband/mlx5_0/fw_ver": "28.39"}
# `nvidia-smi topo -m` as the driver prints it: tabs, and an underlined header.
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \t{link}\tPIX\tSYS\t0-47\t0\n"
    "GPU1\t{link}\t X \tSYS\t{near}\t48-95\t1\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\n"
    "NIC1\tSYS\tPIX\tSYS\t X \t\t\n\n"
    "Legend:\n\n  X    = Self\n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)


def made_up(
    root: Path,
    files: Mapping[str, str] | None = None,
    commands: Mapping[str, str | Ran] | None = None,
    **settings: Any,
) -> Host:
    """A machine without a GPU whose limits are wide.

    Args:
        root: an empty folder.
        files: what other files say, by absolute path.
        commands: what the first word of a command, or the whole of it, writes; others are not there.
        settings: other attributes of `Host`.
    """
    texts = {
        "/dev/shm/.keep": "",
        "/proc/self/status": "Name:\tpython\nSeccomp:\t0\nCapEff:\t0\n",
        "/proc/self/maps": "",
        "/proc/mounts": "proc /proc proc rw,nosuid 0 0",
        **(files or {}),
    }
    for path, text in texts.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def start(command: Sequence[str]) -> Ran:
        said = (commands or {}).get(" ".join(command), (commands or {}).get(command[0]))
        if said is None:
            return Ran(None, f"{command[0]}: not found")
        return said if isinstance(said, Ran) else Ran(0, said)

    wide: dict[str, Any] = {"environment": {}, "search_path": (), "limits": lambda kind: (-1, -1)}
    return Host(**{"root": root, "start": start, **wide, **settings})


def named(findings: Iterable[Finding], name: str) -> Finding:
    """The one finding of this name, which says why it matters and, where it is bad, what repairs it."""
    (found,) = all_named(findings, name)
    assert found.why
    assert found.repair or found.status == OK
    return found


def all_named(findings: Iterable[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.name == name]
