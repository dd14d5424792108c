"""What ranks share on the way: a port to the other nodes and one to its own, served first come, first served.

Tokens of all destinations of a rank leave by two ports, NVLink within its node and a NIC to other
nodes, and those of all sources enter by two. Work is the time that a port is busy with tokens; a
port passes tokens on while others still come, so tokens that wait for nobody take no longer for two
ports than for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from deep_ep.diagnose.core.diagnosis import FloatArray, IntArray
from generator.machines import Setup


class Sends(NamedTuple):
    """What the ranks send in one operation.

    Attributes:
        tokens: [windows, receiver, source].
        entered: [windows, num_ranks], when each rank began to send.
        issued: [windows, receiver, source], when it had handed over its last token for each.
        share: [windows, receiver, source], of all tokens those that were handed over until then, whatever the
            port; None: those for one destination are handed over after those for the one before.
        latency: [windows, receiver, source], of the way itself.
    """

    tokens: IntArray
    entered: FloatArray
    issued: FloatArray
    share: FloatArray | None
    latency: FloatArray


class Turns:
    """In which order a rank sends to its destinations, where it does so to one after the other."""

    def __init__(self, setup: Setup) -> None:
        destination, source = np.indices((setup.num_ranks, setup.num_ranks))
        behind = (source + 1) * setup.machine.in_turn
        self.order = (destination + behind) % setup.num_ranks
        self.place = (destination - behind) % setup.num_ranks

    def taken(self, by_receiver: Any) -> Any:
        """[windows, turn, source], of [windows, receiver, source]."""
        return np.take_along_axis(by_receiver, self.order[None], axis=1)

    def undone(self, by_turn: Any) -> Any:
        """[windows, receiver, source], of [windows, turn, source]."""
        return np.take_along_axis(by_turn, self.place[None], axis=1)


class Ports:
    """The ports of all ranks of a batch of windows; times in us."""

    def __init__(self, setup: Setup, nic: FloatArray) -> None:
        """nic [windows, num_ranks]: how many times as long tokens take at each NIC."""
        machine, num_ranks = setup.machine, setup.num_ranks
        self.itself = np.eye(num_ranks, dtype=bool)
        self.node, _ = machine.node_and_index(num_ranks)
        self.between = self.node[:, None] != self.node[None, :]
        _, cost = machine.latency(num_ranks)
        cost = np.where(self.itself, 0.0, cost)
        self.leaving = cost * np.where(self.between, nic[:, None, :], 1.0)
        self.entering = cost * np.where(self.between, nic[:, :, None], 1.0)
        self.neighbours = self._neighbours()
        self.turns = Turns(setup)

    def arrivals(self, sends: Sends) -> FloatArray:
        """[windows, receiver, source]: when the last token of each source has come."""
        tokens, entered, issued, share, latency = sends
        work = self.leaving * tokens
        if share is None:
            begin, end = self._one_after_the_other(entered, issued, work)
        else:
            begin = np.broadcast_to(entered[:, None, :], issued.shape)
            # The last token of all for a port is handed over when all for it are; of none, none is.
            last = self._by_port(share, np.maximum.reduce)
            share = np.divide(share, last, out=np.zeros(share.shape), where=last > 0)
            end = np.maximum(issued, begin + share * self._by_port(work, np.add.reduce))
        came = self._enter(begin + latency, end + latency, self.entering * tokens)
        return np.where(self.itself, issued, came)

    def _by_port(self, values: FloatArray, reduced: Callable[..., FloatArray]) -> FloatArray:
        """[windows, receiver, source]: of all values of the source at its port to this receiver."""
        away, near = (
            reduced(np.where(port, values, 0.0), axis=1, keepdims=True)
            for port in (self.between, ~self.between)
        )
        return np.where(self.between, away, near)

    def _one_after_the_other(
        self, entered: FloatArray, issued: FloatArray, work: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """[windows, receiver, source] each: when the first and the last token leaves the port."""
        issued, work = self.turns.taken(issued), self.turns.taken(work)
        between = self.turns.taken(self.between[None])[0]
        begin, end = np.empty(issued.shape), np.empty(issued.shape)
        for same_port in (between, ~between):
            done = np.cumsum(np.where(same_port, work, 0.0), axis=1)
            held_up = np.maximum.accumulate(np.where(same_port, issued - done, -np.inf), axis=1)
            left = done + np.maximum(held_up, entered[:, None, :])
            before = np.concatenate([entered[:, None, :], left[:, :-1]], axis=1)
            begin[:, same_port], end[:, same_port] = before[:, same_port], left[:, same_port]
        return self.turns.undone(begin), self.turns.undone(end)

    def _enter(self, begin: FloatArray, end: FloatArray, work: FloatArray) -> FloatArray:
        done = end.copy()
        neighbour = np.broadcast_to(self.neighbours, (len(end), *self.neighbours.shape))
        near = [np.take_along_axis(values, neighbour, axis=2) for values in (begin, end, work)]
        np.put_along_axis(done, neighbour, served(*near), axis=2)
        if self.between.any():
            away = served(begin, end, np.where(self.between, work, 0.0))
            done = np.where(self.between, away, done)
        return done

    def _neighbours(self) -> IntArray:
        """[num_ranks, most ranks of a node]: the ranks of each rank's node; itself where there are fewer."""
        size = int(np.bincount(self.node).max())
        neighbours = np.repeat(np.arange(self.node.size)[:, None], size, axis=1)
        for rank, node in enumerate(self.node):
            of_node = np.flatnonzero(self.node == node)
            neighbours[rank, : of_node.size] = of_node
        return neighbours


def served(begin: FloatArray, end: FloatArray, work: FloatArray) -> FloatArray:
    """When a port is done with each of several flows that come at once, each at a steady rate.

    Args:
        begin, end: [., flows], when the first and the last of each comes.
        work: [., flows], how long the port is busy with it; no more than `end - begin`.

    Returns:
        [., flows]: what comes at some time is done when all that came before it is done.
    """
    times = np.concatenate([begin, end], axis=-1)
    rate = np.divide(work, end - begin, out=np.zeros(work.shape), where=end > begin)
    order = np.argsort(times, axis=-1)
    at = np.take_along_axis(times, order, axis=-1)
    change = np.take_along_axis(np.concatenate([rate, -rate], axis=-1), order, axis=-1)
    # Work that came minus time that passed; the port is idle where it is as low as never before.
    excess = np.zeros(at.shape)
    slope = np.cumsum(change[..., :-1], axis=-1) - 1.0
    np.cumsum(slope * np.diff(at, axis=-1), axis=-1, out=excess[..., 1:])
    waiting = excess - np.minimum.accumulate(excess, axis=-1)
    unsorted = np.empty(at.shape)
    np.put_along_axis(unsorted, order, waiting, axis=-1)
    done: FloatArray = end + unsorted[..., end.shape[-1] :]
    return done
