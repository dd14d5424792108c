"""What is observed of a buffer, so that nothing here knows how one comes to be, or what it calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from deep_ep.observe.counters import RecvCounters
    from deep_ep.observe.parts import ObservedCommunicator


class ObservedBuffer(Protocol):
    """`deep_ep.Buffer`, which says what its attributes are, as far as it is observed."""

    rank: int
    group_size: int

    @property
    def dispatch_counters(self) -> RecvCounters | None:
        """What `low_latency_dispatch` counts."""

    @property
    def combine_counters(self) -> RecvCounters | None:
        """What `low_latency_combine` counts."""

    @property
    def normal_dispatch_counters(self) -> RecvCounters | None:
        """What `dispatch` counts, by source of the rows."""

    @property
    def normal_combine_counters(self) -> RecvCounters | None:
        """What `combine` counts."""

    @property
    def normal_notify_counters(self) -> RecvCounters | None:
        """What `dispatch` counts before rows travel."""

    @property
    def communicator(self) -> ObservedCommunicator:
        """What operations run on."""
