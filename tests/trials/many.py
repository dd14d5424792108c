"""Draws trials and runs several of them at once: most of the time their ranks wait."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from support.launch import run_processes
from trials.faults import FAULTS, Fault
from trials.judge import Judged, judge
from trials.rank import Trial, run

WARN_S, TIMEOUT_S = 0.6, 4.0
# At once; and until what still runs is killed.
_ABREAST, _PATIENCE_S = 5, 45.0
# How often two ranks have a fault of their own.
_TWO_FAULTS = 0.2
# What shows beside another fault: who has sent and stands still is not waited for then, nor is a path that loses rows.
_LASTING = [fault for fault in FAULTS if fault.ends and not fault.hooked and not fault.loses_path]


def draw(seed: int) -> Trial:
    """The trial of a seed."""
    rng = random.Random(seed)
    mode, num_ranks, ranks_per_node = _draw_group(rng)
    # A normal operation has no hooks.
    kinds = [fault for fault in FAULTS if not (fault.hooked and mode == "normal")]
    chosen: list[Fault] = [rng.choice(kinds)]
    if chosen[0] in _LASTING and rng.random() < _TWO_FAULTS:
        chosen.append(rng.choice(_LASTING))
    ranks = rng.sample(range(num_ranks), len(chosen))
    at_combine = rng.random() < 0.5 and not any(fault.hooked for fault in chosen)
    victims = {rank: fault.name for rank, fault in zip(ranks, chosen)}
    return Trial(seed, mode, num_ranks, ranks_per_node, victims, at_combine)


def draw_without_rank_0(seed: int) -> Trial:
    """The trial of a seed in which rank 0 does not answer, and another rank has a fault that lasts."""
    rng = random.Random(seed)
    mode, num_ranks, ranks_per_node = _draw_group(rng)
    silent = rng.choice([fault for fault in FAULTS if fault.silences])
    victims = {0: silent.name, rng.randrange(1, num_ranks): rng.choice(_LASTING).name}
    return Trial(seed, mode, num_ranks, ranks_per_node, victims, rng.random() < 0.5)


def _draw_group(rng: random.Random) -> tuple[str, int, int]:
    """Its mode, size, and ranks to a node."""
    return rng.choice(["low latency", "normal"]), *rng.choice([(4, 4), (4, 2), (8, 8), (8, 4)])


def run_trial(trial: Trial, **variables: str) -> Judged:
    """Its outcome, with these variables of the environment besides those of all trials."""
    environment = {
        "DEEP_EP_WARN_S": str(WARN_S),
        "DEEP_EP_TIMEOUT_S": str(TIMEOUT_S),
        "DEEP_EP_VERIFY": "0",
        # Where ranks have clocks of their own, a late path takes no real time.
        "DEEP_EP_CPU_CLOCK": "wall"
        if any(f.loses_path for f in trial.faults().values())
        else "rank",
        **variables,
    }
    outcomes = run_processes(run, trial.num_ranks, trial, env=environment, timeout_s=_PATIENCE_S)
    return judge(trial, outcomes)


def run_all(trials: Iterable[Trial]) -> Iterator[Judged]:
    """All of them, as they end."""
    with ThreadPoolExecutor(_ABREAST) as pool:
        yield from pool.map(run_trial, trials)
