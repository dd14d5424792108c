"""Faults in groups of real processes: the right rank is named, with the right class, and nobody else."""

from __future__ import annotations

import pytest

import deep_ep
from trials.faults import FAULTS
from trials.judge import Judged
from trials.many import draw, run_all

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        deep_ep.native.backend.get().name != "cpu", reason="ranks that are processes share no GPU"
    ),
]
NUM_TRIALS = 100


def test_random_faults_are_named_and_nobody_else() -> None:
    seeds = range(1, NUM_TRIALS + 1)
    struck = {name for seed in seeds for name in draw(seed).victims.values()}
    assert struck == {fault.name for fault in FAULTS}
    done: list[Judged] = list(run_all(map(draw, seeds)))
    accused = [(judged.trial, judged.accused, judged.said) for judged in done if judged.accused]
    assert not accused
    complaints = [(judged.trial, judged.complaints) for judged in done if judged.complaints]
    assert not complaints
    missed = [judged.trial for judged in done if not all(judged.named.values())]
    assert len(missed) <= NUM_TRIALS // 50, missed
