"""What stamps, heatmaps and verdicts say in wall time, which is what a GPU has.

Real delays of tens of milliseconds, large against what the scheduler of a small machine adds; every
fault alone and two at once, fused and in hook mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import deep_ep
from deep_ep import diagnose
from deep_ep.diagnose import Diagnosis
from deep_ep.testing import faults
from support.exchange import Mode, Shape, combine, dispatch, experts, make_inputs, ranks_for
from support.launch import measured_again

NUM_ROUNDS = 12
KINDS = ("dispatch", "combine")
# What is not the fault's doing must stay below this share of it, and what is above the other one.
LIGHT, DARK = 0.3, 0.6

FUSED, HOOKS = Mode(), Mode(hook=True)
BOTH_MODES = pytest.mark.parametrize("mode", [FUSED, HOOKS], ids=["fused", "hooks"])

pytestmark = pytest.mark.skipif(
    deep_ep.native.backend.get().name != "cpu", reason="delays are injected on the cpu backend only"
)


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_CPU_CLOCK", "wall")


class Run(NamedTuple):
    """What one group did and what is said about it."""

    diagnosis: Diagnosis
    period_us: float  # from the end of an operation to the end of the next, mean of ranks
    waits: dict[str, np.ndarray]  # per kind [receiver, source] ns, the original's tensors


def shape_of(num_ranks: int) -> Shape:
    return Shape(
        (4,) * num_ranks, num_max_tokens=4, hidden=256, num_experts=2 * num_ranks, num_topk=2
    )


def run(num_ranks: int, mode: Mode, injected: str = "") -> Run:
    """Rounds of dispatch and combine under the given faults."""
    shape = shape_of(num_ranks)
    inputs = make_inputs(shape)

    def round_of(rank: int, buffer: deep_ep.Buffer, stats: dict[str, torch.Tensor]) -> None:
        received = dispatch(
            buffer, inputs[rank], shape, mode, dispatch_wait_recv_cost_stats=stats["dispatch"]
        )
        outputs = experts(received, rank)
        combine(
            buffer, inputs[rank], received.handle, outputs, mode,
            combine_wait_recv_cost_stats=stats["combine"],
        )  # fmt: skip

    def program(rank: int, buffer: deep_ep.Buffer) -> Any:
        def no_stats() -> dict[str, torch.Tensor]:
            return {kind: torch.zeros(num_ranks, dtype=torch.int64) for kind in KINDS}

        round_of(rank, buffer, no_stats())
        buffer.enable_counters()
        remove = faults.apply(buffer, faults.parse_list(injected)) if injected else lambda: None
        stats = no_stats()
        for _ in range(NUM_ROUNDS):
            round_of(rank, buffer, stats)
        remove()
        slots = [
            counters.snapshot()
            for counters in (buffer.dispatch_counters, buffer.combine_counters)
            if counters is not None
        ]
        exits = np.sort(
            np.concatenate([s.operations()[:, -1, s.ring_own_fields.index("exit")] for s in slots])
        )
        period_us = float(exits[-1] - exits[0]) / (exits.size - 1) / 1e3
        return diagnose.run(buffer), period_us, {kind: stats[kind].numpy() for kind in KINDS}

    with ranks_for(shape) as ranks:
        results = ranks.run(program)
    return Run(
        results[0][0],
        float(np.mean([period_us for _, period_us, _ in results])),
        {kind: np.stack([waits[kind] for _, _, waits in results]) for kind in KINDS},
    )


def assert_dark(
    matrix: np.ndarray, fault_us: float, is_dark: Callable[[int, int], bool], what: str
) -> None:
    """The cells (receiver, source) that must be dark are, and no other one is."""
    for receiver, source in np.ndindex(matrix.shape):
        if receiver == source:
            continue
        share = matrix[receiver, source] / fault_us
        text = f"{what}: {receiver} waits {share:.2f} of the fault for {source}\n{matrix.round()}"
        assert share > DARK if is_dark(receiver, source) else share < LIGHT, text


def assert_says(found: Run, injected: str) -> None:
    """The verdicts are the faults, and nothing else."""
    expected = set(faults.expected_verdicts(faults.parse_list(injected)))
    assert found.diagnosis.keys == expected, found.diagnosis.verdicts


def assert_saves(found: Run, healthy: Run, fault_us: float) -> None:
    """Savings without all causes are at least the fault and at most what the two runs differ by.

    A machine that takes time from all ranks at once makes the runs differ by more than the fault.
    """
    most_us = max(fault_us, found.period_us - healthy.period_us)
    for kind in KINDS:
        assert 0.9 * fault_us < found.diagnosis.savings_us[kind] < 1.1 * most_us


@BOTH_MODES
@pytest.mark.parametrize("num_ranks", [2, 8])
@measured_again
def test_a_late_rank_darkens_its_own_column_and_no_other(num_ranks: int, mode: Mode) -> None:
    late, fault_us = num_ranks - 1, 40e3
    injected = f"slow-rank={late}:40ms"
    found = run(num_ranks, mode, injected)
    for kind in KINDS:
        measured = found.diagnosis.measured[kind]
        for what in ("wait_us", "late_us"):
            assert_dark(getattr(measured, what), fault_us, lambda _, s: s == late, f"{kind} {what}")
        assert_dark(measured.path_us, fault_us, lambda *_: False, f"{kind} path_us")
    assert_says(found, injected)
    assert_saves(found, run(num_ranks, mode), fault_us)


@BOTH_MODES
@measured_again
def test_a_slow_path_darkens_its_cell_and_no_other(mode: Mode) -> None:
    num_ranks, source, receiver, fault_us = 4, 0, 3, 80e3
    injected = f"slow-path={source}>{receiver}:80ms"
    found = run(num_ranks, mode, injected)
    first, second = (found.diagnosis.measured[kind] for kind in KINDS)
    # Held up in one operation the receiver is late in the next, where the data is there already.
    assert_dark(
        first.path_us + second.path_us,
        fault_us,
        lambda r, s: (r, s) == (receiver, source),
        "path_us",
    )
    late_us = first.late_us + second.late_us
    assert_dark(late_us, fault_us, lambda r, s: s == receiver, "late_us")
    assert_says(found, injected)
    # A path holds up one operation of two, whose receiver is then late in the other.
    assert_saves(found, run(num_ranks, mode), fault_us / 2)


# `fault_us` is what both delay an operation by: the shorter fault passes behind the longer one.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_ranks", "mode", "injected", "fault_us"),
    [
        (4, HOOKS, "slow-rank=1:100ms slow-path=2>3:60ms", 100e3),
        (8, FUSED, "slow-rank=3:80ms slow-rank=6:80ms", 80e3),
    ],
)
@measured_again
def test_two_faults_at_once_are_both_named(
    num_ranks: int, mode: Mode, injected: str, fault_us: float
) -> None:
    found = run(num_ranks, mode, injected)
    assert_says(found, injected)
    assert_saves(found, run(num_ranks, mode), fault_us)


@BOTH_MODES
@pytest.mark.parametrize("num_ranks", [2, 8])
@measured_again
def test_nothing_is_said_of_a_healthy_group(num_ranks: int, mode: Mode) -> None:
    assert not run(num_ranks, mode).diagnosis.verdicts


@measured_again
def test_the_rule_on_the_original_s_tensors_finds_the_straggler() -> None:
    late = 2
    waits = run(4, FUSED, f"slow-rank={late}:60ms").waits
    for kind in KINDS:
        said = diagnose.Diagnose.diagnose_matrix(waits[kind])
        assert [column for column, *_ in said["abnormal_cols"]] == [late], waits[kind]
        assert not said["abnormal_rows"]
