"""Ranks as threads of one simulated process, of which one runs at a time, straight on the native module."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_LOOK_NS = 1_000_000
_NEVER_NS = 10**15


class SimulatedRanks:
    """The ranks of a group in virtual time. Unless times are given, they pass only by what costs say.

    Args:
        native: the native module of the host target.
        num_ranks: of the group.
        ranks_per_node: of each node.
        points_per_step: preemption points after which a rank's clock goes on.
        step_ns: by so much.
        delivery_ns: of every message to another rank.
    """

    def __init__(
        self,
        native: Any,
        num_ranks: int,
        ranks_per_node: int,
        points_per_step: int = 1,
        step_ns: int = 0,
        delivery_ns: int = 0,
    ) -> None:
        self.num_ranks, self.ranks_per_node = num_ranks, ranks_per_node
        self.simulation = native.Simulation(
            num_ranks=num_ranks,
            ranks_per_node=ranks_per_node,
            seed=1,
            points_per_step=points_per_step,
            step_ns=step_ns,
            shortest_delivery_ns=delivery_ns,
            longest_delivery_ns=delivery_ns,
            end_ns=_NEVER_NS,
        )
        self._came: dict[object, dict[int, int]] = {}
        self._errors: list[BaseException] = []

    def meet(self, name: object, rank: int) -> None:
        """Returns at the same time on all ranks.

        Raises:
            RuntimeError: a rank has failed, so it will not come.
        """
        now_ns = self.simulation.now_ns
        came = self._came.setdefault(name, {})
        came[rank] = now_ns()
        while len(came) < self.num_ranks:
            if self._errors:
                raise RuntimeError(f"rank {rank} waits at {name!r} for one that has failed")
            self.simulation.sleep(_LOOK_NS)
        begin_ns = (max(came.values()) // _LOOK_NS + 3) * _LOOK_NS
        self.simulation.sleep(begin_ns - now_ns())

    def connect(self, rank: int, runtime: Any, handles: dict[int, bytes]) -> None:
        """Connects a rank's runtime with those of the others; `handles` is theirs in common."""
        handles[rank] = runtime.local_handle()
        self.meet("handles", rank)
        runtime.connect([handles[source] for source in range(self.num_ranks)])
        self.meet("connected", rank)
        runtime.release_handle()

    def run(self, body: Callable[[int], None]) -> None:
        """body(rank) on all ranks; raises what one of them raised first."""

        def run_rank(rank: int) -> None:
            self.simulation.enter(rank)
            try:
                body(rank)
            except BaseException as error:  # noqa: BLE001 - raised below
                self._errors.append(error)
            finally:
                self.simulation.leave()

        threads = [
            threading.Thread(target=run_rank, args=(rank,)) for rank in range(self.num_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
