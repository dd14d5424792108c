"""What people read: legible at 80 columns, with and without colour, and true to the numbers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from generator import CPU, simulate
from rich.console import Console

from deep_ep import diagnose, faults
from deep_ep.diagnose import Diagnosis

INJECTED = faults.parse_list("slow-rank=3:4ms slow-path=2>5:2ms hot-rank=6")


def diagnosis(num_ranks: int, num_rounds: int = 20, injected: bool = True) -> Diagnosis:
    given = INJECTED if injected else []
    return diagnose.judge(diagnose.gather(simulate(CPU, num_ranks, num_rounds, given, seed=1)))


def printed(
    found: Diagnosis, width: int = 80, colour: bool = False, encoding: str = "utf-8"
) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=file,
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
    )
    diagnose.report(found, console)
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def rows_of(text: str, operation: str, num_rows: int) -> list[str]:
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{operation}:")) + 3
    return lines[first : first + num_rows]


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 16, 37, 64, 200])
@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_of_a_heatmap_is_wider_than_the_console(num_ranks: int, width: int) -> None:
    found = diagnosis(num_ranks, num_rounds=10, injected=False)
    lines = printed(found, width).splitlines()
    assert max(map(len, lines)) <= width
    # Nothing was wrapped: every row starts with its rank.
    block = -(-num_ranks // (width - 6))
    labels = [
        line.split()[0] for line in rows_of("\n".join(lines), "dispatch", -(-num_ranks // block))
    ]
    assert labels == [str(rank) for rank in range(0, num_ranks, block)]


@pytest.mark.parametrize("colour", [False, True])
def test_cells_are_the_microseconds_waited(colour: bool) -> None:
    found = diagnosis(8)
    expected = found.matrices["dispatch"].mean_wait_ns()[5, 3] / 1e3
    text = printed(found, colour=colour)
    assert f"{expected:.0f} " in text


def test_without_colour_the_shade_tells() -> None:
    rows = rows_of(printed(diagnosis(64)), "dispatch", 64)
    late = [row[6 + 3] for rank, row in enumerate(rows) if rank != 3]
    assert set(late) <= {"▓", "█"}
    others = [row[6 + 20] for rank, row in enumerate(rows) if rank not in (3, 20)]
    assert set(others) <= {"·", "░"}


def test_a_terminal_without_unicode_gets_ascii_shades() -> None:
    printed(diagnosis(64), encoding="ascii").encode("ascii")


def test_with_colour_little_waiting_is_green_and_much_is_red() -> None:
    text = printed(diagnosis(8), colour=True)
    assert "48;2;46;160;67" not in text.splitlines()[0]
    assert "48;2;215;58;45" in text
    calm = printed(diagnosis(8, injected=False), colour=True)
    assert "48;2;46;160;67" in text + calm


def test_every_cause_is_told_once_with_both_operations() -> None:
    text = printed(diagnosis(8), width=120)
    for head in ("Comp-Slow  rank 3", "Comm-Slow  path 2 > 5", "Mixed-Slow  rank 6"):
        assert text.count(head) == 1
        told = text.split(head)[1].split("next:")[0]
        assert "dispatch" in told
        assert "combine" in told
        assert "us per operation" in told


def test_no_anomaly_is_said() -> None:
    text = printed(diagnosis(8, injected=False))
    assert "no anomaly" in text
    assert "Slow" not in text


def test_one_rank_and_too_few_operations_are_said() -> None:
    assert "one rank: nothing to compare" in printed(diagnosis(1, injected=False))
    assert "undecided, 4 operations" in printed(diagnosis(8, num_rounds=4))
    assert "no anomaly: nothing" not in printed(diagnosis(8, num_rounds=4))


def test_nothing_counted_says_how_to_count() -> None:
    assert "enable_counters()" in printed(diagnose.judge({}), width=120)


def test_missing_ranks_are_blank() -> None:
    snapshots = simulate(CPU, 8, 20, seed=1)[1:]
    text = printed(diagnose.judge(diagnose.gather(snapshots)))
    assert rows_of(text, "dispatch", 1)[0].split() == ["0"]
    assert "no counters from rank 0" in text


def test_a_picture_is_written(tmp_path: Path) -> None:
    picture = tmp_path / "heatmap.svg"
    diagnose.heatmap_svg(diagnosis(8), picture)
    text = picture.read_text(encoding="utf-8")
    assert text.startswith("<svg")
    assert "url(" not in text.replace("url(#", "")
    assert "Comp-Slow" in text.replace("&#160;", " ")
