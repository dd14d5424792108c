"""The mailbox: what one rank posts another reads, once, whatever kind of group they share."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from deep_ep.diagnose.live import mailbox as mailboxes
from deep_ep.diagnose.live.mailbox import Mailbox, Rounds, open_mailbox
from deep_ep.errors import EPTransportError, EPUsageError
from deep_ep.group import Group, MpiGroup, as_group, thread_groups
from support.launch import HANG_S, on_threads, raise_failures, run_processes

LARGE = bytes(range(256)) * 800  # 200 KB


class Communicator:
    """What an mpi4py communicator offers, between threads."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def Get_rank(self) -> int:
        return self._group.rank

    def Get_size(self) -> int:
        return self._group.size

    def allgather(self, obj: Any) -> list[Any]:
        return self._group.all_gather_object(obj)


def thread_boxes(num_ranks: int) -> list[Mailbox]:
    return on_threads(lambda group: open_mailbox(group, "test"), thread_groups(num_ranks, 20))


def mpi_boxes(num_ranks: int) -> list[Mailbox]:
    groups = [MpiGroup(Communicator(group)) for group in thread_groups(num_ranks, 20)]
    return on_threads(lambda group: open_mailbox(group, "test"), groups)


@pytest.fixture(params=[thread_boxes, mpi_boxes], ids=["threads", "mpi"])
def boxes(request: pytest.FixtureRequest) -> Iterator[list[Mailbox]]:
    """Those of three ranks; closed at the end."""
    opened = request.param(3)
    yield opened
    for box in opened:
        box.close()


@pytest.fixture
def rounds(boxes: list[Mailbox]) -> list[Rounds]:
    return [Rounds(box) for box in boxes]


def test_what_is_posted_is_read_once_and_then_gone(boxes: list[Mailbox]) -> None:
    assert [(box.rank, box.size) for box in boxes] == [(0, 3), (1, 3), (2, 3)]
    boxes[1].post("window/1", LARGE)
    boxes[2].post("window/2", b"")
    assert boxes[0].wait("window/1", 10) == LARGE
    assert boxes[0].wait("window/2", 10) == b""
    for timeout_s in (0, 0.05):
        assert boxes[0].wait("window/1", timeout_s) is None, "still in the store"


def test_a_wait_ends_with_the_post_and_keeps_nobody_from_posting(boxes: list[Mailbox]) -> None:
    zero, one, _ = boxes
    for timeout_s in (None, 30.0):
        read: list[bytes | None] = []
        waiting = threading.Thread(
            target=lambda t=timeout_s, into=read: into.append(one.wait("late", t))
        )
        waiting.start()
        one.post("from the one that waits", b"1")
        assert zero.wait("from the one that waits", 10) == b"1"
        assert waiting.is_alive()
        zero.post("late", b"2")
        waiting.join(10)
        assert read == [b"2"]


def test_closing_ends_a_wait_at_once_and_twice_does_nothing(boxes: list[Mailbox]) -> None:
    zero, one, _ = boxes
    for box, timeout_s in ((zero, None), (one, 600.0)):
        read: list[bytes | None] = []
        waiting = threading.Thread(
            target=lambda b=box, t=timeout_s, into=read: into.append(b.wait("never", t))
        )
        waiting.start()
        time.sleep(0.05)
        box.close()
        waiting.join(10)
        assert read == [None]
        box.close()
        assert box.wait("never", None) is None
        with pytest.raises(EPUsageError, match="is closed"):
            box.post("late", b"")


def test_a_destructor_may_close_a_mailbox_whose_lock_its_own_thread_holds() -> None:
    """The garbage collector may run it in the middle of a wait."""
    box = thread_boxes(1)[0]

    def close_within() -> None:
        with box._lock:
            box.close()

    closing = threading.Thread(target=close_within, daemon=True)
    closing.start()
    closing.join(HANG_S)
    assert not closing.is_alive()
    assert box.wait("key", None) is None


def answer(rounds: Rounds, data: bytes) -> bytes | None:
    """Takes the next call and answers it; what it was about."""
    about = rounds.await_call()
    rounds.answer(data)
    return about


def test_in_a_round_rank_0_calls_and_the_others_answer(
    boxes: list[Mailbox], rounds: list[Rounds]
) -> None:
    for number in range(3):
        rounds[0].call(number, b"what?")
        assert [answer(rounds[rank], bytes([rank])) for rank in (1, 2)] == [b"what?"] * 2
        assert rounds[0].collect(number, 10) == {1: b"\x01", 2: b"\x02"}
    assert rounds[0].silent == {}
    boxes[1].close()
    assert rounds[1].await_call() is None


