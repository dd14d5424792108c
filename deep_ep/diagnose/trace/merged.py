"""Traces with what counters know of their calls: as arguments of the operators, and as slices of a timeline.

Whatever shows traces shows them then, such as Perfetto.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ..core import safe_files
from ..core.package import PARTS, EPArgumentError, codec
from .rank_trace import RankTrace, TracedExchange, number_in
from .stream import EVENTS, TraceStream

# Of `deep_ep.observe.phases`, what passes before the operation.
_BEFORE = ("between", *PARTS)
_TRACK = "deep_ep phases"
_KEY = "deep_ep"
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
        for event in _events(stream, trace):
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


def _events(stream: Iterable[dict[str, Any]], trace: RankTrace) -> Iterator[dict[str, Any]]:
    exchanges: dict[int | None, TracedExchange] = {
        each.number: each for each in trace.exchanges if each.number is not None
    }
    for event in stream:
        arguments = event.get("args")
        if isinstance(arguments, dict):
            exchange = exchanges.get(number_in(arguments))
            if exchange is not None and exchange.name == event.get("name"):
                event = {**event, "args": {**arguments, _KEY: _known(exchange)}}
        yield event
    yield from _slices(trace)


def _known(exchange: TracedExchange) -> dict[str, Any]:
    links = None if exchange.links is None else exchange.links._asdict()
    return {"links": links, "calls": [codec.to_plain(call) for call in exchange.counted]}


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
