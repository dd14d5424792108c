"""A process takes requests for dumps: the signal of hang/request.py, and what came with it.

faulthandler handles the signal, in C, so that nobody's thread is interrupted for long, and writes into a pipe.
That wakes the threads that speak for ranks (loop.py), of which the first one reads it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING

from deep_ep.base import env
from deep_ep.errors import EPUsageError
from deep_ep.hang import request, traces

if TYPE_CHECKING:
    from deep_ep.hang.hang_watch import HangWatch

_log = logging.getLogger("deep_ep")

# Of what the signal makes faulthandler write; a pipe holds no more.
_MOST_BYTES = 1 << 16
# Once for each signal. The rest of a stack follows in many pieces, of which each may wake a reader.
_HEADER = b"Stack (most recent call first):"

_reading_end = -1
_tail = b""  # of what was read: a header may come in two pieces
_reading = threading.Lock()
_watches: set[HangWatch] = set()


def attach(watch: HangWatch) -> int:
    """Takes requests for a rank from now on.

    Returns:
        What becomes readable with a request, for `take`; -1 if the program has the signal for itself, or wants none.
    """
    global _reading_end
    number = env.dump_signal()
    if _reading_end < 0 and number and signal.getsignal(number) is signal.SIG_DFL:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        faulthandler.register(number, file=writing, all_threads=False, chain=False)
        _reading_end = reading
    if _reading_end >= 0 and not _watches:
        try:
            request.announce(_own_folder(), number)
        except (OSError, EPUsageError) as error:
            _log.warning("deep_ep: nobody can ask this process for a dump: %s", error)
    _watches.add(watch)
    return _reading_end


def detach(watch: HangWatch) -> None:
    """Takes no more requests for a rank. May be repeated."""
    _watches.discard(watch)
    if not _watches and _reading_end >= 0:
        request.withdraw()


def take() -> None:
    """Passes a request on to all ranks of this process; the pipe has become readable."""
    if not _signalled():
        return
    asked = request.read_request()
    folder = asked.directory if asked is not None and asked.directory else _own_folder()
    for watch in list(_watches):
        # A buffer that is gone may have left a dump there, so each has a place of its own.
        watch.ask_for_dump(os.path.join(folder, watch.buffer), asked)


def _signalled() -> bool:
    global _tail
    with _reading:
        try:
            written = _tail + os.read(_reading_end, _MOST_BYTES)
        except BlockingIOError:  # another thread has read it
            return False
        _tail = written[written.rfind(_HEADER) + len(_HEADER) :] if _HEADER in written else written
        _tail = _tail[1 - len(_HEADER) :]
        return _HEADER in written


def forget() -> None:
    """In a forked child, which has the pipe of its parent."""
    global _reading_end, _reading
    _reading = threading.Lock()
    if _reading_end >= 0:
        with contextlib.suppress(ValueError):
            faulthandler.unregister(env.dump_signal())
        _reading_end = -1
    _watches.clear()


def _own_folder() -> str:
    return os.path.abspath(traces.default_folder() or "deep_ep_dump")


os.register_at_fork(after_in_child=forget)
