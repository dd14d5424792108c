"""Memory that somebody overwrites: one row of a normal operation, on a hop of choice, in simulated time.

Four ranks on two nodes exchange rows such that one token of rank 0 takes every hop there is: to the gateway
on the other node (rank 2), from there to rank 3, back to the gateway, and back to rank 0. Queues have two
slots or one, so that each slot is used several times. Beside the ranks somebody looks at the memory of one of
them after every step, and changes the row once it has arrived.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch

import deep_ep
from explore.machine import Machine, SimulatedGroup
from explore.program import Pace
from support.normal_exchange import TINY, layout_of, nodes_of

NUM_RANKS, RANKS_PER_NODE = 4, 2
# Token t of rank r goes to rank r + t alone; these take all hops, by the same slots.
NUM_TOKENS, EARLIER_TOKEN, TOKEN, OWNER = 12, 3, 11, 0
HIDDEN, TOPK_BYTES = 24, 8
TIMEOUT_S = 0.1
# One point a step: somebody who sleeps for a nanosecond looks after each of them.
PACE = Pace(points_per_step=1, step_ns=50, shortest_delivery_ns=500, longest_delivery_ns=2_000)


class Hop(NamedTuple):
    """Where the row is damaged, and what has to be said of it."""

    operation: str  # "dispatch" or "combine"
    sender: int
    receiver: int
    over: str  # "NVLink" or "the network"


HOPS = (
    Hop("dispatch", 0, 2, "the network"),
    Hop("dispatch", 2, 3, "NVLink"),
    Hop("combine", 3, 2, "NVLink"),
    Hop("combine", 2, 0, "the network"),
)


class Slot(NamedTuple):
    """A row where it lies, and what lay there when an earlier row was in the same slot."""

    memory: torch.Tensor  # uint8, from the row on
    row_bytes: int
    earlier: torch.Tensor | None


Damage = Callable[[Slot], None]


def flip_row(slot: Slot) -> None:
    """A bit of the row."""
    slot.memory[slot.row_bytes - 3] ^= 4


def flip_weight(slot: Slot) -> None:
    """A bit of the weight that travels behind the row."""
    slot.memory[slot.row_bytes + 16 + 4] ^= 1


def flip_operation(slot: Slot) -> None:
    """The number of the operation, as if the row were of another one."""
    slot.memory[slot.row_bytes + 4] ^= 1


def swap_words(slot: Slot) -> None:
    """Two words in each other's place."""
    slot.memory[:8] = slot.memory[:8].roll(4)


def restore_earlier(slot: Slot) -> None:
    """The row that was in this slot when the ring went round the time before, whole as it was."""
    assert slot.earlier is not None
    slot.memory[: len(slot.earlier)] = slot.earlier


def flip_mark(slot: Slot) -> None:
    """Whom the gateway passes the row on to."""
    slot.memory[slot.row_bytes + 16 + 16] ^= 3


class Exchange:
    """What all ranks pass, and what came of it."""

    def __init__(self, hop: Hop, damage: Damage, verifies: bool, seed: int = 1) -> None:
        self.hop = hop
        self.damage = damage
        self.verifies = verifies
        self.seed = seed
        self.buffers: list[deep_ep.Buffer] = [None] * NUM_RANKS  # type: ignore[list-item]
        generator = torch.Generator().manual_seed(1)
        self.xs = torch.randn(NUM_RANKS, NUM_TOKENS, HIDDEN, generator=generator).bfloat16()
        self.is_damaged = False

    def run(self) -> list[object]:
        """Per rank: its combined rows, or what it raised."""
        # The last seat is nobody's rank.
        machine = Machine(NUM_RANKS + 1, RANKS_PER_NODE, PACE, self.seed)
        self._machine = machine
        environment = {
            "DEEP_EP_TIMEOUT_S": f"{TIMEOUT_S:g}",
            "DEEP_EP_VERIFY": f"{self.verifies:d}",
        }
        with mock.patch.dict(os.environ, environment), nodes_of(RANKS_PER_NODE):
            outcomes = machine.run(
                lambda seat: self._exchange(seat) if seat < NUM_RANKS else self._meddle(seat)
            )
        assert outcomes.pop() is None
        assert self.is_damaged, "the row never came"
        return outcomes

    def _exchange(self, rank: int) -> torch.Tensor:
        group = SimulatedGroup(self._machine, rank, TIMEOUT_S)
        group.size = NUM_RANKS
        self.buffers[rank] = buffer = deep_ep.Buffer(
            group,
            num_nvl_bytes=TINY.get_nvl_buffer_size_hint(2 * HIDDEN, NUM_RANKS),
            num_rdma_bytes=TINY.get_rdma_buffer_size_hint(2 * HIDDEN, NUM_RANKS),
        )
        topk_idx = (torch.arange(NUM_TOKENS)[:, None] + rank) % NUM_RANKS
        layout, _ = layout_of(buffer, topk_idx, NUM_RANKS)
        self._machine.meet("dispatch", 0, rank, None)
        rows, _, weights, _, handle, _ = buffer.dispatch(
            self.xs[rank],
            **layout,
            topk_idx=topk_idx,
            topk_weights=torch.ones(NUM_TOKENS, 1),
            config=TINY,
        )
        self._machine.meet("combine", 0, rank, None)
        self._machine.meet("cleared", 0, rank, None)
        combined, _, _ = buffer.combine(rows, handle, topk_weights=weights, config=TINY)
        return combined

    def _meddle(self, seat: int) -> None:
        machine, hop = self._machine, self.hop
        self._come_last("dispatch", seat)
        memory = self.buffers[hop.receiver].get_local_buffer_tensor(
            torch.uint8, use_rdma_buffer=hop.over == "the network"
        )
        if hop.over == "the network":
            memory = memory[: len(memory) // 2]  # in the other half it stages what it sends itself
        if hop.operation == "combine":
            machine.meet("combine", 0, seat, None)
            memory.zero_()  # of what dispatch left
            self._come_last("cleared", seat)
        earlier = self._await(memory, EARLIER_TOKEN)
        kept = None if earlier is None else earlier.memory[: earlier.row_bytes + 32].clone()
        found = self._await(memory, TOKEN)
        if found is not None:
            self.damage(found._replace(earlier=kept))
            self.is_damaged = True

    def _come_last(self, name: str, seat: int) -> None:
        """Meets the others and is the first to go on, because it alone does not look ever more seldom."""
        others = self._machine.meeting(name, 0)
        while len(others.keys() | self._machine.gone) < NUM_RANKS:
            self._machine.sleep(500)
        self._machine.meet(name, 0, seat, None)

    def _await(self, memory: torch.Tensor, token: int) -> Slot | None:
        """The row of a token, once it is there; `None` if all ranks have gone before."""
        row = self.xs[OWNER, token].view(torch.uint8).numpy().tobytes()
        while len(self._machine.gone) < NUM_RANKS:
            at = memory.numpy().tobytes().find(row)
            # Its pack is another put, and may still be that of the row before.
            pack = memory[at + len(row) :]
            if at >= 0 and (
                int(pack[:4].view(torch.int32)) == token if self.verifies else pack.any()
            ):
                return Slot(memory[at:], len(row), None)
            self._machine.sleep(20 if memory.any() else 500)
        return None
