"""`python -m deep_ep.diagnose show`: chooses windows, prints them, writes pages and pictures."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from ..core import quantities, rank_blocks
from ..core.diagnosis import Diagnosis
from ..core.package import EPArgumentError
from ..render.figure import write_picture
from ..render.html import write_page
from ..render.speed_profile import write_speed_profile
from ..render.terminal import report, standard_output
from ..storage.diagnosis_log import Log
from ..storage.loader import read_any
from ..storage.record import Record
from .link_limit import Links, least_us
from .watch import heading

# Exit status when a window shown has verdicts and --check was given.
VERDICTS = 3
# A page holds all its windows; a browser shows no more.
_MOST_WINDOWS = 1000


def show(given: argparse.Namespace) -> int:
    """Prints the windows asked for, and writes them to files; returns the exit status."""
    log = read_any(given.path)
    chosen, why = _choose(given, log)
    console = standard_output(given.width)
    numbers: dict[str, list[int]] = {}
    for headline in log.headlines:
        numbers.setdefault(headline.group, []).append(headline.window)
    found = False
    for index in chosen:
        record = log[index]
        found = found or bool(record.diagnosis.verdicts)
        console.print(heading(record, _position(numbers, record), why))
        report(record.diagnosis, console, with_paths=not record.block_of)
        if given.links is not None:
            _print_limits(record.diagnosis, given.links, console)
        console.print()
    for remark in log.remarks:
        console.print(Text(f"note: {remark}", style="yellow"))
    _write_files(given, log, chosen, console)
    return VERDICTS if given.check and found else 0


def _position(numbers: Mapping[str, Sequence[int]], record: Record) -> str:
    """ "window 3 of 1-7", with the group where there are several."""
    of_group = numbers[record.group]
    text = f"window {record.window}"
    if len(of_group) > 1:
        text += f" of {of_group[0]}-{of_group[-1]}"
    return text if len(numbers) == 1 else f"{text}, group {record.group}"


def _print_limits(diagnosis: Diagnosis, links: Links, console: Console) -> None:
    console.print(
        f"\nat the limit of the links, {links.nvlink:g} GB/s NVLink and {links.nic:g} GB/s NIC"
    )
    nodes = diagnosis.nodes or rank_blocks.nodes_of(diagnosis)
    for name, m in diagnosis.measured.items():
        least = least_us(m, nodes, links)
        share = quantities.percent(least / m.duration_us) if m.duration_us > 0 else "not known"
        took = quantities.microseconds(m.duration_us)
        said = f"  {name}: {quantities.microseconds(least)}, took {took}: {share} of it"
        console.print(said, markup=False)


def _choose(given: argparse.Namespace, log: Log) -> tuple[Sequence[int], str]:
    """Which records to show, and why these in words."""
    headlines = log.headlines
    places = [
        place for place, headline in enumerate(headlines) if given.group in (None, headline.group)
    ]
    if not places:
        groups = ", ".join(sorted({h.group for h in headlines})) or "; ".join(log.remarks)
        raise EPArgumentError(
            f"{given.path}: no whole window of group {given.group!r}; there are: {groups}."
            if given.group is not None
            else f"{given.path}: no whole window: {groups}"
        )
    if given.window is None and len(places) > 1:
        with_verdicts = [place for place in places if headlines[place].keys]
        if not with_verdicts:
            return places[-1:], "the last; none has a verdict"
        latest = headlines[with_verdicts[-1]]
        # Matrices are not in every record; those of the same verdicts will do, in whichever operations.
        drawn = [
            place
            for place in with_verdicts
            if headlines[place].has_matrices
            and (headlines[place].group, headlines[place].keys) == (latest.group, latest.keys)
        ]
        if drawn and drawn[-1] != with_verdicts[-1]:
            return drawn[-1:], "the last with matrices"
        return with_verdicts[-1:], "the last with a verdict"
    if given.window == "last":
        return places[-1:], ""
    if given.window in (None, "all"):
        return places, ""
    numbered = [place for place in places if str(headlines[place].window) == given.window]
    if not numbered:
        numbers = sorted({headlines[place].window for place in places})
        raise EPArgumentError(
            f"{given.path}: --window is {given.window!r}; it must be last, all, or one of the "
            f"{len(numbers)} windows from {numbers[0]} to {numbers[-1]}."
        )
    return numbered, ""


def _write_files(
    given: argparse.Namespace, log: Log, chosen: Sequence[int], console: Console
) -> None:
    if given.html is not None:
        if len(chosen) > _MOST_WINDOWS:
            raise EPArgumentError(
                f"{given.path}: --html of {len(chosen)} windows; a page has at most {_MOST_WINDOWS}. "
                "Choose with --window or --group."
            )
        write_page([_with_remarks(log, index) for index in chosen], given.html)
        console.print(Text(f"wrote {given.html}"))
    for picture in (given.png, given.svg):
        if picture is not None:
            write_picture(_with_remarks(log, chosen[-1]).diagnosis, picture)
            console.print(Text(f"wrote {picture}"))
    if given.speed_profile is not None:
        write_speed_profile([log[index] for index in chosen], given.speed_profile)
        console.print(Text(f"wrote {given.speed_profile}"))


def _with_remarks(log: Log, index: int) -> Record:
    record = log[index]
    remarks = [*record.diagnosis.remarks, *log.remarks]
    return replace(record, diagnosis=replace(record.diagnosis, remarks=remarks))
