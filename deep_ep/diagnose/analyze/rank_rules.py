"""Rules about ranks: hot experts, late ranks, early receivers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..collect.hops import LAST_HOPS, NORMAL_COMBINE, NORMAL_DISPATCH
from ..core.causes import Cause
from ..core.robust_stats import healthy, median, median_of, scale
from .back_pressure import UNEVEN
from .estimates import Effect, Estimates, pooled
from .finding import Found, Named, Size, cells_of, found_cause, own_times
from .path_model import MIN_RANKS_TO_SPLIT_PATHS
from .thresholds import JudgedKind, mostly
from .what_if import Gain

# A late rank is seen late by at least this share of its own extra time; what it shows to depends
# on when it left the operation before, and ranks in lockstep take it in by halves.
_SEEN_LATE = 0.2
# And in standard errors; what is certain for other reasons must only not be denied by it.
_NOT_BY_CHANCE = 2.0
# A load stands out from loads that differ by so many of their standard deviations.
_LOAD_SPREADS = 3.0
# Who has far more rows to return is late with them if it is by so many standard errors.
_RETURNS_LATE = 3.0


def hot_experts(kind: JudgedKind) -> list[Found]:
    """Ranks whose tokens cost them time: by what a token costs, or by far too many of them."""
    e, limits = kind.e, kind.limits
    # Where all loads differ, a rank is hot when its own stands out.
    usual = 1.0 + _LOAD_SPREADS * float(scale(e.load, 0)) if e.load.size > 3 else 1.0
    slow_inbound = max(kind.floor, limits.spread * healthy(e.paths.inbound)[1])
    found = []
    for rank in np.flatnonzero(e.load > max(limits.load, usual)).tolist():
        incast = bool(e.paths.inbound[rank] > slow_inbound)
        many = e.load[rank] > limits.high_load
        longer = many and kind.exceeds(e.busy, rank) or kind.costs(rank)
        # In normal combine all begin together, and who has more rows to return takes longer.
        returns = e.operation == NORMAL_COMBINE and _issues_late(kind, rank)
        if longer or (many and (incast or returns)):
            found.append(_hot_rank(kind, rank, longer=longer, incast=incast, returns=returns))
    return found


def _issues_late(kind: JudgedKind, rank: int) -> bool:
    e = kind.e
    error = _RETURNS_LATE * float(e.late_error[rank])
    return bool(e.late[rank] > max(kind.floor, error, kind.limits.spread * healthy(e.late)[1]))


def _hot_rank(kind: JudgedKind, rank: int, *, longer: bool, incast: bool, returns: bool) -> Found:
    e = kind.e
    own_ns = float(e.busy.value[rank]) if longer else 0.0
    inbound_ns = float(e.paths.inbound[rank]) if incast else 0.0
    late_ns = float(e.late[rank]) if returns else 0.0
    return found_cause(
        kind,
        Cause.HOT_EXPERTS,
        Named(rank),
        Size(
            max(own_ns, inbound_ns, late_ns), float(e.busy.error[rank]), e.load.size, e.busy.apart
        ),
        cells_of(e, source=rank, receiver=rank if incast else None),
        _hot_gain(e, rank, max(own_ns, 0.0)),
        seen_in=float(e.busy.above[rank]) if longer else float("nan"),
        evidence={
            "tokens_over_even_share": float(e.load[rank]),
            "own_time_over_median_us": float(e.busy.value[rank]) / 1e3,
            "explained_by_tokens_us": float(e.token_time[rank]) / 1e3,
            "path_into_it_over_median_us": float(e.paths.inbound[rank]) / 1e3,
            **({"issued_later_than_median_us": late_ns / 1e3} if returns else {}),
            **own_times(e, rank),
        },
        words={"load": f"{e.load[rank]:.1f}"},
    )


def _hot_gain(e: Estimates, rank: int, own_ns: float) -> Gain:
    """Its own time, and that of the paths that its tokens take, spread over all ranks."""
    m = e.m
    rows = np.nansum(m.tokens[rank]) >= np.nansum(m.tokens[:, rank])
    paths = (rank, slice(None)) if rows else (slice(None), rank)
    same_node = m.place.nodes[:, None] == m.place.nodes[None, :]
    within, between = e.paths.level
    longer = e.paths.time[paths] - np.where(same_node[paths], within, between)
    longer = np.maximum(np.nan_to_num(longer), 0.0)
    return Gain(e.operation, rank, work_ns=own_ns, is_shared=True, paths=paths, path_ns=longer)


def late_ranks(
    kinds: Sequence[JudgedKind],
    hot_ranks: set[int],
    at_times: set[int],
    holding_up: Collection[int] = (),
    uneven_ns: float = 0.0,
) -> list[Found]:
    """Ranks that work longer by their own clock and are seen late; kinds bear each other out.

    Args:
        kinds: of operations.
        hot_ranks: whose tokens may explain it.
        at_times: whose lateness is known not to be there in most operations.
        holding_up: slow receivers.
        uneven_ns: by how much rows come later to some ranks than to others in normal operations. Who has
            to wait for them does meanwhile what others do at the end, or passes them on at the end.
    """
    found = []
    for cause in (Cause.LATE, Cause.SLOW_RECEIVE):
        effects = [kind.e.work if cause == Cause.LATE else kind.e.drain for kind in kinds]
        together = _together(kinds, effects)
        for kind, effect in zip(kinds, effects):
            for rank in np.flatnonzero(effect.value > kind.floor).tolist():
                # Far more tokens than usual, or of unknown cost, may explain any lateness.
                known = kind.e.cost_known and kind.e.load[rank] <= kind.limits.high_load
                if (rank in hot_ranks and not known) or (cause == Cause.LATE and rank in at_times):
                    continue
                follows = rank in holding_up or effect.value[rank] < UNEVEN * uneven_ns
                # In dispatch a rank passes rows on while it sends its own.
                shared = LAST_HOPS if cause == Cause.SLOW_RECEIVE else (NORMAL_DISPATCH,)
                if kind.e.operation in shared and follows:
                    continue
                big = _stands_out(kind, effect, together, rank)
                # Inherited lateness has no counterpart in the rank's own work and is not its
                # fault; work that shows nowhere, in no kind, keeps nobody waiting.
                own_ns = float(effect.value[rank])
                if cause == Cause.LATE and _is_held_by_a_path(kind.e, rank, own_ns):
                    continue
                if big and any(
                    _seen(float(k.e.late[rank]), k.e, rank, own_ns)
                    # Of two or three ranks nobody can tell how far clocks have drifted; waiting is known.
                    or k.e.waited_for[rank] > _SEEN_LATE * own_ns
                    for k in kinds
                ):
                    found.append(_late_rank(kind, cause, effect, rank))
    return found


def _is_held_by_a_path(e: Estimates, rank: int, own_ns: float) -> bool:
    """Whether most of a rank's own time passes after it has handed over everything, and a path out of
    it within its node is as slow.

    Before it signals, a rank waits until NVLink has taken its stores.
    """
    held = median(e.m.held, 0)
    longer = float(held[rank]) - median_of(held)
    over = np.where(e.paths.classes[:, rank] == 0, (e.paths.time - e.paths.usual)[:, rank], np.nan)
    slowest = float(np.fmax.reduce(over, initial=0.0))
    return bool(longer > own_ns / 2 and slowest > longer / 2)


def _together(kinds: Sequence[JudgedKind], effects: Sequence[Effect]) -> Effect | None:
    """All kinds as one; None where that tells no more than each alone."""
    with_errors = len(kinds) > 1 and all(kind.e.has_stamps for kind in kinds)
    return pooled(effects) if with_errors else None


def _stands_out(kind: JudgedKind, effect: Effect, together: Effect | None, rank: int) -> bool:
    """Whether this kind is certain, or all together are as certain as one would have to be."""
    return kind.exceeds(effect, rank) or (
        together is not None
        and kind.exceeds(together, rank)
        and bool(effect.value[rank] > max(kind.floor, _NOT_BY_CHANCE * float(effect.error[rank])))
        and mostly(effect.above[rank], effect.count[rank])
    )


def _seen(later_ns: float, e: Estimates, rank: int, effect_ns: float) -> bool:
    """Whether others see a rank later (earlier) by enough of what its own clock says."""
    error = float(e.late_error[rank])
    return later_ns > max(_NOT_BY_CHANCE * error, _SEEN_LATE * effect_ns)


def _late_rank(kind: JudgedKind, cause: Cause, effect: Effect, rank: int) -> Found:
    e = kind.e
    extra = float(effect.value[rank])
    gain = Gain(
        e.operation,
        rank,
        work_ns=extra if cause == Cause.LATE else 0.0,
        drain_ns=extra if cause == Cause.SLOW_RECEIVE else 0.0,
    )
    send_surplus = float(e.send_ns[rank]) - float(np.nanmedian(e.send_ns))
    if cause == Cause.LATE and send_surplus > extra / 2:
        cause = Cause.SLOW_SEND
    return found_cause(
        kind,
        cause,
        Named(rank),
        Size(extra, float(effect.error[rank]), e.load.size, effect.apart),
        cells_of(e, source=rank),
        gain,
        seen_in=float(effect.above[rank]),
        evidence={
            "later_than_median_us": float(e.late[rank]) / 1e3,
            "own_time_over_median_us": extra / 1e3,
            "error_us": float(effect.error[rank]) / 1e3,
            **own_times(e, rank),
        },
    )


def early_receivers(kinds: Sequence[JudgedKind]) -> list[Found]:
    """Ranks that work clearly less than the others; for groups in which nothing else was found."""
    kinds = [kind for kind in kinds if kind.e.load.size >= MIN_RANKS_TO_SPLIT_PATHS]
    effects = [kind.e.work.reversed() for kind in kinds]
    together = _together(kinds, effects)
    found = []
    for kind, early in zip(kinds, effects):
        for rank in np.flatnonzero(early.value > kind.floor).tolist():
            seen = _seen(-float(kind.e.late[rank]), kind.e, rank, float(early.value[rank]))
            if seen and _stands_out(kind, early, together, rank):
                found.append(_early_receiver(kind, early, rank))
    return found


def _early_receiver(kind: JudgedKind, early: Effect, rank: int) -> Found:
    e = kind.e
    return found_cause(
        kind,
        Cause.EARLY,
        Named(rank),
        Size(float(early.value[rank]), float(early.error[rank]), e.load.size, early.apart),
        cells_of(e, receiver=rank),
        # Nothing ends earlier when it comes later.
        Gain(e.operation),
        seen_in=float(early.above[rank]),
        evidence={
            "earlier_than_median_us": -float(e.late[rank]) / 1e3,
            "tokens_over_even_share": float(e.load[rank]),
            **own_times(e, rank),
        },
    )
