"""What a rank can say of itself: every call, with the stamps of its kernel, and for whom it waits meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_ep
from deep_ep.errors import EPArgumentError
from deep_ep.hang.states import RankState, Waits
from deep_ep.ops.normal import Normal
from support.exchange import Mode as LowLatencyMode
from support.exchange import Shape, begin_dispatch, dispatch, round_trip
from support.exchange import make_inputs as make_low_latency_inputs
from support.launch import DEVICE, Ranks
from support.normal_exchange import (
    SMALL,
    Mode,
    expect,
    make_inputs,
    normal_ranks,
    run_dispatch,
    run_exchange,
    shape_of,
)
from support.waiting import eventually

SHAPE = Shape((8, 5), 8, 256, 4, 2)
PLAIN = LowLatencyMode()


# Of three blocks and of five some leave a dispatch that the others wait in: there are two experts a rank.
@pytest.fixture(scope="module", params=["1x1", "3x2", "5x1"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_EP_LAUNCH_SHAPE", request.param)
        with Ranks(2, 8, 256, 4) as ranks:
            yield ranks


def state_of(buffer: deep_ep.Buffer, most: int = 64, with_threads: bool = False) -> RankState:
    assert buffer.communicator.recorder is not None
    return buffer.communicator.recorder.state(most, with_threads)


def waits_of(buffer: deep_ep.Buffer) -> Waits:
    """What it waits for, once that lasts long enough to be said."""
    assert eventually(lambda: state_of(buffer).waits is not None)
    waits = state_of(buffer).waits
    assert waits is not None
    return waits


def test_each_call_is_there_with_its_stamps_in_order(ranks: Ranks) -> None:
    inputs = make_low_latency_inputs(SHAPE)

    def run(rank: int, buffer: deep_ep.Buffer) -> list[Any]:
        before = len(state_of(buffer, 1000).calls)
        round_trip(buffer, inputs[rank], SHAPE, PLAIN)
        buffer.clean_low_latency_buffer(8, 256, 4)
        buffer.measure_clock_offsets()
        return list(state_of(buffer, 1000).calls[before:])

    for calls in ranks.run(run):
        assert [call.name for call in calls] == [
            *("low_latency_dispatch", "low_latency_combine", "barrier", "measure_clock_offsets")
        ]
        assert [call.series for call in calls] == [
            *("operation", "operation", "barrier", "measure_clock_offsets")
        ]
        assert calls[1].number == calls[0].number + 1
        assert [call.call for call in calls] == list(range(calls[0].call, calls[0].call + 4))
        for call in calls:
            assert 0 < call.entered_ns <= call.finished_ns
            assert not call.failed
            assert abs(call.called_ns - time.time_ns()) < 60e9
        for call in calls[:2]:
            assert call.entered_ns <= call.sent_ns <= call.finished_ns
            assert call.sizes["hidden"] == 256
            assert call.sizes["num_experts"] == 4
            assert set(call.agreed) == {
                *("num_max_dispatch_tokens_per_rank", "hidden", "num_experts")
            }
            assert call.frames[0].file.endswith("exchange.py")
        assert calls[0].dtype == "bf16"


def test_a_hook_is_known_before_and_after_it_is_called(ranks: Ranks) -> None:
    inputs = make_low_latency_inputs(SHAPE)

    def run(rank: int, buffer: deep_ep.Buffer) -> tuple[Any, Any]:
        mode = LowLatencyMode(hook=True)
        received, _, hook = begin_dispatch(buffer, inputs[rank], SHAPE, mode)
        sent = state_of(buffer).calls[-1]
        hook()
        return sent, state_of(buffer).calls[-1]

    for sent, received in ranks.run(run):
        assert sent.has_hook
        assert not sent.receive_called_ns
        assert sent.sent_ns > sent.entered_ns
        assert not sent.finished_ns
        assert sent.call == received.call
        assert sent.entered_ns == received.entered_ns
        assert received.sent_ns == sent.sent_ns
        assert received.receive_called_ns >= sent.called_ns
        assert received.finished_ns


def test_who_is_missing_is_known_while_the_kernel_waits(ranks: Ranks) -> None:
    inputs = make_low_latency_inputs(SHAPE)
    may_enter = threading.Event()

    def run(rank: int, buffer: deep_ep.Buffer) -> Waits | None:
        if rank == 1:
            assert may_enter.wait(30)
        round_trip(buffer, inputs[rank], SHAPE, PLAIN)
        return state_of(buffer).waits

    def look(buffer: deep_ep.Buffer) -> tuple[Waits, RankState]:
        try:
            return waits_of(buffer), state_of(buffer)
        finally:
            may_enter.set()

    with ThreadPoolExecutor(1) as other:
        looking = other.submit(look, ranks.buffers[0])
        assert ranks.run(run) == [None, None]
    waits, state = looking.result()
    assert waits.ranks() == (1,)
    assert set(waits.missing) == {"entry", "rows"}
    assert (waits.series, waits.number) == ("operation", state.opened)
    assert state.opened == state.closed + 1
    call = state.calls[-1]
    assert call.number == state.opened
    assert call.sent_ns
    assert not call.finished_ns


@pytest.mark.parametrize("worst", [False, True], ids=["counts", "worst"])
def test_who_came_late_to_a_dispatch_is_not_missing_in_its_second_half(
    worst: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first kernel waited for, and for how long, says nothing of the second one."""
    shape, mode = shape_of((12, 9), 64, 4, 2), Mode(spare_rows=3 if worst else None)
    inputs = make_inputs(shape, mode)
    launch = Normal._launch_dispatch
    has_waited, has_been_seen = threading.Event(), threading.Event()

    def late(self: Normal, *args: Any) -> None:
        if self._communicator.rank == 1:
            assert has_been_seen.wait(60)
        launch(self, *args)

    monkeypatch.setattr(Normal, "_launch_dispatch", late)

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 1:
            assert has_waited.wait(60)
        run_dispatch(buffer, inputs[rank], shape, mode, SMALL)

    def look(buffer: deep_ep.Buffer) -> Waits:
        try:
            # For longer than the second wait takes until it is seen: then its notes are not the newest ones.
            assert eventually(lambda: waits_of(buffer).waited_s > 1.0)
            has_waited.set()
            assert eventually(lambda: "rows" in waits_of(buffer).missing)
            return waits_of(buffer)
        finally:
            has_waited.set()
            has_been_seen.set()

    with normal_ranks(2, 2, [SMALL], 128) as ranks, ThreadPoolExecutor(1) as other:
        looking = other.submit(look, ranks.buffers[0])
        ranks.run(run)
    waits = looking.result()
    assert (set(waits.missing), waits.ranks()) == ({"rows"}, (1,))
    assert waits.waited_s < 1.0


