"""Whatever ranks say, or files hold: there is a verdict, and it can be shown."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.cli.hang import html
from deep_ep.hang import traces, wording
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.folder import BufferDump, Folder
from deep_ep.hang.states import Call, Frame, Owed, Process, RankState, Thread, Waits
from deep_ep.hang.verdict import judge
from support.damaged import damaged

RANKS = 5
NAMES = ["low_latency_dispatch", "normal_notify", "normal_dispatch", "normal_combine", ""]
NUMBERS = st.integers(0, 4)
TEXTS = st.sampled_from(["", "x", "\x1b[2J", "\ud800", "<b>"])
FRAMES = st.builds(Frame, TEXTS, TEXTS, NUMBERS, TEXTS)
CALLS = st.builds(
    Call,
    call=NUMBERS,
    series=st.sampled_from(["operation", "operation", "barrier", ""]),
    number=NUMBERS,
    name=st.sampled_from(NAMES),
    sizes=st.dictionaries(st.sampled_from("ab"), NUMBERS),
    agreed=st.lists(st.sampled_from("abc")).map(tuple),
    called_ns=NUMBERS,
    receive_called_ns=NUMBERS,
    has_hook=st.booleans(),
    entered_ns=NUMBERS,
    sent_ns=NUMBERS,
    finished_ns=NUMBERS,
    failed=st.sampled_from(["", "", "timeout"]),
    frames=st.lists(FRAMES, max_size=2).map(tuple),
)
SOME_RANKS = st.sets(st.integers(0, RANKS - 1), min_size=1).map(lambda s: tuple(sorted(s)))
WAITS = st.builds(
    Waits,
    series=st.sampled_from(["operation", "operation", "barrier"]),
    number=NUMBERS,
    waited_s=st.floats(0, 100),
    missing=st.dictionaries(st.sampled_from(get_args(Owed)), SOME_RANKS),
)


def states_of(rank: int) -> st.SearchStrategy[RankState]:
    return st.builds(
        RankState,
        rank=st.just(rank),
        num_ranks=st.just(RANKS),
        taken_ns=NUMBERS,
        process=st.sampled_from([*get_args(Process), *["alive"] * 8]),
        raised=TEXTS,
        closed=NUMBERS,
        opened=NUMBERS,
        in_call=TEXTS,
        calls=st.lists(CALLS, max_size=4).map(tuple),
        waits=st.none() | WAITS,
        threads=st.lists(st.builds(Thread, TEXTS, st.lists(FRAMES, max_size=2).map(tuple))).map(
            tuple
        ),
        masked=st.just(()) | SOME_RANKS,
    )


GROUPS = st.tuples(*(st.none() | states_of(rank) for rank in range(RANKS))).map(
    lambda states: {state.rank: state for state in states if state is not None}
)


# Each waits for the other, and one of them has masked it.
MASKED = {
    1: RankState(1, 5, waits=Waits("barrier", 0, 0.0, {"entry": (3,)}), masked=(0, 1, 2, 3)),
    3: RankState(3, 5, waits=Waits("operation", 1, 0.0, {"entry": (1,)})),
}


@settings(deadline=None, max_examples=160)
@given(GROUPS, st.integers(0, RANKS))
@example(MASKED, 0)
def test_there_is_a_verdict(states: dict[int, RankState], ranks_per_node: int) -> None:
    verdict = judge(states, ranks_per_node, elsewhere={0: list(states.values())})
    assert HangVerdict.of(json.loads(json.dumps(verdict.plain()))) == verdict
    for cause in verdict.causes:
        assert cause.accused or cause.paths
        assert set(cause.waited_by) <= set(verdict.waiting)
        assert wording.sentence(cause)
        assert "\n" not in wording.line(verdict)
    html("title", Folder((BufferDump("buffer b", states, verdict),), (), ()))


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=100)
@given(GROUPS)
def test_states_survive_being_written(states: dict[int, RankState]) -> None:
    for state in states.values():
        assert RankState.of(json.loads(json.dumps(state.plain()))) == state


@settings(deadline=None, max_examples=25)
@given(GROUPS)
def test_there_is_a_dump(states: dict[int, RankState]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        traces.write_dump(directory, states, judge(states))


# --- files of anybody -------------------------------------------------------------------------------

CALL = Call(1, "operation", 1, "dispatch", {"hidden": 3}, ("hidden",), called_ns=5)
STATE = RankState(
    1,
    RANKS,
    calls=(CALL,),
    waits=Waits("operation", 7, 12.0, {"entry": (2,), "rows": (0,)}),
    threads=(Thread("MainThread", (Frame("step", "train.py", 3),)),),
    masked=(4,),
)
CALL_PLAIN = STATE.plain()["calls"][0]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 7)
    | st.sampled_from(["", "x", "alive", 1 << 70, 1e308, float("inf"), float("nan"), -0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


KINDS = {
    traces.STATE_FORMAT: json.loads(json.dumps(STATE.plain())),
    traces.VERDICT_FORMAT: json.loads(json.dumps(judge({1: STATE}).plain())),
}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(KINDS)).flatmap(
        lambda k: st.tuples(st.just(k), damaged(KINDS[k], lambda _: VALUES))
    ),
    st.booleans(),
)
@example(
    (traces.STATE_FORMAT, {**KINDS[traces.STATE_FORMAT], "calls": [{**CALL_PLAIN, "sizes": "x"}]}),
    False,
)
@example((traces.STATE_FORMAT, {**KINDS[traces.STATE_FORMAT], "masked": [float("inf")]}), True)
def test_files_of_any_content_are_read_or_left_out(file: tuple[str, Any], is_pickle: bool) -> None:
    kind, plain = file
    with tempfile.TemporaryDirectory() as folder:
        traces.write_dump(folder, {0: RankState(0, 1)}, judge({0: RankState(0, 1)}))
        whole = {"kind": kind, **plain} if isinstance(plain, dict) else plain
        if is_pickle:
            whole = {"version": traces.VERSION, "entries": [], "deep_ep": plain}
            Path(folder, "other_1").write_bytes(pickle.dumps(whole, 2))
        else:
            Path(folder, "other.json").write_text(json.dumps(whole))
        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["hang", folder]) == 0
            assert main(["hang", folder, "--json"]) == 0
