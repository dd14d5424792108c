"""A verdict in words: a line for the log, and for each cause the evidence and what to do. `_TABLE` has a row per kind."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

from deep_ep.base.text import listed, rows_of, verb
from deep_ep.errors import ranks_text
from deep_ep.hang.activity import PHRASES, ThreadActivity
from deep_ep.hang.cause import HangCause, HangVerdict, Kind, MismatchSide
from deep_ep.hang.states import CONSTRUCTION, DESTRUCTION, OPERATIONS, Frame, RankState

# Of each kind: its name | its title, in tables and where nothing can be decided | what it says of the ranks or paths that
# a cause names. Then what to do. `_words` has what stands in braces.
_TABLE = """
gone | process gone | {who} {is} dead: the process is gone{places}
Read that rank's own log first; then end the job, or build a new Buffer on a group of those that live.

ended | ended in order | {who} destroyed {its} buffer, or ended, before {operation}{places}
All ranks must make the same number of calls: see why that rank left its loop early.

stopped | process stopped | {who} {is} stopped{places}
Let {it} go on ({each:kill -CONT}), or end the job.

unreachable | host unreachable | {who} {is} on a host that cannot be reached{places}
Check that host and its links; end the job if it does not come back.

busy | process busy (holds the GIL) | {who} {is} busy: {its} process runs, and something in it does not release the GIL{places}
See what holds {its} interpreter ({each:py-spy dump --native --pid}); a C extension that takes long has to release the GIL.

not_called | has not called the operation | {who} {has} not called {call}
See what it does there: if it is only slow, warm up before the first operation or raise DEEP_EP_TIMEOUT_S; else make all ranks call the same operations.

host_in_call | host in the call, no kernel | {who} {is} {inside}
All ranks must make and destroy buffers in the same order. If they do, see where its host waits in that call; if nothing there moves, report it with the dump.

other_buffer | in another buffer | {who} {is} in {cause.elsewhere} and {has} not called {operation}
All ranks must use their buffers in the same order.

not_started | kernel has not started | {who} {has} called {operation} and {its} kernel has not started: the stream is busy, or its SMs are taken
See what runs before it on that stream and what holds the SMs: another kernel that waits for a rank, such as a collective, may not be in front of it.

not_sent | entered, has not sent | {who} {has} entered {operation} and {keeps}, although {waits} for nobody
Look at the GPU of that rank (nvidia-smi, dmesg for Xid errors); report it with the dump.

not_arrived | sent, has not arrived | {sent} were sent and did not arrive on the {paths}
Check the links between these ranks (nvidia-smi nvlink -s, ibstat, dmesg); all ranks must be able to write to all others.

circle | circle of waits for slots | {who} wait for each other's slots in {operation}
Report it with the dump: queues must never wait for each other. A larger Config, with more slots, avoids it.

mismatch | another operation, or other sizes | not all ranks called the same: {sides}
All ranks must call the same operations with the same sizes in the same order: compare the places named here.

given_up | has given the operation up | {who} {has} given up {operation}
Read the error on that rank first.

unknown | cannot be known | {who} {untold}
Look at the process on its host ({each:py-spy dump --pid}).

not_come | has not come | {who} {has} not come to {cause.name}
Read that rank's own log first.

