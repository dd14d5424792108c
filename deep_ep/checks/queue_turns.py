"""In how many turns rows go through the queues of normal operations, and a remark where that takes long.

A queue holds as many rows as it has slots, and its sender waits until some are given back. Turns cost next to nothing
while there are slots enough for rows to move many at a time; with few slots every step moves few rows, and each of them
has words of its own to wait for. A buffer never shortens queues: their slots are those of the `Config`, and one that does
not fit is refused.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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


class _Queue(NamedTuple):
    """The queues of one hop, in one operation.

    Attributes:
        hop: its name.
        field: of `Config`; what sets their slots.
        sharing: among how many queues the value of the field is divided.
        rows: that go through one, on average.
        slots: of each.
    """

    hop: str
    field: str
    sharing: int
    rows: int
    slots: int

    @property
    def turns(self) -> int:
        """How often the queue is filled."""
        return -(-self.rows // self.slots)


class QueueTurns:
    """Of one buffer: what was said of its queues, each once for dispatch and once for combine, and by rank 0 alone.

    Only what the host knows counts. Which rank sends how much to whom it does not know, so it is averages that are judged.
    """

    def __init__(self, limits: Limits, place: Topology) -> None:
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

        This rank receives `num_rows` in dispatch, and returns them in combine; of them it relays `num_relay_rows` to or
        from other nodes.
        """
        place = self._place
        if place.rank or not self._knows_rows or call in self._said:
            return
        nodes, slow = place.num_nodes, []
        for hop, field, sharing, num_peers, rows in (
            ("NVLink", "num_max_nvl_chunked_recv_tokens", nodes, place.num_ranks, num_rows),
            ("RDMA", "num_max_rdma_chunked_recv_tokens", 1, nodes - 1, num_relay_rows),
        ):
            slots = getattr(shape.config, field) // sharing
            if num_peers and slots <= _FEW_SLOTS:
                rows_of_one = rows // (num_peers * shape.num_channels)
                queue = _Queue(hop, field, sharing, rows_of_one, slots)
                slow += [queue] if queue.turns >= _MANY_TURNS else []
        if slow:
            self._said.add(call)
            found = " and ".join(
                f"{queue.rows} rows for each {queue.hop} queue of {queue.slots} slots, in {queue.turns} turns"
                for queue in slow
            )
            _log.warning(
                "deep_ep: %s: %s. So few slots make it slow. The Config that it was given has %s; %s",
                *(call, found, _settings(shape.config, slow), self._advice(call, shape, slow)),
            )

    def _advice(self, call: str, shape: NormalShape, slow: list[_Queue]) -> str:
        """Slots as recommended; fewer if the buffer has no room for them; or else a larger buffer."""
        is_dispatch = call == NORMAL_DISPATCH
        recommend = config.recommended_dispatch if is_dispatch else config.recommended_combine
        recommended = recommend(self._place.num_ranks, shape.config.num_sms)
        values = {
            queue.field: max(getattr(recommended, queue.field), 2 * _FEW_SLOTS * queue.sharing)
            for queue in slow
        }
        wanted = replace(shape.config, **values)
        nvl_bytes, rdma_bytes = self._needed_bytes(shape, wanted)
        limits = self._limits
        while all(values[queue.field] // queue.sharing > _FEW_SLOTS for queue in slow):
            fitting = replace(shape.config, **values)
            nvl, rdma = self._needed_bytes(shape, fitting)
            if nvl <= limits.num_nvl_bytes and rdma <= limits.num_rdma_bytes:
                return f"the buffer has room for {_settings(fitting, slow)}."
            values = {field: value // 2 for field, value in values.items()}
        return (
            f"set {_settings(wanted, slow)} and make the buffer with num_nvl_bytes={nvl_bytes} and "
            f"num_rdma_bytes={rdma_bytes} at least. deep_ep.sizes(...) has all of these for a model."
        )

    def _needed_bytes(self, shape: NormalShape, settings: Config) -> tuple[int, int]:
        return normal_checks.needed_bytes(
            replace(shape, config=settings), self._place, self._limits
        )


def _settings(settings: Config, queues: list[_Queue]) -> str:
    """What sets their slots, as it is passed to `Config`."""
    return ", ".join(f"{queue.field}={getattr(settings, queue.field)}" for queue in queues)
