"""`python -m deep_ep.diagnose`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fixtures
from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.cli import watch
from deep_ep.diagnose.render import prometheus
from deep_ep.diagnose.storage import log_follower
from deep_ep.diagnose.storage.log_follower import Follower
from deep_ep.diagnose.storage.log_writer import Writer
from deep_ep.diagnose.storage.record import Record
from deep_ep.diagnose.storage.record_layout import to_line
from support import system_tools

HEALTHY = fixtures.diagnosis(8, ())
SLOW = fixtures.diagnosis(8, fixtures.ALL_KINDS, per_host=4)


def record(diagnosis: object = SLOW, window: int = 1, group: str = "ep") -> Record:
    return Record(diagnosis, 1.7e9 + 20 * window, window, group)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three windows; the second has verdicts and matrices."""
    made = tmp_path / "records"
    writer = Writer(made, "ep")
    writer.write(record(HEALTHY, 1), with_matrices=True)
    writer.write(record(SLOW, 2), with_matrices=True)
    writer.write(record(HEALTHY, 3), with_matrices=False)
    return made


Run = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def test_show_takes_the_last_window_with_a_verdict_and_says_which(run: Run, folder: Path) -> None:
    status, out, err = run("show", folder)
    assert (status, err) == (0, "")
    heading = " ".join(out.split("dispatch:")[0].split())
    assert heading.startswith("window 2 of 1-3, the last with a verdict; 20")
    assert heading.endswith("8 ranks on 2 hosts")
    assert "Comp-Slow  rank 1" in out
    assert "rows wait, columns are waited for" in out
    assert "bandwidth in GB/s" in out
    assert max(map(len, out.splitlines())) <= 80


def test_show_takes_the_window_of_the_same_verdicts_that_has_matrices(
    run: Run, folder: Path
) -> None:
    Writer(folder, "ep").write(record(SLOW, 4), with_matrices=False)
    out = run("show", folder)[1]
    assert out.startswith("window 2 of 1-4, the last with matrices; ")
    assert "rows wait, columns are waited for" in out
    other = replace(SLOW, verdicts=[fixtures.LATE])
    Writer(folder, "ep").write(record(other, 5), with_matrices=False)
    assert run("show", folder)[1].startswith("window 5 of 1-5, the last with a verdict; ")


def test_show_takes_the_last_window_when_none_has_a_verdict(run: Run, tmp_path: Path) -> None:
    for window in (1, 2):
        Writer(tmp_path, "ep").write(record(HEALTHY, window), with_matrices=True)
    _, out, _ = run("show", tmp_path)
    assert out.startswith("window 2 of 1-2, the last; none has a verdict")
    assert "No anomaly" in out


def test_show_takes_the_window_asked_for(run: Run, folder: Path) -> None:
    assert run("show", folder, "--window", "1")[1].startswith("window 1 of 1-3")
    assert run("show", folder, "--window", "last")[1].startswith("window 3 of 1-3")
    out = run("show", folder, "--window", "all")[1]
    assert re.findall(r"^window (\d) of 1-3", out, re.MULTILINE) == ["1", "2", "3"]
    status, _, err = run("show", folder, "--window", "9")
    assert status == 2
    assert "--window is '9'; it must be last, all, or one of the 3 windows from 1 to 3" in err


def test_show_takes_the_group_asked_for(run: Run, folder: Path) -> None:
    Writer(folder, "other").write(record(HEALTHY, 7, "other"), with_matrices=True)
    _, out, _ = run("show", folder, "--group", "other")
    assert "window 7, group other" in out
    status, _, err = run("show", folder, "--group", "none")
    assert status == 2
    assert "no whole window of group 'none'; there are: ep, other" in err


def test_show_keeps_to_the_width_asked_for(run: Run, folder: Path) -> None:
    _, out, _ = run("show", folder, "--width", "60")
    assert 50 < max(map(len, out.splitlines())) <= 60


def test_check_tells_verdicts_by_the_exit_status(run: Run, folder: Path) -> None:
    assert run("show", folder)[0] == 0
    assert run("show", folder, "--check")[0] == 3
    assert run("show", folder, "--check", "--window", "last")[0] == 0


