"""What a normal call orders between its caller's stream and the comm stream, on streams that write down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deep_ep.checks.calls import StreamCall
from deep_ep.errors import EPArgumentError
from deep_ep.ops.stream_order import StreamOrder
from deep_ep.types.event import EventHandle, EventOverlap


class Streams:
    """A backend whose streams are names, and a list of what was done with them."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def current_stream(self) -> str:
        return "current"

    def stream_handle(self, stream: str) -> int:
        return {"current": 1, "comm": 2}[stream]

    def record_event(self, stream: str) -> str:
        return f"event on {stream}"

    def wait_event(self, stream: str, event: str) -> None:
        self.done.append(f"{stream} waits for {event}")

    def wait_stream(self, waiting: str, waited_for: str) -> None:
        self.done.append(f"{waiting} waits for {waited_for}")

    def record_use(self, tensor: torch.Tensor, stream: str) -> None:
        self.done.append(f"{int(tensor)} used on {stream}")

    @contextlib.contextmanager
    def use_stream(self, stream: str) -> Iterator[None]:
        self.done.append(f"allocates on {stream}")
        yield


def order(
    streams: Streams, *, previous: bool, is_async: bool, on_comm: bool = False
) -> StreamOrder:
    """Of a call; `previous`: with an event of the current stream."""
    selected: Any = streams
    event = EventOverlap(EventHandle("current", selected)) if previous else EventOverlap()
    call = StreamCall(
        {
            "previous_event": event,
            "async_finish": is_async,
            "allocate_on_comm_stream": on_comm,
        }
    )
    call.name = "call"  # type: ignore[misc]
    return StreamOrder(call, selected, "comm")


AFTER_ALL = "allocates on current, comm waits for current"
AFTER_EVENT = "allocates on comm, comm waits for event on current"


@pytest.mark.parametrize(
    ("previous", "is_async", "expected"),
    [
        (False, False, f"{AFTER_ALL}, current waits for comm"),
        (False, True, f"{AFTER_ALL}, 7 used on comm"),
        (True, False, f"{AFTER_EVENT}, 7 used on current, current waits for comm"),
        (True, True, f"{AFTER_EVENT}, 7 used on comm, 7 used on current"),
    ],
)
def test_a_call_orders_two_streams(previous: bool, is_async: bool, expected: str) -> None:
    streams = Streams()
    call = order(streams, previous=previous, is_async=is_async)
    with call.allocating():
        pass
    call.begin()
    event = call.finish(torch.tensor(7), None)
    assert ", ".join(streams.done) == expected
    assert call.handle == 2
    assert (event.event is not None) == is_async
    if event.event is not None:
        event.current_stream_wait()
        assert streams.done[-1] == "current waits for event on comm"


@pytest.mark.parametrize(("previous", "is_async"), [(False, True), (True, False), (False, False)])
def test_allocation_on_the_comm_stream_takes_an_event_before_and_one_after(
    previous: bool, is_async: bool
) -> None:
    with pytest.raises(EPArgumentError, match="call: allocate_on_comm_stream is True alone"):
        order(Streams(), previous=previous, is_async=is_async, on_comm=True)
    order(Streams(), previous=True, is_async=True, on_comm=True)
