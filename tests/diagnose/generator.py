"""Timestamps as a group of ranks would record them, with known faults. Knows nothing of the rules.

The protocol is followed causally: a rank enters when it is done with the operation before, so one
rank's fault delays the others in later operations just as it does in a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deep_ep.counters import CounterSnapshot
from deep_ep.diagnose.snapshot import Snapshot
from deep_ep.faults import Fault, HotRank, SlowPath, SlowRank

COUNTER_FIELDS = (
    "ops",
    "tokens",
    "bytes",
    "wait_ns",
    "late_ns",
    "issue_ns",
    "path_ns",
    "slack_ns",
    "critical_ops",
    "critical_ns",
    "max_wait_ns",
)
OWN_FIELDS = ("ops", "gap_ns", "send_ns", "wait_ns", "drain_ns")
RING_SOURCE_FIELDS = ("entered", "issued", "arrival", "tokens")
RING_OWN_FIELDS = ("op", "wait_begin", "exit", "previous_exit")
TOKEN_BYTES = 7168


@dataclass(frozen=True)
class Machine:
    """How healthy ranks behave; times in microseconds.

    Attributes:
        jitter: scale of the noise of each piece of work of a rank.
        path_jitter: scale of the noise of each path.
        spread: how far healthy ranks differ from each other for good, as a share of their work.
        clock_error, drift_ppm: of the offsets between ranks, standard deviations.
        true_arrival: whether an arrival before the begin of waiting is stamped as such, or as the
            begin of waiting.
        hook_us: work between sending and beginning to wait.
    """

    gap: float
    compute_per_token: float
    send: float
    send_per_token: float
    path: float
    path_per_token: float
    drain: float
    drain_per_token: float
    jitter: float
    path_jitter: float
    spread: float = 0.01
    clock_error: float = 0.0
    drift_ppm: float = 0.0
    true_arrival: bool = True
    hook_us: float = 0.0
    device: str = "cpu"


CPU = Machine(
    gap=800.0,
    compute_per_token=0.2,
    send=3000.0,
    send_per_token=1.0,
    path=2.0,
    path_per_token=0.0,
    drain=1500.0,
    drain_per_token=1.0,
    jitter=400.0,
    path_jitter=1.0,
)
GPU = Machine(
    gap=150.0,
    compute_per_token=0.05,
    send=10.0,
    send_per_token=0.01,
    path=8.0,
    path_per_token=0.05,
    drain=10.0,
    drain_per_token=0.01,
    jitter=3.0,
    path_jitter=1.0,
    clock_error=0.3,
    true_arrival=False,
    device="cuda",
    spread=0.003,
)


def simulate(
    machine: Machine,
    num_ranks: int,
    num_rounds: int,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    tokens_per_rank: int = 1024,
    capacity: int = 64,
) -> list[Snapshot]:
    """Runs `num_rounds` of dispatch and combine; returns every rank's snapshot.

    The rings hold the last `capacity` operations of both kinds together.
    """
    rng = np.random.default_rng(seed)
    recorders = {kind: _Recorder(num_ranks, capacity) for kind in ("dispatch", "combine")}
    personal = 1.0 + machine.spread * np.clip(rng.normal(size=num_ranks), -2, 2)
    slow = np.zeros(num_ranks)
    path_fault = np.zeros((num_ranks, num_ranks))
    path_rate = np.zeros((num_ranks, num_ranks))  # us per token
    share = np.ones(num_ranks)
    for fault in faults:
        if isinstance(fault, SlowRank):
            slow[fault.rank] += fault.delay_s * 1e6
        elif isinstance(fault, SlowPath):
            path_fault[fault.dst, fault.src] += fault.delay_s * 1e6
            if fault.bytes_per_s:
                path_rate[fault.dst, fault.src] = TOKEN_BYTES / fault.bytes_per_s * 1e6
        elif isinstance(fault, HotRank):
            share[fault.rank] = fault.share
    for fault in faults:
        if isinstance(fault, HotRank):
            others = np.arange(num_ranks) != fault.rank
            share[others] *= max(num_ranks - share[fault.rank], 0.0) / (num_ranks - 1)
    probability = share / share.sum()

    # Stamps carry what the measured clock offsets are wrong by; each rank's clock has its own zero.
    error = machine.clock_error * rng.normal(size=num_ranks)
    drift = machine.drift_ppm * 1e-6 * rng.normal(size=num_ranks)
    zero = rng.integers(10**12, 10**15, num_ranks)

    order = (np.arange(num_ranks)[:, None] + 1) / num_ranks
    exit_at = rng.uniform(0, 10 * machine.jitter, num_ranks)
    op = 0
    has_exit = False
    for _ in range(num_rounds):
        dispatched = rng.multinomial(
            tokens_per_rank, probability, num_ranks
        ).T  # [expert rank, source]
        for kind in ("dispatch", "combine"):
            op += 1
            tokens = dispatched if kind == "dispatch" else dispatched.T
            compute = machine.compute_per_token * tokens.sum(axis=0) if kind == "combine" else 0.0
            gap = personal * (machine.gap + compute) + _noise(rng, machine.jitter, num_ranks)
            entered = exit_at + np.maximum(gap, 0.0) + slow
            send = personal * (machine.send + machine.send_per_token * tokens.sum(axis=0))
            send = np.maximum(send + _noise(rng, machine.jitter / 3, num_ranks), 0.0)
            issued = entered + send
            # A source issues to one destination after the other, to the last when all is sent.
            issued_to = entered + send * (1 - 0.2 * (1 - order))
            wait_begin = issued + machine.hook_us * personal
            path = machine.path + machine.path_per_token * tokens + path_fault + path_rate * tokens
            path = path + np.abs(_noise(rng, machine.path_jitter, (num_ranks, num_ranks)))
            np.fill_diagonal(path, 0.0)
            arrival = issued_to + path
            ready = np.maximum(wait_begin, arrival.max(axis=1))
            drain = personal * (machine.drain + machine.drain_per_token * tokens.sum(axis=1))
            leaves = ready + np.maximum(drain + _noise(rng, machine.jitter / 3, num_ranks), 0.0)

            seen = arrival if machine.true_arrival else np.maximum(arrival, wait_begin[:, None])
            wrong = (error + drift * entered)[:, None] - (error + drift * entered)[None, :]
            np.fill_diagonal(wrong, 0.0)
            to_ns = lambda t: np.round(t * 1e3).astype(np.int64)  # noqa: E731
            recorders[kind].add(
                op,
                entered=to_ns(entered[None, :] + wrong) + zero[:, None],
                issued=to_ns(issued_to + wrong) + zero[:, None],
                arrival=to_ns(seen) + zero[:, None],
                tokens=tokens,
                wait_begin=to_ns(wait_begin) + zero,
                exit_=to_ns(leaves) + zero,
                previous_exit=to_ns(exit_at) + 500 + zero
                if has_exit
                else np.zeros(num_ranks, np.int64),
            )
            exit_at, has_exit = leaves, True
    return [
        Snapshot(
            rank=rank,
            num_ranks=num_ranks,
            device=machine.device,
            host="host0",
            operations={kind: r.snapshot(rank) for kind, r in recorders.items()},
        )
        for rank in range(num_ranks)
    ]


def _noise(rng: np.random.Generator, scale: float, shape: int | tuple[int, ...]) -> np.ndarray:
    """Heavy-tailed: Student's t with 3 degrees of freedom, and one hiccup in a hundred."""
    noise = 0.8 * rng.standard_t(3, shape)
    hiccup = rng.random(shape) < 0.01
    return scale * (noise + np.where(hiccup, rng.exponential(10.0, shape), 0.0))


