"""Who comes last to exchanges, how often and by how much, and what it did before: from the lengths of kernels.

Ranks leave a notify or a barrier together, since it ends when the last one has come, and a transfer nearly so. So whoever is
in it for a shorter time than the others came later, by the difference. That needs no clocks that agree; where ends do not
keep a constant distance from each other, exchanges were matched wrongly or do not end together, and nobody is named.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from ..core.diagnosis import FloatArray
from ..core.robust_stats import median, scale
from .kernels import WAITING, base_name
from .rank_trace import RankTrace, TracedExchange
from .summary import by_name, moved_bytes, tbps

# Of so many exchanges at most it is looked up what ran before them.
_MOST_LOOKED_AT = 50
# Among names of kernels, the time in which none ran.
_IDLE = ""


def arrivals(traces: Sequence[RankTrace]) -> list[Arrivals]:
    """Of all exchanges that all ranks have as kernels; none where there is one rank."""
    names = [by_name(trace.exchanges) for trace in traces] if len(traces) > 1 else [{}]
    found = []
    for name in names[0]:
        matched, num_unmatched = _matched([of_rank.get(name, []) for of_rank in names])
        if matched[0] and all(each.kernels for of_rank in matched for each in of_rank):
            found.append(Arrivals(name, traces, matched, num_unmatched))
    return found


def _matched(exchanges: list[list[TracedExchange]]) -> tuple[list[list[TracedExchange]], int]:
    """As many of each rank: those with the same number of a call, or where they have none by order; and how many are left."""
    numbered = [_by_call(of_rank) for of_rank in exchanges]
    common = set.intersection(*(set(of_rank) for of_rank in numbered))
    if common:
        order = sorted(common, key=lambda call: numbered[0][call].span_us[0])
        return [[of_rank[call] for call in order] for of_rank in numbered], 0
    counts = [len(of_rank) for of_rank in exchanges]
    return [of_rank[: min(counts)] for of_rank in exchanges], max(counts) - min(counts)


def _by_call(exchanges: list[TracedExchange]) -> dict[tuple[int, int], TracedExchange]:
    """By number of the call, and how often it was there before: each buffer counts its own calls."""
    seen: Counter[int] = Counter()
    numbered = {}
    for each in exchanges:
        if each.calls:
            call = each.calls[0]
            numbered[call, seen[call]] = each
            seen[call] += 1
    return numbered


class Arrivals:
    """All exchanges of one name, on all ranks.

    Attributes:
        name, operation: of the exchanges.
        ranks: in the order of the rows of all arrays.
        count: exchanges of each rank.
        num_unmatched: exchanges of some rank that others do not have, where nothing numbers them.
        has_notify: whether a notify or barrier tells; otherwise it is the whole transfer.
        late_us: [ranks, n], how much later than the first one each rank came.
        waiting_us: [ranks, n], until the last one had come.
        moving_us: [ranks, n], from then until the end.
        own_us: [ranks, n], from the end of the exchange before to the begin of this one, on the rank's own clock; NaN where
            there is none before.
        duration_us: [ranks, n], of the exchange without its layout.
        after_us: [ranks, n], of that what comes after the notify; 0 where there is none.
        over_median_us: [ranks, n], how much later than the median rank each came.
        is_last: [ranks, n], whether each came last.
        rows: [ranks], mean number of rows that the operators say; NaN where they do not.
        spread_us: how far the ends of ranks are from a constant distance, standard deviation.
        true_tbps: what crossed links, or else bytes of rows, of all ranks over all their time of moving; `None`: not all say it.
    """

    def __init__(
        self,
        name: str,
        traces: Sequence[RankTrace],
        exchanges: list[list[TracedExchange]],
        num_unmatched: int,
    ) -> None:
        self._traces, self._exchanges = traces, exchanges
        self.name, self.operation = name, exchanges[0][0].operation
        self.ranks = tuple(trace.rank for trace in traces)
        self.count, self.num_unmatched = len(exchanges[0]), num_unmatched
        everything = [each for of_rank in exchanges for each in of_rank]
        self.has_notify = all(each.has(WAITING) for each in everything)
        begins, ends = _times([[each.span_us for each in of_rank] for of_rank in exchanges])
        came, met = _times([[each.meeting_us for each in of_rank] for of_rank in exchanges])
        self.late_us: FloatArray = (met - came).max(axis=0) - (met - came)
        self.waiting_us: FloatArray = self.late_us.max(axis=0) - self.late_us
        self.duration_us = ends - begins
        self.moving_us = self.duration_us - self.waiting_us
        self.after_us = ends - met if self.has_notify else np.zeros(ends.shape)
        self.over_median_us = self.late_us - median(self.late_us, 0)
        is_latest = self.late_us.argmax(axis=0) == np.arange(len(traces))[:, None]
        self.is_last = is_latest & (self.late_us > 0)
        # Since the end of the latest exchange that had ended before; a rank's first one has none.
        self.own_us = np.empty(begins.shape)
        for i, trace in enumerate(traces):
            known = np.sort([each.span_us[1] for each in trace.exchanges])
            ended = np.searchsorted(known, begins[i] + 1e-3, side="right")
            self.own_us[i] = begins[i] - np.r_[np.nan, known][ended]
        # Where an operator does not say it, there is no mean: None becomes NaN.
        rows = [[each.sent.rows for each in of_rank] for of_rank in exchanges]
        self.rows: FloatArray = np.array(rows, np.float64).mean(axis=1)
        self.spread_us = _spread(met)
        self.true_tbps = tbps(moved_bytes(everything), float(self.moving_us.sum()))

    def before(self, place: int) -> str:
        """What the rank at that place did before the exchanges to which it came last (all, if it never did), in words.

        That is the kernel that most often ended last before them, in which range that the program has named, and what took
        most longer than on the other ranks from the end of the exchange before on: a kernel, or that the GPU had nothing to do.
        """
        is_last = self.is_last[place]
        chosen = np.flatnonzero(is_last | ~is_last.any())[:_MOST_LOOKED_AT]
        last: Counter[tuple[str, str]] = Counter()
        totals = []
        for i, trace in enumerate(self._traces):
            total: dict[str, float] = defaultdict(float)
            for k in chosen.tolist():
                end = self._exchanges[i][k].span_us[0]
                own = self.own_us[i, k]
                begin = end - own if np.isfinite(own) else trace.busy[0, 0]
                ran = trace.work.ending_within(begin, end)
                busy_us = 0.0
                for name, started, ended in ran:
                    total[name] += ended - max(started, begin)
                    busy_us += ended - max(started, begin)
                total[_IDLE] += max(end - begin - busy_us, 0.0)
                if i == place:
                    name, started, ended = ran[-1] if ran else ("nothing", end, end)
                    on_gpu, on_host = trace.ranges
                    last[name, on_gpu.around((started + ended) / 2) or on_host.around(end)] += 1
            totals.append(total)
        others = [total for i, total in enumerate(totals) if i != place]
        longer = {
            name: (us - float(np.median([other[name] for other in others]))) / len(chosen)
            for name, us in totals[place].items()
        }
        ((kernel, inside), _), *_ = last.most_common(1)
        text = f"just before it ran {base_name(kernel)}" + (f" in {inside}" if inside else "")
        most = max(longer, key=lambda name: longer[name])
        if longer[most] <= 0:
            return text
        if most == _IDLE:
            return f"{text}; its GPU had nothing to do for {longer[most]:,.0f} us longer than the others': its host was late"
        return f"{text}; {base_name(most)} took {longer[most]:,.0f} us longer than on the others"


def _times(spans: Sequence[Sequence[tuple[float, float]]]) -> tuple[FloatArray, FloatArray]:
    """[ranks, n] each, begins and ends."""
    times = np.array(spans)
    return times[..., 0], times[..., 1]


def _spread(ends: FloatArray) -> float:
    """Of the distances between the ends of ranks, from one exchange to the next: clocks may be off, and drift slowly."""
    if ends.shape[1] < 2:
        return 0.0
    steps = np.diff(ends - ends[0], axis=1)
    return float(np.max(scale(steps - median(steps, 0), 1))) / math.sqrt(2)
