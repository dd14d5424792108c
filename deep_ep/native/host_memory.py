"""How much memory a process can still get on this host."""

from __future__ import annotations

import contextlib
from pathlib import Path

# Of control groups, versions 2 and 1, as a process sees those of its container: limit, use, statistics, and what
# of the use are files that the kernel drops when it needs the memory.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """What the kernel and the limit of the container leave, bytes; `None` if neither is known."""
    found = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        found.append(_number_of(meminfo, "MemAvailable:") << 10)
    for limit, used, statistics, dropped in _GROUPS:
        with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is no number
            free = int((groups / limit).read_text()) - int((groups / used).read_text())
            found.append(max(0, free + _number_of(groups / statistics, dropped)))
    return min(found, default=None)


def _number_of(path: Path, name: str) -> int:
    """The number behind a name at the beginning of a line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return int({words[0]: words[1] for words in lines if len(words) > 1}[name])
