"""Diagnoses as Prometheus metrics, for a scrape or for node-exporter's textfile collector.

`docs/records.md` lists the names. Gauges are of the latest window of each group, counters grow with
every window that is added.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.diagnosis import FloatArray, Measured
from ..core.package import EPArgumentError, EPNotBuiltError, printable, replace_file
from ..render import wording
from ..storage.record import Record

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_OF_GROUP, _OF_OPERATION = ("group",), ("group", "operation")
_OF_RANK = ("group", "operation", "rank", "host", "device")
_OF_VERDICT = ("group", "kind", "cause", "operation", "subject", "host")
_US = "microseconds per operation"
_FOR, _BY = "mean over the ranks waited for", "mean over the ranks that wait for this one"
# What each gauge means, and its labels; "deep_ep_" stands before the names.
_GAUGES = {
    "window_end_timestamp_seconds": ("End of the latest window", _OF_GROUP),
    "verdicts": ("Causes of waiting found in the latest window", _OF_GROUP),
    "verdict": (f"A cause of waiting in one operation: {_US} above the healthy ones", _OF_VERDICT),
    "duration_us": ("Microseconds a rank spends in the operation, median", _OF_OPERATION),
    "wait_us": (f"Waiting, {_US}, {_FOR}", _OF_RANK),
    "caused_wait_us": (f"Waiting, {_US}, {_BY}", _OF_RANK),
    "late_us": (f"Waiting before the sender entered, {_US}, {_FOR}", _OF_RANK),
    "caused_late_us": (f"Waiting before the sender entered, {_US}, {_BY}", _OF_RANK),
    "issue_us": (f"Waiting while the sender was sending, {_US}, {_FOR}", _OF_RANK),
    "caused_issue_us": (f"Waiting while the sender was sending, {_US}, {_BY}", _OF_RANK),
    "path_us": (f"Waiting after the sender had sent, {_US}, {_FOR}", _OF_RANK),
    "caused_path_us": (f"Waiting after the sender had sent, {_US}, {_BY}", _OF_RANK),
    "effective_gb_per_second": (
        "What the program gets: bytes into a rank over all its waiting, 10^9 bytes",
        _OF_RANK,
    ),
    "ingress_gb_per_second": (
        "Bytes into a rank while anything was on its way to it, 10^9 bytes",
        _OF_RANK,
    ),
    "egress_gb_per_second": (
        "Bytes out of a rank while they were on their way, 10^9 bytes",
        _OF_RANK,
    ),
}
_COUNTERS = {
    "operations": ("Operations judged", _OF_OPERATION),
    "received_bytes": ("Bytes received from other ranks", _OF_RANK),
    "sent_bytes": ("Bytes sent to other ranks", _OF_RANK),
}


def write_textfile(records: Iterable[Record], path: Path | str) -> None:
    """Writes the text format to a file, which is replaced as a whole; the collector reads names that end in ".prom".

    Everybody may read it: the collector runs as a user of its own.

    Raises:
        EPArgumentError: what has that name is no file, so nothing may take its place.
        OSError: the file cannot be written.
    """
    path = Path(path)
    # /dev/stdout is a link to what the process has open, which may be a file.
    is_stream = path.is_symlink() and os.readlink(path).startswith("/proc/")
    if is_stream or (path.exists() and not path.is_file()):
        raise EPArgumentError(
            f"{printable(str(path))} is no regular file, and the metrics would take its place. Name a file, such as "
            "deep_ep.prom."
        )
    metrics = Metrics(lambda: records)
    replace_file(path, _client().generate_latest(metrics.registry()), mode=0o644)


class Metrics:
    """What Prometheus is told: the latest window of each group, and sums over all windows."""

    def __init__(self, new_records: Callable[[], Iterable[Record]]) -> None:
        """Knows no window yet; `new_records` is called at each collection, which adds what it returns."""
        self._latest: dict[str, Record] = {}
        self._operations: dict[tuple[str, str], int] = {}
        # Of each operation, the record that had it last, and bytes received and sent by its ranks.
        self._bytes: dict[tuple[str, str], tuple[Record, FloatArray, FloatArray]] = {}
        self._new_records = new_records
        # Scrapes come from threads of a server.
        self._lock = threading.Lock()

    def _add(self, record: Record) -> None:
        self._latest[record.group] = record
        for name, measured in record.diagnosis.measured.items():
            key = record.group, name
            self._operations[key] = self._operations.get(key, 0) + measured.num_operations
            received, sent = _bytes_per_rank(record, measured)
            before = self._bytes.get(key)
            if before is not None and before[1].shape == received.shape:
                received, sent = received + before[1], sent + before[2]
            self._bytes[key] = record, received, sent

    def registry(self) -> CollectorRegistry:
        """A registry that collects from this object; names are known once there is a window."""
        made: CollectorRegistry = _client().CollectorRegistry(auto_describe=False)
        made.register(self)
        return made

    def collect(self) -> Iterator[Any]:
        """Metric families, as `prometheus_client` asks for them."""
        with self._lock:
            for record in self._new_records():
                self._add(record)
            families = self._families()
        yield from families

    def _families(self) -> list[Any]:
        core = _client().core
        made = {}
        for name, (meaning, names) in _GAUGES.items():
            made[name] = core.GaugeMetricFamily(f"deep_ep_{name}", meaning, labels=names)
        for name, (meaning, names) in _COUNTERS.items():
            made[name] = core.CounterMetricFamily(f"deep_ep_{name}", meaning, labels=names)
        for record in self._latest.values():
            _add_gauges(made, record)
        for (group, operation), count in self._operations.items():
            made["operations"].add_metric([group, operation], count)
        for (_, operation), (record, received, sent) in self._bytes.items():
            _add_ranks(made["received_bytes"], record, operation, received)
            _add_ranks(made["sent_bytes"], record, operation, sent)
        return list(made.values())


def _add_gauges(families: Mapping[str, Any], record: Record) -> None:
    """Of one window. What is not known has no sample: a NaN would spoil every sum."""
    diagnosis, group = record.diagnosis, record.group
    if math.isfinite(record.time_s):
        families["window_end_timestamp_seconds"].add_metric([group], record.time_s)
    families["verdicts"].add_metric([group], len(diagnosis.keys))
    for v in diagnosis.verdicts:
        host = v.where if v.rank is None else diagnosis.hosts[v.rank]
        labels = [group, v.kind, v.cause, v.operation, wording.subject(v), host]
        families["verdict"].add_metric(labels, v.effect_us)
    for operation, measured in diagnosis.measured.items():
        if math.isfinite(measured.duration_us):
            families["duration_us"].add_metric([group, operation], measured.duration_us)
        means = record.means(operation)
        for name in ("wait_us", "late_us", "issue_us", "path_us"):
            _add_ranks(families[name], record, operation, means.waiting[name])
            _add_ranks(families[f"caused_{name}"], record, operation, means.waited_for[name])
        if measured.bandwidth is not None:
            for name in ("effective", "ingress", "egress"):
                rates = getattr(measured.bandwidth, name)
                _add_ranks(families[f"{name}_gb_per_second"], record, operation, rates)


def _add_ranks(family: Any, record: Record, operation: str, values: FloatArray) -> None:
    diagnosis = record.diagnosis
    for rank, value in enumerate(values.tolist()):
        if math.isfinite(value):
            place = diagnosis.hosts[rank], str(diagnosis.devices[rank])
            family.add_metric([record.group, operation, str(rank), *place], value)


def serve(metrics: Metrics, host: str, port: int) -> Any:
    """Serves `/metrics` from a thread of its own; returns the HTTP server, which `shutdown()` ends."""
    server, _ = _client().start_http_server(port, host, metrics.registry())
    return server


def _bytes_per_rank(record: Record, measured: Measured) -> tuple[FloatArray, FloatArray]:
    """[num_ranks] each: bytes received and sent in the window; 0 where unknown, so that sums go on."""
    means = record.means(measured.operation)
    received, sent = means.waiting["bytes"], means.waited_for["bytes"]
    # Bytes are counted by who receives them.
    counted = np.isfinite(received)
    return (
        np.nan_to_num(received) * (received.size - 1) * measured.num_operations,
        np.nan_to_num(sent) * (counted.sum() - counted) * measured.num_operations,
    )


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError as error:
        raise EPNotBuiltError(
            f"metrics: prometheus_client cannot be imported ({error}), and it writes the text format. "
            "Install it: pip install 'deep_ep[report]'."
        ) from error
    return prometheus_client
