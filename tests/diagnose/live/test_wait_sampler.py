"""The threads that sample waiting: what rank 0 makes of the answers of all ranks, and how they end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from deep_ep.diagnose.live.mailbox import Rounds, open_mailbox
from deep_ep.diagnose.live.wait_sampler import UNKNOWN, Waited, WaitSampler, Window
from deep_ep.group import ThreadGroup, thread_groups
from support.launch import on_threads
from support.waiting import eventually

NUM_RANKS, INTERVAL_S = 3, 0.02


@contextlib.contextmanager
def sampling(take: Callable[[int], Waited]) -> Iterator[tuple[list[WaitSampler], list[Window]]]:
    """A sampler for each rank, which is stopped in the end, and the windows that come."""
    windows: list[Window] = []

    def start(group: ThreadGroup) -> WaitSampler:
        mailbox = open_mailbox(group, "test")
        return WaitSampler(
            mailbox, lambda: take(group.rank), windows.append, pytest.fail, INTERVAL_S, INTERVAL_S
        )

    started = on_threads(start, thread_groups(NUM_RANKS, 20))
    yield started, windows
    for sampler in started:
        sampler.stop()


def running() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "deep_ep diagnose"}


def waited(rank: int, operations: int = 1) -> Waited:
    return Waited(np.full((1, NUM_RANKS), 10 * rank), np.array([operations]))


@pytest.mark.parametrize(
    ("of_ranks", "median"), [((4, 6, 5), 5.0), ((4, UNKNOWN, 5), np.nan)], ids=["known", "not"]
)
def test_a_window_has_the_waiting_of_all_ranks(of_ranks: tuple[int, ...], median: float) -> None:
    with sampling(lambda rank: waited(rank, of_ranks[rank])) as (_, windows):
        assert eventually(lambda: len(windows) >= 2)
    first = windows[0]
    assert first.number == 1
    np.testing.assert_array_equal(first.waits[0], [[0] * 3, [10] * 3, [20] * 3])
    np.testing.assert_array_equal(first.operations, [median])
    assert (first.silent, first.refused, len(set(first.hosts))) == ({}, [], 1)


def test_waiting_below_zero_is_left_out() -> None:
    """Judging it would raise, and end the thread."""
    with sampling(lambda rank: waited(-rank)) as (_, windows):
        assert eventually(lambda: bool(windows))
    (first, second), of_ranks = windows[0].refused, windows[0].waits[0]
    assert first.startswith("rank 1: the message of ")
    assert "waits has numbers below 0" in second
    np.testing.assert_array_equal(of_ranks, [[0.0] * 3, [np.nan] * 3, [np.nan] * 3])


def test_the_end_of_rank_0_ends_all() -> None:
    before = running()
    with sampling(waited) as (started, _):
        assert len(running() - before) == NUM_RANKS
        started[0].stop()
        assert eventually(lambda: not running() - before), running() - before


def test_the_end_of_a_fork_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the connections of its parent, so what it says at its end the other ranks would believe."""
    before = running()
    with sampling(waited) as (started, _):
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            started[0].stop()
        assert len(running() - before) == NUM_RANKS


def test_another_rank_may_end_before() -> None:
    with sampling(waited) as (started, windows):
        started[1].stop()
        started[1].stop()
    assert not any(window.refused for window in windows)


def test_a_rank_that_is_gone_holds_up_one_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s: list[float] = []
    collect = Rounds.collect

    def collecting(rounds: Rounds, number: int, timeout_s: float, silent_s: float) -> Any:
        waited_s.append(silent_s if rounds.silent else timeout_s)
        return collect(rounds, number, 1.0, 0.05)

    monkeypatch.setattr(Rounds, "collect", collecting)
    with sampling(waited) as (started, windows):
        assert eventually(lambda: bool(windows))
        started[1].stop()
        assert eventually(lambda: sum(set(window.silent) == {1} for window in windows) > 1)
    without = next(window for window in windows if set(window.silent) == {1})
    assert np.isnan(without.waits[0]).all(axis=1).tolist() == [False, True, False]
    assert all(without.hosts), "where a rank ran is forgotten"
    assert max(waited_s) >= 10 * min(waited_s)
