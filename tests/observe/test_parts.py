"""What a rank does around its operations: when it is a phase, and of which operation; ranges for Nsight, on a stand-in
for torch's NVTX.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import deep_ep
from deep_ep.group import thread_groups
from deep_ep.native import backend
from deep_ep.observe import parts
from support.exchange import Mode, Shape, exchange_and_check, ranks_for
from support.launch import DEVICE, before_next_operation, keep_busy
from support.phase_sums import assert_complete, nvtx_ranges, parts_of

SHAPE = Shape((12, 12, 12), 64, 256, 6, 2)
# So long that nothing else takes half of it; on the CPU nobody waits for it.
LONG_NS = 100_000_000
LEAST_NS = LONG_NS // 2


@contextlib.contextmanager
def lonely() -> Iterator[deep_ep.Buffer]:
    """The buffer of a rank that is alone."""
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(8, 256, 1, 4)
    buffer = deep_ep.Buffer(
        thread_groups(1)[0],
        *(0, num_bytes),
        low_latency_mode=True,
        num_qps_per_rank=4,
        explicitly_destroy=True,
    )
    try:
        yield buffer
    finally:
        buffer.destroy()


def dispatch(buffer: deep_ep.Buffer, hook: bool = False) -> Callable[[], None] | None:
    x = torch.zeros(8, 256, dtype=torch.bfloat16, device=DEVICE)
    topk_idx = torch.zeros(8, 1, dtype=torch.int64, device=DEVICE)
    return buffer.low_latency_dispatch(x, topk_idx, 8, 4, return_recv_hook=hook)[-1]


def layout(buffer: deep_ep.Buffer) -> None:
    buffer.get_dispatch_layout(torch.zeros(8, 1, dtype=torch.int64, device=DEVICE), 4)


def long_part(buffer: deep_ep.Buffer, name: str = "permute") -> None:
    with parts.measured(buffer.communicator, name):
        keep_busy(buffer, LONG_NS)


def part_that_raises(buffer: deep_ep.Buffer) -> None:
    with parts.measured(buffer.communicator, "permute"):
        keep_busy(buffer, LONG_NS)
        raise ZeroDivisionError


def newest(buffer: deep_ep.Buffer) -> dict[str, int]:
    assert_complete(buffer)
    return dict(buffer.phases().operations[-1].ns)


def test_others_wait_for_the_rank_whose_part_takes_long() -> None:
    def work(rank: int, buffer: deep_ep.Buffer) -> None:
        if rank == 1:
            before_next_operation(buffer, lambda: long_part(buffer))

    with ranks_for(SHAPE) as ranks:
        ranks.run(lambda _, buffer: buffer.enable_counters())
        exchange_and_check(ranks, SHAPE, Mode())
        ranks.run(work)
        exchange_and_check(ranks, SHAPE, Mode())
        ranks.run(lambda _, buffer: assert_complete(buffer))
        found = ranks.run(lambda _, buffer: buffer.phases())
    for rank in (0, 2):
        assert found[rank].total()["permute"] == 0
        assert found[rank].charged()[1] >= LEAST_NS
    dispatched = found[1].operations[2]
    assert dispatched.ns["permute"] >= LEAST_NS
    assert found[1].total()["permute"] == dispatched.ns["permute"]


def test_parts_are_of_the_buffer_that_they_are_done_for() -> None:
    with lonely() as one, lonely() as other:
        for buffer in (one, other):
            buffer.enable_counters()
            dispatch(buffer)
        long_part(one)
        layout(other)
        for buffer in (one, other):
            dispatch(buffer)
        assert newest(one)["permute"] >= LEAST_NS
        assert parts_of(one.phases().operations[-1]) == {"permute"}
        assert parts_of(other.phases().operations[-1]) == {"layout"}


def test_what_ran_before_counters_were_on_is_the_programs() -> None:
    with lonely() as buffer:
        dispatch(buffer)
        long_part(buffer)
        buffer.enable_counters()
        layout(buffer)
        dispatch(buffer)
        late = newest(buffer)
        assert late["between"] >= LEAST_NS
        assert parts_of(buffer.phases().operations[-1]) == {"layout"}
        long_part(buffer)
        dispatch(buffer)
        assert newest(buffer)["permute"] >= LEAST_NS


def test_a_part_while_rows_travel_is_hidden() -> None:
    with lonely() as buffer:
        buffer.enable_counters()
        dispatch(buffer)
        receive = dispatch(buffer, hook=True)
        assert receive is not None
        long_part(buffer)
        receive()
        assert newest(buffer)["hidden"] >= LEAST_NS
        dispatch(buffer)
        assert newest(buffer)["permute"] == 0
        assert buffer.phases().total()["permute"] == 0


def test_a_part_that_raises_is_none() -> None:
    with lonely() as buffer:
        buffer.enable_counters()
        for _ in range(2):
            dispatch(buffer)
            with pytest.raises(ZeroDivisionError):
                part_that_raises(buffer)
            stamped = buffer.communicator.parts
            assert stamped is not None
            assert stamped.finished() == []
            dispatch(buffer)
            found = newest(buffer)
            assert found["between"] >= LEAST_NS
            assert found["permute"] == 0
            # With one that has ended in its place.
            buffer.enable_counters(ring=1)
            long_part(buffer)


def test_a_part_beside_an_operation_of_another_thread_is_none() -> None:
    """That thread's operation sets the clock, and the part is not between two operations."""
    with lonely() as buffer:
        buffer.enable_counters()
        dispatch(buffer)
        with buffer.communicator.lock:
            thread = threading.Thread(target=long_part, args=(buffer,))
            thread.start()
            thread.join()
        dispatch(buffer)
        assert newest(buffer)["permute"] == 0


