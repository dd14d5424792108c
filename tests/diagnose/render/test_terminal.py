"""What people read: legible at 80 columns, with and without colour, and true to the numbers."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import fixtures
from deep_ep import diagnose
from deep_ep.diagnose import Diagnosis
from deep_ep.diagnose.core import rank_blocks
from deep_ep.diagnose.render import bandwidths, wording
from fixtures import ALL_KINDS, HICCUP, LATE, SLOW_PATH

NAN = math.nan


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


def words(text: str) -> str:
    """Without line breaks and indentation."""
    return " ".join(text.split())


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 11, 16, 37, 64])
@pytest.mark.parametrize("width", [80, 120])
def test_up_to_64_ranks_every_rank_has_a_row_and_no_line_is_too_wide(
    num_ranks: int, width: int
) -> None:
    found = fixtures.diagnosis(num_ranks, ALL_KINDS if num_ranks > 5 else (LATE,))
    text = printed(found, width)
    assert max(map(len, text.splitlines())) <= width
    rows = rows_of(text, "dispatch", num_ranks)
    # Nothing was wrapped: every row starts with its rank, and all are equally long.
    assert [row.split()[0] for row in rows] == [str(rank) for rank in range(num_ranks)]
    assert len({len(row.rstrip("\n")) for row in rows}) == 1


@pytest.mark.parametrize(("per_host", "num_hosts"), [(128, 2), (64, 4), (16, 16), (8, 32)])
def test_256_ranks_are_shown_per_node(per_host: int, num_hosts: int) -> None:
    found = fixtures.diagnosis(256, per_host=per_host)
    text = printed(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "a cell is the largest of two nodes" in text
    rows = rows_of(text, "dispatch", num_hosts)
    assert [row.split()[:2] for row in rows] == [[f"node{i}", str(i)] for i in range(num_hosts)]
    # Rank 1, waited for by everybody, is on the first node.
    for row in rows:
        cells = row[max(len(f"node{num_hosts - 1}"), 5) + len(str(num_hosts - 1)) + 2 :]
        assert "█" in cells[: len(cells) // num_hosts]
        assert "█" not in cells[len(cells) // num_hosts :]


def test_beyond_64_ranks_nodes_are_shown_even_where_ranks_would_fit() -> None:
    assert "rows wait, columns are waited for\n" in printed(fixtures.diagnosis(64))
    text = printed(fixtures.diagnosis(66))
    assert "a cell is the largest of two nodes" in text
    assert len(rows_of(text, "dispatch", 9)[8].split()) > 2


def test_a_cell_of_nodes_is_the_largest_of_its_ranks() -> None:
    found = fixtures.diagnosis(128, per_host=64)
    measured = found.measured["dispatch"]
    wait = measured.wait_us.copy()
    wait[70, 3] = 7777.0
    wait[5, 5] = 99_999.0
    found = replace(found, measured={"dispatch": replace(measured, wait_us=wait)})
    rows = rows_of(printed(found), "dispatch", 2)
    assert "7777" in rows[1]
    assert "7777" not in rows[0]
    # A rank does not wait for itself.
    assert "100k" not in rows[0]


def test_more_nodes_than_columns_are_put_together() -> None:
    text = printed(fixtures.diagnosis(1024, per_host=8))
    assert max(map(len, text.splitlines())) <= 80
    assert "the largest of 3 x 3 nodes" in text
    assert [row.split()[:2] for row in rows_of(text, "dispatch", 3)] == [
        ["node0", "0"],
        ["node3", "3"],
        ["node6", "6"],
    ]


@pytest.mark.parametrize("num_ranks", [8, 64, 1024])
def test_a_narrow_terminal_cuts_no_words(num_ranks: int) -> None:
    text = printed(fixtures.diagnosis(num_ranks), 40)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 40
    assert re.search(r"█\s+\d+\+\s+us\n", text), "what the darkest shade means"


def test_without_host_names_blocks_are_of_consecutive_ranks() -> None:
    found = replace(fixtures.diagnosis(200), hosts=("",) * 200)
    text = printed(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "a cell is the largest of 4 x 4 ranks" in text
    assert [row.split()[0] for row in rows_of(text, "dispatch", 3)] == ["0", "4", "8"]


def test_a_missing_rank_belongs_to_the_node_before_it() -> None:
    found = Diagnosis({}, [], [], hosts=("", "a", "a", "", "b", ""))
    of = rank_blocks.at_most(2, found)
    assert of.of_rank.tolist() == [0, 0, 0, 0, 1, 1]
    assert of.hosts == ("a", "b")
    of = rank_blocks.at_most(2, replace(found, nodes=(-1, 0, 1, -1, 2, -1)))
    assert of.of_rank.tolist() == [0, 0, 0, 0, 1, 1]
    assert of.first == (0, 2)


def test_nodes_of_one_host_are_shown_by_themselves() -> None:
    found = replace(
        fixtures.diagnosis(128, per_host=128), nodes=tuple(rank // 32 for rank in range(128))
    )
    rows = rows_of(printed(found), "dispatch", 4)
    assert [row.split()[:2] for row in rows] == [["node0", str(i)] for i in range(4)]


def test_long_host_names_keep_their_end() -> None:
    hosts = tuple(f"a-very-long-cluster-name-node-{r // 8:03}.some.domain" for r in range(128))
    text = printed(replace(fixtures.diagnosis(128), hosts=hosts))
    assert max(map(len, text.splitlines())) <= 80
    assert rows_of(text, "dispatch", 2)[1].startswith("~ame-node-001  1 ")


@pytest.mark.parametrize("colour", [False, True])
def test_cells_are_the_microseconds_waited(colour: bool) -> None:
    found = fixtures.diagnosis(8)
    expected = found.measured["dispatch"].wait_us[5, 1]
    assert f"{expected:.0f} " in printed(found, colour=colour)


def test_a_number_is_never_wider_than_its_cell() -> None:
    for num_ranks in range(2, 20):
        found = fixtures.diagnosis(num_ranks)
        measured = found.measured["dispatch"]
        huge = replace(measured, wait_us=measured.wait_us * 1e3)
        text = printed(replace(found, measured={"dispatch": huge}))
        assert max(map(len, text.splitlines())) <= 80
        assert len({len(row) for row in rows_of(text, "dispatch", num_ranks)}) == 1


def test_without_colour_the_shade_tells() -> None:
    rows = rows_of(printed(fixtures.diagnosis(64)), "dispatch", 64)
    assert {row[6 + 1] for rank, row in enumerate(rows) if rank != 1} == {"█"}
    assert {row[6 + 20] for rank, row in enumerate(rows) if rank != 20} == {"·"}


def test_a_terminal_without_unicode_gets_ascii() -> None:
    found = replace(fixtures.diagnosis(64, ALL_KINDS), events=[HICCUP])
    assert "#" in printed(found, encoding="ascii")


def test_with_colour_little_waiting_is_green_and_much_is_red() -> None:
    red, green = "48;2;215;58;45", "48;2;46;160;67"
    found = fixtures.diagnosis(8)
    cells = printed(found, colour=True).split("combine")[0]
    assert red in cells
    measured = found.measured["dispatch"]
    calm = replace(measured, wait_us=measured.wait_us * 1e-5)
    cells = printed(replace(found, measured={"dispatch": calm}), colour=True).split("+")[0]
    assert green in cells
    assert red not in cells


def test_all_causes_are_told_with_where_how_much_how_sure_and_what_next() -> None:
    text = printed(fixtures.diagnosis(8, ALL_KINDS[::-1]))
    heads = [
        "Comp-Slow  rank 1  node0 cuda:1  (late)",
        "Comm-Slow  path 2 > 5  node0 cuda:2 > node1 cuda:1  (path)",
        "Mixed-Slow  rank 3  node0 cuda:3  (hot experts)",
        "Comm-Slow  nodes 0 > 1  node0 > node1  (node pair)",
        "Comm-Slow  rail 3  all hosts cuda:3  (rail)",
        "Comm-Slow  all ranks  (everywhere)",
    ]
    # The largest effect first, in whatever order they were found.
    places = [text.index(head) for head in heads]
    assert places == sorted(places)
    told = words(text[places[0] : places[1]])
    for part in (
        "dispatch: +2,013 us (95 %: 1,990 to 2,040) per operation",
        "98 % of all waiting",
        "in 97 % of operations",
        "certainty > 99.9 %",
        "without it: 2,020 us less per operation (mean of dispatch and combine; 4,040 us for one of each); "
        "now dispatch takes 2,430 us",
        "own time over median 2,020 us, error 12.2 us",
        "next: Check clocks, throttling and host code of rank 1.",
    ):
        assert part in told


def test_what_is_wrapped_stays_under_its_beginning() -> None:
    lines = printed(fixtures.diagnosis(8)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  dispatch: +"))
    indents = [len(line) - len(line.lstrip()) for line in lines[first : first + 5]]
    assert indents == [2, 6, 2, 6, 2]


def test_one_cause_in_two_operations_is_one_paragraph() -> None:
    both = (LATE, replace(LATE, operation="combine", effect_us=100.0))
    text = printed(fixtures.diagnosis(8, both))
    assert text.count("Comp-Slow") == 1
    assert "  dispatch: +2,013 us" in text
    assert "  combine: +100 us" in text
    assert text.count("without it: 2,020 us less per operation") == 1
    assert "now dispatch takes 2,430 us, combine takes 2,430 us" in words(text)


def test_what_all_causes_together_would_save_is_told() -> None:
    text = words(printed(fixtures.diagnosis(8, (LATE, SLOW_PATH))))
    assert text.count("without all causes together: 2,025 us less per operation") == 1
    assert "without all" not in printed(fixtures.diagnosis(8))
    nothing = replace(fixtures.diagnosis(8, (replace(LATE, saving_us=0.0),)), savings_us={})
    assert "without it: nothing gained" in words(printed(nothing))
    assert "while the other causes last" not in words(printed(nothing))
    hidden = fixtures.diagnosis(8, (LATE, replace(SLOW_PATH, saving_us=0.0)))
    told = "without it: nothing gained while the other causes last, which hide it"
    assert words(printed(hidden)).count(told) == 1
    assert "once they are gone" not in words(printed(hidden))
    worth = fixtures.diagnosis(8, (LATE, replace(SLOW_PATH, saving_us=0.0, alone_us=884.0)))
    told += "; once they are gone, 884 us less per operation"
    assert words(printed(worth)).count(told) == 1
    from_waits = replace(fixtures.diagnosis(8), source="waits")
    assert "without it: a rank waits 2,020 us less per operation" in words(printed(from_waits))


def test_of_what_a_saving_is_a_part_is_told() -> None:
    both = fixtures.diagnosis(8)
    one = fixtures.diagnosis(8, operations=["dispatch"])
    assert "without it: 2,020 us less per dispatch; now" in words(printed(one))
    # Backward passes dispatch without notices.
    fewer = replace(both.measured["combine"], num_operations=60)
    uneven = replace(both, measured={**both.measured, "combine": fewer})
    told = "without it: 2,020 us less per operation (mean of dispatch and combine); now"
    assert told in words(printed(uneven))
    # Normal operations follow each other, and not those of low latency.
    three = ("notify", "normal dispatch", "normal combine")
    normal = fixtures.diagnosis(8, [replace(LATE, operation="notify")], operations=three)
    beside = replace(normal, savings_us={"dispatch": 7.0, **normal.savings_us})
    told = "(mean of notify, normal dispatch and normal combine; 6,060 us for one of each); now"
    assert told in words(printed(beside))
    # Records of earlier versions do not say it.
    assert "2,020 us less per operation; now" in words(printed(replace(both, savings_us={})))


def test_what_is_not_known_is_left_out() -> None:
    unsure = replace(
        LATE, interval_us=(NAN, NAN), saving_us=NAN, certainty=NAN, share=NAN, seen_in=NAN,
        evidence={"error_us": NAN},
    )  # fmt: skip
    text = printed(fixtures.diagnosis(8, (unsure,)))
    assert "dispatch: +2,013 us per operation\n" in text
    for absent in ("nan", "95 %", "certainty", "because", "without it", "not known"):
        assert absent not in text.split("Comp-Slow")[1].split("next:")[0]


def test_evidence_reads_alike_in_records_of_earlier_versions() -> None:
    for evidence in (
        {"usual_path_us": 20.0, "windows_since": 3},
        {"usual path us": 20.0, "windows since": 3},
    ):
        text = words(printed(fixtures.diagnosis(8, (replace(LATE, evidence=evidence),))))
        assert "because, in dispatch: usual path 20 us, windows since 3" in text


def test_single_operations_are_kept_apart_from_causes() -> None:
    found = replace(fixtures.diagnosis(8, ()), events=[HICCUP])
    text = printed(found)
    assert "No anomaly: nothing stands out of the noise" in text
    assert "single operations, not causes:" in text
    many = printed(replace(found, events=[HICCUP] * 7))
    assert many.count("everybody waited") == 5
    assert "and 2 more" in many
    assert "dispatch 1234: everybody waited 20,100 us longer for rank 3 (node0 cuda:3)" in text


def test_no_anomaly_and_undecided_are_ordinary_results() -> None:
    healthy = fixtures.diagnosis(8, ())
    assert "No anomaly: nothing stands out of the noise" in printed(healthy)
    assert "Slow" not in printed(healthy)
    partial = printed(replace(healthy, remarks=["no counters from rank 3"]))
    assert "No anomaly found in what could be judged" in partial
    assert "note: no counters from rank 3" in partial
    short = printed(replace(healthy, remarks=["dispatch: undecided, 4 operations counted"]))
    assert short.count("Dispatch: undecided, 4 operations counted.") == 1
    assert "undecided" not in short.replace("Dispatch: undecided", "")
    assert "No anomaly" not in short


def test_bandwidth_tells_what_the_program_gets_from_what_the_wires_did() -> None:
    found = fixtures.diagnosis(8)
    rates = found.measured["dispatch"].bandwidth
    assert rates is not None
    text = printed(found)
    table = text[text.index("bandwidth in GB/s") :]
    assert "tokens that stay on their rank do not count" in table
    slowest = int(np.argmin(rates.ingress))
    for part in (
        f"{np.median(rates.effective):.3g}"[:4],
        f"{np.nanmedian(rates.edge):.1f}",
        "1.50 2 > 5",
        f"{rates.ingress[slowest]:.1f} rank {slowest}",
        f"{rates.effective.min():.2f} rank {np.argmin(rates.effective)}",
    ):
        assert part in table


def test_of_paths_that_are_equally_slow_the_first_are_named_and_none_to_itself() -> None:
    found = fixtures.diagnosis(8, operations=["dispatch"])
    rates = found.measured["dispatch"].bandwidth
    assert rates is not None
    rates.edge[:] = 10.0
    rates.edge[4:6] = 0.5
    rates.edge[0, 0] = 0.01
    (row,) = bandwidths.rows(found)
    assert row[3] == ["0.500 0 > 4", "0.500 1 > 4", "0.500 2 > 4"]


def test_a_cause_of_two_operations_is_one_sentence() -> None:
    both = [LATE, replace(LATE, operation="combine", effect_us=50.0)]
    assert wording.sentence(fixtures.diagnosis(8, both), both) == (
        "Comp-Slow: rank 1 (node0 cuda:1) comes late in dispatch, +2,013 us (95 %: 1,990 to 2,040) per operation, 98 % of "
        "all waiting, and in combine, +50 us (95 %: 1,990 to 2,040) per operation, 98 % of all waiting. Without it: 2,020 us "
        "less per operation (mean of dispatch and combine; 4,040 us for one of each)."
    )


def test_without_bandwidth_there_is_no_table() -> None:
    found = fixtures.diagnosis(8)
    plain = {kind: replace(m, bandwidth=None) for kind, m in found.measured.items()}
    assert "bandwidth" not in printed(replace(found, measured=plain))


def test_a_window_without_matrices_says_so_and_shows_own_waiting() -> None:
    found = fixtures.diagnosis(8)
    unknown = np.full((8, 8), np.nan)
    stored = {kind: replace(m, wait_us=unknown) for kind, m in found.measured.items()}
    text = printed(replace(found, measured=stored))
    longest = int(np.argmax(found.measured["dispatch"].own_wait_us))
    assert "no matrix stored for this window" in text
    assert f"us rank {longest}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_times_of_a_log_without_operations_are_of_the_whole_window() -> None:
    found = fixtures.diagnosis(8)
    measured = replace(found.measured["dispatch"], num_operations=0, last_operation=0)
    text = words(printed(replace(found, measured={"dispatch": measured}, source="waits")))
    assert "dispatch: microseconds waited in the whole window rows wait" in text
    assert "(95 %: 1,990 to 2,040) in the whole window" in text


def test_words_of_a_log_are_no_markup() -> None:
    found = fixtures.diagnosis(8)
    odd = replace(found.measured["dispatch"], operation="[red]x[/red]")
    text = printed(replace(found, measured={odd.operation: odd}, remarks=["[bold]y[/bold] [/]"]))
    assert "[red]x[/red]: microseconds waited" in text
    assert "[red]x[/red]" in text.split("bandwidth in GB/s")[1]
    assert "note: [bold]y[/bold] [/]" in text


def test_missing_ranks_are_blank() -> None:
    found = fixtures.diagnosis(8)
    wait = found.measured["dispatch"].wait_us.copy()
    wait[0] = np.nan
    measured = {"dispatch": replace(found.measured["dispatch"], wait_us=wait)}
    assert rows_of(printed(replace(found, measured=measured)), "dispatch", 1)[0].split() == ["0"]


def test_one_rank_and_nothing_counted_are_said() -> None:
    alone = replace(fixtures.diagnosis(1, ()), remarks=["one rank: nothing to compare"])
    assert "one rank: nothing to compare" in printed(alone)
    assert "rows wait" not in printed(alone)
    assert "Nothing measured" in printed(Diagnosis({}, [], []))
    assert "enable_counters()" in printed(diagnose.judge({}), width=120)
