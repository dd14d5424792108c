"""The numbers that causes rest on, for each kind of operation: what ranks do by themselves, and the model of paths.

Nothing is decided here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..collect.group_matrices import Matrices
from ..collect.hops import NORMAL_COMBINE, NORMAL_DISPATCH
from ..core.diagnosis import BoolArray, FloatArray
from ..core.robust_stats import healthy, median, median_of
from .own_work import ByTokens, Effect, by_tokens, compare
from .partners import some_ranks
from .path_model import PathModel

if TYPE_CHECKING:
    from .judged_paths import JudgedPaths


@dataclass(frozen=True)
class Paths:
    """The path matrix `[receiver, source]` of one kind; ns.

    Attributes:
        time: median of arrival minus issue, clocks set; NaN where not known.
        usual: what a healthy path takes.
        between: whether a path joins two nodes.
        clock: [num_ranks], by how much each clock is ahead of what was measured.
        level: median of healthy paths within a node, and between nodes; NaN where there is none.
    """

    time: FloatArray
    usual: FloatArray
    between: BoolArray
    clock: FloatArray
    level: tuple[float, float]


@dataclass(frozen=True)
class Estimates:
    """One kind of operation; times in nanoseconds per operation.

    Attributes:
        m: what it was made from.
        duration_ns: what a rank spends in the operation, median.
        own_ns: what it spends by itself around one operation, before, while and after sending.
        work: own time before and while sending, up to the begin of waiting, without what tokens explain.
        drain: own time after the last arrival, likewise.
        by_work, by_drain: what tokens explain of each.
        load: tokens that the rank's experts handle, over an even share.
        gap_ns, span_ns, send_ns, drain_ns: [num_ranks], medians of what each rank does by itself.
        paths: the model of path times.
        blame: [receiver, source], waiting of the receiver in operations in which the source came last.
    """

    m: Matrices
    duration_ns: float
    own_ns: float
    work: Effect
    drain: Effect
    by_work: ByTokens
    by_drain: ByTokens
    load: FloatArray
    gap_ns: FloatArray
    span_ns: FloatArray
    send_ns: FloatArray
    drain_ns: FloatArray
    paths: Paths
    blame: FloatArray

    @property
    def operation(self) -> str:
        """The operation kind."""
        return self.m.operation

    @property
    def cost_known(self) -> bool:
        """Whether it is known what a token costs."""
        return self.by_work.is_known and self.by_drain.is_known

    @property
    def token_time(self) -> FloatArray:
        """[num_ranks] ns that tokens explain."""
        return self.by_work.time + self.by_drain.time

    @functools.cached_property
    def late(self) -> FloatArray:
        """[num_ranks]: when the others saw everything of a rank issued, above the healthy ranks."""
        by_some = median(self.m.late[some_ranks(self.m.num_ranks)], 0)
        seen = by_some - (self.paths.clock - np.median(self.paths.clock))
        return seen - healthy(seen)[0]

    @functools.cached_property
    def busy(self) -> Effect:
        """Work and drain together, asked for where loads differ; of tokens, only their change is taken out."""
        change = self.by_work.each - self.by_work.time + self.by_drain.each - self.by_drain.time
        values = self.m.gap + self.m.span + self.m.drain - change
        return compare(values, self.m.place.nodes)


def estimate_kinds(matrices: Mapping[str, Matrices], paths: JudgedPaths) -> list[Estimates]:
    """Estimates of every kind, each combine with its dispatch.

    Args:
        matrices: by kind; groups of at least two ranks.
        paths: of the same kinds.
    """
    return [
        _estimate(
            m,
            matrices.get(kind.replace("combine", "dispatch")) if "combine" in kind else None,
            paths.held_up(kind, m) + (_held_up_by_slots(m) if kind == NORMAL_DISPATCH else 0.0),
            _paths_of(m, paths.model, k),
        )
        for k, (kind, m) in enumerate(matrices.items())
    ]


def _paths_of(m: Matrices, model: PathModel, k: int) -> Paths:
    within, between = (model.level[k, :1], model.level[k, 1:3])
    has = [(model.classes == c).any() for c in range(3)]
    levels = [
        float(np.min(level[of])) if any(of) else float("nan")
        for level, of in ((within, has[:1]), (between, has[1:]))
    ]
    return Paths(
        model.corrected(k),
        model.usual[k],
        model.between,
        model.clock,
        (levels[0], levels[1]),
    )


def _estimate(m: Matrices, before: Matrices | None, held_up: FloatArray, paths: Paths) -> Estimates:
    work = m.gap + m.span
    sent, received = _sent_and_received(m.mean_tokens)
    # A link or a receiver that holds up its sender is no fault of the sender's.
    by_itself = work - held_up
    by_work = by_tokens(by_itself, sent, _handled_before(m, before))
    by_drain = by_tokens(m.drain, received, m.received)
    return Estimates(
        m=m,
        duration_ns=median_of(m.duration),
        own_ns=median_of(work + m.drain),
        work=compare(by_itself - by_work.each, m.place.nodes, by_work.error),
        drain=compare(m.drain - by_drain.each, m.place.nodes, by_drain.error),
        by_work=by_work,
        by_drain=by_drain,
        load=_over_even_share(_handled(m, before)),
        gap_ns=median(m.gap, 0),
        span_ns=median(m.span, 0),
        send_ns=m.send_ns(),
        drain_ns=median(m.drain, 0),
        paths=paths,
        blame=m.blame,
    )


def _sent_and_received(tokens: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[num_ranks] each, of [receiver, source] tokens per operation; NaN where nobody knows.

    What a rank received only the rank itself knows.
    """
    known = np.isfinite(tokens)
    sent, received = (np.nansum(tokens, axis=axis) for axis in (0, 1))
    return (
        np.where(known.any(axis=0), sent, np.nan),
        np.where(known.any(axis=1), received, np.nan),
    )


def _handled(m: Matrices, before: Matrices | None) -> FloatArray:
    """[num_ranks]: tokens per operation that the experts of each rank got, or return.

    Means, because layers with a routing of their own each add up.
    """
    if m.operation == NORMAL_COMBINE and before is not None:
        # Gateways return sums in the place of others.
        return _sent_and_received(before.mean_tokens)[1]
    sent, received = _sent_and_received(m.mean_tokens)
    return sent if m.operation.endswith("combine") else received


def _handled_before(m: Matrices, before: Matrices | None) -> FloatArray | None:
    """[n, num_ranks]: what each rank received in the operation before each combine."""
    if before is None or not m.ops.size or not before.ops.size:
        return None
    at = np.searchsorted(before.ops, m.ops, side="left") - 1
    handled = np.where((at >= 0)[:, None], before.received[np.maximum(at, 0)], np.nan)
    return np.asarray(handled)


def _over_even_share(tokens: FloatArray) -> FloatArray:
    """A rank's tokens over the mean of all; 1 where there are none at all."""
    known = tokens[np.isfinite(tokens)]
    mean = float(np.mean(known)) if known.size else 0.0
    return tokens / mean if mean > 0 else np.ones(tokens.shape)


def _held_up_by_slots(m: Matrices) -> FloatArray:
    """[num_ranks]: how much longer than others the sending of a normal dispatch took for want of slots, ns."""
    # Of what a gateway has passed on, the gateway waited; a rank may wait for its own slots.
    waited = np.where(m.has_sources & ~m.is_relayed, m.credit, 0.0)
    span = median(m.span, 0)
    return np.clip(np.nan_to_num(span - healthy(span)[0]), 0.0, waited.max(axis=0))