class _Recorder:
    """What the kernels would have written, for all ranks, of one operation kind."""

    def __init__(self, num_ranks: int, capacity: int) -> None:
        self.num_ranks = num_ranks
        self.totals = np.zeros((num_ranks, len(COUNTER_FIELDS), num_ranks), np.int64)
        self.own = np.zeros((num_ranks, len(OWN_FIELDS)), np.int64)
        self.ring = np.zeros((num_ranks, capacity, num_ranks + 1, 4), np.int64)

    def add(
        self,
        op: int,
        *,
        entered: np.ndarray,
        issued: np.ndarray,
        arrival: np.ndarray,
        tokens: np.ndarray,
        wait_begin: np.ndarray,
        exit_: np.ndarray,
        previous_exit: np.ndarray,
    ) -> None:
        if self.ring.shape[1]:
            slot = self.ring[:, op % self.ring.shape[1]]
            slot[:, :-1] = np.stack([entered, issued, arrival, tokens], axis=-1)
            stamps = [np.full(self.num_ranks, op), wait_begin, exit_, previous_exit]
            slot[:, -1] = np.stack(stamps, axis=-1)

        begin = wait_begin[:, None]
        wait = np.maximum(arrival - begin, 0)
        late = np.clip(entered - begin, 0, wait)
        issue = np.clip(issued - np.maximum(entered, begin), 0, wait - late)
        ordered = np.sort(arrival, axis=1)
        lead = ordered[:, -1] - np.maximum(ordered[:, -2:][:, 0], wait_begin)
        critical = np.zeros_like(wait)
        rows = np.arange(self.num_ranks)
        critical[rows, np.argmax(arrival, axis=1)] = np.maximum(lead, 0)
        values = {
            "ops": np.ones_like(wait),
            "tokens": tokens,
            "bytes": tokens * TOKEN_BYTES,
            "wait_ns": wait,
            "late_ns": late,
            "issue_ns": issue,
            "path_ns": wait - late - issue,
            "slack_ns": np.maximum(begin - issued, 0),
            "critical_ops": critical > 0,
            "critical_ns": critical,
        }
        for name, value in values.items():
            self.totals[:, COUNTER_FIELDS.index(name)] += value
        largest = self.totals[:, COUNTER_FIELDS.index("max_wait_ns")]
        np.maximum(largest, wait, out=largest)

        own_entered, sends = np.diagonal(entered), (issued - entered).max(axis=0)
        ready = np.maximum(arrival.max(axis=1), wait_begin)
        own_values = {
            "ops": np.ones(self.num_ranks, np.int64),
            "gap_ns": np.where(previous_exit != 0, own_entered - previous_exit, 0),
            "send_ns": sends,
            "wait_ns": ready - wait_begin,
            "drain_ns": exit_ - ready,
        }
        for name, value in own_values.items():
            self.own[:, OWN_FIELDS.index(name)] += value

    def snapshot(self, rank: int) -> CounterSnapshot:
        return CounterSnapshot(
            fields=COUNTER_FIELDS,
            own_fields=OWN_FIELDS,
            ring_source_fields=RING_SOURCE_FIELDS,
            ring_own_fields=RING_OWN_FIELDS,
            totals=self.totals[rank].copy(),
            own=self.own[rank].copy(),
            ring=self.ring[rank].copy(),
        )
