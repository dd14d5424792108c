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
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..core.causes import Cause
from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.robust_stats import MEDIAN_COST, median, weighted_median
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
    OTHERWISE_BUSY,
    PathModel,
    flat,
    known_rest,
)

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


class _Option(NamedTuple):
    """A way to explain the paths of some ranks: the loss in nats, which are slow, and by how much clocks are off."""

    loss: float
    group: PathGroup
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
        num_ranks: of the group.
    """

    over: FloatArray
    error: FloatArray
    is_bound: BoolArray
    sign: FloatArray
    is_fence: BoolArray
    first: IntArray
    num_ranks: int

    def of(self, group: PathGroup) -> BoolArray:
        """[parts], those that are in a group."""
        return np.isin(self.first, group.paths(self.num_ranks))

    def shifts(self, slow: Sequence[BoolArray]) -> set[float]:
        """By how much the clocks may be ahead, as parts tell that are not slow, with bounds and without; or not at all."""
        told = self.sign != 0
        for of_cause in slow:
            told = told & ~of_cause[:, None]
        ahead, weight = self.sign * self.over, 1 / self.error
        seen = told & ~self.is_bound
        return {
            0.0,
            weighted_median(ahead[told], weight[told]),
            weighted_median(ahead[seen], weight[seen]),
        }

    def misfit(self, slow: Sequence[BoolArray], shift: float) -> float:
        """Nats that parts are off, of which those of a cause are slow by the same."""
        left = self.over - shift * self.sign
        for of_cause in slow:
            effect = np.maximum(np.nan_to_num(median(left[of_cause & ~self.is_fence], 0)), 0.0)
            left = left - effect * of_cause[:, None]
            # What a rank waits at its fence is known up to a limit only.
            left[of_cause & self.is_fence] = 0.0
        left = np.where(self.is_bound, np.minimum(left, 0.0), left)
        return float(_huber(np.nan_to_num(left / self.error)).sum())


def _huber(deviation: FloatArray) -> FloatArray:
    size = np.abs(deviation)
    return np.where(size < _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))


@dataclass(frozen=True)
class _Fit:
    """A group with the [kinds] ns that it explains, while clocks are off by `shift` more, and the nats gained."""

    group: PathGroup
    effect: FloatArray
    shift: float
    gain: float


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
            floors: [kinds, 2] ns, the smallest effects worth a verdict, within nodes and between.
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

    def run(self, share: FloatArray | None = None) -> list[PathCause]:
        """All causes, in the order in which they were found.

        Args:
            share: [kinds, receiver, source], of the operations that show what a path shows.
        """
        chosen = self._groups() if self.is_large else []
        for _ in range(2):
            chosen = [(cause, self._settled(fit)) for cause, fit in chosen]
        return [self._found(cause, fit, share) for cause, fit in chosen + self._single_paths()]

    # --- groups ---------------------------------------------------------------------------------

    def _groups(self) -> list[tuple[Cause, _Fit]]:
        """Whatever gains most is taken, until nothing gains its price.

        What a cause explains lowers the gains of others, and raises none. So only gains that might still be the
        largest are worked out anew.
        """
        waiting = [(-fit.gain, i, fit) for i, fit in enumerate(map(self._best, self._promising()))]
        heapq.heapify(waiting)
        chosen: list[tuple[Cause, _Fit]] = []
        while waiting and -waiting[0][0] > self.price:
            _, i, fit = heapq.heappop(waiting)
            fit = self._best(fit.group)
            if waiting and fit.gain < -waiting[0][0]:
                heapq.heappush(waiting, (-fit.gain, i, fit))
            elif fit.gain > self.price:
                cause = self._name(fit.group) if fit.effect.any() else None
                self._explain(fit)
                if cause is not None:
                    chosen.append((cause, fit))
        return chosen

    def _promising(self) -> list[PathGroup]:
        rest = known_rest(self.rest, self.is_bound)
        groups = []
        for look in looks(self.model):
            medians = look.medians(rest, self.model.expected)
            self.spreads[look.cause, look.link] = spread_of(medians)
            floor = self.floors[:, 0 if look.link == NVLINK else 1][:, None]
            over = np.where(medians > floor / 2, medians, 0.0).max(axis=0)
            largest = np.argsort(-over)[:_TRIED]
            groups += [look.group(i) for i in largest[over[largest] > 0].tolist()]
        return groups

    def _best(self, group: PathGroup) -> _Fit:
        """The group as the cause, the other direction, or nothing but clocks that are off: whatever suits best."""
        if not (self.fits_clocks and group.clocks.size):
            return self._fit(group, 0.0)
        option = min(self._options(group), key=lambda option: option.loss)
        return self._fit(option.group, option.shift)

    def _name(self, group: PathGroup) -> Cause | None:
        """The cause, or that of both directions if the other one, with other clocks, explains as much."""
        if not (self.fits_clocks and group.clocks.size):
            return group.cause
        options, opposite = self._options(group), group.mirrored()
        mine, other = (
            min(
                option.loss
                for option in options
                if (option.group.cause, option.group.number) == (one.cause, one.number)
            )
            for one in (group, opposite)
        )
        return group.either if other - mine < _UNDECIDED else group.cause

    def _options(self, group: PathGroup) -> list[_Option]:
        """What explains the paths of the group's ranks: it, or what it can be mixed up with, and the clocks that suit.

        A clock moves all paths of its rank. So medians of paths that are alike are compared, whose errors do not become
        small where there are many of them.
        """
        parts = self._parts(group)
        nothing = replace(group, receivers=NO_RANKS, sources=NO_RANKS)
        ways: list[tuple[PathGroup, list[BoolArray]]] = [(nothing, [])]
        for one, other in self._rivals(group):
            here, there = parts.of(one), parts.of(other)
            ways += [(one, [here]), (other, [there]), (one, [here, there])]
        options = []
        for of, slow in ways:
            for shift in parts.shifts(slow):
                loss = parts.misfit(slow, shift) + self._price_of_clock(group, shift)
                options.append(_Option(loss + A_CAUSE * len(slow), of, shift))
        return options

    def _rivals(self, group: PathGroup) -> list[tuple[PathGroup, PathGroup]]:
        """Pairs of a cause and the same paths in the other direction, of which one may be the case."""
        if group.cause not in (Cause.INGRESS, Cause.EGRESS):
            return [(group, group.mirrored())]
        rank = int(group.clocks[0])
        sides = [side(self.model, group.cause, link, rank) for link in links_of(self.model)]
        return [(one, one.mirrored()) for one in sides if one.receivers.size > 1]

    def _parts(self, group: PathGroup) -> _Parts:
        num_ranks = self.model.place.num_ranks
        at, moved, inside = self._region(group, with_clocks=True)
        opposite = np.isin(at, group.mirrored().paths(num_ranks))
        way = np.where(np.isin(at // num_ranks, group.clocks), 1.0, -1.0)
        is_side = group.cause in (Cause.INGRESS, Cause.EGRESS)
        number = np.where(is_side, 0, np.where(inside, 1, np.where(opposite, 2, 3)))
        between = flat(self.model.between[None])[0, at]
        rest, noise = self._cells(at)
        rest, usual = known_rest(rest, self._hides(at)), flat(self.model.usual)[:, at]
        found = []
        for of, direction, is_far in itertools.product(range(4), (1.0, -1.0), (False, True)):
            cells = np.flatnonzero((number == of) & (way == direction) & (between == is_far))
            if not cells.size:
                continue
            count = np.maximum(np.isfinite(rest[:, cells]).sum(axis=1), 1)
            alone = MEDIAN_COST * median(noise[:, cells], 1) / np.sqrt(count)
            kind = (Cause.INGRESS, NIC if is_far else NVLINK)
            alike = np.maximum(self.spreads.get(kind, 0.0), self.least_error)
            busy = OTHERWISE_BUSY / 2 * median(usual[:, cells], 1)
            error = np.sqrt(alone**2 + alike**2 + busy**2)
            seen = np.isfinite(rest[:, cells]) & ~self._hides(at[cells])
            at_most = ~seen.any(axis=1)
            over, sign = (median(values[:, cells], 1) for values in (rest, moved))
            found.append((over, error, at_most, sign, False, int(at[cells[0]])))
        if group.clocks.size == 1:
            # Fences wait for the slowest path out of a rank within its node, on its own clock.
            fence = self.model.fence[:, group.clocks[0]]
            most = self.least_error * self.price / _HUBER / len(fence)
            for held, direction in ((fence, -1.0), (-fence, 1.0)):
                mates = np.flatnonzero(~between & (way == direction))
                if mates.size:
                    error = np.full(len(fence), self.least_error)
                    no_bound = np.zeros(len(fence), bool)
                    over = np.clip(held, 0.0, most)
                    found.append((over, error, no_bound, 0.0 * error, True, int(at[mates[0]])))
        over, error, is_bound, sign, is_fence, first = (np.array(of) for of in zip(*found))
        return _Parts(over, error, is_bound, sign, is_fence, first, num_ranks)

    def _price_of_clock(self, group: PathGroup, shift: float) -> float:
        penalty = self.model.prior.penalty
        change = penalty(self.clock + shift) - penalty(self.clock)
        return float(change[group.clocks].mean())

    def _fit(self, group: PathGroup, shift: float) -> _Fit:
        """With clocks of its ranks that are ahead by `shift` more."""
        at, moved, inside = self._region(group, with_clocks=shift != 0)
        rest, noise = self._cells(at)
        left = rest - shift * moved
        effect = np.zeros(len(rest))
        if inside.any():
            slow = known_rest(left, self._hides(at))[:, inside]
            expected = flat(self.model.expected)[:, at[inside]].sum(axis=1)
            enough = np.isfinite(slow).sum(axis=1) >= KNOWN * expected
            effect = np.where(enough, np.maximum(np.nan_to_num(median(slow, 1)), 0.0), 0.0)
        after = self._loss(left - effect[:, None] * inside, noise, at)
        gains = (self._loss(rest, noise, at) - after).sum(axis=1)
        if not shift:
            effect = np.where(gains > 0, effect, 0.0)
            gains = np.maximum(gains, 0.0)
        return _Fit(group, effect, shift, float(gains.sum()))

    def _region(self, group: PathGroup, *, with_clocks: bool) -> tuple[IntArray, FloatArray, Any]:
        """Flat indices of the paths that a fit looks at, how a clock that is ahead moves each, which are the group's.

        The second is [kinds, paths].
        """
        num_ranks = self.model.place.num_ranks
        paths = group.paths(num_ranks)
        if not with_clocks:
            return paths, np.zeros((len(self.rest), paths.size)), np.ones(paths.size, bool)
        others = np.delete(np.arange(num_ranks), group.clocks)
        into = (group.clocks[:, None] * num_ranks + others).ravel()
        out_of = (others[:, None] * num_ranks + group.clocks).ravel()
        at = np.concatenate([into, out_of])
        sign = np.repeat([1.0, -1.0], [into.size, out_of.size])
        moved = np.where(flat(self.model.on_one_clock)[:, at], 0.0, sign)
        return at, moved, np.isin(at, paths)

    def _cells(self, at: IntArray) -> tuple[FloatArray, FloatArray]:
        return flat(self.rest)[:, at], flat(self.model.noise)[:, at]

    def _hides(self, at: IntArray) -> Any:
        return flat(self.is_bound)[:, at]

    def _loss(self, rest: FloatArray, noise: FloatArray, at: IntArray) -> FloatArray:
        return _huber(np.nan_to_num(known_rest(rest, self._hides(at)) / noise))

    # --- what was chosen ------------------------------------------------------------------------

    def _explain(self, fit: _Fit) -> None:
        rest = flat(self.rest)
        rest[:, fit.group.paths(self.model.place.num_ranks)] -= fit.effect[:, None]
        if fit.shift:
            at, moved, _ = self._region(fit.group, with_clocks=True)
            rest[:, at] -= fit.shift * moved
            self.clock[fit.group.clocks] += fit.shift

    def _settled(self, fit: _Fit) -> _Fit:
        """With the effect that fits those of overlapping causes."""
        at = fit.group.paths(self.model.place.num_ranks)
        step = np.nan_to_num(median(known_rest(self._cells(at)[0], self._hides(at)), 1))
        step = np.where(fit.effect > 0, np.maximum(step, -fit.effect), 0.0)
        self._explain(replace(fit, effect=step, shift=0.0))
        return replace(fit, effect=fit.effect + step)

    def _single_paths(self) -> list[tuple[Cause, _Fit]]:
        num_ranks = self.model.place.num_ranks
        # A path gains the price in one kind at least: the square of what is over is no less than Huber's loss.
        least = math.sqrt(2 * self.price / len(self.rest)) * self.model.noise
        some = np.flatnonzero((~self.is_bound & (self.rest > least)).any(axis=0))
        rest, noise = self._cells(some)
        gains = self._loss(rest, noise, some)
        gains = np.where(known_rest(rest, self._hides(some)) > 0, gains, 0.0)
        found = []
        for i in np.flatnonzero(gains.sum(axis=0) > self.price).tolist():
            dst, src = divmod(int(some[i]), num_ranks)
            link = NIC if self.model.between[dst, src] else NVLINK
            effect = np.where(gains[:, i] > 0, rest[:, i], 0.0)
            fit = _Fit(path(dst, src, link), effect, 0.0, float(gains[:, i].sum()))
            found.append((self._name_of_path(fit.group), fit))
        for _, fit in found:
            self._explain(fit)
        return found

    def _name_of_path(self, group: PathGroup) -> Cause:
        """Of a rank of which hardly any other path was seen, the way back and the clock explain as much."""
        ends = (group.receivers, group.sources)
        names = {self._name(replace(group, clocks=end)) for end in ends}
        return Cause.PATH_OR_BACK if Cause.PATH_OR_BACK in names else Cause.PATH

    def _found(self, cause: Cause, fit: _Fit, share: FloatArray | None) -> PathCause:
        at = fit.group.paths(self.model.place.num_ranks)
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
