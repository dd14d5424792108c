"""Causes of slow paths compete for what the model of path times leaves over.

The group of paths that takes most out of the loss comes first, and so on until none takes out more than noise could:
a rail wins against its paths, a side of a rank against the cells of its row. Single paths come last.

Clocks are part of the fit. Of a rank whose paths are slow one way, either that side is slow, or the other one and its
clock is off. Each is fitted with the clock that suits it best, at the price that measured offsets set. If the data
cannot tell the two apart, the verdict says both.

The loss is Huber's, in nats: the square of small deviations, and for large ones linear.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..core.causes import Cause
from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import MEDIAN_COST, median, quantile, weighted_median
from .clocks import Prior
from .path_groups import (
    KNOWN,
    NIC,
    NO_RANKS,
    NVLINK,
    PathGroup,
    links_of,
    looks,
    path,
    side,
    spread_of,
)
from .path_model import (
    A_CAUSE,
    MIN_RANKS_TO_SPLIT_PATHS,
    MOSTLY_BUSY,
    PathModel,
    flat,
    known_rest,
)
from .thresholds import BORNE_OUT

_SIDES = (Cause.INGRESS, Cause.EGRESS)
# Deviations beyond so many standard deviations count linearly.
_HUBER = 2.0
# Groups fitted at first, of each kind, and single paths.
_TRIED = 24
# What explains the data as well but for so many nats cannot be told apart.
_UNDECIDED = 5.0
# Of the smallest effect of interest, the part that medians of many paths may be off for other reasons.
_LEAST_ERROR = 1 / 4


@dataclass(frozen=True)
class PathCause:
    """A cause that was found.

    Attributes:
        cause: with both directions where the data cannot tell them apart.
        group: its paths.
        effect: [kinds] ns per operation; 0 where it does not show.
        error: [kinds] ns, standard error.
        spread: [kinds] ns, by how much healthy groups like it differ.
        gain: nats by which it lowers the loss.
        share: [kinds], of the operations that show it.
        is_known: [kinds], where anything is known of its paths.
    """

    cause: Cause
    group: PathGroup
    effect: FloatArray
    error: FloatArray
    spread: FloatArray
    gain: float
    share: FloatArray
    is_known: BoolArray

    @property
    def is_single(self) -> bool:
        """Whether it is a path alone."""
        return self.group.cause == Cause.PATH

    @property
    def at_times(self) -> bool:
        """Whether it shows in some operations only."""
        return bool(self.share.min() < 1)


class _Option(NamedTuple):
    """A way to explain the paths of some ranks: the loss in nats, which are slow, and by how much clocks are off."""

    loss: float
    group: PathGroup | None
    shift: float


@dataclass(frozen=True)
class _Parts:
    """Medians of paths of some ranks that are alike, over what the model has, ns.

    Attributes:
        over, error: [parts, kinds]; NaN where nothing is known.
        is_bound: [parts, kinds], where `over` is the most that paths take.
        sign: [parts, kinds], 1 for paths into the ranks, -1 for those out of them; 0 where clocks do not matter.
        is_fence: [parts], those that are not paths but waiting at fences.
        first: [parts], one path of each.
    """

    over: FloatArray
    error: FloatArray
    is_bound: BoolArray
    sign: FloatArray
    is_fence: BoolArray
    first: IntArray

    def of(self, group: PathGroup) -> BoolArray:
        """[parts], those that are in a group."""
        return np.isin(self.first, group.paths)

    def shifts(self, slow: BoolArray) -> FloatArray:
        """By how much the clocks may be ahead, as parts tell that are not slow, with bounds and without; or not at all.

        Args:
            slow: [causes, parts], which each cause slows.
        """
        told = (self.sign != 0) & ~np.asarray(slow.any(axis=0))[:, None]
        ahead, weight = self.sign * self.over, 1 / self.error
        seen = told & ~self.is_bound
        return np.unique([0.0, *(weighted_median(ahead[of], weight[of]) for of in (told, seen))])

    def misfit(self, slow: BoolArray, shifts: FloatArray) -> FloatArray:
        """[cases]: nats that parts are off, of which those of a cause are slow by the same.

        Args:
            slow: [cases, causes, parts], which each cause slows.
            shifts: [cases], of the clocks, ns.
        """
        left = self.over - shifts[:, None, None] * self.sign
        for of_cause in slow.swapaxes(0, 1):
            shown = (of_cause & ~self.is_fence)[:, :, None]
            effect = np.maximum(np.nan_to_num(median(np.where(shown, left, np.nan), 1)), 0.0)
            left -= effect[:, None] * of_cause[:, :, None]
            # What a rank waits at its fence is known up to a limit only.
            left[of_cause & self.is_fence] = 0.0
        np.minimum(left, 0.0, out=left, where=self.is_bound)
        return np.asarray(_huber(np.nan_to_num(left / self.error)).sum(axis=(1, 2)))


def _huber(deviation: FloatArray) -> FloatArray:
    size = np.abs(deviation)
    return np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))


@dataclass(frozen=True)
class _Fit:
    """A group with the [kinds] ns that it explains, while clocks are off by `shift` more, and the nats gained.

    `options` are all ways to explain its paths, where clocks matter.
    """

    group: PathGroup
    effect: FloatArray
    shift: float
    gain: float
    options: Sequence[_Option] = ()


class Contest:
    """Candidates, and what is left for them.

    Attributes:
        rest: [kinds, receiver, source] ns that no cause has explained yet.
        price: nats that a cause must gain: the logarithm of the number of paths over the chance of a false cause.
    """

    def __init__(
        self,
        model: PathModel,
        rest: FloatArray,
        floors: FloatArray,
        false_alarms: float,
        *,
        fits_clocks: bool,
    ) -> None:
        """Lasting causes, with clocks; or what comes in bursts, in whose differences no clock is.

        Args:
            model: without causes.
            rest: [kinds, receiver, source] ns, what the causes explain.
            floors: [kinds] ns, the smallest effects worth a verdict.
            false_alarms: chance of a false cause in a healthy window.
            fits_clocks: whether clocks may be off.
        """
        self.model, self.rest, self.floors = model, rest.copy(), floors
        self.price = math.log(max(int(model.expected.sum()), 1) / false_alarms)
        self.clock = model.clock.copy()
        self.is_bound = model.is_bound if fits_clocks else np.zeros(rest.shape, bool)
        self.is_large = model.place.num_ranks >= MIN_RANKS_TO_SPLIT_PATHS
        self.fits_clocks = fits_clocks and self.is_large
        self.spreads: dict[tuple[Cause, str], FloatArray] = {}
        self.least_error = float(floors.min()) * _LEAST_ERROR
        self.links = links_of(model)
        self.options_of_rank: dict[int, list[_Option]] = {}

    def run(self, share: FloatArray | None = None) -> list[PathCause]:
        """All causes, in the order in which they were found.

        Args:
            share: [kinds, receiver, source], of the operations that show what a path shows.
        """
        promising = self._promising() if self.is_large else []
        chosen = self._groups(promising)
        chosen += self._single_paths(promising)
        return [self._found(cause, fit, share) for cause, fit in chosen]

    # --- groups ---------------------------------------------------------------------------------

    def _groups(self, promising: Sequence[PathGroup]) -> list[tuple[Cause, _Fit]]:
        """Whatever gains most is taken, until nothing gains its price.

        What a cause explains lowers the gains of others, and raises none. So only gains that might still be the
        largest are worked out anew.
        """
        waiting = [(-fit.gain, i, fit) for i, fit in enumerate(map(self._best, promising))]
        heapq.heapify(waiting)
        chosen: list[tuple[Cause, _Fit]] = []
        while waiting and -waiting[0][0] > self.price:
            _, i, fit = heapq.heappop(waiting)
            fit = self._best(fit.group)
            if waiting and fit.gain < -waiting[0][0]:
                heapq.heappush(waiting, (-fit.gain, i, fit))
            elif fit.gain > self.price:
                cause = self._name(fit.group, fit.options) if fit.effect.any() else None
                self._explain(fit)
                if cause is not None:
                    chosen.append((cause, fit))
        return chosen

    def _promising(self) -> list[PathGroup]:
        rest = known_rest(self.rest, self.is_bound)
        groups = []
        for look in looks(self.model, at_times=not self.fits_clocks):
            medians = look.medians(rest, self.model.expected)
            self.spreads[look.cause, look.link] = spread_of(medians)
            over = np.where(medians > self.floors[:, None], medians, 0.0).max(axis=0)
            largest = np.argsort(-over)[:_TRIED]
            groups += [look.group(i) for i in largest[over[largest] > 0].tolist()]
        return groups

    def _best(self, group: PathGroup) -> _Fit:
        """The group as the cause, the other direction, or nothing but clocks that are off: whatever suits best."""
        options = self._options(group)
        if not options:
            return self._fit(group, 0.0)
        best = min(options, key=lambda option: option.loss)
        slow = best.group or replace(group, receivers=NO_RANKS, sources=NO_RANKS)
        return replace(self._fit(slow, best.shift), options=options)

    def _name(self, group: PathGroup, options: Sequence[_Option]) -> Cause | None:
        """The cause, or that of both directions if the other one, with other clocks, explains as much."""
        if not options:
            return group.cause
        losses: dict[bool, list[float]] = {True: [], False: []}
        for loss, slow, _ in options:
            losses[slow is not None and slow.is_same(group.mirrored)].append(loss)
        return group.either if min(losses[True]) - min(losses[False]) < _UNDECIDED else group.cause

    def _options(self, group: PathGroup) -> list[_Option]:
        """What explains the paths of the group's ranks: it, or what it can be mixed up with, and the clocks that suit."""
        if not (self.fits_clocks and group.clocks.size):
            return []
        if group.cause not in _SIDES:
            return self._weighed(group)
        # Sides of a rank are explained alike, whichever of them is looked at.
        rank = int(group.clocks[0])
        if rank not in self.options_of_rank:
            self.options_of_rank[rank] = self._weighed(group)
        return self.options_of_rank[rank]

    def _weighed(self, group: PathGroup) -> list[_Option]:
        """What `_options` are, worked out.

        A clock moves all paths of its rank. So medians of paths that are alike are compared, whose errors do not become
        small where there are many of them.
        """
        parts = self._parts(group)
        none = np.zeros(len(parts.first), bool)
        ways: list[tuple[PathGroup | None, BoolArray]] = [(None, np.stack([none, none]))]
        for one, other in self._rivals(group):
            here, there = parts.of(one), parts.of(other)
            ways += [
                (one, np.stack([here, none])),
                (other, np.stack([there, none])),
                (one, np.stack([here, there])),
            ]
        cases = [(of, slow, shift) for of, slow in ways for shift in parts.shifts(slow)]
        slow, shifts = (np.array([case[i] for case in cases]) for i in (1, 2))
        losses = parts.misfit(slow, shifts) + self._prices_of_clocks(group, shifts)
        losses += A_CAUSE * slow.any(axis=2).sum(axis=1)
        return [_Option(loss, of, shift) for loss, (of, _, shift) in zip(losses.tolist(), cases)]

    def _rivals(self, group: PathGroup) -> list[tuple[PathGroup, PathGroup]]:
        """Pairs of a cause and the same paths in the other direction, of which one may be the case."""
        if group.cause not in _SIDES:
            return [(group, group.mirrored)]
        rank = int(group.clocks[0])
        sides = [side(self.model, group.cause, link, rank) for link in self.links]
        return [(one, one.mirrored) for one in sides if one.receivers.size > 1]

    def _parts(self, group: PathGroup) -> _Parts:
        around, moved = group.around, self._moved(group)
        rest, noise = self._cells(around.paths)
        rest, hides = known_rest(rest, self._hides(around.paths)), self._hides(around.paths)
        usual = flat(self.model.usual)[:, around.paths]
        between = self.model.between.ravel()[around.paths]
        known = np.isfinite(rest)
        seen = known & ~hides
        # Clocks move a median as they move the paths that it is of.
        values = np.stack([rest, noise, usual, np.where(known, moved, np.nan)])
        number = np.select([around.ours, around.opposite], [1, 2], 3)
        alike = 4 * (group.cause not in _SIDES) * number + 2 * (around.way > 0) + between
        found = []
        for kind in np.unique(alike).tolist():
            cells = np.flatnonzero(alike == kind)
            over, alone, takes, sign = median(values[:, :, cells], 2)
            count = np.maximum(known[:, cells].sum(axis=1), 1)
            alone = MEDIAN_COST * alone / np.sqrt(count)
            link = NIC if between[cells[0]] else NVLINK
            differ = np.maximum(self.spreads.get((Cause.INGRESS, link), 0.0), self.least_error)
            error = np.sqrt(alone**2 + differ**2 + (MOSTLY_BUSY * takes) ** 2)
            at_most = ~seen[:, cells].any(axis=1)
            found.append(
                (over, error, at_most, np.nan_to_num(sign), False, int(around.paths[cells[0]]))
            )
        if group.clocks.size == 1:
            # Fences wait for the slowest path out of a rank within its node, on its own clock.
            fence = self.model.fence[:, group.clocks[0]]
            most = self.least_error * self.price / _HUBER / len(fence)
            for held, way in ((fence, -1.0), (-fence, 1.0)):
                mates = np.flatnonzero(~between & (around.way == way))
                if mates.size:
                    error = np.full(len(fence), self.least_error)
                    no_bound = np.zeros(len(fence), bool)
                    over, first = np.clip(held, 0.0, most), int(around.paths[mates[0]])
                    found.append((over, error, no_bound, 0.0 * error, True, first))
        return _Parts(*map(np.array, zip(*found)))

    def _prices_of_clocks(self, group: PathGroup, shifts: FloatArray) -> FloatArray:
        prior, clock = Prior(self.model.prior.sigma[group.clocks]), self.clock[group.clocks]
        change = prior.penalty(clock + shifts[:, None]) - prior.penalty(clock)
        return np.asarray(change.mean(axis=1))

    def _fit(self, group: PathGroup, shift: float) -> _Fit:
        """With clocks of its ranks that are ahead by `shift` more."""
        at, ours = group.paths, np.ones(group.paths.size, bool)
        if shift:
            at, ours = group.around.paths, group.around.ours
        rest, noise = self._cells(at)
        left = rest - shift * self._moved(group) if shift else rest
        effect = np.zeros(len(rest))
        if ours.any():
            slow = known_rest(left, self._hides(at))[:, ours]
            expected = flat(self.model.expected)[:, at[ours]].sum(axis=1)
            enough = np.isfinite(slow).sum(axis=1) >= KNOWN * expected
            # Of two paths of which one is slow, nothing is common.
            in_common = np.where(expected == 2, quantile(slow, 0.5, 1), median(slow, 1))
            effect = np.where(enough, np.maximum(np.nan_to_num(in_common), 0.0), 0.0)
            # A hop that shows no more than one of them does not tell, unless others do.
            by_others = effect[expected > 1].max(initial=0.0)
            effect[(expected == 1) & (BORNE_OUT * effect > by_others)] = 0.0
        after = self._loss(left - effect[:, None] * ours, noise, at)
        gains = (self._loss(rest, noise, at) - after).sum(axis=1)
        if not shift:
            effect = np.where(gains > 0, effect, 0.0)
            gains = np.maximum(gains, 0.0)
        return _Fit(group, effect, shift, float(gains.sum()))

    def _moved(self, group: PathGroup) -> FloatArray:
        """[kinds, paths around it]: how a clock of its ranks that is ahead moves each."""
        on_one_clock = flat(self.model.on_one_clock)[:, group.around.paths]
        return np.where(on_one_clock, 0.0, group.around.way)

    def _cells(self, at: IntArray) -> tuple[FloatArray, FloatArray]:
        return flat(self.rest)[:, at], flat(self.model.noise)[:, at]

    def _hides(self, at: IntArray) -> Any:
        return flat(self.is_bound)[:, at]

    def _loss(self, rest: FloatArray, noise: FloatArray, at: IntArray) -> FloatArray:
        return _huber(np.nan_to_num(known_rest(rest, self._hides(at)) / noise))

    # --- what was chosen ------------------------------------------------------------------------

    def _explain(self, fit: _Fit) -> None:
        self.options_of_rank.clear()
        rest = flat(self.rest)
        rest[:, fit.group.paths] -= fit.effect[:, None]
        if fit.shift:
            rest[:, fit.group.around.paths] -= fit.shift * self._moved(fit.group)
            self.clock[fit.group.clocks] += fit.shift

    def _single_paths(self, groups: Sequence[PathGroup]) -> list[tuple[Cause, _Fit]]:
        """What is left of paths over what those of a group have in common, which was named as that or is nothing."""
        num_ranks, left = self.model.place.num_ranks, known_rest(self.rest, self.is_bound)
        for group in groups:
            slow = flat(left)[:, group.paths]
            in_common = np.maximum(np.nan_to_num(quantile(slow, 0.5, 1)), 0.0)
            # Of one path that is known, nothing is.
            in_common[np.isfinite(slow).sum(axis=1) == 1] = 0.0
            flat(left)[:, group.paths] -= in_common[:, None]
        # A path gains the price in one kind at least: the square of what is over is no less than Huber's loss.
        least = math.sqrt(2 * self.price / len(self.rest)) * self.model.noise
        some = np.flatnonzero((~self.is_bound & (left > least)).any(axis=0))
        rest = flat(left)[:, some]
        gains = _huber(np.nan_to_num(rest / flat(self.model.noise)[:, some]))
        gains = np.where(rest > 0, gains, 0.0)
        found = []
        for i in np.flatnonzero(gains.sum(axis=0) > self.price).tolist():
            dst, src = divmod(int(some[i]), num_ranks)
            link = NIC if self.model.between[dst, src] else NVLINK
            effect = np.where(gains[:, i] > 0, rest[:, i], 0.0)
            group = path(dst, src, link, num_ranks)
            fit = _Fit(group, effect, 0.0, float(gains[:, i].sum()))
            found.append((self._name_of_path(fit.group), fit))
        for _, fit in found:
            self._explain(fit)
        return found

    def _name_of_path(self, group: PathGroup) -> Cause:
        """Of a rank of which hardly any other path was seen, the way back and the clock explain as much."""
        ends = (replace(group, clocks=end) for end in (group.receivers, group.sources))
        names = {self._name(one, self._options(one)) for one in ends}
        return Cause.PATH_OR_BACK if Cause.PATH_OR_BACK in names else Cause.PATH

    def _found(self, cause: Cause, fit: _Fit, share: FloatArray | None) -> PathCause:
        at = fit.group.paths
        rest, noise = self._cells(at)
        known = np.isfinite(rest).sum(axis=1)
        alone = MEDIAN_COST * np.nan_to_num(median(noise, 1)) / np.sqrt(np.maximum(known, 1))
        in_common = np.nan_to_num(median(flat(self.model.error)[:, at], 1))
        return PathCause(
            cause,
            fit.group,
            fit.effect,
            np.hypot(alone, in_common),
            self.spreads.get((fit.group.cause, fit.group.link), np.zeros(len(noise))),
            fit.gain,
            np.ones(len(noise)) if share is None else np.nan_to_num(median(flat(share)[:, at], 1)),
            known > 0,
        )
