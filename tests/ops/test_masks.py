"""Masked ranks: operations go on without them, exactly and without a wait, and they may come back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
import support.exchange
from deep_ep import diagnose
from deep_ep.base import env
from deep_ep.errors import EPArgumentError, EPError, EPUsageError
from deep_ep.group import thread_groups
from support.exchange import (
    Inputs,
    Mode,
    Received,
    Shape,
    assert_combined_from_logfmt,
    assert_received_one,
    assert_same_bytes,
    begin_dispatch,
    buffer_for,
    combine,
    dispatch,
    expected_combine,
    expected_dispatch,
    expected_experts,
    experts,
    finish,
    make_inputs,
    ranks_for,
)
from support.launch import (
    DEVICE,
    HANG_S,
    Ranks,
    before_next_operation,
    keep_busy,
    raise_failures,
    run_processes,
    short_timeout_s,
)

SHAPE = Shape((5, 3, 4, 6), num_max_tokens=6, hidden=512, num_experts=8, num_topk=3)
ALL = range(SHAPE.num_ranks)
MASKED = 2
BF16 = Mode()
# The least of a wait that a test provokes, and one that it must not see: who waits so long hangs.
SHORT_S, NEVER_S = 1.0, 5 * HANG_S
# Of ranks that die while the others exchange, and exchanges meanwhile and afterwards.
LAST_DEATH_S, NUM_EXCHANGES = 0.6, 40

processes_only = pytest.mark.skipif(DEVICE != "cpu", reason="ranks that are processes share no GPU")
pytestmark = pytest.mark.filterwarnings("ignore:.* went on without:RuntimeWarning")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Four ranks whose tests end long before they would time out."""
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", str(NEVER_S))
    with ranks_for(SHAPE, enable_shrink=True) as ranks:
        yield ranks


