"""What a placement of experts reads of speed and waiting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fixtures
from deep_ep.diagnose.analyze.waits_only.judge import judge_waits
from deep_ep.diagnose.core.package import EPArgumentError
from deep_ep.diagnose.render.speed_profile import speed_profile, write_speed_profile
from deep_ep.diagnose.storage.record import Record


def record(gaps_us: list[float], window: int = 1, group: str = "ep") -> Record:
    """Dispatches before which ranks work so long, with 10 us of sending and of work at their end each."""
    found = fixtures.diagnosis(len(gaps_us), (), operations=("dispatch",), per_host=2)
    tens = np.full(len(gaps_us), 10.0)
    measured = replace(
        found.measured["dispatch"], gap_us=np.array(gaps_us), send_us=tens, drain_us=tens
    )
    return Record(replace(found, measured={"dispatch": measured}), 1.5e9, window, group)


def of_ranks(profile: dict[str, Any], name: str) -> list[Any]:
    return [rank[name] for rank in profile["ranks"]]


def of_dispatch(profile: dict[str, Any], name: str) -> list[Any]:
    return [rank["operations"]["dispatch"][name] for rank in profile["ranks"]]


def test_a_rank_that_takes_twice_as_long_as_usual_has_half_the_speed() -> None:
    profile = speed_profile([record([80.0, 80.0, 180.0, 80.0])])
    assert of_ranks(profile, "speed") == [1.0, 1.0, 0.5, 1.0]
    assert of_dispatch(profile, "own_us") == [100.0, 100.0, 200.0, 100.0]


def test_of_several_windows_the_median_counts() -> None:
    windows = [record([80.0, 80.0, 80.0, gap], n) for n, gap in enumerate((180.0, 80.0, 180.0), 1)]
    profile = speed_profile(windows)
    assert of_ranks(profile, "speed") == [1.0, 1.0, 1.0, 0.5]
    assert profile["windows"] == [1, 2, 3]
    assert profile["num_operations"] == {"dispatch": 360}


def test_kinds_of_operation_count_by_how_many_there_were() -> None:
    one = record([80.0, 80.0, 180.0])
    measured = one.diagnosis.measured["dispatch"]
    often = replace(measured, operation="combine", gap_us=np.full(3, 80.0), num_operations=1080)
    both = replace(one.diagnosis, measured={"dispatch": measured, "combine": often})
    speed = of_ranks(speed_profile([replace(one, diagnosis=both)]), "speed")
    assert speed == pytest.approx([1.0, 1.0, 1000 / 1100], abs=1e-6)


def test_waiting_is_that_of_the_matrix_on_both_sides() -> None:
    found = record([80.0] * 3)
    matrix = np.array([[0.0, 10.0, 20.0], [4.0, 0.0, 30.0], [6.0, 12.0, 0.0]])
    measured = replace(
        found.diagnosis.measured["dispatch"], wait_us=matrix, tokens=np.full((3, 3), 7.0)
    )
    changed = replace(found.diagnosis, measured={"dispatch": measured})
    profile = speed_profile([replace(found, diagnosis=changed)])
    assert of_dispatch(profile, "waits_us") == [15.0, 17.0, 9.0]
    assert of_dispatch(profile, "waited_for_us") == [5.0, 11.0, 25.0]
    assert of_dispatch(profile, "tokens") == [14.0, 14.0, 14.0]


def test_a_gpu_has_the_speed_of_its_ranks() -> None:
    found = record([80.0, 80.0, 180.0, 80.0])
    shared = replace(found.diagnosis, hosts=("a",) * 4, devices=(0, 0, 1, 1))
    profile = speed_profile([replace(found, diagnosis=shared)])
    assert profile["gpus"] == [
        {"host": "a", "device": 0, "ranks": [0, 1], "speed": 1.0},
        {"host": "a", "device": 1, "ranks": [2, 3], "speed": 0.75},
    ]


def test_sums_of_waiting_tell_who_is_waited_for_and_no_speed() -> None:
    waits = np.full((1, 3, 3), 1000.0)
    waits[:, :, 2] = 9000.0
    waits[:, range(3), range(3)] = 0.0
    profile = speed_profile([Record(judge_waits([waits[0]]), 1.5e9, 1, "ep")])
    assert profile["source"] == "waits"
    assert of_ranks(profile, "speed") == [None, None, None]
    (kind,) = profile["num_operations"]
    named = [rank["operations"][kind] for rank in profile["ranks"]]
    assert [one["own_us"] for one in named] == [None] * 3
    waited_for = [one["waited_for_us"] for one in named]
    assert waited_for.index(max(waited_for)) == 2


def test_a_missing_rank_has_null_everywhere() -> None:
    found = fixtures.diagnosis(4, (), missing=(2,))
    profile = speed_profile([Record(found, 1.5e9, 1, "ep")])
    missing = profile["ranks"][2]
    assert missing["speed"] is None
    assert missing["host"] == ""
    assert set(missing["operations"]["dispatch"].values()) == {None}
    assert [gpu["ranks"] for gpu in profile["gpus"]] == [[0], [1], [3]]


def test_the_file_is_json_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    write_speed_profile([record([80.0] * 4)], path)
    profile = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert profile["schema"] == "deep_ep.speed-profile/1"
    assert of_ranks(profile, "rank") == [0, 1, 2, 3]
    assert of_ranks(profile, "host") == ["node0", "node0", "node1", "node1"]


def test_windows_of_several_groups_are_refused(tmp_path: Path) -> None:
    both = [record([80.0] * 4), record([80.0] * 4, group="other")]
    with pytest.raises(EPArgumentError, match=r"ep of 4 ranks, other of 4 ranks.*--group"):
        write_speed_profile(both, tmp_path / "speed.json")
    assert not (tmp_path / "speed.json").exists()
