"""The connections that tell who lives: what they survive, whom they believe, what they cost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deep_ep.base.ranks import Progress, RankPlace
from deep_ep.hang.hang_watch import HangWatch
from deep_ep.hang.messages import (
    AskState,
    RankDied,
    RankLeft,
    RankRaised,
    StateReport,
    Unmasked,
    Welcome,
    encode,
)
from deep_ep.hang.states import RankState
from deep_ep.membership import agreement, liveness, rendezvous
from deep_ep.membership.connection import Connection, ConnectionClosed
from deep_ep.membership.coordinator import CoordinatorClient
from membership.connected_ranks import (
    TIMEOUT,
    Buffer,
    Native,
    Rank,
    connected,
    our_threads,
    start,
)
from support.launch import HANG_S
from support.waiting import eventually


class FileGroup:
    """Two processes in two network namespaces, which share a folder."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.size = rank, 2
        self._folder, self._number = Path(folder), 0

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._number += 1
        paths = [self._folder / f"{self._number}.{rank}" for rank in range(self.size)]
        draft = paths[self.rank].with_suffix(".draft")
        draft.write_text(json.dumps(obj))
        draft.rename(paths[self.rank])
        assert eventually(lambda: all(path.exists() for path in paths))
        return [json.loads(path.read_text()) for path in paths]

    def barrier(self) -> None:
        self.all_gather_object(None)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a rank may answer late; here none is silent for that."""
    for name in ("_OTHERS_S", "_ANSWERS_S"):
        monkeypatch.setattr(agreement, name, HANG_S)
    monkeypatch.setattr(agreement, "LONGEST_S", 2 * HANG_S)


BOTH_WAYS = pytest.mark.parametrize("by_sockets", [True, False], ids=["sockets", "in one process"])


def run_rank_of_a_host(rank: int, folder: str) -> None:
    """Prints how this rank hears of the other one's end."""
    rendezvous.address = lambda hosts: f"10.99.0.{rank + 1}"
    native, buffer = Native(), Buffer()
    places = [RankPlace("host0", 1), RankPlace("host1", 1)]
    member = start(buffer, FileGroup(rank, folder), places, native)
    Path(folder, f"connected.{rank}").touch()
    assert eventually(lambda: native.gone)
    print(json.dumps(member.dead))


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Names of two network namespaces that are joined by a link."""
    names = [f"deep_ep_{os.getpid()}_{i}" for i in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "v0", "type", "veth", "peer", "v1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", f"v{i}")
            ip("-n", name, "link", "set", f"v{i}", "up")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to make network namespaces")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def connection_of(rank: Rank) -> Connection:
    loop: Any = rank.member.endpoint
    connection: Connection = loop.channel.connections[0]
    return connection


@BOTH_WAYS
def test_all_ranks_get_one_answer_and_who_waits_gives_up(by_sockets: bool) -> None:
    with connected(4, by_sockets) as ranks:
        ranks[2].native.at = Progress(4, 0, False)
        ranks[3].native.at = Progress(4, 4, False)
        first = ranks[0].agree([1, 2])
        assert first is not None
        assert first.culprits == (2,)
        assert first.waiting == {0: 5, 1: 5}
        assert eventually(lambda: all(rank.native.given_up == [5] for rank in ranks))
        assert ranks[1].agree([2]) == first


@BOTH_WAYS
def test_threads(by_sockets: bool) -> None:
    of_others = our_threads()
    with connected(3, by_sockets):
        assert len(our_threads() - of_others) == (3 if by_sockets else 1)


def test_what_all_are_told_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict on a thousand ranks would keep rank 0's thread busy for seconds."""
    told, encoded = RankRaised(1, "ValueError"), []
    monkeypatch.setattr(
        "deep_ep.hang.messages.encode", lambda message: encoded.append(message) or encode(message)
    )
    with connected(4) as ranks:
        loop: Any = ranks[0].member.endpoint
        loop.post(lambda: [loop.channel.send(rank, told) for rank in (1, 2, 3)])
        assert eventually(lambda: all(rank.member.hangs.raised for rank in ranks[1:]))
    assert encoded.count(told) == 1


