"""Verdicts from cumulative waiting alone: matrices of other kernels, other tools, old logs.

Without timestamps nobody knows when a source started, so a late source and a slow link out of it
look the same. Verdicts name a side, not a cause. With two nodes, most ranks of one of them being
late looks like a slow direction between the nodes and its other ranks coming early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from deep_ep.diagnose.analyze.waits_only.effects import Effects
from deep_ep.diagnose.analyze.waits_only.nodes import devices, find_nodes
from deep_ep.diagnose.analyze.waits_only.sides import PAIR_OPERATIONS, find_causes
from deep_ep.diagnose.analyze.waits_only.square import square_matrix
from deep_ep.diagnose.core.diagnosis import BoolArray, Diagnosis, FloatArray, Measured
from deep_ep.errors import EPArgumentError, ranks_text


def judge_waits(
    matrix: Any,
    *,
    operation: str = "dispatch",
    hosts: Sequence[str] | None = None,
    operations: int | None = None,
    unit_ns: float | None = None,
    delta_ns: float = 0.0,
) -> Diagnosis:
    """Verdicts from a matrix of summed waiting. Scale-free: only proportions decide.

    Args:
        matrix: [n, n] numbers >= 0 (list, array, tensor), rows wait, columns are waited for; the
            diagonal is ignored. A row of NaN is a rank that did not report.
        operation: what to call it in the verdicts.
        hosts: [n] host names, to tell links within a node from those between nodes; without them
            nodes are looked for in the matrix.
        operations: how many operations the sums cover; effects are per operation then, otherwise
            of the whole window.
        unit_ns: nanoseconds of one unit of the matrix; nanoseconds are assumed unless given.
        delta_ns: the smallest effect of interest, in nanoseconds per operation (or of the window).

    Returns:
        A Diagnosis with source "waits". Times of verdicts and of `measured` are in microseconds.

    Raises:
        EPArgumentError: not a square matrix of finite numbers >= 0, or another argument is wrong.
    """
    wait = square_matrix("judge_waits", matrix, missing_rows=True)
    num_ranks = wait.shape[0]
    _check_arguments(num_ranks, hosts, operations, unit_ns, delta_ns)
    missing: BoolArray = np.asarray(np.isnan(wait).all(axis=1))
    np.fill_diagonal(wait, np.nan)
    to_us = (1.0 if unit_ns is None else unit_ns) / (operations or 1) / 1e3

    nodes, guessed = find_nodes(wait, hosts)
    causes = [
        cause
        for cause in find_causes(wait, nodes, operations)
        if cause.effect * to_us * 1e3 > delta_ns
    ]
    effects = Effects(wait, to_us, operation, hosts, nodes)
    verdicts = sorted(map(effects.verdict, causes), key=lambda v: -v.effect_us)
    names = hosts if hosts is not None else ["?"] * num_ranks
    return Diagnosis(
        measured={operation: _measured(wait * to_us, operation, operations)},
        verdicts=verdicts,
        remarks=_remarks(wait, missing, guessed, unit_ns, operations, bool(verdicts)),
        hosts=tuple("" if gone else name for name, gone in zip(names, missing)),
        devices=tuple(
            -1 if gone else d for d, gone in zip(devices(hosts or nodes.tolist()), missing)
        ),
        # One node is what is left where nodes are not known.
        nodes=tuple(np.where(missing, -1, nodes).tolist()) if nodes.any() else (),
        savings_us={operation: effects.saving_of_all(causes)},
        source="waits",
    )


def _check_arguments(
    num_ranks: int,
    hosts: Sequence[str] | None,
    operations: int | None,
    unit_ns: float | None,
    delta_ns: float,
) -> None:
    if hosts is not None and len(hosts) != num_ranks:
        raise EPArgumentError(
            f"judge_waits: hosts has {len(hosts)} entries, the matrix {num_ranks} ranks; there "
            "must be one host per rank. Pass them in rank order, or None."
        )
    if operations is not None and operations < 1:
        raise EPArgumentError(
            f"judge_waits: operations is {operations}; the sums must cover at least 1. "
            "Pass None if the number is not known."
        )
    if unit_ns is not None and not 0 < unit_ns < math.inf:
        raise EPArgumentError(
            f"judge_waits: unit_ns is {unit_ns}; it must be a number above 0. Pass 1 for "
            "nanoseconds, 1e9 / clock rate for cycles."
        )
    if not 0 <= delta_ns < math.inf:
        raise EPArgumentError(
            f"judge_waits: delta_ns is {delta_ns}; it must be 0 or more. Pass 0 for no floor."
        )


def _measured(wait_us: FloatArray, operation: str, operations: int | None) -> Measured:
    num_ranks = wait_us.shape[0]
    unknown, row = np.full(wait_us.shape, np.nan), np.full(num_ranks, np.nan)
    return Measured(
        operation=operation,
        num_operations=operations or 0,
        first_operation=0,
        last_operation=0,
        duration_us=float("nan"),
        wait_us=wait_us,
        late_us=unknown,
        issue_us=unknown,
        path_us=unknown,
        tokens=unknown,
        bytes=unknown,
        gap_us=row,
        send_us=row,
        drain_us=row,
        own_wait_us=np.fmax.reduce(wait_us, axis=1, initial=np.nan),
    )


def _remarks(
    wait: FloatArray,
    missing: BoolArray,
    guessed: bool,
    unit_ns: float | None,
    operations: int | None,
    named: bool,
) -> list[str]:
    num_ranks = wait.shape[0]
    if num_ranks == 1:
        return ["one rank: nothing to compare"]
    remarks = [
        "only sums of waiting are known, no timestamps: a late sender and a slow outgoing link "
        "look the same, and one long operation looks like many; verdicts name a side, not a cause"
    ]
    if missing.any():
        gone = ranks_text(int(rank) for rank in np.flatnonzero(missing))
        remarks.append(f"{gone} did not report: what they waited for is not known")
    if num_ranks == 2 and not named:
        if missing.any():
            remarks.append("undecided: of two ranks one did not report")
        elif operations is not None and operations < PAIR_OPERATIONS:
            remarks.append(
                f"undecided: two ranks can only be compared with each other, and {operations} "
                f"operations are too few for that (at least {PAIR_OPERATIONS})"
            )
    if unit_ns is None:
        remarks.append("the unit of the matrix is not known and taken for nanoseconds")
    if operations is None:
        remarks.append("the number of operations is not known: effects are of the whole window")
    if guessed:
        remarks.append(
            "host names say nothing of nodes: nodes were told apart by the waiting between them"
        )
    return remarks
