"""Diagnosis objects with numbers made by hand, to test what shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deep_ep.diagnose.findings import (
    COMM_SLOW,
    COMP_SLOW,
    Bandwidth,
    Diagnosis,
    Event,
    FloatArray,
    Measured,
    Timeline,
    Verdict,
)

LATE_RANK = 2


def hosts_of(num_ranks: int, per_host: int) -> tuple[str, ...]:
    return tuple(f"node{rank // per_host}" for rank in range(num_ranks))


def measured(
    num_ranks: int,
    operation: str = "dispatch",
    *,
    missing: Sequence[int] = (),
    bandwidth: bool = True,
    timeline: bool = True,
    seed: int = 0,
) -> Measured:
    """Every rank waits some microseconds for every other, and about 500 us more for LATE_RANK."""
    random = np.random.default_rng(seed)
    shape = (num_ranks, num_ranks)
    late = random.gamma(2.0, 2.0, shape)
    if num_ranks > LATE_RANK:
        late[:, LATE_RANK] += 500.0 + np.arange(num_ranks)
    issue, path = random.gamma(2.0, 1.0, shape), random.gamma(2.0, 4.0, shape)
    tokens = random.poisson(64.0, shape).astype(np.float64)
    for values in (late, issue, path, tokens):
        values[list(missing), :] = np.nan
        values[:, list(missing)] = np.nan
    wait = late + issue + path
    own = [random.gamma(2.0, 50.0, num_ranks) for _ in range(4)]
    return Measured(
        operation, 500, 101, 600, 612.0, wait, late, issue, path, tokens, tokens * 7168.0, *own,
        bandwidth=made_up_bandwidth(wait, tokens * 7168.0) if bandwidth else None,
        timeline=made_up_timeline(num_ranks, random) if timeline else None,
    )  # fmt: skip


def made_up_bandwidth(wait_us: FloatArray, num_bytes: FloatArray) -> Bandwidth:
    edge = num_bytes / wait_us / 1e3
    known = np.isfinite(edge)
    into, out = (
        np.where(known.any(axis), np.where(known, edge, 0.0).sum(axis), np.nan) for axis in (1, 0)
    )
    return Bandwidth(edge, into, out, into / edge.shape[0])


def made_up_timeline(num_ranks: int, random: np.random.Generator, num_ops: int = 12) -> Timeline:
    entered = random.normal(0.0, 20.0, (num_ops, num_ranks))
    if num_ranks > LATE_RANK:
        entered[:, LATE_RANK] += 500.0
    arrival = np.maximum(entered, 0.0) + random.gamma(2.0, 10.0, entered.shape)
    return Timeline(
        observer=0,
        ops=np.arange(589, 589 + num_ops),
        begin_us=np.arange(num_ops) * 2500.0,
        entered_us=entered,
        arrival_us=arrival,
        last=np.argmax(arrival, axis=1),
    )


def late_verdict(operation: str = "dispatch", **changed: Any) -> Verdict:
    fields: dict[str, Any] = {
        "kind": COMP_SLOW,
        "cause": "late",
        "operation": operation,
        "rank": LATE_RANK,
        "edge": None,
        "effect_us": 503.5,
        "share": 0.93,
        "seen_in": 1.0,
        "evidence": {"late_us": 503.5, "gap_us": 510.0},
        "next_step": "Look at what rank 2 computes before it.",
        "where": "node0 cuda:2",
        "interval_us": (497.0, 510.0),
        "saving_us": 480.0,
        "duration_us": 612.0,
        "certainty": 0.99999,
    }
    return Verdict(**{**fields, **changed})


def path_verdict(source: int = 1, destination: int = 3, effect_us: float = 60.0) -> Verdict:
    return late_verdict(
        kind=COMM_SLOW, cause="path", rank=None, edge=(source, destination), effect_us=effect_us,
        where="node0 cuda:1 > node0 cuda:3", interval_us=(float("nan"), float("nan")),
        next_step="Check the link between them.",
    )  # fmt: skip


def diagnosis(
    num_ranks: int,
    *,
    operations: Sequence[str] = ("dispatch", "combine"),
    verdicts: Sequence[Verdict] | None = None,
    remarks: Sequence[str] = (),
    events: Sequence[Event] = (),
    per_host: int = 8,
    missing: Sequence[int] = (),
    hosts: Mapping[int, str] | None = None,
    seed: int = 0,
    **given: Any,
) -> Diagnosis:
    """A window of `num_ranks` ranks; `hosts` renames some, `missing` ones have sent nothing."""
    names = list(hosts_of(num_ranks, per_host))
    for rank, name in {**(hosts or {}), **dict.fromkeys(missing, "")}.items():
        names[rank] = name
    devices = [-1 if rank in missing else rank % per_host for rank in range(num_ranks)]
    if verdicts is None:
        verdicts = [late_verdict()] if num_ranks > LATE_RANK else []
    return Diagnosis(
        measured={
            name: measured(num_ranks, name, missing=missing, seed=seed + index, **given)
            for index, name in enumerate(operations)
        },
        verdicts=verdicts,
        remarks=remarks,
        events=events,
        hosts=tuple(names),
        devices=tuple(devices),
        device="cuda",
    )
