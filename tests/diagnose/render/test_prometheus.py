"""Metrics: the text format that Prometheus reads, with the numbers of the diagnosis."""

from __future__ import annotations

import math
import os
import re
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fixtures
from deep_ep.diagnose.core.diagnosis import Diagnosis
from deep_ep.diagnose.render.prometheus import Metrics, serve, write_textfile
from deep_ep.diagnose.storage import diagnosis_log
from deep_ep.diagnose.storage.record import Record
from deep_ep.diagnose.storage.record_layout import to_line
from deep_ep.errors import EPArgumentError, EPNotBuiltError
from support import system_tools

parser = system_tools.package("prometheus_client.parser")


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by its name and labels, as Prometheus would read them."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def text_of(given: Any, folder: Path) -> str:
    file = folder / "deep_ep.prom"
    write_textfile(given if isinstance(given, list) else [given], file)
    return file.read_text(encoding="utf-8")


def value(found: dict[Any, float], name: str, **labels: Any) -> float:
    """The one sample that has these labels."""
    wanted = {(key, str(label)) for key, label in labels.items()}
    matching = [v for (n, has), v in found.items() if n == name and wanted <= has]
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]


def record(diagnosis: Diagnosis | None = None, **changes: Any) -> Record:
    made = Record(diagnosis or fixtures.diagnosis(8, fixtures.ALL_KINDS), 1.7e9, 1, "ep")
    return replace(made, **changes)


def off_diagonal(matrix: Any) -> Any:
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)


def test_a_cause_of_two_operations_is_counted_once(tmp_path: Path) -> None:
    both = (fixtures.LATE, replace(fixtures.LATE, operation="combine"))
    found = samples(text_of(record(fixtures.diagnosis(8, both)), tmp_path))
    assert value(found, "deep_ep_verdicts", group="ep") == 1
    for operation in ("dispatch", "combine"):
        assert value(found, "deep_ep_verdict", operation=operation) == 2013.0


def test_verdicts_are_there_with_their_effect(tmp_path: Path) -> None:
    found = samples(text_of(record(), tmp_path))
    assert value(found, "deep_ep_verdicts", group="ep") == len(fixtures.ALL_KINDS)
    effect = value(
        found,
        "deep_ep_verdict",
        kind="comp-slow",
        cause="late",
        operation="dispatch",
        subject="rank 1",
        host="node0",
    )
    assert effect == 2013.0
    assert value(found, "deep_ep_verdict", subject="path 2 > 5") == 512.0
    assert value(found, "deep_ep_window_end_timestamp_seconds") == 1.7e9


def test_waiting_is_per_rank_that_waits_and_per_rank_waited_for(tmp_path: Path) -> None:
    given = record()
    found = samples(text_of(given, tmp_path))
    for operation, measured in given.diagnosis.measured.items():
        for name in ("wait_us", "late_us", "issue_us", "path_us"):
            matrix = off_diagonal(getattr(measured, name))
            for rank in (0, 1, 7):
                where = {"operation": operation, "rank": rank, "host": "node0", "device": rank}
                assert value(found, f"deep_ep_{name}", **where) == pytest.approx(
                    np.nanmean(matrix[rank])
                )
                assert value(found, f"deep_ep_caused_{name}", **where) == pytest.approx(
                    np.nanmean(matrix[:, rank])
                )
        assert measured.bandwidth is not None
        for name in ("effective", "ingress", "egress"):
            rate = value(found, f"deep_ep_{name}_gb_per_second", operation=operation, rank=2)
            assert rate == getattr(measured.bandwidth, name)[2]


def test_counters_grow_with_every_window(tmp_path: Path) -> None:
    windows = [record(window=number) for number in (1, 2, 3)]
    found = samples(text_of(windows, tmp_path))
    assert value(found, "deep_ep_operations_total", operation="dispatch") == 3 * 120
    sent = 3 * 120 * 7 * 64 * 7168
    assert value(found, "deep_ep_sent_bytes_total", operation="dispatch", rank=3) == sent
    assert value(found, "deep_ep_received_bytes_total", operation="dispatch", rank=3) == sent


def test_bytes_of_ranks_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    found = fixtures.diagnosis(4)
    measured = found.measured["dispatch"]
    counted = measured.bytes.copy()
    counted[2] = np.nan
    partial = replace(found, measured={"dispatch": replace(measured, bytes=counted)})
    values = samples(text_of(record(partial), tmp_path))
    each = 120 * 64 * 7168
    assert value(values, "deep_ep_sent_bytes_total", rank=0) == 2 * each
    assert value(values, "deep_ep_sent_bytes_total", rank=2) == 3 * each
    assert value(values, "deep_ep_received_bytes_total", rank=0) == 3 * each
    assert value(values, "deep_ep_received_bytes_total", rank=2) == 0


