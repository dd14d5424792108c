"""The paths of kinds of operation that follow each other: the model of their times, and the causes of what it leaves over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..collect.group_matrices import Matrices
from ..core.causes import Cause
from ..core.diagnosis import FloatArray
from ..core.robust_stats import healthy, median, median_of, or_zero, quantile
from .path_causes import Contest, PathCause
from .path_model import MIN_RANKS_TO_SPLIT_PATHS, PathModel, fit_paths, flat
from .thresholds import BORNE_OUT, CLOCKS_KNOWN_NS, Thresholds

# Bursts are in more operations.
LEAST_SHARE = 0.05
# Clocks that are off by more are said.
_CLOCKS_OFF_NS = 40_000.0


@dataclass(frozen=True)
class JudgedPaths:
    """The paths of kinds that follow each other.

    Attributes:
        operations: kinds, in the order of the model's.
        model: with clocks as the causes leave them.
        causes: that were found.
    """

    operations: Sequence[str]
    model: PathModel
    causes: Sequence[PathCause]

    @property
    def clocks_off_us(self) -> float:
        """How far clocks have drifted since they were measured, where that is worth a word; else 0."""
        off_ns = float(np.abs(self.model.clock).max(initial=0.0))
        return off_ns / 1e3 if off_ns > _CLOCKS_OFF_NS else 0.0

    @property
    def is_too_small_for_clocks(self) -> bool:
        """Whether there are too few ranks to find out how far clocks are off, and nobody knows."""
        few = self.model.place.num_ranks < MIN_RANKS_TO_SPLIT_PATHS
        return few and bool((self.model.prior.sigma > CLOCKS_KNOWN_NS / 2).any())

    def held_up(self, kind: str, m: Matrices) -> FloatArray:
        """[n, num_ranks] ns: of the time before waiting, what a rank waited at its fence for paths out of it."""
        k = self.operations.index(kind)
        slow = np.zeros(self.model.time.shape[1:])
        for cause in self.causes:
            when_slow = cause.effect[k] / max(cause.share[k], LEAST_SHARE)
            slow[cause.group.receivers, cause.group.sources] += when_slow
            if cause.cause != cause.group.cause:
                slow[cause.group.sources, cause.group.receivers] += when_slow
        slowest = np.where(self.model.classes == 0, slow, 0.0).max(axis=0)
        held = np.nan_to_num(m.held)
        for_rows = np.minimum(held, self._longest_until_come(k, m))
        usual = or_zero(healthy(median(held - for_rows, 0))[0])
        return np.asarray(for_rows + np.clip(held - for_rows - usual, 0.0, slowest))

    def _longest_until_come(self, k: int, m: Matrices) -> float:
        """The longest that any rank was seen to take, ns, from its last row until what it sent within its node had come.

        The longest of all, since who looked later has seen less of a rank's own.
        """
        if self.is_too_small_for_clocks:
            return 0.0
        come = np.where(self.model.classes == 0, self.model.corrected(k) + m.send, np.nan)
        until = np.fmax.reduce(come, axis=0, initial=np.nan) - m.send_ns()
        return max(or_zero(float(np.fmax.reduce(until))), 0.0)


def judge_paths(matrices: Mapping[str, Matrices], limits: Mapping[str, Thresholds]) -> JudgedPaths:
    """Fits the model to kinds of a group of at least two ranks, and looks for causes."""
    kinds = list(matrices.values())
    floors = np.array(
        [limits[kind].floor_ns(median_of(m.duration)) for kind, m in matrices.items()]
    )
    model = fit_paths(kinds, min(limits[kind].delta_ns for kind in matrices))
    judged = JudgedPaths(list(matrices), model, [])
    if judged.is_too_small_for_clocks:
        return judged
    false_alarms = next(iter(limits.values())).false_alarms
    lasting = Contest(model, model.rest, floors, false_alarms, fits_clocks=True)
    causes = lasting.run()
    model = replace(model, rest=lasting.rest, clock=lasting.clock)
    is_known = np.isfinite(model.time)
    bursts, share = (
        np.where(is_known, np.stack(of_kinds), np.nan)
        for of_kinds in ([m.path_burst for m in kinds], [m.path_burst_share for m in kinds])
    )
    least = floors / 2
    if ((share > 0) & (bursts > least[:, None, None])).any():
        named = {(cause.group.cause, cause.group.number) for cause in causes}
        recurring, lasts = flat(np.where(share > 0, bursts, 0.0 * bursts)), flat(model.rest)
        # What all paths of a class have is nobody's.
        for number in range(3):
            of_class = model.classes == number
            bursts[:, of_class] -= median(bursts[:, of_class], 1)[:, None]
        at_times = Contest(model, bursts, floors, false_alarms, fits_clocks=False).run(share)
        causes += [
            one
            for one in at_times
            if (one.group.cause, one.group.number) not in named
            and _comes_and_goes(
                list(matrices),
                one,
                recurring[:, one.group.paths],
                lasts[:, one.group.paths],
                least,
            )
        ]
    return JudgedPaths(list(matrices), model, causes)


def _comes_and_goes(
    kinds: Sequence[str],
    cause: PathCause,
    recurring: FloatArray,
    lasts: FloatArray,
    least: FloatArray,
) -> bool:
    """Whether bursts that recur show in all kinds of operation in which they must, and about as much as in the others.

    Experts that are in demand in some layers slow the way into their rank in dispatch, and out of it in combine. So the
    other kind tells a link from them.

    Args:
        kinds: of operation.
        cause: that explains bursts.
        recurring: [kinds, paths] ns, what those that recur add to each of its paths.
        lasts: likewise, by how much the median is longer; of a path's bursts that noise hides it shows a part.
        least: [kinds] ns.
    """
    is_combine = np.array(["combine" in kind for kind in kinds])
    tells = {Cause.INGRESS: is_combine, Cause.EGRESS: ~is_combine}.get(cause.group.cause)
    told = cause.is_known if tells is None or not tells.any() else cause.is_known & tells
    # Of two paths both must.
    shown = np.fmin(cause.effect, quantile(recurring, 0.5, 1))
    if cause.is_single:
        shown = np.where(cause.effect > 0, shown, np.nan_to_num(lasts[:, 0]))
    enough = shown > np.maximum(least, BORNE_OUT * cause.effect.max())
    return bool(told.any() and enough[told].all())
