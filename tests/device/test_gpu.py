"""What a GPU adds to the kernels: time that passes by itself, streams, graphs, failures that are known later.

What the cpu backend can run of it runs there too, in wall time. `make gpu` runs it on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import deep_ep
from deep_ep import diagnose
from deep_ep.diagnose.storage import diagnosis_log
from deep_ep.errors import EPArgumentError, EPTimeoutError, EPTransportError
from deep_ep.native import backend
from deep_ep.observe.counter_snapshot import CounterSnapshot
from deep_ep.observe.counters import RecvCounters
from observe.test_wall_time import LIGHT, assert_dark
from support.exchange import (
    Inputs,
    Mode,
    Received,
    Shape,
    assert_combined,
    assert_received,
    begin_dispatch,
    combine,
    dispatch,
    exchange_and_check,
    expected_combine,
    expected_dispatch,
    expected_experts,
    experts,
    make_inputs,
    ranks_for,
    round_trip,
    send_back,
)
from support.launch import DEVICE, Ranks, keep_busy, measured_again, on_threads

MS = 1_000_000
PLAIN, FP8, HOOK = Mode(), Mode(use_fp8=True), Mode(hook=True)
SHAPE = Shape((4, 3, 4, 2), num_max_tokens=4, hidden=512, num_experts=8, num_topk=3)
NUM_ROUNDS = 12
# Of a rank that is late; large against what the scheduler of a small machine adds.
DELAY_NS = 40 * MS
BOTH_MODES = pytest.mark.parametrize("mode", [PLAIN, HOOK], ids=["fused", "hooks"])

needs_a_gpu = pytest.mark.skipif(
    DEVICE != "cuda", reason="CUDA graphs; `make gpu` runs this on a machine with a GPU"
)


@pytest.fixture(autouse=True)
def wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_CPU_CLOCK", "wall")


def finish(buffer: deep_ep.Buffer) -> None:
    """Waits for what this rank has called; raises what went wrong in it."""
    backend.get().current_stream().synchronize()
    buffer.communicator.raise_failure()


def dispatch_and_finish(
    rank: int, buffer: deep_ep.Buffer, inputs: list[Inputs], shape: Shape
) -> None:
    """One rank's dispatch, with what goes wrong in it."""
    dispatch(buffer, inputs[rank], shape, PLAIN)
    finish(buffer)


# --- time -----------------------------------------------------------------------------------------


def assert_nobody_waited(snapshot: CounterSnapshot) -> None:
    """One operation whose words were all there at the first look."""
    assert snapshot.ops == 1
    for field in ("wait_ns", "late_ns", "issue_ns", "path_ns", "critical_ops"):
        assert not snapshot[field].any(), field
    (slot,) = snapshot.operations()
    stamps = dict(zip(snapshot.ring_source_fields, slot[:-1].T))
    own = dict(zip(snapshot.ring_own_fields, slot[-1]))
    assert (stamps["arrival"] <= own["wait_begin"]).all()
    assert not stamps["seen"].any(), "nobody was there to see them arrive"


@pytest.mark.parametrize("counts", [False, True], ids=["off", "on"])
def test_a_receive_launched_long_after_arrival_shows_no_waiting(counts: bool) -> None:
    """Also without counters: those who only pass the original's tensors read the same."""
    inputs = make_inputs(SHAPE)
    num_ranks = SHAPE.num_ranks
    waits = torch.zeros(num_ranks, 2, num_ranks, dtype=torch.int64, device=DEVICE)

    def send_tokens(rank: int, buffer: deep_ep.Buffer) -> Any:
        if counts:
            buffer.enable_counters()
        return begin_dispatch(
            buffer, inputs[rank], SHAPE, HOOK, dispatch_wait_recv_cost_stats=waits[rank, 0]
        )

    with ranks_for(SHAPE) as ranks:
        # `run` returns once all ranks have sent and the device is idle.
        begun = ranks.run(send_tokens)
        ranks.run(lambda rank, _: begun[rank][2]())

        def send_results(rank: int, buffer: deep_ep.Buffer) -> Any:
            arguments = {"return_recv_hook": True, "combine_wait_recv_cost_stats": waits[rank, 1]}
            return send_back(buffer, inputs[rank], begun[rank][0], **arguments)[2]

        hooks = ranks.run(send_results)
        ranks.run(lambda rank, _: hooks[rank]())
        if counts:
            for buffer in ranks.buffers:
                for counters in (buffer.dispatch_counters, buffer.combine_counters):
                    assert_nobody_waited(counters.snapshot())
    assert not waits.any()


