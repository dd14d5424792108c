"""Dumps of torch's own flight recorder: which collective hangs, and who has not called it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from deep_ep.base import codec
from deep_ep.base.text import verb
from deep_ep.errors import ranks_text

# More ranks than that no group has.
_MOST_RANKS = 1 << 16


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
class _File:
    entries: tuple[Collective, ...]
    pg_config: Any = None


@dataclass(frozen=True)
class TorchDump:
    """What one rank has recorded.

    Attributes:
        rank: global.
        groups: by name, its global ranks as far as they are known.
        collectives: oldest first.
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    collectives: tuple[Collective, ...]


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


def is_torch_dump(plain: Any) -> bool:
    """Whether data has the keys of such a dump."""
    return isinstance(plain, Mapping) and {"entries", "version"} <= set(plain)


def dump_of(plain: Any, rank: int) -> TorchDump:
    """From the data of a file, pickle or JSON.

    Raises:
        ValueError: it is not what torch writes; says which entry.
    """
    file = codec.from_plain(_File, plain, is_strict=False)
    found = tuple(each for each in file.entries if not each.is_p2p)
    return TorchDump(rank, _groups_of(file.pg_config), found)


def hanging(dumps: Collection[TorchDump]) -> list[Hanging]:
    """The oldest collective of each group that some ranks are in and others are not, or in which all hang."""
    by_group: dict[str, dict[int, dict[int, Collective]]] = defaultdict(lambda: defaultdict(dict))
    members: dict[str, set[int]] = defaultdict(set)
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        for group, ranks in dump.groups.items():
            members[group].update(ranks)
        for each in dump.collectives:
            by_group[each.process_group[0]][each.collective_seq_id][dump.rank] = each
    heard = {dump.rank for dump in dumps}
    found = []
    for group, numbers in sorted(by_group.items()):
        expected = members[group] or {rank for called in numbers.values() for rank in called}
        for number, called in sorted(numbers.items()):
            names: dict[str, tuple[int, ...]] = {}
            for rank, each in called.items():
                if not each.is_over:
                    names[each.profiling_name] = (*names.get(each.profiling_name, ()), rank)
            if names:
                missing = tuple(sorted((expected & heard) - set(called)))
                unheard = tuple(sorted(expected - heard))
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
    """What cannot be read of it is left out: torch leaves it empty on the CPU."""
    found: dict[str, tuple[int, ...]] = {}
    for name, group in config.items() if isinstance(config, Mapping) else ():
        try:
            ranks = group["ranks"]
            ranks = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks
            found[str(name)] = tuple(int(rank) for rank in ranks[:_MOST_RANKS])
        except (KeyError, TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return found