def test_show_writes_a_page_and_pictures(run: Run, folder: Path, tmp_path: Path) -> None:
    system_tools.package("matplotlib")
    page, png, svg = tmp_path / "o.html", tmp_path / "o.png", tmp_path / "o.svg"
    status, out, _ = run("show", folder, "--html", page, "--png", png, "--svg", svg)
    assert status == 0
    assert "<html" in page.read_text(encoding="utf-8")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text(encoding="utf-8")
    for file in (page, png, svg):
        assert f"wrote {file}" in out.replace("\n", "")


def test_show_writes_a_speed_profile_of_the_windows_shown(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "speed.json"
    status, out, _ = run(
        "show", folder, "--group", "ep", "--window", "all", "--speed-profile", path
    )
    assert status == 0
    assert f"wrote {path}" in out.replace("\n", "")
    profile = json.loads(path.read_text())
    assert profile["group"] == "ep"
    assert len(profile["windows"]) > 1
    assert len(profile["ranks"]) == 8


def test_show_tells_what_is_missing(run: Run, folder: Path) -> None:
    file = folder / "diagnose-ep.jsonl"
    file.write_bytes(file.read_bytes()[:-50])
    status, out, _ = run("show", folder)
    assert status == 0
    assert "note:" in out
    assert "the line is cut off" in " ".join(out.split())
    page = folder / "page.html"
    run("show", folder, "--html", page)
    assert "the line is cut off" in page.read_text(encoding="utf-8")


def test_show_says_that_stored_matrices_are_means_over_blocks(run: Run, tmp_path: Path) -> None:
    Writer(tmp_path, "ep").write(record(fixtures.diagnosis(256)), with_matrices=True)
    _, out, _ = run("show", tmp_path)
    assert "matrices were stored as means over blocks of ranks" in " ".join(out.split())
    assert "not known" in out.split("bandwidth in GB/s")[1]
    page = tmp_path / "page.html"
    run("show", tmp_path, "--html", page)
    assert "stored as means over blocks of ranks" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected records"),
        (b"{", "no whole window"),
        (b'{"a": 1}\n', "thing:1: field schema is missing"),
        (b"rank=0 [1 2]\nrank=1 [3 -4]\n", "thing:2: value 2 is '-4'"),
        (b"PK\x03\x04 nonsense", "no archive, or cut off"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    run: Run, tmp_path: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "thing"
    file.write_bytes(content)
    status, out, err = run("show", file)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("python -m deep_ep.diagnose: ")
    assert str(file) in err
    assert said in err


def test_a_folder_that_may_not_be_read_is_not_called_empty(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: str | Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    for program in ("show", "trace", "watch"):
        with monkeypatch.context() as patched:
            # The tests may be root, who may read everything.
            for name in ("listdir", "scandir"):
                patched.setattr(os, name, refuse)
            patched.setattr(watch.time, "sleep", lambda _: pytest.fail("it waits"))
            status, _, err = run(program, tmp_path)
        assert status == 2
        assert f"{tmp_path}: Permission denied. Do it as a user who may" in err


def test_where_nothing_can_be_written_the_place_is_named(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    assert run("show", folder, "--html", tmp_path / "no" / "page.html")[2] == (
        f"python -m deep_ep.diagnose: {tmp_path}/no/page.html: No such file or directory. Check the name; the folder of "
        "a file to write must be there.\n"
    )
    assert "Is a directory. Name a file." in run("show", folder, "--html", tmp_path)[2]


def interrupt(_: float) -> None:
    """Ctrl-C, instead of a sleep."""
    raise KeyboardInterrupt


def test_watch_says_that_the_folder_is_not_there_yet(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.time, "sleep", interrupt)
    assert run("watch", tmp_path / "job")[:2] == (0, f"waiting for {tmp_path}/job\n")
    assert run("watch", tmp_path)[:2] == (0, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["show"], "FILE_OR_DIR"),
        (["show", ""], "FILE_OR_DIR: the name is empty"),
        (["run", "--dir", "", "--", "true"], "--dir: the name is empty"),
        (["show", "x", "--width", "0"], "is not an integer above 0"),
        (["watch", "x", "--interval", "nan"], "is not a number of seconds above 0"),
        (
            ["watch", "x", "--interval", "1e30"],
            "is not a number of seconds above 0 (and below 1e9)",
        ),
        (["prometheus", "x"], "--out --listen is required"),
        (["prometheus", "x", "--listen", "here"], "is not HOST:PORT, such as 127.0.0.1:9477"),
        (["prometheus", "x", "--listen", "h:1", "--out", "o"], "not allowed with"),
    ],
)
def test_bad_arguments_are_explained(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_watch_prints_what_changes_and_ends_with_ctrl_c(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "diagnose-ep.jsonl"
    file.unlink()
    late = replace(SLOW, verdicts=[fixtures.LATE])
    windows = [HEALTHY, HEALTHY, late, late, HEALTHY, HEALTHY, HEALTHY]
    steps = [
        lambda i=i, found=found: Writer(folder, "ep").write(record(found, i), with_matrices=False)
        for i, found in enumerate(windows)
    ]

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if not steps:
            raise KeyboardInterrupt
        steps.pop(0)()

    monkeypatch.setattr(watch.time, "sleep", sleep)
    status, out, _ = run("watch", folder, "--interval", "0.5")
    assert status == 0
    first, came, went = out.splitlines()
    assert first.endswith("ep window 0: no verdict so far")
    assert "ep window 2: Comp-Slow rank 1 (node0 cuda:1)" in came
    assert "resolved: Comp-Slow rank 1" in went


def test_a_follower_reads_whole_lines_once(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "jobs")
    assert not fixtures.caught_up(follower)
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs" / "diagnose-ep.jsonl"
    lines = [to_line(record(HEALTHY, i), with_matrices=False) + "\n" for i in range(3)]
    with file.open("a", encoding="utf-8") as growing:
        growing.write(lines[0] + lines[1][:100])
        growing.flush()
        assert [r.window for r in fixtures.caught_up(follower)] == [0]
        assert not fixtures.caught_up(follower)
        growing.write(lines[1][100:])
        growing.flush()
        assert [r.window for r in fixtures.caught_up(follower)] == [1]
    Writer(tmp_path / "jobs", "new").write(record(HEALTHY, 9, "new"), with_matrices=False)
    assert [r.group for r in fixtures.caught_up(follower)] == ["new"]


def test_a_follower_starts_anew_when_the_file_does(tmp_path: Path) -> None:
    file = tmp_path / "diagnose-ep.jsonl"
    line = to_line(record(HEALTHY), with_matrices=False) + "\n"
    file.write_text(line * 2, encoding="utf-8")
    follower = Follower(file)
    assert len(fixtures.caught_up(follower)) == 2
    file.write_text(line, encoding="utf-8")
    assert len(fixtures.caught_up(follower)) == 1
    file.unlink()
    assert not fixtures.caught_up(follower)
    file.write_text(line, encoding="utf-8")
    assert len(fixtures.caught_up(follower)) == 1


def test_a_file_that_vanishes_after_it_was_listed_ends_nothing(tmp_path: Path) -> None:
    for group in ("a", "b"):
        Writer(tmp_path, group).write(record(HEALTHY, 1, group), with_matrices=False)
    found = Follower(tmp_path).catch_up()
    assert isinstance(first := next(found), Record)
    (tmp_path / f"diagnose-{'b' if first.group == 'a' else 'a'}.jsonl").unlink()
    assert not list(found)


def test_a_file_that_may_not_be_read_is_told_once_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group in ("a", "b"):
        Writer(tmp_path, group).write(record(HEALTHY, 1, group), with_matrices=False)
    file, read_on = tmp_path / "diagnose-a.jsonl", log_follower._read_on

    def refuse(path: Path, position: log_follower._Position) -> Iterator[Record | str]:
        # The tests may be root, who may read everything.
        if path == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_on(path, position)

    follower = Follower(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(log_follower, "_read_on", refuse)
        first, second = fixtures.caught_up(follower), fixtures.caught_up(follower)
    assert [one.group for one in first] == ["b"]
    assert first.remarks == (f"{file}: Permission denied. Its windows are missing.",)
    assert second.remarks == ()
    assert [one.group for one in fixtures.caught_up(follower)] == ["a"]


def test_a_follower_tells_about_bad_lines_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "diagnose-ep.jsonl"
    line = to_line(record(HEALTHY), with_matrices=False)
    file.write_text(f"nonsense\n{line[:300]}\n\n{line}\n", encoding="utf-8")
    log = fixtures.caught_up(log_follower.Follower(tmp_path))
    assert len(log) == 1
    assert log.remarks[0].startswith(f"{file}:1: not JSON")
    assert log.remarks[1].startswith(f"{file}:2: the line is cut off")


def test_prometheus_writes_a_file(run: Run, folder: Path, tmp_path: Path) -> None:
    system_tools.package("prometheus_client")
    out = tmp_path / "deep_ep.prom"
    assert run("prometheus", folder, "--out", out)[0] == 0
    text = out.read_text(encoding="utf-8")
    assert 'deep_ep_operations_total{group="ep",operation="dispatch"} 360.0' in text
    assert out.stat().st_mode & 0o777 == 0o644, "the collector is another user"


def test_prometheus_serves_until_ctrl_c(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system_tools.package("prometheus_client")
    (folder / "diagnose-bad.jsonl").write_text("nonsense\n", encoding="utf-8")
    scraped = []
    serve = prometheus.serve

    def serve_and_scrape(*arguments: object) -> object:
        server = serve(*arguments)  # type: ignore[arg-type]

        def sleep(_: float) -> None:
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            with urllib.request.urlopen(url, timeout=10) as answer:
                scraped.append(answer.read().decode())
            raise KeyboardInterrupt

        monkeypatch.setattr(time, "sleep", sleep)
        return server

    monkeypatch.setattr(prometheus, "serve", serve_and_scrape)
    status, out, err = run("prometheus", folder, "--listen", "127.0.0.1:0")
    assert status == 0
    assert re.fullmatch(r"serving http://127.0.0.1:\d+/metrics\n", out)
    assert 'deep_ep_verdicts{group="ep"} 0.0' in scraped[0]
    assert "diagnose-bad.jsonl:1: not JSON" in err


def test_where_metrics_cannot_be_served_the_address_is_named(run: Run, folder: Path) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        status, _, err = run("prometheus", folder, "--listen", f"[::1]:{port}")
    assert status == 2
    assert f"--listen is ::1:{port}, where nothing can be served (Address already in use)" in err
    status, _, err = run("prometheus", folder, "--listen", "node..local:9477")
    assert status == 2
    assert "--listen is node..local:9477, where nothing can be served (no name of a host)" in err


def test_on_a_terminal_watch_shows_the_heatmaps(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.time, "sleep", interrupt)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("LINES", "60")
    status, out, _ = run("watch", folder)
    assert status == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    assert "ep window 2: Comm-Slow path 2 > 5" in shown  # one of the latest changes
    assert "dispatch: microseconds waited per operation" in shown


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """Tests that a shell runs as a background job ignore SIGINT, and what they start inherits that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_background")
def test_the_program_starts_and_ctrl_c_ends_it_with_0(tmp_path: Path) -> None:
    # It prints a line once it follows, so that the signal cannot come too early.
    Writer(tmp_path, "ep").write(record(HEALTHY), with_matrices=False)
    program = subprocess.Popen(
        [sys.executable, "-m", "deep_ep.diagnose", "watch", str(tmp_path), "--interval", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert program.stdout is not None
    assert "no verdict so far" in program.stdout.readline()
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 0
    assert err == ""


@pytest.mark.parametrize(
    ("command", "where", "status", "said"),
    [
        pytest.param("show", ">&-", 0, "", marks=pytest.mark.exhaustive),
        pytest.param("show --window 9", "2>&-", 2, "", marks=pytest.mark.exhaustive),
        pytest.param("hang --json", ">&-", 0, "", marks=pytest.mark.exhaustive),
        ("hang --json", "| true", 1, ""),
        pytest.param(
            "hang --json", ">/dev/full", 2, "No space left on device", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_output_that_nobody_takes_ends_in_no_traceback(
    tmp_path: Path, command: str, where: str, status: int, said: str
) -> None:
    Writer(tmp_path, "ep").write(record(), with_matrices=True)
    (tmp_path / "a.log").write_text(
        "DeepEP timeout check failed: rank = 6, thread = 5, value = 1024)\n"
    )
    script = f"set -o pipefail; {sys.executable} -m deep_ep.diagnose {command} {tmp_path} {where}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert done.stderr.count("\n") == bool(said)
    assert said in done.stderr


@pytest.mark.exhaustive
def test_reading_and_showing_need_no_optional_package() -> None:
    script = (
        "import sys\n"
        "for name in ('plotly', 'matplotlib', 'prometheus_client'): sys.modules[name] = None\n"
        "import deep_ep.diagnose.__main__ as program\n"
        "program.main(['show', '--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--window N|last|all" in done.stdout