def named_and_waits(mode: Mode, late: int | None) -> tuple[set[Any], list[np.ndarray]]:
    """Rounds in which one rank, or none, is busy before each of its operations.

    Returns:
        What the verdicts name, and per kind of operation the waits `[receiver, source]` in us per operation.
        Small effects are left out: threads do wait for each other's Python, and a GPU's timer shows it.
    """
    inputs = make_inputs(SHAPE)

    def round_of(rank: int, buffer: deep_ep.Buffer) -> None:
        round_trip(buffer, inputs[rank], SHAPE, mode)

    def program(rank: int, buffer: deep_ep.Buffer) -> Any:
        keep_busy(buffer, 1)
        round_of(rank, buffer)
        buffer.enable_counters()
        if rank == late:
            before_operation = buffer.communicator.before_operation
            before_operation.append(lambda _: keep_busy(buffer, DELAY_NS))
        for _ in range(NUM_ROUNDS):
            round_of(rank, buffer)
        finish(buffer)
        kinds = (buffer.dispatch_counters, buffer.combine_counters)
        waits = [counters.snapshot()["wait_ns"] / NUM_ROUNDS / 1e3 for counters in kinds]
        return diagnose.run(buffer), waits

    with ranks_for(SHAPE) as ranks:
        results = ranks.run(program)
    verdicts = results[0][0].verdicts
    named = {one.key for one in verdicts if one.effect_us > LIGHT * DELAY_NS / 1e3}
    return named, [np.stack(kind) for kind in zip(*(waits for _, waits in results))]


@BOTH_MODES
@measured_again
def test_a_delayed_rank_darkens_its_own_column_only(mode: Mode) -> None:
    late = 2
    named, kinds = named_and_waits(mode, late)
    for waits in kinds:
        assert_dark(waits, DELAY_NS / 1e3, lambda _, source: source == late, "wait_us")
    assert named == {("comp-slow", late)}


@BOTH_MODES
@measured_again
def test_nothing_is_said_of_ranks_that_are_not_delayed(mode: Mode) -> None:
    named, _ = named_and_waits(mode, None)
    assert not named


@measured_again
def test_a_program_that_watches_itself_names_the_delayed_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`DEEP_EP_DIAGNOSE`, end to end: rank 0 writes a record per window."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    monkeypatch.setenv("DEEP_EP_DIAGNOSE", f"sync:{2 * NUM_ROUNDS}")
    monkeypatch.setenv("DEEP_EP_DIAGNOSE_DIR", str(folder))
    inputs = make_inputs(SHAPE)
    late = 2

    def program(rank: int, buffer: deep_ep.Buffer) -> None:
        keep_busy(buffer, 1)
        if rank == late:
            buffer.communicator.before_operation.append(lambda _: keep_busy(buffer, DELAY_NS))
        for _ in range(2 * NUM_ROUNDS):
            round_trip(buffer, inputs[rank], SHAPE, PLAIN)
        finish(buffer)

    with ranks_for(SHAPE) as ranks:
        ranks.run(program)
    named = [
        {one.key for one in record.diagnosis.verdicts if one.effect_us > LIGHT * DELAY_NS / 1e3}
        for record in diagnosis_log.read(folder)
    ]
    assert len(named) >= 2
    assert all(one == {("comp-slow", late)} for one in named[:2]), named


def test_ranks_of_one_device_read_one_clock() -> None:
    with ranks_for(SHAPE) as ranks:
        for offset_ns, round_trip_ns in ranks.run(lambda _, buffer: buffer.measure_clock_offsets()):
            assert (offset_ns.abs() <= round_trip_ns).all(), (offset_ns, round_trip_ns)


def test_counters_take_their_waits_from_the_stamps_that_are_there_without_them() -> None:
    """The original's tensors are filled with counters off as well; with both, they agree to the nanosecond."""
    inputs = make_inputs(SHAPE)
    num_ranks = SHAPE.num_ranks
    waits = torch.zeros(num_ranks, num_ranks, dtype=torch.int64, device=DEVICE)

    def run(rank: int, buffer: deep_ep.Buffer) -> CounterSnapshot:
        counters = RecvCounters(num_ranks)
        for _ in range(NUM_ROUNDS):
            dispatch(
                buffer, inputs[rank], SHAPE, FP8,
                dispatch_wait_recv_cost_stats=waits[rank], recv_counters=counters,
            )  # fmt: skip
        return counters.snapshot()

    with ranks_for(SHAPE) as ranks:
        for rank, snapshot in enumerate(ranks.run(run)):
            assert snapshot.ops == NUM_ROUNDS
            assert snapshot["wait_ns"].tolist() == waits[rank].tolist()
            steps = snapshot.operations()[:, -1, snapshot.ring_own_fields.index("timer_step")]
            assert (steps > 0).all()
            assert (steps < 10_000).all(), "stamps of such a timer tell nothing"


