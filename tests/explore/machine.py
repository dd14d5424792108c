"""The ranks of a group in one process and in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from deep_ep import _cpu
from deep_ep.errors import EPTimeoutError
from explore.program import Pace

T = TypeVar("T")

MS = 1_000_000
NEVER = 2**64 - 1
# A program takes a few virtual seconds; who still waits after this waits for ever.
END_NS = 600_000 * MS
LONGEST_LOOK_NS = MS


class Machine:
    """Runs a function on every rank: `run()`. The other methods are for those functions.

    One rank runs at a time, so what ranks share needs no lock.
    """

    def __init__(self, num_ranks: int, ranks_per_node: int, pace: Pace, seed: int) -> None:
        self.num_ranks = num_ranks
        self.gone: set[int] = set()
        self._meetings: dict[tuple[str, int], dict[int, Any]] = {}
        self._simulation = _cpu.Simulation(
            num_ranks=num_ranks,
            ranks_per_node=ranks_per_node,
            seed=seed,
            points_per_step=pace.points_per_step,
            step_ns=pace.step_ns,
            shortest_delivery_ns=pace.shortest_delivery_ns,
            longest_delivery_ns=pace.longest_delivery_ns,
            end_ns=END_NS,
        )
        self.now_ns = self._simulation.now_ns
        self.began_ns = self.now_ns()
        self.sleep = self._simulation.sleep
        self.stop_after = self._simulation.stop_after
        self.die_after = self._simulation.die_after

    def has_hung(self) -> bool:
        """Whether somebody waited for ever."""
        return self._simulation.has_ended()

    def run(self, fn: Callable[[int], T]) -> list[T | BaseException]:
        """fn(rank) on all ranks; per rank its result, or what it raised (`RankDied` among others)."""
        outcomes: list[Any] = [None] * self.num_ranks

        def run_rank(rank: int) -> None:
            self._simulation.enter(rank)
            try:
                outcomes[rank] = fn(rank)
            except BaseException as error:  # noqa: BLE001 - the caller judges it
                outcomes[rank] = error
            finally:
                self.gone.add(rank)
                self._simulation.leave()

        threads = [
            threading.Thread(target=run_rank, args=(rank,), name=f"rank{rank}", daemon=True)
            for rank in range(self.num_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def results(self, fn: Callable[[int], T]) -> list[T]:
        """The same, where none is to raise: raises the first that did."""
        found: list[T] = []
        for outcome in self.run(fn):
            if isinstance(outcome, BaseException):
                raise outcome
            found.append(outcome)
        return found

    def meet(self, name: str, number: int, rank: int, brought: T) -> dict[int, T]:
        """What every rank that is not gone brought to this meeting, once all of them came."""
        meeting = self.meeting(name, number)
        meeting[rank] = brought
        self._look_until(lambda: len(meeting.keys() | self.gone) == self.num_ranks, NEVER)
        return meeting

    def meeting(self, name: str, number: int) -> dict[int, Any]:
        """What has been brought to this meeting so far, by rank."""
        return self._meetings.setdefault((name, number), {})

    def _look_until(self, ready: Callable[[], bool], deadline_ns: int) -> bool:
        pause = 1000
        while not ready():
            if self.now_ns() >= deadline_ns:
                return False
            self.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_NS)
        return True


class SimulatedGroup:
    """One rank of the `deep_ep.group.Group` on which simulated ranks build their buffers."""

    def __init__(self, machine: Machine, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = machine.num_ranks
        self._machine = machine
        self._timeout_ns = round(timeout_s * 1e9)
        self._number = 0

    def all_gather_object(self, obj: T) -> list[T]:
        """Every rank's object, in rank order.

        Raises:
            EPTimeoutError: some ranks did not come in time.
        """
        machine = self._machine
        meeting = machine.meeting("gather", self._number)
        self._number += 1
        meeting[self.rank] = obj
        deadline = machine.now_ns() + self._timeout_ns
        if not machine._look_until(lambda: len(meeting) == self.size, deadline):
            missing = [rank for rank in range(self.size) if rank not in meeting]
            raise EPTimeoutError("not all ranks came", missing)
        return [meeting[rank] for rank in range(self.size)]

    def barrier(self) -> None:
        """Returns when all ranks have called it; raises like `all_gather_object`."""
        self.all_gather_object(None)
