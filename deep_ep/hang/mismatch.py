"""Ranks that called something else than others: at the same number, or in another series."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from deep_ep.hang.activity import user_frame
from deep_ep.hang.cause import MismatchSide
from deep_ep.hang.states import Call, Frame, RankState, calls_at, is_truncated


def sides_at(states: Mapping[int, RankState], series: str, number: int) -> tuple[MismatchSide, ...]:
    """The sides of a mismatch at a number, the largest first; empty if all that called it agree."""
    first: dict[int, Call] = {}
    for rank, state in states.items():
        calls = calls_at(state, series, number)
        if calls and not is_truncated(state, series, number):
            first[rank] = calls[0]
    names = {call.name for call in first.values()}
    # Sizes of different operations have nothing to do with each other.
    values = {rank: _agreed(call) if len(names) == 1 else {} for rank, call in first.items()}
    common = set.intersection(*(set(sizes) for sizes in values.values())) if values else set()
    differing = sorted(key for key in common if len({sizes[key] for sizes in values.values()}) > 1)
    if len(names) < 2 and not differing:
        return ()
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in sorted(first):
        key = (first[rank].name, *(values[rank][name] for name in differing))
        groups[key].append(rank)
    return _ordered(
        MismatchSide(
            tuple(ranks),
            series,
            number,
            name,
            dict(zip(differing, agreed)),
            called_from(first[ranks[0]]),
        )
        for (name, *agreed), ranks in groups.items()
    )


def sides_across(
    states: Mapping[int, RankState], places: Mapping[int, tuple[str, int]]
) -> tuple[MismatchSide, ...]:
    """The sides where ranks wait for each other in operations of different series.

    Args:
        states: of all ranks.
        places: by rank, the series and number in which it waits.
    """
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank in sorted(places):
        groups[places[rank]].append(rank)
    sides = []
    for (series, number), ranks in groups.items():
        calls = calls_at(states[ranks[0]], series, number)
        call = calls[-1] if calls else Call(0, series, number, series)
        sides.append(MismatchSide(tuple(ranks), series, number, call.name, {}, called_from(call)))
    return _ordered(sides)


def odd_ranks(sides: Sequence[MismatchSide]) -> tuple[int, ...]:
    """Who differs from the majority; all, where no side has more than half of the ranks."""
    largest, *others = (side.ranks for side in sides)
    differing = sorted(rank for ranks in others for rank in ranks)
    return tuple(differing if len(largest) > len(differing) else sorted([*largest, *differing]))


def called_from(call: Call) -> Frame | None:
    """The program's line that called it; `None` if that is not known."""
    return user_frame(call.frames) or (call.frames[0] if call.frames else None)


def _agreed(call: Call) -> dict[str, str]:
    values = {name: str(call.sizes[name]) for name in call.agreed if name in call.sizes}
    return {**values, "dtype": call.dtype} if call.dtype else values


def _ordered(sides: Iterable[MismatchSide]) -> tuple[MismatchSide, ...]:
    return tuple(sorted(sides, key=lambda side: (-len(side.ranks), side.ranks)))