def test_a_broken_connection_is_a_death() -> None:
    with connected(3) as ranks:
        connection_of(ranks[1]).socket.shutdown(socket.SHUT_RDWR)
        assert eventually(lambda: ranks[0].native.gone == ranks[2].native.gone == [1])
        decision = ranks[2].agree([1])
        assert decision is not None
        assert decision.dead == {1: "process"}


def test_what_rank_0_says_right_behind_its_welcome_is_heard() -> None:
    native: Any = Native()
    member = liveness.Liveness(1, native)
    said = b"".join(encode(message) + b"\n" for message in (Welcome(), RankDied(2, "process")))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:
        rank_0 = threads.submit(server.accept)
        rank_0.add_done_callback(lambda accepted: accepted.result()[0].sendall(said))
        places = [RankPlace("here", 1)] * 3
        CoordinatorClient(member, places, 0, "0" * 32, server.getsockname()).start()
        assert eventually(lambda: native.gone == [2])
        member.close()
        rank_0.result()[0].close()


def test_without_rank_0_all_say_the_same() -> None:
    with connected(3) as ranks:
        coordinator: Any = ranks[0].member.endpoint

        def cut_all() -> None:
            for connection in list(coordinator.channel.connections.values()):
                connection.socket.shutdown(socket.SHUT_RDWR)

        # On the coordinator's thread: between two cuts it would tell one rank that the other is gone.
        coordinator.post(cut_all)
        assert eventually(lambda: ranks[1].native.gone == ranks[2].native.gone == [0])
        answers = [ranks[rank].agree([0, 3 - rank]) for rank in (1, 2)]
        assert answers[0] == answers[1]
        assert answers[0] is not None
        assert answers[0].dead == {0: "process"}


def test_if_rank_0_does_not_answer_it_is_named_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agreement, "LONGEST_S", 0.1)
    with connected(3) as ranks:
        coordinator: Any = ranks[0].member.endpoint
        goes_on = threading.Event()
        coordinator.post(lambda: goes_on.wait(HANG_S))
        answers = [ranks[1].agree([0, 2]), ranks[2].agree([0])]
        goes_on.set()
        assert answers[0] == answers[1]
        assert answers[0] is not None
        assert answers[0].culprits == answers[0].silent == (0,)


@BOTH_WAYS
def test_a_look_at_another_process_holds_up_no_decision(
    monkeypatch: pytest.MonkeyPatch, by_sockets: bool
) -> None:
    looked, may_end = threading.Event(), threading.Event()

    def inspect(_: HangWatch, asked: AskState) -> StateReport:
        looked.set()
        assert may_end.wait(HANG_S)
        return StateReport(asked.inquiry, RankState(asked.rank, 3))

    monkeypatch.setattr(HangWatch, "inspect", inspect)
    with connected(3, by_sockets) as ranks:
        for rank in ranks:
            loop = rank.member.endpoint
            loop.post(lambda member=rank.member: member.handle(print, AskState(1, 3)))
        assert eventually(looked.is_set)
        ranks[2].native.at = Progress(4, 0, False)
        decision = ranks[1].agree([2])
        may_end.set()
    assert decision is not None
    assert list(decision.elsewhere) == [2]


@BOTH_WAYS
def test_who_ended_in_order_is_waited_for_in_what_it_had_finished(by_sockets: bool) -> None:
    with connected(3, by_sockets) as ranks:
        ranks[1].native.at = Progress(5, 0, False)
        ranks[1].member.close()
        assert eventually(lambda: 1 in ranks[0].member.left and 1 in ranks[2].member.left)
        assert ranks[0].native.gone == []
        ranks[0].native.at = Progress(5, 0, False)
        assert eventually(lambda: ranks[0].native.gone == [1])
        assert ranks[2].native.gone == []
        ranks[2].native.at = Progress(5, 6, True)
        assert eventually(lambda: ranks[2].native.gone == [1])


