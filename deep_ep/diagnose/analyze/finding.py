"""A cause that a rule has found: its verdict, all but the savings, and what to replay for those."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ..collect.group_matrices import Place
from ..collect.hops import call_of
from ..core.causes import Cause
from ..core.diagnosis import BoolArray, EvidenceKey, Verdict
from ..core.robust_stats import certainty
from .estimates import Estimates
from .judged_kind import JudgedKind
from .what_if import Gain

_NORMAL_95 = 1.96
NO_WORDS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Found:
    """A verdict while savings are still to be worked out, with what its cause adds."""

    verdict: Verdict
    kind: JudgedKind
    gain: Gain


@dataclass(frozen=True)
class Size:
    """How large an effect is, ns per operation.

    Attributes:
        effect: above what is usual.
        error: its standard error.
        tests: among how many like it this one was found.
        spread: how far healthy ranks or paths differ for good, standard deviation.
    """

    effect: float
    error: float
    tests: int
    spread: float = 0.0

    @property
    def interval_us(self) -> tuple[float, float]:
        """95 %; NaN where no error is known."""
        half = _NORMAL_95 * math.hypot(self.error, self.spread)
        if not half > 0:
            return float("nan"), float("nan")
        return (self.effect - half) / 1e3, (self.effect + half) / 1e3


@dataclass(frozen=True)
class Named:
    """What a verdict names: one of these, as in `Verdict`, or nothing where everything is slow."""

    rank: int | None = None
    edge: tuple[int, int] | None = None
    node: int | None = None
    nodes: tuple[int, int] | None = None
    rail: int | None = None


def found_cause(
    kind: JudgedKind,
    cause: Cause,
    named: Named,
    size: Size,
    cells: BoolArray,
    gain: Gain,
    *,
    evidence: Mapping[EvidenceKey, float],
    seen_in: float = math.nan,
    most_certain: float = 1.0,
    words: Mapping[str, str] = NO_WORDS,
    next_step: str = "",
) -> Found:
    """A verdict.

    Args:
        kind: the operation kind that shows it.
        cause: of the waiting.
        named: the rank, path, node, pair of nodes or rail.
        size: of the effect.
        cells: [receiver, source], whose waiting it explains.
        gain: what to take away for the savings.
        evidence: numbers.
        seen_in: share of the operations that show it.
        most_certain: where something that matters is not known.
        words: what the row's next step needs besides the operation and what is named.
        next_step: instead of the row's.
    """
    e = kind.e
    verdict = Verdict(
        kind=cause.row.slow,
        cause=cause,
        operation=e.operation,
        effect_us=size.effect / 1e3,
        interval_us=size.interval_us,
        share=_share(e, cells),
        duration_us=e.duration_ns / 1e3,
        certainty=float(np.minimum(certainty(size.effect, size.error, size.tests), most_certain)),
        seen_in=seen_in,
        evidence=dict(evidence.items()),
        where=_where(named, e.m.place),
        next_step=next_step or cause.row.next_step.format_map({**_words_of(e, named), **words}),
        **vars(named),
    )
    return Found(verdict, kind, gain)


def found_on_paths(
    kind: JudgedKind,
    cause: Cause,
    named: Named,
    size: Size,
    paths: Any,
    *,
    evidence: Mapping[EvidenceKey, float],
    seen_in: float = math.nan,
    words: Mapping[str, str] = NO_WORDS,
) -> Found:
    """A verdict on `paths`, an index into [receiver, source]."""
    cells = np.zeros(kind.e.blame.shape, dtype=bool)
    cells[paths] = True
    np.fill_diagonal(cells, False)
    gain = Gain(kind.e.operation, paths=paths, path_ns=size.effect, at_times=math.isfinite(seen_in))
    return found_cause(
        kind, cause, named, size, cells, gain, evidence=evidence, seen_in=seen_in, words=words
    )


def cells_of(e: Estimates, *, source: int | None = None, receiver: int | None = None) -> BoolArray:
    """[receiver, source]: the waiting for one rank, of one rank."""
    cells = np.zeros(e.blame.shape, dtype=bool)
    if source is not None:
        cells[:, source] = True
    if receiver is not None:
        cells[receiver, :] = True
    return cells


def own_times(e: Estimates, rank: int) -> dict[EvidenceKey, float]:
    """What a rank does in an operation by itself, as evidence."""
    return {
        "gap_us": float(e.gap_ns[rank]) / 1e3,
        "send_us": float(e.send_ns[rank]) / 1e3,
        "drain_us": float(e.drain_ns[rank]) / 1e3,
    }


def _words_of(e: Estimates, named: Named) -> dict[str, object]:
    source, destination = named.edge or named.nodes or (None, None)
    words = {"operation": call_of(e.operation), "source": source, "destination": destination}
    return {**vars(named), **words}


def _where(named: Named, place: Place) -> str:
    def at(rank: int) -> str:
        if not place.hosts[rank]:
            return "did not report"
        return f"{place.hosts[rank]} {place.device}:{place.devices[rank]}".strip()

    def on(node: int) -> str:
        return place.hosts[int(np.flatnonzero(place.nodes == node)[0])]

    if named.rank is not None:
        return at(named.rank)
    if named.edge is not None:
        return f"{at(named.edge[0])} > {at(named.edge[1])}"
    if named.nodes is not None:
        return f"{on(named.nodes[0])} > {on(named.nodes[1])}"
    if named.node is not None:
        return on(named.node)
    return "" if named.rail is None else f"all hosts {place.device}:{named.rail}"


def _share(e: Estimates, cells: BoolArray) -> float:
    total = float(np.sum(e.blame))
    return float(np.sum(e.blame[cells])) / total if total > 0 else 0.0