def short_s() -> float:
    """A timeout that ranks meet only where they wait for one that does not come."""
    with ranks_for(SHAPE, enable_shrink=True) as ranks:
        return short_timeout_s(lambda: exchange(ranks, SHAPE, BF16), SHORT_S)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Four ranks that time out soon."""
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", str(short_s()))
    with ranks_for(SHAPE, enable_shrink=True) as ranks:
        yield ranks


# ---- what is right: the reference, where masked ranks send nothing and nobody selects their experts


def without(inputs: list[Inputs], shape: Shape, masked: Collection[int]) -> list[Inputs]:
    """The same, as if nobody had selected an expert of these ranks, and they none at all."""
    result = []
    for rank, one in enumerate(inputs):
        owners = one.topk_idx // shape.num_local_experts
        away = torch.isin(owners, torch.tensor(sorted(masked))) | (rank in masked)
        result.append(one._replace(topk_idx=one.topk_idx.masked_fill(away, -1)))
    return result


def masks_of(buffer: deep_ep.Buffer) -> list[int]:
    """The ranks that a buffer masks."""
    status = torch.full((buffer.group_size,), -1, dtype=torch.int32, device=DEVICE)
    buffer.low_latency_query_mask_buffer(status)
    assert set(status.tolist()) <= {0, 1}
    return status.nonzero().flatten().tolist()


def mask(ranks: Ranks, masked: Collection[int]) -> None:
    """All other ranks mask these."""
    for rank, buffer in enumerate(ranks.buffers):
        for other in sorted(masked) if rank not in masked else ():
            buffer.low_latency_update_mask_buffer(other, True)


def exchange(
    ranks: Ranks,
    shape: Shape,
    mode: Mode,
    masked: Collection[int] = (),
    stopping: Collection[int] = (),
) -> None:
    """A dispatch and a combine of all ranks but these; results are the reference's without them.

    `stopping` come to the dispatch, and not to the combine.
    """
    inputs = make_inputs(shape)
    active = [rank for rank in range(shape.num_ranks) if rank not in masked]
    seen = without(inputs, shape, masked)
    dispatched = expected_dispatch(seen, shape, mode)

    def take_part(rank: int, buffer: deep_ep.Buffer) -> Any:
        if rank not in active:
            return None
        stats = torch.zeros(shape.num_local_experts, dtype=torch.int32, device=DEVICE)
        received = dispatch(
            buffer, inputs[rank], shape, mode, cumulative_local_expert_recv_stats=stats
        )
        assert stats.tolist() == received.recv_count.tolist()
        if rank in stopping:
            return received, None
        ys = experts(received, rank)
        return received, combine(buffer, inputs[rank], received.handle, ys, mode)

    results = ranks.run(take_part)
    ys = expected_experts(dispatched)
    without_them = without(inputs, shape, {*masked, *stopping})
    expected = expected_combine(without_them, ys, dispatched)
    for rank in active:
        received, combined = results[rank]
        assert_received_one(received, dispatched[rank], shape, mode, f"rank {rank}")
        if combined is None:
            continue
        if mode.use_logfmt:
            some = [combined if other == rank else want for other, want in enumerate(expected)]
            assert_combined_from_logfmt(some, ys, without_them, dispatched)
        else:
            assert_same_bytes(combined.cpu(), expected[rank], f"combine, rank {rank}")


# ---- the calls


def test_masks_are_set_read_and_cleaned(patient: Ranks) -> None:
    buffer = patient.buffers[0]
    assert masks_of(buffer) == []
    buffer.low_latency_update_mask_buffer(1, True)
    buffer.low_latency_update_mask_buffer(3, True)
    assert masks_of(buffer) == [1, 3]
    assert buffer.why_masked() == dict.fromkeys((1, 3), "the program asked for it")
    buffer.low_latency_update_mask_buffer(1)
    assert masks_of(buffer) == [3]
    assert masks_of(patient.buffers[2]) == []  # local
    patient.run(lambda _, buffer: buffer.low_latency_clean_mask_buffer())
    assert masks_of(buffer) == []
    assert buffer.why_masked() == {}


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.low_latency_update_mask_buffer(1, True),
        lambda b: b.low_latency_query_mask_buffer(torch.zeros(2, dtype=torch.int32)),
        lambda b: b.low_latency_clean_mask_buffer(),
        lambda b: b.why_masked(),
    ],
)
def test_a_buffer_without_masks_refuses_them(call: Any) -> None:
    ranks = ranks_for(replace(SHAPE, num_tokens=(4, 4)))
    with ranks, pytest.raises(EPUsageError, match="enable_shrink=True"):
        call(ranks.buffers[0])


def test_without_an_rdma_buffer_there_are_no_masks() -> None:
    arguments = {"num_rdma_bytes": 0, "num_nvl_bytes": 1 << 20, "low_latency_mode": False}
    with ranks_for(replace(SHAPE, num_tokens=(4, 4)), enable_shrink=True, **arguments) as ranks:
        assert ranks.buffers[0].enable_shrink
        with pytest.raises(EPUsageError, match="num_rdma_bytes above 0"):
            ranks.buffers[0].low_latency_update_mask_buffer(1, True)


def test_what_is_no_mask_is_refused(patient: Ranks) -> None:
    buffer = patient.buffers[1]
    for rank in (-1, 4):
        with pytest.raises(EPArgumentError, match="a rank of the group, 0 to 3"):
            buffer.low_latency_update_mask_buffer(rank, True)
    with pytest.raises(EPArgumentError, match="this rank; a rank can mask others only"):
        buffer.low_latency_update_mask_buffer(1, True)
    with pytest.raises(EPArgumentError, match="mask is a Tensor"):
        buffer.low_latency_update_mask_buffer(0, torch.zeros(2))
    with pytest.raises(EPArgumentError, match="dtype"):
        buffer.low_latency_query_mask_buffer(torch.zeros(4, dtype=torch.int64, device=DEVICE))
    with pytest.raises(EPArgumentError, match="shape"):
        buffer.low_latency_query_mask_buffer(torch.zeros(3, dtype=torch.int32, device=DEVICE))


def test_a_normal_operation_names_the_masked_ranks(patient: Ranks) -> None:
    buffer = patient.buffers[0]
    buffer.low_latency_update_mask_buffer(3, True)
    x = torch.zeros(1, 512, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(EPUsageError, match="rank 3 is masked; normal operations need all ranks"):
        buffer.dispatch(x)


# ---- whom the program masks


@pytest.mark.parametrize(
    "mode",
    [
        BF16,
        Mode(hook=True),
        Mode(async_finish=True, use_out=True),
        Mode(use_fp8=True),
        Mode(use_fp8=True, round_scale=True, use_ue8m0=True, hook=True),
        Mode(zero_copy=True),
        Mode(use_logfmt=True),
    ],
    ids=str,
)
def test_results_are_exact_without_a_masked_rank(patient: Ranks, mode: Mode) -> None:
    mask(patient, [MASKED])
    for seed in range(3):
        exchange(patient, replace(SHAPE, seed=seed), mode, masked=[MASKED])
    assert masks_of(patient.buffers[0]) == [MASKED]


def test_ranks_that_mask_each_other_are_two_groups(patient: Ranks) -> None:
    """Each with its own operations, as often as it likes."""
    for rank, buffer in enumerate(patient.buffers):
        for other in ALL:
            if other % 2 != rank % 2:
                buffer.low_latency_update_mask_buffer(other, True)
    inputs = make_inputs(SHAPE)
    expected = {
        parity: expected_dispatch(
            without(inputs, SHAPE, [r for r in ALL if r % 2 != parity]), SHAPE, BF16
        )
        for parity in (0, 1)
    }

    def several(rank: int, buffer: deep_ep.Buffer) -> list[Received]:
        return [dispatch(buffer, inputs[rank], SHAPE, BF16) for _ in range(2 + 3 * (rank % 2))]

    for rank, results in enumerate(patient.run(several)):
        for received in results:
            want = expected[rank % 2][rank]
            assert_received_one(received, want, SHAPE, BF16, f"rank {rank}")


def test_sizes_may_change_while_a_rank_is_masked(patient: Ranks) -> None:
    mask(patient, [MASKED])
    for most in (6, 4, 6):
        shape = replace(SHAPE, num_tokens=(most,) * 4, num_max_tokens=most, seed=most)
        exchange(patient, shape, BF16, masked=[MASKED])


def test_a_mask_set_between_sending_and_receiving_counts_from_the_next_operation(
    patient: Ranks,
) -> None:
    mode = Mode(hook=True)
    inputs = make_inputs(SHAPE)
    everybody = expected_dispatch(inputs, SHAPE, mode)

    def call(rank: int, buffer: deep_ep.Buffer) -> Received:
        received, event, hook = begin_dispatch(buffer, inputs[rank], SHAPE, mode)
        if rank != MASKED:
            buffer.low_latency_update_mask_buffer(MASKED, True)
        finish(mode, event, hook)
        return received

    for rank, received in enumerate(patient.run(call)):
        assert_received_one(received, everybody[rank], SHAPE, mode, f"rank {rank}")
    exchange(patient, SHAPE, mode, masked=[MASKED])


# ---- who does not come


@pytest.mark.parametrize("mode", [BF16, Mode(hook=True), Mode(async_finish=True)], ids=str)
def test_a_rank_that_does_not_come_is_masked(hasty: Ranks, mode: Mode) -> None:
    exchange(hasty, SHAPE, mode)
    with pytest.warns(RuntimeWarning, match="went on without rank 2, now masked") as caught:
        exchange(hasty, SHAPE, mode, masked=[MASKED])
    assert {warning.filename for warning in caught} == {support.exchange.__file__}
    for rank in set(ALL) - {MASKED}:
        assert masks_of(hasty.buffers[rank]) == [MASKED]
        reason = hasty.buffers[rank].why_masked()[MASKED]
        assert reason.startswith(
            "rank 2 did not arrive in operation 3: rank 2 is between operations"
        )
    exchange(hasty, SHAPE, Mode(hook=True), masked=[MASKED])


def test_who_was_masked_once_is_not_waited_for_again(hasty: Ranks) -> None:
    exchange(hasty, SHAPE, BF16, masked=[MASKED])
    begin = time.monotonic()
    waited = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    inputs = make_inputs(SHAPE)

    def call(rank: int, buffer: deep_ep.Buffer) -> None:
        for _ in range(20 if rank != MASKED else 0):
            own = {"dispatch_wait_recv_cost_stats": waited} if rank == 0 else {}
            dispatch(buffer, inputs[rank], SHAPE, BF16, **own)

    hasty.run(call)
    assert time.monotonic() - begin < 20 * env.timeout_s()
    assert waited[MASKED] == 0


def test_a_rank_that_comes_to_dispatch_and_not_to_combine(hasty: Ranks) -> None:
    exchange(hasty, SHAPE, BF16, stopping=[MASKED])
    exchange(hasty, SHAPE, BF16, masked=[MASKED])


def test_a_rank_that_misses_a_barrier_is_masked(hasty: Ranks) -> None:
    def clean(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank != MASKED:
            buffer.clean_low_latency_buffer(SHAPE.num_max_tokens, SHAPE.hidden, SHAPE.num_experts)

    hasty.run(clean)
    assert masks_of(hasty.buffers[0]) == [MASKED]
    assert "barrier 1" in hasty.buffers[0].why_masked()[MASKED]
    exchange(hasty, SHAPE, BF16, masked=[MASKED])


@pytest.mark.skipif(DEVICE != "cpu", reason="paths are slowed in the CPU's transport")
@pytest.mark.parametrize("late_in", ["dispatch", "combine"])
def test_a_rank_that_is_only_late_is_not_masked(
    monkeypatch: pytest.MonkeyPatch, late_in: str
) -> None:
    """What rank 1 sends to rank 0 takes longer than rank 0 waits. No other rank misses it: it takes part in the
    next operation, and no result is wrong.
    """
    timeout_s = short_s()
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", str(timeout_s))
    monkeypatch.setenv("DEEP_EP_CPU_CLOCK", "wall")
    inputs = make_inputs(SHAPE)
    dispatched = expected_dispatch(inputs, SHAPE, BF16)
    ys = expected_experts(dispatched)
    expected = expected_combine(inputs, ys, dispatched)
    # Rank 0 adds nothing to what rank 1 sent in vain, or cannot add what rank 1 returns too late.
    loser, late = (1, 0) if late_in == "dispatch" else (0, 1)
    expected[loser] = expected_combine(without(inputs, SHAPE, [late]), ys, dispatched)[loser]

    with ranks_for(SHAPE, enable_shrink=True) as ranks:
        exchange(ranks, SHAPE, BF16)

        def slow(is_slow: bool) -> None:
            delay_ns = int(1.5e9 * timeout_s) if is_slow else 0
            ranks.buffers[1].runtime.set_path_fault(dst=0, delay_ns=delay_ns, bytes_per_s=0.0)

        def call_dispatch(rank: int, buffer: deep_ep.Buffer) -> Received:
            return dispatch(buffer, inputs[rank], SHAPE, BF16)

        def call_combine(rank: int, buffer: deep_ep.Buffer) -> torch.Tensor:
            own = experts(received[rank], rank)
            return combine(buffer, inputs[rank], received[rank].handle, own, BF16)

        def expect_late(is_late: bool) -> Any:
            message = "went on without rank 1: .* not missing"
            return pytest.warns(RuntimeWarning, match=message) if is_late else nullcontext()

        slow(late_in == "dispatch")
        with expect_late(late_in == "dispatch"):
            received = ranks.run(call_dispatch)
        slow(late_in == "combine")
        with expect_late(late_in == "combine"):
            combined = ranks.run(call_combine)
        for rank, buffer in enumerate(ranks.buffers):
            assert_same_bytes(combined[rank], expected[rank], f"combine, rank {rank}")
            assert masks_of(buffer) == []
            assert buffer.why_masked() == {}
        slow(False)
        exchange(ranks, SHAPE, BF16)
        exchange(ranks, SHAPE, Mode(hook=True))


def test_a_rank_that_does_not_come_where_sizes_change(hasty: Ranks) -> None:
    """The others wait for it before they send, and then need their time."""
    exchange(hasty, SHAPE, BF16)
    smaller = replace(SHAPE, num_tokens=(4,) * 4, num_max_tokens=4)
    exchange(hasty, smaller, BF16, masked=[MASKED])
    assert [masks_of(hasty.buffers[rank]) for rank in (0, 1, 3)] == [[MASKED]] * 3


def test_errors_stay_errors(hasty: Ranks) -> None:
    """Ranks that disagree are no missing ranks."""
    inputs = make_inputs(SHAPE)

    def disagree(rank: int, buffer: deep_ep.Buffer) -> None:
        with pytest.raises(EPError):
            dispatch(buffer, inputs[rank], SHAPE, Mode(use_fp8=rank == 1))

    hasty.run(disagree)
    assert masks_of(hasty.buffers[0]) == []
    exchange(hasty, SHAPE, BF16)


# ---- who comes back


def clean_all(ranks: Ranks) -> None:
    """As a program does after repair."""
    ranks.run(lambda _, buffer: buffer.low_latency_clean_mask_buffer())


def clean_others(ranks: Ranks) -> None:
    """All but the masked rank do."""
    ranks.run(lambda rank, b: rank == MASKED or b.low_latency_clean_mask_buffer())


def go_on_alone(ranks: Ranks) -> None:
    """The masked rank does, for some operations."""
    inputs = make_inputs(SHAPE)

    def alone(rank: int, buffer: deep_ep.Buffer) -> None:
        for _ in range(6 if rank == MASKED else 0):
            dispatch(buffer, inputs[rank], SHAPE, BF16)

    ranks.run(alone)


@pytest.mark.parametrize("missed", [1, 2, 5])
def test_a_masked_rank_comes_back(patient: Ranks, missed: int) -> None:
    exchange(patient, SHAPE, BF16)
    mask(patient, [MASKED])
    for seed in range(missed):
        exchange(patient, replace(SHAPE, seed=seed), BF16, masked=[MASKED])
    clean_all(patient)
    for seed in range(3):
        exchange(patient, replace(SHAPE, seed=10 + seed), BF16)
    assert len({buffer.runtime.operation() for buffer in patient.buffers}) == 1


def test_a_rank_comes_back_after_it_went_on_alone(hasty: Ranks) -> None:
    """It was called missing, and has called everybody missing since; it is ahead of them."""
    exchange(hasty, SHAPE, BF16, masked=[MASKED])
    go_on_alone(hasty)
    assert masks_of(hasty.buffers[MASKED]) == [0, 1, 3]
    clean_all(hasty)
    for mode in (BF16, Mode(hook=True)):
        exchange(hasty, SHAPE, mode)
    assert [masks_of(buffer) for buffer in hasty.buffers] == [[]] * 4


def test_barriers_go_on_without_a_masked_rank_and_come_back_too(patient: Ranks) -> None:
    sizes = (SHAPE.num_max_tokens, SHAPE.hidden, SHAPE.num_experts)
    mask(patient, [MASKED])

    def meet_without(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == MASKED:
            return
        for _ in range(3):
            buffer.clean_low_latency_buffer(*sizes)
        buffer.measure_clock_offsets()

    patient.run(meet_without)
    clean_all(patient)
    arrived = threading.Barrier(4, timeout=120)
    order: list[str] = []

    def meet(rank: int, buffer: deep_ep.Buffer) -> None:
        arrived.wait()
        if rank == 0:
            time.sleep(0.2)
            order.append("late")
        buffer.clean_low_latency_buffer(*sizes)
        order.append("met")

    patient.run(meet)
    assert order == ["late", *["met"] * 4]
    patient.run(lambda _, buffer: buffer.measure_clock_offsets())


def test_a_rank_that_does_not_clean_is_masked_again(hasty: Ranks) -> None:
    mask(hasty, [MASKED])
    exchange(hasty, SHAPE, BF16, masked=[MASKED])
    clean_others(hasty)
    exchange(hasty, SHAPE, BF16, masked=[MASKED])
    assert masks_of(hasty.buffers[0]) == [MASKED]
    clean_all(hasty)
    exchange(hasty, SHAPE, BF16)


def test_a_rank_that_cleaned_too_late_comes_back_when_all_clean_again(hasty: Ranks) -> None:
    """What it said of itself then is not taken for what it says now, after it went on alone."""
    mask(hasty, [MASKED])
    clean_others(hasty)
    exchange(hasty, SHAPE, BF16, masked=[MASKED])
    late = hasty.buffers[MASKED]
    late.low_latency_clean_mask_buffer()
    go_on_alone(hasty)

    def clean_last() -> None:
        time.sleep(0.2)  # the others look for it before
        late.low_latency_clean_mask_buffer()

    clean_others(hasty)
    before_next_operation(late, clean_last)
    for _ in range(2):
        exchange(hasty, SHAPE, BF16)
    assert [masks_of(buffer) for buffer in hasty.buffers] == [[]] * 4


def test_a_rank_comes_back_that_others_have_met_without_since_they_cleaned(hasty: Ranks) -> None:
    """What they decided was on the operation to come, and is void once all have cleaned."""
    sizes = (SHAPE.num_max_tokens, SHAPE.hidden, SHAPE.num_experts)

    def meet(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == MASKED:
            time.sleep(0.2)  # the others look for it before
        buffer.clean_low_latency_buffer(*sizes)

    mask(hasty, [MASKED])
    clean_others(hasty)
    hasty.run(lambda rank, buffer: rank == MASKED or meet(rank, buffer))
    assert [masks_of(hasty.buffers[rank]) for rank in (0, 1, 3)] == [[MASKED]] * 3
    clean_all(hasty)
    hasty.run(meet)
    assert [masks_of(buffer) for buffer in hasty.buffers] == [[]] * 4
    exchange(hasty, SHAPE, BF16)


def test_a_rank_that_is_ahead_and_does_not_clean_is_masked_again(hasty: Ranks) -> None:
    """Its own operations are none of the others'."""
    exchange(hasty, SHAPE, BF16, masked=[MASKED])
    go_on_alone(hasty)
    clean_others(hasty)
    exchange(hasty, SHAPE, BF16, masked=[MASKED])
    assert [masks_of(hasty.buffers[rank]) for rank in (0, 1, 3)] == [[MASKED]] * 3


