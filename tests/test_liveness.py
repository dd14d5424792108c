"""The connections that tell who lives: what they survive, whom they believe, what they cost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deep_ep.base.ranks import Decision, Message, Progress, RankPlace
from deep_ep.group import thread_groups
from deep_ep.hang.hang_watch import HangWatch
from deep_ep.membership import agreement, liveness, rendezvous
from deep_ep.membership.connection import Connection, ConnectionClosed
from deep_ep.membership.coordinator import Coordinator
from deep_ep.membership.listener import greeting

# Who needs longer hangs.
LONG_S = 120.0
TIMEOUT: dict[str, Any] = {
    "reason": "timeout",
    "operation": "low_latency_dispatch",
    "op": 5,
    "given_up": {},
}


class Native:
    """In operation 5, where it waits, and told of ranks that are gone."""

    def __init__(self) -> None:
        self.at = Progress(4, 5, True)
        self.gone: list[int] = []
        self.given_up: list[int] = []

    def progress(self) -> dict[str, Any]:
        return self.at._asdict()

    def mark_gone(self, rank: int, is_gone: bool = True) -> None:
        (self.gone.append if is_gone else self.gone.remove)(rank)

    def give_up(self, op: int) -> None:
        self.given_up.append(op)


class Buffer:
    """Something that can be collected."""


class Rank:
    """One rank of a group whose ranks are connected with rank 0."""

    def __init__(self, member: liveness.Liveness, native: Native, buffer: Buffer) -> None:
        self.member, self.native, self.buffer = member, native, buffer

    def agree(self, missing: Sequence[int]) -> Decision | None:
        return self.member.agree({**TIMEOUT, "ranks": [self.member.rank, *missing]})


def start(
    buffer: Buffer, group: Any, places: Sequence[RankPlace], native: Any
) -> liveness.Liveness:
    """All steps of connecting a rank. Collective."""
    own = liveness.offer(group.rank, places)
    offered = liveness.Offer.of(group.all_gather_object(own)[0])
    member, problem = liveness.join(buffer, group.rank, len(places), native, offered)
    assert member is not None
    joined = group.all_gather_object((problem, member.address))
    liveness.complete(own, [problem for problem, _ in joined])
    member.introduce([address for _, address in joined], places, 0)
    return member


def until(condition: Any) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class OnlyOwn(dict[str, Any]):
    """Only the thread that made a coordinator finds it; the others connect as processes do."""

    def __setitem__(self, token: str, coordinator: Any) -> None:
        super().__setitem__(token, coordinator)
        self.owner = threading.get_ident()

    def get(self, token: str, default: Any = None) -> Any:
        return super().get(token) if threading.get_ident() == self.owner else default


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
        until(lambda: all(path.exists() for path in paths))
        return [json.loads(path.read_text()) for path in paths]

    def barrier(self) -> None:
        self.all_gather_object(None)


@contextmanager
def connected(num_ranks: int) -> Iterator[list[Rank]]:
    """Ranks that are threads, one after the other done with everything that is collective."""
    ranks: list[Any] = [None] * num_ranks
    places = [RankPlace("here", 1)] * num_ranks
    of_others = our_threads()  # of buffers that earlier tests left to the garbage collector

    def join(rank: int, group: Any) -> None:
        native, buffer = Native(), Buffer()
        ranks[rank] = Rank(start(buffer, group, places, native), native, buffer)

    threads = [
        threading.Thread(target=join, args=(rank, group))
        for rank, group in enumerate(thread_groups(num_ranks, LONG_S))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.member.close()
        until(lambda: not our_threads() - of_others)


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "liveness" in thread.name}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a rank may answer late; here none is silent for that."""
    for name in ("_OTHERS_S", "_ANSWERS_S"):
        monkeypatch.setattr(agreement, name, LONG_S)
    monkeypatch.setattr(agreement, "LONGEST_S", 2 * LONG_S)


@pytest.fixture(params=["sockets", "in one process"])
def connected_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "sockets":
        monkeypatch.setattr(liveness, "_coordinators", OnlyOwn())
    return str(request.param)


@pytest.fixture
def by_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_coordinators", OnlyOwn())


def run_rank_of_a_host(rank: int, folder: str) -> None:
    """Prints how this rank hears of the other one's end."""
    rendezvous.address = lambda hosts: f"10.99.0.{rank + 1}"
    native, buffer = Native(), Buffer()
    places = [RankPlace("host0", 1), RankPlace("host1", 1)]
    member = start(buffer, FileGroup(rank, folder), places, native)
    Path(folder, f"connected.{rank}").touch()
    until(lambda: native.gone)
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
    loop: Any = rank.member.loop
    connection: Connection = loop.connection
    return connection


def test_all_ranks_get_one_answer_and_who_waits_gives_up(connected_by: str) -> None:
    with connected(4) as ranks:
        ranks[2].native.at = Progress(4, 0, False)
        ranks[3].native.at = Progress(4, 4, False)
        first = ranks[0].agree([1, 2])
        assert first is not None
        assert first.culprits == (2,)
        assert first.waiting == {0: 5, 1: 5}
        until(lambda: all(rank.native.given_up == [5] for rank in ranks))
        assert ranks[1].agree([2]) == first