def test_who_parts_waits_for_those_that_parted_before_and_not_for_the_dead() -> None:
    """An operation ends for a rank that has come to destroy(); the meeting there does not."""
    with connected(4) as ranks:
        for rank in (0, 1):
            ranks[rank].native.at = Progress(5, 0, False)
        ranks[2].member.part()
        assert eventually(lambda: ranks[0].native.gone == ranks[1].native.gone == [2])
        ranks[1].member.part()
        assert ranks[1].native.gone == []
        assert eventually(lambda: ranks[0].native.gone == [2, 1])
        connection_of(ranks[3]).close()
        assert eventually(lambda: ranks[1].native.gone == [3])


@BOTH_WAYS
def test_who_parts_does_not_wait_for_those_that_ended_and_never_part(by_sockets: bool) -> None:
    """As a program does that raises, or ends without destroy()."""
    with connected(4, by_sockets) as ranks:
        for rank in (1, 2, 3):
            ranks[rank].native.at = Progress(5, 0, False)
        ranks[3].member.part()
        for rank in (1, 2):
            ranks[rank].member.close()
        assert eventually(lambda: sorted(ranks[3].native.gone) == [1, 2])


@BOTH_WAYS
def test_a_dropped_buffer_says_goodbye(by_sockets: bool) -> None:
    with connected(2, by_sockets) as ranks:
        ranks[1].native.at = Progress(4, 0, False)
        del ranks[1].buffer
        assert eventually(lambda: ranks[0].native.gone == [1])
        decision = ranks[0].agree([1])
        assert decision is not None
        assert decision.left == {1: 4}
        ranks[1].buffer = Buffer()


def test_kernels_of_both_ends_look_whether_the_other_host_is_there() -> None:
    with connected(2) as ranks:
        coordinator: Any = ranks[0].member.endpoint
        assert eventually(lambda: coordinator.channel.connections)
        for connection in (connection_of(ranks[1]), coordinator.channel.connections[1]):
            option = connection.socket.getsockopt
            assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            looks = option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
            every_s = option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            assert option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) + looks * every_s < 5
            assert option(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 5000


@pytest.mark.exhaustive
def test_a_host_that_is_cut_off_is_known_though_nobody_sends(tmp_path: Path) -> None:
    with two_hosts() as names:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, str(rank), str(tmp_path)],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for rank, name in enumerate(names)
        ]
        try:
            assert eventually(
                lambda: all((tmp_path / f"connected.{rank}").exists() for rank in range(2))
            )
            command = ["ip", "-n", names[1], "addr", "flush", "dev", "v1"]
            subprocess.run(command, check=True)
            for rank, process in enumerate(ranks):
                dead = json.loads(process.communicate(timeout=HANG_S)[0])
                assert dead == {str(1 - rank): "host"}
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def test_nonsense_of_a_rank_says_nothing_about_it(caplog: pytest.LogCaptureFixture) -> None:
    with connected(3) as ranks:
        connection_of(ranks[1]).socket.send(b'{"type":"FailureReport"}\n')
        assert eventually(lambda: "rank 1" in caplog.text)
        decision = ranks[2].agree([1])
        assert decision is not None
        assert (decision.dead, decision.silent) == ({}, (1,))
        assert ranks[2].native.gone == []