# ---- ranks that are processes, and die


def check_exchange(buffer: deep_ep.Buffer, shape: Shape) -> None:
    """A dispatch and a combine of this rank; what they return is right for some sets of masked ranks: those
    whom it masked before, or after, or some between.
    """
    inputs = make_inputs(shape)
    received = dispatch(buffer, inputs[buffer.rank], shape, BF16)
    # Whoever is masked after an operation did not take part in it, or was masked before.
    gone = masks_of(buffer)
    expected = expected_dispatch(without(inputs, shape, gone), shape, BF16)
    assert_received_one(received, expected[buffer.rank], shape, BF16, f"dispatch without {gone}")
    ys = experts(received, buffer.rank)
    combined = combine(buffer, inputs[buffer.rank], received.handle, ys, BF16)
    gone = masks_of(buffer)
    # An expert multiplies each row by a number of its own, so its other rows do not matter.
    everybody = expected_dispatch(inputs, shape, BF16)
    want = expected_combine(without(inputs, shape, gone), expected_experts(everybody), everybody)
    assert_same_bytes(combined.cpu(), want[buffer.rank], f"combine without {gone}")


def exchange_while_others_die(
    rank: int, group: dist.ProcessGroup, deaths: dict[int, float], signal_number: int
) -> dict[str, Any]:
    """Exchanges for a while, every one with other inputs; ranks die at their moment."""
    buffer = buffer_for(SHAPE, group, explicitly_destroy=True, enable_shrink=True)
    dist.barrier(group)
    if rank in deaths:
        threading.Timer(deaths[rank], os.kill, (os.getpid(), signal_number)).start()
    # As many on all ranks that live, and for longer than anybody has to die.
    for seed in range(NUM_EXCHANGES):
        time.sleep(LAST_DEATH_S / (NUM_EXCHANGES - 10))
        if rank in deaths and seed == NUM_EXCHANGES - 5:
            signal.pause()
        check_exchange(buffer, replace(SHAPE, seed=seed))
    # Who is dead is masked again when all who live have cleaned.
    before = masks_of(buffer)
    buffer.low_latency_clean_mask_buffer()
    check_exchange(buffer, SHAPE)
    assert masks_of(buffer) == before
    seen = {"masked": before, "why": buffer.why_masked()}
    buffer.destroy()  # the group is not whole any more: nobody may wait for it
    return seen


