"""Who watches buffers: they register here, and are started by every buffer that is to be watched.

So a buffer knows none of those who look at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Optional, Protocol

if TYPE_CHECKING:
    from deep_ep.base import env
    from deep_ep.base.group import Group


class Watcher(Protocol):
    """What watches one buffer, until its end."""

    def end(self) -> None:
        """The buffer is about to end. Must not wait."""

    def close(self) -> None:
        """The buffer has ended; returns when nothing of the watcher runs any more."""


# Called with a buffer, its group and when to compare ranks, on all ranks alike. Must not raise for a
# reason that is this rank's alone; `None` if there is nothing to end.
Start = Callable[[Any, "Group", "env.DiagnoseMode"], Optional[Watcher]]

starts: list[Start] = []


def register(start: Start) -> None:
    """Has `start` called for every buffer that is to be watched, from now on."""
    starts.append(start)


def start_all(buffer: Any, group: Group, when: env.DiagnoseMode) -> list[Watcher]:
    """Starts all that have registered. Collective."""
    started = (start(buffer, group, when) for start in starts)
    return [watcher for watcher in started if watcher is not None]
