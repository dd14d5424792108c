"""Whatever a connection sends, the thread that knows who lives goes on, and ranks find their places."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deep_ep.base import codec
from deep_ep.base.ranks import Decision, Key, Progress, RankPlace
from deep_ep.hang import messages
from deep_ep.hang.inquiry import Inquiries
from deep_ep.hang.messages import (
    Dispatcher,
    FailureReport,
    InquiryVerdict,
    Message,
    ProgressAnswer,
    StateReport,
)
from deep_ep.hang.states import Call, Frame, RankState, Thread, Waits
from deep_ep.hang.verdict import judge
from deep_ep.membership import channel, liveness
from deep_ep.membership.agreement import Arbiter
from deep_ep.membership.channel import greeting
from deep_ep.membership.connection import NOT_UNDERSTOOD
from deep_ep.membership.coordinator import Coordinator
from membership.connected_ranks import Native, connected, heard_until_closed
from support.damaged import damaged
from support.launch import HANG_S
from support.manual_time import ManualTime
from support.waiting import eventually

TOKEN = "0123456789abcdef" * 2
RANKS = 3
SLOW = settings(
    deadline=None, max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    coordinator = Coordinator(
        [RankPlace("here", rank) for rank in range(RANKS)], 0, TOKEN, "127.0.0.1"
    )
    coordinator.start()
    native: Any = Native()
    coordinator.take_in(liveness.Liveness(0, native))  # which keeps it going
    yield coordinator
    coordinator.post(coordinator.leave_all)
    coordinator.join(HANG_S)


def send(address: Any, data: bytes) -> bytes:
    """Sends it and nothing else, and returns what comes back until the other side closes."""
    with socket.create_connection(address, HANG_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except socket.timeout:
            raise
        except OSError:  # the other side has closed
            pass
        return heard_until_closed(connection)


def enters(coordinator: Coordinator, rank: int) -> bool:
    """Whether a rank finds its place."""
    return b"Welcome" in send(coordinator.channel.address, greeting(TOKEN, rank))


# --- before the token -------------------------------------------------------------------------------

PARTS = st.sampled_from(
    [
        TOKEN.encode(),
        TOKEN.encode()[:-1],
        TOKEN.upper().encode(),
        b"00000001",
        b"00000000",
        b"-0000001",
        b"00000003",
        b'{"token":"x","rank":1e999}\n',
        b"[" * 3000,
        b"\n",
        b"\x00",
        b"\xff\xfe",
    ]
)
STRANGE = st.lists(st.one_of(PARTS, st.binary(max_size=60)), max_size=4).map(b"".join)


@given(said=STRANGE)
@SLOW
@example(said=b'{"token":"x","rank":1e999}\n')
@example(said=TOKEN.upper().encode() + b"00000001")
@example(said=b"[" * 200_000 + b"\n")
@example(said=TOKEN.encode() + b"\xd9\xa1" * 4)  # digits, but of another script
@example(said=TOKEN.encode() + b"-0000001")
@example(said=greeting(TOKEN, 0))
@example(said=greeting(TOKEN, RANKS))
@example(said=greeting("0" * len(TOKEN), 1))
def test_strangers_are_sent_away(coordinator: Coordinator, said: bytes) -> None:
    if not said.startswith((greeting(TOKEN, 1), greeting(TOKEN, 2))):
        assert send(coordinator.channel.address, said) == b""
    assert enters(coordinator, 1)


def test_nothing_behind_a_greeting_is_read_before_the_token_is_known(
    monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator
) -> None:
    monkeypatch.setattr(codec, "loads", lambda _: pytest.fail("parsed"))
    assert send(coordinator.channel.address, b'{"type":"Unmasked"}\n' * 10) == b""
    assert enters(coordinator, 1)


def test_who_says_nothing_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator
) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(channel, "GREETING_TIMEOUT_S", 0.05)
        address = coordinator.channel.address
        strangers = [socket.create_connection(address, HANG_S) for _ in range(3)]
        for number, stranger in enumerate(strangers):
            stranger.sendall(TOKEN.encode()[:number])
        for stranger in strangers:
            assert heard_until_closed(stranger) == b""
            stranger.close()
    assert enters(coordinator, 2)


def test_nobody_can_connect_once_all_ranks_have(coordinator: Coordinator) -> None:
    server: Any = coordinator.channel.server
    with socket.create_connection(coordinator.channel.address, HANG_S) as member:
        member.sendall(greeting(TOKEN, 1))
        assert json.loads(member.recv(100)) == {"type": "Welcome"}
        coordinator.post(lambda: coordinator.complete([2]))
        assert eventually(lambda: server.fileno() == -1)


def test_without_descriptors_the_thread_sleeps_and_tries_again(
    monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator
) -> None:
    tries: list[socket.socket] = []

    def accept(server: socket.socket) -> Any:
        tries.append(server)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("deep_ep.membership.loop._PAUSE_S", 0.1)
        patch.setattr(socket.socket, "accept", accept)
        begin = time.monotonic()
        socket.create_connection(coordinator.channel.address, HANG_S).close()
        assert eventually(lambda: len(tries) >= 3)
        num_tries = len(tries)
        assert num_tries <= (time.monotonic() - begin) / 0.1 + 1
    assert enters(coordinator, 1)


def test_who_resets_the_connection_does_no_harm(coordinator: Coordinator) -> None:
    for _ in range(20):
        connection = socket.create_connection(coordinator.channel.address, HANG_S)
        connection.sendall(b"x")
        at_once = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        connection.close()
    assert enters(coordinator, 1)


# --- behind the token -------------------------------------------------------------------------------

INTEGERS = st.integers(-2, 5) | st.sampled_from([1 << 62, -(1 << 62)])
WORDS = st.sampled_from(["", "operation", "abandoned", "silent", "gone", "\x00", "\ud800"])
NUMBERS = INTEGERS | st.sampled_from([1e300, 0.5, True])
OTHERS: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: INTEGERS,
    float: INTEGERS,
    str: WORDS,
    type(None): st.none(),
}
PLAIN = st.recursive(
    st.one_of(st.none(), NUMBERS, WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("ab"), inner)
    ),
    max_leaves=6,
)
CALL = Call(1, "operation", 1, "dispatch", {"hidden": 3}, ("hidden",), called_ns=5)
WAITING = Waits("operation", 7, 12.0, {"entry": (2,), "rows": (0,)})
STACK = (Thread("main", (Frame("train", "train.py", 3),)),)
STATE = RankState(1, RANKS, calls=(CALL,), waits=WAITING, threads=STACK)
OPERATION = Key("operation", 1)
# A message of each class, as rank 1 may say or hear it.
WHOLE: tuple[Message, ...] = (
    FailureReport(OPERATION, "timeout", (2,)),
    ProgressAnswer(1, Progress(0, 1, True)),
    messages.Unmasked(),
    messages.InquiryRequest(False, "dumps"),
    StateReport(1, STATE),
    messages.RankLeft(2, 1),
    messages.RankRaised(2, "ValueError"),
    messages.MonitoringFailed(),
    messages.Welcome(),
    messages.AskProgress(1),
    Decision(
        OPERATION, {2: "process"}, {0: 1}, (1,), {0: Progress(1, 0, False)}, {1: 1}, ((0, 1),)
    ),
    messages.Undecided(OPERATION),
    messages.RankDied(2, "process"),
    messages.AskState(1, 2),
    InquiryVerdict(judge({1: STATE}), {"dumps": ("1.hang.json",)}),
)


@st.composite
def varied(draw: st.DrawFn, plain: Any) -> Any:
    """Plain data of which now and then a value is another one of its type."""
    if isinstance(plain, dict):
        return {key: draw(varied(value)) for key, value in plain.items()}
    is_other = draw(st.integers(0, 7)) == 7
    if isinstance(plain, list):
        of = draw(st.lists(st.sampled_from(plain or [0]), max_size=3)) if is_other else plain
        return [draw(varied(value)) for value in of]
    return draw(OTHERS[type(plain)]) if is_other else plain


def unlike(value: Any) -> st.SearchStrategy[Any]:
    """Anything; of an object, the same with a field less or more."""
    if not isinstance(value, dict):
        return PLAIN
    less = [{key: value[key] for key in value if key != gone} for gone in value]
    return PLAIN | st.sampled_from([*less, {**value, "more": 0}])


@st.composite
def lines_of(
    draw: st.DrawFn, whole: Sequence[Message], change: Callable[[Any], st.SearchStrategy[Any]]
) -> bytes:
    """What is sent of one of these whose fields are changed."""
    plain = json.loads(messages.encode(draw(st.sampled_from(whole))))
    class_ = {"type": plain.pop("type")}
    fields = draw(change(plain))
    return json.dumps({**class_, **fields} if isinstance(fields, dict) else fields).encode()


def spoiled(plain: Any) -> st.SearchStrategy[Any]:
    return damaged(plain, unlike)


LINES = st.one_of(
    lines_of(WHOLE, varied),
    lines_of(WHOLE, spoiled),
    st.binary(max_size=20).filter(lambda data: b"\n" not in data),
    st.sampled_from(
        [
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"type":"FailureReport","key":{"series":"operation","op":1e999}}',
            b"{}",
            b'{"type":[]}',
            b'{"type":"Unmasked","more":0}',
            b'{"type":"AskState","inquiry":1,"rank":99}',
            b'{"type":"AskState","inquiry":1,"rank":1e999}',
            b'{"type":"ProgressAnswer","round":' + b"9" * 5000 + b"}",
            b'{"type":"ProgressAnswer","round":NaN}',
        ]
    ),
)


def test_messages_are_changed_from_one_of_each_class() -> None:
    assert [type(message) for message in WHOLE] == list(messages.CLASSES.values())
    assert [messages.decode(messages.encode(message)) for message in WHOLE] == list(WHOLE)


class Rank0(ManualTime):
    """What rank 0 does with messages, in a time of its own.

    Attributes:
        handled: the classes of messages that it knows.
        taken: what was understood, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arbiter = Arbiter(RANKS, self._send, self.call_later, lambda: self.now)
        places = [RankPlace("here", rank) for rank in range(RANKS)]
        self.inquiries = Inquiries(
            *(places, 0, self.arbiter, self._send, self.call_later),
            aside=lambda action, then: then(action()),
        )
        self.inquiries.announce = self._announce  # type: ignore[method-assign]
        handlers = (self.arbiter.handlers(), self.inquiries.handlers())
        self.handled = {class_ for each in handlers for class_ in each}
        self.taken: list[Message] = []
        self._take = Dispatcher(*handlers)

    def _send(self, rank: int, message: Message) -> None:
        assert 0 <= rank < RANKS
        messages.encode(message)
        if isinstance(message, Decision):  # what ranks do with it takes ranks that exist
            assert set(message.culprits) <= set(range(RANKS))

    def _announce(self, *ended: Any) -> InquiryVerdict:
        return InquiryVerdict(ended[-1], {})

    def hear(self, rank: int, line: bytes) -> None:
        with contextlib.suppress(*NOT_UNDERSTOOD):
            message = messages.decode(line)
            self._take(rank, message)
            self.taken.append(message)

    def end(self) -> None:
        self.pass_time(60.0)
        for rank in range(RANKS):  # which is owed what was decided since it was asked
            self._take(rank, ProgressAnswer(0, Progress(0, 0, False)))


