"""What is made of logs in which libraries say that they timed out: public reports, and what must never be concluded."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deep_ep.diagnose.__main__ import main
from deep_ep.hang.cause import HangVerdict
from deep_ep.hang.folder import Folder, read_folder
from deep_ep.hang.log_table import ROWS
from deep_ep.hang.log_verdict import read_log
from deep_ep.hang.report import paragraphs
from deep_ep.hang.traces import write_dump
from deep_ep.hang.verdict import judge
from made_up_ranks import Group


class LogReport(NamedTuple):
    """What somebody posted, and what has to be said of it; the file has it in words."""

    thread: str
    kind: str
    ranks: set[int]
    says: str
    lines: str


def reports() -> Iterator[LogReport]:
    text = Path(__file__).with_name("log_reports.txt").read_text(encoding="utf-8")
    for block in text.rstrip("\n").split("\n\n")[1:]:
        head, says, lines = block.split("\n", 2)
        thread, expected, _ = head.split("|")
        kind, *ranks = expected.split()
        yield LogReport(
            thread.strip(), kind, set(map(int, ranks)), says, lines.replace("\\x1b", "\x1b")
        )


REPORTS = tuple(reports())

PREFIXES = (
    "",
    "[rank3]: ",
    "3: ",
    "[1,3]<stderr>:",
    "[default3]:",
    "node-0 | ",
    "[pod/decode-0/vllm] ",
    "2026-11-26T03:00:00.123Z stderr F ",
    "\x1b[36m(RayTrainWorker pid=4711)\x1b[0m ",
)


def barrier(rank: int, absent: Sequence[int], num_ranks: int = 8) -> list[str]:
    """What DeepEP V1 prints of a rank that waits for others of its node."""
    return [
        f"DeepEP timeout check failed: rank = {rank}, thread = {other}, value = {1024 * (other in absent)})\n"
        for other in range(num_ranks)
    ]


def read(folder: Path, *texts: str | bytes) -> Folder:
    """What is made of logs with these texts."""
    paths = []
    for index, text in enumerate(texts):
        paths.append(folder / f"{index}.log")
        paths[-1].write_bytes(text.encode() if isinstance(text, str) else text)
    return read_folder(*paths)


def named(found: Folder) -> set[int]:
    return {rank for logs in found.buffers for rank in logs.verdict.ranks}


def words(found: Folder) -> str:
    causes = [cause for logs in found.buffers for cause in paragraphs(logs.verdict)]
    return "\n".join(f"{said}. {advice}" for said, advice in causes)


# ---- what people posted


@pytest.mark.parametrize("posted", REPORTS, ids=lambda posted: posted.thread.rpartition("/")[2])
def test_a_public_report(tmp_path: Path, posted: LogReport) -> None:
    found = read(tmp_path, posted.lines)
    assert posted.says in "\n".join([words(found), *found.remarks])
    assert named(found) == posted.ranks
    kinds = {cause.kind for logs in found.buffers for cause in logs.verdict.causes}
    assert kinds == {posted.kind} - {"nothing"}


def test_somebody_posted_each_message_of_the_table(tmp_path: Path) -> None:
    log = tmp_path / "all.log"
    log.write_text("\n".join(posted.lines for posted in REPORTS))
    known = {line.row for line in read_log(log).lines}
    assert [row.pattern.pattern for row in ROWS if row not in known] == []


def test_reports_of_one_file_are_not_mixed_up(tmp_path: Path) -> None:
    """All of them in one file: what one says is doubted because of another at most."""
    found = read(tmp_path, "\n".join(posted.lines for posted in REPORTS))
    assert named(found) <= {rank for posted in REPORTS for rank in posted.ranks}


# ---- the program


def test_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "node.log"
    log.write_text("".join(barrier(6, [5]) + barrier(2, [5])))
    assert main(["hang", str(log), "--width", "160", "--check"]) == 3
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        f"logs: ranks within a node, {log}",
        "  rank 5 has not come to the barrier within the node; ranks 2, 6 wait for it",
        "  Read that rank's own log first; then its stack (py-spy dump) and its GPU (nvidia-smi, dmesg for Xid errors).",
        "",
        "who waits for whom",
        "  ranks 2, 6  >  entry of rank 5  (at the barrier within the node)",
        "",
    ]


def test_the_log_of_those_who_say_nothing_is_asked_for(tmp_path: Path) -> None:
    found = read(tmp_path, REPORTS[2].lines)
    assert found.buffers[0].verdict.missing == (3, 4)
    assert words(found).endswith(" Missing: the log of ranks 3-4.")


def test_logs_beside_dumps(tmp_path: Path) -> None:
    states = Group(4, stuck={3: "gone"}).states()
    write_dump(tmp_path / "dump", states, judge(states))
    (tmp_path / "dump" / "stderr").write_text("".join(barrier(6, [5])))
    (tmp_path / "dump" / "notes").write_text("nothing of interest\n")
    found = read_folder(tmp_path)
    assert [buffer.verdict.ranks for buffer in found.buffers] == [(3,), (5,)]
    (remark,) = found.remarks
    assert "notes: left out: byte 0: it is neither" in remark


def test_a_file_with_nothing_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    log.write_text("hello\n")
    assert main(["hang", str(log)]) == 2
    assert "nor has it a line that logs are read for" in capsys.readouterr().err
    log.write_text("DeepGEMM warmup:  12%\n")
    assert main(["hang", str(log)]) == 0
    assert "in the logs nobody says that it waits" in capsys.readouterr().out


# ---- who is named


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_launchers(tmp_path: Path, prefix: str) -> None:
    text = "".join(prefix + line for line in barrier(6, [5]))
    assert named(read(tmp_path, text)) == {5}


@pytest.mark.parametrize("split", [1, 2, 8])
@pytest.mark.parametrize("is_cut", [False, True])
def test_who_waits_itself_is_not_named(tmp_path: Path, split: int, is_cut: bool) -> None:
    """Halves of a node that wait for each other, in one file, in two, and in one of each rank; lines that say who came are lost."""
    low, high = range(4), range(4, 8)
    texts = []
    for rank in range(8):
        lines = barrier(rank, high if rank in low else low)
        texts.append("".join(line for line in lines if not is_cut or "1024" in line))
    each = 8 // split
    found = read(tmp_path, *("".join(texts[at : at + each]) for at in range(0, 8, each)))
    assert named(found) == set()
    why = "a rank of that number waits itself" if is_cut else "others say that it came"
    assert f"did not come is not certain: {why}" in words(found)


def test_who_waits_on_its_host_is_not_named(tmp_path: Path) -> None:
    lines = [*barrier(6, [5]), "[2026-11-26 03:00:00 DP5 TP5 EP5] x\n"]
    waits = "RuntimeError: DeepEP error: timeout (dispatch CPU)\n"
    assert named(read(tmp_path, "".join(lines))) == {5}
    assert named(read(tmp_path, "".join([*lines, f"(Worker_DP5_EP5 pid=1) {waits}"]))) == set()
    assert named(read(tmp_path, "".join([*lines, f"[rank13]: {waits}"]))) == set()


def test_ranks_of_another_node_are_others(tmp_path: Path) -> None:
    """Both of one place in their nodes: one has not come, the other waits."""
    here = (
        "".join(barrier(6, [5])) + "Global rank: 6, num_recv_tokens: -1, num_rdma_recv_tokens: -1\n"
    )
    there = "Global rank: 13, num_recv_tokens: -1, num_rdma_recv_tokens: -1\n"
    assert named(read(tmp_path, here, there)) == {5}
    assert named(read(tmp_path, here, there.replace("13", "5"))) == set()
    assert named(read(tmp_path, here + there)) == set()


def watchdog(
    rank: int, group: str, work: int, enqueued: int, completed: int, place: int | None = None
) -> str:
    place = rank if place is None else place
    return (
        f"[rank{rank}]:[E1 ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID {group} Rank {place}]  failure detected by watchdog at work "
        f"sequence id: {work} PG status: last enqueued work: {enqueued}, last completed work: {completed}\n"
    )


def dumping(rank: int, group: str, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E1 ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID {group} Rank {rank}] Received a dump signal due to a collective "
        f"timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, last "
        f"completed NCCL work: {completed}.This is most likely caused by\n"
    )


def test_who_has_not_enqueued_a_collective_is_named(tmp_path: Path) -> None:
    waits = watchdog(0, "0(default_pg)", 7, 7, 6) + watchdog(1, "0(default_pg)", 7, 9, 6)
    found = read(tmp_path, waits + dumping(2, "0(default_pg)", 6, 6))
    assert words(found).startswith("rank 2 has not come to collective 7; ranks 0-1 wait for it.")
    # It has; it is in another group's; it waits elsewhere; it says so of another group.
    for other in (
        dumping(2, "0(default_pg)", 7, 6),
        dumping(2, "5(tp)", 6, 6),
        dumping(2, "0(default_pg)", 6, 6) + watchdog(2, "5(tp)", 3, 3, 2, place=1),
        dumping(2, "0(default_pg)", 6, 6) + "[rank2]: DeepEP error: CPU recv timeout\n",
    ):
        assert named(read(tmp_path, waits + other)) == set()


def test_who_reached_the_monitored_barrier_is_not_named(tmp_path: Path) -> None:
    says = "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 30000 ms\n"
    reached = "Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. x\n"
    assert named(read(tmp_path, says)) == {1, 2}
    assert named(read(tmp_path, says + reached)) == {1}


def test_a_death_is_the_reason_only_before_all_waits(tmp_path: Path) -> None:
    death = "ERROR [multiproc_executor.py:140] Worker proc VllmWorker-2 died unexpectedly, shutting down\n"
    wait = "DeepEP Gin barrier timeout, tag: 4, scaleout: 1, scaleup: 0/8, signal: 14, target: 15\n"
    found = read(tmp_path, death + wait)
    assert named(found) == {2}
    assert words(found).startswith("rank 2 is dead: the process is gone. ")
    assert not any("others waited before" in remark for remark in found.remarks)
    assert named(read(tmp_path, wait + death)) == set()
    assert named(read(tmp_path, death, wait)) == set()


# ---- cut, mixed and foreign text


def mixed(streams: list[str], rng: random.Random) -> str:
    """Writes of several processes into one file, each in pieces that end anywhere."""
    pieces: list[list[str]] = []
    for stream in streams:
        cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randrange(4)))
        ends = [*cuts, len(stream)]
        pieces.append([stream[a:b] for a, b in zip([0, *cuts], ends)])
    left = [index for index, each in enumerate(pieces) for _ in each]
    rng.shuffle(left)
    return "".join(pieces[index].pop(0) for index in left)


def test_where_lines_are_mixed_one_word_is_not_enough(tmp_path: Path) -> None:
    """The beginning of one rank's line meets the end of another's, and says what neither said."""
    begin = "DeepEP timeout check failed: rank = {}, thread = {}, value = "
    text = begin.format(2, 5) + begin.format(6, 0) + "1024)\n0)\n"
    found = read(tmp_path, text)
    assert named(found) == set()
    assert "lines are mixed, and only one says it" in words(found)
    others = "".join(begin.format(rank, 5) + "1024)\n" for rank in (3, 7))
    assert named(read(tmp_path, text + others)) == {5}


def test_long_lines_of_digits_do_not_take_minutes(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("\n" + "7" * (1 << 18))
    began_s = time.process_time()
    assert not read_log(log).lines
    assert time.process_time() - began_s < 5


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=120, deadline=None)
def test_only_who_did_not_come_is_named(seed: int) -> None:
    """Whatever a log has lost, and whatever stands between its lines."""
    rng = random.Random(seed)
    num_ranks = rng.choice([2, 4, 8])
    absent = rng.sample(range(num_ranks), rng.randrange(num_ranks))
    waiters = [r for r in range(num_ranks) if r not in absent and rng.random() < 0.8]
    prefix = rng.choice(PREFIXES)
    streams = []
    for rank in waiters:
        lines = [prefix + line for line in barrier(rank, absent, num_ranks)]
        rng.shuffle(lines)
        streams.append("".join(line for line in lines if rng.random() < 0.95))
    text = mixed(streams, rng) if rng.random() < 0.7 else "".join(streams)
    begin = rng.randrange(len(text) + 1) if rng.random() < 0.3 else 0
    end = rng.randrange(len(text) + 1) if rng.random() < 0.3 else len(text)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "a.log"
        log.write_text(text[begin:end] + "DeepGEMM warmup:  12%\n")
        assert named(read_folder(log)) <= set(absent)


ANYTHING = st.one_of(
    st.sampled_from([line for posted in REPORTS for line in posted.lines.splitlines()]),
    st.sampled_from(PREFIXES),
    st.text(max_size=20),
    st.integers(-(1 << 40), 1 << 40).map(str),
    st.sampled_from(
        ["\n", " ", "DeepEP ", "rank = ", "[PG ID 0 PG GUID 0 Rank ", "non-zero status: "]
    ),
)


@given(st.lists(ANYTHING, max_size=40), st.booleans())
@example(["DeepEP timeout check failed: rank = 99999999999, thread = 5, value = 1024)\n"], False)
@example(["non-zero status: -99999999999999999999\n", "9" * 5000], False)
@example([f"DeepEP timeout check failed: rank = 1, thread = 5, value = {'9' * 5000})\n"], False)
@example(
    ["DeepEP Gin barrier timeout, tag: 4, scaleout: 9999, scaleup: 0/9999, signal: 1, target: 2\n"],
    False,
)
@example(
    [dumping(2, "0", 6, 6).replace("Rank 2", "Rank 999999999"), watchdog(0, "0", 7, 7, 6)], False
)
@example(["x non-zero status: 7 a{0}b{status}\n"], False)
@settings(max_examples=120, deadline=None)
def test_no_text_makes_it_fail(parts: list[str], as_lines: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "a.log"
        text = ("\n" if as_lines else "").join(parts)
        log.write_text("DeepGEMM warmup:  12%\n" + text, errors="surrogatepass")
        for logs in read_folder(log).buffers:
            assert HangVerdict.of(json.loads(json.dumps(logs.verdict.plain()))) == logs.verdict
