"""What is shown of a hang, whichever way: causes with what to do, and sections of lines and tables.

Text comes from dumps, which others may have written: who shows it makes it fit for that (`printable`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deep_ep.errors import ranks_text
from deep_ep.hang import torch_dumps, wording
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.folder import BufferDump, Folder
from deep_ep.hang.states import OPERATIONS, Call, RankState, numbered

# Newest operations in the table, and frames of a stack.
_ROWS, _FRAMES = 8, 12
_NOT_CALLED, _UNKNOWN, _DONE = "-", "?", "done"
# A collective can keep a rank from an operation in these ways.
_ELSEWHERE = ("not_called", "not_started")


@dataclass(frozen=True)
class Section:
    """What stands below the causes of a buffer.

    Attributes:
        title: above it.
        lines: as they stand.
        columns, rows: or a table; its first column has numbers.
    """

    title: str
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def paragraphs(verdict: HangVerdict) -> list[tuple[str, str]]:
    """Each cause: what it is, and what to do."""
    causes = [(wording.sentence(cause), wording.advice(cause)) for cause in verdict.causes]
    return causes or [(wording.line(verdict), "")]


def sections(buffer: BufferDump) -> list[Section]:
    """What the verdict rests on, as far as there is any."""
    found = (
        Section("who waits for whom", tuple(_wait_lines(buffer.verdict))),
        operation_table(buffer.states, buffer.verdict.num_ranks),
        Section("Python stacks", tuple(_stack_lines(buffer.states))),
    )
    return [section for section in found if section.lines or section.rows]


def _wait_lines(verdict: HangVerdict) -> Iterable[str]:
    for edge in verdict.edges:
        at = wording.operation_text(edge.series, edge.number, "")
        waited = f", {edge.waited_s:.3g} s" if edge.waited_s else ""
        yield f"{ranks_text(edge.waiters)}  >  {edge.what} of {ranks_text(edge.owed)}  ({at}{waited})"


def operation_table(states: Mapping[int, RankState], num_ranks: int) -> Section:
    """The newest operations of all ranks; those that are equally far in all of them share a column.

    The name of an operation is empty where ranks call it by different ones, and stands in the cells then. A remark is
    on the first in which they are not equally far.
    """
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
        rows.append((str(number), name, *shown, "< first disagreement" if differs else ""))
    titles = ("operation", "name", *map(ranks_text, columns.values()), "")
    return Section("recent operations", columns=titles, rows=tuple(rows))


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


def _stack_lines(states: Mapping[int, RankState]) -> Iterable[str]:
    """Each stack once, innermost frame first; those of main threads first, what fewest ranks share first."""
    found: dict[tuple[bool, str, tuple[str, ...]], list[int]] = {}
    for rank, state in sorted(states.items()):
        for index, thread in enumerate(state.threads):
            frames = tuple(map(wording.frame_text, thread.frames[:_FRAMES]))
            if frames:
                found.setdefault((index > 0, thread.name, frames), []).append(rank)
    ordered = sorted(found.items(), key=lambda item: (item[0][0], len(item[1]), item[1]))
    for (_, name, frames), ranks in ordered:
        yield f"{ranks_text(ranks)}, thread {name}"
        yield from (f"  {frame}" for frame in frames)


def collective_lines(folder: Folder) -> Iterable[str]:
    """Collectives of torch that hang, and what they have to do with our operations."""
    for found in folder.collectives:
        said = torch_dumps.sentence(found)
        for buffer in folder.buffers:
            name = buffer.verdict.buffer
            accused = _accused_in(buffer, found)
            # A log says who waits, and nothing else of a rank.
            states = [buffer.states[r] for r in buffer.verdict.waiting if r in buffer.states]
            waiting = {state.global_rank for state in states}
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