# --- streams and graphs ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [PLAIN, FP8], ids=["bf16", "fp8"])
def test_another_stream_may_take_the_results_once_it_has_waited_for_the_event(mode: Mode) -> None:
    inputs = make_inputs(SHAPE)
    back = backend.get()

    def run(rank: int, buffer: deep_ep.Buffer) -> Received:
        other = back.create_comm_stream()
        held = Inputs(*(tensor.to(DEVICE) for tensor in inputs[rank]))
        keep_busy(buffer, 20 * MS)  # so that the rows are not there yet
        received, event, _ = begin_dispatch(buffer, held, SHAPE, replace(mode, async_finish=True))
        with back.use_stream(other):
            event.current_stream_wait()
            recv_x = received.recv_x
            data = recv_x[0].clone() if mode.use_fp8 else recv_x.clone()
            recv_count = received.recv_count.clone()
        other.synchronize()
        return received._replace(
            recv_x=(data, recv_x[1]) if mode.use_fp8 else data, recv_count=recv_count
        )

    with ranks_for(SHAPE) as ranks:
        received = ranks.run(run)
    assert_received(received, expected_dispatch(inputs, SHAPE, mode), SHAPE, mode)


def test_a_rank_may_change_its_stream_between_operations() -> None:
    inputs = make_inputs(SHAPE)
    dispatched = expected_dispatch(inputs, SHAPE, PLAIN)
    expected = expected_combine(inputs, expected_experts(dispatched), dispatched)
    back = backend.get()

    def run(rank: int, buffer: deep_ep.Buffer) -> list[torch.Tensor]:
        combined = []
        before, after = back.current_stream(), back.create_comm_stream()
        for _ in range(4):
            received = dispatch(buffer, inputs[rank], SHAPE, PLAIN)
            back.wait_stream(after, before)
            ys = experts(received, rank)
            with back.use_stream(after):
                combined.append(combine(buffer, inputs[rank], received.handle, ys, PLAIN))
            back.wait_stream(before, after)
        finish(buffer)
        return combined

    with ranks_for(SHAPE) as ranks:
        for combined in zip(*ranks.run(run)):
            assert_combined(list(combined), expected)


class Captured(NamedTuple):
    """One rank's dispatch and combine as a graph, which reads `inputs` and writes the rest."""

    graph: Any
    inputs: Inputs
    received: Received
    combined: torch.Tensor