def test_as_many_parts_are_kept_as_operations() -> None:
    with lonely() as buffer:
        buffer.enable_counters(ring=4)
        stamped = buffer.communicator.parts
        assert stamped is not None
        for _ in range(9):
            layout(buffer)
            long_part(buffer)
            dispatch(buffer)
        assert buffer.communicator.parts is stamped
        backend.get().synchronize()
        assert len(stamped.finished()) == 2 * 4
        assert [parts_of(each) for each in buffer.phases().operations] == [
            {"layout", "permute"}
        ] * 4
        buffer.enable_counters(ring=4)
        assert buffer.communicator.parts is stamped


def test_nothing_is_stamped_while_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_part", None)
    monkeypatch.setattr(parts, "_range", None)
    with lonely() as buffer:
        layout(buffer)
        buffer.enable_counters()
        buffer.disable_counters()
        long_part(buffer)
        dispatch(buffer)


# ---- ranges for Nsight


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return nvtx_ranges(monkeypatch)


def test_calls_are_ranges_while_counters_are_on(ranges: list[str]) -> None:
    with lonely() as buffer:
        dispatch(buffer)
        assert ranges == []
        buffer.enable_counters()
        layout(buffer)
        dispatch(buffer)
        buffer.disable_counters()
        dispatch(buffer)
    assert ranges == ["deep_ep::layout", "deep_ep::low_latency_dispatch"]


def test_a_call_that_raises_ends_its_range(ranges: list[str]) -> None:
    with lonely() as buffer:
        buffer.enable_counters()
        with pytest.raises(ZeroDivisionError):
            part_that_raises(buffer)
        nothing = torch.zeros(8, 256)
        for call in (
            lambda: buffer.low_latency_dispatch(nothing, nothing, 8, 4),
            lambda: buffer.low_latency_combine(nothing, nothing, nothing, ()),
            lambda: buffer.dispatch(nothing, handle=()),
            lambda: buffer.combine(nothing, ()),
        ):
            with pytest.raises(deep_ep.EPError):
                call()
    assert ranges == [
        "deep_ep::permute",
        *("deep_ep::low_latency_dispatch", "deep_ep::low_latency_combine"),
        *("deep_ep::dispatch", "deep_ep::combine"),
    ]


def test_a_torch_without_nvtx_has_no_ranges(
    ranges: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(*name: str) -> None:
        raise RuntimeError("NVTX functions not installed.")

    nvtx = SimpleNamespace(range_push=raise_error, range_pop=raise_error)
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    with lonely() as buffer:
        buffer.enable_counters()
        layout(buffer)
        dispatch(buffer)
        assert len(buffer.phases().operations) == 1
    assert ranges == []
