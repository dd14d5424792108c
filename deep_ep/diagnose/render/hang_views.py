"""What is shown of a hang, whichever way: words, tables and pictures are made of these.

All text here is fit to be shown (`printable`): it comes from dumps, which others may have written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..core.package import Edge, HangCause, HangVerdict, hang_wording, ranks_text, torch_dumps
from ..core.package import folder as dumps
from ..core.package import rank_calls as calls
from ..core.package import states as hang_states
from ..core.printable_text import printable

# Newest operations in the table, and frames of a stack.
_ROWS, _FRAMES = 8, 12
_NOT_CALLED, _UNKNOWN = "-", "?"
# A collective can keep a rank from an operation in these ways.
_ELSEWHERE = ("not_called", "not_started")


@dataclass(frozen=True)
class Paragraph:
    """A cause: what it is, and what to do."""

    said: str
    advice: str


@dataclass(frozen=True)
class OperationRow:
    """An operation in the table.

    Attributes:
        number: of it.
        name: that all have called it by; empty where they differ.
        cells: for each column, how far these ranks are.
        differs: whether it is the first in which they are not equally far.
    """

    number: int
    name: str
    cells: tuple[str, ...]
    differs: bool


@dataclass(frozen=True)
class OperationTable:
    """The newest operations; ranks that are equally far in all of them share a column."""

    columns: tuple[tuple[int, ...], ...]
    rows: tuple[OperationRow, ...]


@dataclass(frozen=True)
class Stack:
    """A thread that looks the same on all of these ranks; innermost frame first."""

    ranks: tuple[int, ...]
    thread: str
    frames: tuple[str, ...]


@dataclass(frozen=True)
class View:
    """One buffer."""

    title: str
    verdict: HangVerdict
    paragraphs: tuple[Paragraph, ...]
    waits: tuple[str, ...]
    table: OperationTable
    stacks: tuple[Stack, ...]


def view(buffer: dumps.BufferDump) -> View:
    """All that is shown of a buffer."""
    verdict = buffer.verdict
    name = printable(verdict.buffer) or "without a name"
    paragraphs = [
        Paragraph(printable(hang_wording.sentence(cause)), printable(hang_wording.advice(cause)))
        for cause in verdict.causes
    ]
    if not paragraphs:
        paragraphs = [Paragraph(printable(hang_wording.line(verdict)), "")]
    return View(
        f"buffer {name}, {verdict.num_ranks} ranks",
        verdict,
        tuple(paragraphs),
        tuple(_waits(verdict)),
        operation_table(buffer.states, verdict.num_ranks),
        tuple(folded_stacks(buffer.states)),
    )


def collective_lines(folder: dumps.Folder) -> list[str]:
    """Torch's own story: collectives that hang, and what they have to do with our operations."""
    lines = []
    for found in folder.collectives:
        parts = [torch_dumps.sentence(found)]
        for buffer in folder.buffers:
            accused = _accused_in(buffer, found)
            name = buffer.verdict.buffer
            if accused and _all_wait(buffer, found.missing):
                parts.append(
                    f"they wait in an operation of buffer {name} for {ranks_text(accused)}, so not all ranks call "
                    "that collective and that operation in the same order"
                )
            elif accused:
                parts.append(
                    f"{ranks_text(accused)} of buffer {name} can go on only when that collective ends, so look for "
                    "its reason first"
                )
        lines.append(printable("; ".join(parts)))
    return lines


def _accused_in(buffer: dumps.BufferDump, found: torch_dumps.Hanging) -> tuple[int, ...]:
    """Ranks that have not begun our operation and are in a collective."""
    causes = [cause for cause in buffer.verdict.causes if cause.kind in _ELSEWHERE]
    accused = {rank for cause in causes for rank in cause.ranks}
    return tuple(
        rank
        for rank, state in sorted(buffer.states.items())
        if rank in accused and state.global_rank in found.waiting
    )


def _all_wait(buffer: dumps.BufferDump, global_ranks: tuple[int, ...]) -> bool:
    """Whether all of these, of which there are some, wait in our operation."""
    waiting = {buffer.states[rank].global_rank for rank in buffer.verdict.waiting}
    return bool(global_ranks) and set(global_ranks) <= waiting


