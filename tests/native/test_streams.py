"""Ranks of one process on one GPU: each has a stream of its own, or is told to. The kernels are the host
target's; the streams are stand-ins.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import pytest

import deep_ep
from deep_ep.errors import EPError, EPUsageError
from deep_ep.native import backend
from deep_ep.native.backend import CpuBackend, CpuStream
from deep_ep.native.streams import StreamClaims
from support.exchange import Mode, Shape, dispatch, exchange_and_check, make_inputs, ranks_for
from support.launch import HANG_S

SHAPE = Shape((4, 3, 4), num_max_tokens=4, hidden=256, num_experts=6, num_topk=3)
SHARED, FIRST_POOLED = 0x70, 0x100

pytestmark = pytest.mark.skipif(backend.get().name != "cpu", reason="runs on the host target")


class Stream(CpuStream):
    """A stream with a native handle."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class StreamsBackend(CpuBackend):
    """The cpu backend with threads that have streams. Each is handed out twice, as torch's pool does."""

    runs_in_streams = True

    def __init__(self, current: int | None) -> None:
        """`current`: of all threads; `None`: each has its own."""
        super().__init__(backend.get().binding)
        self.shared = current
        self.num_created = 0
        self.thread = threading.local()

    def current_stream(self) -> CpuStream:
        if self.shared is not None:
            return Stream(self.shared)
        if not hasattr(self.thread, "stream"):
            self.thread.stream = Stream(threading.get_ident())
        return self.thread.stream

    def create_comm_stream(self, others: Collection[int] = ()) -> CpuStream:
        while True:
            self.num_created += 1
            stream = Stream(FIRST_POOLED + self.num_created // 2)
            if stream.cuda_stream not in others:
                return stream


def use(monkeypatch: pytest.MonkeyPatch, chosen: StreamsBackend) -> StreamsBackend:
    monkeypatch.setattr(backend, "_select", lambda wanted: chosen)
    return chosen


@pytest.mark.parametrize(("handle", "name"), [(0, "the default stream"), (SHARED, "stream 0x70")])
def test_ranks_that_share_a_stream_are_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, handle: int, name: str
) -> None:
    use(monkeypatch, StreamsBackend(current=handle))
    with pytest.raises(EPError, match=f"use {name} of GPU 0") as raised:
        ranks_for(SHAPE)
    assert "torch.cuda.set_stream(torch.cuda.Stream()) in each rank's thread" in str(raised.value)


def test_ranks_with_streams_of_their_own_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, StreamsBackend(current=None))
    with ranks_for(SHAPE) as ranks:
        exchange_and_check(ranks, SHAPE, Mode(hook=True))


def test_a_rank_that_goes_on_on_another_rank_s_stream_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = use(monkeypatch, StreamsBackend(current=None))
    inputs = make_inputs(SHAPE)

    def stream_of(rank: int, buffer: deep_ep.Buffer) -> CpuStream:
        return chosen.current_stream()

    with ranks_for(SHAPE) as ranks:
        streams = ranks.run(stream_of)

        def run(rank: int, buffer: deep_ep.Buffer) -> None:
            if rank == 1:
                mine, chosen.thread.stream = chosen.thread.stream, streams[0]
                with pytest.raises(EPUsageError, match="rank 1 and rank 0 use stream"):
                    dispatch(buffer, inputs[rank], SHAPE, Mode())
                chosen.thread.stream = mine
            dispatch(buffer, inputs[rank], SHAPE, Mode())

        ranks.run(run)


def test_ranks_do_not_get_one_stream_from_torch_s_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, StreamsBackend(current=None))

    def comm_stream(rank: int, buffer: deep_ep.Buffer) -> Any:
        return buffer.get_comm_stream().cuda_stream

    with ranks_for(SHAPE) as ranks:
        assert len(set(ranks.run(comm_stream))) == SHAPE.num_ranks


def test_a_stream_that_was_left_may_be_another_rank_s(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = use(monkeypatch, StreamsBackend(current=None))
    inputs = make_inputs(SHAPE)

    def on(rank: int, buffer: deep_ep.Buffer, first: int) -> None:
        chosen.thread.stream = Stream(first + rank)
        dispatch(buffer, inputs[rank], SHAPE, Mode())

    with ranks_for(SHAPE) as ranks:
        ranks.run(lambda rank, buffer: on(rank, buffer, 1000))
        ranks.run(lambda rank, buffer: on(rank, buffer, 2000))
        ranks.run(lambda rank, buffer: on(rank, buffer, 1001))


def test_a_buffer_may_be_collected_while_another_rank_takes_a_stream() -> None:
    """The garbage collector releases a rank's streams in any thread, wherever that is."""
    ended, ours = StreamClaims("one", 0, rank=0), StreamClaims("one", 0, rank=1)
    ended.take(lambda others: SHARED, int)

    def create(others: Collection[int]) -> int:
        ended.release()
        return FIRST_POOLED

    thread = threading.Thread(target=ours.take, args=(create, int), daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive()
    ours.use("dispatch", SHARED)
    ours.release()
