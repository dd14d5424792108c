"""`python -m deep_ep.diagnose trace`: what dispatch and combine take in traces of the torch profiler."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core import safe_files
from ..core.diagnosis import Diagnosis
from ..core.package import EPArgumentError, counted, printable
from ..core.quantities import number, percent
from ..core.robust_stats import median_of
from ..render import wording
from ..render.page import page
from ..render.terminal import report, standard_output
from ..storage.foreign import files_in
from ..storage.log_writer import Writer
from ..storage.record import Record
from ..trace import late_ranks, rank_trace, summary
from ..trace.arrivals import Arrivals, arrivals
from ..trace.kernels import WAITING
from ..trace.summary import KernelsRow, OperatorRow, UnknownRow
from .link_limit import Links

# Ranks that are named as the last to come; the rest is one word.
_MOST_NAMED = 3
_MOST_UNKNOWN = 10


@dataclass(frozen=True)
class _Sheet:
    """A table as text, for terminals and pages; `words` are the columns that are no numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = ()

    @property
    def numbers(self) -> list[int]:
        """The other columns."""
        return [place for place in range(len(self.columns)) if place not in self.words]


def trace(given: argparse.Namespace) -> int:
    """Prints tables of operators and kernels, of each rank and of all together, who comes last, and a sentence for a ticket.

    Or CSV, with notes on standard error. Writes tables to a page, and what was found to a record. Returns the exit status.
    """
    traces = sorted(map(rank_trace.read, _files(given.paths)), key=lambda each: each.rank)
    ranks = [each.rank for each in traces]
    if given.record is not None and len(traces) < 2:
        raise EPArgumentError(
            "--record: one trace says nothing of other ranks. Name a trace of each rank."
        )
    for one, other in zip(traces, traces[1:]):
        if one.rank == other.rank:
            raise EPArgumentError(
                f"{one.path} and {other.path} are both of rank {one.rank}; each rank has one trace. Name files "
                "of one profile, or files whose names say `rank3`."
            )
    rows = [row for each in traces for row in summary.operators(each)]
    kernels, unknown = summary.kernel_rows(traces), summary.unknown_rows(traces)
    found = arrivals(traces)
    first = _operators(rows, given.links, is_several=len(ranks) > 1)
    others = [
        _kernels(kernels),
        _unknown(unknown),
        _together(found),
        _last(found),
    ]
    sheets = [first, *(sheet for sheet in others if sheet.rows)]
    diagnosis = late_ranks.judge(found, traces) if len(traces) > 1 else None
    told = _ticket(diagnosis, found, kernels, unknown, ranks)
    remarks = summary.remarks(traces)
    if given.csv:
        console = Console(stderr=True, soft_wrap=True)
        _write_csv(rows)
    else:
        console = standard_output(given.width)
        for sheet in sheets:
            console.print(_table(sheet))
        if diagnosis is not None:
            report(diagnosis, console)
    for remark in remarks:
        console.print(Text(f"note: {printable(remark)}", style="yellow"), soft_wrap=True)
    if not given.csv:
        console.print(Text(printable(f"for a ticket: {told}")), soft_wrap=True)
    if given.html is not None:
        said = [] if diagnosis is None else wording.notes(diagnosis)
        text = page(
            "sheets.html",
            "Dispatch and combine in profiles",
            sheets=sheets,
            remarks=[told, *said, *remarks],
        )
        safe_files.write(given.html, text)
        console.print(Text(f"wrote {given.html}"))
    if given.record is not None and diagnosis is not None:
        writer = Writer(given.record, "trace")
        record = Record(diagnosis, time_s=math.nan, window=1, group="trace")
        writer.write(record, with_matrices=True)
        console.print(Text(f"wrote {writer.path}"))
    return 0


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = (
            [*files_in(path, "*.json"), *files_in(path, "*.json.gz")] if path.is_dir() else [path]
        )
        if not inside:
            raise EPArgumentError(
                f"{path}: it has no .json and no .json.gz; expected traces of the torch profiler. Name the "
                "directory that the profiler wrote into."
            )
        found += inside
    return found


