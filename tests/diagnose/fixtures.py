"""What is diagnosed: exchanges of real ranks, and diagnoses made by hand for what shows and stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

import deep_ep
from deep_ep.diagnose.core.causes import COMM_SLOW, COMP_SLOW, MIXED_SLOW
from deep_ep.diagnose.core.diagnosis import (
    Bandwidth,
    Diagnosis,
    FloatArray,
    Measured,
    Outlier,
    Timeline,
    Verdict,
)
from deep_ep.diagnose.storage.diagnosis_log import Log
from deep_ep.diagnose.storage.log_follower import Follower
from support.exchange import Shape
from support.launch import DEVICE

SHAPE = Shape((8,) * 4, num_max_tokens=8, hidden=256, num_experts=8, num_topk=2)
OF_TWO_RANKS = replace(SHAPE, num_tokens=(8, 8))


def caught_up(follower: Follower) -> Log:
    """All that came since the last time, together."""
    found = list(follower.catch_up())
    return Log(
        [one for one in found if not isinstance(one, str)],
        tuple(one for one in found if isinstance(one, str)),
    )


def comparable(value: Any) -> Any:
    """What == compares, type and value: dictionaries in their order, NaN as a word, data classes by their fields."""
    inner: Any = value
    if is_dataclass(value):
        inner = {f.name: getattr(value, f.name) for f in fields(value)}
    elif isinstance(value, np.ndarray):
        return value.dtype, comparable(value.tolist())
    if isinstance(inner, dict):
        return type(value), [(key, comparable(item)) for key, item in inner.items()]
    if isinstance(inner, (list, tuple)):
        return type(value), [comparable(item) for item in inner]
    return type(value), "NaN" if isinstance(value, float) and np.isnan(value) else value


LATE_RANK = 1
LATE = Verdict(
    kind=COMP_SLOW,
    cause="late",
    operation="dispatch",
    rank=LATE_RANK,
    edge=None,
    effect_us=2013.0,
    share=0.98,
    seen_in=0.97,
    evidence={"own_time_over_median_us": 2020.5, "error_us": 12.25},
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
UPLINK = replace(SLOW_PATH, cause="uplink", edge=None, node=1, effect_us=75.0, where="node1")
EVERYWHERE = replace(SLOW_PATH, cause="everywhere", edge=None, effect_us=60.0, where="")
HOT = replace(
    LATE, kind=MIXED_SLOW, cause="hot experts", rank=3, effect_us=90.0, where="node0 cuda:3"
)
ALL_KINDS = (LATE, SLOW_PATH, HOT, NODE_PAIR, RAIL, UPLINK, EVERYWHERE)
HICCUP = Outlier("dispatch", 1234, 3, 20_100.0)

# A slice, because the smallest group lacks that rank.
_LATE_COLUMN = np.s_[:, LATE_RANK : LATE_RANK + 1]


def exchange(buffer: deep_ep.Buffer, num_rounds: int) -> None:
    """Dispatches and combines of SHAPE; every expert gets as many rows of each rank."""
    num_tokens, num_topk = SHAPE.num_max_tokens, SHAPE.num_topk
    x = torch.ones(num_tokens, SHAPE.hidden, dtype=torch.bfloat16, device=DEVICE)
    topk_idx = torch.arange(num_tokens * num_topk, device=DEVICE) % SHAPE.num_experts
    topk_idx = topk_idx.view(num_tokens, num_topk)
    weights = torch.ones(num_tokens, num_topk, device=DEVICE)
    for _ in range(num_rounds):
        received, _, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, num_tokens, SHAPE.num_experts, use_fp8=False
        )
        buffer.low_latency_combine(received, topk_idx, weights, handle)


def measured(
    num_ranks: int,
    operation: str = "dispatch",
    *,
    missing: Sequence[int] = (),
    stamped: bool = True,
    seed: int = 0,
) -> Measured:
    """LATE_RANK is waited for 2,000 us and more, everybody else some tens; path 2 > 5 has 1.5 GB/s.

    Of `missing` ranks nothing is known; without stamps there is neither bandwidth nor timeline.
    """
    rng = np.random.default_rng(seed)
    rank = np.arange(num_ranks)
    known = np.where(np.isin(rank, missing), np.nan, 1.0)
    known_pairs = known[:, None] * known

    def vector(scale: float) -> FloatArray:
        return known * rng.uniform(0.5, 1.0, num_ranks) * scale

    def matrix(scale: float) -> FloatArray:
        return known_pairs * rng.uniform(0.5, 1.0, (num_ranks, num_ranks)) * scale

    late, issue, path = matrix(40), matrix(10), matrix(30)
    late[_LATE_COLUMN] += 2000.0 + rank[:, None]
    edge = matrix(40)
    edge[5:6, 2:3] = 1.5 * known_pairs[5:6, 2:3]
    np.fill_diagonal(edge, np.nan)
    # Every rank sends, and gets, 64 on average over the others.
    tokens = known_pairs * (60.0 + 8.0 * ((rank - rank[:, None]) % num_ranks) / num_ranks)
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
        tokens=tokens,
        bytes=tokens * 7168,
        gap_us=vector(300),
        send_us=vector(20),
        drain_us=vector(30),
        own_wait_us=vector(400),
        bandwidth=Bandwidth(edge, vector(90), vector(80), vector(12)) if stamped else None,
        timeline=_timeline(known, rng) if stamped else None,
    )


def _timeline(known: FloatArray, rng: np.random.Generator) -> Timeline:
    """The last twelve dispatches; known [num_ranks]: NaN where the rank is missing, else 1."""
    shape = 12, known.size
    entered = known * rng.uniform(-20, 20, shape)
    entered[_LATE_COLUMN] += 2000.0
    arrival = np.maximum(entered, 0.0) + rng.uniform(20, 90, shape)
    return Timeline(
        observer=0,
        ops=np.arange(1417, 1441, 2),
        begin_us=np.arange(12) * 2500.0,
        entered_us=entered,
        arrival_us=arrival,
        last=np.nanargmax(arrival, axis=1),
    )


def diagnosis(
    num_ranks: int = 8,
    verdicts: Sequence[Verdict] | None = None,
    *,
    operations: Sequence[str] = ("dispatch", "combine"),
    per_host: int = 8,
    missing: Sequence[int] = (),
    stamped: bool = True,
    seed: int = 0,
) -> Diagnosis:
    """A group on hosts node0, node1, ...; `verdicts`: LATE unless given; the rest as in `measured`."""
    if verdicts is None:
        verdicts = [LATE] if num_ranks > LATE_RANK else []
    ranks = range(num_ranks)
    return Diagnosis(
        measured={
            name: measured(num_ranks, name, missing=missing, stamped=stamped, seed=seed + index)
            for index, name in enumerate(operations)
        },
        verdicts=list(verdicts),
        remarks=[],
        hosts=tuple("" if rank in missing else f"node{rank // per_host}" for rank in ranks),
        devices=tuple(-1 if rank in missing else rank % per_host for rank in ranks),
        device="cuda",
        savings_us=dict.fromkeys(operations, 2025.0) if verdicts else {},
    )
