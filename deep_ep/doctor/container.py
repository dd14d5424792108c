"""What the container or the host allows: memory, limits, and a look at other processes."""

from __future__ import annotations

import os
import re

from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.host import Host

_MIB = 1 << 20
_LEAST_SHM = 1 << 30
_LEAST_FILES = 4096
_MOST = 1 << 62  # more than that counts as no limit
_PTRACE = 1 << 19  # CAP_SYS_PTRACE


def check(host: Host) -> list[Finding]:
    """All findings on limits."""
    return [
        _shared_memory(host),
        _memlock(host),
        _open_files(host),
        _proc(host),
        _ptrace(host),
        *_memory(host),
    ]


def _shared_memory(host: Host) -> Finding:
    why = "NCCL and NVSHMEM share memory between the processes of a host there; too little ends a job with SIGBUS"
    repair = "start the container with --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory at /dev/shm"
    try:
        disk = os.statvfs(host.path("/dev/shm"))
    except OSError as error:
        return Finding("/dev/shm", FAIL, f"cannot be used: {error.strerror}", why, repair)
    size, free = disk.f_frsize * disk.f_blocks, disk.f_frsize * disk.f_bavail
    found = f"{size // _MIB} MiB, {free // _MIB} MiB free"
    if free < _LEAST_SHM:
        return Finding(
            "/dev/shm", WARN, f"{found}; less than {_LEAST_SHM // _MIB} MiB", why, repair
        )
    return Finding("/dev/shm", OK, found, why)


def _limit(host: Host, name: str) -> int | None:
    """The soft limit of this process, `None` if nobody says."""
    line = re.search(rf"^{name} +(\S+)", host.text("/proc/self/limits") or "", re.MULTILINE)
    if line is None:
        return None
    return _MOST if line.group(1) == "unlimited" else int(line.group(1))


def _memlock(host: Host) -> Finding:
    limit = _limit(host, "Max locked memory")
    why = "RDMA registers memory, which locks it; where that is not allowed, NVSHMEM and NCCL fail with ENOMEM (status 12) or cannot create queues"
    if limit is None:
        return Finding(
            "memlock", WARN, "unknown: /proc/self/limits cannot be read", why, "ulimit -l"
        )
    found = "unlimited" if limit >= _MOST else f"{limit // 1024} KiB"
    if limit >= _MOST or not host.has_rdma():
        return Finding("memlock", OK, found, why)
    return Finding(
        "memlock",
        FAIL,
        f"{found}, and there are RDMA devices",
        why,
        "ulimit -l unlimited; containers: --ulimit memlock=-1; Slurm and systemd: LimitMEMLOCK=infinity",
    )


def _open_files(host: Host) -> Finding:
    limit = _limit(host, "Max open files")
    why = "every rank holds sockets and memory of every other rank of its host"
    if limit is None or limit >= _LEAST_FILES:
        found = "unknown" if limit is None else "unlimited" if limit >= _MOST else str(limit)
        return Finding("open files", OK, found, why)
    repair = "ulimit -n 65536; containers: --ulimit nofile=65536"
    return Finding("open files", WARN, f"{limit}; less than {_LEAST_FILES}", why, repair)


def _proc(host: Host) -> Finding:
    why = (
        "ranks of a host map each other's memory through /proc/PID/fd, and whoever looks for the cause "
        "of a hang reads stacks there"
    )
    hidden = re.search(
        r"^\S+ /proc proc \S*hidepid=([12]|\w+)", host.text("/proc/mounts") or "", re.M
    )
    if host.text("/proc/self/maps") is None:
        repair = "mount /proc in the container"
        return Finding("/proc", FAIL, "/proc/self/maps cannot be read", why, repair)
    if hidden and hidden.group(1) not in ("0", "off"):
        found = f"mounted with hidepid={hidden.group(1)}: processes of others are hidden"
        repair = "run all ranks as one user, or mount -o remount,hidepid=0 /proc"
        return Finding("/proc", WARN, found, why, repair)
    return Finding("/proc", OK, "can be read", why)


def _ptrace(host: Host) -> Finding:
    why = (
        "memory of another rank is opened like a debugger opens it, and debuggers (py-spy, gdb, cuda-gdb) "
        "say where a silent rank hangs"
    )
    status = host.text("/proc/self/status") or ""
    capability = re.search(r"^CapEff:\s*(\w+)", status, re.MULTILINE)
    has_capability = bool(capability and int(capability.group(1), 16) & _PTRACE)
    scope = host.number("/proc/sys/kernel/yama/ptrace_scope") or 0
    filtered = re.search(r"^Seccomp:\s*2", status, re.MULTILINE) is not None
    found = (
        f"ptrace_scope {scope}, CAP_SYS_PTRACE {'yes' if has_capability else 'no'}, "
        f"system calls {'filtered' if filtered else 'not filtered'}"
    )
    if scope >= 3 or (scope >= 1 and not has_capability):
        repair = (
            "sysctl kernel.yama.ptrace_scope=0, or start the container with --cap-add=SYS_PTRACE"
        )
        return Finding("ptrace", WARN, found, why, repair)
    return Finding("ptrace", OK, found, why)


def _memory(host: Host) -> list[Finding]:
    """The control group's limit, and whether it has killed somebody: of either version of groups."""
    why = "a rank that the kernel kills for memory leaves the others waiting; they raise EPRankGoneError and cannot say why"
    limit = host.number("/sys/fs/cgroup/memory.max") or host.number(
        "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    events = host.text("/sys/fs/cgroup/memory.events") or host.text(
        "/sys/fs/cgroup/memory/memory.oom_control"
    )
    killed = re.search(r"^oom_kill (\d+)", events or "", re.MULTILINE)
    num_killed = int(killed.group(1)) if killed else 0
    found = f"limit {limit // _MIB} MiB" if limit and limit < _MOST else "no limit"
    if num_killed:
        return [
            Finding(
                "memory of container",
                WARN,
                f"{found}; {num_killed} processes were killed for memory since it started",
                why,
                "raise the limit of the container (--memory, resources.limits.memory); dmesg names who was killed",
            )
        ]
    return [Finding("memory of container", OK, f"{found}; nobody was killed for memory", why)]