def survivors_of(deaths: dict[int, float], signal_number: int, timeout_s: float) -> list[Any]:
    """What those who live have seen."""
    outcomes = run_processes(
        exchange_while_others_die,
        SHAPE.num_ranks,
        deaths,
        signal_number,
        env={"DEEP_EP_TIMEOUT_S": str(timeout_s), "PYTHONWARNINGS": "ignore"},
    )
    return raise_failures([one for rank, one in enumerate(outcomes) if rank not in deaths])


@processes_only
@pytest.mark.parametrize("victim", [1, 0], ids=["rank-1", "rank-0"])
def test_the_others_go_on_at_once_when_a_rank_is_killed(victim: int) -> None:
    for seen in survivors_of({victim: 0.3}, signal.SIGKILL, NEVER_S):
        assert seen["masked"] == [victim]
        assert f"rank {victim} is dead (its process" in seen["why"][victim]


@pytest.mark.exhaustive
@processes_only
@pytest.mark.parametrize("seed", range(2))
def test_no_result_is_wrong_while_ranks_are_killed_at_random(seed: int) -> None:
    generator = random.Random(seed)
    victims = generator.sample(list(ALL), generator.choice((1, 2, 2, 3)))
    deaths = {victim: generator.uniform(0.0, LAST_DEATH_S) for victim in victims}
    for seen in survivors_of(deaths, signal.SIGKILL, 4.0):
        assert seen["masked"] == sorted(deaths), f"seed {seed}"


