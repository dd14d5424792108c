"""`python -m deep_ep.diagnose trace`: what dispatch and combine take in traces of the torch profiler."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from ..analyze.link_limit import Links
from ..core import safe_files
from ..core.package import PHASES, EPArgumentError, printable
from ..core.quantities import number, percent
from ..render.output import standard_output
from ..render.tables import Sheet, as_page, as_table
from ..trace import merged, rank_trace, summary
from ..trace.counted import read as of_counters
from ..trace.rank_trace import RankTrace
from ..trace.summary import GroupRow, OperatorRow, PhasesRow

# Ranks that are named as the last to come; the rest is one word.
_MOST_NAMED = 3


def trace(given: argparse.Namespace) -> int:
    """Prints tables of operators, of each rank and of all together, or CSV; writes them to a page.

    Returns:
        The exit status.

    Raises:
        EPArgumentError: nothing can be read, or two files are of the same rank.
        OSError: a file cannot be read.
    """
    traces = sorted(map(rank_trace.read, _files(given.paths)), key=lambda each: each.rank)
    ranks = [each.rank for each in traces]
    for before, after in zip(traces, traces[1:]):
        if before.rank == after.rank:
            raise EPArgumentError(
                f"{before.path} and {after.path} are both of rank {before.rank}; each rank has one trace. Name files "
                "of one profile, or files whose names say `rank3`."
            )
    remarks = _join(traces, given.counters)
    if given.merge is not None:
        given.merge.mkdir(parents=True, exist_ok=True)
        for each in traces:
            merged.write(each, given.merge / each.path.name)
    rows = [row for each in traces for row in summary.operators(each)]
    together = summary.group(traces)
    if given.csv:
        _write_csv(rows)
        for remark in remarks:
            sys.stderr.write(f"note: {printable(remark)}\n")
        return 0
    sheets = [_operators(rows, given.links, is_several=len(ranks) > 1)]
    phases = [row for each in traces for row in summary.phase_rows(each)]
    if phases:
        sheets.append(_phases(phases, is_several=len(ranks) > 1))
    if together:
        sheets.append(_together(together))
    remarks += summary.remarks(traces) + summary.group_remarks(together)
    console = standard_output(given.width)
    for sheet in sheets:
        console.print(as_table(sheet))
    for remark in remarks:
        console.print(Text(f"note: {printable(remark)}", style="yellow"), soft_wrap=True)
    if given.html is not None:
        with safe_files.create(given.html) as file:
            file.write(as_page("Dispatch and combine in profiles", sheets, remarks))
        console.print(Text(f"wrote {given.html}"))
    if given.merge is not None:
        console.print(Text(f"wrote {len(traces)} traces to {given.merge}"))
    return 0


def _join(traces: Sequence[RankTrace], counters: Path | None) -> list[str]:
    """Adds what these counters know; returns what does not fit."""
    if counters is None:
        return []
    counted = of_counters(counters)
    return [
        line for each in traces for line in rank_trace.add_counted(each, counted.get(each.rank, {}))
    ]


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = (
            sorted([*path.glob("*.json"), *path.glob("*.json.gz")]) if path.is_dir() else [path]
        )
        if not inside:
            raise EPArgumentError(
                f"{path}: it has no .json and no .json.gz; expected traces of the torch profiler. Name the "
                "directory that the profiler wrote into."
            )
        found += inside
    return found


def _operators(rows: Sequence[OperatorRow], links: Links | None, *, is_several: bool) -> Sheet:
    has_links = any(row.mean_nvlink_bytes is not None for row in rows)
    by_link = ["NVLink MB", "RDMA MB"] if has_links else []
    limit = ["at the limit us", "of the limit"] if links is not None else []
    columns = ["count", "us", "of GPU time", "exposed", "MB", *by_link, "effective TB/s", *limit]
    cells = [
        [
            *_head(row, is_several=is_several),
            number(row.mean_us),
            _share(row.share),
            _share(row.exposed),
            _megabytes(row.mean_bytes),
            *map(_megabytes, (row.mean_nvlink_bytes, row.mean_rdma_bytes) if has_links else ()),
            _tbps(row.effective_tbps),
            *(_limit(row, links) if links is not None else ()),
        ]
        for row in rows
    ]
    title = "rank" if is_several else ""
    return Sheet("Dispatch and combine", [title, "operator", *columns], cells, words=(1,))


def _limit(row: OperatorRow, links: Links) -> tuple[str, str]:
    """The least time in which these links carry what the operator moves, and the share of it that was reached."""
    if row.mean_nvlink_bytes is None or row.mean_rdma_bytes is None:
        return "-", "-"
    least = links.least_us(row.mean_nvlink_bytes, row.mean_rdma_bytes)
    return number(least), _share(least / row.mean_us if row.mean_us else math.nan)


def _phases(rows: Sequence[PhasesRow], *, is_several: bool) -> Sheet:
    shown = [phase for phase in PHASES if any(row.mean_us[phase] for row in rows)]
    columns = ["count", *shown, "moving us", "true TB/s", "waits for"]
    cells = [
        [
            *_head(row, is_several=is_several),
            *(number(row.mean_us[phase]) for phase in shown),
            number(row.moving_us),
            _tbps(row.true_tbps),
            ", ".join(
                f"rank {rank} {number(us)} us"
                for rank, us in list(row.charged_us.items())[:_MOST_NAMED]
            ),
        ]
        for row in rows
    ]
    title = "rank" if is_several else ""
    last = len(columns) + 1
    return Sheet("Phases, us per call", [title, "operator", *columns], cells, words=(1, last))


def _head(row: OperatorRow | PhasesRow, *, is_several: bool) -> list[str]:
    return [str(row.rank) if is_several and row.rank >= 0 else "", row.name, str(row.count)]


def _together(rows: Sequence[GroupRow]) -> Sheet:
    columns = ["operator", "count", "waiting us", "moving us", "true TB/s", "comes last"]
    cells = [
        [
            row.name,
            str(row.count),
            number(row.waiting_us),
            number(row.moving_us),
            _tbps(row.true_tbps),
            ", ".join(f"rank {rank} {percent(part)}" for rank, part in row.last[:_MOST_NAMED]),
        ]
        for row in rows
    ]
    return Sheet("All ranks together", columns, cells, words=(0,))


def _share(part: float) -> str:
    return percent(part) if math.isfinite(part) else "-"


def _megabytes(mean_bytes: float | None) -> str:
    return "-" if mean_bytes is None else number(mean_bytes / 1e6)


def _tbps(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _write_csv(rows: Sequence[OperatorRow]) -> None:
    names = list(OperatorRow.__dataclass_fields__)
    writer = csv.DictWriter(sys.stdout, names)
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
