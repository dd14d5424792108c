"""Timestamps as groups of ranks would record them, with known faults. Knows nothing of the rules.

    for window in simulate_windows(GPU, 8, num_rounds=32, faults=[[SlowRank(3, 20e-6)], []]):
        named = diagnose.judge(diagnose.gather(window.snapshots)).keys
        right = named == window.truth.keys

The protocol is followed causally: a rank enters an operation when it is done with the one before.
So ranks run in lockstep, and one fault shows everywhere, as in a real run:

* A rank that is late by d keeps the others waiting by d less one path time: it needs the data of
  the others to leave as they need its, but theirs is there when it comes. In the next operation it
  starts that much ahead. The group's period grows by d less what this slack (and that of a hook)
  hides.
* A slow path holds up its receiver, which enters the next operation late through no fault of its
  own.
* Lateness below a path time swings: who is late by d leaves first, so the others are late by d in
  the next operation, and so on; in groups of two this hardly fades.
* A slow rank's waits are short, because everybody else has sent long ago.

All windows of a batch go through each operation together, in arrays [windows, receiver, source].
Every window has random streams of its own, so a window does not depend on the batch it is in, a
shorter run is the beginning of a longer one, and faults change the faulty times only.

How healthy ranks behave is in machines.py, what can be the matter in faults.py, the random numbers in
draws.py and noise.py, the protocol in run.py and, of normal operations, normal.py, what shares a wire
in ports.py, what kernels write in recording.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deep_ep.diagnose.collect.snapshot import Snapshot
from deep_ep.diagnose.core.diagnosis import FloatArray, IntArray
from generator.batch import Batch
from generator.faults import GeneratorFault, NonReporting, Truth, truth_of
from generator.machines import LOW_LATENCY, Kind, Machine, Setup
from generator.recording import ARRIVAL, COLUMNS, WAIT_BEGIN, Recorded

# Stamps of one batch; bounds memory.
_BATCH_BYTES = 2**28


def simulate(
    machine: Machine,
    num_ranks: int,
    num_rounds: int,
    faults: Sequence[GeneratorFault] = (),
    seed: int = 0,
    **options: Any,
) -> list[Snapshot]:
    """The snapshots of every rank of one window; options as of `simulate_windows`."""
    windows = simulate_windows(machine, num_ranks, num_rounds, [faults], seed, **options)
    return next(windows).snapshots


def simulate_windows(
    machine: Machine,
    num_ranks: int,
    num_rounds: int,
    faults: Sequence[Sequence[GeneratorFault]],
    seed: int = 0,
    capacity: int = 64,
    kinds: Sequence[Kind] = LOW_LATENCY,
) -> Iterator[Window]:
    """One window for each entry of `faults`, the i-th with random numbers of `seed + i`.

    Args:
        machine: how healthy ranks behave.
        num_ranks: of each group.
        num_rounds: how often the operations of `kinds` are run, in their order.
        faults: what is injected into each window.
        seed: of the first window.
        capacity: operations of all kinds together that the rings hold.
        kinds: LOW_LATENCY, or NORMAL, whose hops count as operations; of one node NORMAL_OF_ONE_NODE.

    Returns:
        An iterator that holds one batch at a time (of about 256 MB of stamps, or one window).
    """
    per_window = num_rounds * len(kinds) * num_ranks * (num_ranks + 1) * COLUMNS * 8
    size = max(1, _BATCH_BYTES // max(per_window, 1))
    setup = Setup(machine, num_ranks, num_rounds, capacity, tuple(kinds))
    for begin in range(0, len(faults), size):
        members = [tuple(f) for f in faults[begin : begin + size]]
        seeds = [seed + begin + i for i in range(len(members))]
        batch = Batch(setup, members, seeds)
        for place, injected in enumerate(members):
            yield Window(
                faults=injected,
                truth=truth_of(
                    injected, setup, batch.loads[place], batch.congested[place], seeds[place]
                ),
                num_operations=setup.num_operations,
                seed=seeds[place],
                _batch=batch,
                _place=place,
            )


@dataclass(frozen=True)
class Window:
    """What the ranks of one group recorded. Made by `simulate_windows`.

    Attributes:
        faults: what was injected.
        truth: what may be said about it.
        num_operations: of all kinds together.
        seed: repeats it: `simulate(machine, num_ranks, num_rounds, faults, seed)`.
    """

    faults: tuple[GeneratorFault, ...]
    truth: Truth
    num_operations: int
    seed: int
    _batch: Batch = field(repr=False, compare=False)
    _place: int = field(repr=False)

    @functools.cached_property
    def snapshots(self) -> list[Snapshot]:
        """Of every rank that reports; rings and totals of all operations in this window."""
        silent = {fault.rank for fault in self.faults if isinstance(fault, NonReporting)}
        ranks = range(self._batch.setup.num_ranks)
        return [self.snapshot(rank) for rank in ranks if rank not in silent]

    def snapshot(self, rank: int) -> Snapshot:
        """One rank's, for groups so large that all at once take too much memory."""
        setup = self._batch.setup
        node, index = setup.machine.node_and_index(setup.num_ranks)
        return Snapshot(
            rank=rank,
            num_ranks=setup.num_ranks,
            device=setup.machine.device,
            host=f"host{node[rank]}",
            operations={r.kind.name: r.counters(rank) for r in self._recorded},
            device_index=int(index[rank]),
            node=int(node[rank]),
        )

    @functools.cached_property
    def _recorded(self) -> list[Recorded]:
        setup = self._batch.setup
        node, _ = setup.machine.node_and_index(setup.num_ranks)
        between = node[:, None] != node[None, :]
        return [
            Recorded(
                self._of_kind(self._batch.stamps, i),
                None if self._batch.blocked is None else self._of_kind(self._batch.blocked, i),
                kind,
                setup.capacity,
                between & (kind.name == "normal dispatch"),
            )
            for i, kind in enumerate(setup.kinds)
        ]

    @functools.cached_property
    def saving_us(self) -> float:
        """By how much the mean operation would be shorter without the faults.

        From the same run with the same random numbers, over all operations after the first round.
        """
        return self.period_us - self._period(self._batch.healthy_exits)

    @property
    def period_us(self) -> float:
        """Mean time from the end of one operation to the end of the next."""
        return self._period(self._batch.exits)

    def wait_matrix(self, kind: str) -> IntArray:
        """[receiver, source] int64: nanoseconds the row waited for the column, over all operations."""
        names = [k.name for k in self._batch.setup.kinds]
        stamps = self._of_kind(self._batch.stamps, names.index(kind))
        wait = stamps[:, :, :-1, ARRIVAL] - stamps[:, :, -1:, WAIT_BEGIN]
        waited: IntArray = np.maximum(wait, 0).sum(axis=0)
        return waited

    def first(self, num_operations: int) -> Window:
        """The same window, ended after its first operations (of all kinds together)."""
        return replace(self, num_operations=min(num_operations, self.num_operations))

    def _of_kind(self, values: IntArray, kind: int) -> IntArray:
        """[n, ...] of one kind, of what a batch has of all windows and operations."""
        step = len(self._batch.setup.kinds)
        return values[self._place, kind : self.num_operations : step]

    def _period(self, exits: FloatArray) -> float:
        """Of exits as `Batch` has them; the first round is left out, if there are others."""
        num_kinds = len(self._batch.setup.kinds)
        first = num_kinds if self.num_operations > num_kinds else 0
        span = exits[self._place, self.num_operations] - exits[self._place, first]
        return float(span.mean()) / max(self.num_operations - first, 1)
