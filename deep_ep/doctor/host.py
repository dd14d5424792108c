"""The machine that is examined: files below a root, an environment, and commands that can be run.

Checks ask only this, so that a test can make up a machine.
"""

from __future__ import annotations

import importlib
import os
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


def run(command: Sequence[str]) -> Ran:
    """Runs a command of this machine."""
    try:
        done = subprocess.run(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ran(None, f"no answer within {_PATIENCE_S:.0f} s")
    except OSError as error:
        return Ran(None, str(error))
    return Ran(done.returncode, done.stdout)


@dataclass(frozen=True)
class Host:
    """A machine, by default this one.

    Attributes:
        root: folder that stands for `/`.
        environment: variables of the process.
        search_path: where Python looks for packages, in order.
        package: folder of the deep_ep that is examined.
        run: runs a command.
        load: imports a module by name; raises as `import` does.
        tried: what `package.load_native` has found, by file: several checks ask, and each try is a process.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=env.everything)
    search_path: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    package: Path = Path(__file__).resolve().parent.parent
    run: Callable[[Sequence[str]], Ran] = run
    load: Callable[[str], Any] = importlib.import_module
    tried: dict[Path, Any] = field(default_factory=dict)

    def path(self, absolute: str) -> Path:
        """Where a file of the machine is."""
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str) -> str | None:
        """What a file says, without blanks around it; `None` if it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, absolute: str) -> list[str]:
        """What is in a folder, in order; nothing if it cannot be read."""
        try:
            return sorted(os.listdir(self.path(absolute)))
        except OSError:
            return []

    def number(self, absolute: str) -> int | None:
        """A file that holds one number; `None` if it does not."""
        text = self.text(absolute) or ""
        return int(text) if text.isdecimal() else None

    def has_gpu_driver(self) -> bool:
        """Whether NVIDIA's driver is loaded."""
        return self.path("/proc/driver/nvidia/version").exists()

    def has_rdma(self) -> bool:
        """Whether there is an RDMA device."""
        return bool(self.names("/sys/class/infiniband"))


def version_numbers(text: str) -> tuple[int, ...]:
    """`"12.4.1+x"` -> `(12, 4, 1)`; what follows the numbers does not count."""
    numbers = []
    for part in text.strip().split("."):
        digits = ""
        for character in part:
            if not character.isdecimal():
                break
            digits += character
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
