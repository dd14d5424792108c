"""Ranks put together: by node, or to blocks of nodes, so that a matrix of many ranks stays small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .diagnosis import Diagnosis, FloatArray, IntArray


@dataclass(frozen=True)
class Blocks:
    """Which rank belongs to which block.

    Attributes:
        of_rank: [num_ranks] int64, index of each rank's block; every block has a rank.
        first: per block its first rank, or its first node, numbered as in `nodes_of`.
        hosts: per block the host of its first rank, where blocks consist of nodes; else empty.
    """

    of_rank: IntArray
    first: tuple[int, ...]
    hosts: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.first)

    @property
    def single(self) -> bool:
        """Whether every rank is a block of its own."""
        return self.count == self.of_rank.size

    @property
    def by_node(self) -> bool:
        """Whether a block consists of nodes."""
        return bool(self.hosts)

    def mean(self, matrix: FloatArray) -> FloatArray:
        """[num_ranks, num_ranks] to [count, count], over what is known; ranks with themselves only if alone."""
        values = matrix.astype(np.float64)
        alone = np.bincount(self.of_rank, minlength=self.count)[self.of_rank] == 1
        diagonal = np.flatnonzero(~alone)
        values[diagonal, diagonal] = np.nan
        known = np.isfinite(values)
        total, count = np.zeros((2, self.count, self.count))
        np.add.at(total, self._cells, np.where(known, values, 0.0))
        np.add.at(count, self._cells, known)
        return np.asarray(np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0))

    def largest(self, matrix: FloatArray) -> FloatArray:
        """[num_ranks, num_ranks] to [count, count]; NaN only where a whole block is unknown."""
        largest = np.full((self.count, self.count), np.nan)
        np.fmax.at(largest, self._cells, matrix)
        return largest

    def spread_out(self, cells: FloatArray) -> FloatArray:
        """[count, count] to [num_ranks, num_ranks]: every rank gets the value of its block."""
        return cells[np.ix_(self.of_rank, self.of_rank)]

    @property
    def _cells(self) -> tuple[IntArray, IntArray]:
        return self.of_rank[:, None], self.of_rank[None, :]


def single(num_ranks: int) -> Blocks:
    """Every rank by itself."""
    return _consecutive(num_ranks, 1)


def at_most(most: int, diagnosis: Diagnosis) -> Blocks:
    """A block per rank if these are few enough, else of one or several nodes, else of consecutive ranks.

    Args:
        most: so many blocks there may be.
        diagnosis: of which ranks; only who is where matters.
    """
    num_ranks, most = diagnosis.num_ranks, max(most, 1)
    if num_ranks <= most:
        return single(num_ranks)
    nodes = nodes_of(diagnosis)
    num_nodes = max(nodes) + 1
    if num_nodes < 2:
        return _consecutive(num_ranks, math.ceil(num_ranks / most))
    together = math.ceil(num_nodes / most)
    of_rank = np.maximum(np.array(nodes, dtype=np.int64), 0) // together
    first = range(0, num_nodes, together)
    hosts = tuple(diagnosis.hosts[nodes.index(node)] for node in first)
    return Blocks(of_rank, tuple(first), hosts)


def nodes_of(diagnosis: Diagnosis) -> list[int]:
    """Node of each rank, from 0 on: `Diagnosis.nodes`, or the hosts where these are not known.

    A missing rank goes with the one before it; -1 where nothing is known.
    """
    known = [host for host in dict.fromkeys(diagnosis.hosts) if host]
    number = {host: i for i, host in enumerate(known)}
    nodes = diagnosis.nodes or [number.get(host, -1) for host in diagnosis.hosts]
    filled: list[int] = []
    for node in nodes:
        filled.append(node if node >= 0 else filled[-1] if filled else -1)
    return filled


def borders(diagnosis: Diagnosis) -> list[int]:
    """Ranks that are on another node than the rank before."""
    nodes = nodes_of(diagnosis)
    return [rank for rank in range(1, len(nodes)) if nodes[rank] != nodes[rank - 1]]


def from_indices(of_rank: Sequence[int]) -> Blocks:
    """Blocks by the index of each rank's block; every index from 0 on must occur."""
    first = {block: rank for rank, block in reversed(list(enumerate(of_rank)))}
    return Blocks(np.array(of_rank, dtype=np.int64), tuple(first[b] for b in sorted(first)))


def _consecutive(num_ranks: int, size: int) -> Blocks:
    return Blocks(np.arange(num_ranks, dtype=np.int64) // size, tuple(range(0, num_ranks, size)))