def test_gauges_are_of_the_latest_window_of_each_group(tmp_path: Path) -> None:
    windows = [
        record(time_s=1.0),
        record(time_s=2.0, group="other"),
        record(fixtures.diagnosis(8, ()), time_s=3.0),
    ]
    found = samples(text_of(windows, tmp_path))
    assert value(found, "deep_ep_verdicts", group="ep") == 0
    assert value(found, "deep_ep_verdicts", group="other") == len(fixtures.ALL_KINDS)
    assert value(found, "deep_ep_window_end_timestamp_seconds", group="ep") == 3.0


def test_a_group_that_shrank_keeps_the_counters_of_operations_that_it_no_longer_has(
    tmp_path: Path,
) -> None:
    fewer = fixtures.diagnosis(4, (), operations=["dispatch"])
    found = samples(text_of([record(fixtures.diagnosis(8, ())), record(fewer)], tmp_path))
    sent = 120 * 7 * 64 * 7168
    assert value(found, "deep_ep_sent_bytes_total", operation="combine", rank=7) == sent
    assert value(found, "deep_ep_sent_bytes_total", operation="dispatch", rank=3) == sent * 3 / 7


def test_a_record_without_matrices_gives_the_same_metrics(tmp_path: Path) -> None:
    line = to_line(record(), with_matrices=False)
    back = diagnosis_log.parse_line(line.encode(), "file:1")
    assert back is not None
    full, short = samples(text_of(record(), tmp_path)), samples(text_of(back, tmp_path))
    assert full.keys() == short.keys()
    for key, expected in full.items():
        assert short[key] == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_what_is_not_known_has_no_sample(tmp_path: Path) -> None:
    found = fixtures.diagnosis(4)
    measured = found.measured["dispatch"]
    wait = measured.wait_us.copy()
    wait[2] = np.nan
    partial = replace(found, measured={"dispatch": replace(measured, wait_us=wait, bandwidth=None)})
    text = text_of(record(partial, time_s=math.nan), tmp_path)
    assert "NaN" not in text
    ranks = re.findall(r'^deep_ep_wait_us{.*rank="(\d)"', text, re.MULTILINE)
    assert ranks == ["0", "1", "3"]
    assert "deep_ep_window_end_timestamp_seconds{" not in text


def test_names_of_hosts_and_groups_may_be_anything(tmp_path: Path) -> None:
    odd = 'a"b\\c\nd{}'
    found = samples(text_of(record(group=odd), tmp_path))
    assert value(found, "deep_ep_verdicts", group=odd) == len(fixtures.ALL_KINDS)


def test_a_scrape_brings_what_came_since() -> None:
    coming = [[record()], [], [record(fixtures.diagnosis(8, ()))]]
    made = Metrics(lambda: coming.pop(0))
    server = serve(made, "127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.server_port}/metrics"

        def scrape() -> dict[Any, float]:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return samples(answer.read().decode())

        first, second, third = scrape(), scrape(), scrape()
    finally:
        server.shutdown()
        server.server_close()
    assert [value(f, "deep_ep_verdicts") for f in (first, second, third)] == [
        len(fixtures.ALL_KINDS),
        len(fixtures.ALL_KINDS),
        0,
    ]
    counted = [
        value(f, "deep_ep_operations_total", operation="combine") for f in (first, second, third)
    ]
    assert counted == [120, 120, 240]


def test_every_name_is_documented(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "records.md").read_text(encoding="utf-8")
    written = {name for name, _ in samples(text_of(record(), tmp_path))}
    assert {name for name in written if f"`{name}`" not in page} == set()
    assert set(re.findall(r"`(deep_ep_\w+)`", page)) == written


def test_nothing_but_a_file_is_replaced(tmp_path: Path) -> None:
    """As root, a device would be, or a link such as /dev/stdout, whatever that is."""
    pipe, stream = tmp_path / "pipe", tmp_path / "stdout"
    os.mkfifo(pipe)
    with open(tmp_path / "redirected", "wb") as opened:
        stream.symlink_to(f"/proc/self/fd/{opened.fileno()}")
        for path in (pipe, stream):
            with pytest.raises(
                EPArgumentError, match=rf"{path.name} is no regular file.*Name a file"
            ):
                write_textfile([record()], path)
    assert pipe.is_fifo()
    assert stream.is_symlink()


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(EPNotBuiltError, match=r"pip install 'deep_ep\[report\]'"):
        write_textfile([record()], tmp_path / "x.prom")
