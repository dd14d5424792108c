"""Reads logs in which libraries say that they waited too long, and says what follows from them.

`verdicts` names a rank only where lines say that it did not come, or that it died first: no line may say the opposite, and it
may print no wait of its own. All else is undecided, with what is missing. Prefixes of launchers are passed over, lines that were cut
or mixed say nothing, and ranks that are counted in different ways (within a node, in the group, in a group of torch) are kept apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deep_ep.base import files
from deep_ep.errors import ranks_text
from deep_ep.hang.cause import HangCause, HangVerdict, edges_of
from deep_ep.hang.log_table import CHECKS, ROWS, LogRow
from deep_ep.hang.states import Owed, RankState
from deep_ep.hang.wording import wait_text

# DeepEP's nodes have so many ranks wherever it prints the place of a node.
_PLACES = 8
# Ranks; clauses of a sentence.
_MOST_RANKS, _MOST_CLAUSES = 1 << 16, 6
_WORTH = re.compile(
    "DeepEP|DeepGEMM|Global rank: |ProcessGroup|Watchdog caught|non-zero status|NULL value|NVSHMEM API|init failed|ibv_modify_qp|Got completion|remote peer|ismatch"
    "|join collective|monitoredBarrier|memory broadcast|RPC call|died unexpectedly|exitcode: -9|mpirun noticed|atchdog timeout"
)
# Where another message begins in the middle of a line.
_BEGINS = re.compile(
    r"(?=DeepEP (?:timeout|error|[A-Za-z]+ [A-Za-z(])|\[PG |\[Rank \d|Global rank: )"
)
# What is left of a line of the barrier whose beginning stands elsewhere. Digits fit one place alone, or a long line of
# them would be tried at each.
_TAIL = re.compile(r"[\w ]*(?:(?:= ?-?|-)\d*)?(?:, \w+ = -?\d+){0,2}\)\s*")
# A host or container, and a rank, in what a launcher or a library puts before a line.
_SOURCE = re.compile(r"\[pod/([\w.-]+)|^\s*([\w.-]*[A-Za-z][\w.-]*) +\| ")
_RANKS = {
    **{name: re.compile(rf"(?<![A-Za-z]){name}(\d{{1,4}})[\])\s]") for name in ("EP", "TP", "DP")},
    "torch": re.compile(r"\[rank(\d{1,4})\]"),
}
_EP, _NODE, _TORCH = "ranks of EP", "ranks within a node", "ranks of torch"


@dataclass(frozen=True)
class LogLine:
    """A message. It is the same one wherever in a file it stands.

    Attributes:
        row: of the table.
        fields: its numbers.
        counted: how its ranks are counted: those of lines with the same text may be compared; empty if it has none.
        rank: who waits; `None` if that is not known.
        source: of which host or container its prefix says it is; else the file.
        file, at: where it was read, and its place there.
    """

    row: LogRow
    fields: Mapping[str, str] = field(hash=False)
    counted: str
    rank: int | None
    source: str
    file: str
    at: int = field(compare=False)

    @property
    def owed(self) -> tuple[int, ...]:
        """For whom it waits, as far as the line says."""
        fields = self.fields
        if "owed" in fields:
            return tuple(map(int, fields["owed"].split(",")))
        if not {"from_node", "from_place"} & fields.keys():
            return ()
        node = int(fields.get("from_node", fields["node"]))
        return (node * _PLACES + int(fields.get("from_place", fields["place"])),)

    @property
    def has_come(self) -> bool:
        """Whether it says that the rank it names has come."""
        return self.row.numbers == "node" and int(self.fields["value"]) <= 0

    @property
    def waits(self) -> bool:
        """Whether somebody waits there."""
        return self.row.numbers in ("node", "group", "torch", "prefix")

    @property
    def says(self) -> str:
        """In words."""
        return self.row.said(self.fields)


@dataclass
class LogFile:
    """A file: its messages, each once, and whether lines are mixed in it."""

    lines: dict[LogLine, None] = field(default_factory=dict)
    is_torn: bool = False


def read_log(path: Path) -> LogFile:
    """The messages of a file of any size; none if it is no log of these libraries.

    Raises:
        ValueError: it is no regular file.
        OSError: it cannot be read.
    """
    log, torn = LogFile(), False
    for at, text in enumerate(files.lines(path)):
        log.is_torn |= torn  # the last line is not: a file may end anywhere
        if not _WORTH.search(text):
            torn = at > 0 and _TAIL.fullmatch(text) is not None
            continue
        torn, prefix = False, ""
        for piece in _BEGINS.split(text):
            for row in ROWS:
                match = row.pattern.search(piece)
                if match:
                    line = _line(row, match, prefix + piece[: match.start()], str(path), at)
                    if line is not None:
                        log.lines.setdefault(line)
                    break
            torn |= piece.startswith("DeepEP timeout") and (not match or "DeepEP" in prefix)
            prefix += piece
    return log


def _line(row: LogRow, match: re.Match[str], prefix: str, file: str, at: int) -> LogLine | None:
    fields = {name: text for name, text in match.groupdict().items() if text is not None}
    said = _SOURCE.search(prefix)
    source = next(filter(None, said.groups()), file) if said else file
    rank = int(fields["rank"]) if "rank" in fields else None
    counted = _EP if row.numbers == "group" else ""
    if "node" in fields:
        rank = int(fields["node"]) * int(fields.get("places", _PLACES)) + int(fields["place"])
    if rank is not None and rank >= _MOST_RANKS:
        return None
    if row.numbers == "node":
        counted = _NODE
    elif row.numbers == "torch" or "group" in fields:
        whole = _RANKS["torch"].search(prefix)
        if whole:
            fields["whole"] = whole[1]
        group = re.sub(r".*GUID|\s", "", fields.get("group", ""))
        counted = f"ranks of torch's group {group}" if group else _TORCH
    elif row.numbers == "prefix":
        told = ((name, pattern.search(prefix)) for name, pattern in _RANKS.items())
        for name, number in told:
            if number:
                counted, rank = f"ranks of {name}", int(number[1])
                break
    return LogLine(row, fields, counted, rank, source, file, at)


# ---- what follows


def verdicts(logs: Sequence[LogFile]) -> tuple[list[HangVerdict], list[str]]:
    """What all files say together: a verdict for each way in which ranks are counted, and notes.

    Where somebody is named, what is undecided is a note: it may follow from that.
    """
    lines = _with_groups([line for log in logs for line in log.lines])
    is_torn = any(log.is_torn for log in logs)
    death = _first_death(lines)
    if death is not None:  # what ended later may have been ended for it
        lines = [line for line in lines if "dead" not in line.fields]
    counted = dict.fromkeys(line.counted for line in lines if line.counted)
    ranks = [_Ranks(each, lines, is_torn).verdict() for each in counted]
    known = [found for found in (death, *ranks, _of_processes(lines)) if found is not None]
    named = [verdict for verdict in known if verdict.ranks]
    if not named:
        return known, []
    others = [verdict for verdict in known if not verdict.ranks]
    return named, [f"{v.buffer}: {cause.report}" for v in others for cause in v.causes]


def _with_groups(lines: Sequence[LogLine]) -> list[LogLine]:
    """The watchdog names the group of torch only in its second line of the same rank and number."""
    works = [(line.file, line.rank, line.fields.get("number")) for line in lines]
    groups = {
        work: line.counted
        for work, line in zip(works, lines)
        if line.waits and "group" in line.fields
    }
    return [
        replace(line, counted=groups.get(work, _TORCH)) if line.counted == _TORCH else line
        for work, line in zip(works, lines)
    ]


class _Ranks:
    """What lines say of ranks that are counted in the same way."""

    def __init__(self, counted: str, lines: Sequence[LogLine], is_torn: bool) -> None:
        self.counted = counted
        self.lines = [line for line in lines if line.counted == counted]
        self.is_torn = is_torn
        self.asides = [line for line in lines if line.row.numbers == "aside" and not line.counted]
        self.waits = [
            (line.rank, line)
            for line in self.lines
            if line.waits and line.rank is not None and not line.has_come
        ]
        self.waiters = {rank for rank, _ in self.waits}
        owed: dict[tuple[int, Owed, str, int], set[int]] = {}
        for rank, line in self.waits:
            at = (rank, line.row.what, line.says, 0)
            owed.setdefault(at, set()).update({*line.owed} - {rank})
        self.edges = edges_of(owed, {})
        self.owed = {rank for edge in self.edges for rank in edge.owed}
        self.elsewhere = set(self._elsewhere([line for line in lines if line.counted != counted]))
        self.claims = list(self._claims())
        self.doubts = {rank: self._doubt(rank) for rank in {rank for rank, _ in self.claims}}

    def _elsewhere(self, others: Sequence[LogLine]) -> Iterator[int]:
        """Ranks that wait somewhere else, in the numbers of these; in doubt they are the same."""
        sources = {line.source for line in self.lines}
        # Nodes of which these are, as far as their ranks are also counted otherwise in the same place.
        nodes: dict[str, set[int]] = {}
        for line in others:
            if line.rank is not None and line.source in sources:
                nodes.setdefault(line.counted, set()).add(line.rank // _PLACES)
        for line in others:
            if line.rank is None or not line.waits:
                continue
            if self.counted != _NODE:  # of torch also in the whole job, not in the group
                yield from (line.rank, int(line.fields.get("whole", line.rank)))
            elif line.rank // _PLACES in nodes.get(line.counted, {line.rank // _PLACES}):
                yield line.rank % _PLACES

    def verdict(self) -> HangVerdict | None:
        """What follows; `None` if nobody waits."""
        if not self.waits and not self.claims:
            return None
        causes = list(self._not_come()) or [self._undecided()]
        ranks = {*self.waiters, *self.owed, *self.doubts}
        names = ", ".join(sorted({line.file for line in self.lines})[:3])
        return HangVerdict(
            f"{self.counted}, {names}",
            max(ranks) + 1,
            causes=tuple(causes),
            edges=self.edges,
            missing=tuple(sorted(ranks - self.waiters)),
        )

    def _claims(self) -> Iterator[tuple[int, LogLine]]:
        """Ranks that did not come, and the line that says so."""
        for line in self.lines:
            if line.row.what == "entry" and "owed" in line.fields and not line.has_come:
                yield from ((owed, line) for owed in line.owed if owed != line.rank)
        # Who hangs in a collective of torch has completed those before; who has enqueued no more than these has not come.
        status = [line for line in self.lines if "completed" in line.fields]
        completed = {int(line.fields["completed"]): line for line in status if line.waits}
        for line in status:
            enqueued = int(line.fields["enqueued"])
            first = min((number for number in completed if number >= enqueued), default=None)
            if first is not None:
                yield int(line.fields.get("at", line.rank or 0)), completed[first]

    def _doubt(self, rank: int) -> str:
        """Why a rank cannot be named although a line says that it has not come."""
        if any(line.has_come and rank in line.owed for line in self.lines):
            return "others say that it came, so name the files of one node alone"
        if rank in self.waiters or rank in self.elsewhere:
            return "a rank of that number waits itself"
        if self.is_torn and len({line.rank for owed, line in self.claims if owed == rank}) < 2:
            return "lines are mixed, and only one says it"
        return ""

    def _not_come(self) -> Iterator[HangCause]:
        found: dict[str, list[tuple[int, LogLine]]] = {}
        for rank, line in self.claims:
            if not self.doubts[rank]:
                found.setdefault(line.says, []).append((rank, line))
        for says, named in found.items():
            yield HangCause(
                "not_come",
                tuple(
                    RankState(rank, rank + 1, process="unknown")
                    for rank in sorted({r for r, _ in named})
                ),
                name=says.partition(" ")[2],
                what="entry",
                waited_by=tuple(sorted(self.waiters)),
                check=_checks(line for _, line in named),
            )

    def _undecided(self) -> HangCause:
        said: dict[str, set[int]] = {}
        for rank, line in self.waits:
            said.setdefault(line.says, set()).add(rank)
        waits = list(said.items())[:_MOST_CLAUSES]
        report = [f"{wait_text(ranks)} {where}" for where, ranks in waits]
        for why in dict.fromkeys(self.doubts.values()):
            doubted = ranks_text(rank for rank, each in self.doubts.items() if each == why)
            report.append(f"that {doubted} did not come is not certain: {why}")
        owed = self.owed
        silent = ranks_text(owed - self.waiters) if owed - self.waiters else ""
        missing = ""
        if not owed and any(line.owed for _, line in self.waits):
            report.append("what they miss, they pass on themselves")
        elif not owed:
            report.append("the lines do not say for whom")
            missing = "Missing: the lines of all other ranks; name the files of all."
        elif silent and not self.doubts:
            report.append(f"of {silent}, for whom they wait, there is no such line")
            missing = f"Missing: the log of {silent}."
        elif not self.doubts:
            report.append("those for whom they wait do so themselves")
        ways = {
            (rank // _PLACES, waiter // _PLACES)
            for edge in self.edges
            for rank in edge.owed
            for waiter in edge.waiters
        }
        if self.counted == _EP and ways and all(source != node for source, node in ways):
            text = ", ".join(f"{source} > {node}" for source, node in sorted(ways)[:_MOST_CLAUSES])
            report.append(f"all that is missing comes over the network (nodes {text})")
        if self.is_torn and self.doubts:
            missing = "Missing: whole lines; write a file for each rank or node."
        check = (*_checks([*(line for _, line in self.waits), *self.asides]), missing)
        return HangCause(
            "undecided",
            waited_by=tuple(sorted(self.waiters)),
            report="; ".join(report),
            check=tuple(filter(None, check)),
        )


def _checks(lines: Iterable[LogLine]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(CHECKS[name] for line in lines for name in line.row.checks))


def _first_death(lines: Sequence[LogLine]) -> HangVerdict | None:
    """A process that ended before anybody printed that it waits."""
    ends = [line for line in lines if "dead" in line.fields]
    dead = min(ends, key=lambda line: line.at, default=None)
    if dead is None or any(
        line.file != dead.file or line.at < dead.at for line in lines if line.waits or line in ends
    ):
        return None
    rank, pid = int(dead.fields["dead"]), int(dead.fields.get("pid", "0")[:9])
    state = RankState(rank, rank + 1, pid=pid, process="gone")
    cause = HangCause("gone", (state,), check=_checks([dead]))
    return HangVerdict(
        f"ranks as {dead.row.library} counts them, {dead.source}", rank + 1, causes=(cause,)
    )


def _of_processes(lines: Sequence[LogLine]) -> HangVerdict | None:
    """What is said of no rank."""
    said: dict[str, LogLine] = {}
    for line in lines:
        if "dead" in line.fields:
            rank = f"rank {line.fields['dead']}, as {line.row.library} counts,"
            said[f"{rank} ended, and others waited before, or where cannot be compared"] = line
        elif line.row.numbers == "text":
            said[line.says] = line
        elif line.waits and line.rank is None and not line.counted:
            said[f"a process of {line.row.library} waits {line.says}"] = line
    if not said:
        return None
    asides = [line for line in lines if line.row.numbers == "aside" and not line.counted]
    report = "; ".join(list(said)[:_MOST_CLAUSES])
    cause = HangCause("undecided", report=report, check=_checks([*said.values(), *asides]))
    return HangVerdict("processes", 1, causes=(cause,))
