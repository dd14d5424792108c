"""Windows of waiting that other kernels count, to verdicts: whoever lasts, by operation or by time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deep_ep.diagnose.core.diagnosis import Diagnosis, FloatArray
from deep_ep.diagnose.live.wait_sampler import Window
from deep_ep.diagnose.other_kernels.judge import Judge
from deep_ep.diagnose.storage import diagnosis_log

NUM_RANKS, LATE = 8, 5
KINDS = ("dispatch", "combine")
OPERATIONS, SECONDS = 100, 0.05


def waits_of(late_us: float, seed: int, operations: int = OPERATIONS) -> FloatArray:
    """[kinds, n, n] ns of a window: about 20 us an operation for each other rank, more for the late one, which waits less."""
    draw = np.random.default_rng(seed)
    waits = draw.uniform(19.0, 21.0, (2, NUM_RANKS, NUM_RANKS))
    waits[:, :, LATE] += late_us
    waits[:, LATE] = np.maximum(waits[:, LATE] - late_us, 0.0)
    waits[:, np.arange(NUM_RANKS), np.arange(NUM_RANKS)] = 0.0
    return waits * operations * 1e3


def window(number: int, waits: FloatArray, operations: float = OPERATIONS) -> Window:
    hosts = [f"host{rank // 4}" for rank in range(NUM_RANKS)]
    return Window(number, waits, np.full(2, float(operations)), hosts, {}, [])


def after(judge: Judge, *windows: Window, seconds: float = SECONDS) -> list[Diagnosis]:
    return [judge.judge(one, seconds) for one in windows]


def of(late_us: float, counts: list[int], *, known: bool = True) -> list[Window]:
    """A window for each number of operations."""
    return [
        window(i + 1, waits_of(late_us, i, count), count if known else np.nan)
        for i, count in enumerate(counts)
    ]


def effects(diagnosis: Diagnosis) -> list[float]:
    assert {verdict.rank for verdict in diagnosis.verdicts} == {LATE}
    return [verdict.effect_us for verdict in diagnosis.verdicts]


def test_a_late_rank_is_named_after_five_windows_by_its_effect_on_an_operation() -> None:
    found = after(Judge(KINDS, None), *of(50.0, [OPERATIONS] * 5))
    assert [bool(diagnosis.verdicts) for diagnosis in found] == [False] * 4 + [True]
    assert effects(found[-1]) == pytest.approx([50.0, 50.0], abs=2.0)
    assert all("host1" in verdict.where for verdict in found[-1].verdicts)


def test_windows_may_have_different_numbers_of_operations() -> None:
    found = after(Judge(KINDS, None), *of(50.0, [40, 300, 90, 100, 2000, 100]))
    assert effects(found[-1]) == pytest.approx([50.0, 50.0], abs=2.0)


def test_short_windows_are_added_up() -> None:
    judge = Judge(KINDS, None)
    # Four of these make one of 16 operations.
    assert not any(d.verdicts for d in after(judge, *of(50.0, [4] * 19), seconds=SECONDS / 25))
    assert effects(after(judge, *of(50.0, [4]), seconds=SECONDS / 25)[0])


def test_without_a_number_of_operations_effects_are_of_a_window() -> None:
    found = after(Judge(KINDS, None), *of(50.0, [OPERATIONS] * 5, known=False))
    assert effects(found[-1]) == pytest.approx([50.0 * OPERATIONS] * 2, rel=0.05)
    assert any("effects are of a window" in remark for remark in found[-1].remarks)
    assert not any("none is too small" in remark for remark in found[-1].remarks)


def test_what_was_counted_is_forgotten_when_graphs_begin() -> None:
    judge = Judge(KINDS, None)
    assert after(judge, *of(50.0, [OPERATIONS] * 5))[-1].verdicts
    assert not any(d.verdicts for d in after(judge, *of(50.0, [OPERATIONS] * 4, known=False)))
    assert after(judge, *of(50.0, [OPERATIONS], known=False))[-1].verdicts


@pytest.mark.parametrize("known", [True, False])
def test_less_than_a_hundredth_of_the_time_is_nobodys_fault(known: bool) -> None:
    windows = of(50.0, [OPERATIONS] * 6, known=known)
    # Both kinds together 100 us in 20 ms, and in 5 ms.
    assert not after(Judge(KINDS, None), *windows, seconds=2.0)[-1].verdicts
    assert after(Judge(KINDS, None), *windows, seconds=0.5)[-1].verdicts


def test_a_kind_that_is_not_counted_is_left_out() -> None:
    windows = of(50.0, [OPERATIONS] * 5)
    for one in windows:
        one.waits[1], one.operations[1] = 0.0, 0.0
    found = after(Judge(KINDS, None), *windows)
    assert list(found[-1].measured) == ["dispatch"]
    assert effects(found[-1]) == pytest.approx([50.0], abs=2.0)


@pytest.mark.parametrize("within_nodes", [False, True])
def test_a_rank_that_does_not_answer_is_left_out(within_nodes: bool) -> None:
    """It has no host, since it has never answered."""
    windows = of(50.0, [OPERATIONS] * 5)
    node = np.arange(NUM_RANKS) // 4
    for one in windows:
        if within_nodes:
            one.waits[:, node[:, None] != node] = 0.0
        one.waits[:, 0] = np.nan
        one.hosts[0] = ""
    assert effects(after(Judge(KINDS, None, within_nodes=within_nodes), *windows)[-1])


def test_ranks_of_other_nodes_are_not_compared_where_nodes_alone_are_counted() -> None:
    windows = of(50.0, [OPERATIONS] * 5)
    hosts = [f"host{rank // 8}" for rank in range(2 * NUM_RANKS)]
    both = []
    for one in windows:
        waits = np.zeros((2, 2 * NUM_RANKS, 2 * NUM_RANKS))
        waits[:, :NUM_RANKS, :NUM_RANKS] = one.waits
        waits[:, NUM_RANKS:, NUM_RANKS:] = waits_of(0.0, 100 + one.number)
        both.append(Window(one.number, waits, one.operations, hosts, {}, []))
    found = after(Judge(KINDS, None, within_nodes=True), *both)[-1]
    assert effects(found) == pytest.approx([50.0, 50.0], abs=2.0)
    assert np.isnan(found.measured["dispatch"].wait_us[0, NUM_RANKS:]).all()


def test_what_is_counted_after_the_calls_is_theirs() -> None:
    """Kernels end after their calls: a window without calls adds to the ones before."""
    judge = Judge(KINDS, None)
    late = Window(2, waits_of(50.0, 9, 3), np.zeros(2), window(1, waits_of(0.0, 0)).hosts, {}, [])
    first = of(50.0, [OPERATIONS] * 3)
    assert not any(d.verdicts for d in after(judge, late, *first, late))
    assert effects(after(judge, *of(50.0, [OPERATIONS] * 2))[-1])


def test_half_of_the_ranks_may_have_called_once() -> None:
    one = Window(1, waits_of(0.0, 0, 1), np.full(2, 0.5), [""] * NUM_RANKS, {}, [])
    assert not Judge(KINDS, None).judge(one, SECONDS).verdicts


def test_who_is_missing_is_told_while_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    judge = Judge(KINDS, None)
    idle = window(3, np.zeros((2, NUM_RANKS, NUM_RANKS)), 0)
    for _ in range(2):
        judge.window(replace(idle, silent={5: (3, 0.0)}))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "rank 5 has not reported since window 3" in said[0]


def test_windows_in_which_nobody_waited_are_none(tmp_path: Path) -> None:
    judge = Judge(KINDS, tmp_path)
    idle = window(1, np.zeros((2, NUM_RANKS, NUM_RANKS)), 0)
    judge.window(idle)
    assert not list(tmp_path.iterdir())
    judge.window(window(2, waits_of(0.0, 0)))
    assert [record.window for record in diagnosis_log.read(tmp_path)] == [2]


def test_healthy_ranks_are_not_named() -> None:
    for known in (True, False):
        found = after(Judge(KINDS, None), *of(0.0, [OPERATIONS] * 10, known=known))
        assert not any(diagnosis.verdicts for diagnosis in found)
