"""How long the links need for the bytes of an operation, worked out by hand."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.cli.link_limit import KNOWN, Links, least_us, parse
from deep_ep.diagnose.core.diagnosis import Diagnosis, FloatArray, Measured
from deep_ep.diagnose.storage.log_writer import Writer
from deep_ep.diagnose.storage.record import Record
from fixtures import diagnosis

LINKS = Links(nvlink=100.0, nic=10.0)  # bytes per ns
NODES = (0, 0, 1, 1)


def measured(operation: str, num_bytes: FloatArray) -> Measured:
    return replace(diagnosis(4).measured["dispatch"], operation=operation, bytes=num_bytes)


def test_the_busiest_rank_and_link_decide() -> None:
    num_bytes = np.zeros((4, 4))
    num_bytes[1, 0] = 4e6  # NVLink: 40 us
    num_bytes[2, 0] = num_bytes[3, 0] = 0.3e6  # NIC of rank 0: 60 us
    np.fill_diagonal(num_bytes, 1e9)  # stays
    assert least_us(measured("dispatch", num_bytes), NODES, LINKS) == pytest.approx(60)
    # On one node all of it is NVLink, out of rank 0.
    assert least_us(measured("dispatch", num_bytes), (), LINKS) == pytest.approx(46)


def test_what_a_rank_receives_counts_as_what_it_sends() -> None:
    num_bytes = np.zeros((4, 4))
    num_bytes[0, 2] = num_bytes[0, 3] = 1e5
    assert least_us(measured("combine", num_bytes), NODES, LINKS) == pytest.approx(20)


def test_the_last_hop_of_a_dispatch_is_nvlink_from_the_gateway() -> None:
    num_bytes = np.zeros((4, 4))
    num_bytes[3, 0] = 1e6  # by way of rank 2, which has the place of rank 0: NVLink, 10 us
    num_bytes[2, 0] = 5e6  # rank 2 is the gateway itself
    assert least_us(measured("normal dispatch", num_bytes), NODES, LINKS) == pytest.approx(10)
    assert least_us(measured("gateway dispatch", num_bytes), NODES, LINKS) == pytest.approx(600)


def test_uneven_nodes_and_ranks_that_did_not_report_have_a_limit() -> None:
    num_bytes = np.zeros((5, 5))
    num_bytes[4, 1] = 9e6  # the node of rank 4 has no second rank
    num_bytes[0, 1] = 1e6
    hop = measured("normal dispatch", num_bytes)
    assert least_us(hop, (0, 0, 0, -1, 1), LINKS) == pytest.approx(10)


def test_unknown_bytes_have_no_limit() -> None:
    unknown = measured("dispatch", np.full((4, 4), np.nan))
    assert np.isnan(least_us(unknown, NODES, LINKS))


def test_links_have_names_or_numbers() -> None:
    assert parse("h800") == KNOWN["H800"]
    assert parse("450:50") == Links(450, 50)
    for wrong in ("H9", "450", "0:50", "450:nan", "1:2:3", "inf:1"):
        with pytest.raises(ArgumentTypeError, match="NVLINK:NIC in GB/s"):
            parse(wrong)


def limits(found: Diagnosis, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What show says of a record, behind the report."""
    Writer(folder, "ep").write(Record(found, 1.0, 1, "ep"), with_matrices=True)
    assert main(["show", str(folder), "--links", "H100"]) == 0
    return capsys.readouterr().out.partition("at the limit of the links, ")[2]


def test_show_says_which_share_of_the_limit_was_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = limits(diagnosis(8), tmp_path, capsys)
    assert printed.startswith("450 GB/s NVLink and 50 GB/s NIC\n")
    assert "took 2,430 us" in printed
    with pytest.raises(SystemExit):
        main(["show", str(tmp_path), "--links", "fast"])
    assert "NVLINK:NIC" in capsys.readouterr().err


def test_names_of_operations_are_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = measured("[/x]", np.ones((4, 4)))
    found = replace(diagnosis(4), measured={odd.operation: odd}, verdicts=[])
    assert "  [/x]: 0 us, took 2,430 us" in limits(found, tmp_path, capsys)


def test_without_nodes_hosts_say_what_crosses_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records of earlier versions have no nodes."""
    earlier = diagnosis(8, per_host=4)
    present = replace(earlier, nodes=(0, 0, 0, 0, 1, 1, 1, 1))
    printed = limits(present, tmp_path / "present", capsys)
    assert limits(earlier, tmp_path / "earlier", capsys) == printed != ""