def exchange_while_one_is_stopped(
    rank: int, group: dist.ProcessGroup, after_s: float, timeout_s: float
) -> dict[str, Any]:
    """One rank is stopped for longer than the others wait, wherever it is; then all clean, and go on."""
    buffer = buffer_for(SHAPE, group, explicitly_destroy=True, enable_shrink=True)
    processes: list[Any] = [None] * SHAPE.num_ranks
    dist.all_gather_object(processes, os.getpid(), group=group)
    if rank == 0:
        stop = lambda number: os.kill(processes[MASKED], number)  # noqa: E731
        threading.Timer(after_s, stop, (signal.SIGSTOP,)).start()
        threading.Timer(after_s + 2.5 * timeout_s, stop, (signal.SIGCONT,)).start()
    end = time.monotonic() + 4 * timeout_s
    right = refused = 0
    while time.monotonic() < end:
        try:
            check_exchange(buffer, replace(SHAPE, seed=buffer.runtime.operation() % 50))
            right += 1
        except EPError:  # an operation of which the stopped rank is told that it is over
            refused += 1
    was = masks_of(buffer)
    dist.barrier(group)
    buffer.low_latency_clean_mask_buffer()
    for seed in range(6):
        check_exchange(buffer, replace(SHAPE, seed=seed))
    now = masks_of(buffer)
    buffer.destroy()
    return {"right": right, "refused": refused, "was": was, "now": now}