undecided | undecided | undecided: {cause.report}
Name the logs of all ranks.
"""
TITLES: dict[Kind, str] = {}
_CLAIMS: dict[Kind, str] = {}
_ADVICE: dict[Kind, str] = {}
for _kind, *_texts in rows_of(_TABLE):
    _of = cast("Kind", _kind)
    TITLES[_of], _CLAIMS[_of], _ADVICE[_of] = _texts

# Instead of its own advice, for what a rank that has not called is seen to do.
_ADVICE_WHILE = {
    "compiling": "Compile before the first operation, on all ranks, or raise DEEP_EP_TIMEOUT_S.",
    "initialising": "Have all ranks initialise before the first operation, or raise DEEP_EP_TIMEOUT_S.",
    "importing": "Have all ranks import before the first operation, or raise DEEP_EP_TIMEOUT_S.",
    "collective": "All ranks must call collectives and operations in the same order: see who is missing in that "
    "collective.",
    "checkpoint": "Save and load at the same step on all ranks, or raise DEEP_EP_TIMEOUT_S.",
    "data": "See why that rank's data comes late; a timeout must be longer than the slowest batch.",
    "debugger": "Leave the debugger, or set the timeout to 0 while one is used.",
    "gpu": "See what runs on the GPU of that rank; it may wait for a collective that others have not called.",
}
_RAISED = "Read that rank's exception first; all ranks must leave an operation together."
_HOOK = "Call the hook that the operation returned, or Buffer.abandon_hook()."


# Of a line, and of a cause in it.
_MOST_CAUSES, _MOST_PLACES = 4, 16


def line(verdict: HangVerdict) -> str:
    """One line for the log: who is waited for, what it is, by whom, for how long. No advice."""
    if verdict.causes:
        said = [sentence(cause) for cause in verdict.causes[:_MOST_CAUSES]]
        more = len(verdict.causes) - len(said)
        return "; also: ".join(said) + (f"; and {more} more" if more else "")
    if verdict.edges:
        return f"{wait_text(verdict.waiting)}, and what for has come since, or is on its way"
    return "no rank waits"


def sentence(cause: HangCause) -> str:
    """A cause and its evidence, without a full stop."""
    claim = _CLAIMS[cause.kind].format_map(_words(cause))
    parts = [claim, *_evidence(cause), *_waiting(cause)]
    return "; ".join(part for part in parts if part)


def advice(cause: HangCause) -> str:
    """What to do about it."""
    if cause.check:
        return " ".join(cause.check)
    if cause.kind != "not_called" or cause.between:
        kind: Kind = "unknown" if cause.between else cause.kind
        return _ADVICE[kind].format_map(_words(cause))
    if any(accused.raised for accused in cause.accused):
        return _RAISED
    if cause.hook:
        return _HOOK
    return _ADVICE_WHILE.get(cause.doing.what if cause.doing else "", _ADVICE["not_called"])


def wait_text(waiters: Collection[int], owing: int = 0) -> str:
    """ "ranks 0-2 wait for it", where one owes them something; "for them", where several do."""
    whom = {0: "", 1: " for it"}.get(owing, " for them")
    return f"{ranks_text(waiters)} {verb(waiters, 'waits')}{whom}"


def doing_text(doing: ThreadActivity, whose: str = "its") -> str:
    """ "its main thread is compiling (torch/_inductor/compile_fx.py line 712, compile_fx)"."""
    thread = "main thread" if doing.thread in ("", "MainThread") else f"thread {doing.thread}"
    said = f"{whose} {thread} {PHRASES.get(doing.what, PHRASES['runs'])}"
    if doing.frame is not None:
        said += f" ({frame_text(doing.frame)})"
    if doing.user is not None and doing.user != doing.frame:
        said += f", called from {frame_text(doing.user)}"
    return said


def frame_text(frame: Frame) -> str:
    """ "torch/_inductor/compile_fx.py line 712, compile_fx": what is in front of a package is left out."""
    file = frame.file.replace("\\", "/")
    for folder in ("/site-packages/", "/dist-packages/"):
        file = file.rpartition(folder)[2]
    return f"{file} line {frame.line}, {frame.function}"


def operation_text(series: str, number: int, name: str) -> str:
    """ "operation 12 (low_latency_dispatch)", "barrier 3"."""
    if not number:
        return name or ("an operation" if series in (OPERATIONS, "") else series)
    if series in (OPERATIONS, ""):
        return f"operation {number}" + (f" ({name})" if name else "")
    if series == CONSTRUCTION:
        return _STEPS.get(number, "Buffer()")
    return "destroy()" if series == DESTRUCTION else f"{series} {number}"


# In which ranks wait for each other while a buffer is made, by the number of that exchange.
_STEPS = {2: "Buffer() (allocating memory)", 3: "Buffer() (connecting)"}


# ---- what each kind says first

# Behind what was sent from one rank to another, by hop.
OVER = {"NVLink": " over NVLink", "network": " over the network"}


def _words(cause: HangCause) -> dict[str, object]:
    """What stands in braces in the table."""
    return {
        "cause": cause,
        "who": ranks_text(cause.ranks),
        "is": verb(cause.ranks, "is"),
        "has": verb(cause.ranks, "has"),
        "its": _its(cause),
        "it": "it" if len(cause.accused) == 1 else "them",
        "operation": _operation(cause),
        "places": _places(cause),
        "each": _Each(cause),
        "call": _call(cause),
        "inside": _inside(cause),
        "keeps": f"{verb(cause.ranks, 'empties')} no slots"
        if cause.what == "slots"
        else "not sent everything",
        "waits": "it waits" if len(cause.accused) == 1 else "they wait",
        "sent": _sent(cause),
        "paths": _paths(cause),
        "sides": " while ".join(map(_side, cause.sides)),
        "untold": _untold(cause),
    }


@dataclass(frozen=True)
class _Each:
    """A command for the process of each of the accused: what stands behind the colon in the table, and the PID."""

    cause: HangCause

    def __format__(self, command: str) -> str:
        known = [accused for accused in self.cause.accused if accused.pid]
        apart = len({accused.host for accused in known}) > 1
        said = [
            f"{command} {accused.pid}"
            + (f" on host {accused.host}" if apart and accused.host else "")
            for accused in known
        ]
        return _first(said, ", ") or f"{command} PID"


def _its(cause: HangCause) -> str:
    return "its" if len(cause.accused) == 1 else "their"


def _operation(cause: HangCause) -> str:
    return operation_text(cause.series, cause.number, cause.name)


def _places(cause: HangCause) -> str:
    """ " (process 41 on host a, signal 9)": of each, if that is known."""
    known = dict.fromkeys(filter(None, map(_place, cause.accused)))
    return f" ({_first(list(known), '; ')})" if known else ""


def _place(accused: RankState) -> str:
    where = f"process {accused.pid}" if accused.pid else ""
    where += f"{' ' if where else ''}on host {accused.host}" if accused.host else ""
    return ", ".join(part for part in (where, accused.exit) if part)


def _call(cause: HangCause) -> str:
    if not cause.hook:
        return _operation(cause)
    hook = f"the receive hook of operation {cause.hook}"
    return hook if cause.hook == cause.number else f"{hook}, nor {_operation(cause)}"


def _inside(cause: HangCause) -> str:
    calls = dict.fromkeys(accused.in_call for accused in cause.accused if accused.in_call)
    if cause.series == CONSTRUCTION and set(calls) <= {"Buffer"}:
        return f"behind the others in {_operation(cause)}"
    if cause.series == DESTRUCTION and set(calls) == {"destroy"}:
        return "in destroy() of another buffer, or waits there for its own work"
    where = f"in {', '.join(calls)}()" if calls else "in a call of this package"
    if cause.series in (CONSTRUCTION, DESTRUCTION):
        has = verb(cause.ranks, "has")
        return f"{where} on the host and {has} not come to {_operation(cause)}"
    return f"{where} on the host, without a kernel for {_operation(cause)}"


def _sent(cause: HangCause) -> str:
    """ "rows in operation 12 (low_latency_dispatch)"."""
    words = {"entry": "announcements of entry", "slots": "notices of free slots"}
    what = words.get(cause.what, "rows")
    if cause.passed_on:
        what += f" of {ranks_text(cause.passed_on)}, to be passed on,"
    return f"{what} in {_operation(cause)}"


def _paths(cause: HangCause) -> str:
    ends = [f"{source} > {destination}" for source, destination in cause.paths]
    paths = "path" if len(ends) == 1 else "paths"
    return f"{paths} {_first(ends, ', ')}{OVER.get(cause.hop, '')}"


def _first(said: Sequence[str], joint: str) -> str:
    more = len(said) - _MOST_PLACES
    return joint.join(said[:_MOST_PLACES]) + (f" and {more} more" if more > 0 else "")


def _side(side: MismatchSide) -> str:
    what = operation_text(side.series, side.number, side.name)
    if side.values:
        what += f" with {', '.join(f'{name} = {value}' for name, value in side.values.items())}"
    where = f" at {frame_text(side.frame)}" if side.frame is not None else ""
    return f"{ranks_text(side.ranks)} called {what}{where}"


def _untold(cause: HangCause) -> str:
    if cause.what == "rows" and "circle" in cause.between:
        return (
            f"wait for each other's rows in {_operation(cause)}; it cannot be known whether rows were lost or each "
            "waits for another one's slots"
        )
    processes = {accused.process for accused in cause.accused}
    heard = f"{verb(cause.ranks, 'says')} nothing that decides it"
    if "silent" in processes:
        heard = f"{verb(cause.ranks, 'does')} not answer"
    if "unknown" in processes:
        heard = f"{verb(cause.ranks, 'was')} never heard of"
    choice = listed([TITLES[kind] for kind in cause.between], "or")
    return f"{heard}{_places(cause)}, and it cannot be known which it is: {choice}"


# ---- what stands behind it

_IN_PYTHON: tuple[Kind, ...] = ("busy", "not_called", "host_in_call", "other_buffer", "not_started")


def _evidence(cause: HangCause) -> list[str]:
    said, who, whose = [], ranks_text(cause.ranks), _its(cause)
    raised = dict.fromkeys(accused.raised for accused in cause.accused if accused.raised)
    if raised:
        said.append(f"{'it' if whose == 'its' else 'they'} raised {', '.join(raised)}")
    if cause.kind in _IN_PYTHON and cause.doing is not None:
        said.append(doing_text(cause.doing, whose))
    if cause.kind in ("not_called", "host_in_call") and cause.between:
        choices = [*(TITLES[kind] for kind in cause.between), "elsewhere in its program"]
        said.append(f"it cannot be known why: {listed(choices, 'or')}")
    last = sorted({accused.last for accused in cause.accused})
    behind = bool(last) and last[0] >= 0 and cause.number - last[0] > 1
    if cause.series == OPERATIONS and behind:
        said.append(
            f"the last that {who} entered was {last[0]}"
            if last[0]
            else f"{who} entered none before"
        )
    return said


def _waiting(cause: HangCause) -> list[str]:
    if cause.kind == "undecided":
        return []
    if not cause.waited_by:
        is_lost = cause.kind in ("gone", "stopped", "unreachable")
        # A log, which says what to check, may end too early to know.
        return ["nobody waits for it yet"] if is_lost and not cause.check else []
    owing = max(len(cause.accused), len(cause.paths), 1)
    if cause.kind in ("mismatch", "circle", "unknown") and set(cause.ranks) <= set(cause.waited_by):
        owing = 0
    waiters = wait_text(cause.waited_by, owing)
    return [f"{waiters}, for {cause.waited_s:.3g} s" if cause.waited_s else waiters]