def test_normal_operations_are_recorded_as_one_call_each() -> None:
    shape, mode = shape_of((12, 9), 64, 4, 2), Mode()
    expected = expect(make_inputs(shape, mode), shape, mode, 2)

    def run(rank: int, buffer: deep_ep.Buffer) -> list[Any]:
        before = len(state_of(buffer, 1000).calls)
        run_exchange(buffer, expected, SMALL)
        return list(state_of(buffer, 1000).calls[before:])

    with normal_ranks(2, 2, [SMALL], 128) as ranks:
        for calls in ranks.run(run):
            assert [call.name for call in calls] == ["dispatch", "dispatch", "combine"]
            first = calls[0].number
            assert [call.number for call in calls] == [first, first + 1, first + 2]
            assert all(call.entered_ns <= call.finished_ns for call in calls)
            assert calls[0].sizes["num_tokens"] in (12, 9)
            assert "num_tokens" not in calls[0].agreed


def test_the_ring_keeps_the_newest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_RECORDER", "3")
    inputs = make_low_latency_inputs(SHAPE)

    def run(rank: int, buffer: deep_ep.Buffer) -> Any:
        for _ in range(5):
            dispatch(buffer, inputs[rank], SHAPE, PLAIN)
        calls = state_of(buffer).calls
        return [call.number for call in calls if call.series == "operation"]

    with Ranks(2, 8, 256, 4) as ranks:
        assert ranks.run(run) == [[3, 4, 5]] * 2


def test_the_ring_begins_with_the_making_of_the_buffer_and_ends_with_its_end() -> None:
    with Ranks(2, 8, 256, 4) as ranks:
        for buffer in ranks.buffers:
            first, *others = state_of(buffer).calls
            assert (first.series, first.name, first.number) == ("construction", "Buffer", 1)
            assert first.called_ns < first.finished_ns
            assert first.frames[0].file.endswith("launch.py")
            assert all(first.called_ns < call.called_ns for call in others)
        told: list[RankState] = []

        def tell(buffer: deep_ep.Buffer) -> None:
            if eventually(lambda: state_of(buffer).waits is not None):
                told.append(state_of(buffer, with_threads=True))

        def destroy(rank: int, buffer: deep_ep.Buffer) -> None:
            if rank == 0:
                assert eventually(lambda: bool(told))
            else:
                threading.Thread(target=tell, args=(buffer,)).start()
            buffer.destroy()

        ranks.run(destroy)
    last = told[0].calls[-1]
    assert (last.series, last.name, last.finished_ns) == ("destruction", "destroy", 0)
    assert told[0].in_call == "destroy"
    assert told[0].waits is not None
    assert told[0].waits.ranks() == (0,)


