"""The hops of normal operations: which stamps they share, and where a rank's own time passes.

A fresh dispatch has up to three hops with one number: the notices, what a gateway gets, what ends on a
rank. A combine has the last two. They share a rank's stamps of entering and leaving, so its own time is
counted once, in the hop in which it passes:

    notify            until it has sent its notices; after the last notice
    normal dispatch   from there until its last row is handed over; after everything has come and is sent
    normal combine    from the operation before until it enters; after everything has come and is sent
    gateway hops      nowhere: a gateway passes rows on while it does the rest

So does the time on paths. What a dispatch brings by way of a gateway was slow on the gateway's hop, or on a
path within the node on which the gateway's own rows are slow as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..core.diagnosis import BoolArray, FloatArray, IntArray
from ..core.package import CounterSnapshot
from .snapshot import columns

NOTIFY = "notify"
GATEWAY_DISPATCH, GATEWAY_COMBINE = GATEWAY_HOPS = ("gateway dispatch", "gateway combine")
NORMAL_DISPATCH, NORMAL_COMBINE = LAST_HOPS = ("normal dispatch", "normal combine")
ROW_HOPS = (*GATEWAY_HOPS, *LAST_HOPS)
NORMAL_KINDS = (NOTIFY, *ROW_HOPS)


def call_of(kind: str) -> str:
    """What a program calls in which this kind of operation happens."""
    if kind not in NORMAL_KINDS:
        return kind
    return "combine" if kind in (GATEWAY_COMBINE, NORMAL_COMBINE) else "dispatch"


class OwnTimes(NamedTuple):
    """What a rank does by itself in each operation; `[n]` each, ns.

    Attributes:
        gap, span, held, drain: as in `Numbers`.
        duration: of the hop.
        meets: bool, whether no rank sends before all have entered.
    """

    gap: FloatArray
    span: FloatArray
    held: FloatArray
    drain: FloatArray
    duration: FloatArray
    meets: BoolArray


def own_times(
    kind: str,
    hops: Mapping[str, CounterSnapshot],
    ops: IntArray,
    begin: IntArray,
    sent: FloatArray,
    ready: FloatArray,
    leaves: FloatArray,
    alone: OwnTimes,
) -> OwnTimes:
    """The times of one kind, seen together with the other hops of its operations.

    Args:
        kind: of operation.
        hops: counters of this rank, by kind.
        ops, begin: [n] int64, numbers and begin of waiting.
        sent, ready, leaves: [n], last row handed over, last arrival, end, after `begin`; ns.
        alone: the times as the stamps of this kind alone tell them.
    """
    unknown = np.full(ops.shape, np.nan)
    if kind in GATEWAY_HOPS:
        none = np.zeros(ops.shape)
        return OwnTimes(none, none, unknown, none, leaves, alone.meets)
    if kind not in LAST_HOPS:
        return alone
    gap, span, duration = alone.gap, alone.span, alone.duration
    noticed = since(_latest(hops.get(NOTIFY), ops, "exit"), begin)
    is_fresh = np.isfinite(noticed) & (kind == NORMAL_DISPATCH)
    gap = np.where(is_fresh, -noticed, gap)
    span = np.where(is_fresh, np.fmax(sent, 0.0), span)
    duration = np.where(is_fresh, leaves - noticed, duration)
    relayed = hops.get(GATEWAY_HOPS[LAST_HOPS.index(kind)])
    done = np.fmax(np.fmax(ready, sent), since(_latest(relayed, ops, "arrival"), begin))
    return OwnTimes(gap, span, unknown, leaves - done, duration, ~is_fresh)


def since(stamps: IntArray, begin: IntArray) -> FloatArray:
    """Subtracts in int64, where it is exact; a stamp of 0 means that there is none."""
    return np.where(stamps != 0, (stamps - begin).astype(np.float64), np.nan)


def _latest(counters: CounterSnapshot | None, ops: IntArray, name: str) -> IntArray:
    """`[n]` int64, the latest stamp of that name in each operation; 0 where the ring holds none."""
    used = None if counters is None else counters.operations()
    if counters is None or used is None or not used.shape[0]:
        return np.zeros(ops.shape, np.int64)
    sources, own = columns(counters, used)
    stamps = own[name] if name in own else sources[name].max(axis=1, initial=0)
    at = np.minimum(np.searchsorted(own["op"], ops), stamps.size - 1)
    return np.where(own["op"][at] == ops, stamps[at], 0)