# ---- who waits for whom


def _waits(verdict: HangVerdict) -> Iterable[str]:
    """Lines of a graph: ranks that wait for the same share one."""
    for waiters, edges in folded_edges(verdict):
        owed: dict[str, list[int]] = {}
        for edge in edges:
            owed.setdefault(edge.what, []).append(edge.owed)
        what = " and ".join(f"{name} of {ranks_text(ranks)}" for name, ranks in owed.items())
        at = hang_wording.operation_text(edges[0].series, edges[0].number, "")
        waited_s = max(edge.waited_s for edge in verdict.edges if edge.waiter in waiters)
        yield printable(f"{ranks_text(waiters)}  >  {what}  ({at}, {waited_s:.3g} s)")


def folded_edges(verdict: HangVerdict) -> list[tuple[tuple[int, ...], tuple[Edge, ...]]]:
    """Ranks that wait for the same in the same operation, and the edges of the first of them."""
    by_waiter: dict[int, list[Edge]] = {}
    for edge in verdict.edges:
        by_waiter.setdefault(edge.waiter, []).append(edge)
    groups: dict[tuple[tuple[object, ...], ...], list[int]] = {}
    for waiter, edges in by_waiter.items():
        key = tuple((edge.what, edge.owed, edge.series, edge.number) for edge in edges)
        groups.setdefault(key, []).append(waiter)
    return [(tuple(waiters), tuple(by_waiter[waiters[0]])) for waiters in groups.values()]


def title_of(cause: HangCause) -> str:
    """A few words for pictures."""
    return hang_wording.TITLES[cause.kind]


# ---- operations


def operation_table(states: Mapping[int, hang_states.RankState], num_ranks: int) -> OperationTable:
    """The newest operations of all ranks."""
    cells: dict[int, dict[int, tuple[str, str]]] = {}
    for rank, state in states.items():
        cells[rank] = {}
        for one in calls.numbered(state, calls.OPERATIONS):
            cells[rank][one.number] = (printable(one.call.name), _how_far(one))
    numbers = sorted({number for row in cells.values() for number in row})[-_ROWS:]
    columns: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank in range(num_ranks):
        row = cells.get(rank)
        oldest = min(row, default=0) if row else 0
        key = tuple(
            ("", _UNKNOWN) if row is None or number < oldest else row.get(number, ("", _NOT_CALLED))
            for number in numbers
        )
        columns.setdefault(key, []).append(rank)
    rows: list[OperationRow] = []
    for index, number in enumerate(numbers):
        column = [key[index] for key in columns]
        names = {name for name, _ in column if name}
        shown = tuple(f"{name} {far}".strip() if len(names) > 1 else far for name, far in column)
        known = {cell for cell in column if cell[1] != _UNKNOWN}
        differs = len(known) > 1 and not any(row.differs for row in rows)
        name = names.pop() if len(names) == 1 else ""
        rows.append(OperationRow(number, name, shown, differs))
    return OperationTable(tuple(tuple(ranks) for ranks in columns.values()), tuple(rows))


def _how_far(one: calls.NumberedCall) -> str:
    call = one.call
    if call.failed:
        return f"failed: {printable(call.failed)}"
    if call.finished_ns:
        return "done"
    if call.has_hook and call.sent_ns and not call.receive_called_ns:
        return "sent, hook not called"
    if call.sent_ns:
        return "sent"
    return "entered" if one.has_entered else "called"


# ---- stacks


def folded_stacks(states: Mapping[int, hang_states.RankState]) -> list[Stack]:
    """Each stack once, those of main threads first, what fewest ranks share first."""
    found: dict[tuple[bool, str, tuple[str, ...]], list[int]] = {}
    for rank, state in sorted(states.items()):
        for index, thread in enumerate(state.threads):
            frames = tuple(printable(hang_wording.frame_text(f)) for f in thread.frames[:_FRAMES])
            if frames:
                key = (index > 0, printable(thread.name), frames)
                found.setdefault(key, []).append(rank)
    ordered = sorted(found.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    return [Stack(tuple(ranks), name, frames) for (_, name, frames), ranks in ordered]
