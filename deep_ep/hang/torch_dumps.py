"""Dumps of torch's own flight recorder: which collective hangs, and who has not called it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from deep_ep.base.text import verb
from deep_ep.errors import ranks_text

# More ranks than that no group has.
_MOST_RANKS, _NUMBERS_END = 1 << 16, 1 << 31


@dataclass(frozen=True)
class Collective:
    """An entry of a ring, as torch writes it.

    Attributes:
        process_group: its name and description.
        collective_seq_id: number in that group.
        profiling_name: such as "nccl:all_reduce".
        state, retired: how far it is.
        is_p2p: whether it is numbered by pairs of ranks.
    """

    process_group: Annotated[tuple[str, str], ("name", "description")]
    collective_seq_id: int
    profiling_name: str
    state: str
    retired: bool = False
    is_p2p: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended. On the CPU torch leaves the state at "scheduled", also of what its watchdog has done with."""
        return self.state == "completed" or self.retired


@dataclass(frozen=True)
class TorchDump:
    """What one rank has recorded.

    Attributes:
        entries: oldest first.
        pg_config: by name of a group, its ranks among others; torch leaves it empty on the CPU.
    """

    entries: tuple[Collective, ...]
    pg_config: Any = None


@dataclass(frozen=True)
class Hanging:
    """A collective that does not end. Ranks are global.

    Attributes:
        group, number: which one.
        names: by what they called at this number, the ranks that did.
        missing: ranks of the group that have not called it.
        unheard: ranks of the group without a dump.
    """

    group: str
    number: int
    names: Mapping[str, tuple[int, ...]]
    missing: tuple[int, ...]
    unheard: tuple[int, ...]

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that called it, ascending."""
        return tuple(sorted(rank for ranks in self.names.values() for rank in ranks))


def hanging(dumps: Mapping[int, TorchDump]) -> list[Hanging]:
    """The oldest collective of each group that some ranks are in and others are not, or in which all hang.

    Args:
        dumps: by global rank.
    """
    by_group: dict[str, dict[int, dict[int, Collective]]] = defaultdict(lambda: defaultdict(dict))
    members: dict[str, set[int]] = defaultdict(set)
    for rank, dump in sorted(dumps.items()):
        for group, ranks in _groups_of(dump.pg_config).items():
            members[group].update(ranks)
        for each in dump.entries:
            if not each.is_p2p:
                by_group[each.process_group[0]][each.collective_seq_id][rank] = each
    found = []
    for group, numbers in sorted(by_group.items()):
        newest = {rank: number for number, called in sorted(numbers.items()) for rank in called}
        expected = members[group] or {rank for called in numbers.values() for rank in called}
        for number, called in sorted(numbers.items()):
            names: dict[str, tuple[int, ...]] = {}
            for rank, each in called.items():
                if not each.is_over:
                    names[each.profiling_name] = (*names.get(each.profiling_name, ()), rank)
            if names:
                # A ring has forgotten what its rank called long before its newest.
                later = {rank for rank, last in newest.items() if last > number}
                missing = tuple(sorted((expected & dumps.keys()) - called.keys() - later))
                unheard = tuple(sorted(expected - dumps.keys()))
                found.append(Hanging(group, number, names, missing, unheard))
                break
    return found


def sentence(found: Hanging) -> str:
    """One line: who is in which collective, and who has not called it."""
    said = " while ".join(
        f"{ranks_text(ranks)} {verb(ranks, 'is')} in {name} {found.number}"
        for name, ranks in found.names.items()
    )
    said += f" of torch's group {found.group or '(default)'}"
    if found.missing:
        said += f", which {ranks_text(found.missing)} {verb(found.missing, 'has')} not called"
    elif len(found.names) == 1:
        said += ", which all ranks with a dump have called"
    if found.unheard:
        said += f"; there is no dump of {ranks_text(found.unheard)}"
    return said


def _groups_of(config: Any) -> dict[str, tuple[int, ...]]:
    """What cannot be read of it is left out."""
    found: dict[str, tuple[int, ...]] = {}
    for name, group in config.items() if isinstance(config, Mapping) else ():
        try:
            ranks = group["ranks"]
            ranks = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks
            numbers = tuple(int(rank) for rank in ranks[:_MOST_RANKS])
            # Python does not print numbers of thousands of digits.
            if all(0 <= number < _NUMBERS_END for number in numbers):
                found[str(name)] = numbers
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            SyntaxError,
            MemoryError,
            RecursionError,
        ):
            continue
    return found
