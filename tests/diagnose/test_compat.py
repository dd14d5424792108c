"""Programs written for the existing analyser: its rule to the letter, its class, its log files."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deep_ep import EPArgumentError
from deep_ep.base import env
from deep_ep.diagnose import compat
from deep_ep.diagnose.compat import Diagnose, diagnose_matrix
from deep_ep.diagnose.live import wait_sampler
from deep_ep.diagnose.live.wait_sampler import WaitSampler
from deep_ep.group import ThreadGroup, thread_groups
from support.launch import DEVICE, on_threads, raise_failures, run_processes
from support.waiting import eventually

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 30.0
LATE_NS, USUAL_NS = 5_000_000, 1_000


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Logs into a folder of the test; no time to warm up."""
    for variable in env.VARIABLES:
        if variable.name.startswith("DEEPEP_"):
            monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("DEEPEP_DIAGNOSE_LOG_PATH", str(tmp_path))
    monkeypatch.setenv("DEEPEP_DIAGNOSE_WARMING_TIME", "0")
    return tmp_path


def on_all(num_ranks: int, program: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Runs the program on every rank of a group of threads; what each returned."""
    return on_threads(program, thread_groups(num_ranks))


def wait_once(stats: torch.Tensor, rank: int, late: int) -> None:
    """What a kernel adds on this rank in one operation in which one rank comes late."""
    waits = torch.full_like(stats, USUAL_NS)
    if rank != late:
        waits[late] = LATE_NS
    stats += waits


def late_ranks(result: dict[str, Any]) -> set[int | None]:
    return {verdict.rank for verdict in result["verdicts"]}


def abnormal_columns(result: dict[str, Any]) -> set[int]:
    return {column[0] for column in result["abnormal_cols"]}


def waiting_until_logged(
    folder: Path, is_there: Callable[[str], bool]
) -> Callable[[torch.Tensor, int], bool]:
    """A function that all ranks call: it does operations in which rank 1 is late until rank 0's log is as
    `is_there` wants it, and returns whether that happens in time."""
    log, done = folder / "diagnose_rank0.log", threading.Event()

    def wait(stats: torch.Tensor, rank: int) -> bool:
        def is_done() -> bool:
            if rank == 0 and log.is_file() and is_there(log.read_text()):
                done.set()
            return done.is_set()

        return eventually(is_done, PATIENCE_S, lambda: wait_once(stats, rank, late=1))

    return wait


# ---- the rule


def rule_in_loops(
    m: Any, thres_col: float, thres_row: float, thres_point: float, suppress: bool, no_zeros: int
) -> dict[str, Any]:
    """The definition, in plain loops."""
    n = len(m)
    total = sum(m[i][j] for i in range(n) for j in range(n))
    mean = total / (n * n)
    columns, rows, points = [], [], []
    for j in range(n):
        value = sum(m[i][j] for i in range(n)) / n
        if value / (mean + 1e-8) > thres_col:
            columns.append([j, value, value / (mean + 1e-8)])
    for i in range(n):
        value = sum(m[i][j] for j in range(n)) / n
        if value / (mean + 1e-8) > thres_row:
            rows.append([i, value, value / (mean + 1e-8)])
    if no_zeros:
        nonzero = [m[i][j] for i in range(n) for j in range(n) if m[i][j] != 0]
        mean = sum(nonzero) / len(nonzero) if nonzero else 0.0
    for i in range(n):
        for j in range(n):
            known = i in [r[0] for r in rows] or j in [c[0] for c in columns]
            if m[i][j] / (mean + 1e-8) > thres_point and not (suppress and known):
                points.append([i, j, m[i][j], m[i][j] / (mean + 1e-8)])
    return {"abnormal_cols": columns, "abnormal_rows": rows, "abnormal_points": points}


@pytest.mark.parametrize("no_zeros", [0, 1])
@pytest.mark.parametrize("suppress", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 16])
def test_the_rule_is_its_definition(num_ranks: int, suppress: bool, no_zeros: int) -> None:
    generator = np.random.default_rng(num_ranks)
    for slow in range(8):
        m = generator.exponential(20.0, (num_ranks, num_ranks))
        m[generator.random(m.shape) < 0.3] = 0.0
        m[:, slow % num_ranks] *= slow
        m[(slow + 3) % num_ranks, :] *= 1 + slow
        m[0, -1] = 100.0 * slow
        found = diagnose_matrix(m, 2.0, 1.5, 4.0, suppress, no_zeros)
        expected = rule_in_loops(m.tolist(), 2.0, 1.5, 4.0, suppress, no_zeros)
        assert list(found) == list(expected)
        for key, entries in expected.items():
            assert len(found[key]) == len(entries)
            for entry, wanted in zip(found[key], entries):
                assert entry == pytest.approx(wanted)
                assert [type(value) for value in entry] == [type(value) for value in wanted]


def test_a_score_that_equals_its_threshold_is_not_abnormal() -> None:
    three = np.zeros((4, 4))
    three[:, 2] = 1e12  # column mean over mean is 4 exactly, as far as the epsilon lets it
    assert diagnose_matrix(three, thres_col=4.0)["abnormal_cols"] == []
    assert [c[0] for c in diagnose_matrix(three, thres_col=3.999)["abnormal_cols"]] == [2]


def test_the_rule_keeps_its_known_answers() -> None:
    # One path is slow; the rule blames its two ends and hides it.
    short = [[0, 2, 0, 1], [1, 0, 40, 0], [0, 1, 0, 2], [2, 0, 1, 0]]
    found = Diagnose.diagnose_matrix(short)
    assert [c[0] for c in found["abnormal_cols"]] == [2]
    assert [r[0] for r in found["abnormal_rows"]] == [1]
    assert found["abnormal_points"] == []
    shown = diagnose_matrix(short, suppress_points_in_strong_rowscols=False)["abnormal_points"]
    assert shown == [[1, 2, 40.0, pytest.approx(12.8)]]
    nothing = {"abnormal_cols": [], "abnormal_rows": [], "abnormal_points": []}
    assert diagnose_matrix([[10, 10_000_000], [0, 10]]) == nothing
    assert diagnose_matrix(torch.zeros(4, 4, dtype=torch.int64), excluding_zeros=1) == nothing


@pytest.mark.parametrize(
    ("given", "message"),
    [([[1, 2, 3], [4, 5, 6]], r"shape \[2, 3\]"), ([[1.0, float("nan")], [1, 1]], "is nan"),
     ([[0, -5], [1, 1]], "is -5")],
)  # fmt: skip
def test_the_rule_says_what_it_cannot_use(given: Any, message: str) -> None:
    with pytest.raises(EPArgumentError, match="diagnose_matrix: .*" + message):
        diagnose_matrix(given)


# ---- the class, synchronously


@pytest.mark.parametrize("num_ranks", [2, 6])
def test_a_program_written_for_it_gets_two_results_on_rank_0_when_due(num_ranks: int) -> None:
    from deep_ep import diagnose as ds

    period = 16

    def program(group: ThreadGroup) -> list[Any]:
        d = ds.Diagnose(group=group, enable_async=False)
        dispatch_stats, combine_stats = d.get_stats_ll_stats_tensor()
        answers = []
        for _ in range(5 * period):
            wait_once(dispatch_stats, group.rank, late=1)
            wait_once(combine_stats, group.rank, late=1)
            answers.append(d.diagnose_ll_sync(diagnose_step=period))
        return answers

    first, *others = on_all(num_ranks, program)
    assert all(answer is None for answers in others for answer in answers)
    due = first[period - 1 :: period]
    assert sum(answer is not None for answer in first) == len(due) == 5
    for number, (dispatch, combine) in enumerate(due):
        keys = {"abnormal_cols", "abnormal_rows", "abnormal_points", "verdicts"}
        assert set(dispatch) == set(combine) == keys
        # What lasts takes five windows, and more than four ranks.
        named = {1} if number == 4 and num_ranks == 6 else set()
        assert late_ranks(dispatch) == late_ranks(combine) == named
        for verdict in dispatch["verdicts"]:
            assert verdict.effect_us == pytest.approx(period * (LATE_NS - USUAL_NS) / 1e3)
    assert set(ds.diagnose_matrix([[0, 1], [1, 0]])) == keys - {"verdicts"}


def test_the_tensors_are_what_operations_take_and_stay_the_same() -> None:
    (group,) = thread_groups(1)
    d = Diagnose(group=group, enable_normal_diagnose=True)
    tensors = d.get_all_stats_tensor()
    assert tensors[:2] == d.get_stats_ll_stats_tensor()
    assert tensors[2:] == d.get_stats_normal_stats_tensor()
    for tensor in tensors:
        assert tensor is not None
        assert tensor.shape == (1,)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
        assert tensor.device.type == DEVICE
    pointers = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    assert len(set(pointers)) == 4
    assert [t.data_ptr() for t in d.get_stats_ll_stats_tensor() if t is not None] == pointers[:2]
    assert d.get_instance_id() == d.get_instance_id() != Diagnose(group=group).get_instance_id()
    assert d.group is group  # which programs that keep one for each group look for


def test_windows_do_not_touch_the_tensors_and_survive_a_program_that_clears_them() -> None:
    def program(group: ThreadGroup) -> tuple[int, list[Any]]:
        d = Diagnose(group=group)
        stats, _ = d.get_stats_ll_stats_tensor()
        wait_once(stats, group.rank, late=1)
        wait_once(stats, group.rank, late=1)
        d.diagnose_ll_sync(1)
        kept = int(stats[0])
        stats.zero_()
        wait_once(stats, group.rank, late=2)
        return kept, d.diagnose_ll_sync(1)

    results = on_all(4, program)
    assert [kept for kept, _ in results] == [2 * USUAL_NS] * 4
    assert abnormal_columns(results[0][1][0]) == {2}


def test_only_the_normal_mode() -> None:
    def program(group: ThreadGroup) -> tuple[Any, ...]:
        d = Diagnose(group=group, enable_ll_diagnose=False, enable_normal_diagnose=True)
        _, combine = d.get_stats_normal_stats_tensor()
        wait_once(combine, group.rank, late=3)
        tensors = d.get_all_stats_tensor()
        return (
            d.get_stats_ll_stats_tensor(),
            tensors[:2],
            d.diagnose_ll_sync(1),
            d.diagnose_normal_sync(1),
        )

    off, also_off, ll, normal = on_all(4, program)[0]
    assert off == also_off == (None, None)
    assert ll is None
    assert [abnormal_columns(result) for result in normal] == [set(), {3}]


def test_without_an_argument_the_environment_says_when_and_rank_0_whether_it_is_warm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEPEP_DIAGNOSE_SYNC_STEP", "2")

    def program(group: ThreadGroup) -> list[bool]:
        d = Diagnose(group=group)
        # As if the others had started long before.
        d._created -= 10_000.0 if group.rank else 0.0
        return [d.diagnose_ll_sync() is not None for _ in range(4)]

    assert on_all(2, program) == [[False, True, False, True], [False] * 4]
    monkeypatch.setenv("DEEPEP_DIAGNOSE_WARMING_TIME", "1000")
    assert on_all(2, program) == [[False] * 4, [False] * 4]


def test_disabled_it_does_nothing(monkeypatch: pytest.MonkeyPatch, settings: Path) -> None:
    monkeypatch.setenv("DEEPEP_DIAGNOSE_ENABLE", "0")
    group = thread_groups(2)[0]  # rank 1 never comes, and nobody waits for it
    d = Diagnose(group=group, enable_normal_diagnose=True, enable_async=True)
    assert d.get_stats_ll_stats_tensor() == (None, None)
    assert d.get_all_stats_tensor() == (None,) * 4
    assert d.diagnose_ll_sync(1) is None
    assert d.diagnose_normal_sync(1) is None
    d.start_async_diagnose()
    d.stop_async_diagnose()
    assert d.get_instance_id()
    assert not list(settings.iterdir())


def test_bad_arguments_are_named(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = thread_groups(1)
    with pytest.raises(EPArgumentError, match="group is None and torch.distributed is not init"):
        Diagnose()
    with pytest.raises(EPArgumentError, match="interval is 0"):
        Diagnose(group=group, interval=0)
    with pytest.raises(EPArgumentError, match="diagnose_ll_sync: diagnose_step is -1"):
        Diagnose(group=group).diagnose_ll_sync(-1)
    (settings / "file").touch()
    monkeypatch.setenv("DEEPEP_DIAGNOSE_LOG_PATH", str(settings / "file" / "logs"))
    with pytest.raises(EPArgumentError, match="DEEPEP_DIAGNOSE_LOG_PATH"):
        Diagnose(group=group)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ENABLE", "yes"), ("INTERVAL", "0"), ("INTERVAL", "soon"), ("WARMING_TIME", "-1"),
     ("SYNC_STEP", "0"), ("LOG_DETAILS", "2"), ("THRESHOLD_COL", "nan"), ("THRESHOLD_ROW", "x"),
     ("THRESHOLD_POINT", "-3"), ("EXCLUDING_ZEROS", "maybe")],
)  # fmt: skip
def test_a_variable_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"DEEPEP_DIAGNOSE_{name}", value)
    (group,) = thread_groups(1)
    with pytest.raises(EPArgumentError, match=f"DEEPEP_DIAGNOSE_{name} is '{value}'"):
        Diagnose(group=group)


def test_the_environment_has_the_known_names_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPEP_DIAGNOSE_LOG_PATH")
    monkeypatch.delenv("DEEPEP_DIAGNOSE_WARMING_TIME")
    found = {v.name: v() for v in env.VARIABLES if v.name.startswith("DEEPEP_DIAGNOSE_")}
    assert found == {
        "DEEPEP_DIAGNOSE_ENABLE": True,
        "DEEPEP_DIAGNOSE_INTERVAL": 20.0,
        "DEEPEP_DIAGNOSE_WARMING_TIME": None,
        "DEEPEP_DIAGNOSE_SYNC_STEP": 580,
        "DEEPEP_DIAGNOSE_LOG_PATH": Path("."),
        "DEEPEP_DIAGNOSE_LOG_DETAILS": False,
        "DEEPEP_DIAGNOSE_THRESHOLD_COL": 3.0,
        "DEEPEP_DIAGNOSE_THRESHOLD_ROW": 3.0,
        "DEEPEP_DIAGNOSE_THRESHOLD_POINT": 5.0,
        "DEEPEP_DIAGNOSE_EXCLUDING_ZEROS": False,
    }


# ---- the log


def test_the_log_of_rank_0_has_the_verdict_and_rows_that_read_back(
    monkeypatch: pytest.MonkeyPatch, settings: Path
) -> None:
    monkeypatch.setenv("DEEPEP_DIAGNOSE_LOG_DETAILS", "1")

    def program(group: ThreadGroup) -> None:
        d = Diagnose(group=group)
        wait_once(d.get_stats_ll_stats_tensor()[0], group.rank, late=1)
        d.diagnose_ll_sync(1)

    on_all(4, program)
    gc.collect()
    assert [path.name for path in settings.iterdir()] == ["diagnose_rank0.log"]
    lines = (settings / "diagnose_rank0.log").read_text().splitlines()
    stamp = r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\] "
    assert all(re.match(stamp, line) for line in lines)
    rows = [re.fullmatch(stamp + r"rank=(\d) \[(\d+(?: \d+){3})\]", line) for line in lines]
    dispatch = [[int(v) for v in row[2].split()] for row in rows if row]
    assert [int(row[1]) for row in rows if row] == [0, 1, 2, 3]
    assert dispatch[0] == [USUAL_NS, LATE_NS, USUAL_NS, USUAL_NS]
    assert any("dispatch: undecided: 4 of 4 ranks reported" in line for line in lines)
    assert any("dispatch: abnormal_cols [[1, " in line for line in lines)
    assert not any("no anomaly" in line for line in lines)
    # Rows of other operations say so, so that nobody takes them for the same matrix.
    assert sum(line.endswith("] combine") for line in lines) == 4


# ---- asynchronously


def test_the_thread_names_a_late_rank_ends_when_stopped_and_starts_again(settings: Path) -> None:
    wait = waiting_until_logged(settings, lambda text: "sender side: rank 1" in text)

    def program(group: ThreadGroup) -> bool:
        d = Diagnose(group=group, interval=0.1, enable_async=True)
        worker = d._worker
        d.start_async_diagnose()  # as a program does; it runs already
        assert d._worker is worker is not None
        found = wait(d.get_stats_ll_stats_tensor()[0], group.rank)
        d.stop_async_diagnose()
        d.stop_async_diagnose()
        assert not worker._thread.is_alive()
        d.start_async_diagnose()
        assert d._worker not in (None, worker)
        d.stop_async_diagnose()
        return found

    assert on_all(6, program) == [True] * 6


def in_a_process(rank: int, _group: Any, folder: str) -> list[bool]:
    """A rank that is a process, with the default group."""
    d = Diagnose(interval=0.02)
    stats, _ = d.get_stats_ll_stats_tensor()
    assert stats is not None
    wait_once(stats, rank, late=1)
    results = d.diagnose_ll_sync(1)
    d.start_async_diagnose()
    log, seen = Path(folder, "diagnose_rank0.log"), Path(folder, "seen")
    earlier = log.stat().st_size if rank == 0 else 0

    def named() -> bool:
        if rank == 0 and "abnormal_cols [[1, " in log.read_text()[earlier:]:
            seen.touch()
        return seen.exists()

    found = eventually(named, PATIENCE_S, lambda: wait_once(stats, rank, late=1))
    d.stop_async_diagnose()
    return [found, results is not None and abnormal_columns(results[0]) == {1}]


def test_processes_and_the_default_group(settings: Path) -> None:
    variables = {"DEEPEP_DIAGNOSE_LOG_PATH": str(settings), "DEEPEP_DIAGNOSE_WARMING_TIME": "0"}
    variables["DEEPEP_DIAGNOSE_THRESHOLD_COL"] = "1.5"
    outcomes = run_processes(in_a_process, 2, str(settings), env=variables)
    assert raise_failures(outcomes) == [[True, True], [True, False]]


def test_a_rank_that_does_not_answer_is_named_and_the_others_are_judged(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_sampler, "_ANSWER_S", 0.05)
    wait = waiting_until_logged(
        settings, lambda text: "rank 3 did not answer" in text and "sender side: rank 1" in text
    )

    def program(group: ThreadGroup) -> bool:
        d = Diagnose(group=group, interval=0.1)
        d.start_async_diagnose()
        if group.rank == 3:
            d.stop_async_diagnose()
            return True
        found = wait(d.get_stats_ll_stats_tensor()[0], group.rank)
        d.stop_async_diagnose()
        return found

    assert on_all(6, program) == [True] * 6


def test_what_was_planted_for_an_answer_is_refused_once_and_the_others_are_judged(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = WaitSampler._mine
    monkeypatch.setattr(
        WaitSampler,
        "_mine",
        lambda self: b"\x80\x04K\x01." if self._mailbox.rank == 3 else mine(self),
    )
    wait = waiting_until_logged(settings, lambda text: text.count("sender side: rank 1") > 1)

    def program(group: ThreadGroup) -> bool:
        d = Diagnose(group=group, interval=0.1, enable_async=True)
        found = wait(d.get_stats_ll_stats_tensor()[0], group.rank)
        d.stop_async_diagnose()
        return found

    assert on_all(6, program) == [True] * 6
    text = (settings / "diagnose_rank0.log").read_text()
    assert text.count("rank 3: the message of 5 bytes is no Waited: ") == 1


def test_a_log_is_not_written_through_a_link(settings: Path) -> None:
    kept = settings / "kept"
    kept.write_text("precious", encoding="utf-8")
    (settings / "diagnose_rank0.log").symlink_to(kept)
    (group,) = thread_groups(1)
    with pytest.raises(EPArgumentError, match=r"diagnose_rank0\.log: it is a symbolic link"):
        Diagnose(group=group)
    assert kept.read_text(encoding="utf-8") == "precious"


def test_a_thread_that_fails_says_so_once_and_lets_the_program_go_on(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(compat, "judge_waits", broken)
    (group,) = thread_groups(1)
    d = Diagnose(group=group, interval=0.01, enable_async=True)
    worker = d._worker
    assert worker is not None
    assert eventually(lambda: not worker._thread.is_alive(), PATIENCE_S)
    text = (settings / "diagnose_rank0.log").read_text()
    assert text.count("the asynchronous diagnosis failed and has ended") == 1
    assert "out of luck" in text
    d.stop_async_diagnose()


def test_the_thread_ends_with_its_owner() -> None:
    (group,) = thread_groups(1)
    d = Diagnose(group=group, enable_async=True)
    worker = d._worker
    assert worker is not None
    assert worker._thread.is_alive()
    del d
    gc.collect()
    assert not worker._thread.is_alive()


@pytest.mark.exhaustive
def test_a_program_that_never_stops_it_exits_all_the_same(settings: Path) -> None:
    program = textwrap.dedent(
        """
        from concurrent.futures import ThreadPoolExecutor
        from deep_ep.diagnose.compat import Diagnose
        from deep_ep.group import thread_groups
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(lambda g: Diagnose(group=g, enable_async=True), thread_groups(2)))
        print("end of the program")
        """
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (0, "end of the program\n"), run.stderr
    assert run.stderr == ""