def test_threads(connected_by: str) -> None:
    of_others = our_threads()
    with connected(3):
        assert len(our_threads() - of_others) == (3 if connected_by == "sockets" else 1)


def test_a_broken_connection_is_a_death(by_sockets: None) -> None:
    with connected(3) as ranks:
        connection_of(ranks[1]).socket.shutdown(socket.SHUT_RDWR)
        until(lambda: ranks[0].native.gone == ranks[2].native.gone == [1])
        decision = ranks[2].agree([1])
        assert decision is not None
        assert decision.dead == {1: "process"}


def test_without_rank_0_all_say_the_same(by_sockets: None) -> None:
    with connected(3) as ranks:
        coordinator: Any = ranks[0].member.loop

        def cut_all() -> None:
            for connection in list(coordinator.connections.values()):
                connection.socket.shutdown(socket.SHUT_RDWR)

        # On the coordinator's thread: between two cuts it would tell one rank that the other is gone.
        coordinator.post(cut_all)
        until(lambda: ranks[1].native.gone == ranks[2].native.gone == [0])
        answers = [ranks[rank].agree([0, 3 - rank]) for rank in (1, 2)]
        assert answers[0] == answers[1]
        assert answers[0] is not None
        assert answers[0].dead == {0: "process"}


def test_if_rank_0_does_not_answer_it_is_named_and_no_other(
    by_sockets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "LONGEST_S", 0.1)
    with connected(3) as ranks:
        coordinator: Any = ranks[0].member.loop
        goes_on = threading.Event()
        coordinator.post(lambda: goes_on.wait(LONG_S))
        answers = [ranks[1].agree([0, 2]), ranks[2].agree([0])]
        goes_on.set()
        assert answers[0] == answers[1]
        assert answers[0] is not None
        assert answers[0].culprits == answers[0].silent == (0,)


def test_a_look_at_another_process_holds_up_no_decision(
    monkeypatch: pytest.MonkeyPatch, connected_by: str
) -> None:
    looked, may_end = threading.Event(), threading.Event()

    def look_at(_: HangWatch, asked: Message) -> Message:
        looked.set()
        assert may_end.wait(LONG_S)
        return {**asked, "type": "seen", "process": "silent", "threads": []}

    monkeypatch.setattr(HangWatch, "look_at", look_at)
    with connected(3) as ranks:
        look = {"type": "look", "inquiry": 1, "rank": 2}
        for rank in ranks:
            loop = rank.member.loop
            loop.post(lambda member=rank.member: member.handle(look))
        until(looked.is_set)
        ranks[2].native.at = Progress(4, 0, False)
        decision = ranks[1].agree([2])
        may_end.set()
    assert decision is not None
    assert list(decision.elsewhere) == [2]


def test_who_ended_in_order_is_waited_for_in_what_it_had_finished(connected_by: str) -> None:
    with connected(3) as ranks:
        ranks[1].native.at = Progress(5, 0, False)
        ranks[1].member.close()
        until(lambda: 1 in ranks[0].member.left and 1 in ranks[2].member.left)
        assert ranks[0].native.gone == []
        ranks[0].native.at = Progress(5, 0, False)
        until(lambda: ranks[0].native.gone == [1])
        assert ranks[2].native.gone == []
        ranks[2].native.at = Progress(5, 6, True)
        until(lambda: ranks[2].native.gone == [1])


def test_who_parts_waits_for_those_that_parted_before_and_not_for_the_dead(
    by_sockets: None,
) -> None:
    """An operation ends for a rank that has come to destroy(); the meeting there does not."""
    with connected(4) as ranks:
        for rank in (0, 1):
            ranks[rank].native.at = Progress(5, 0, False)
        ranks[2].member.part()
        until(lambda: ranks[0].native.gone == ranks[1].native.gone == [2])
        ranks[1].member.part()
        assert ranks[1].native.gone == []
        until(lambda: ranks[0].native.gone == [2, 1])
        connection_of(ranks[3]).close()
        until(lambda: ranks[1].native.gone == [3])


def test_who_parts_does_not_wait_for_those_that_ended_and_never_part(connected_by: str) -> None:
    """As a program does that raises, or ends without destroy()."""
    with connected(4) as ranks:
        for rank in (1, 2, 3):
            ranks[rank].native.at = Progress(5, 0, False)
        ranks[3].member.part()
        for rank in (1, 2):
            ranks[rank].member.close()
        until(lambda: sorted(ranks[3].native.gone) == [1, 2])


def test_a_dropped_buffer_says_goodbye(connected_by: str) -> None:
    with connected(2) as ranks:
        ranks[1].native.at = Progress(4, 0, False)
        del ranks[1].buffer
        until(lambda: ranks[0].native.gone == [1])
        decision = ranks[0].agree([1])
        assert decision is not None
        assert decision.left == {1: 4}
        ranks[1].buffer = Buffer()