@pytest.mark.exhaustive
@processes_only
def test_a_rank_that_was_stopped_comes_back_and_no_result_is_wrong() -> None:
    timeout_s = short_s()
    seen = raise_failures(
        run_processes(
            exchange_while_one_is_stopped,
            SHAPE.num_ranks,
            0.17,
            timeout_s,
            env={"DEEP_EP_TIMEOUT_S": str(timeout_s), "PYTHONWARNINGS": "ignore"},
        )
    )
    for rank, one in enumerate(seen):
        assert one["now"] == []
        assert one["right"] > 0
        if rank != MASKED:
            assert MASKED in one["was"]


# ---- what programs do with masks


def test_a_server_that_recovers_asks_empties_and_cleans(hasty: Ranks) -> None:
    """After each step it asks for the masks. If there are any, all ranks, the repaired one too, empty their
    buffers and clean.
    """
    exchange(hasty, SHAPE, Mode(use_fp8=True))
    exchange(hasty, SHAPE, Mode(use_fp8=True), masked=[MASKED])

    def recover(rank: int, buffer: deep_ep.Buffer) -> bool:
        status = torch.zeros(buffer.group_size, dtype=torch.int32, device=DEVICE)
        buffer.low_latency_query_mask_buffer(status)
        is_degraded = bool(status.any())
        buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_query_mask_buffer(status)
        assert not status.any()
        return is_degraded

    assert hasty.run(recover) == [rank != MASKED for rank in ALL]
    for _ in range(3):
        exchange(hasty, SHAPE, Mode(use_fp8=True))


