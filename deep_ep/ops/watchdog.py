"""Says that an operation hangs where no deadline of ours holds.

Kernels put rows into NVSHMEM's queue pairs. Where such a queue stays full, because a NIC does not answer, the
kernel waits within NVSHMEM, which knows no timeout: the operation neither ends nor fails, and the program sees
only a stream that does not go on. A thread of the host sees it and says so.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deep_ep.ops.communicator import Communicator

_log = logging.getLogger("deep_ep")

# Longer than the timeout, so that whoever can raise has raised; and how often it looks meanwhile.
_PATIENCE = 1.5
_LOOKS = 10


class Watchdog:
    """Looks at one buffer's progress, until the buffer ends; a `Watcher`."""

    def __init__(self, communicator: Communicator, timeout_s: float) -> None:
        """Starts nothing yet.

        Args:
            communicator: of the buffer, which this does not keep alive.
            timeout_s: how long an operation may wait for a rank.
        """
        self._communicator = weakref.ref(communicator)
        self._timeout_s = timeout_s
        self._op = 0  # the operation that is open, since when
        self._since_s = 0.0
        self._has_told = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deep_ep watchdog", daemon=True)

    def start(self) -> Watchdog:
        """Starts the thread."""
        self._thread.start()
        return self

    def look(self, now_s: float) -> bool:
        """Logs an error, once for an operation, where it has been open for too long.

        Args:
            now_s: the time, seconds.

        Returns:
            Whether the buffer still exists.
        """
        communicator = self._communicator()
        runtime = communicator.runtime if communicator is not None else None
        if communicator is None or runtime is None:
            return False
        # An operation whose hook was not called is open, and no kernel runs.
        is_sent = bool(communicator.open_hooks)
        op = 0 if is_sent else int(runtime.native.progress()["open"])
        if op != self._op:
            self._op, self._since_s, self._has_told = op, now_s, False
        open_s = now_s - self._since_s
        if op and open_s > _PATIENCE * self._timeout_s and not self._has_told:
            self._has_told = True
            _log.error(
                "deep_ep on rank %d: operation %d has been running for more than %.0f s, although it "
                "waits for no rank longer than DEEP_EP_TIMEOUT_S=%g. It is most likely inside NVSHMEM, "
                "whose queues are full because a NIC or its link does not answer; that wait has no end. "
                "Check the NICs of this host (ibstat, dmesg) and end the job; NVSHMEM_DEBUG=INFO makes "
                "NVSHMEM say more at its start",
                communicator.rank,
                op,
                open_s,
                self._timeout_s,
            )
        return True

    def end(self) -> None:
        """The buffer is about to end."""
        self._ended.set()

    def close(self) -> None:
        """Returns when the thread has ended; one that is stuck in the driver is left behind."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._timeout_s / _LOOKS):
                if not self.look(time.monotonic()):
                    return
        except RuntimeError:  # the buffer was closed meanwhile, or its GPU has failed
            return
