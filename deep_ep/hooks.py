"""The receive phase of a low-latency call that was made with `return_recv_hook=True`.

The communicator keeps what is pending; the program holds only the hook that runs it. So a program that
loses the hook, to an exception between sending and receiving, does not lose the buffer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Callable

from deep_ep.errors import EPUsageError
from deep_ep.rules import fail

if TYPE_CHECKING:
    from deep_ep.communicator import Communicator


class PendingReceive:
    """A receive phase that has not run.

    Attributes:
        name: of the call.
    """

    def __init__(self, name: str, receive: Callable[[], None], kept: object) -> None:
        """Internal.

        Args:
            name: of the call.
            receive: enqueues the phase.
            kept: what must live until then.
        """
        self.name = name
        self._receive: Callable[[], None] | None = receive
        self._kept = kept
        self._hook: weakref.ref[ReceiveHook] | None = None

    def hook_for(self, communicator: Communicator, owner: object) -> ReceiveHook:
        """The hook that the program gets; it keeps `owner`, the buffer, alive."""
        hook = ReceiveHook(communicator, self, owner)
        self._hook = weakref.ref(hook)
        return hook

    @property
    def is_lost(self) -> bool:
        """Whether nobody can call the hook any more."""
        return self._hook is None or self._hook() is None

    def run(self) -> None:
        """Enqueues the phase.

        Raises:
            EPUsageError: it has been before.
        """
        receive, self._receive = self._receive, None
        if receive is None:
            fail(self.name, "its hook was called or abandoned before", "hook_twice", EPUsageError)
        receive()
        self._kept = None


class ReceiveHook:
    """Receives what a low-latency call with `return_recv_hook=True` waits for; call it once."""

    def __init__(self, communicator: Communicator, pending: PendingReceive, owner: object) -> None:
        self.name = pending.name
        self._communicator = communicator
        self._pending = pending
        self._owner = owner

    def __call__(self) -> None:
        """Enqueues the receive phase on the stream that was current at the call.

        Raises:
            EPUsageError: called before, or after `Buffer.abandon_hook()` or `destroy()`.
            EPTimeoutError, EPArgumentError, EPTransportError: like the call itself.
        """
        self._communicator.receive(self._pending)
