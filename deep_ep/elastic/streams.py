"""The streams of one call of `ElasticBuffer`: it runs on the caller's, or as a whole on the comm stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deep_ep.types.event import EventHandle, EventOverlap

if TYPE_CHECKING:
    from deep_ep.checks.calls import ElasticCall
    from deep_ep.elastic.handle import EPHandle
    from deep_ep.ops.communicator import Communicator


class CallStreams:
    """Where the parts of a call run, and what waits for what.

    The normal operations within run on the comm stream anyway, and order themselves after the stream that is current.
    """

    def __init__(
        self,
        call: ElasticCall,
        communicator: Communicator,
        previous: EventHandle | None,
        before_epilogue: EventHandle | None,
    ) -> None:
        """Queues nothing yet.

        Args:
            call: checked.
            communicator: of the buffer.
            previous: what the call waits for instead of the current stream.
            before_epilogue: what its last, local part waits for as well.
        """
        self._back = communicator.backend
        self._comm = communicator.connected_runtime(call.name).get_comm_stream()
        self._current = self._back.current_stream()
        self._previous = previous
        self._before_epilogue = before_epilogue
        self._is_async = call.async_with_compute_stream
        self._is_apart = self._is_async or call.allocate_on_comm_stream

    @contextlib.contextmanager
    def running(
        self, inputs: Sequence[torch.Tensor | None], handle: EPHandle | None
    ) -> Iterator[None]:
        """Within it torch queues and allocates where the call runs, and records nothing for a backward.

        Args:
            inputs: what the call reads of the current stream.
            handle: what it reads besides, of whatever stream the dispatch ran on.
        """
        held = [] if handle is None else handle.tensors()
        where: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if not self._is_apart:
            self._record(self._current, held)
        else:
            if self._previous is not None:
                self._previous.stream_wait(self._comm)
            else:
                self._back.wait_stream(self._comm, self._current)
            self._record(self._comm, [*inputs, *held])
            where = self._back.use_stream(self._comm)
        with where, torch.no_grad():
            yield

    @property
    def handle(self) -> int:
        """Native handle of the stream that the local parts run on."""
        return self._back.stream_handle(self._comm if self._is_apart else self._current)

    def begin_epilogue(self) -> None:
        """Before the local part that follows the communication."""
        if self._before_epilogue is not None:
            self._before_epilogue.stream_wait(self._comm if self._is_apart else self._current)

    def finish(self, *outputs: torch.Tensor | None) -> EventOverlap:
        """The caller's part: its stream waits, or it gets an event to wait for.

        Args:
            outputs: what the caller will read.
        """
        if not self._is_apart:
            return EventOverlap()
        self._record(self._current, outputs)
        if self._is_async:
            return EventOverlap(EventHandle(self._comm, self._back))
        self._back.wait_stream(self._current, self._comm)
        return EventOverlap()

    def _record(self, stream: object, tensors: Sequence[torch.Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None:
                self._back.record_use(tensor, stream)
