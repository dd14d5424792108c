"""The machine that is examined: files below a root, an environment, and commands that can be run.

Checks ask only this, so that a test can make up a machine.
"""

from __future__ import annotations

import importlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, NamedTuple

from deep_ep.base import env

# Of a command. nvidia-smi takes seconds where the driver is not persistent.
_PATIENCE_S = 60.0


class Ran(NamedTuple):
    """How a command ended.

    Attributes:
        status: exit status, negative: ended by that signal; `None`: it could not be started.
        text: what it wrote, errors included.
    """

    status: int | None
    text: str


def _start(command: Sequence[str]) -> Ran:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return Ran(None, str(error))
    return Ran(done.returncode, done.stdout)


@dataclass(frozen=True)
class Host:
    """A machine, by default this one.

    Attributes:
        root: folder that stands for `/`.
        search_path: where Python looks for packages, in order.
        package: folder of the deep_ep that is examined.
        start: runs a command; `run` is what checks call.
        load: imports a module by name; raises as `import` does.
        limits: soft and hard limit of this process, by number of the resource.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=env.everything)
    search_path: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    package: Path = Path(__file__).resolve().parent.parent
    start: Callable[[Sequence[str]], Ran] = _start
    load: Callable[[str], Any] = importlib.import_module
    limits: Callable[[int], tuple[int, int]] = resource.getrlimit
    _ran: dict[tuple[str, ...], Ran] = field(default_factory=dict, init=False)

    def run(self, *command: str) -> Ran:
        """How a command ends; it is run once, however many checks ask."""
        if command not in self._ran:
            self._ran[command] = self.start(command)
        return self._ran[command]

    def output(self, *command: str) -> str:
        """What a command writes, nothing if it fails."""
        ran = self.run(*command)
        return ran.text if ran.status == 0 else ""

    def path(self, absolute: str) -> Path:
        """Where a file of the machine is."""
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str) -> str:
        """What a file says, without blanks around it; nothing if it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, absolute: str) -> list[str]:
        """What is in a folder, in order; nothing if it cannot be read."""
        try:
            return sorted(os.listdir(self.path(absolute)))
        except OSError:
            return []

    def number(self, absolute: str) -> int:
        """A file that holds one number; 0 if it does not."""
        text = self.text(absolute)
        return int(text) if text.isdecimal() else 0

    def variable(self, name: str) -> int | None:
        """A number in the environment; `None` if there is none."""
        text = self.environment.get(name, "")
        return int(text) if text.isdecimal() else None

    def has_gpu_driver(self) -> bool:
        """Whether NVIDIA's driver is loaded."""
        return self.path("/proc/driver/nvidia/version").exists()

    def has_rdma(self) -> bool:
        """Whether there is an RDMA device."""
        return bool(self.names("/sys/class/infiniband"))


def version_numbers(text: str) -> tuple[int, ...]:
    """`"12.4.1+x"` -> `(12, 4, 1)`; what follows the numbers does not count."""
    numbers = re.match(r"\d+(\.\d+)*", text.strip())
    return tuple(map(int, numbers.group().split("."))) if numbers else ()
