"""One row per number: what a rank sends, what stands for a missing one, and what is stacked agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from deep_ep import diagnose
from deep_ep.base import codec
from deep_ep.diagnose.collect.fields import FIELDS, Field, Numbers
from deep_ep.diagnose.collect.rank_summary import KindSummary, Summary, summarize
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


SPOILT: dict[str, Callable[[Summary, KindSummary], Any]] = {
    "rank is 4; expected an integer of at least 0 and below 4": lambda s, _: replace(s, rank=4),
    "device_index is -1": lambda s, _: replace(s, device_index=-1),
    "kinds.dispatch.gap is": lambda _, k: replace(k, gap=k.gap[:, None]),
    "kinds.dispatch.ops is [3]; expected int64 of shape [10]": lambda _, k: replace(
        k, ops=k.ops[:3]
    ),
    "kinds.dispatch has ranks that came last beyond -1 and 3": lambda _, k: replace(
        k, last=k.last + 4
    ),
    "kinds.dispatch has operations beyond 0 and": lambda _, k: replace(k, ops=k.ops - 99),
    "kinds.dispatch has operations beyond 0": lambda _, k: replace(k, heard=k.heard * np.nan),
    "kinds.dispatch is infinite where": lambda _, k: replace(k, gap=k.gap + np.inf),
}


@pytest.mark.parametrize("said", SPOILT)
def test_what_no_rank_can_have_seen_is_refused_where_it_is_read(
    said: str, snapshots: list[diagnose.Snapshot]
) -> None:
    whole = summarize(snapshots[0])
    assert codec.decode(Summary, codec.encode(whole)).rank == 0
    spoilt = SPOILT[said](whole, whole.kinds["dispatch"])
    if isinstance(spoilt, KindSummary):
        spoilt = replace(whole, kinds={"dispatch": spoilt})
    with pytest.raises(codec.CodecError, match=re.escape(said)):
        codec.decode(Summary, codec.encode(spoilt))
