"""The list of single faults (tests/mutants) fits the source, and a few of them are noticed.

`make mutants` tries all of them, which takes long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mutants

pytestmark = pytest.mark.exhaustive


def mutant(original: str, mutated: str, name: str = "fault") -> Any:
    return mutants.Mutant(name, "file", "why", original, mutated, (), number=7)


def test_every_fault_of_the_list_fits_the_source() -> None:
    assert mutants.misfits() == []
    assert len(mutants.all_mutants()) >= 60


def test_a_snippet_that_occurs_twice_or_never_is_refused() -> None:
    with pytest.raises(mutants.ListError, match="fault: what it replaces occurs 2 times"):
        mutant("a = 1;", "").span("a = 1; a  =  1;")
    with pytest.raises(mutants.ListError, match="occurs 0 times"):
        mutant("a = 1;", "").span("ba = 1;")


def test_tests_of_a_list_are_built_only_for_what_survives_the_named_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    named, general = (mutants.Killer("plain", (name,)) for name in ("named", "general"))
    noticed, survives, unnamed = (
        mutants.Mutant(name, "file", "why", "a", "b", killers, number=number, others=(general,))
        for number, (name, killers) in enumerate(
            [("noticed", (named,)), ("survives", (named,)), ("unnamed", ())], 1
        )
    )
    built = []
    monkeypatch.setattr(mutants, "build", lambda _, killers: built.append(set(killers)))

    def run(_: Path, __: Any, killer: Any, number: int, ___: float) -> tuple[bool, str]:
        is_red = number == noticed.number or (number == unnamed.number and killer == general)
        return not is_red, "red"

    monkeypatch.setattr(mutants, "run", run)
    outcomes = list(mutants.judge_layer(tmp_path, [noticed, survives, unnamed]))
    assert {outcome.mutant.name: outcome.killer for outcome in outcomes} == {
        "noticed": named,
        "survives": None,
        "unnamed": general,
    }
    assert built == [{named}, {general}]


@pytest.mark.slow
def test_a_few_faults_are_noticed() -> None:
    outcomes, wrong = mutants.check([], quick=True)
    assert len(outcomes) >= 3
    assert wrong == []
