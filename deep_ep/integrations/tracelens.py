"""An extension file of TraceLens: dispatch and combine as a category of their own, with bytes and bandwidth.

    FILE=$(python -c 'import deep_ep.integrations.tracelens as t; print(t.__file__)')
    TraceLens_generate_perf_report_pytorch --profile_json_path trace.json --extension_file "$FILE"

Sheets `EP_Communication_fwd` (and `_bwd`, where forward and backward ran on different threads) have time and effective
TB/s of each operator; sheet `EP_exposed` adds how much of it nothing else hides, and what crossed which link.
The module-level names at the end are those that TraceLens looks for; it runs this file twice.
https://github.com/AMD-AGI/TraceLens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deep_ep.diagnose.trace import rank_trace, summary
from deep_ep.diagnose.trace.operations import OPERATORS, RecordedRows, sent_of

_CATEGORY = "EP_Communication"


class EPCommunication:
    """One dispatch or combine, as TraceLens asks about it. It computes nothing; its bytes are rows times their size.

    Bytes are those of the first argument: of a dispatch each token once, to however many ranks it goes, of a combine also
    rows that stay on their rank. Time contains the waiting for late ranks: TB/s is effective, not true. What the trace
    does not say has no bytes.
    """

    category = _CATEGORY
    bwd_category = _CATEGORY

    def __init__(
        self, event: Mapping[str, Any], arch: Any = None, python_path: Any = None, **kwargs: Any
    ) -> None:
        """Called once for each event."""
        self.event = event
        self.param_details = self.get_param_details(event)
        self._bytes = _said(event).num_bytes

    @staticmethod
    def get_param_details(event: Mapping[str, Any]) -> dict[str, Any]:
        """What becomes columns."""
        sent = _said(event)
        return {
            "num_tokens": sent.rows,
            "bytes_per_token": sent.row_bytes,
            "num_worst_tokens": sent.worst_tokens,
            "no_bytes_because": sent.why,
        }

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


def _said(event: Mapping[str, Any]) -> RecordedRows:
    return sent_of(event["name"], event.get("args") or {})


def sheets(tree: Any) -> dict[str, Any]:
    """The extra sheets, each a `pandas.DataFrame`: what `python -m deep_ep.diagnose trace` says of this one rank."""
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]

    header = getattr(tree, "trace_metadata", None) or {}  # older releases have none
    trace = rank_trace.condense(Path("trace"), tree.events, header)
    rows = [asdict(row) for row in summary.operators(trace)]
    return {"EP_exposed": pd.DataFrame(rows)} if rows else {}


perf_model_extension = dict.fromkeys(OPERATORS, EPCommunication)
# Of releases before operators had a registry.
dict_cat2names_extension = {_CATEGORY: list(OPERATORS)}
get_additional_dataframes_extension = sheets
