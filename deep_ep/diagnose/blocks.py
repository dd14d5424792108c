"""Ranks put together to blocks, so that a matrix of many ranks stays small: per node where hosts are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deep_ep.diagnose.findings import FloatArray, IntArray


@dataclass(frozen=True)
class Blocks:
    """Which rank belongs to which block.

    Attributes:
        of_rank: [num_ranks] int64, index of each rank's block; every block has a rank.
        first: per block its first rank, or its first host, as an index into the hosts in order of rank.
        hosts: per block the name of its first host, where blocks consist of hosts; else empty.
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
    def by_host(self) -> bool:
        """Whether a block consists of hosts."""
        return bool(self.hosts)

    def mean(self, matrix: FloatArray) -> FloatArray:
        """[num_ranks, num_ranks] to [count, count], over what is known; ranks with themselves only if alone."""
        values = matrix.astype(np.float64)
        alone = np.bincount(self.of_rank, minlength=self.count)[self.of_rank] == 1
        diagonal = np.flatnonzero(~alone)
        values[diagonal, diagonal] = np.nan
        known = np.isfinite(values)
        total = self._sum(np.where(known, values, 0.0))
        count = self._sum(known.astype(np.float64))
        return np.asarray(np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0))

    def largest(self, matrix: FloatArray) -> FloatArray:
        """[num_ranks, num_ranks] to [count, count]; NaN only where a whole block is unknown."""
        largest = np.full((self.count, self.count), np.nan)
        np.fmax.at(largest, (self.of_rank[:, None], self.of_rank[None, :]), matrix)
        return largest

    def spread_out(self, cells: FloatArray) -> FloatArray:
        """[count, count] to [num_ranks, num_ranks]: every rank gets the value of its block."""
        return cells[np.ix_(self.of_rank, self.of_rank)]

    def _sum(self, matrix: FloatArray) -> FloatArray:
        cell = self.of_rank[:, None] * self.count + self.of_rank[None, :]
        total = np.bincount(cell.ravel(), matrix.ravel(), minlength=self.count**2)
        return np.asarray(total, np.float64).reshape(self.count, self.count)


def single(num_ranks: int) -> Blocks:
    """Every rank by itself."""
    return _consecutive(num_ranks, 1)


def at_most(most: int, hosts: Sequence[str]) -> Blocks:
    """A block per rank if these are few enough, else of one or several hosts, else of consecutive ranks.

    Args:
        most: so many blocks there may be.
        hosts: host per rank, "" where it is not known: such a rank goes with the one before it.
    """
    num_ranks, most = len(hosts), max(most, 1)
    if num_ranks <= most:
        return single(num_ranks)
    known = list(dict.fromkeys(host for host in hosts if host))
    if len(known) < 2:
        return _consecutive(num_ranks, math.ceil(num_ranks / most))
    together = math.ceil(len(known) / most)
    of_host = {host: i // together for i, host in enumerate(known)}
    of_rank, latest = [], known[0]
    for host in hosts:
        latest = host or latest
        of_rank.append(of_host[latest])
    first = range(0, len(known), together)
    return Blocks(np.array(of_rank, dtype=np.int64), tuple(first), tuple(known[i] for i in first))


def from_indices(of_rank: Sequence[int]) -> Blocks:
    """Blocks by the index of each rank's block; every index from 0 on must occur."""
    first = {block: rank for rank, block in reversed(list(enumerate(of_rank)))}
    return Blocks(np.array(of_rank, dtype=np.int64), tuple(first[b] for b in sorted(first)))


def _consecutive(num_ranks: int, size: int) -> Blocks:
    return Blocks(np.arange(num_ranks, dtype=np.int64) // size, tuple(range(0, num_ranks, size)))
