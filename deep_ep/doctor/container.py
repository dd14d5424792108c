"""What the container or the host allows: memory, limits, and a look at other processes."""

from __future__ import annotations

import os
import re
import resource
import shutil

from deep_ep.doctor.checks import Finding, Table, fail, ok, warn
from deep_ep.doctor.host import Host

CHECKS = Table()
_MIB = 1 << 20
_LEAST_SHM_MIB = 1024
_LEAST_FILES = 4096
_PTRACE = 1 << 19  # CAP_SYS_PTRACE
# Version 1 of control groups says so much where there is no limit.
_NO_LIMIT = 1 << 60


@CHECKS.row(
    "/dev/shm",
    repair="start the container with --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory at /dev/shm",
)
def _shared_memory(host: Host) -> Finding:
    """NCCL and NVSHMEM share memory between the processes of a host there; too little ends a job with SIGBUS."""
    disk = shutil.disk_usage(host.path("/dev/shm"))
    found = f"{disk.total // _MIB} MiB, {disk.free // _MIB} MiB free"
    is_small = disk.free // _MIB < _LEAST_SHM_MIB
    return warn(f"{found}; less than {_LEAST_SHM_MIB} MiB") if is_small else ok(found)


@CHECKS.row(
    "memlock",
    repair="ulimit -l unlimited; containers: --ulimit memlock=-1; Slurm and systemd: LimitMEMLOCK=infinity",
)
def _memlock(host: Host) -> Finding:
    """RDMA registers memory, which locks it; where that is not allowed, NVSHMEM and NCCL fail with ENOMEM (status 12) or
    cannot create queues.
    """
    limit, _ = host.limits(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("unlimited")
    found = f"{limit // 1024} KiB"
    return fail(f"{found}, and there are RDMA devices") if host.has_rdma() else ok(found)


@CHECKS.row("open files", repair="ulimit -n 65536; containers: --ulimit nofile=65536")
def _open_files(host: Host) -> Finding:
    """Every rank holds sockets and memory of every other rank of its host."""
    limit, _ = host.limits(resource.RLIMIT_NOFILE)
    if 0 <= limit < _LEAST_FILES:
        return warn(f"{limit}; less than {_LEAST_FILES}")
    return ok("unlimited" if limit == resource.RLIM_INFINITY else str(limit))


@CHECKS.row(
    "/proc", repair="mount /proc in the container without hidepid, or run all ranks as one user"
)
def _proc(host: Host) -> Finding:
    """Ranks of a host map each other's memory through /proc/PID/fd, and stacks of ranks that hang are read there."""
    if not os.access(host.path("/proc/self/maps"), os.R_OK):
        return fail("/proc/self/maps cannot be read")
    mount = re.search(r"^\S+ /proc proc \S*hidepid=(\w+)", host.text("/proc/mounts"), re.MULTILINE)
    if mount and mount[1] not in ("0", "off"):
        return warn(f"mounted with hidepid={mount[1]}: processes of others are hidden")
    return ok("can be read")


@CHECKS.row(
    "ptrace",
    repair="sysctl kernel.yama.ptrace_scope=0, or start the container with --cap-add=SYS_PTRACE",
)
def _ptrace(host: Host) -> Finding:
    """Memory of another rank is opened like a debugger opens it, and debuggers (py-spy, gdb, cuda-gdb) say where a
    silent rank hangs.
    """
    status = dict(re.findall(r"^(\w+):[ \t]*(\w+)", host.text("/proc/self/status"), re.MULTILINE))
    has_capability = bool(int(status.get("CapEff", "0"), 16) & _PTRACE)
    scope = host.number("/proc/sys/kernel/yama/ptrace_scope")
    is_closed = scope >= 3 or (scope >= 1 and not has_capability)
    return (warn if is_closed else ok)(
        f"ptrace_scope {scope}, CAP_SYS_PTRACE {'yes' if has_capability else 'no'}, "
        f"system calls {'filtered' if status.get('Seccomp') == '2' else 'not filtered'}",
    )


@CHECKS.row(
    "memory of container",
    repair="raise the limit of the container (--memory, resources.limits.memory); dmesg names who was killed",
)
def _memory(host: Host) -> Finding:
    """A rank that the kernel kills for memory leaves the others waiting; they raise EPRankGoneError and cannot say why."""
    # Control groups of version 2, then of version 1.
    limit, events = (
        host.text(f"/sys/fs/cgroup/{new}") or host.text(f"/sys/fs/cgroup/memory/{old}")
        for new, old in (
            ("memory.max", "memory.limit_in_bytes"),
            ("memory.events", "memory.oom_control"),
        )
    )
    if limit.isdecimal() and int(limit) < _NO_LIMIT:
        found = f"limit {int(limit) // _MIB} MiB"
    else:
        found = "no limit" if limit else "limit not known"
    killed = re.search(r"^oom_kill (\d+)", events, re.MULTILINE)
    if killed is None:
        return ok(f"{found}; not known whether somebody was killed for memory")
    if int(killed[1]):
        return warn(f"{found}; {killed[1]} processes were killed for memory since it started")
    return ok(f"{found}; nobody was killed for memory")
