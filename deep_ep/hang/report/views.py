"""What is shown of a hang, whichever way: words, tables and pictures are made of these.

Text comes from dumps, which others may have written: who shows it makes it fit for that (`printable`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deep_ep.errors import ranks_text
from deep_ep.hang import torch_dumps, wording
from deep_ep.hang.cause import Edge, HangVerdict
from deep_ep.hang.folder import BufferDump, Folder
from deep_ep.hang.states import OPERATIONS, Call, RankState, numbered

# Newest operations in the table, and frames of a stack.
_ROWS, _FRAMES = 8, 12
_NOT_CALLED, _UNKNOWN, _DONE = "-", "?", "done"
# A collective can keep a rank from an operation in these ways.
_ELSEWHERE = ("not_called", "not_started")


@dataclass(frozen=True)
class Paragraph:
    """A cause: what it is, and what to do."""

    said: str
    advice: str


@dataclass(frozen=True)
class OperationTable:
    """The newest operations; ranks that are equally far in all of them share a column.

    Attributes:
        titles: of the number, the name, each column, and a remark.
        rows: an operation each, a text for each title. The name is empty where ranks call it by different ones; the
            remark is on the first in which they are not equally far.
    """

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Stack:
    """A thread that looks the same on all of these ranks; innermost frame first."""

    ranks: tuple[int, ...]
    thread: str
    frames: tuple[str, ...]

    @property
    def title(self) -> str:
        """ "ranks 0-2, thread MainThread"."""
        return f"{ranks_text(self.ranks)}, thread {self.thread}"

    @property
    def lines(self) -> list[str]:
        """The title, and below it the frames."""
        return [self.title, *(f"  {frame}" for frame in self.frames)]


@dataclass(frozen=True)
class View:
    """One buffer."""

    title: str
    verdict: HangVerdict
    paragraphs: tuple[Paragraph, ...]
    waits: tuple[str, ...]
    table: OperationTable
    stacks: tuple[Stack, ...]


@dataclass(frozen=True)
class Report:
    """All that is shown of a folder of dumps; collectives are torch's own story."""

    buffers: tuple[View, ...]
    collectives: tuple[str, ...]
    remarks: tuple[str, ...]


def report(folder: Folder) -> Report:
    """All that is shown of these dumps."""
    buffers = tuple(map(view, folder.buffers))
    return Report(buffers, tuple(_collective_lines(folder)), tuple(folder.remarks))


def view(buffer: BufferDump) -> View:
    """All that is shown of a buffer."""
    verdict = buffer.verdict
    causes = [Paragraph(wording.sentence(c), wording.advice(c)) for c in verdict.causes]
    return View(
        buffer.title or f"buffer {verdict.buffer or 'without a name'}, {verdict.num_ranks} ranks",
        verdict,
        tuple(causes or [Paragraph(wording.line(verdict), "")]),
        tuple(_waits(verdict)),
        operation_table(buffer.states, verdict.num_ranks),
        tuple(folded_stacks(buffer.states)),
    )


def _collective_lines(folder: Folder) -> Iterable[str]:
    """Collectives that hang, and what they have to do with our operations."""
    for found in folder.collectives:
        said = torch_dumps.sentence(found)
        for buffer in folder.buffers:
            name = buffer.verdict.buffer
            accused = _accused_in(buffer, found)
            waiting = {buffer.states[rank].global_rank for rank in buffer.verdict.waiting}
            if accused and found.missing and waiting.issuperset(found.missing):
                said += (
                    f"; they wait in an operation of buffer {name} for {ranks_text(accused)}, so not all ranks call "
                    "that collective and that operation in the same order"
                )
            elif accused:
                said += (
                    f"; {ranks_text(accused)} of buffer {name} can go on only when that collective ends, so look for "
                    "its reason first"
                )
        yield said


def _accused_in(buffer: BufferDump, found: torch_dumps.Hanging) -> tuple[int, ...]:
    """Ranks that have not begun our operation and are in a collective."""
    causes = [cause for cause in buffer.verdict.causes if cause.kind in _ELSEWHERE]
    accused = {rank for cause in causes for rank in cause.ranks}
    return tuple(
        rank
        for rank, state in sorted(buffer.states.items())
        if rank in accused and state.global_rank in found.waiting
    )


