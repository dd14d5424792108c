"""A verdict in words: a line for the log, and for each cause the evidence and what to do. `_ROWS` has a row per kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

from deep_ep.errors import ranks_text
from deep_ep.hang.activity import PHRASES, ThreadActivity
from deep_ep.hang.cause import Accused, HangCause, HangVerdict, Kind, MismatchSide
from deep_ep.hang.rank_calls import CONSTRUCTION, DESTRUCTION, OPERATIONS
from deep_ep.hang.states import Frame


@dataclass(frozen=True)
class KindRow:
    """A kind of cause in words.

    Attributes:
        title: in tables, and between what nothing can be decided.
        claim: says it of the ranks or paths that a cause names.
        advice: what to do; PID stands for the process of the first of them.
    """

    title: str
    claim: Callable[[HangCause], str]
    advice: str


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


# Of a line.
_MOST_CAUSES = 4


def line(verdict: HangVerdict) -> str:
    """One line for the log: who is waited for, what it is, by whom, for how long. No advice."""
    if verdict.causes:
        said = [sentence(cause) for cause in verdict.causes[:_MOST_CAUSES]]
        more = len(verdict.causes) - len(said)
        return "; also: ".join(said) + (f"; and {more} more" if more else "")
    if verdict.edges:
        return (
            f"{ranks_text(verdict.waiting)} {_verb(verdict.waiting, 'waits')}, and what for has come "
            "since, or is on its way"
        )
    return "no rank waits"


def sentence(cause: HangCause) -> str:
    """A cause and its evidence, without a full stop."""
    parts = [_ROWS[cause.kind].claim(cause), *_evidence(cause), *_waiting(cause)]
    return "; ".join(part for part in parts if part)


def advice(cause: HangCause) -> str:
    """What to do about it."""
    if cause.check:
        return " ".join(cause.check)
    if cause.kind != "not_called" or cause.between:
        kind: Kind = "unknown" if cause.between else cause.kind
        pid = next((accused.pid for accused in cause.accused if accused.pid), None)
        return _ROWS[kind].advice.replace("PID", str(pid) if pid else "PID")
    if any(accused.raised for accused in cause.accused):
        return _RAISED
    if cause.hook:
        return _HOOK
    return _ADVICE_WHILE.get(cause.doing.what if cause.doing else "", _ROWS["not_called"].advice)


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


def _operation(cause: HangCause) -> str:
    return operation_text(cause.series, cause.number, cause.name)


def _who(cause: HangCause) -> str:
    return ranks_text(cause.ranks)


def _verb(ranks: tuple[int, ...], verb: str) -> str:
    """The form of "is", "has" or "waits" for so many ranks."""
    return verb if len(ranks) == 1 else {"is": "are", "has": "have", "waits": "wait"}[verb]


def _process(cause: HangCause, state: str) -> str:
    return f"{_who(cause)} {_verb(cause.ranks, 'is')} {state}{_places(cause)}"


def _places(cause: HangCause) -> str:
    """ " (process 41 on host a, signal 9)": of each, if that is known."""
    known = [_place(accused) for accused in cause.accused]
    known = list(dict.fromkeys(place for place in known if place))
    return f" ({'; '.join(known)})" if known else ""


def _place(accused: Accused) -> str:
    where = f"process {accused.pid}" if accused.pid else ""
    where += f"{' ' if where else ''}on host {accused.host}" if accused.host else ""
    return ", ".join(part for part in (where, accused.exit) if part)


def _ended(cause: HangCause) -> str:
    return (
        f"{_who(cause)} destroyed {_its(cause)} buffer, or ended, before {_operation(cause)}"
        f"{_places(cause)}"
    )


def _its(cause: HangCause) -> str:
    return "its" if len(cause.accused) == 1 else "their"


def _has(cause: HangCause, what: str) -> str:
    return f"{_who(cause)} {_verb(cause.ranks, 'has')} {what}"


def _not_called(cause: HangCause) -> str:
    if cause.hook:
        said = f"not called the receive hook of operation {cause.hook}"
        if cause.hook == cause.number:
            return _has(cause, said)
        return f"{_has(cause, said)}, nor {_operation(cause)}"
    return _has(cause, f"not called {_operation(cause)}")


def _host_in_call(cause: HangCause) -> str:
    calls = dict.fromkeys(accused.in_call for accused in cause.accused if accused.in_call)
    where = f"in {', '.join(calls)}()" if calls else "in a call of this package"
    verb = _verb(cause.ranks, "is")
    if cause.series == CONSTRUCTION and set(calls) <= {"Buffer"}:
        return f"{_who(cause)} {verb} behind the others in {_operation(cause)}"
    where = f"{_who(cause)} {verb} {where} on the host"
    if cause.series in (CONSTRUCTION, DESTRUCTION):
        return f"{where} and {_verb(cause.ranks, 'has')} not come to {_operation(cause)}"
    return f"{where}, without a kernel for {_operation(cause)}"


def _not_sent(cause: HangCause) -> str:
    if cause.what == "slots":
        return _has(
            cause, f"entered {_operation(cause)} and empties no slots of {_its(cause)} queues"
        )
    who = "it waits" if len(cause.accused) == 1 else "they wait"
    return _has(
        cause, f"entered {_operation(cause)} and not sent everything, although {who} for nobody"
    )


def _not_arrived(cause: HangCause) -> str:
    ends = [f"{source} > {destination}" for source, destination in cause.paths]
    what = {"entry": "the word that a rank has entered", "slots": "the word that slots are free"}
    sent = what.get(cause.what, "rows")
    if cause.passed_on:
        sent += f" of {ranks_text(cause.passed_on)}, to be passed on,"
    return (
        f"{sent} in {_operation(cause)} {'was' if sent.startswith('the') else 'were'} sent and did not "
        f"arrive on the path{'' if len(ends) == 1 else 's'} {', '.join(ends)}"
        + {"": "", "NVLink": " over NVLink", "network": " over the network"}.get(cause.hop, "")
    )


def _circle(cause: HangCause) -> str:
    ways = " > ".join(str(rank) for rank in (*cause.circle, *cause.circle[:1]))
    return f"in {_operation(cause)} each of {_who(cause)} waits for slots of the next one: {ways}"


def _mismatch(cause: HangCause) -> str:
    said = " while ".join(_side(side) for side in cause.sides)
    return f"not all ranks called the same: {said}"


def _side(side: MismatchSide) -> str:
    what = operation_text(side.series, side.number, side.name)
    if side.values:
        what += f" with {', '.join(f'{name} = {value}' for name, value in side.values.items())}"
    where = f" at {frame_text(side.frame)}" if side.frame is not None else ""
    return f"{ranks_text(side.ranks)} called {what}{where}"


def _unknown(cause: HangCause) -> str:
    if cause.what == "rows" and "circle" in cause.between:
        return (
            f"{_who(cause)} wait for each other's rows in {_operation(cause)}; it cannot be known whether rows "
            "were lost or each waits for another one's slots"
        )
    choice = _choice([TITLES[kind] for kind in cause.between])
    silent = any(accused.process == "silent" for accused in cause.accused)
    heard = "does not answer" if silent else "says nothing that decides it"
    if any(accused.process == "unknown" for accused in cause.accused):
        heard = "was never heard of"
    heard = heard if len(cause.accused) == 1 else heard.replace("does", "do").replace("was", "were")
    return f"{_who(cause)} {heard}{_places(cause)}, and it cannot be known which it is: {choice}"


def _choice(choices: list[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)


_ROWS: Mapping[Kind, KindRow] = {
    "gone": KindRow(
        "process gone",
        lambda cause: _process(cause, "dead: the process is gone"),
        "Read that rank's own log first; then end the job, or build a new Buffer on a group of those that "
        "live.",
    ),
    "ended": KindRow(
        "ended in order",
        _ended,
        "All ranks must make the same number of calls: see why that rank left its loop early.",
    ),
    "stopped": KindRow(
        "process stopped",
        lambda cause: _process(cause, "stopped"),
        "Let it go on (kill -CONT PID), or end the job.",
    ),
    "unreachable": KindRow(
        "host unreachable",
        lambda cause: _process(cause, "on a host that cannot be reached"),
        "Check that host and its links; end the job if it does not come back.",
    ),
    "busy": KindRow(
        "process busy (holds the GIL)",
        lambda cause: (
            f"{_who(cause)} {_verb(cause.ranks, 'is')} busy: {_its(cause)} process runs, and something in it does "
            f"not release the GIL{_places(cause)}"
        ),
        "See what holds its interpreter (py-spy dump --native --pid PID); a C extension that takes long has "
        "to release the GIL.",
    ),
    "not_called": KindRow(
        "has not called the operation",
        _not_called,
        "See what it does there: if it is only slow, warm up before the first operation or raise "
        "DEEP_EP_TIMEOUT_S; else make all ranks call the same operations.",
    ),
    "host_in_call": KindRow(
        "host in the call, no kernel",
        _host_in_call,
        "See where its host waits in that call; if nothing there moves, report it with the dump.",
    ),
    "other_buffer": KindRow(
        "in another buffer",
        lambda cause: (
            f"{_who(cause)} {_verb(cause.ranks, 'is')} in {cause.elsewhere} and has not called {_operation(cause)}"
        ),
        "All ranks must use their buffers in the same order.",
    ),
    "not_started": KindRow(
        "kernel has not started",
        lambda cause: _has(
            cause,
            f"called {_operation(cause)} and {_its(cause)} kernel has not started: the stream is busy, or its "
            "SMs are taken",
        ),
        "See what runs before it on that stream and what holds the SMs: another kernel that waits for a rank,"
        " such as a collective, may not be in front of it.",
    ),
    "not_sent": KindRow(
        "entered, has not sent",
        _not_sent,
        "Look at the GPU of that rank (nvidia-smi, dmesg for Xid errors); report it with the dump.",
    ),
    "not_arrived": KindRow(
        "sent, has not arrived",
        _not_arrived,
        "Check the links between these ranks (nvidia-smi nvlink -s, ibstat, dmesg); all ranks must be able to"
        " write to all others.",
    ),
    "circle": KindRow(
        "circle of waits for slots",
        _circle,
        "Report it with the dump: queues must never wait for each other. A larger Config, with more slots, "
        "avoids it.",
    ),
    "mismatch": KindRow(
        "another operation, or other sizes",
        _mismatch,
        "All ranks must call the same operations with the same sizes in the same order: compare the places "
        "named here.",
    ),
    "given_up": KindRow(
        "has given the operation up",
        lambda cause: _has(cause, f"given up {_operation(cause)}"),
        "Read the error on that rank first.",
    ),
    "unknown": KindRow(
        "cannot be known",
        _unknown,
        "Look at the process on its host (py-spy dump --pid PID).",
    ),
    "not_come": KindRow(
        "has not come",
        lambda cause: _has(cause, f"not come to {cause.name}"),
        "Read that rank's own log first.",
    ),
    "undecided": KindRow(
        "undecided",
        lambda cause: f"undecided: {cause.report}",
        "Name the logs of all ranks.",
    ),
}
# Titles of tables, by kind.
TITLES: Mapping[Kind, str] = {kind: row.title for kind, row in _ROWS.items()}


# ---- what stands behind it

_IN_PYTHON: tuple[Kind, ...] = ("busy", "not_called", "host_in_call", "other_buffer", "not_started")


def _evidence(cause: HangCause) -> list[str]:
    said, whose = [], _its(cause)
    raised = dict.fromkeys(accused.raised for accused in cause.accused if accused.raised)
    if raised:
        said.append(f"{'it' if whose == 'its' else 'they'} raised {', '.join(raised)}")
    if cause.kind in _IN_PYTHON and cause.doing is not None:
        said.append(doing_text(cause.doing, whose))
    if cause.kind in ("not_called", "host_in_call") and cause.between:
        choices = [TITLES[kind] for kind in cause.between]
        said.append(f"it cannot be known why: {_choice([*choices, 'elsewhere in its program'])}")
    last = sorted({accused.last for accused in cause.accused})
    behind = bool(last) and last[0] >= 0 and cause.number - last[0] > 1
    if cause.series == OPERATIONS and behind:
        said.append(
            f"the last that {_who(cause)} entered was {last[0]}"
            if last[0]
            else f"{_who(cause)} entered none before"
        )
    return said


def _waiting(cause: HangCause) -> list[str]:
    if cause.kind == "undecided":
        return []
    if not cause.waited_by:
        return (
            ["nobody waits for it yet"] if cause.kind in ("gone", "stopped", "unreachable") else []
        )
    whom = "them" if len(cause.accused) > 1 or len(cause.paths) > 1 else "it"
    if cause.kind in ("mismatch", "circle", "unknown") and set(cause.ranks) <= set(cause.waited_by):
        whom = ""
    waits = _verb(cause.waited_by, "waits")
    waiters = f"{ranks_text(cause.waited_by)} {waits}{' for ' if whom else ''}{whom}"
    return [f"{waiters}, for {cause.waited_s:.3g} s" if cause.waited_s else waiters]