def test_who_missed_a_round_is_silent_until_in_time_again_and_leaves_nothing_behind(
    boxes: list[Mailbox], rounds: list[Rounds]
) -> None:
    for number in range(3):
        rounds[0].call(number, b"%d" % number)
        if number == 0:
            assert rounds[1].await_call() == b"0"
        answer(rounds[2], b"2")
        began = time.monotonic()
        assert rounds[0].collect(number, 0.05 if number == 0 else 60, 0.01) == {2: b"2"}
        assert time.monotonic() - began < 30, "a silent rank is waited for as if it were not"
    ((rank, (missed, since)),) = rounds[0].silent.items()
    assert (rank, missed) == (1, 0)
    assert 0 <= time.time() - since < 60
    rounds[1].answer(b"late")
    assert answer(rounds[1], b"late, too") == b"1", "the first call that it had not taken"
    rounds[0].call(3, b"3")
    assert rounds[0].collect(3, 0.05) == {}, "answers to other rounds"
    assert answer(rounds[1], b"late again") == b"3"
    rounds[0].call(4, b"4")
    assert answer(rounds[1], b"1") == b"4"
    assert rounds[0].collect(4, 0.05) == {1: b"1"}
    assert list(rounds[0].silent) == [2]
    assert not boxes[0].holds("answer/1")
    assert not any(boxes[0].holds(f"call/{n}/1") for n in range(6))


def test_calls_that_nobody_takes_do_not_fill_the_store(
    boxes: list[Mailbox], rounds: list[Rounds]
) -> None:
    """A rank may not be there yet, or never again; masked or not."""
    for number in range(6):
        rounds[0].call(number, bytes([number]))
        rounds[0].collect(number, 0, without=[1])
    for rank in (1, 2):
        assert [boxes[0].holds(f"call/{n}/{rank}") for n in range(7)] == [False, True, *[False] * 5]
        assert answer(rounds[rank], b"here") == b"\x00"
    rounds[0].call(6, b"6")
    assert answer(rounds[1], b"1") == b"6"
    assert rounds[0].collect(6, 0.05) == {1: b"1"}
    assert not boxes[0].holds("answer/2"), "it came too late"
    rounds[0].end(b"last")
    assert rounds[1].await_call() == b"last", "it has had the sixth"
    assert rounds[2].await_call() == b"last"


