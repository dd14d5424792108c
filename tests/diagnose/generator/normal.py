"""Normal operations: what the hops of a dispatch and of a combine do, one causing the other.

A round is a fresh dispatch and a combine. As in kernels, hops of one operation share its number and the stamps
of entering and leaving; rows for other nodes go by way of gateways, the ranks of equal index there.

* Dispatch: all exchange notices. Each then sends as soon as its host lets it, rows for its own node to their
  ranks and others to gateways, which pass them on as they come.
* Combine: nobody sends before all have entered. Rows go back to the source or its gateway, which sends a sum
  when all rows of its node have come.
* A receiver that empties its queues slowly lets its sources wait for slots, gateways among them, whose own
  sources then wait as well, and whose other rows behind them. Healthy receivers let them wait a little.
* A slot of a combine is given back when all rows of its sum have come. Where a gateway's sums are late, the
  sources of the same node wait for slots of a rank that is slow in nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deep_ep.diagnose.core.diagnosis import BoolArray, FloatArray, IntArray
from generator.faults import GeneratorFault
from generator.machines import Setup
from generator.ports import Sends
from generator.run import Operation, Run, headers_seen

# What a host does between the notices and the rows; what a gateway does with a row before it passes it on;
# how long a rank takes from entering a combine to waiting.
_HOST_US, _RELAY_US, _ENTER_US = 20.0, 2.0, 1.0
# How long healthy receivers keep a source waiting for slots.
_SLOTS_US = 2.0
# Of what a slow receiver keeps its sources waiting: how much it still has to empty when the last row has
# come, by how much it sees rows later, and how much of it a gateway hands on to its own sources.
_LEFT, _SEEN_LATER, _HANDED_ON = 0.3, 0.1, 0.5
# For how long there are slots while nothing is given back.
_SLOTS_LAST_US = 30.0


class NormalRun(Run):
    """All windows of a batch; see `Run`."""

    def __init__(
        self, setup: Setup, faults: Sequence[Sequence[GeneratorFault]], seeds: Sequence[int]
    ) -> None:
        super().__init__(setup, faults, seeds)
        self.across = self.same_rail & self.between
        # [1, receiver, source]: who passes on to the receiver what the source sends to its node.
        per_node = setup.machine.ranks_per_node or setup.num_ranks
        self.gateway = (self.node[:, None] * per_node + self.index[None, :])[None]
        self.has_gateways = any("gateway" in kind.name for kind in setup.kinds)

    def operation(self, op: int, speed: FloatArray, previous_exit: FloatArray) -> list[Operation]:
        """The hops of the dispatch or the combine that begins with hop `op`."""
        return (self._dispatch if op % len(self.setup.kinds) == 0 else self._combine)(
            op, speed, previous_exit
        )

    def _dispatch(self, op: int, speed: FloatArray, previous_exit: FloatArray) -> list[Operation]:
        machine, draws = self.setup.machine, self.draws
        rows = draws.tokens[:, op // len(self.setup.kinds)]
        entered = self.enter(op, speed, previous_exit, self.kind(op), rows.sum(axis=1))
        latency = self.latency(op)
        noticed = entered + self._own(speed * machine.send, draws.send[:, op])
        told = np.broadcast_to(noticed[:, None, :], rows.shape)
        notices = told + latency
        known = np.maximum(noticed, notices.max(axis=2))
        known = known + self._own(speed * machine.drain, draws.drain[:, op])
        notify = Operation(
            np.zeros_like(rows), entered, told, noticed, noticed, notices, known,
            np.zeros(rows.shape),
        )  # fmt: skip

        last = op + 1 + self.has_gateways
        begin = known + self._own(speed * _HOST_US, draws.gap[:, last])
        latency = self.latency(last)
        first = np.where(self.between, self._forwarded(rows), rows)
        waits = self._waits_for_slots(last)
        # A gateway whose rows find no slots gives none back itself.
        for_mates = _HANDED_ON * np.where(self.between, 0.0, waits).max(axis=1)
        first_waits = np.where(self.between, np.maximum(waits, for_mates[:, :, None]), waits)
        order = self.order(self.kind(last), first)
        sending = self._sending(last, speed, first)
        issued = begin[:, None, :] + sending[:, None, :] * order + first_waits
        came = self.arrive(Sends(first, begin, issued, order, latency)) + self._seen_later
        # From the gateway as any row within a node, behind those that find no slots.
        queueing = latency + np.maximum(waits, for_mates[:, None, :])
        relay = np.take_along_axis(queueing, self.gateway, axis=2) + _RELAY_US
        passed_on = np.take_along_axis(came, self.gateway, axis=1) + relay + self._seen_later
        arrival = np.where(self.between, passed_on, came)
        issued_for = np.where(
            self.between, np.take_along_axis(issued, self.gateway, axis=1), issued
        )
        sent = np.where(first > 0, issued, begin[:, None, :]).max(axis=1)
        at_last = np.maximum(
            np.where(rows > 0, arrival, -np.inf), np.where(first > 0, came, -np.inf)
        ).max(axis=2)
        leave = np.maximum(np.maximum(begin, sent), at_last) + self._drain(last, speed, rows)
        shared = entered, sent, begin, leave
        gateways = self._hop(first, issued, came, first_waits, self.across, *shared)
        everybody = np.ones_like(self.own)
        blocked = np.where(self.between, np.take_along_axis(waits, self.gateway, axis=2), waits)
        ranks = self._hop(rows, issued_for, arrival, blocked, everybody, *shared)
        return [notify, gateways, ranks] if self.has_gateways else [notify, ranks]

    def _combine(self, op: int, speed: FloatArray, previous_exit: FloatArray) -> list[Operation]:
        last = op + self.has_gateways
        dispatched = self.draws.tokens[:, op // len(self.setup.kinds)]
        rows = np.swapaxes(dispatched, 1, 2)
        entered = self.enter(last, speed, previous_exit, self.kind(last), rows.sum(axis=1))
        begin = entered + _ENTER_US
        latency = self.latency(last)
        starts = np.maximum(begin, headers_seen(entered, latency))
        waits = self._waits_for_slots(last)
        # Within a node, rows for its ranks and for its gateways.
        direct, for_gateways = np.where(self.between, 0, rows), self._for_gateways(rows)
        within = direct + for_gateways
        order = self.order(self.kind(last), within)
        sending = self._sending(last, speed, within)
        issued = starts[:, None, :] + sending[:, None, :] * order + waits
        came = self.arrive(Sends(within, starts, issued, order, latency)) + self._seen_later
        # A sum leaves when the last row for it has come.
        sums = np.swapaxes(self._forwarded(dispatched), 1, 2)
        of_node = np.where((for_gateways > 0) | self.own, came, -np.inf).max(axis=2)
        summed = (of_node + _RELAY_US)[:, None, :] + waits
        sums_came = self.arrive(Sends(sums, starts, summed, np.ones(rows.shape), latency))
        for_sums = self._waits_for_sums(came, np.where(sums > 0, sums_came, -np.inf))
        issued, came, waits = issued + for_sums, came + for_sums, waits + for_sums
        tokens = np.where(self.between, sums, direct)
        issued_last = np.where(self.between, summed, issued)
        arrival = np.where(self.between, sums_came + self._seen_later, came)
        sent = np.maximum(
            np.where(within > 0, issued, begin[:, None, :]).max(axis=1),
            np.where(sums > 0, summed, begin[:, None, :]).max(axis=1),
        )
        at_last = np.maximum(
            np.where(tokens > 0, arrival, -np.inf), np.where(within > 0, came, -np.inf)
        ).max(axis=2)
        leave = np.maximum(np.maximum(starts, sent), at_last) + self._drain(last, speed, tokens)
        shared = entered, sent, begin, leave
        gateways = self._hop(for_gateways, issued, came, waits, ~self.between, *shared)
        sources = ~self.between | self.across
        ranks = self._hop(tokens, issued_last, arrival, waits, sources, *shared)
        return [gateways, ranks] if self.has_gateways else [ranks]

    def _hop(
        self,
        tokens: IntArray,
        issued: FloatArray,
        arrival: FloatArray,
        blocked: FloatArray,
        sources: BoolArray,
        entered: FloatArray,
        sent: FloatArray,
        begin: FloatArray,
        leave: FloatArray,
    ) -> Operation:
        """One hop, of the sources [receiver, source] that it has; what is not sent was there before."""
        nothing = tokens == 0
        return Operation(
            tokens=tokens * sources,
            entered=entered,
            issued=np.where(nothing, entered[:, None, :], issued),
            sent=sent,
            wait_begin=begin,
            arrival=np.where(sources, np.where(nothing, begin[:, :, None], arrival), -np.inf),
            exit=leave,
            blocked=np.where(nothing | ~sources, 0.0, blocked),
        )

    def _forwarded(self, rows: IntArray) -> IntArray:
        """[windows, gateway, source]: rows for the gateway's node."""
        same_node = (~self.between).astype(np.int64)
        return np.where(self.across, same_node @ rows, 0)

    def _for_gateways(self, rows: IntArray) -> IntArray:
        """[windows, gateway, source]: rows that a gateway of the source's node sums up for other nodes."""
        across = np.where(self.between, rows, 0)
        return np.where(self.between, 0, self.same_rail.astype(np.int64) @ across)

    def _waits_for_slots(self, op: int) -> FloatArray:
        """[windows, receiver, source]: how long a source waits for the receiver's slots."""
        healthy = _SLOTS_US * np.minimum(np.abs(self.draws.path[:, op]), 3.0)
        return healthy + self.extra.slots[:, :, None]

    def _waits_for_sums(self, came: FloatArray, sums_came: FloatArray) -> FloatArray:
        """[windows, receiver, source]: how much longer a source within the node waits for slots, because the
        sums that its rows are for have not come.
        """
        last = sums_came.max(axis=2, keepdims=True)
        waits = np.maximum(last - came - _SLOTS_LAST_US, 0.0)
        return np.where(self.between | self.own, 0.0, waits)

    @property
    def _seen_later(self) -> FloatArray:
        return np.where(self.own, 0.0, _SEEN_LATER * self.extra.slots[:, :, None])

    def _sending(self, op: int, speed: FloatArray, rows: IntArray) -> FloatArray:
        """[windows, num_ranks]: how long each takes to hand over its rows."""
        machine = self.setup.machine
        work = speed * (machine.send + machine.send_per_token * rows.sum(axis=1))
        return self._own(work, self.draws.send[:, op]) + self.extra.send

    def _drain(self, op: int, speed: FloatArray, rows: IntArray) -> FloatArray:
        """[windows, num_ranks]: what is left to do when everything has come and is sent."""
        machine, extra = self.setup.machine, self.extra
        work = speed * (machine.drain + machine.drain_per_token * rows.sum(axis=2))
        return self._own(work, self.draws.drain[:, op]) + extra.drain + _LEFT * extra.slots

    def _own(self, work: FloatArray, noise: FloatArray) -> FloatArray:
        return np.maximum(work + self.setup.machine.jitter / 3 * noise, 0.0)
