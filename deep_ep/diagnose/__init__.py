"""From counters to verdicts: snapshot, gather, verdicts, report.

    buffer.enable_counters()
    ...                                    # operations
    diagnosis = diagnose.run(buffer)       # every rank; the answer is on rank 0
    if diagnosis is not None:
        diagnose.report(diagnosis)

Rows of every matrix wait, columns are waited for.
"""

from __future__ import annotations

from typing import Any

from deep_ep.diagnose.gather import Matrices, gather, gather_group
from deep_ep.diagnose.report import heatmap_svg, report, save_svg
from deep_ep.diagnose.snapshot import Snapshot, snapshot
from deep_ep.diagnose.verdict import (
    COMM_SLOW,
    COMP_SLOW,
    MIXED_SLOW,
    Diagnosis,
    Thresholds,
    Verdict,
    judge,
    verdicts,
)
from deep_ep.group import as_group

__all__ = [
    "COMM_SLOW",
    "COMP_SLOW",
    "MIXED_SLOW",
    "Diagnosis",
    "Matrices",
    "Snapshot",
    "Thresholds",
    "Verdict",
    "gather",
    "gather_group",
    "heatmap_svg",
    "judge",
    "report",
    "run",
    "save_svg",
    "snapshot",
    "verdicts",
]


def run(
    buffer: Any,
    group: Any = None,
    *,
    since: Snapshot | None = None,
    thresholds: Thresholds | None = None,
) -> Diagnosis | None:
    """Collective: compares the counters of all ranks.

    Args:
        buffer: this rank's `deep_ep.Buffer`, with counters enabled.
        group: what the buffer was built on, unless the buffer's own is to be used.
        since: this rank's earlier snapshot; only later operations are judged then.
        thresholds: what an effect must exceed; by default according to the device.

    Returns:
        A Diagnosis on rank 0, None on the others.
    """
    local = snapshot(buffer)
    if since is not None:
        local = local.since(since)
    matrices = gather_group(as_group(buffer.group if group is None else group), local)
    return None if matrices is None else judge(matrices, thresholds)
