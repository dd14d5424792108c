"""Events of the public API: `EventHandle` is a point on a stream, `EventOverlap` what calls take and return."""

from __future__ import annotations

from typing import Any, Callable

import torch

from deep_ep.errors import EPUsageError
from deep_ep.native import backend


class EventHandle:
    """A point on a stream: everything queued there when it was made.

    On the cpu backend the point is always reached.
    """

    def __init__(self, stream: Any = None, selected: backend.Backend | None = None) -> None:
        """Records the point.

        Args:
            stream: the current one unless given.
            selected: the backend of the stream; the one in use unless given.
        """
        self._backend = selected or backend.get()
        if stream is None:
            stream = self._backend.current_stream()
        self._event = self._backend.record_event(stream)

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for this point. Does not block the host."""
        self.stream_wait(self._backend.current_stream())

    def stream_wait(self, stream: Any) -> None:
        """Makes `stream` wait for this point. Does not block the host."""
        self._backend.wait_event(stream, self._event)


class EventOverlap:
    """An event, or none, and the tensors that must live until it.

    Usable as a context manager that waits at its end: `with event:` and `with event():`.

    Attributes:
        event: the point to wait for; `None` if the operation has already been waited for.
        extra_tensors: kept only so that the tensors live as long as this object.

    Compatibility: same as DeepEP, of every revision.
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._after_wait: Callable[[], object] | None = None
        self._release_at_exit = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event, then runs the hook registered for it.

        Args:
            release_handle: drop `event` afterwards.

        Raises:
            EPUsageError: there is no event (also an `AssertionError`).
        """
        if self.event is None:
            raise EPUsageError(
                "EventOverlap.current_stream_wait: event is None; there must be an event to wait for. "
                "Only calls with async_finish=True return one; check `.event` first."
            )
        self.event.current_stream_wait()
        if release_handle:
            self.event = None
        hook, self._after_wait = self._after_wait, None
        if hook is not None:
            hook()

    def register_hook_after_wait(self, fn: Callable[[], object]) -> None:
        """Has `fn()` run once, after the next wait.

        Raises:
            EPUsageError: a hook is already registered (also an `AssertionError`).
        """
        if self._after_wait is not None:
            raise EPUsageError(
                "EventOverlap.register_hook_after_wait: a hook is already registered; one is allowed "
                "per wait. Wait first, or register one function that calls both."
            )
        self._after_wait = fn

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """This object, for `with event(release_handle=...):`."""
        self._release_at_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *exception: object) -> None:
        release_handle, self._release_at_exit = self._release_at_exit, False
        if self.event is not None:
            self.current_stream_wait(release_handle)
