"""The streams of one normal call: what waits for what, where memory comes from, how long it is kept.

Work runs on the comm stream, whatever stream the caller is on. Layout, dispatch and combine share this.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from deep_ep.base.rules import fail
from deep_ep.checks import arguments as checks
from deep_ep.types.event import EventHandle, EventOverlap

if TYPE_CHECKING:
    from deep_ep.checks.calls import StreamCall
    from deep_ep.native.backend import Backend


class StreamOrder:
    """Orders one call between the stream of its caller and the comm stream.

    Attributes:
        handle: native handle of the comm stream.
    """

    def __init__(self, call: StreamCall, selected: Backend, comm: Any) -> None:
        """Queues nothing yet.

        Args:
            call: whose `previous_event` may hold none; `allocate_on_comm_stream` requires one, and `async_finish`.
            selected: the backend of the streams.
            comm: the comm stream.

        Raises:
            EPArgumentError: it is given without them.
        """
        previous_event = call.previous_event
        if previous_event is not None:
            fix = "Pass what Buffer.capture() or an earlier call returned"
            checks.instance(call.name, "previous_event", previous_event, EventOverlap, fix)
            if previous_event.event is not None:
                got = previous_event.event
                checks.instance(call.name, "previous_event.event", got, EventHandle, fix)
        checks.flags_of(call)
        self._back = selected
        self._comm = comm
        self._current = selected.current_stream()
        self._waits_for = previous_event.event if previous_event is not None else None
        self._runs_ahead = self._waits_for is not None
        self._async_finish = call.async_finish
        self._read_before: list[torch.Tensor | None] = []
        if call.allocate_on_comm_stream and not (self._runs_ahead and call.async_finish):
            fail(call.name, "allocate_on_comm_stream is True alone", "comm_stream_allocation")
        self.handle = selected.stream_handle(comm)

    def allocating(self) -> contextlib.AbstractContextManager[None]:
        """Within it torch allocates, and fills, what the call writes.

        Behind an event the comm stream may run ahead of the current one, so memory of the current
        stream's pool could still be in use by earlier work there.
        """
        return self._back.use_stream(self._comm if self._runs_ahead else self._current)

    def begin(self) -> None:
        """The comm stream waits; before each launch that reads what the current stream filled."""
        if self._waits_for is not None:
            self._waits_for.stream_wait(self._comm)
        else:
            self._back.wait_stream(self._comm, self._current)

    def contiguous(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The same, or copies that the comm stream makes: programs pass gradients as they come."""
        self.reads(*(t for t in tensors if t is not None and not t.is_contiguous()))
        with self._back.use_stream(self._comm):
            return tuple(tensor if tensor is None else tensor.contiguous() for tensor in tensors)

    def reads(self, *tensors: torch.Tensor | None) -> None:
        """Notes what the comm stream reads before the last launch; its memory is kept as well."""
        self._read_before += tensors

    def finish(self, *tensors: torch.Tensor | None) -> EventOverlap:
        """The caller's part: it waits, or gets an event to wait for.

        Args:
            tensors: what the last launch reads and writes; its memory is kept until then.
        """
        for tensor in (*tensors, *self._read_before):
            if tensor is None:
                continue
            if self._async_finish:
                self._back.record_use(tensor, self._comm)
            if self._runs_ahead:
                self._back.record_use(tensor, self._current)
        if self._async_finish:
            return EventOverlap(EventHandle(self._comm, self._back))
        self._back.wait_stream(self._current, self._comm)
        return EventOverlap()