def _waits(verdict: HangVerdict) -> Iterable[str]:
    """Who waits for whom: ranks that wait for the same share a line."""
    for waiters, edges in folded_edges(verdict):
        owed: dict[str, list[int]] = {}
        for edge in edges:
            owed.setdefault(edge.what, []).extend(edge.owed)
        what = " and ".join(f"{name} of {ranks_text(ranks)}" for name, ranks in owed.items())
        at = wording.operation_text(edges[0].series, edges[0].number, "")
        waited_s = max(edge.waited_s for edge in verdict.edges if edge.waiter in waiters)
        waited = f", {waited_s:.3g} s" if waited_s else ""
        yield f"{ranks_text(waiters)}  >  {what}  ({at}{waited})"


def folded_edges(verdict: HangVerdict) -> list[tuple[tuple[int, ...], tuple[Edge, ...]]]:
    """Ranks that wait for the same in the same operation, and the edges of the first of them."""
    by_waiter: dict[int, list[Edge]] = {}
    for edge in verdict.edges:
        by_waiter.setdefault(edge.waiter, []).append(edge)
    groups: dict[tuple[object, ...], list[int]] = {}
    for waiter, edges in by_waiter.items():
        key = tuple((edge.what, edge.owed, edge.series, edge.number) for edge in edges)
        groups.setdefault(key, []).append(waiter)
    return [(tuple(waiters), tuple(by_waiter[waiters[0]])) for waiters in groups.values()]


def operation_table(states: Mapping[int, RankState], num_ranks: int) -> OperationTable:
    """The newest operations of all ranks."""
    known = {
        rank: {n: (call.name, _how_far(call)) for n, call in numbered(state, OPERATIONS)}
        for rank, state in states.items()
    }
    # The last word of a rank that does not answer may be older than the rings of the others. It has been in all that
    # they finished without masks, and of what comes behind that nothing is known.
    over = {
        number: cell
        for rank, state in states.items()
        if not state.masked
        for number, cell in known[rank].items()
        if cell[1] == _DONE
    }
    behind = dict.fromkeys(range(num_ranks), _NOT_CALLED)
    for rank, state in states.items():
        if state.process not in ("alive", "ended"):
            known[rank].update(over)
            behind[rank] = _UNKNOWN
    numbers = sorted({number for of_rank in known.values() for number in of_rank})[-_ROWS:]
    columns: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank in range(num_ranks):
        column = tuple(_name_and_state(known.get(rank), number, behind[rank]) for number in numbers)
        columns.setdefault(column, []).append(rank)
    rows: list[tuple[str, ...]] = []
    for number, *cells in zip(numbers, *columns):
        names = {name for name, _ in cells if name}
        name = names.pop() if len(names) == 1 else ""
        shown = tuple(far if name else f"{called} {far}".strip() for called, far in cells)
        known_cells = {cell for cell in cells if cell[1] != _UNKNOWN}
        differs = len(known_cells) > 1 and not any(row[-1] for row in rows)
        rows.append((str(number), name, *shown, "first disagreement" if differs else ""))
    titles = ("operation", "name", *map(ranks_text, columns.values()), "")
    return OperationTable(titles, tuple(rows))


def _name_and_state(
    known: Mapping[int, tuple[str, str]] | None, number: int, behind: str
) -> tuple[str, str]:
    """Of one operation of one rank, of which a ring holds the newest; `behind` is what is said of what it does not hold."""
    if known is None or number < min(known, default=0):
        return "", _UNKNOWN
    return known.get(number, ("", behind))


def _how_far(call: Call) -> str:
    if call.failed:
        return f"failed: {call.failed}"
    if call.finished_ns:
        return _DONE
    if call.has_hook and call.sent_ns and not call.receive_called_ns:
        return "sent, hook not called"
    if call.sent_ns:
        return "sent"
    return "entered" if call.has_entered else "called"


def folded_stacks(states: Mapping[int, RankState]) -> list[Stack]:
    """Each stack once, those of main threads first, what fewest ranks share first."""
    found: dict[tuple[bool, str, tuple[str, ...]], list[int]] = {}
    for rank, state in sorted(states.items()):
        for index, thread in enumerate(state.threads):
            frames = tuple(map(wording.frame_text, thread.frames[:_FRAMES]))
            if frames:
                found.setdefault((index > 0, thread.name, frames), []).append(rank)
    ordered = sorted(found.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    return [Stack(tuple(ranks), name, frames) for (_, name, frames), ranks in ordered]