def capture(buffer: deep_ep.Buffer, inputs: Inputs, hook: bool, error_mode: str) -> Captured:
    """Captures an exchange whose experts return the rows as they came. Launches nothing.

    With `error_mode` "global", torch's default, nobody in the process may do what a capture forbids.
    """
    held = Inputs(*(tensor.to(DEVICE) for tensor in inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode=error_mode):
        *received, _, receive = buffer.low_latency_dispatch(
            held.x, held.topk_idx, SHAPE.num_max_tokens, SHAPE.num_experts,
            use_fp8=False, return_recv_hook=hook,
        )  # fmt: skip
        if hook:
            receive()
        combined, _, receive = buffer.low_latency_combine(
            received[0], held.topk_idx, held.topk_weights, received[2], return_recv_hook=hook
        )
        if hook:
            receive()
    return Captured(graph, held, Received(*received), combined)


@pytest.mark.gpu
@needs_a_gpu
@BOTH_MODES
@pytest.mark.parametrize("error_mode", ["thread_local", "global"])
def test_a_captured_exchange_gives_the_reference_at_each_replay_and_is_counted(
    mode: Mode, error_mode: str
) -> None:
    """Also between eager exchanges on the same buffer."""
    one_at_a_time = threading.Lock()
    num_replays = 5

    def begin(rank: int, buffer: deep_ep.Buffer) -> Captured:
        with one_at_a_time:
            buffer.enable_counters()
            return capture(buffer, make_inputs(SHAPE)[rank], mode.hook, error_mode)

    with ranks_for(SHAPE) as ranks:
        exchange_and_check(ranks, SHAPE, mode)
        captured = ranks.run(begin)
        for seed in range(num_replays):
            inputs = make_inputs(replace(SHAPE, seed=seed))

            def replay(rank: int, buffer: deep_ep.Buffer, inputs: list[Inputs] = inputs) -> None:
                for held, new in zip(captured[rank].inputs, inputs[rank]):
                    held.copy_(new)
                captured[rank].graph.replay()
                finish(buffer)

            ranks.run(replay)
            dispatched = expected_dispatch(inputs, SHAPE, PLAIN)
            assert_received([one.received for one in captured], dispatched, SHAPE, PLAIN)
            unchanged = [one.data for one in dispatched]
            expected = expected_combine(inputs, unchanged, dispatched)
            assert_combined([one.combined for one in captured], expected)
            exchange_and_check(ranks, SHAPE, mode)  # goes on where the replay ended
        for buffer in ranks.buffers:
            for counters in (buffer.dispatch_counters, buffer.combine_counters):
                assert counters.snapshot().ops == 2 * num_replays


# --- failures -------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_named_and_all_meet_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "1")
    inputs = make_inputs(SHAPE)
    absent = 1

    def call(rank: int, buffer: deep_ep.Buffer) -> None:
        dispatch_and_finish(rank, buffer, inputs, SHAPE)

    with ranks_for(SHAPE) as ranks:
        early = ranks.outcomes(lambda rank, buffer: None if rank == absent else call(rank, buffer))
        for rank, error in enumerate(early):
            if rank != absent:
                assert type(error) is EPTimeoutError, error
                assert error.missing_ranks == (absent,)
        late = ranks.outcomes(lambda rank, buffer: call(rank, buffer) if rank == absent else None)
        assert type(late[absent]) is EPTransportError, late[absent]
        exchange_and_check(ranks, SHAPE, PLAIN)


def test_a_rank_with_other_sizes_is_named_and_harms_nobody() -> None:
    odd = 3
    # On a GPU the first of them is enough to end the operation.
    others = "ranks 0-2" if DEVICE == "cpu" else "ranks? [0-2]"
    shapes = [replace(SHAPE, hidden=256) if rank == odd else SHAPE for rank in range(4)]

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        who = others if rank == odd else f"rank {odd}"
        with pytest.raises(EPArgumentError, match=f"{who}.*hidden"):
            dispatch_and_finish(rank, buffer, make_inputs(shapes[rank]), shapes[rank])

    with ranks_for(SHAPE) as ranks:
        ranks.run(run)
        exchange_and_check(ranks, SHAPE, FP8)


def test_destroy_waits_for_no_work_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of other ranks of the device may wait for this one in their `destroy`."""

    def refuse(self: Any) -> None:
        raise RuntimeError("waits for the whole device")

    with warnings.catch_warnings(), ranks_for(SHAPE) as ranks:
        warnings.simplefilter("error")
        exchange_and_check(ranks, SHAPE, PLAIN)
        with monkeypatch.context() as patch:
            patch.setattr(type(backend.get()), "synchronize", refuse)
            on_threads(lambda buffer: buffer.destroy(), ranks.buffers)
        assert all(buffer.communicator.runtime is None for buffer in ranks.buffers)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_with_automatic_launches_share_the_device(num_ranks: int) -> None:
    """Blocks of all ranks are resident at once, at a size for which each would take all of the device."""
    tokens = (16,) * num_ranks
    shape = Shape(tokens, num_max_tokens=16, hidden=1024, num_experts=64, num_topk=8, dropped=0)
    with Ranks(num_ranks, 16, 1024, 64) as ranks:
        for mode in (FP8, PLAIN, Mode(hook=True, zero_copy=True)):
            exchange_and_check(ranks, shape, mode)


def test_two_buffers_of_the_same_ranks_do_not_disturb_each_other() -> None:
    other = replace(SHAPE, hidden=256, seed=1)
    with ranks_for(SHAPE) as ranks, ranks_for(other) as others:
        for mode in (PLAIN, HOOK, FP8):
            exchange_and_check(ranks, SHAPE, mode)
            exchange_and_check(others, other, mode)


@pytest.mark.exhaustive
def test_cuda_is_told_what_ranks_that_share_a_gpu_need_before_it_starts() -> None:
    """Whatever is imported first: modules of tests start CUDA when they ask for the backend."""
    code = (
        "import os, sys; from deep_ep.native import backend\n"
        "for name in ('CUDA_DEVICE_MAX_CONNECTIONS', 'CUDA_MODULE_LOADING'): os.environ.pop(name, None)\n"
        "told, get = [], backend.get\n"
        "backend.get = lambda: told.append(os.environ.get('CUDA_MODULE_LOADING')) or get()\n"
        "__import__(sys.argv[1])\n"
        "assert told and set(told) == {'EAGER'}, told\n"
    )
    for module in ("support.launch", "support.reference"):
        path = os.pathsep.join([str(Path(deep_ep.__file__).parent.parent), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", code, module], env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{module}: {done.stderr}"