def _table(sheet: _Sheet) -> Table:
    shown = Table(title=sheet.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for place, title in enumerate(sheet.columns):
        is_word = place in sheet.words
        shown.add_column(title, justify="left" if is_word else "right", overflow="fold")
    for row in sheet.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown


def _operators(rows: Sequence[OperatorRow], links: Links | None, *, is_several: bool) -> _Sheet:
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
    return _Sheet("Dispatch and combine", [title, "operator", *columns], cells, words=(1,))


def _limit(row: OperatorRow, links: Links) -> tuple[str, str]:
    """The least time in which these links carry what the operator moves, and the share of it that was reached."""
    if row.mean_nvlink_bytes is None or row.mean_rdma_bytes is None:
        return "-", "-"
    least = links.least_us(row.mean_nvlink_bytes, row.mean_rdma_bytes)
    return number(least), _share(least / row.mean_us if row.mean_us else math.nan)


def _head(row: OperatorRow, *, is_several: bool) -> list[str]:
    return [str(row.rank) if is_several and row.rank >= 0 else "", row.name, str(row.count)]


def _together(found: Sequence[Arrivals]) -> _Sheet:
    columns = ["operator", "count", "waiting us", "moving us", "true TB/s"]
    cells = [
        [
            *(each.name, str(each.count)),
            *(number(float(us.mean())) for us in (each.waiting_us, each.moving_us)),
            _tbps(each.true_tbps),
        ]
        for each in found
    ]
    return _Sheet("All ranks together", columns, cells, words=(0,))


def _kernels(rows: Sequence[KernelsRow]) -> _Sheet:
    columns = ["library", "operation", "phase", "kernels", "us each", "of the step", "exposed"]
    cells = [
        [
            *(row.library, row.operation, row.phase, str(row.count), number(row.mean_us)),
            *(_share(row.share), _share(row.exposed)),
        ]
        for row in rows
    ]
    return _Sheet("Kernels by phase", columns, cells, words=(0, 1, 2))


def _unknown(rows: Sequence[UnknownRow]) -> _Sheet:
    cells = [
        [row.name, str(row.count), number(row.mean_us), _share(row.share)]
        for row in rows[:_MOST_UNKNOWN]
    ]
    columns = ["kernel", "count", "us each", "of the step"]
    return _Sheet("Named like an exchange, and not known", columns, cells, words=(0,))


def _last(found: Sequence[Arrivals]) -> _Sheet:
    """Of each exchange the ranks that come last most often."""
    columns = ["operator", "count", "rank", "comes last", "later by us", "before"]
    cells = []
    for each in found:
        share = each.is_last.mean(axis=1)
        for place in sorted(range(len(each.ranks)), key=lambda at: -share[at])[:_MOST_NAMED]:
            if share[place]:
                later_us = median_of(each.over_median_us[place, each.is_last[place]])
                row = [each.name, str(each.count), str(each.ranks[place]), percent(share[place])]
                cells.append([*row, number(later_us), each.before(place)])
    return _Sheet("Who comes last, by the lengths of kernels", columns, cells, words=(0, 5))


def _ticket(
    diagnosis: Diagnosis | None,
    found: Sequence[Arrivals],
    kernels: Sequence[KernelsRow],
    unknown: Sequence[UnknownRow],
    ranks: Sequence[int],
) -> str:
    """One line that says what was found, to someone who has not seen the traces."""
    if not kernels:
        named = f", but {len(unknown)} kernels are named like one" if unknown else ""
        return f"no kernel of a dispatch or combine that is known is in these traces{named}."
    libraries = ", ".join(dict.fromkeys(row.library for row in kernels))
    waiting = sum(row.share for row in kernels if row.phase == WAITING)
    all_of_it = sum(row.share for row in kernels)
    text = f"{libraries}, {counted(len(ranks), 'rank')} traced: dispatch and combine take {percent(all_of_it)} of the step"
    text += (
        f", and notify and barriers, where ranks wait for each other, {percent(waiting)} of it. "
        if waiting
        else ". "
    )
    if diagnosis is None:
        return text + "Traces of all ranks tell which rank that is."
    if not diagnosis.verdicts:
        return text + " ".join(wording.headlines(diagnosis))
    causes = wording.causes(diagnosis)
    first = causes[0][0]
    text += " ".join(wording.sentence(diagnosis, verdicts) for verdicts in causes)
    for each in found:
        if each.name == first.operation and first.rank in each.ranks:
            share = each.is_last[each.ranks.index(first.rank)].mean()
            text += f" It comes last in {percent(share)} of {each.count}."
    return f"{text} {first.next_step}"


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
