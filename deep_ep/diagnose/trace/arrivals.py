"""Who comes last to exchanges, how often and by how much, and what it did before: from the lengths of kernels.

Ranks leave a notify or a barrier together, since it ends when the last one has come, and a transfer nearly so. So whoever is
in it for a shorter time than the others came later, by the difference. That needs no clocks that agree; where ends do not
keep a constant distance from each other, exchanges were matched wrongly or do not end together, and nobody is named.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.diagnosis import FloatArray
from ..core.robust_stats import median, median_of, scale
from .kernels import WAITING, base_name
from .rank_trace import RankTrace, TracedExchange
from .summary import by_name, moved_bytes, tbps

# Of so many exchanges at most it is looked up what ran before them.
_MOST_LOOKED_AT = 50
# Among names of kernels, the time in which none ran.
_IDLE = ""


@dataclass(frozen=True)
class Arrivals:
    """All exchanges of one name, on all ranks.

    Attributes:
        name, operation: of the exchanges.
        exchanges: of each rank as many.
        ranks: in the order of the rows of all arrays.
        late_us: [ranks, n], how much later than the first one each rank came.
        own_us: [ranks, n], from the end of the exchange before to the begin of this one, on the rank's own clock; NaN where
            there is none before.
        duration_us: [ranks, n], of the exchange without its layout.
        after_us: [ranks, n], of that what comes after the notify; 0 where there is none.
        rows: [ranks], mean number of rows that the operators say; NaN where they do not.
        spread_us: how far the ends of ranks are from a constant distance, standard deviation.
        has_notify: whether a notify or barrier tells; otherwise it is the whole transfer.
        num_unmatched: exchanges of some rank that others do not have, where nothing numbers them.
    """

    name: str
    operation: str
    exchanges: Sequence[Sequence[TracedExchange]]
    ranks: tuple[int, ...]
    late_us: FloatArray
    own_us: FloatArray
    duration_us: FloatArray
    after_us: FloatArray
    rows: FloatArray
    spread_us: float
    has_notify: bool
    num_unmatched: int

    @property
    def count(self) -> int:
        """Exchanges."""
        return int(self.late_us.shape[1])

    @property
    def waiting_us(self) -> FloatArray:
        """[ranks, n], until the last one had come."""
        waiting: FloatArray = self.late_us.max(0) - self.late_us
        return waiting

    @property
    def moving_us(self) -> FloatArray:
        """[ranks, n], from then until the end."""
        return self.duration_us - self.waiting_us

    @property
    def true_tbps(self) -> float | None:
        """What crossed links, or else bytes of rows, of all ranks over all their time of moving; `None`: not all say it."""
        num_bytes = moved_bytes([each for of_rank in self.exchanges for each in of_rank])
        return tbps(num_bytes, float(self.moving_us.sum()))

    @property
    def over_median_us(self) -> FloatArray:
        """[ranks, n], how much later than the median rank each came."""
        return self.late_us - median(self.late_us, 0)

    @property
    def last(self) -> FloatArray:
        """[ranks], share of the exchanges in which each came last."""
        return np.bincount(self.late_us.argmax(axis=0), minlength=len(self.ranks)) / self.count

    def last_by_us(self, place: int) -> float:
        """Median over these, by how much it came later than the median rank."""
        return median_of(self.over_median_us[place, self.late_us.argmax(axis=0) == place])


def arrivals(traces: Sequence[RankTrace]) -> list[Arrivals]:
    """Of all exchanges that all ranks have as kernels, and have as often; none where there is one rank."""
    if len(traces) < 2:
        return []
    own_ends = [np.sort([each.span_us[1] for each in trace.exchanges]) for trace in traces]
    names = [by_name(trace.exchanges) for trace in traces]
    found = []
    for name in names[0]:
        of_ranks, num_unmatched = _matched([of_rank.get(name, []) for of_rank in names])
        if of_ranks[0] and all(each.kernels for of_rank in of_ranks for each in of_rank):
            found.append(_arrivals(name, traces, of_ranks, own_ends, num_unmatched))
    return found


def _matched(exchanges: list[list[TracedExchange]]) -> tuple[list[list[TracedExchange]], int]:
    """As many of each rank: those with the same number of a call, or where they have none by order; and how many too many."""
    numbered = [{each.calls[0]: each for each in of_rank if each.calls} for of_rank in exchanges]
    common = set.intersection(*(set(of_rank) for of_rank in numbered))
    if common:
        return [[of_rank[call] for call in sorted(common)] for of_rank in numbered], 0
    counts = [len(of_rank) for of_rank in exchanges]
    return [of_rank[: min(counts)] for of_rank in exchanges], max(counts) - min(counts)


def before(found: Arrivals, traces: Sequence[RankTrace], place: int) -> str:
    """What the rank at that place did before the exchanges to which it came last (all, if it never did), in words.

    That is the kernel that most often ended last before them, and what took most longer than on the other ranks from the
    end of the exchange before on: a kernel, or that the GPU had nothing to do.
    """
    is_last = found.late_us.argmax(axis=0) == place
    chosen = np.flatnonzero(is_last | ~is_last.any())[:_MOST_LOOKED_AT]
    last: Counter[str] = Counter()
    totals = []
    for i, trace in enumerate(traces):
        total: dict[str, float] = defaultdict(float)
        for k in chosen.tolist():
            end = found.exchanges[i][k].span_us[0]
            own = found.own_us[i, k]
            begin = end - own if np.isfinite(own) else trace.busy[0, 0]
            ran = [
                (name, ended - max(started, begin))
                for name, started, ended in trace.work.ending_within(begin, end)
            ]
            ran.append((_IDLE, max(end - begin - sum(us for _, us in ran), 0.0)))
            for name, us in ran:
                total[name] += us
            if i == place:
                last[ran[-2][0] if len(ran) > 1 else "nothing"] += 1
        totals.append(total)
    others = [total for i, total in enumerate(totals) if i != place]
    longer = {
        name: (us - float(np.median([other[name] for other in others]))) / len(chosen)
        for name, us in totals[place].items()
    }
    text = f"just before it ran {base_name(last.most_common(1)[0][0])}"
    most = max(longer, key=lambda name: longer[name])
    if longer[most] <= 0:
        return text
    if most == _IDLE:
        return f"{text}; its GPU had nothing to do for {longer[most]:,.0f} us longer than the others': its host was late"
    return f"{text}; {base_name(most)} took {longer[most]:,.0f} us longer than on the others"


def _arrivals(
    name: str,
    traces: Sequence[RankTrace],
    of_ranks: list[list[TracedExchange]],
    own_ends: Sequence[FloatArray],
    num_unmatched: int,
) -> Arrivals:
    has_notify = all(each.has(WAITING) for of_rank in of_ranks for each in of_rank)
    spans = np.array([[each.span_us for each in of_rank] for of_rank in of_ranks])
    met = np.array([[each.meeting_us for each in of_rank] for of_rank in of_ranks])
    begins, ends = met[..., 0], met[..., 1]
    lengths = ends - begins
    # Since the end of the latest exchange that had ended before; a rank's first one has none.
    own = np.empty(begins.shape)
    for i, known in enumerate(own_ends):
        ended = np.searchsorted(known, spans[i, :, 0] + 1e-3, side="right")
        own[i] = spans[i, :, 0] - np.r_[np.nan, known][ended]
    # Where an operator does not say it, there is no mean: None becomes NaN.
    rows = np.array([[each.sent.rows for each in of_rank] for of_rank in of_ranks], np.float64)
    return Arrivals(
        name,
        of_ranks[0][0].operation,
        of_ranks,
        tuple(trace.rank for trace in traces),
        lengths.max(axis=0) - lengths,
        own,
        spans[..., 1] - spans[..., 0],
        spans[..., 1] - ends if has_notify else np.zeros(ends.shape),
        rows.mean(axis=1),
        _spread(ends),
        has_notify,
        num_unmatched,
    )


def _spread(ends: FloatArray) -> float:
    """Of the distances between the ends of ranks, from one exchange to the next: clocks may be off, and drift slowly."""
    if ends.shape[1] < 2:
        return 0.0
    steps = np.diff(ends - ends[0], axis=1)
    return float(np.max(scale(steps - median(steps, 0), 1))) / math.sqrt(2)