def test_kernels_of_both_ends_look_whether_the_other_host_is_there(by_sockets: None) -> None:
    with connected(2) as ranks:
        coordinator: Any = ranks[0].member.loop
        until(lambda: coordinator.connections)
        for connection in (connection_of(ranks[1]), coordinator.connections[1]):
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
            until(lambda: all((tmp_path / f"connected.{rank}").exists() for rank in range(2)))
            command = ["ip", "-n", names[1], "addr", "flush", "dev", "v1"]
            subprocess.run(command, check=True)
            for rank, process in enumerate(ranks):
                dead = json.loads(process.communicate(timeout=LONG_S)[0])
                assert dead == {str(1 - rank): "host"}
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def test_only_who_knows_the_token_comes_in() -> None:
    coordinator = Coordinator(
        [RankPlace("here", rank) for rank in range(3)], 0, "token", "127.0.0.1"
    )
    coordinator.start()
    try:
        for message in (
            greeting("other", 1),
            greeting("token", 0),
            greeting("token", 3),
            b"token-0000001",
            b'{"token":"tok',
        ):
            with socket.create_connection(coordinator.listener.address, LONG_S) as stranger:
                stranger.settimeout(LONG_S)
                stranger.sendall(message)
                assert stranger.recv(100) == b""
        with socket.create_connection(coordinator.listener.address, LONG_S) as member:
            member.settimeout(LONG_S)
            member.sendall(greeting("token", 1))
            assert json.loads(member.recv(100)) == {"type": "welcome"}
            coordinator.post(lambda: coordinator.complete([2]))
            until(lambda: coordinator.listener.socket.fileno() == -1)
            assert member.getpeername()[0] == "127.0.0.1"
    finally:
        coordinator.post(coordinator.leave_all)
        coordinator.join(LONG_S)


def test_nonsense_of_a_rank_says_nothing_about_it(
    by_sockets: None, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(3) as ranks:
        connection_of(ranks[1]).socket.send(b'{"type":"report"}\n')
        until(lambda: "rank 1" in caplog.text)
        decision = ranks[2].agree([1])
        assert decision is not None
        assert (decision.dead, decision.silent) == ({}, (1,))
        assert ranks[2].native.gone == []


def test_a_fault_of_a_thread_is_no_death(
    by_sockets: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(3) as ranks:
        monkeypatch.setattr(ranks[1].member, "handle", lambda *_: 1 / 0)
        decision = ranks[2].agree([1])
        assert decision is not None
        assert (decision.dead, decision.silent) == ({}, (1,))
        assert "by the timeout only" in caplog.text
        assert ranks[1].agree([0]) is None


def test_a_fault_of_rank_0_s_thread_is_no_death(
    by_sockets: None, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(3) as ranks:
        coordinator: Any = ranks[0].member.loop
        coordinator.post(lambda: 1 / 0)
        until(lambda: all(rank.member.alone for rank in ranks))
        for rank in ranks:
            assert rank.agree([]) is None
            assert rank.native.gone == []
        assert "by the timeout only" in caplog.text


@pytest.mark.parametrize("what", ["connection", "descriptors"])
def test_ranks_that_cannot_connect_work_as_without(
    what: str, by_sockets: None, monkeypatch: pytest.MonkeyPatch
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
    theirs.sendall(b'{"a":1}\n{"b":')
    assert connection.receive() == [{"a": 1}]
    theirs.sendall(b"2}\n")
    assert connection.receive() == [{"b": 2}]
    for nonsense in (b"[1]\n", b"no json\n", b"\xff\n"):
        theirs.sendall(nonsense)
        with pytest.raises(ValueError, match="."):
            connection.receive()

    def flood() -> None:
        for _ in range(40):
            theirs.sendall(b"x" * 50_000)
            connection.receive()

    with pytest.raises(ValueError, match="more than"):
        flood()
    connection.close()
    theirs.close()


def test_a_connection_keeps_what_the_other_end_cannot_take_yet() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    other = Connection(theirs)
    message = {"text": "x" * 100_000}
    for _ in range(20):
        connection.send(message)
    assert connection.has_unsent
    received: list[Any] = []
    while len(received) < 20:
        received += other.receive()
        connection.flush()
    assert received == [message] * 20
    connection.close()
    with pytest.raises(ConnectionClosed):
        other.receive()
    with pytest.raises(ConnectionClosed):
        other.send(message)


@pytest.mark.parametrize("sends", [False, True], ids=["reads", "sends, then reads"])
def test_the_last_words_of_who_closes_without_reading_are_heard(sends: bool) -> None:
    """As ranks do that end while they are told of others that end; TCP resets such a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Connection(socket.create_connection(server.getsockname()))
        theirs = Connection(server.accept()[0])
    ours.send({"type": "left", "rank": 7})
    theirs.send({"type": "left", "rank": 2})
    until(lambda: theirs.socket.recv(1, socket.MSG_PEEK))
    theirs.close()
    if sends:
        with pytest.raises(ConnectionClosed):
            until(lambda: ours.send({"type": "ask"}))
    assert ours.receive() == [{"type": "left", "rank": 2}]
    with pytest.raises(ConnectionClosed, match="process"):
        ours.receive()
    ours.close()


if __name__ == "__main__":
    run_rank_of_a_host(int(sys.argv[1]), sys.argv[2])
