"""From counters to verdicts: who is slow, why, and by how much.

    buffer.enable_counters()
    ...                                    # operations
    diagnosis = diagnose.run(buffer)       # every rank; the answer is on rank 0
    if diagnosis is not None:
        diagnose.report(diagnosis)

- In a program: `run`, judged by `Thresholds`, compared with a `History`; its `Diagnosis` has a `Verdict` for each
  `Cause`, of class `COMP_SLOW`, `COMM_SLOW` or `MIXED_SLOW`. `report` prints it, `write_picture` draws it.
- Later, or elsewhere: `save` the `snapshot` of each rank; `read_any` reads files of all kinds and judges them.
- In steps: `judge(gather(snapshots))`, of the `Snapshot` of each rank.
- Beside other kernels, by the waiting that they count: `attach` to a buffer, or `install` before any is made.
- Without timestamps: `judge_waits`; `Diagnose` and `diagnose_matrix` for programs of the existing analyser.

Rows of every matrix wait, columns are waited for. The folders below hold the rest: `core` (plain data),
`collect`, `analyze`, `storage`, `render`, `live`, `other_kernels`, `trace`, `cli`.
"""

from __future__ import annotations

from typing import Any

from .analyze.baseline import History
from .analyze.engine import judge
from .analyze.thresholds import Thresholds
from .analyze.waits_only.judge import judge_waits
from .collect.group_matrices import gather, gather_group
from .collect.snapshot import Snapshot, observe, snapshot
from .compat import Diagnose, diagnose_matrix
from .core.causes import COMM_SLOW, COMP_SLOW, MIXED_SLOW, Cause
from .core.diagnosis import Diagnosis, Verdict
from .core.package import EPTypeError, as_group
from .other_kernels.attach import attach
from .other_kernels.import_hook import install
from .render.figure import write_picture
from .render.terminal import report
from .storage.counter_archive import save
from .storage.loader import read_any

__all__ = [
    "COMM_SLOW",
    "COMP_SLOW",
    "MIXED_SLOW",
    "Cause",
    "Diagnose",
    "Diagnosis",
    "History",
    "Snapshot",
    "Thresholds",
    "Verdict",
    "attach",
    "diagnose_matrix",
    "gather",
    "install",
    "judge",
    "judge_waits",
    "read_any",
    "report",
    "run",
    "save",
    "snapshot",
    "write_picture",
]


def run(
    buffer: Any,
    group: Any = None,
    *,
    since: Snapshot | None = None,
    thresholds: Thresholds | None = None,
    history: History | None = None,
) -> Diagnosis | None:
    """Collective: compares the counters of all ranks, up to the operation that all have ended.

    Args:
        buffer: this rank's `deep_ep.Buffer`, with counters enabled.
        group: what the buffer was built on, unless the buffer's own is to be used.
        since: this rank's earlier snapshot; only later operations are judged then.
        thresholds: what an effect must exceed; by default according to the device.
        history: one object for all windows of a group, to find what slows everything alike.

    Returns:
        A Diagnosis on rank 0, None on the others.

    Raises:
        EPArgumentError: `since` is not an earlier snapshot of these counters, on any rank.
        EPTypeError: `buffer` is no Buffer; then this rank does not take part.
    """

    if not hasattr(buffer, "dispatch_counters"):
        raise EPTypeError(
            f"run: buffer is a {type(buffer).__name__}; it must be a deep_ep.Buffer. Pass this rank's."
        )

    def take() -> Snapshot:
        if not isinstance(since, (Snapshot, type(None))):
            raise EPTypeError(
                f"run: since is a {type(since).__name__}; it must be an earlier diagnose.snapshot(buffer). "
                "Leave it out to judge all operations."
            )
        local = observe(buffer).snapshot()
        return local if since is None else local.since(since)

    ranks = as_group(buffer.group if group is None else group)
    matrices = gather_group(ranks, take)
    return None if matrices is None else judge(matrices, thresholds, history)