def test_a_fault_of_a_thread_is_no_death(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(3) as ranks:
        monkeypatch.setattr(ranks[1].member, "handle", lambda *_: 1 / 0)
        decision = ranks[2].agree([1])
        assert decision is not None
        assert (decision.dead, decision.silent) == ({}, (1,))
        assert "by the timeout only" in caplog.text
        assert ranks[1].agree([0]) is None


def test_a_fault_of_rank_0_s_thread_is_no_death(caplog: pytest.LogCaptureFixture) -> None:
    with connected(3) as ranks:
        coordinator: Any = ranks[0].member.endpoint
        coordinator.post(lambda: 1 / 0)
        assert eventually(lambda: all(rank.member.alone for rank in ranks))
        for rank in ranks:
            assert rank.agree([]) is None
            assert rank.native.gone == []
        assert "by the timeout only" in caplog.text


def test_who_hears_of_rank_0_s_death_last_says_the_same() -> None:
    """The others have given the operation up by then."""
    with connected(3) as ranks:
        coordinator: Any = ranks[0].member.endpoint
        assert eventually(lambda: 2 in coordinator.channel.connections)
        coordinator.channel.connections[2].socket.shutdown(socket.SHUT_RDWR)
        failure = {**TIMEOUT, "reason": "abandoned", "ranks": [1], "given_up": {1: 5}}
        decision = ranks[2].member.agree(failure)
        assert decision is not None
        assert decision.dead == {0: "process"}


@pytest.mark.parametrize("what", ["connection", "descriptors"])
def test_ranks_that_cannot_connect_work_as_without(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no route")

    if what == "connection":
        monkeypatch.setattr(socket, "create_connection", fails)
    else:
        monkeypatch.setattr("deep_ep.membership.coordinator.descriptors_left", lambda: 10)
    said: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda text, *_, **__: said.append(text))
    with connected(3) as ranks:
        (text,) = said
        assert ("no route" if what == "connection" else "ulimit -n") in text
        assert ranks[1].agree([2]) is None
        assert ranks[1].native.gone == []


def test_a_connection_takes_only_messages_of_bounded_size() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    theirs.sendall(b'{"type":"AskState","inquiry":1,"rank":0}\n{"type":"AskState",')
    assert connection.exchange() == [AskState(1, 0)]
    theirs.sendall(b'"inquiry":2,"rank":0}\n')
    assert connection.exchange() == [AskState(2, 0)]
    for nonsense in (b"[1]\n", b"no json\n", b"\xff\n"):
        theirs.sendall(nonsense)
        with pytest.raises(ValueError, match="."):
            connection.exchange()

    def flood() -> None:
        for _ in range(40):
            theirs.sendall(b"x" * 50_000)
            connection.exchange()

    with pytest.raises(ValueError, match="more than"):
        flood()
    connection.close()
    theirs.close()


def test_a_connection_keeps_what_the_other_end_cannot_take_yet_up_to_a_bound() -> None:
    ours, theirs = socket.socketpair()
    connection, other = Connection(ours), Connection(theirs)
    message = RankRaised(1, "x" * 500_000)
    sent: list[Any] = []
    received: list[Any] = []

    def send_more() -> None:
        for _ in range(1000):
            connection.send(message)
            sent.append(message)

    for _ in range(3):
        with pytest.raises(ConnectionClosed):
            send_more()
    while connection.has_unsent:
        connection.flush()
        received += other.exchange()
    assert received == sent
    connection.close()
    with pytest.raises(ConnectionClosed):
        other.exchange()
    with pytest.raises(ConnectionClosed):
        other.send(message)
    other.close()


@pytest.mark.parametrize("sends", [False, True], ids=["reads", "sends, then reads"])
def test_the_last_words_of_who_closes_without_reading_are_heard(sends: bool) -> None:
    """As ranks do that end while they are told of others that end; TCP resets such a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Connection(socket.create_connection(server.getsockname()))
        theirs = Connection(server.accept()[0])
    ours.send(RankLeft(7, 7))
    theirs.send(RankLeft(2, 2))
    assert eventually(lambda: theirs.socket.recv(1, socket.MSG_PEEK))
    theirs.close()
    if sends:
        with pytest.raises(ConnectionClosed):
            assert eventually(lambda: ours.send(Unmasked()))
    assert ours.exchange() == [RankLeft(2, 2)]
    with pytest.raises(ConnectionClosed, match="process"):
        ours.exchange()
    ours.close()


if __name__ == "__main__":
    run_rank_of_a_host(int(sys.argv[1]), sys.argv[2])
