"""Diagnoses made by hand, with known contents, for what shows and stores them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deep_ep.diagnose.findings import (
    COMM_SLOW,
    COMP_SLOW,
    MIXED_SLOW,
    Bandwidth,
    Diagnosis,
    Event,
    Measured,
    Timeline,
    Verdict,
)

LATE = Verdict(
    kind=COMP_SLOW,
    cause="late",
    operation="dispatch",
    rank=1,
    edge=None,
    effect_us=2013.0,
    share=0.98,
    seen_in=0.97,
    evidence={"own time over median us": 2020.5, "error us": 12.25},
    next_step="Check clocks, throttling and host code of rank 1.",
    where="node0 cuda:1",
    interval_us=(1990.0, 2040.0),
    saving_us=2020.0,
    duration_us=2430.0,
    certainty=0.999999,
)
SLOW_PATH = replace(
    LATE,
    kind=COMM_SLOW,
    cause="path",
    rank=None,
    edge=(2, 5),
    effect_us=512.0,
    share=0.3,
    next_step="Check the link from rank 2 to rank 5.",
    where="node0 cuda:2 > node1 cuda:1",
)
NODE_PAIR = replace(
    SLOW_PATH, cause="node pair", edge=None, nodes=(0, 1), effect_us=80.0, where="node0 > node1"
)
RAIL = replace(SLOW_PATH, cause="rail", edge=None, rail=3, effect_us=70.0, where="all hosts cuda:3")
EVERYWHERE = replace(SLOW_PATH, cause="everywhere", edge=None, effect_us=60.0, where="")
HOT = replace(
    LATE, kind=MIXED_SLOW, cause="hot experts", rank=3, effect_us=90.0, where="node0 cuda:3"
)
ALL_KINDS = (LATE, SLOW_PATH, HOT, NODE_PAIR, RAIL, EVERYWHERE)


def measured(num_ranks: int, operation: str = "dispatch", seed: int = 1) -> Measured:
    """Rank 1 is waited for 2,000 us, everybody else some tens; path 2 > 5 has 1.5 GB/s."""
    rng = np.random.default_rng(seed)

    def matrix(scale: float) -> np.ndarray:
        return np.round(rng.uniform(0.5, 1.0, (num_ranks, num_ranks)) * scale, 3)

    def vector(scale: float) -> np.ndarray:
        return np.round(rng.uniform(0.5, 1.0, num_ranks) * scale, 3)

    late, issue, path = matrix(40), matrix(10), matrix(30)
    if num_ranks > 1:
        late[:, 1] = 2000.0
    edge = matrix(40)
    if num_ranks > 5:
        edge[5, 2] = 1.5
    np.fill_diagonal(edge, np.nan)
    count = 3
    return Measured(
        operation=operation,
        num_operations=120,
        first_operation=1201,
        last_operation=1440,
        duration_us=2430.0,
        wait_us=late + issue + path,
        late_us=late,
        issue_us=issue,
        path_us=path,
        tokens=np.full((num_ranks, num_ranks), 64.0),
        bytes=np.full((num_ranks, num_ranks), 64.0 * 7168),
        gap_us=vector(300),
        send_us=vector(20),
        drain_us=vector(30),
        own_wait_us=vector(400),
        bandwidth=Bandwidth(edge, vector(90), vector(80), vector(12)),
        timeline=Timeline(
            observer=0,
            ops=np.arange(1201, 1201 + count),
            begin_us=np.arange(count) * 2500.0,
            entered_us=np.round(rng.uniform(-20, 20, (count, num_ranks)), 3),
            arrival_us=np.round(rng.uniform(20, 90, (count, num_ranks)), 3),
            last=np.full(count, min(1, num_ranks - 1)),
        ),
    )


def diagnosis(
    num_ranks: int = 8, verdicts: tuple[Verdict, ...] = (LATE,), per_host: int = 8
) -> Diagnosis:
    """A group on hosts node0, node1, ... with both operations measured."""
    return Diagnosis(
        measured={
            name: measured(num_ranks, name, seed)
            for seed, name in enumerate(("dispatch", "combine"))
        },
        verdicts=list(verdicts),
        remarks=[],
        hosts=tuple(f"node{rank // per_host}" for rank in range(num_ranks)),
        devices=tuple(rank % per_host for rank in range(num_ranks)),
        device="cuda",
        savings_us={"dispatch": 2025.0} if verdicts else {},
    )


HICCUP = Event("dispatch", 1234, 3, 20_100.0)
