"""In how many turns rows go through the queues of normal operations, and a remark where that takes long.

A queue holds as many rows as it has slots, and its sender waits until some are given back. Turns cost next to nothing
while there are slots enough for rows to move many at a time; with few slots every step moves few rows, and each of them
has words of its own to wait for. A buffer never shortens queues: their slots are those of the `Config`, and one that does
not fit is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from deep_ep.base.rules import NORMAL_DISPATCH
from deep_ep.checks import normal as normal_checks
from deep_ep.types import config

if TYPE_CHECKING:
    from deep_ep.base.topology import Topology
    from deep_ep.checks.arguments import Limits
    from deep_ep.checks.normal import NormalShape
    from deep_ep.types.config import Config

_log = logging.getLogger("deep_ep")

# Measured (docs/training.md): from 32 slots on, turns cost nothing that could be told from noise.
_FEW_SLOTS = 16
# Chosen: fewer turns end about when they would have ended anyway.
_MANY_TURNS = 4


@dataclass(frozen=True)
class _Queue:
    """The queues of one hop, in one operation.

    Attributes:
        hop: its name.
        field: of `Config`; what sets their slots.
        slots: of each.
        rows: that go through one, on average.
        sharing: among how many queues the value of the field is divided.
    """

    hop: str
    field: str
    slots: int
    rows: int
    sharing: int

    @property
    def turns(self) -> int:
        """How often the queue is filled."""
        return -(-self.rows // self.slots)

    @property
    def is_slow(self) -> bool:
        """Whether few slots are filled often."""
        return self.slots <= _FEW_SLOTS and self.turns >= _MANY_TURNS


class QueueTurns:
    """Of one buffer: what was said of its queues, each once for dispatch and once for combine, and by rank 0 alone.

    Only what the host knows counts. Which rank sends how much to whom it does not know, so it is averages that are judged.
    """

    def __init__(self, limits: Limits, place: Topology) -> None:
        """Says nothing yet.

        Args:
            limits: of the buffer.
            place: of this rank.
        """
        self._limits = limits
        self._place = place
        self._said = set[str]()
        self._knows_rows = True

    def forget_rows(self) -> None:
        """A dispatch has allocated for the worst case. Its handle does not say how many rows there are, so nothing is
        said any more."""
        self._knows_rows = False

    def look(self, call: str, shape: NormalShape, num_rows: int, num_relay_rows: int) -> None:
        """Says so if the rows of an operation take many turns.

        Args:
            call: which operation.
            shape: its sizes.
            num_rows: rows that this rank receives in dispatch, and returns in combine.
            num_relay_rows: of them those that it relays to or from other nodes.
        """
        if self._place.rank or not self._knows_rows or call in self._said:
            return
        # Asked in every operation, and nearly always the end of it.
        if min(self._slots(shape.config)) > _FEW_SLOTS:
            return
        slow = [queue for queue in self._queues(shape, num_rows, num_relay_rows) if queue.is_slow]
        if slow:
            self._said.add(call)
            _log.warning("deep_ep: %s: %s", call, self._remark(call, shape, slow))

    def _slots(self, settings: Config) -> list[int]:
        """Of a queue of NVLink, and of RDMA where there are several nodes."""
        nodes = self._place.num_nodes
        nvl = settings.num_max_nvl_chunked_recv_tokens // nodes
        return [nvl] if nodes == 1 else [nvl, settings.num_max_rdma_chunked_recv_tokens]

    def _queues(self, shape: NormalShape, num_rows: int, num_relay_rows: int) -> Iterator[_Queue]:
        place = self._place
        nodes = place.num_nodes
        slots = self._slots(shape.config)
        nvl_field = "num_max_nvl_chunked_recv_tokens"
        rows = num_rows // (place.num_ranks * shape.num_channels)
        yield _Queue("NVLink", nvl_field, slots[0], rows, nodes)
        if nodes > 1:
            rdma_field = "num_max_rdma_chunked_recv_tokens"
            relayed = num_relay_rows // ((nodes - 1) * shape.num_channels)
            yield _Queue("RDMA", rdma_field, slots[1], relayed, 1)

    def _remark(self, call: str, shape: NormalShape, slow: list[_Queue]) -> str:
        """What is slow, and what to set instead."""
        found = " and ".join(
            f"{queue.rows} rows for each {queue.hop} queue of {queue.slots} slots, in {queue.turns} turns"
            for queue in slow
        )
        given = _settings(shape.config, slow)
        return (
            f"{found}. So few slots make it slow. The Config that it was given has {given}; "
            f"{self._advice(call, shape, slow)}"
        )

    def _advice(self, call: str, shape: NormalShape, slow: list[_Queue]) -> str:
        """Slots as recommended; fewer if the buffer has no room for them; or else a larger buffer."""
        recommend = (
            config.recommended_dispatch if call == NORMAL_DISPATCH else config.recommended_combine
        )
        recommended = recommend(self._place.num_ranks, shape.config.num_sms)
        values = {
            queue.field: max(getattr(recommended, queue.field), 2 * _FEW_SLOTS * queue.sharing)
            for queue in slow
        }
        wanted = replace(shape.config, **values)
        while all(values[queue.field] // queue.sharing > _FEW_SLOTS for queue in slow):
            fitting = replace(shape.config, **values)
            if self._fits(shape, fitting):
                return f"the buffer has room for {_settings(fitting, slow)}."
            values = {field: value // 2 for field, value in values.items()}
        nvl_bytes, rdma_bytes = self._needed(shape, wanted)
        return (
            f"set {_settings(wanted, slow)} and make the buffer with num_nvl_bytes={nvl_bytes} and "
            f"num_rdma_bytes={rdma_bytes} at least. deep_ep.sizes(...) has all of these for a model."
        )

    def _fits(self, shape: NormalShape, settings: Config) -> bool:
        nvl_bytes, rdma_bytes = self._needed(shape, settings)
        limits = self._limits
        return nvl_bytes <= limits.num_nvl_bytes and rdma_bytes <= limits.num_rdma_bytes

    def _needed(self, shape: NormalShape, settings: Config) -> tuple[int, int]:
        """Bytes of NVLink and RDMA buffer for such calls."""
        return normal_checks.num_bytes(
            self._limits.binding,
            self._place.num_ranks,
            self._place.ranks_per_node,
            settings,
            shape.row_bytes,
            shape.num_topk,
            shape.num_scales,
        )


def _settings(settings: Config, queues: list[_Queue]) -> str:
    """What sets their slots, as it is passed to `Config`."""
    return ", ".join(f"{queue.field}={getattr(settings, queue.field)}" for queue in queues)
