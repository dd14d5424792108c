"""The picture for tickets: the right kind of file, the verdicts in it, sound from one rank to many."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from deep_ep.diagnose.core.diagnosis import Diagnosis, FloatArray
from deep_ep.diagnose.render.figure import write_picture
from deep_ep.errors import EPArgumentError, EPNotBuiltError
from fixtures import LATE, LATE_RANK, SLOW_PATH, diagnosis


def drawn(folder: Path, found: Diagnosis) -> FloatArray:
    """[height, width, 4] of the PNG."""
    path = folder / "picture.png"
    write_picture(found, path)
    return np.asarray(image.imread(path), dtype=np.float64)


def words(folder: Path, found: Diagnosis) -> str:
    """Everything written in the SVG, in order; matplotlib names the text of its outlines."""
    path = folder / "picture.svg"
    write_picture(found, path)
    lines = re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"), re.DOTALL)
    return "\n".join(lines)


@pytest.mark.exhaustive
def test_the_verdicts_are_the_caption(tmp_path: Path) -> None:
    found = diagnosis(8, [replace(LATE, effect_us=503.5), SLOW_PATH])
    text = words(tmp_path, found).replace("\n", " ")
    assert "Comp-Slow: rank 1 (node0 cuda:1) comes late in dispatch, +503.5 us" in text
    assert "Comm-Slow: path 2 &gt; 5" in text or "Comm-Slow: path 2 > 5" in text
    assert "dispatch: waiting, us per operation" in text
    assert "combine: waiting, us per operation" in text
    assert "waited for: rank" in text
    assert "waiting: rank" in text


def test_numbers_of_the_matrix_stand_in_the_cells(tmp_path: Path) -> None:
    found = diagnosis(8, operations=["dispatch"])
    value = found.measured["dispatch"].wait_us[5, LATE_RANK]
    assert f"{value:,.0f}" in words(tmp_path, found).splitlines()


@pytest.mark.parametrize(
    ("remarks", "said"),
    [([], "No anomaly: nothing stands out"), (["undecided, too few operations"], "Undecided, too")],
)
def test_without_a_cause_it_is_said_why(tmp_path: Path, remarks: list[str], said: str) -> None:
    text = words(tmp_path, replace(diagnosis(4, []), remarks=remarks))
    assert said in text
    assert "Note:" not in text


def test_the_svg_refers_to_nothing_outside(tmp_path: Path) -> None:
    words(tmp_path, diagnosis(8))
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    references = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', text)
    assert references
    assert all(re.match(r"#|data:", a or b) for a, b in references)
    assert "@import" not in text


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 64, 256, 1024])
def test_groups_of_every_size_are_drawn(tmp_path: Path, num_ranks: int) -> None:
    picture = drawn(tmp_path, diagnosis(num_ranks, operations=["dispatch"], stamped=False))
    assert picture.shape[1] >= num_ranks
    assert np.ptp(picture[..., :3]) > 0.5


@pytest.mark.parametrize("num_ranks", [8, 256])
def test_the_late_column_is_the_darkest(tmp_path: Path, num_ranks: int) -> None:
    picture = drawn(tmp_path, diagnosis(num_ranks, operations=["dispatch"], per_host=num_ranks))
    dots = 5.0 * 150 / num_ranks
    left, middle = 0.75 * 150, round((0.75 + 2.4) * 150)
    band = picture[middle - 20 : middle + 20, :, :3].sum(axis=-1).mean(axis=0)
    shades = [band[round(left + (rank + 0.15) * dots)] for rank in range(num_ranks)]
    assert int(np.argmin(shades)) == LATE_RANK


def test_missing_ranks_are_striped(tmp_path: Path) -> None:
    whole, part = (
        drawn(tmp_path, diagnosis(8, missing=missing, operations=["dispatch"]))
        for missing in ([], [7])
    )
    dots = 5.0 * 150 / 8
    row, column = round(0.75 * 150 + 7 * dots), round(0.75 * 150)
    box = np.s_[row + 5 : row + 60, column + 5 : column + 60, :3]
    assert np.allclose(np.ptp(part[box], axis=-1), 0.0)  # Grey, and not one grey.
    assert np.ptp(part[box]) > 0.1
    assert not np.allclose(np.ptp(whole[box], axis=-1), 0.0)


def test_nothing_measured_gives_the_words_alone(tmp_path: Path) -> None:
    found = Diagnosis({}, [], ["one rank: nothing to compare"], hosts=("a",), devices=(0,))
    assert "one rank: nothing to compare" in words(tmp_path, found)


def test_matrices_that_were_not_stored_are_left_out(tmp_path: Path) -> None:
    found = diagnosis(8, operations=["dispatch"])
    bare = replace(found.measured["dispatch"], wait_us=np.full((8, 8), np.nan))
    text = words(tmp_path, replace(found, measured={"dispatch": bare}))
    assert "waited for" not in text
    assert "Comp-Slow" in text


def test_many_verdicts_are_cut_with_their_number(tmp_path: Path) -> None:
    verdicts = [replace(SLOW_PATH, edge=(0, rank), effect_us=rank) for rank in range(1, 31)]
    found = replace(diagnosis(32, verdicts), savings_us={"dispatch": 7.0, "combine": 7.0})
    text = words(tmp_path, found)
    assert "and 24 smaller causes" in text
    assert "path 0" in text
    together = "7 us less per operation (mean of dispatch and combine; 14 us for one of each)."
    assert f"Without all causes together: {together}" in " ".join(text.split())


@pytest.mark.parametrize("name", ["a$b_$^", "</svg><script>", "\\frac"])
def test_host_names_stay_text(tmp_path: Path, name: str) -> None:
    text = words(tmp_path, diagnosis(4, [replace(LATE, where=f"{name} cuda:2")]))
    assert "cuda:2" in text
    assert "<script" not in (tmp_path / "picture.svg").read_text(encoding="utf-8").split("-->")[-1]


@pytest.mark.parametrize("name", ["picture.pdf", "picture"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(EPArgumentError, match=r"\.png and \.svg"):
        write_picture(diagnosis(2), tmp_path / name)


def test_without_matplotlib_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EPNotBuiltError, match=r"pip install 'deep_ep\[report\]'"):
        write_picture(diagnosis(2), tmp_path / "a.png")


def test_no_global_state_of_matplotlib_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    drawn(tmp_path, diagnosis(2))
