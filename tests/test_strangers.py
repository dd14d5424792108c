"""Whatever a connection sends, the thread that knows who lives goes on, and ranks find their places."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deep_ep.base.ranks import Decision, Message, RankPlace
from deep_ep.hang.inquiry import Inquiries, InquiryResult
from deep_ep.hang.states import PROCESSES, Call, RankState, Waits
from deep_ep.membership import listener, liveness
from deep_ep.membership.agreement import Arbiter
from deep_ep.membership.connection import NOT_UNDERSTOOD
from deep_ep.membership.coordinator import Coordinator
from deep_ep.membership.listener import greeting
from test_liveness import LONG_S, Native, OnlyOwn, connected

TOKEN = "0123456789abcdef" * 2
RANKS = 3
SLOW = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    coordinator.join(LONG_S)


def send(address: Any, data: bytes) -> bytes:
    """Sends it and nothing else, and returns what comes back until the other side closes."""
    with socket.create_connection(address, LONG_S) as connection:
        connection.settimeout(LONG_S)
        heard = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                heard += part
        except TimeoutError:
            raise
        except OSError:  # closed, with something unread
            pass
    return heard


def enters(coordinator: Coordinator, rank: int) -> bool:
    """Whether a rank finds its place."""
    return b"welcome" in send(coordinator.listener.address, greeting(TOKEN, rank))


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
def test_strangers_are_sent_away(coordinator: Coordinator, said: bytes) -> None:
    if not said.startswith((greeting(TOKEN, 1), greeting(TOKEN, 2))):
        assert send(coordinator.listener.address, said) == b""
    assert enters(coordinator, 1)


def test_nothing_behind_a_greeting_is_read_before_the_token_is_known(
    monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator
) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("parsed"))
    assert send(coordinator.listener.address, b'{"type":"left","closed":1}\n' * 10) == b""
    assert enters(coordinator, 1)


def test_who_says_nothing_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator
) -> None:
    monkeypatch.setattr(listener, "GREETING_TIMEOUT_S", 0.05)
    strangers = [socket.create_connection(coordinator.listener.address, LONG_S) for _ in range(3)]
    for number, stranger in enumerate(strangers):
        stranger.settimeout(LONG_S)
        stranger.sendall(TOKEN.encode()[:number])
        assert stranger.recv(1) == b""
        stranger.close()
    assert enters(coordinator, 2)


def test_who_resets_the_connection_does_no_harm(coordinator: Coordinator) -> None:
    for _ in range(20):
        connection = socket.create_connection(coordinator.listener.address, LONG_S)
        connection.sendall(b"x")
        at_once = struct.pack("ii", 1, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        connection.close()
    assert enters(coordinator, 1)


# --- behind the token -------------------------------------------------------------------------------

TYPES = [
    "report",
    "progress",
    "left",
    "back",
    "unwatched",
    "published",
    "stuck",
    "dump",
    "state",
    "seen",
    "raised",
    "exit",
    "ask_state",
    "look",
    "verdict",
    "ask",
    "decision",
    "undecided",
    "dead",
    "off",
    "welcome",
]
NUMBERS = st.one_of(st.integers(-2, 5), st.sampled_from([1 << 62, -(1 << 62), 1e300, 0.5, True]))
PLAIN = st.recursive(
    st.one_of(st.none(), NUMBERS, st.sampled_from(["", "operation", "timeout", "\x00", "\ud800"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from("ab"), inner)
    ),
    max_leaves=6,
)
CALL = Call(1, "operation", 1, "dispatch", {"hidden": 3}, ("hidden",), called_ns=5)
WAITING = Waits("operation", 7, 12.0, {"entry": (2,), "rows": (0,)})
STATE = RankState(1, RANKS, calls=(CALL,), waits=WAITING)


def changed(plain: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Plain data of which some fields are something else."""
    some = st.dictionaries(st.sampled_from(sorted(plain)), PLAIN, max_size=2)
    return some.map(lambda fields: {**plain, **fields})


STATES = st.one_of(
    changed(STATE.plain()),
    changed({**STATE.plain()["calls"][0]}).map(lambda call: {**STATE.plain(), "calls": [call]}),
    changed({**STATE.plain()["waits"]}).map(lambda waits: {**STATE.plain(), "waits": waits}),
    PLAIN,
)
KEYS = st.one_of(st.tuples(st.sampled_from(["operation", "barrier"]), NUMBERS).map(list), PLAIN)
FIELDS = {
    "key": KEYS,
    "failure": st.sampled_from(["timeout", "abandoned", "other"]) | PLAIN,
    "missing": st.lists(NUMBERS, max_size=3) | PLAIN,
    "masks": st.booleans() | PLAIN,
    "rank": NUMBERS | PLAIN,
    "round": NUMBERS | PLAIN,
    "inquiry": NUMBERS | PLAIN,
    "at": st.tuples(NUMBERS, NUMBERS, st.booleans()).map(list) | PLAIN,
    "closed": NUMBERS | PLAIN,
    "parts": st.booleans() | PLAIN,
    "text": PLAIN,
    "exit": PLAIN,
    "final": st.booleans() | PLAIN,
    "state": STATES,
    "process": st.sampled_from(PROCESSES) | PLAIN,
    "threads": PLAIN,
    "how": PLAIN,
}
MESSAGES = st.builds(
    lambda type_, fields, without: {
        key: value for key, value in {**fields, "type": type_}.items() if key not in without
    },
    st.sampled_from(TYPES) | PLAIN,
    st.fixed_dictionaries(FIELDS),
    st.sets(st.sampled_from([*FIELDS, "type"]), max_size=1),
)


