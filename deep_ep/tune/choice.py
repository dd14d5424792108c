"""Which of the measured settings to take, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from deep_ep.tune import trials
from deep_ep.tune.trials import Times, Trial
from deep_ep.types.config import Config

# What is faster by less is taken for equal: medians of a few rounds differ by so much. Chosen.
_EQUAL = 0.03
# What is faster must be so by as many standard errors, since the fastest of several is also the luckiest.
_CERTAIN = 3.0


@dataclass(frozen=True)
class Tuned:
    """The settings to take; `num_sms` is equal in both.

    Attributes:
        dispatch_config: for `Buffer.dispatch`.
        combine_config: for `Buffer.combine`.
        dispatch_us: what it took, as `Times`.
        combine_us: what it took, as `Times`.
        reason: why these.
    """

    dispatch_config: Config
    combine_config: Config
    dispatch_us: float
    combine_us: float
    reason: str


class Experts(NamedTuple):
    """The computation that runs beside the exchange.

    Attributes:
        us: how long it takes on the whole GPU, microseconds.
        total_sms: of the GPU.
    """

    us: float
    total_sms: int

    def beside(self, num_sms: int) -> float:
        """How long it takes on what `num_sms` of communication, fewer than all, leave."""
        return self.us * self.total_sms / (self.total_sms - num_sms)


def search(
    base: Trial,
    num_nodes: int,
    num_sms: Iterable[int],
    experts: Experts | None,
    measure: Callable[[str, Sequence[Trial]], Sequence[Times]],
) -> Tuned:
    """Chunk sizes first, then SMs with the best of them; `measure` takes a title and settings."""
    tried = trials.chunk_trials(base, num_nodes)
    chunks, why = best_chunks(
        tried, measure(f"steps of tokens, {base.dispatch.num_sms} SMs", tried)
    )
    tried = trials.sm_trials(chunks, sorted(num_sms))
    tuned = best_sms(tried, measure("SMs, with the fastest of these steps", tried), experts)
    return replace(tuned, reason=f"{tuned.reason}; steps: {why}")


def best_chunks(tried: Sequence[Trial], times: Sequence[Times]) -> tuple[Trial, str]:
    """The fastest steps of each direction, if they are faster than the recommended ones, the first trial."""
    dispatch, dispatch_gain = _fastest([(each.dispatch, each.dispatch_error) for each in times])
    combine, combine_gain = _fastest([(each.combine, each.combine_error) for each in times])
    if not dispatch and not combine:
        return tried[0], "none is surely faster than the recommended ones"
    chosen = Trial(tried[dispatch].dispatch, tried[combine].combine)
    return chosen, f"dispatch: {dispatch_gain}; combine: {combine_gain}"


def _fastest(times: Sequence[tuple[float, float]]) -> tuple[int, str]:
    """Of times and their errors: which is the fastest, the first one unless another is surely faster; and by how much."""
    place = min(range(len(times)), key=lambda i: times[i][0])
    (base_us, base_error), (fastest_us, error) = times[0], times[place]
    if base_us - fastest_us < max(_EQUAL * base_us, _CERTAIN * math.hypot(base_error, error)):
        return 0, "as recommended"
    return place, f"{1 - fastest_us / base_us:.0%} faster than as recommended"


def best_sms(tried: Sequence[Trial], times: Sequence[Times], experts: Experts | None) -> Tuned:
    """The number of SMs with which a layer takes least; of those that take equally long, the fewest.

    Without experts only the exchange counts.
    """
    costs = [layer_us(trial, time, experts) for trial, time in zip(tried, times)]
    least = min(costs)
    equal = [i for i, cost in enumerate(costs) if cost <= (1 + _EQUAL) * least]
    chosen = min(equal, key=lambda i: tried[i].dispatch.num_sms)
    num_sms, chosen_times = tried[chosen].dispatch.num_sms, times[chosen]
    reason = f"{num_sms} SMs: "
    if experts is not None:
        beside = experts.beside(num_sms)
        limit = "the exchange" if chosen_times.total > beside else "the computation"
        reason += (
            f"beside them the experts take {beside:.0f} us and the exchange {chosen_times.total:.0f} us, so "
            f"{limit} decides; "
        )
    if costs[chosen] == least:
        reason += "no other number is faster"
    else:
        faster = tried[costs.index(least)].dispatch.num_sms
        gain = 1 - least / costs[chosen]
        reason += f"{faster} SMs are {gain:.1%} faster, too little to take them from the experts"
    return Tuned(*tried[chosen], chosen_times.dispatch, chosen_times.combine, reason)


def layer_us(trial: Trial, times: Times, experts: Experts | None) -> float:
    """What decides: the exchange; or, beside the experts of another micro-batch, whatever takes longer."""
    if experts is None:
        return times.total
    return max(times.total, experts.beside(trial.dispatch.num_sms))
