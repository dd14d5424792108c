"""Limits of containers that are made up."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from deep_ep.doctor import container
from deep_ep.doctor.finding import FAIL, OK, WARN, exit_status
from made_up_host import LIMITS, STATUS, made_up, named

RDMA = {"/sys/class/infiniband/mlx5_0/fw_ver": "28.39"}


def test_wide_limits_are_ok(tmp_path: Path) -> None:
    findings = container.check(made_up(tmp_path))
    assert exit_status(findings) == 0
    assert named(findings, "memlock").found == "unlimited"


def test_a_small_dev_shm_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(f_frsize=4096, f_blocks=16384, f_bavail=16000)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    found = named(container.check(made_up(tmp_path)), "/dev/shm")
    assert (found.status, found.found) == (WARN, "64 MiB, 62 MiB free; less than 1024 MiB")
    assert "--shm-size" in found.repair
    assert "SIGBUS" in found.why


@pytest.mark.parametrize(("devices", "status"), [({}, OK), (RDMA, FAIL)])
def test_a_small_memlock_fails_where_memory_has_to_be_registered(
    tmp_path: Path, devices: dict[str, str], status: str
) -> None:
    limits = LIMITS.format(files=65536, memlock=65536)
    host = made_up(tmp_path, {"/proc/self/limits": limits, **devices})
    found = named(container.check(host), "memlock")
    assert found.status == status
    assert found.found.startswith("64 KiB")
    assert ("ulimit memlock=-1" in found.repair) == (status == FAIL)


def test_few_open_files_are_warned_of(tmp_path: Path) -> None:
    limits = LIMITS.format(files=1024, memlock="unlimited")
    found = named(container.check(made_up(tmp_path, {"/proc/self/limits": limits})), "open files")
    assert (found.status, "nofile" in found.repair) == (WARN, True)


@pytest.mark.parametrize(
    ("scope", "capabilities", "status"),
    [("0", "0", OK), ("1", "0", WARN), ("1", "80000", OK), ("3", "ffffffff", WARN)],
)
def test_ptrace_needs_scope_or_capability(
    tmp_path: Path, scope: str, capabilities: str, status: str
) -> None:
    host = made_up(
        tmp_path,
        {
            "/proc/sys/kernel/yama/ptrace_scope": scope,
            "/proc/self/status": STATUS.format(seccomp=2, capabilities=capabilities),
        },
    )
    found = named(container.check(host), "ptrace")
    assert found.status == status
    assert "system calls filtered" in found.found
    assert "silent rank hangs" in found.why


def test_hidden_processes_are_warned_of(tmp_path: Path) -> None:
    host = made_up(tmp_path, {"/proc/mounts": "proc /proc proc rw,hidepid=2 0 0"})
    found = named(container.check(host), "/proc")
    assert (found.status, "hidepid=2" in found.found) == (WARN, True)


def test_kills_for_memory_are_counted(tmp_path: Path) -> None:
    files = {
        "/sys/fs/cgroup/memory.max": str(64 << 20),
        "/sys/fs/cgroup/memory.events": "low 0\noom 3\noom_kill 2\n",
    }
    found = named(container.check(made_up(tmp_path, files)), "memory of container")
    assert found.status == WARN
    assert found.found.startswith("limit 64 MiB; 2 processes were killed")
    assert "EPRankGoneError" in found.why