class Rank0:
    """What rank 0 does with messages, in a time of its own."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []
        self.arbiter = Arbiter(RANKS, self._send, self._call_later, lambda: self._now)
        places = [RankPlace("here", rank) for rank in range(RANKS)]
        self.inquiries = Inquiries(
            places, 0, self.arbiter, self._send, self._call_later, self._tell
        )
        self._now = 0.0

    def _send(self, rank: int, message: Message) -> None:
        assert 0 <= rank < RANKS
        if message["type"] == "decision":  # what ranks do with it takes ranks that exist
            assert set(Decision.of(message).culprits) <= set(range(RANKS))

    def _call_later(self, _: float, action: Callable[[], None]) -> None:
        self._due.append(action)

    def _tell(self, result: InquiryResult) -> None:
        json.dumps(result.verdict.plain())

    def hear(self, rank: int, message: Message) -> None:
        for part in (self.arbiter, self.inquiries):
            try:
                part.handle(rank, message)
            except NOT_UNDERSTOOD:
                continue

    def pass_time(self) -> None:
        while self._due:
            self._now += 10.0
            self._due.pop(0)()
        for rank in range(RANKS):  # which is owed what was decided since it was asked
            self.hear(rank, {"type": "progress", "round": 0, "at": [0, 0, False]})


@pytest.mark.exhaustive
@given(said=st.lists(st.tuples(st.integers(0, RANKS - 1), MESSAGES), max_size=6))
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@example(
    said=[(1, {"type": "state", "inquiry": 1, "state": {**STATE.plain(), "num_ranks": 1 << 62}})]
)
@example(said=[(1, {"type": "seen", "inquiry": 1, "rank": 99, "process": "busy", "threads": []})])
@example(
    said=[(1, {"type": "report", "key": ["operation", 1], "failure": "timeout", "missing": [-9]})]
)
def test_what_a_rank_says_does_no_harm_later(said: list[tuple[int, Message]]) -> None:
    rank_0 = Rank0()
    rank_0.inquiries.ask(is_final=False)
    for rank, message in said:
        rank_0.hear(rank, message)
    rank_0.pass_time()


LINES = st.one_of(
    MESSAGES.map(lambda message: json.dumps(message).encode()),
    st.binary(max_size=20).filter(lambda data: b"\n" not in data),
    st.sampled_from(
        [
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"type":"report","key":["operation",1e999]}',
            b'{"type":"look","inquiry":1,"rank":99}',
            b'{"type":"look","inquiry":1,"rank":1e999}',
            b'{"type":"progress","round":' + b"9" * 5000 + b"}",
            b'{"type":"progress","round":NaN}',
        ]
    ),
)


@given(said=st.lists(LINES, min_size=1, max_size=3))
@SLOW
def test_no_message_of_a_rank_ends_rank_0(
    said: list[bytes], coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where dumps are asked for
    heard = send(coordinator.listener.address, greeting(TOKEN, 1) + b"\n".join(said) + b"\n")
    assert b"welcome" in heard or not heard  # nothing, where the connection was reset
    assert enters(coordinator, 2)


@given(said=st.lists(LINES, min_size=1, max_size=3))
@SLOW
def test_no_message_of_a_peer_ends_a_rank(
    said: list[bytes], three: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = three[1].member.loop
    token = loop._failover._peers._token
    send(three[1].member.address, greeting(token, 2) + b"\n".join(said) + b"\n")
    assert b"welcome" in send(three[1].member.address, greeting(token, 2))


@pytest.mark.parametrize(
    "said",
    [b"[" * 100_000, b'{"type":"dead","rank":1e999}', b'{"type":"dead"}'],
)
def test_a_rank_that_does_not_understand_rank_0_is_no_dead_one(
    said: bytes, three: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    connection = three[0].member.loop.connections[1].socket
    connection.send(said + b"\n")
    address = three[1].member.address
    assert b"welcome" in send(address, greeting(three[1].member.loop._failover._peers._token, 2))
    assert three[1].native.gone == []
    assert three[0].native.gone == []


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Three ranks that reach each other as processes do."""
    monkeypatch.setattr(liveness, "_coordinators", OnlyOwn())
    with connected(RANKS) as ranks:
        yield ranks
