"""What is no measurement of a group: a message or a remark, never a traceback, never a confident verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep import EPArgumentError, diagnose
from deep_ep.diagnose.collect.group_matrices import gather_group
from deep_ep.diagnose.collect.snapshot import Snapshot
from deep_ep.group import thread_groups
from deep_ep.testing.faults import SlowRank
from generator import simulate
from generator.machines import CPU, GPU

NUM_ROUNDS = 30
Spoil = Callable[[np.ndarray, np.random.Generator], Any]


def healthy(num_ranks: int = 4, seed: int = 1) -> list[Snapshot]:
    return simulate(GPU, num_ranks, NUM_ROUNDS, seed=seed)


def with_counters(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return replace(
        snapshot,
        operations={kind: replace(c, **changes) for kind, c in snapshot.operations.items()},
    )


def of_another_group(snapshots: list[Snapshot]) -> list[Snapshot]:
    return [replace(snapshots[0], operations=healthy(8)[0].operations), *snapshots[1:]]


def without_field(snapshots: list[Snapshot]) -> list[Snapshot]:
    counters = snapshots[1].operations["combine"]
    fields = tuple("waited" if name == "wait_ns" else name for name in counters.fields)
    return [snapshots[0], with_counters(snapshots[1], fields=fields)]


WRONG: dict[str, tuple[Callable[[list[Snapshot]], Any], str]] = {
    "None": (lambda _: None, "reports is a NoneType"),
    "a text": (lambda _: "snapshots", "reports is a str"),
    "nothing": (lambda _: [], "Pass one snapshot per rank"),
    "a None among them": (lambda s: [s[0], None], "a report is a NoneType"),
    "a number": (lambda s: [s[0], 3], "a report is a int"),
    "rank below 0": (lambda s: [replace(s[0], rank=-1)], "rank -1 of 4"),
    "rank out of range": (lambda s: [replace(s[0], rank=4)], "rank 4 of 4"),
    "rank no integer": (lambda s: [replace(s[0], rank=None)], "rank is null; expected an integer"),
    "rank twice": (lambda s: [s[0], s[0]], r"ranks \[0, 0\]"),
    "num_ranks wrong": (
        lambda s: [replace(s[0], num_ranks=5)],
        r"expected int64 of shape \[\d+, 5\]",
    ),
    "num_ranks differ": (lambda s: [s[0], *healthy(3)[1:]], r"sizes \[3, 4\]"),
    "counters of another group": (of_another_group, r"expected int64 of shape \[\d+, 4\]"),
    "a missing field": (without_field, "dispatch.fields lacks wait_ns"),
    "no counters": (
        lambda s: [replace(s[0], operations={"dispatch": None})],
        "operations.dispatch is null; expected an object",
    ),
    "no operations": (lambda s: [replace(s[0], operations=None)], "operations is null"),
    "floats": (
        lambda s: [with_counters(s[0], ring=s[0].operations["dispatch"].ring * np.nan)],
        "ring is float64",
    ),
    "a ring of too few columns": (
        lambda s: [with_counters(s[0], ring=s[0].operations["dispatch"].ring[:, :, :3])],
        "ring is int64",
    ),
    "totals of one dimension": (
        lambda s: [with_counters(s[0], totals=s[0].operations["dispatch"].totals[0])],
        "totals is int64",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_report_of_the_group_is_refused_with_what_to_do(
    spoil: Callable[[list[Snapshot]], Any], said: str
) -> None:
    given_ = spoil(healthy())
    with pytest.raises(EPArgumentError, match=said) as caught:
        diagnose.gather(given_)
    assert str(caught.value).startswith(("gather:", "summarize:"))
    assert any(word in str(caught.value) for word in ("Pass", "Take", "Leave"))


@pytest.mark.parametrize("given_", [None, 3, [1], {"dispatch": None}, {"dispatch": np.eye(3)}])
def test_what_are_no_matrices_is_refused(given_: Any) -> None:
    with pytest.raises(EPArgumentError, match=r"Pass what diagnose\.gather\(\) returns"):
        diagnose.judge(given_)


def test_run_without_a_buffer_says_so() -> None:
    with pytest.raises(EPArgumentError, match="run: buffer is a NoneType"):
        diagnose.run(None)


def test_a_rank_whose_counters_cannot_be_used_is_named_on_all_ranks() -> None:
    (group,) = thread_groups(1)
    broken = with_counters(simulate(CPU, 1, 3)[0], own_fields=("ops",))
    with pytest.raises(
        EPArgumentError, match=r"diagnose: of the snapshot of rank 0 .*dispatch.own is int64"
    ):
        gather_group(group, lambda: broken)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"num_ranks": 5}, "totals is int64 of shape"), ({}, "lacks ops, tokens")],
    ids=["of another group", "without a field"],
)
def test_a_saved_file_that_cannot_be_used_is_left_out_with_a_remark(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    snapshots = healthy()
    fields = tuple(f"x{name}" for name in snapshots[2].operations["dispatch"].fields)
    spoilt = (
        replace(snapshots[2], **changes) if changes else with_counters(snapshots[2], fields=fields)
    )
    diagnose.save([*snapshots[:2], spoilt], tmp_path)
    (remark,) = diagnose.read_any(tmp_path).remarks
    assert "counters-rank2" in remark
    assert said in remark


def test_a_saved_ring_of_nonsense_does_not_take_the_others_back_to_where_it_begins(
    tmp_path: Path,
) -> None:
    snapshots = simulate(GPU, 8, NUM_ROUNDS, [SlowRank(3, 60e-6)], seed=4)
    for counters in snapshots[6].operations.values():
        counters.ring[:] = np.random.default_rng(1).integers(0, 9, counters.ring.shape)
    diagnose.save(snapshots, tmp_path)
    (record,) = diagnose.read_any(tmp_path).records
    assert record.diagnosis.keys == {("comp-slow", 3)}
    assert record.diagnosis.measured["dispatch"].num_operations >= 28


# --- stamps that never were ------------------------------------------------------------------------


STAMPS = np.s_[:, :, 1:]
WHOLE = -(2**63), 2**63 - 1
SPOILS: dict[str, Spoil] = {
    "an end before the entry": lambda ring, _: np.subtract(
        ring[:, -1, 1], 10**9, out=ring[:, -1, 2], where=ring[:, -1, 2] != 0
    ),
    "arrivals hours before": lambda ring, _: np.subtract(
        ring[:, :-1, 2], 8 * 3_600 * 10**9, out=ring[:, :-1, 2], where=ring[:, :-1, 2] != 0
    ),
    "operations that do not grow": lambda ring, generator: np.copyto(
        ring[:, -1, 0], generator.permutation(len(ring)) + 1, where=ring[:, -1, 0] > 0
    ),
    "random stamps": lambda ring, generator: np.copyto(
        ring[STAMPS], generator.integers(*WHOLE, ring[STAMPS].shape)
    ),
    "random everything": lambda ring, generator: np.copyto(
        ring, generator.integers(*WHOLE, ring.shape)
    ),
    "small random stamps": lambda ring, generator: np.copyto(
        ring[STAMPS], generator.integers(0, 10**8, ring[STAMPS].shape)
    ),
    "negative stamps": lambda ring, _: np.negative(ring[:, :-1, :3], out=ring[:, :-1, :3]),
    "huge stamps": lambda ring, _: ring[:, :-1, 1].fill(2**63 - 1),
}


def spoilt(snapshot: Snapshot, spoil: Spoil) -> Snapshot:
    generator = np.random.default_rng(snapshot.rank)
    for counters in snapshot.operations.values():
        spoil(counters.ring, generator)
    return snapshot


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_a_rank_whose_stamps_contradict_each_other_is_left_out_and_the_others_are_judged(
    spoil: Spoil,
) -> None:
    snapshots = simulate(GPU, 8, NUM_ROUNDS, [SlowRank(3, 60e-6)], seed=2)
    spoilt(snapshots[5], spoil)
    found = diagnose.judge(diagnose.gather(snapshots))
    assert found.keys == {("comp-slow", 3)}
    assert any(r.startswith("dispatch: of rank 5 ") and "left out" in r for r in found.remarks)
    nothing = diagnose.judge(diagnose.gather([spoilt(s, spoil) for s in healthy()]))
    assert (nothing.verdicts, nothing.events) == ([], [])
    assert any("dispatch: of rank 2 " in remark for remark in nothing.remarks)
    undecided = "dispatch: undecided, fewer than 2 ranks reported what can be compared"
    assert undecided in nothing.remarks


def test_a_few_operations_that_contradict_themselves_are_left_out_of_the_rest() -> None:
    snapshots = simulate(GPU, 4, NUM_ROUNDS, [SlowRank(3, 60e-6)], seed=3)
    ring = snapshots[1].operations["dispatch"].ring
    slot = np.flatnonzero(ring[:, -1, 0])[4]
    ring[slot, -1, 2] -= 10**12
    found = diagnose.judge(diagnose.gather(snapshots))
    assert found.keys == {("comp-slow", 3)}
    assert any(
        "of rank 1 1 of 30 operations contradict themselves (an end before" in remark
        for remark in found.remarks
    )


@pytest.mark.parametrize("field", ["ops", "tokens", "wait_ns"])
@pytest.mark.parametrize("value", [-1, 2**62])
def test_impossible_sums_are_left_out(field: str, value: int) -> None:
    snapshots = healthy()
    for counters in snapshots[2].operations.values():
        counters.totals[counters.fields.index(field), 1] = value
    found = diagnose.judge(diagnose.gather(snapshots))
    assert found.verdicts == []
    assert f"dispatch: of rank 2 its sums are impossible ({field}); left out" in found.remarks


@settings(max_examples=60, deadline=None)
@given(
    num_ranks=st.integers(1, 5),
    bad=st.sets(st.integers(0, 4), min_size=1),
    bits=st.sampled_from([8, 32, 62, 63]),
    columns=st.sampled_from(["stamps", "all"]),
    sums=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_arbitrary_rings_and_sums_never_raise_and_never_convince(
    num_ranks: int, bad: set[int], bits: int, columns: str, sums: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    snapshots = simulate(GPU, num_ranks, 12, seed=7)
    for snapshot in snapshots:
        if snapshot.rank not in bad:
            continue
        for counters in snapshot.operations.values():
            least = -(2**bits) if bits > 8 else 0
            arrays = [counters.ring[:, :, 0 if columns == "all" else 1 :]]
            arrays += [counters.totals, counters.own] if sums else []
            for array in arrays:
                array[:] = generator.integers(least, 2**bits - 1, array.shape)
    found = diagnose.judge(diagnose.gather(snapshots))
    assert found.verdicts == []