@pytest.mark.exhaustive
def test_what_a_rank_says_does_no_harm_later() -> None:
    handled = Rank0().handled
    understood = [message for message in WHOLE if type(message) in handled]
    states = [StateReport(1, STATE)]  # of which most can be wrong
    lines = lines_of(understood, varied) | lines_of(states, varied) | lines_of(WHOLE, spoiled)
    ranks = st.just(1) | st.integers(0, RANKS - 1)
    taken: list[Message] = []

    @given(said=st.lists(st.tuples(ranks, lines), max_size=6))
    @settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
    @example(said=[(1, messages.encode(StateReport(1, replace(STATE, num_ranks=1 << 16))))])
    @example(said=[(1, messages.encode(StateReport(1, replace(STATE, rank=RANKS))))])
    @example(said=[(1, messages.encode(StateReport(1, replace(STATE, rank=2))))])
    @example(said=[(1, messages.encode(FailureReport(OPERATION, "timeout", (-9,))))])
    def says(said: list[tuple[int, bytes]]) -> None:
        rank_0 = Rank0()
        rank_0.inquiries.ask(is_final=False)
        for rank, line in said:
            rank_0.hear(rank, line)
        rank_0.end()
        taken.extend(rank_0.taken)

    says()
    assert {type(message) for message in taken} == handled
    states_taken = [message.state for message in taken if hasattr(message, "state")]
    assert sum(state != STATE for state in states_taken) > len(states_taken) / 2