def test_threads_may_have_one_name(ranks: Ranks) -> None:
    ends = threading.Event()

    def wait() -> None:
        ends.wait(30)

    def wait_elsewhere() -> None:
        ends.wait(30)

    twins = [threading.Thread(target=call, name="twin") for call in (wait, wait_elsewhere)]
    for twin in twins:
        twin.start()
    try:
        threads = state_of(ranks.buffers[0], with_threads=True).threads
    finally:
        ends.set()
    assert [thread.name for thread in threads].count("twin") == 2
    assert threads[0].name.startswith("rank0")


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "python3.9"])
def test_the_exception_that_a_rank_handles_is_told_where_python_says_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    if not is_known:
        monkeypatch.delattr(sys, "_current_exceptions", raising=False)
    elif not hasattr(sys, "_current_exceptions"):
        pytest.skip("this Python does not say it")

    def run(rank: int, buffer: deep_ep.Buffer) -> str:
        monkeypatch.setattr(buffer.communicator.recorder, "_thread", threading.get_ident())
        try:
            return str(int("no number"))
        except ValueError:
            return state_of(buffer).raised

    for raised in ranks.run(run):
        assert raised.startswith("ValueError: invalid literal for int() ") is is_known


def test_as_many_frames_as_asked_for_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_low_latency_inputs(SHAPE)

    def run(rank: int, buffer: deep_ep.Buffer) -> list[str]:
        dispatch(buffer, inputs[rank], SHAPE, PLAIN)
        return [frame.function for frame in state_of(buffer).calls[-1].frames]

    for asked, functions in (
        ("0", []),
        ("1", ["begin_dispatch"]),
        ("3", ["begin_dispatch", "dispatch", "run"]),
    ):
        monkeypatch.setenv("DEEP_EP_RECORDER_FRAMES", asked)
        with Ranks(2, 8, 256, 4) as ranks:
            assert ranks.run(run) == [functions] * 2


def test_a_program_whose_name_begins_as_torch_s_does_is_no_part_of_it() -> None:
    file = f"{Path(torch.__file__).parent}titan/train.py"
    program: dict[str, Any] = {}
    text = (
        "def step(buffer, x, idx):\n    buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)\n"
    )
    exec(compile(text, file, "exec"), program)  # noqa: S102 - a file of that name

    def run(rank: int, buffer: deep_ep.Buffer) -> None:
        x = torch.zeros(8, 256, dtype=torch.bfloat16, device=DEVICE)
        program["step"](buffer, x, torch.zeros(8, 1, dtype=torch.int64, device=DEVICE))
        (frame,) = state_of(buffer).calls[-1].frames
        assert (frame.function, frame.file, frame.line) == ("step", file, 2)

    with Ranks(1, 8, 256, 4) as ranks:
        ranks.run(run)


def test_nothing_is_recorded_where_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_RECORDER", "0")
    inputs = make_low_latency_inputs(SHAPE)

    def run(rank: int, buffer: deep_ep.Buffer) -> Any:
        dispatch(buffer, inputs[rank], SHAPE, PLAIN)
        return buffer.communicator.recorder, buffer.runtime.native.recorded_calls(most=9)

    with Ranks(2, 8, 256, 4) as ranks:
        assert ranks.run(run) == [(None, [])] * 2


def test_a_failed_operation_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_S", "2")
    inputs = make_low_latency_inputs(SHAPE)

    def run(rank: int, buffer: deep_ep.Buffer) -> Any:
        if rank == 0:
            with pytest.raises(deep_ep.errors.EPTimeoutError):
                dispatch(buffer, inputs[rank], SHAPE, PLAIN)
        return state_of(buffer).calls[-1]

    with Ranks(2, 8, 256, 4) as ranks:
        failed, other = ranks.run(run)
    assert failed.failed == "timeout"
    assert failed.finished_ns
    assert other.name == "measure_clock_offsets"


@pytest.mark.parametrize("value", [-1, float("nan"), "10", True])
def test_a_time_that_is_none_is_refused(ranks: Ranks, value: Any) -> None:
    with pytest.raises(EPArgumentError, match="set_hang_warning: seconds is"):
        ranks.buffers[0].set_hang_warning(value)
