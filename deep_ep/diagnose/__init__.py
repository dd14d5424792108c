"""From counters to verdicts: snapshot, summarize, gather, judge, report.

    buffer.enable_counters()
    ...                                    # operations
    diagnosis = diagnose.run(buffer)       # every rank; the answer is on rank 0
    if diagnosis is not None:
        diagnose.report(diagnosis)

Rows of every matrix wait, columns are waited for.
"""

from __future__ import annotations

from typing import Any

from deep_ep.diagnose.analyze.baseline import History
from deep_ep.diagnose.analyze.engine import judge, verdicts
from deep_ep.diagnose.analyze.thresholds import Thresholds
from deep_ep.diagnose.analyze.waits_only.judge import judge_waits
from deep_ep.diagnose.collect.group_matrices import Matrices, gather, gather_group
from deep_ep.diagnose.collect.rank_summary import Summary, summarize
from deep_ep.diagnose.collect.snapshot import Snapshot, snapshot
from deep_ep.diagnose.compat import Diagnose, diagnose_matrix
from deep_ep.diagnose.core.diagnosis import (
    COMM_SLOW,
    COMP_SLOW,
    MIXED_SLOW,
    Bandwidth,
    Diagnosis,
    Event,
    Measured,
    Timeline,
    Verdict,
)
from deep_ep.diagnose.render.terminal import heatmap_svg, report, save_svg
from deep_ep.diagnose.storage.counter_archive import load, save
from deep_ep.diagnose.storage.loader import read_any
from deep_ep.errors import EPTypeError
from deep_ep.group import as_group

__all__ = [
    "COMM_SLOW",
    "COMP_SLOW",
    "MIXED_SLOW",
    "Bandwidth",
    "Diagnose",
    "Diagnosis",
    "Event",
    "History",
    "Matrices",
    "Measured",
    "Snapshot",
    "Summary",
    "Thresholds",
    "Timeline",
    "Verdict",
    "diagnose_matrix",
    "gather",
    "gather_group",
    "heatmap_svg",
    "judge",
    "judge_waits",
    "load",
    "read_any",
    "report",
    "run",
    "save",
    "save_svg",
    "snapshot",
    "summarize",
    "verdicts",
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
        local = snapshot(buffer)
        return local if since is None else local.since(since)

    ranks = as_group(buffer.group if group is None else group)
    matrices = gather_group(ranks, take)
    return None if matrices is None else judge(matrices, thresholds, history)
