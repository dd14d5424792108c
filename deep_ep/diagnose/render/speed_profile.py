"""Speed and waiting of each rank and each GPU as JSON, for what places experts. docs/records.md has the fields."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core import safe_files
from ..core.diagnosis import Diagnosis, FloatArray
from ..core.package import EPArgumentError
from ..core.robust_stats import median, median_of
from ..storage.record import Record

SCHEMA = "deep_ep.speed-profile/1"
_PER_OPERATION = ("own_us", "waits_us", "waited_for_us", "tokens")


def write_speed_profile(records: Sequence[Record], path: Path) -> None:
    """Writes one JSON object: medians over windows, which must be of one group that keeps its size."""
    groups = {(record.group, record.diagnosis.num_ranks) for record in records}
    if len(groups) > 1:
        named = ", ".join(f"{group} of {size} ranks" for group, size in sorted(groups))
        raise EPArgumentError(
            f"{path}: a speed profile of windows of {named}; they must be of one group that keeps its size. "
            "Choose with --group or --window."
        )
    profile = json.dumps(speed_profile(records), allow_nan=False, indent=1)
    safe_files.write(path, profile.encode() + b"\n")


def speed_profile(records: Sequence[Record]) -> dict[str, Any]:
    """What is written, of windows of one group; numbers that are not known are None."""
    last = records[-1]
    kinds = list(dict.fromkeys(kind for r in records for kind in r.diagnosis.measured))
    of_kind = {kind: [r for r in records if kind in r.diagnosis.measured] for kind in kinds}
    numbers = {kind: _numbers(of_kind[kind], kind) for kind in kinds}
    speed = _speed(np.stack([_own_work(record) for record in records]))
    ranks = [
        {
            "rank": rank,
            "host": last.diagnosis.hosts[rank],
            "device": last.diagnosis.devices[rank],
            "speed": _known(speed[rank]),
            "operations": {
                kind: {name: _known(values[rank]) for name, values in numbers[kind].items()}
                for kind in kinds
            },
        }
        for rank in range(last.diagnosis.num_ranks)
    ]
    return {
        "schema": SCHEMA,
        "group": last.group,
        "windows": [record.window for record in records],
        "time": _known(last.time_s),
        "source": last.diagnosis.source,
        "num_operations": {
            kind: sum(r.diagnosis.measured[kind].num_operations for r in of_kind[kind])
            for kind in kinds
        },
        "ranks": ranks,
        "gpus": _gpus(last.diagnosis, speed),
    }


def _numbers(records: Sequence[Record], kind: str) -> dict[str, FloatArray]:
    """[num_ranks] each: medians over the windows, us or rows per operation."""
    windows = []
    for record in records:
        measured, means = record.diagnosis.measured[kind], record.means(kind)
        own_us = measured.gap_us + measured.send_us + measured.drain_us
        tokens = means.waiting["tokens"] * (record.diagnosis.num_ranks - 1)
        windows.append((own_us, means.waiting["wait_us"], means.waited_for["wait_us"], tokens))
    return {
        name: median(np.stack(values), 0) for name, values in zip(_PER_OPERATION, zip(*windows))
    }


def _own_work(record: Record) -> FloatArray:
    """[num_ranks]: what ranks do by themselves in a window, us."""
    total = np.zeros(record.diagnosis.num_ranks)
    for m in record.diagnosis.measured.values():
        total += (m.gap_us + m.send_us + m.drain_us) * max(m.num_operations, 1)
    return total


def _speed(own_work: FloatArray) -> FloatArray:
    """[num_ranks], median over windows, [windows, num_ranks], of how fast ranks are beside the median rank; it has 1.

    NaN where a window does not tell, as those without timestamps do.
    """
    known = np.where(own_work > 0, own_work, np.nan)
    return median(median(known, 1)[:, None] / known, 0)


def _gpus(diagnosis: Diagnosis, speed: FloatArray) -> list[dict[str, Any]]:
    """Those of hosts with a name; a rank that is missing has none."""
    ranks_of: dict[tuple[str, int], list[int]] = {}
    for rank, place in enumerate(zip(diagnosis.hosts, diagnosis.devices)):
        if place[0] not in ("", "?") and place[1] >= 0:
            ranks_of.setdefault(place, []).append(rank)
    return [
        {
            "host": host,
            "device": device,
            "ranks": ranks,
            "speed": _known(median_of(speed[ranks])),
        }
        for (host, device), ranks in ranks_of.items()
    ]


def _known(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None
