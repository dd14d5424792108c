"""Traces with the phases of their calls, which counters know, as slices of a timeline: Perfetto and others show them."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ..core import safe_files
from ..core.package import PARTS, EPArgumentError
from .rank_trace import RankTrace
from .stream import EVENTS, TraceStream

# Of `deep_ep.observe.phases`, what passes before the operation.
_BEFORE = ("between", *PARTS)
_TRACK = "deep_ep phases"
# Traces are large, and written once.
_COMPRESSION = 1


def write(trace: RankTrace, target: Path) -> None:
    """Writes the trace again, packed if the name of the target ends in .gz.

    Phases are drawn from the begin of the operator's first kernel on (of the operator, where there is no GPU), one after the
    other, though waiting of a fresh dispatch is in two places.
    """
    if target.exists() and target.samefile(trace.path):
        raise EPArgumentError(
            f"{target}: it is the trace itself, which is still being read. Name another folder."
        )
    stream = TraceStream(trace.path)
    with safe_files.create(target) as file, _text(file, target) as out:
        out.write(f'{{"{EVENTS}": [')
        separator = "\n"
        for event in itertools.chain(stream, _slices(trace)):
            out.write(separator + json.dumps(event))
            separator = ",\n"
        out.write("\n]")
        for name, value in stream.header.items():
            out.write(f",\n{json.dumps(name)}: {json.dumps(value)}")
        out.write("}\n")


def _text(file: BinaryIO, target: Path) -> TextIO:
    if target.suffix == ".gz":
        return gzip.open(file, "wt", _COMPRESSION, "utf-8")
    return io.TextIOWrapper(file, "utf-8")


def _slices(trace: RankTrace) -> Iterator[dict[str, Any]]:
    for exchange in trace.exchanges:
        at_us = exchange.span_us[0]
        for counted in exchange.counted:
            phases = counted.phases
            for phase, ns in phases.ns.items():
                if phase in _BEFORE or not ns:
                    continue
                yield {
                    "ph": "X",
                    "cat": "deep_ep",
                    "name": phase,
                    "pid": _TRACK,
                    "tid": f"rank {trace.rank}",
                    "ts": at_us,
                    "dur": ns / 1e3,
                    "args": {"operation": phases.operation, "kind": phases.kind},
                }
                at_us += ns / 1e3
