"""The control flow of a kernel in its machine code, and what ways through it cost."""

from __future__ import annotations

import re
from collections import deque
from functools import cache

from memory_order.sass import Instruction
from memory_order.sources import ROOT, functions, without_comments

# How an opcode begins, and parts of the lines that an instruction was inlined through, as lines_of() has them.
Place = tuple[str, ...]
TARGET = re.compile(r"(.*)`\((\S+)\)")


@cache
def lines_of(path: str) -> list[str]:
    """`function: text` of each line of a source file."""
    text = without_comments((ROOT / path).read_text())
    heads = dict(functions(text))
    function = ""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        function = heads.get(number, function)
        lines.append(f"{function}: {line.strip()}")
    return lines


def successors(code: list[Instruction]) -> list[list[int]]:
    """Of each instruction those that may follow. None follows a call, so no way leads through one."""
    labels = {label: index for index, one in enumerate(code) for label in one.labels}
    found = []
    for index, one in enumerate(code):
        following = []
        goes_on = one.is_guarded or one.name not in ("BRA", "CALL", "EXIT", "RET")
        if one.name == "BRA" and (match := TARGET.match(one.operands)):
            following.append(labels[match.group(2)])
            goes_on = goes_on or match.group(1) != ""  # it has a condition
        if goes_on and index + 1 < len(code):
            following.append(index + 1)
        found.append(following)
    return found


class Flow:
    """The control flow of a kernel. Instructions that were inlined through a part of `free` cost nothing."""

    def __init__(self, code: list[Instruction], free: tuple[str, ...] = ()) -> None:
        self.code = code
        self.successors = successors(code)
        self.lines = [
            [lines_of(path)[line - 1] for path, line in one.frames if path.startswith("csrc/")]
            for one in code
        ]
        self.costs = [
            int(not any(self.is_in(index, part) for part in free)) for index in range(len(code))
        ]
        self.at = cache(self.find_place)
        self.costs_from = cache(self.find_costs)

    def is_in(self, index: int, part: str) -> bool:
        return any(part in line for line in self.lines[index])

    def find_place(self, place: Place) -> list[int]:
        """The instructions of a place."""
        opcode, *parts = place
        found = [
            index
            for index, one in enumerate(self.code)
            if one.opcode.startswith(opcode) and all(self.is_in(index, part) for part in parts)
        ]
        if not found:
            raise ValueError(f"{self.code[0].function} has no {place}; has the source changed?")
        return found

    def find_costs(self, start: int) -> dict[int, int]:
        """Of the cheapest ways from an instruction, which counts, to all others and back to it."""
        found: dict[int, int] = {}
        queue = deque((self.costs[start], index) for index in self.successors[start])
        while queue:
            cost, index = queue.popleft()
            if index in found:
                continue
            found[index] = cost
            # Behind what is free come the next ones at the same cost, so that costs come in order.
            add = queue.append if self.costs[index] else queue.appendleft
            for following in self.successors[index]:
                add((cost + self.costs[index], following))
        return found

    def round(self, places: tuple[Place, ...]) -> int:
        """Instructions of the cheapest way that passes places in this order and ends where it began."""
        found: list[int] = []
        for start in self.at(places[0]):
            costs = {start: 0}
            for stops in (*map(self.at, places[1:]), [start]):
                ways = [
                    (cost + self.costs_from(before)[stop], stop)
                    for before, cost in costs.items()
                    for stop in stops
                    if stop in self.costs_from(before)
                ]
                costs = {stop: cost for cost, stop in sorted(ways, reverse=True)}
            found += costs.values()
        if not found:
            raise ValueError(f"{self.code[0].function} has no way through {places}.")
        return min(found)