@pytest.mark.parametrize("step", ["holds", "post"])
def test_the_end_comes_although_a_call_is_posted_meanwhile(
    boxes: list[Mailbox], rounds: list[Rounds], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Another thread ends the rounds than calls: here behind the question whether to post, and before the post."""
    of_box = getattr(boxes[0], step)

    def end_within(*given: Any) -> Any:
        monkeypatch.setattr(boxes[0], step, of_box)
        if step == "post":
            rounds[0].end(b"last")
            return of_box(*given)
        answer = of_box(*given)
        rounds[0].end(b"last")
        return answer

    rounds[0].call(0, b"what?")
    assert rounds[1].await_call() == b"what?"
    monkeypatch.setattr(boxes[0], step, end_within)
    rounds[0].call(1, b"and now?")
    assert rounds[1].await_call() == b"and now?"
    assert boxes[1].wait("call/3/1", 10) == b"0 last", "the next call"


def test_silent_ranks_are_waited_for_together(
    rounds: list[Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group that grows most ranks may not be there."""
    assert rounds[0].collect(0, 0) == {}
    patience: list[float] = []

    def wait(key: str, timeout_s: float) -> None:
        if key.startswith("answer"):
            patience.append(timeout_s)
            time.sleep(timeout_s)

    monkeypatch.setattr(rounds[0]._mailbox, "wait", wait)
    rounds[0].collect(1, 60, 0.1)
    first, second = patience
    assert 0 < first <= 0.1
    assert second == 0


def test_who_is_left_out_is_neither_waited_for_nor_missed_and_what_it_says_is_dropped(
    boxes: list[Mailbox], rounds: list[Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(number: int, **how: Any) -> dict[int, bytes]:
        rounds[0].call(number, b"what?")
        answer(rounds[2], b"2")
        return rounds[0].collect(number, 10, **how)

    rounds[0].silent[1] = (0, 0.0)
    awaited: list[str] = []
    wait = boxes[0].wait

    def note(key: str, timeout_s: float | None) -> bytes | None:
        awaited.append(key)
        return wait(key, timeout_s)

    monkeypatch.setattr(boxes[0], "wait", note)
    for number in (1, 2):
        assert turn(number, without=[1]) == {2: b"2"}
        assert "answer/1" not in awaited
        assert rounds[0].silent == {}
        answer(rounds[1], b"dropped")
    rounds[0].call(3, b"what?")
    assert [answer(rounds[rank], b"here") for rank in (1, 2)] == [b"what?"] * 2
    assert rounds[0].collect(3, 10) == {1: b"here", 2: b"here"}


def test_who_leaves_answers_the_next_round_and_is_not_missed_after_it(
    boxes: list[Mailbox], rounds: list[Rounds]
) -> None:
    rounds[1].leave(b"bye")
    boxes[1].close()
    for number, expected in ((7, {1: b"bye", 2: b"2"}), (8, {2: b"2"})):
        rounds[0].call(number, b"what?")
        answer(rounds[2], b"2")
        assert rounds[0].collect(number, 0.05) == expected
    assert rounds[0].silent == {}


def test_who_is_dismissed_is_neither_called_nor_waited_for(
    boxes: list[Mailbox], rounds: list[Rounds]
) -> None:
    rounds[0].dismiss([1])
    rounds[0].dismiss([1])
    rounds[0].call(0, b"what?")
    assert boxes[1].wait("call/1/1", 0) is None
    answer(rounds[2], b"2")
    assert rounds[0].collect(0, 60) == {2: b"2"}
    assert rounds[0].silent == {}


def test_mailboxes_of_one_name_are_different_ones() -> None:
    groups = list(thread_groups(2, 20))

    def open_two(group: Group) -> tuple[Mailbox, Mailbox]:
        return open_mailbox(group, "test"), open_mailbox(group, "test")

    (first, second), (other_first, _) = on_threads(open_two, groups)
    other_first.post("key", b"1")
    assert second.wait("key", 0) is None
    assert first.wait("key", 0) == b"1"


def test_a_store_of_its_own_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    create_server = socket.create_server

    def listen(address: Any, **options: Any) -> socket.socket:
        bound.append(address)
        return create_server(address, **options)

    monkeypatch.setattr(mailboxes.socket, "create_server", listen)
    for box in mpi_boxes(2):
        box.close()
    assert bound == [("127.0.0.1", 0)]


def test_a_rank_that_cannot_connect_is_named_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: Any, **options: Any) -> socket.socket:
        raise OSError("no port is free")

    monkeypatch.setattr(mailboxes.socket, "create_server", refuse)
    groups = [MpiGroup(Communicator(group)) for group in thread_groups(2, 20)]

    def outcome(group: Group) -> str:
        with pytest.raises(EPTransportError) as got:
            open_mailbox(group, "test")
        return str(got.value)

    for text in on_threads(outcome, groups):
        assert "rank 0 failed" in text
        assert "no port is free" in text


def _talk(rank: int, group: Any, on_tcp: bool) -> Any:
    if on_tcp:
        tcp = dist.TCPStore("127.0.0.1", 0, None, True) if rank == 0 else None
        port = as_group(group).all_gather_object(tcp.port if tcp else 0)[0]
        store = tcp or dist.TCPStore("127.0.0.1", port, None, False)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        group = dist.new_group([0, 1, 2])
    keys_before = store.num_keys() if on_tcp else None
    as_group(group).barrier()
    box = open_mailbox(as_group(group), "test")
    read: list[Any] = []
    if rank == 0:
        for number in range(3):
            read += [box.wait(f"{number}/{source}", 20) for source in (1, 2)]
            for target in (1, 2):
                box.post(f"answer {number}/{target}", LARGE)
    else:
        for number in range(3):
            box.post(f"{number}/{rank}", LARGE + bytes([rank]))
            read.append(box.wait(f"answer {number}/{rank}", None))
    as_group(group).barrier()
    keys_after = store.num_keys() if on_tcp else None
    box.close()
    as_group(group).barrier()
    return [len(one) for one in read], keys_before, keys_after


@pytest.mark.parametrize("on_tcp", [True, False], ids=["tcp store", "file store"])
def test_processes_of_a_process_group_talk(on_tcp: bool) -> None:
    talked = raise_failures(run_processes(_talk, 3, on_tcp))
    assert [read for read, _, _ in talked] == [
        [len(LARGE) + 1] * 6,
        [len(LARGE)] * 3,
        [len(LARGE)] * 3,
    ]
    if on_tcp:
        _, before, after = talked[0]
        assert after - before < 20, "keys of barriers at most: what was read is deleted"