# ---- counters and diagnosis


def test_counters_of_a_masked_source_get_nothing(patient: Ranks) -> None:
    patient.run(lambda _, buffer: buffer.enable_counters(ring=16))
    exchange(patient, SHAPE, BF16)
    mask(patient, [MASKED])
    before = [buffer.dispatch_counters.snapshot() for buffer in patient.buffers]
    for _ in range(4):
        exchange(patient, SHAPE, BF16, masked=[MASKED])
    for rank in set(ALL) - {MASKED}:
        after = patient.buffers[rank].dispatch_counters.snapshot()
        grown = after.totals - before[rank].totals
        assert not grown[:, MASKED].any()
        ops = grown[after.fields.index("ops")]
        assert ops.tolist() == [0 if source == MASKED else 4 for source in ALL]


def test_ranks_that_are_not_masked_compare_their_counters_as_a_group(patient: Ranks) -> None:
    """The slow one of them is named, and nobody for the rank that does not come."""
    mask(patient, [MASKED])
    inputs = make_inputs(SHAPE)
    active = [rank for rank in ALL if rank != MASKED]
    groups = dict(zip(active, thread_groups(len(active))))

    def run(rank: int, buffer: deep_ep.Buffer) -> diagnose.Diagnosis | None:
        if rank == MASKED:
            return None
        buffer.enable_counters(ring=64)
        for _ in range(40):
            if rank == 1:
                keep_busy(buffer, 5_000_000)
            dispatch(buffer, inputs[rank], SHAPE, BF16)
        return diagnose.run(buffer, groups[rank])

    (found,) = [diagnosis for diagnosis in patient.run(run) if diagnosis is not None]
    assert {verdict.key for verdict in found.verdicts} == {(diagnose.COMP_SLOW, 1)}
