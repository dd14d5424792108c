"""Machine code as `nvdisasm -c -gi` prints it: instructions, each with the calls that it was inlined through."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SECTION = re.compile(r"\.text\.(\S+):\s*$")
FRAME = re.compile(r'//## File "([^"]+)", line (\d+)')
LABEL = re.compile(r"(\S+):\s*$")
INSTRUCTION = re.compile(
    r"\s+/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*)\s*([^;]*)"
)
LOADS = ("LD", "LDG")
STORES = ("ST", "STG")
UPDATES = ("ATOM", "ATOMG", "RED", "REDG")
SHARED = ("LDS", "STS", "ATOMS")
BULK = ("UBLKCP", "DEPBAR")  # bulk copies, and the wait for groups of them
WIDTHS = {"SM": "cta", "CTA": "cta", "GPU": "gpu", "SYS": "sys"}


@dataclass(frozen=True)
class Instruction:
    """One machine instruction. `frames`: (file, line), the innermost call first."""

    function: str
    address: int
    opcode: str
    frames: tuple[tuple[str, int], ...]
    is_guarded: bool = False  # by a predicate
    operands: str = ""
    labels: tuple[str, ...] = ()  # that stand before it

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def modifiers(self) -> list[str]:
        return self.opcode.split(".")[1:]

    @property
    def is_strong(self) -> bool:
        return "STRONG" in self.modifiers

    @property
    def scope(self) -> str:
        """Of a strong access or a fence."""
        return next((WIDTHS[word] for word in reversed(self.modifiers) if word in WIDTHS), "")

    @property
    def touches_global(self) -> bool:
        return self.name in (*LOADS, *STORES, *UPDATES)


def read(lines: Iterable[str]) -> Iterator[Instruction]:
    """All instructions. File names that lie in csrc/ are cut down to it."""
    function = ""
    frames: list[tuple[str, int]] = []
    complete: tuple[tuple[str, int], ...] | None = None
    labels: list[str] = []
    for line in lines:
        if match := FRAME.search(line):
            if complete is not None:
                frames, complete = [], None
            path = match.group(1)
            here = path.rfind("/csrc/")
            frames.append((path if here < 0 else path[here + 1 :], int(match.group(2))))
        elif match := INSTRUCTION.match(line):
            complete = tuple(frames) if complete is None else complete
            address, guard, opcode, operands = match.groups()
            yield Instruction(
                function,
                int(address, 16),
                opcode,
                complete,
                bool(guard),
                operands.strip(),
                tuple(labels),
            )
            labels = []
        elif match := SECTION.match(line):
            function, frames, complete, labels = match.group(1), [], None, []
        elif match := LABEL.match(line):
            labels.append(match.group(1))
