"""Diagnoses as Prometheus metrics, for a scrape or for node-exporter's textfile collector.

`docs/records.md` lists the names. Gauges are of the latest window of each group, counters grow with
every window that is added.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.diagnosis import FloatArray, Measured
from ..core.package import EPNotBuiltError, replace_file
from ..render import wording
from ..storage.record import Record

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_RANK_LABELS = ("group", "operation", "rank", "host", "device")
_MEANS = (
    ("wait_us", "Waiting"),
    ("late_us", "Waiting before the sender entered"),
    ("issue_us", "Waiting while the sender was sending"),
    ("path_us", "Waiting after the sender had sent"),
)


def write_textfile(records: Iterable[Record], path: Path | str) -> None:
    """Writes the text format to a file, which is replaced as a whole; the collector reads names that end in ".prom"."""
    replace_file(path, _client().generate_latest(Metrics(records).registry()))


class Metrics:
    """What Prometheus is told: the latest window of each group, and sums over all windows."""

    def __init__(
        self,
        records: Iterable[Record] = (),
        *,
        refresh: Callable[[], Iterable[Record]] | None = None,
    ) -> None:
        """Starts with some windows; `refresh` is called at each collection, and its records are added first."""
        self._latest: dict[str, Record] = {}
        self._operations: dict[tuple[str, str], int] = {}
        self._bytes: dict[tuple[str, str], tuple[FloatArray, FloatArray]] = {}
        self._refresh = refresh
        # Scrapes come from threads of a server.
        self._lock = threading.Lock()
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """One more window."""
        self._latest[record.group] = record
        for name, measured in record.diagnosis.measured.items():
            key = record.group, name
            self._operations[key] = self._operations.get(key, 0) + measured.num_operations
            received, sent = _bytes_per_rank(record, measured)
            before = self._bytes.get(key)
            if before is not None and before[0].shape == received.shape:
                received, sent = received + before[0], sent + before[1]
            self._bytes[key] = received, sent

    def registry(self) -> CollectorRegistry:
        """A registry that collects from this object; names are known once there is a window."""
        made: CollectorRegistry = _client().CollectorRegistry(auto_describe=False)
        made.register(self)
        return made

    def collect(self) -> Iterator[Any]:
        """Metric families, as `prometheus_client` asks for them."""
        with self._lock:
            if self._refresh is not None:
                for record in self._refresh():
                    self.add(record)
            families = [*self._verdicts(), *self._per_rank(), *self._bandwidth(), *self._totals()]
        yield from families

    def _verdicts(self) -> Iterator[Any]:
        core = _client().core
        window = core.GaugeMetricFamily(
            "deep_ep_window_end_timestamp_seconds", "End of the latest window", labels=["group"]
        )
        count = core.GaugeMetricFamily(
            "deep_ep_verdicts", "Causes of waiting found in the latest window", labels=["group"]
        )
        effect = core.GaugeMetricFamily(
            "deep_ep_verdict",
            "A cause of waiting in one operation: microseconds per operation above the healthy ones",
            labels=["group", "kind", "cause", "operation", "subject", "host"],
        )
        duration = core.GaugeMetricFamily(
            "deep_ep_duration_us",
            "Microseconds a rank spends in the operation, median",
            labels=["group", "operation"],
        )
        for group, record in self._latest.items():
            if math.isfinite(record.time_s):
                window.add_metric([group], record.time_s)
            count.add_metric([group], len(wording.by_cause(record.diagnosis.verdicts)))
            for v in record.diagnosis.verdicts:
                host = v.where if v.rank is None else record.diagnosis.hosts[v.rank]
                labels = [group, v.kind, v.cause, v.operation, wording.subject(v), host]
                effect.add_metric(labels, v.effect_us)
            for name, measured in record.diagnosis.measured.items():
                _add_known(duration, [group, name], measured.duration_us)
        return iter((window, count, effect, duration))

    def _per_rank(self) -> Iterator[Any]:
        core = _client().core
        for name, meaning in _MEANS:
            for prefix, side, over in (
                ("deep_ep_", "waiting", "the ranks waited for"),
                ("deep_ep_caused_", "waited_for", "the ranks that wait for this one"),
            ):
                family = core.GaugeMetricFamily(
                    f"{prefix}{name}",
                    f"{meaning}, microseconds per operation, mean over {over}",
                    labels=_RANK_LABELS,
                )
                for record in self._latest.values():
                    for operation in record.diagnosis.measured:
                        values = getattr(record.means(operation), side)[name]
                        _add_ranks(family, record, operation, values)
                yield family

    def _bandwidth(self) -> Iterator[Any]:
        for name, meaning in (
            ("effective", "What the program gets: bytes into a rank over all its waiting"),
            ("ingress", "Bytes into a rank while anything was on its way to it"),
            ("egress", "Bytes out of a rank while they were on their way"),
        ):
            family = _client().core.GaugeMetricFamily(
                f"deep_ep_{name}_gb_per_second", f"{meaning}, 10^9 bytes", labels=_RANK_LABELS
            )
            for record in self._latest.values():
                for operation, measured in record.diagnosis.measured.items():
                    if measured.bandwidth is not None:
                        rates = getattr(measured.bandwidth, name)
                        _add_ranks(family, record, operation, rates)
            yield family

    def _totals(self) -> Iterator[Any]:
        core = _client().core
        operations = core.CounterMetricFamily(
            "deep_ep_operations", "Operations judged", labels=["group", "operation"]
        )
        received = core.CounterMetricFamily(
            "deep_ep_received_bytes", "Bytes received from other ranks", labels=_RANK_LABELS
        )
        sent = core.CounterMetricFamily(
            "deep_ep_sent_bytes", "Bytes sent to other ranks", labels=_RANK_LABELS
        )
        for (group, operation), count in self._operations.items():
            operations.add_metric([group, operation], count)
        for (group, operation), both in self._bytes.items():
            for family, values in zip((received, sent), both):
                _add_ranks(family, self._latest[group], operation, values)
        return iter((operations, received, sent))


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


def _add_ranks(family: Any, record: Record, operation: str, values: FloatArray) -> None:
    diagnosis = record.diagnosis
    for rank, value in enumerate(values.tolist()):
        labels = [
            record.group,
            operation,
            str(rank),
            diagnosis.hosts[rank],
            str(diagnosis.devices[rank]),
        ]
        _add_known(family, labels, value)


def _add_known(family: Any, labels: Sequence[str], value: float) -> None:
    """What is not known has no sample: a NaN would spoil every sum."""
    if math.isfinite(value):
        family.add_metric(labels, value)


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
