"""Machines that are made up: files in a folder, an environment, and what commands say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deep_ep.doctor.finding import Finding
from deep_ep.doctor.host import Host, Ran

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            {files}                1048576              files
Max locked memory         {memlock}              unlimited            bytes
"""
STATUS = "Name:\tpython\nSeccomp:\t{seccomp}\nCapEff:\t{capabilities}\n"


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
        "/proc/self/limits": LIMITS.format(files=65536, memlock="unlimited"),
        "/proc/self/status": STATUS.format(seccomp=0, capabilities="0"),
        "/proc/self/maps": "",
        "/proc/mounts": "proc /proc proc rw,nosuid 0 0",
        **(files or {}),
    }
    for path, text in texts.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(command: Sequence[str]) -> Ran:
        said = (commands or {}).get(" ".join(command), (commands or {}).get(command[0]))
        if said is None:
            return Ran(None, f"{command[0]}: not found")
        return said if isinstance(said, Ran) else Ran(0, said)

    return Host(**{"root": root, "environment": {}, "search_path": (), "run": run, **settings})


def named(findings: Sequence[Finding], name: str) -> Finding:
    """The one finding of this name."""
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def all_named(findings: Sequence[Finding], name: str) -> list[Finding]:
    """All findings of this name."""
    return [finding for finding in findings if finding.name == name]
