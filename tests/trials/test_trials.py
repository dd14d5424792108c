"""Faults in groups of real processes: the right rank is named, with the right class, and nobody else."""

from __future__ import annotations

import pytest

import deep_ep
from trials.faults import FAULTS
from trials.judge import Judged
from trials.many import draw, run_all
from trials.rank import Trial

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        deep_ep.native.backend.get().name != "cpu", reason="ranks that are processes share no GPU"
    ),
]


def different_trials() -> list[Trial]:
    """The first that bring something new: a fault in another mode or at another moment, another group, or a second fault."""
    chosen, seen = [], set[object]()
    for trial in map(draw, range(1, 1001)):
        at = (trial.mode, trial.at_combine)
        what: set[object] = {(name, one) for name in trial.victims.values() for one in at}
        what |= {(trial.mode, trial.num_ranks, trial.ranks_per_node), (*at, len(trial.victims))}
        if not what <= seen:
            chosen.append(trial)
            seen |= what
    return chosen


def test_random_faults_are_named_and_nobody_else() -> None:
    trials = different_trials()
    assert {name for trial in trials for name in trial.victims.values()} == {
        fault.name for fault in FAULTS
    }
    done: list[Judged] = list(run_all(trials))
    accused = [(judged.trial, judged.accused, judged.said) for judged in done if judged.accused]
    assert not accused
    complaints = [(judged.trial, judged.complaints) for judged in done if judged.complaints]
    assert not complaints
    missed = [judged.trial for judged in done if not all(judged.named.values())]
    assert len(missed) <= 1, missed
