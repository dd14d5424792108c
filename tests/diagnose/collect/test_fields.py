"""One row per number: what a rank sends, what stands for a missing one, and what is stacked agree."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from deep_ep import EPArgumentError, diagnose
from deep_ep.diagnose.collect.fields import FIELDS, Field, Numbers
from deep_ep.diagnose.collect.rank_summary import KindSummary, summarize
from generator import simulate
from generator.machines import CPU

NUM_RANKS = 4
MISSING = 2


@pytest.fixture(scope="module")
def snapshots() -> list[diagnose.Snapshot]:
    return simulate(CPU, NUM_RANKS, 10, seed=1)


def of_rank_0(snapshots: list[diagnose.Snapshot]) -> KindSummary:
    return summarize(snapshots[0]).kinds["dispatch"]


def test_every_number_has_a_row_and_a_line_that_says_what_it_means() -> None:
    assert [row.name for row in FIELDS] == [field.name for field in fields(Numbers)]
    for row in FIELDS:
        assert f"\n        {row.name}: " in (Numbers.__doc__ or "")
        assert not (row.is_per_operation and row.is_per_source)


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: row.name)
def test_what_a_rank_sends_has_the_sides_and_the_type_of_its_row(
    row: Field, snapshots: list[diagnose.Snapshot]
) -> None:
    with_stamps = getattr(of_rank_0(snapshots), row.name)
    without = getattr(of_rank_0(simulate(CPU, NUM_RANKS, 10, capacity=0)), row.name)
    unknown = row.unknown(NUM_RANKS)
    assert with_stamps.dtype == without.dtype == unknown.dtype
    assert without.shape == unknown.shape
    rows = (10,) if row.is_per_operation else unknown.shape[:1]
    assert with_stamps.shape == rows + unknown.shape[1:]


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: row.name)
def test_ranks_stand_side_by_side_and_a_missing_one_is_as_its_row_says(
    row: Field, snapshots: list[diagnose.Snapshot]
) -> None:
    reports = [summarize(s) for s in snapshots]
    values = [getattr(report.kinds["dispatch"], row.name) for report in reports]
    axis = 1 if row.is_per_operation else -2 if row.is_per_source else 0
    for missing in (None, MISSING):
        matrices = diagnose.gather([r for r in reports if r.rank != missing])["dispatch"]
        found = getattr(matrices, row.name)
        expected = list(values)
        if missing is not None:
            expected[missing] = np.full_like(values[missing], row.missing)
        np.testing.assert_array_equal(found, np.stack(expected, axis))
        assert found.dtype == values[0].dtype


@pytest.mark.parametrize("row", FIELDS, ids=lambda row: row.name)
def test_only_what_may_be_infinite_is_taken_so(
    row: Field, snapshots: list[diagnose.Snapshot]
) -> None:
    report = summarize(snapshots[0])
    of_kind = report.kinds["dispatch"]
    value = getattr(of_kind, row.name)
    if value.dtype != np.float64:
        return
    infinite = replace(of_kind, **{row.name: np.full_like(value, np.inf)})
    reports = [replace(report, kinds={"dispatch": infinite}), *snapshots[1:]]
    if row.may_be_infinite:
        assert np.isinf(getattr(diagnose.gather(reports)["dispatch"], row.name)[0]).all()
        return
    with pytest.raises(EPArgumentError, match=f"{row.name} is infinite"):
        diagnose.gather(reports)
