"""The whole way: kernels count, ranks gather, rank 0 names the fault."""

from __future__ import annotations

import pytest

import deep_ep
from deep_ep import diagnose
from deep_ep.diagnose import Diagnosis
from deep_ep.testing import faults
from fixtures import OF_TWO_RANKS, SHAPE, exchange
from support.exchange import ranks_for
from support.launch import DEVICE, Ranks

NUM_ROUNDS = 16


@pytest.mark.skipif(
    DEVICE != "cpu", reason="paths are delayed by the cpu backend; unset DEEP_EP_BACKEND"
)
def test_a_slow_path_is_named_on_rank_0_and_only_in_its_window() -> None:
    def rank_program(
        _rank: int, buffer: deep_ep.Buffer
    ) -> tuple[Diagnosis | None, Diagnosis | None]:
        buffer.enable_counters()
        remove = faults.apply(buffer, faults.parse_list("slow-path=2>1:50ms"))
        exchange(buffer, NUM_ROUNDS)
        slow = diagnose.run(buffer)
        remove()
        before = diagnose.snapshot(buffer)
        exchange(buffer, NUM_ROUNDS)
        return slow, diagnose.run(buffer, since=before)

    with ranks_for(SHAPE) as ranks:
        found = ranks.run(rank_program)
    assert all(of_rank == (None, None) for of_rank in found[1:])
    slow, healed = found[0]
    assert slow is not None
    assert healed is not None
    paths = {v.edge: v.effect_us for v in slow.verdicts if v.edge is not None}
    assert paths == {(2, 1): pytest.approx(50_000, rel=0.02)}
    assert not [v for v in healed.verdicts if v.edge is not None]
    assert healed.measured["dispatch"].num_operations == NUM_ROUNDS


def test_a_window_that_one_rank_cannot_take_raises_on_all() -> None:
    """The others would wait for it for ever."""

    def rank_program(rank: int, buffer: deep_ep.Buffer) -> str:
        buffer.enable_counters()
        exchange(buffer, NUM_ROUNDS)
        before = diagnose.snapshot(buffer)
        if rank == 1:
            buffer.disable_counters()
            buffer.enable_counters()
        with pytest.raises(deep_ep.EPArgumentError) as raised:
            diagnose.run(buffer, since=before)
        return str(raised.value)

    with ranks_for(OF_TWO_RANKS) as ranks:
        messages = ranks.run(rank_program)
    assert "rank 1" in messages[0]
    assert all("ops" in message for message in messages)


def test_without_counters_the_answer_says_how_to_get_them() -> None:
    with Ranks(1, 8, 256, 8) as ranks:
        (found,) = ranks.run(lambda _, buffer: diagnose.run(buffer))
    assert found is not None
    assert found.verdicts == []
    assert "enable_counters()" in found.remarks[0]
