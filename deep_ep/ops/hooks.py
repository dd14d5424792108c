"""The receive phase of a low-latency call that was made with `return_recv_hook=True`.

The communicator keeps what is pending; the program holds only the hook that runs it. So a program that
loses the hook, to an exception between sending and receiving, does not lose the buffer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable

from deep_ep.base.rules import fail
from deep_ep.errors import EPUsageError

if TYPE_CHECKING:
    import torch


# Two batches overlap: one may be sent while the other's hook has not been called.
MOST_OPEN_HOOKS = 2


class PendingReceive:
    """A receive phase whose hook has not been called.

    It runs when the hook is called, or ahead of the next operation of the buffer, whose rows would
    otherwise come where these are. Both are on the stream of the call.

    Attributes:
        name: of the call.
    """

    def __init__(
        self,
        name: str,
        receive: Callable[[], None],
        kept: object,
        handle: torch.Tensor | None = None,
    ) -> None:
        """Internal.

        Args:
            name: of the call.
            receive: enqueues the phase.
            kept: what must live until then.
            handle: of a dispatch, its `handle[0]`.
        """
        self.name = name
        self._receive: Callable[[], None] | None = receive
        self._kept = kept
        self._handle = handle
        self._is_finished = False
        self._failure: RuntimeError | None = None
        self._hook: weakref.ref[Callable[[], None]] | None = None

    def hook_of(self, buffer: Any) -> Callable[[], None]:
        """What the program calls. It keeps the buffer alive, and nothing here keeps it, so that its loss is noticed."""

        def hook() -> None:
            """Enqueues the receive phase on the stream that was current at the call; to be called once.

            A later operation of the buffer has done so already; then this raises what went wrong there.

            Raises:
                EPUsageError: called before, or after `Buffer.abandon_hook()` or `destroy()`.
                EPTimeoutError, EPArgumentError, EPTransportError: like the call itself.
            """
            buffer.communicator.receive(self)

        self._hook = weakref.ref(hook)
        return hook

    @property
    def is_lost(self) -> bool:
        """Whether nobody can call the hook any more."""
        return self._hook is None or self._hook() is None

    def fills(self, handle: torch.Tensor) -> bool:
        """Whether this is `handle[0]` of the dispatch that is to be received."""
        return self._handle is not None and self._handle.data_ptr() == handle.data_ptr()

    def run_ahead(self, raise_failure: Callable[[], None]) -> None:
        """Enqueues the phase before its hook does; what goes wrong the hook raises.

        Args:
            raise_failure: raises what the runtime recorded.
        """
        try:
            self._enqueue(raise_failure)
        except RuntimeError as error:
            self._failure = error

    def finish(self, raise_failure: Callable[[], None]) -> None:
        """Enqueues the phase if that has not been done, for its hook.

        Args:
            raise_failure: raises what the runtime recorded.

        Raises:
            EPUsageError: it has been called or abandoned before.
        """
        if self._is_finished:
            fail(self.name, "its hook was called or abandoned before", "hook_twice", EPUsageError)
        self._is_finished = True
        if self._failure is not None:
            raise self._failure
        self._enqueue(raise_failure)

    def _enqueue(self, raise_failure: Callable[[], None]) -> None:
        receive, self._receive = self._receive, None
        if receive is not None:
            receive()
            self._kept = None
            raise_failure()
