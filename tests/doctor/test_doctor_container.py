"""Limits of containers that are made up."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from deep_ep.doctor import container
from deep_ep.doctor.checks import FAIL, OK, WARN, examine
from made_up_host import RDMA, made_up, named

CGROUP = {
    "/sys/fs/cgroup/memory.max": str(64 << 20),
    "/sys/fs/cgroup/memory.events": "low 0\noom 3\noom_kill 2\n",
}
UNLIMITED = {
    "/sys/fs/cgroup/memory.max": "max",
    "/sys/fs/cgroup/memory.events": "low 0\noom 0\noom_kill 0\n",
}


def cgroup_v1(limit: int, killed: str) -> dict[str, str]:
    return {
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(limit),
        "/sys/fs/cgroup/memory/memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\n{killed}",
    }


def ptrace(scope: str, capabilities: str) -> dict[str, str]:
    return {
        "/proc/sys/kernel/yama/ptrace_scope": scope,
        "/proc/self/status": f"Name:\tpython\nSeccomp:\t2\nCapEff:\t{capabilities}\n",
    }


@pytest.mark.parametrize(
    ("name", "files", "limit", "status", "found"),
    [
        ("memlock", {}, -1, OK, "unlimited"),
        ("memlock", {}, 65536, OK, "64 KiB"),
        ("memlock", RDMA, 65536, FAIL, "64 KiB, and there are RDMA devices"),
        ("open files", {}, -1, OK, "unlimited"),
        ("open files", {}, 1024, WARN, "1024; less than 4096"),
        ("/proc", {"/proc/mounts": "proc /proc proc rw,hidepid=2 0 0"}, -1, WARN, "hidepid=2"),
        ("ptrace", {}, -1, OK, "ptrace_scope 0, CAP_SYS_PTRACE no, system calls not filtered"),
        ("ptrace", ptrace("1", "0"), -1, WARN, "scope 1, CAP_SYS_PTRACE no, system calls filtered"),
        ("ptrace", ptrace("1", "80000"), -1, OK, "scope 1, CAP_SYS_PTRACE yes"),
        ("ptrace", ptrace("3", "ffffffff"), -1, WARN, "scope 3, CAP_SYS_PTRACE yes"),
        ("memory of container", {}, -1, OK, "limit not known; not known whether"),
        ("memory of container", UNLIMITED, -1, OK, "no limit; nobody was killed"),
        ("memory of container", CGROUP, -1, WARN, "limit 64 MiB; 2 processes were killed"),
        (
            *("memory of container", cgroup_v1(64 << 20, "oom_kill 2"), -1, WARN),
            "limit 64 MiB; 2 processes were killed",
        ),
        (
            *("memory of container", cgroup_v1((1 << 63) - 4096, "oom_kill 0"), -1, OK),
            "no limit; nobody was killed",
        ),
        (
            *("memory of container", cgroup_v1(64 << 20, ""), -1, OK),
            "limit 64 MiB; not known whether",
        ),
    ],
)
def test_limits_are_judged(
    tmp_path: Path, name: str, files: dict[str, str], limit: int, status: str, found: str
) -> None:
    host = made_up(tmp_path, files, limits=lambda kind: (limit, -1))
    line = named(examine(container.CHECKS, host), name)
    assert (line.status, found in line.found) == (status, True)


def test_each_limit_is_asked_of_its_own_resource(tmp_path: Path) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (65536, -1), resource.RLIMIT_NOFILE: (5000, -1)}
    findings = examine(container.CHECKS, made_up(tmp_path, limits=limits.__getitem__))
    assert named(findings, "memlock").found == "64 KiB"
    assert named(findings, "open files").found == "5000"


def test_a_small_dev_shm_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(total=64 << 20, free=62 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    shm = named(examine(container.CHECKS, made_up(tmp_path)), "/dev/shm")
    assert (shm.status, shm.found) == (WARN, "64 MiB, 62 MiB free; less than 1024 MiB")
