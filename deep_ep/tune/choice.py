"""Which of the measured settings to take, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deep_ep.config import Config
from deep_ep.tune.trials import Times, Trial

# What is faster by less is taken for equal: medians of a few rounds differ by so much. Chosen.
_EQUAL = 0.03


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
        """How long it takes on what `num_sms` of communication leave; infinite if that is nothing."""
        left = self.total_sms - num_sms
        return self.us * self.total_sms / left if left > 0 else float("inf")


def best_chunks(trials: Sequence[Trial], times: Sequence[Times]) -> tuple[Trial, str]:
    """The fastest steps of each direction, if they are faster than the recommended ones, the first trial."""
    base = trials[0]
    dispatch = min(range(len(trials)), key=lambda i: times[i].dispatch)
    combine = min(range(len(trials)), key=lambda i: times[i].combine)
    if times[dispatch].dispatch > (1 - _EQUAL) * times[0].dispatch:
        dispatch = 0
    if times[combine].combine > (1 - _EQUAL) * times[0].combine:
        combine = 0
    said = [
        _gain("dispatch", times[0].dispatch, times[dispatch].dispatch, is_base=not dispatch),
        _gain("combine", times[0].combine, times[combine].combine, is_base=not combine),
    ]
    chosen = Trial(trials[dispatch].dispatch, trials[combine].combine)
    return chosen, "; ".join(said) if chosen != base else "none is faster than the recommended ones"


def best_sms(trials: Sequence[Trial], times: Sequence[Times], experts: Experts | None) -> Tuned:
    """The number of SMs with which a layer takes least; of those that take equally long, the fewest.

    Args:
        trials: that differ in `num_sms`.
        times: of each.
        experts: `None`: only the exchange counts.
    """
    costs = [layer_us(trial, time, experts) for trial, time in zip(trials, times)]
    least = min(costs)
    equal = [i for i, cost in enumerate(costs) if cost <= (1 + _EQUAL) * least]
    chosen = min(equal, key=lambda i: trials[i].dispatch.num_sms)
    fastest = costs.index(least)
    return Tuned(
        *trials[chosen],
        *times[chosen],
        _why(trials, times, experts, chosen, fastest),
    )


def layer_us(trial: Trial, times: Times, experts: Experts | None) -> float:
    """What decides: the exchange; or, beside the experts of another micro-batch, whatever takes longer."""
    if experts is None:
        return times.total
    return max(times.total, experts.beside(trial.dispatch.num_sms))


def _why(
    trials: Sequence[Trial],
    times: Sequence[Times],
    experts: Experts | None,
    chosen: int,
    fastest: int,
) -> str:
    num_sms = trials[chosen].dispatch.num_sms
    reason = f"{num_sms} SMs: "
    if experts is not None:
        beside = experts.beside(num_sms)
        limit = "the exchange" if times[chosen].total > beside else "the computation"
        reason += (
            f"beside them the experts take {beside:.0f} us and the exchange {times[chosen].total:.0f} us, so "
            f"{limit} decides; "
        )
    if chosen == fastest:
        return f"{reason}no other number is faster"
    faster = trials[fastest].dispatch.num_sms
    gain = 1 - layer_us(trials[fastest], times[fastest], experts) / layer_us(
        trials[chosen], times[chosen], experts
    )
    return f"{reason}{faster} SMs are {gain:.1%} faster, too little to take them from the experts"


def _gain(name: str, before_us: float, after_us: float, *, is_base: bool) -> str:
    if is_base:
        return f"{name}: as recommended"
    return f"{name}: {1 - after_us / before_us:.0%} faster than as recommended"
