"""Ranks that are threads and connected with rank 0, with natives that are made up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from deep_ep.base.ranks import Decision, Progress, RankPlace
from deep_ep.group import ThreadGroup, thread_groups
from deep_ep.membership import coordinator, liveness
from support.launch import HANG_S, on_threads
from support.waiting import eventually

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
    own = coordinator.offer(group.rank, places)
    offered = group.all_gather_object(own)[0]
    member, problem = coordinator.join(buffer, group.rank, places, native, offered)
    joined = group.all_gather_object((problem, member.address))
    coordinator.complete(own, member, joined)
    return member


class OnlyOwn(dict[str, Any]):
    """Only the thread that made a coordinator finds it; the others connect as processes do."""

    def __setitem__(self, token: str, coordinator: Any) -> None:
        super().__setitem__(token, coordinator)
        self.owner = threading.get_ident()

    def get(self, token: str, default: Any = None) -> Any:
        return super().get(token) if threading.get_ident() == self.owner else default


@contextlib.contextmanager
def connected(num_ranks: int, by_sockets: bool = True) -> Iterator[list[Rank]]:
    """Ranks that are threads, one after the other done with everything that is collective.

    Args:
        num_ranks: of them.
        by_sockets: whether they reach each other as processes do.
    """
    places = [RankPlace("here", 1)] * num_ranks
    of_others = our_threads()  # of buffers that earlier tests left to the garbage collector

    def join(group: ThreadGroup) -> Rank:
        native, buffer = Native(), Buffer()
        return Rank(start(buffer, group, places, native), native, buffer)

    with pytest.MonkeyPatch.context() as patch:
        if by_sockets:
            patch.setattr(coordinator, "_coordinators", OnlyOwn())
        ranks = on_threads(join, thread_groups(num_ranks, HANG_S))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.member.close()
        assert eventually(lambda: not our_threads() - of_others)


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "liveness" in thread.name}


def heard_until_closed(connection: socket.socket) -> bytes:
    """What comes until the other side closes; where it has left something unread, the kernel resets the connection."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            heard += part
    return heard