@given(said=st.lists(LINES, min_size=1, max_size=3))
@SLOW
def test_no_message_of_a_rank_ends_rank_0(
    said: list[bytes], coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where dumps are asked for
    heard = send(coordinator.channel.address, greeting(TOKEN, 1) + b"\n".join(said) + b"\n")
    assert b"Welcome" in heard or not heard  # nothing, where the connection was reset
    assert enters(coordinator, 2)


@given(said=st.lists(LINES, min_size=1, max_size=3))
@SLOW
def test_no_message_of_a_peer_ends_a_rank(
    said: list[bytes], three: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = three[1].member.endpoint
    token = loop.channel._token
    send(three[1].member.address, greeting(token, 2) + b"\n".join(said) + b"\n")
    assert b"Welcome" in send(three[1].member.address, greeting(token, 2))


@pytest.mark.parametrize(
    "said",
    [b"[" * 100_000, b'{"type":"RankDied","rank":1e999}', b'{"type":"RankDied"}'],
)
def test_a_rank_that_does_not_understand_rank_0_is_no_dead_one(
    said: bytes, three: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    connection = three[0].member.endpoint.channel.connections[1].socket
    connection.send(said + b"\n")
    address = three[1].member.address
    assert b"Welcome" in send(address, greeting(three[1].member.endpoint.channel._token, 2))
    assert three[1].native.gone == []
    assert three[0].native.gone == []


@pytest.fixture
def three() -> Iterator[list[Any]]:
    """Three ranks that reach each other as processes do."""
    with connected(RANKS) as ranks:
        yield ranks
