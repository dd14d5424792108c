"""Dumps of torch's own flight recorder: which collective hangs, and who has not called it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deep_ep.errors import ranks_text

# More ranks than that no group has.
_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Collective:
    """An entry of a ring.

    Attributes:
        group: name of the process group.
        number: in that group.
        name: such as "nccl:all_reduce".
        is_over: whether it has ended.
    """

    group: str
    number: int
    name: str
    is_over: bool


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
        ValueError, TypeError: it is not what torch writes; says which entry.
    """
    entries = plain["entries"]
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise TypeError(f"entries is {type(entries).__name__}, not a list")
    collectives = []
    for index, entry in enumerate(entries):
        try:
            collectives.append(_collective_of(entry))
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"entry {index}: {type(error).__name__}: {error}") from None
    found = tuple(each for each in collectives if each is not None)
    return TorchDump(rank, _groups_of(plain.get("pg_config")), found)


def hanging(dumps: Sequence[TorchDump]) -> list[Hanging]:
    """The oldest collective of each group that some ranks are in and others are not, or in which all hang."""
    by_group: dict[str, dict[int, dict[int, Collective]]] = defaultdict(lambda: defaultdict(dict))
    members: dict[str, set[int]] = defaultdict(set)
    for dump in sorted(dumps, key=lambda dump: dump.rank):
        for group, ranks in dump.groups.items():
            members[group].update(ranks)
        for each in dump.collectives:
            by_group[each.group][each.number][dump.rank] = each
    heard = {dump.rank for dump in dumps}
    found = []
    for group, numbers in sorted(by_group.items()):
        expected = members[group] or {rank for called in numbers.values() for rank in called}
        for number, called in sorted(numbers.items()):
            names: dict[str, tuple[int, ...]] = {}
            for rank, each in called.items():
                if not each.is_over:
                    names[each.name] = (*names.get(each.name, ()), rank)
            if names:
                missing = tuple(sorted((expected & heard) - set(called)))
                unheard = tuple(sorted(expected - heard))
                found.append(Hanging(group, number, names, missing, unheard))
                break
    return found


def sentence(found: Hanging) -> str:
    """One line: who is in which collective, and who has not called it."""
    said = " while ".join(
        f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {name} {found.number}"
        for name, ranks in found.names.items()
    )
    said += f" of torch's group {found.group or '(default)'}"
    if found.missing:
        have = "has" if len(found.missing) == 1 else "have"
        said += f", which {ranks_text(found.missing)} {have} not called"
    elif len(found.names) == 1:
        said += ", which all ranks with a dump have called"
    if found.unheard:
        said += f"; there is no dump of {ranks_text(found.unheard)}"
    return said


def _collective_of(entry: Any) -> Collective | None:
    if not isinstance(entry, Mapping):
        raise TypeError(f"{type(entry).__name__}, not an object")
    if entry.get("is_p2p"):  # numbered by pairs
        return None
    group = entry["process_group"][0]
    number, name, state = entry["collective_seq_id"], entry["profiling_name"], entry["state"]
    if not (isinstance(number, int) and all(isinstance(v, str) for v in (group, name, state))):
        raise TypeError(
            "collective_seq_id, process_group, profiling_name or state has another type"
        )
    # On the CPU torch leaves the state at "scheduled", also of what its watchdog has done with.
    return Collective(group, number, name, state == "completed" or bool(entry.get("retired")))


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
