"""Limits of containers that are made up."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from deep_ep.doctor import container
from deep_ep.doctor.checks import FAIL, OK, WARN, Finding, examine, exit_status
from made_up_host import made_up, named

RDMA = {"/sys/class/infiniband/mlx5_0/fw_ver": "28.39"}
YAMA = "/proc/sys/kernel/yama/ptrace_scope"


def found(tmp_path: Path, name: str, *files: dict[str, str], **limits: int) -> Finding:
    """The line of this name where files or limits, by the name of the resource, are others."""
    by_number = {getattr(resource, kind): (limit, -1) for kind, limit in limits.items()}
    texts = {path: text for some in files for path, text in some.items()}
    host = made_up(tmp_path, texts, limits=lambda kind: by_number.get(kind, (-1, -1)))
    return named(examine(container.CHECKS, host), name)


def test_wide_limits_are_ok(tmp_path: Path) -> None:
    findings = examine(container.CHECKS, made_up(tmp_path))
    assert exit_status(findings) == 0
    assert named(findings, "memlock").found == "unlimited"


def test_a_small_dev_shm_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(total=64 << 20, free=62 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    shm = found(tmp_path, "/dev/shm")
    assert (shm.status, shm.found) == (WARN, "64 MiB, 62 MiB free; less than 1024 MiB")
    assert "--shm-size" in shm.repair
    assert "SIGBUS" in shm.why


@pytest.mark.parametrize(("devices", "status"), [({}, OK), (RDMA, FAIL)])
def test_a_small_memlock_fails_where_memory_has_to_be_registered(
    tmp_path: Path, devices: dict[str, str], status: str
) -> None:
    memlock = found(tmp_path, "memlock", devices, RLIMIT_MEMLOCK=65536)
    assert memlock.status == status
    assert memlock.found.startswith("64 KiB")
    assert ("ulimit memlock=-1" in memlock.repair) == (status == FAIL)


def test_few_open_files_are_warned_of(tmp_path: Path) -> None:
    files = found(tmp_path, "open files", RLIMIT_NOFILE=1024)
    assert (files.status, "nofile" in files.repair) == (WARN, True)


@pytest.mark.parametrize(
    ("scope", "capabilities", "status"),
    [("0", "0", OK), ("1", "0", WARN), ("1", "80000", OK), ("3", "ffffffff", WARN)],
)
def test_ptrace_needs_scope_or_capability(
    tmp_path: Path, scope: str, capabilities: str, status: str
) -> None:
    process = f"Name:\tpython\nSeccomp:\t2\nCapEff:\t{capabilities}\n"
    ptrace = found(tmp_path, "ptrace", {YAMA: scope, "/proc/self/status": process})
    assert ptrace.status == status
    assert "system calls filtered" in ptrace.found
    assert "silent rank hangs" in ptrace.why


def test_kills_for_memory_are_counted(tmp_path: Path) -> None:
    group = "/sys/fs/cgroup/memory"
    files = {f"{group}.max": str(64 << 20), f"{group}.events": "low 0\noom 3\noom_kill 2\n"}
    memory = found(tmp_path, "memory of container", files)
    assert memory.status == WARN
    assert memory.found.startswith("limit 64 MiB; 2 processes were killed")
    assert "EPRankGoneError" in memory.why
