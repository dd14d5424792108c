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
_LEAST_SHM = 1 << 30
_LEAST_FILES = 4096
_MOST_MEMORY = 1 << 62  # more than that counts as no limit
_PTRACE = 1 << 19  # CAP_SYS_PTRACE


@CHECKS.row(
    "/dev/shm",
    why="NCCL and NVSHMEM share memory between the processes of a host there; too little ends a job with SIGBUS",
    repair="start the container with --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory at /dev/shm",
)
def _shared_memory(host: Host) -> Finding:
    try:
        disk = shutil.disk_usage(host.path("/dev/shm"))
    except OSError as error:
        return fail(f"cannot be used: {error.strerror}")
    found = f"{disk.total // _MIB} MiB, {disk.free // _MIB} MiB free"
    if disk.free < _LEAST_SHM:
        return warn(f"{found}; less than {_LEAST_SHM // _MIB} MiB")
    return ok(found)


@CHECKS.row(
    "memlock",
    why="RDMA registers memory, which locks it; where that is not allowed, NVSHMEM and NCCL fail with ENOMEM (status 12) or cannot create queues",
    repair="ulimit -l unlimited; containers: --ulimit memlock=-1; Slurm and systemd: LimitMEMLOCK=infinity",
)
def _memlock(host: Host) -> Finding:
    limit, _ = host.limits(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("unlimited")
    found = f"{limit // 1024} KiB"
    return fail(f"{found}, and there are RDMA devices") if host.has_rdma() else ok(found)


@CHECKS.row(
    "open files",
    why="every rank holds sockets and memory of every other rank of its host",
    repair="ulimit -n 65536; containers: --ulimit nofile=65536",
)
def _open_files(host: Host) -> Finding:
    limit, _ = host.limits(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ok("unlimited")
    return ok(str(limit)) if limit >= _LEAST_FILES else warn(f"{limit}; less than {_LEAST_FILES}")


@CHECKS.row(
    "/proc",
    why="ranks of a host map each other's memory through /proc/PID/fd, and whoever looks for the cause of a hang reads stacks there",
)
def _proc(host: Host) -> Finding:
    if not os.access(host.path("/proc/self/maps"), os.R_OK):
        return fail("/proc/self/maps cannot be read", repair="mount /proc in the container")
    mount = re.search(r"^\S+ /proc proc \S*hidepid=(\w+)", host.text("/proc/mounts"), re.MULTILINE)
    if mount and mount[1] not in ("0", "off"):
        return warn(
            f"mounted with hidepid={mount[1]}: processes of others are hidden",
            repair="run all ranks as one user, or mount -o remount,hidepid=0 /proc",
        )
    return ok("can be read")


@CHECKS.row(
    "ptrace",
    why="memory of another rank is opened like a debugger opens it, and debuggers (py-spy, gdb, cuda-gdb) say where a silent rank hangs",
    repair="sysctl kernel.yama.ptrace_scope=0, or start the container with --cap-add=SYS_PTRACE",
)
def _ptrace(host: Host) -> Finding:
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
    why="a rank that the kernel kills for memory leaves the others waiting; they raise EPRankGoneError and cannot say why",
    repair="raise the limit of the container (--memory, resources.limits.memory); dmesg names who was killed",
)
def _memory(host: Host) -> Finding:
    """The control group's limit, and whether it has killed somebody: of either version of groups."""
    groups = "/sys/fs/cgroup"
    limit = host.number(f"{groups}/memory.max") or host.number(
        f"{groups}/memory/memory.limit_in_bytes"
    )
    events = host.text(f"{groups}/memory.events") or host.text(
        f"{groups}/memory/memory.oom_control"
    )
    found = f"limit {limit // _MIB} MiB" if 0 < limit < _MOST_MEMORY else "no limit"
    killed = re.search(r"^oom_kill ([1-9]\d*)", events, re.MULTILINE)
    if killed:
        return warn(f"{found}; {killed[1]} processes were killed for memory since it started")
    return ok(f"{found}; nobody was killed for memory")
