"""Files that others wrote: read or refused with file and line; nothing in them reaches a terminal, and no name is followed."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

import fixtures
from deep_ep import EPArgumentError
from deep_ep.base import files
from deep_ep.base.text import printable
from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.cli import watch
from deep_ep.diagnose.core import safe_files
from deep_ep.diagnose.render import prometheus
from deep_ep.diagnose.render.figure import write_picture
from deep_ep.diagnose.render.html import write_page
from deep_ep.diagnose.render.terminal import report
from deep_ep.diagnose.storage import counter_archive, diagnosis_log, record_layout
from deep_ep.diagnose.storage.diagnosis_log import read
from deep_ep.diagnose.storage.loader import read_any
from deep_ep.diagnose.storage.log_follower import Follower
from deep_ep.diagnose.storage.log_writer import Writer
from deep_ep.diagnose.storage.record import Record
from deep_ep.diagnose.storage.record_layout import to_line
from generator import simulate
from generator.machines import GPU
from support import system_tools

# Sets the title, clears the screen, turns text around; is in no encoding; begins a tag.
EVIL = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202e\r\n\ud800\x00<script>"
UNFIT = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
SLOW = Record(fixtures.diagnosis(4, fixtures.ALL_KINDS[:1], per_host=2), 1.7e9, 3, "ep")
GOOD = to_line(SLOW, with_matrices=True)


def with_evil(value: Any, keys_too: tuple[str, ...] = ()) -> Any:
    """Every text of a record that is free becomes hostile, and names of evidence as well."""
    if isinstance(value, dict):
        return {
            (f"{EVIL}{key}" if "evidence" in keys_too else key): (
                item if key in ("schema", "kind", "source") else with_evil(item, (key,))
            )
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [with_evil(item) for item in value]
    return f"{EVIL}{value}" if isinstance(value, str) else value


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    file = tmp_path / "diagnose-ep.jsonl"
    line = json.loads(GOOD)
    line["remarks"] = ["remark"]
    line["events"] = [{"operation": "dispatch", "number": 1, "rank": 0, "effect_us": 1.0}]
    file.write_text(json.dumps(with_evil(line)) + "\n", encoding="utf-8")
    return file


def test_text_that_is_fit_stays_as_it_is() -> None:
    assert (
        printable("node-1.example Zürich 東京 +5 us <b>") == "node-1.example Zürich 東京 +5 us <b>"
    )
    assert printable("a\x1b[2J\u202e\ud800\n") == r"a\x1b[2J\u202e\ud800\n"


@pytest.fixture
def _watching_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", end)


@pytest.mark.usefixtures("_watching_ends_at_once")
@pytest.mark.parametrize("command", ["show", "watch"])
def test_texts_of_records_reach_the_terminal_written_out(
    evil: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(evil)]) == 0
    printed = capsys.readouterr()
    assert r"\x1b]0;mine\x07" in "".join(printed.out.split())
    assert UNFIT.search(printed.out + printed.err) is None


def test_texts_of_records_reach_pages_pictures_and_metrics_written_out(
    evil: Path, tmp_path: Path
) -> None:
    system_tools.package("prometheus_client")
    system_tools.package("matplotlib")
    (record,) = read(evil)
    write_page([record], tmp_path / "page.html")
    prometheus.write_textfile([record], tmp_path / "x.prom")
    write_picture(record.diagnosis, tmp_path / "picture.svg")
    for name in ("page.html", "x.prom", "picture.svg"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert r"\x1b" in text
        assert UNFIT.search(text.replace("\t", "")) is None, name
    assert "mine" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>x" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_hostile_texts_are_stored_again_as_they_are_shown(evil: Path, tmp_path: Path) -> None:
    (record,) = read(evil)
    Writer(tmp_path / "again", "ep").write(record, with_matrices=True)
    (again,) = read(tmp_path / "again")
    assert again.diagnosis.hosts == record.diagnosis.hosts
    # Of dataclasses with a NaN none equals another from Python 3.13 on.
    assert repr(again.diagnosis.verdicts) == repr(record.diagnosis.verdicts)


@pytest.mark.usefixtures("_watching_ends_at_once")
def test_hostile_file_names_and_logs_reach_the_terminal_written_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "diagnose-\x1b[2J.jsonl").write_text(GOOD + "\nnonsense\n", encoding="utf-8")
    assert main(["show", str(tmp_path)]) == 2
    assert main(["watch", str(tmp_path)]) == 0
    log = tmp_path / "\x1b[2J.log"
    log.write_text("rank=0 [1 2]\nrank=1 [3 \x1b[2J4\nrank=1 [\x1b 1]", encoding="utf-8")
    assert main(["show", str(log)]) in (0, 2)
    printed = capsys.readouterr()
    assert UNFIT.search(printed.out + printed.err) is None


def test_a_line_too_long_is_refused_by_its_size_without_reading_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_layout, "LONGEST_LINE", 100_000)
    file = tmp_path / "diagnose-ep.jsonl"
    file.write_text(GOOD + "\n" + "[" * 10_000_000 + "\n" + GOOD + "\n", encoding="utf-8")
    tracemalloc.start()
    with pytest.raises(EPArgumentError, match=f"{file}:2: the line has more than 100000 bytes"):
        read(file)
    log = fixtures.caught_up(Follower(file))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
    assert len(log) == 2
    assert log.remarks == (diagnosis_log.too_long(f"{file}:2"),)


def test_a_log_is_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = diagnosis_log.parse_line

    def count(line: bytes, where: str, **how: Any) -> Record | None:
        parsed.append(where)
        return parse(line, where, **how)

    monkeypatch.setattr(diagnosis_log, "parse_line", count)
    file = tmp_path / "diagnose-ep.jsonl"
    file.write_text((GOOD + "\n") * 5, encoding="utf-8")
    log = read(file)
    assert parsed == [f"{file}:{number}" for number in range(1, 6)]
    assert log[3].window == 3
    assert parsed[5:] == [f"{file}:4"]
    file.write_text(GOOD[:50], encoding="utf-8")
    with pytest.raises(EPArgumentError, match=f"{file}:4: "):
        log[3]


# --- anything at all -------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.sampled_from([2**63, -(2**63), 10**30, 1e20, -1e20, 1e300, -0.0, 1e-320])
    | st.floats(-1e21, 1e21)
    | st.sampled_from(["", EVIL, "dispatch", "late", "x" * 5000, "\udfff"])
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = [path] * bool(path)
    if isinstance(value, (dict, list)):
        for key, item in inner:
            found += (
                places(item, (*path, key)) if isinstance(item, (dict, list)) else [(*path, key)]
            )
    return found


PLACES = places(json.loads(GOOD))


def look_at(file: Path) -> None:
    """Everything that shows a record."""
    log = read(file)
    console = Console(file=io.StringIO(), width=80)
    for record in log:
        report(record.diagnosis, console)
        to_line(record, with_matrices=True)
        write_page([record], file.with_suffix(".html"))
    list(prometheus.Metrics(lambda: log).collect())
    assert UNFIT.search(console.file.getvalue()) is None  # type: ignore[attr-defined]


def mutated(draw: st.DrawFn) -> bytes:
    value = json.loads(GOOD)
    for path in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        at = value
        try:
            for key in path[:-1]:
                at = at[key]
            if draw(st.integers(0, 4)):
                at[path[-1]] = draw(anything)
            else:
                del at[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue  # what was there has been replaced
    return json.dumps(value).encode()


@st.composite
def spoilt_lines(draw: st.DrawFn) -> bytes:
    line = bytearray(mutated(draw))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(line) - 1))
        line[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(line)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("error")
@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=spoilt_lines())
def test_any_record_is_shown_or_refused_with_file_and_line(
    line: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "diagnose-ep.jsonl"
    file.write_bytes(GOOD.encode() + b"\n" + line + b"\n")
    try:
        look_at(file)
    except EPArgumentError as error:
        assert re.match(re.escape(str(file)) + r":\d+: ", str(error)), str(error)  # noqa: PT017 - both are fine


@pytest.mark.filterwarnings("error")
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lines=st.lists(
        st.builds(
            lambda rank, waits, end: f"rank={rank} [{waits}{end}",
            st.integers(-1, 4),
            st.lists(
                st.floats(allow_nan=True).map(repr)
                | st.integers(-1, 2**70).map(str)
                | st.just(EVIL[:-20]),
                max_size=4,
            ).map(" ".join),
            st.sampled_from(["]", "", "] combine", "]" + EVIL]),
        ),
        max_size=8,
    )
)
def test_any_matrix_log_is_judged_or_refused_with_where(
    lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "wait.log"
    file.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    console = Console(file=io.StringIO(), width=80)
    try:
        for record in read_any(file):
            report(record.diagnosis, console)
    except EPArgumentError as error:
        assert str(error).startswith(str(file)), str(error)  # noqa: PT017 - both are fine


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_saved_counters_are_judged_or_refused_with_the_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (file,) = counter_archive.save(COUNTERS, folder)
    spoilt = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        # The directory at the end of an archive is as interesting as all the rest.
        at = data.draw(
            st.integers(0, len(spoilt) - 1) | st.integers(len(spoilt) - 800, len(spoilt) - 1)
        )
        spoilt[at] = data.draw(st.integers(0, 255))
    file.write_bytes(spoilt)
    try:
        read_any(file)
    except EPArgumentError as error:
        assert str(error).startswith(str(folder)), str(error)  # noqa: PT017 - both are fine


COUNTERS = simulate(GPU, 2, 12, seed=1)[0]


@pytest.mark.parametrize("dtype", ["<i8", "<U0"])
def test_an_array_larger_than_its_file_is_refused_before_it_is_allocated(
    tmp_path: Path, dtype: str
) -> None:
    (file,) = counter_archive.save(COUNTERS, tmp_path)
    with np.load(file) as stored:
        arrays = {name: stored[name] for name in stored.files}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": dtype, "fortran_order": False, "shape": (2**40,)}
    )
    del arrays["kinds"]
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            kept = io.BytesIO()
            np.save(kept, array)
            archive.writestr(f"{name}.npy", kept.getvalue())
        archive.writestr("kinds.npy", header.getvalue())
    with pytest.raises(EPArgumentError, match=f"{file}: damaged .*1099511627776"):
        read_any(file)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ("{", b""),
        ("1L\n  2\n 3", b""),
        ("{'descr': '<U1', 'fortran_order': False, 'shape': ()}", b"\0\0\x11\0"),
    ],
    ids=["no end", "indentation", "no character"],
)
def test_an_entry_that_numpy_cannot_read_is_refused(
    tmp_path: Path, header: str, data: bytes
) -> None:
    (file,) = counter_archive.save(COUNTERS, tmp_path)
    begin = np.lib.format.magic(1, 0) + len(header).to_bytes(2, "little")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("schema.npy", begin + header.encode() + data)
    with pytest.raises(EPArgumentError, match=f"{file}: damaged"):
        read_any(file)


def test_a_pipe_in_a_folder_keeps_nobody_waiting(tmp_path: Path) -> None:
    for name in ("diagnose-x.jsonl", "counters-rank0.npz", "wait.log", "trace.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(EPArgumentError, match="nothing to read in this folder"):
        read_any(tmp_path)
    assert main(["trace", str(tmp_path)]) == 2
    assert list(Follower(tmp_path).catch_up()) == []
    write_record(tmp_path)
    assert len(read_any(tmp_path)) == 1


@pytest.mark.parametrize("command", ["show", "trace"])
def test_a_pipe_is_refused_by_name_and_not_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main([command, str(tmp_path / "pipe")]) == 2
    assert f"{tmp_path}/pipe is no regular file" in capsys.readouterr().err


# --- names that anybody can guess ------------------------------------------------------------------


def write_record(folder: Path) -> Path:
    Writer(folder, "ep").write(SLOW, with_matrices=False)
    return folder / "diagnose-ep.jsonl"


def write_counters(folder: Path) -> Path:
    return counter_archive.save(COUNTERS, folder)[0]


def write_html(folder: Path) -> Path:
    write_page([SLOW], folder / "page.html")
    return folder / "page.html"


def write_png(folder: Path) -> Path:
    system_tools.package("matplotlib")
    write_picture(SLOW.diagnosis, folder / "picture.png")
    return folder / "picture.png"


WRITERS: list[Callable[[Path], Path]] = [write_record, write_counters, write_html, write_png]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_nothing_is_written_through_a_planted_link(
    tmp_path: Path, write: Callable[[Path], Path], plant: Callable[[Path, Path], None]
) -> None:
    target = write(tmp_path)
    kept = target.rename(tmp_path / "kept")
    kept.write_text("precious", encoding="utf-8")
    plant(kept, target)
    with pytest.raises(EPArgumentError, match=f"{target}: .*(is a symbolic link|has 2 names)"):
        write(tmp_path)
    assert kept.read_text(encoding="utf-8") == "precious"
    target.unlink()
    assert write(tmp_path).stat().st_size > 100


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "page.html")
    with pytest.raises((EPArgumentError, OSError), match=r"page\.html"):
        write_html(tmp_path)


def test_what_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(tmp_path)
    for option, name in (("--html", "/dev/full"), ("--html", f"{tmp_path}/no/page.html")):
        assert main(["show", str(tmp_path), option, name]) == 2
        assert f": {name}: " in capsys.readouterr().err
    with pytest.raises(OSError, match="no/deep_ep.prom'$"):
        files.replace(tmp_path / "no" / "deep_ep.prom", b"")


def test_metrics_replace_a_link_and_leave_alone_what_it_names(tmp_path: Path) -> None:
    system_tools.package("prometheus_client")
    kept = tmp_path / "kept"
    kept.write_text("precious", encoding="utf-8")
    os.symlink(kept, tmp_path / "x.prom")
    # What another writer would take for the name of its temporary file.
    guess = tmp_path / f"x.prom.{os.getpid()}.{threading.current_thread().ident}"
    os.symlink(kept, guess)
    prometheus.write_textfile([SLOW], tmp_path / "x.prom")
    assert kept.read_text(encoding="utf-8") == "precious"
    assert "deep_ep_verdicts" in (tmp_path / "x.prom").read_text(encoding="utf-8")
    assert sorted(os.listdir(tmp_path)) == ["kept", "x.prom", guess.name]


class Full(io.FileIO):
    """A disk with room for some bytes."""

    room = 1000

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(bytes(data)[: self.room])
        self.room -= taken
        return taken


def test_a_disk_that_is_full_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_record(tmp_path)
    before = file.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(safe_files, "open_to_append", lambda path: Full(str(path), "ab+"))
        with pytest.raises(OSError, match="No space left"):
            write_record(tmp_path)
    assert file.read_bytes() == before
    write_record(tmp_path)
    assert len(read(file)) == 2


def test_a_record_that_no_reader_would_take_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_layout, "LONGEST_LINE", 1000)
    with pytest.raises(EPArgumentError, match="a line has at most 1000"):
        write_record(tmp_path)
    assert list(tmp_path.iterdir()) == []
