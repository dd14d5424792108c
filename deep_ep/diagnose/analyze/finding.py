"""A cause that a rule has found: its verdict, all but the savings, and what to replay for those."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deep_ep.diagnose.analyze.estimates import Estimates
from deep_ep.diagnose.analyze.thresholds import JudgedKind
from deep_ep.diagnose.analyze.what_if import Gain
from deep_ep.diagnose.collect.group_matrices import Place
from deep_ep.diagnose.core.diagnosis import COMM_SLOW, BoolArray, Verdict
from deep_ep.diagnose.core.robust_stats import certainty

_NORMAL_95 = 1.96


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
        peers: from how many of them that is known; 0: from very many.
    """

    effect: float
    error: float
    tests: int
    spread: float = 0.0
    peers: int = 0

    @property
    def interval_us(self) -> tuple[float, float]:
        """95 %; NaN where no error is known."""
        half = math.hypot(_NORMAL_95 * self.error, _student_95(self.peers - 1) * self.spread)
        if not half > 0:
            return float("nan"), float("nan")
        return (self.effect - half) / 1e3, (self.effect + half) / 1e3


def found_cause(
    kind: JudgedKind,
    verdict_kind: str,
    cause: str,
    size: Size,
    cells: BoolArray,
    gain: Gain,
    *,
    most_certain: float = 1.0,
    **rest: Any,
) -> Found:
    """A verdict on a rank.

    Args:
        kind: the operation kind that shows it.
        verdict_kind, cause: class and sub-class.
        size: of the effect.
        cells: [receiver, source], whose waiting it explains.
        gain: what to take away for the savings.
        most_certain: where something that matters is not known.
        rest: further fields of the verdict.
    """
    e = kind.e
    verdict = Verdict(
        kind=verdict_kind,
        cause=cause,
        operation=e.operation,
        effect_us=size.effect / 1e3,
        interval_us=size.interval_us,
        share=_share(e, cells),
        duration_us=e.duration_ns / 1e3,
        certainty=min(certainty(size.effect, size.error, size.tests), most_certain)
        if e.has_stamps
        else float("nan"),
        **{"rank": None, "edge": None, "seen_in": float("nan"), **rest},
    )
    return Found(replace(verdict, where=_where(verdict, e.m.place)), kind, gain)


def found_on_paths(kind: JudgedKind, cause: str, size: Size, paths: Any, **rest: Any) -> Found:
    """A verdict on `paths`, an index into [receiver, source]."""
    cells = np.zeros(kind.e.blame.shape, dtype=bool)
    cells[paths] = True
    np.fill_diagonal(cells, False)
    gain = Gain(kind.e.operation, paths=paths, path_ns=size.effect)
    return found_cause(kind, COMM_SLOW, cause, size, cells, gain, **rest)


def cells_of(e: Estimates, *, source: int | None = None, receiver: int | None = None) -> BoolArray:
    """[receiver, source]: the waiting for one rank, of one rank."""
    cells = np.zeros(e.blame.shape, dtype=bool)
    if source is not None:
        cells[:, source] = True
    if receiver is not None:
        cells[receiver, :] = True
    return cells


def own_times(e: Estimates, rank: int) -> dict[str, float]:
    """What a rank does in an operation by itself, as evidence."""
    return {
        "gap us": float(e.gap_ns[rank]) / 1e3,
        "send us": float(e.send_ns[rank]) / 1e3,
        "drain us": float(e.drain_ns[rank]) / 1e3,
    }


def _where(verdict: Verdict, place: Place) -> str:
    def at(rank: int) -> str:
        if not place.hosts[rank]:
            return "did not report"
        return f"{place.hosts[rank]} {place.device}:{place.devices[rank]}".strip()

    def on(node: int) -> str:
        return place.hosts[int(np.flatnonzero(place.nodes == node)[0])]

    if verdict.rank is not None:
        return at(verdict.rank)
    if verdict.edge is not None:
        return f"{at(verdict.edge[0])} > {at(verdict.edge[1])}"
    if verdict.nodes is not None:
        return f"{on(verdict.nodes[0])} > {on(verdict.nodes[1])}"
    if verdict.node is not None:
        return on(verdict.node)
    return "" if verdict.rail is None else f"all hosts {place.device}:{verdict.rail}"


def _share(e: Estimates, cells: BoolArray) -> float:
    total = float(np.sum(e.blame))
    return float(np.sum(e.blame[cells])) / total if total > 0 else 0.0


def _student_95(degrees: int) -> float:
    """Student's t beyond which 2.5 % lie, to a hundredth from two degrees of freedom on."""
    if degrees < 1:
        return _NORMAL_95
    return _NORMAL_95 + 2.37 / degrees + 2.82 / degrees**2 + 3.9 / degrees**3
