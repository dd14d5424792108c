"""A diagnosis as it is kept: with when and of whom it is, and means where its matrices are not kept."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np

from ..core.diagnosis import Diagnosis, FloatArray, Measured, PerRankUs, Subject

MATRICES = ("wait_us", "late_us", "issue_us", "path_us", "tokens", "bytes")


@dataclass(frozen=True)
class Means:
    """Matrices of one operation kind, condensed: means over all other ranks, of what is known.

    Attributes:
        waiting: per matrix, `wait_us` to `bytes`, [num_ranks]: the rank waits, or receives.
        waited_for: the same where the rank is waited for, or sends.
    """

    waiting: Annotated[Mapping[str, PerRankUs], MATRICES]
    waited_for: Annotated[Mapping[str, PerRankUs], MATRICES]

    @classmethod
    def of(cls, measured: Measured) -> Means:
        """From the matrices."""
        matrices = {name: getattr(measured, name) for name in MATRICES}
        return cls(
            waiting={name: _mean_of_others(matrix, 1) for name, matrix in matrices.items()},
            waited_for={name: _mean_of_others(matrix, 0) for name, matrix in matrices.items()},
        )


@dataclass(frozen=True)
class Record:
    """One diagnosis with when and of whom it is.

    Attributes:
        diagnosis: what was found; matrices that were not stored are NaN.
        time_s: end of the window, seconds since 1970; NaN where unknown.
        window: its number, counted from 1 by the program that wrote it.
        group: name of the group of ranks.
        block_of: block of each rank, where matrices were stored as means over blocks; else empty.
        stored_means: per operation kind, as read: they are there where matrices are not.
    """

    diagnosis: Diagnosis
    time_s: float
    window: int
    group: str
    block_of: tuple[int, ...] = ()
    stored_means: Mapping[str, Means] = field(default_factory=dict)

    def means(self, operation: str) -> Means:
        """Per rank, of one operation kind of `diagnosis.measured`."""
        stored = self.stored_means.get(operation)
        return Means.of(self.diagnosis.measured[operation]) if stored is None else stored


class Headline(NamedTuple):
    """What tells records of a log apart, without their numbers; `keys` are those of its `Diagnosis`."""

    time_s: float
    window: int
    group: str
    keys: frozenset[tuple[str, Subject]]
    has_matrices: bool

    @classmethod
    def of(cls, record: Record) -> Headline:
        """From the record."""
        diagnosis = record.diagnosis
        has_matrices = any(np.isfinite(m.wait_us).any() for m in diagnosis.measured.values())
        keys = frozenset(diagnosis.keys)
        return cls(record.time_s, record.window, sys.intern(record.group), keys, has_matrices)


def _mean_of_others(matrix: FloatArray, axis: int) -> FloatArray:
    """[num_ranks]: means along an axis of what is known, ranks with themselves left out."""
    known = np.isfinite(matrix)
    np.fill_diagonal(known, False)
    total = np.sum(np.where(known, matrix, 0.0), axis=axis)
    count = known.sum(axis=axis)
    return np.asarray(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))
