"""An extension file of TraceLens: dispatch and combine as a category of their own, with bytes and bandwidth.

    FILE=$(python -c 'import deep_ep.integrations.tracelens as t; print(t.__file__)')
    TraceLens_generate_perf_report_pytorch --profile_json_path trace.json --extension_file "$FILE"

Sheets `EP_Communication_fwd` (and `_bwd`, where forward and backward ran on different threads) have time and effective
TB/s of each operator; sheet `EP_exposed` adds how much of it nothing else hides, and what crossed which link. Of traces
that `python -m deep_ep.diagnose trace --counters ... --merge ...` has written, `EP_phases` has the phases and true TB/s.
The module-level names at the end are those that TraceLens looks for; it runs this file twice.
https://github.com/AMD-AGI/TraceLens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deep_ep.diagnose.trace import rank_trace, summary
from deep_ep.diagnose.trace.counted import facts_of
from deep_ep.diagnose.trace.operations import OPERATORS, LinkBytes, RecordedRows, sent_of
from deep_ep.diagnose.trace.summary import PhasesRow

_CATEGORY = "EP_Communication"


class EPCommunication:
    """One dispatch or combine, as TraceLens asks about it. It computes nothing; its bytes are rows times their size.

    Bytes are what crosses links where the trace has been merged with what is known of it. Otherwise they are those of the
    first argument: of a dispatch each token once, to however many ranks it goes, of a combine also rows that stay on their
    rank. Time contains the waiting for late ranks: TB/s is effective, not true. What the trace does not say has no bytes.
    """

    category = _CATEGORY
    bwd_category = _CATEGORY

    def __init__(
        self, event: Mapping[str, Any], arch: Any = None, python_path: Any = None, **kwargs: Any
    ) -> None:
        """Called once for each event."""
        self.event = event
        sent, links = _said(event)
        self.param_details = _details(sent, links)
        self._bytes = sent.num_bytes if links is None else links.crossing

    @staticmethod
    def get_param_details(event: Mapping[str, Any]) -> dict[str, Any]:
        """What becomes columns."""
        return _details(*_said(event))

    def flops(self) -> int:
        """None are executed."""
        return 0

    def bytes(self) -> int | None:
        """`None` where the trace does not say."""
        return self._bytes

    def flops_bwd(self) -> int:
        """None are executed."""
        return 0

    def bytes_bwd(self, bytes_per_element: int | None = None) -> int | None:
        """Gradients take the way back."""
        return self._bytes

    def get_maf_type(self) -> None:
        """Of no computation."""

    def get_compute_precision(self) -> None:
        """Of no computation."""


def _said(event: Mapping[str, Any]) -> tuple[RecordedRows, LinkBytes | None]:
    arguments = event.get("args") or {}
    return sent_of(event["name"], arguments), facts_of(arguments, event["name"]).links


def _details(sent: RecordedRows, links: LinkBytes | None) -> dict[str, Any]:
    return {
        "num_tokens": sent.rows,
        "bytes_per_token": sent.row_bytes,
        "num_worst_tokens": sent.worst_tokens,
        "local_bytes": None if links is None else links.local,
        "nvlink_bytes": None if links is None else links.nvlink,
        "rdma_bytes": None if links is None else links.rdma,
        "no_bytes_because": sent.why if links is None else "",
    }


def sheets(tree: Any) -> dict[str, Any]:
    """The extra sheets, each a `pandas.DataFrame`: what `python -m deep_ep.diagnose trace` says of this one rank."""
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    header = getattr(tree, "trace_metadata", None) or {}  # older releases have none
    trace = rank_trace.condense(Path("trace"), tree.events, header)
    rows = {
        "EP_exposed": [asdict(row) for row in summary.operators(trace)],
        "EP_phases": [_flat(row) for row in summary.phase_rows(trace)],
    }
    return {name: pd.DataFrame(found) for name, found in rows.items() if found}


def _flat(row: PhasesRow) -> dict[str, Any]:
    of_phases = {f"{phase}_us": us for phase, us in row.mean_us.items()}
    waits_for = next(iter(row.charged_us), None)
    return {
        "rank": row.rank,
        "name": row.name,
        "count": row.count,
        **of_phases,
        "moving_us": row.moving_us,
        "true_tbps": row.true_tbps,
        "waits_most_for_rank": waits_for,
    }


perf_model_extension = dict.fromkeys(OPERATORS, EPCommunication)
# Of releases before operators had a registry.
dict_cat2names_extension = {_CATEGORY: list(OPERATORS)}
get_additional_dataframes_extension = sheets
