"""Ranks that tell each other what they have found, as threads and under torchrun; ranks that do not come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

import deep_ep
from deep_ep.doctor import ranks
from deep_ep.doctor.finding import FAIL, OK, WARN, Finding
from deep_ep.doctor.ranks import Job, Meeting, RankReport, job_of, together
from made_up_host import all_named, made_up, named
from program import torchrun

LINE = Finding("torch", OK, "2.9", "why", agreed={"torch": "2.9"})
# A rank that cannot start: it ends once the others have published, or never does anything.
NEVER_STARTS = """
import os, runpy, sys, time
if os.environ["RANK"] == "{absent}":
    from torch.distributed import PrefixStore, TCPStore
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = PrefixStore("deep_ep.doctor", store)
    while store.add("came", 0) < 1:
        time.sleep(0.05)
    sys.exit(7)
sys.argv = ["doctor", "--deadline", "60", "--json", "{target}"]
runpy.run_module("deep_ep.doctor", run_name="__main__")
"""


def meet(
    size: int, absent: tuple[int, ...], patience_s: float, hurry: bool = False
) -> dict[int, dict[int, RankReport] | None]:
    """What `gather` returns on each rank that comes."""
    store, ended = HashStore(), threading.Event()
    if hurry:
        ended.set()

    def run(rank: int) -> dict[int, RankReport] | None:
        meeting = Meeting(store, Job(rank, size, "", 0, launcher_serves=False))
        said = meeting.gather(RankReport("a", [LINE]), patience_s, ended)
        meeting.leave(has_reported=said is not None)
        return said

    came = [rank for rank in range(size) if rank not in absent]
    with ThreadPoolExecutor(size) as threads:
        return dict(zip(came, threads.map(run, came)))


def test_the_lowest_rank_reports_what_all_have_said() -> None:
    said = meet(3, (), patience_s=60.0)
    assert said[0] is not None
    assert sorted(said[0]) == [0, 1, 2]
    assert said[0][2].findings == [LINE]
    assert (said[1], said[2]) == (None, None)


def test_ranks_that_do_not_come_are_named_though_the_first_is_one_of_them() -> None:
    said = meet(4, absent=(0, 3), patience_s=0.3)
    assert said[1] is not None
    assert said[2] is None
    attendance = named(together(said[1], 4), "ranks")
    assert attendance.status == FAIL
    assert attendance.found == "ranks 0, 3 did not come; ranks 1-2 did, on 1 host"


def test_a_job_that_is_being_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_GRACE_S", 0.2)
    said = meet(2, absent=(1,), patience_s=1e9, hurry=True)
    assert said[0] is not None
    assert sorted(said[0]) == [0]


@pytest.mark.parametrize(
    "published",
    [
        "",
        "[]",
        '{"host": "b", "findings": [{}]}',
        '{"host": "b", "findings": [], "tried": {"x": 1}}',
        '{"host": "b", "tried": null, "findings": [{"name": "torch", "status": "great", "found": "", '
        '"why": "", "repair": "", "agreed": {}}]}',
    ],
)
def test_what_no_doctor_of_this_version_publishes_is_a_finding(published: str) -> None:
    store = HashStore()
    store.set("rank 1", published)
    store.add("came", 1)
    said = Meeting(store, Job(0, 2, "", 0, True)).gather(
        RankReport("a", [LINE]), 60, threading.Event()
    )
    assert said is not None
    assert said[0] == RankReport("a", [LINE])
    findings = together(said, 2)
    found = named(findings, "other doctor")
    assert (found.status, found.found.startswith("rank 1: it published")) == (FAIL, True)
    assert not all_named(findings, "ranks differ")


def said_by(*findings: Finding, host: str = "a") -> RankReport:
    return RankReport(host, findings)


def test_what_differs_is_named_with_the_ranks() -> None:
    other = Finding("torch", OK, "2.4", "why", agreed={"torch": "2.4"})
    ours = Finding("deep_ep", OK, "1", "why", agreed={"deep_ep": "1"})
    said = {0: said_by(LINE, ours), 1: said_by(LINE), 2: said_by(other, ours, host="b")}
    findings = together(said, 3)
    differ = {finding.found: finding.status for finding in all_named(findings, "ranks differ")}
    assert differ == {
        "torch: 2.9 on ranks 0-1; 2.4 on rank 2": WARN,
        "deep_ep: 1 on ranks 0, 2; not there on rank 1": FAIL,
    }
    assert named(findings, "ranks").found == "all 3 came, on 2 hosts"


def test_what_is_bad_on_some_ranks_stands_once_with_their_numbers() -> None:
    bad = Finding("memlock", FAIL, "64 KiB", "why", "ulimit")
    everywhere = Finding("timeout", WARN, "5", "why", "export")
    said = {
        0: said_by(LINE, everywhere),
        1: said_by(LINE, bad, everywhere),
        2: said_by(bad, everywhere),
    }
    findings = together(said, 3)
    assert named(findings, "memlock").found == "ranks 1-2: 64 KiB"
    assert named(findings, "timeout").found == "5"
    assert len(all_named(findings, "torch")) == 1


def test_a_job_is_what_a_launcher_says(tmp_path: Path) -> None:
    said = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert job_of(made_up(tmp_path, environment=said)) == Job(3, 8, "10.0.0.1", 29500, False)
    served = {**said, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert job_of(made_up(tmp_path, environment=served)) == Job(3, 8, "10.0.0.1", 29500, True)
    assert job_of(made_up(tmp_path, environment={**said, "WORLD_SIZE": "1"})) is None
    assert job_of(made_up(tmp_path)) is None


@pytest.mark.exhaustive
def test_under_torchrun_a_rank_that_does_not_start_is_named(tmp_path: Path) -> None:
    target, program = tmp_path / "report.json", tmp_path / "ranks.py"
    program.write_text(NEVER_STARTS.format(absent=1, target=target))
    root = str(Path(deep_ep.__file__).resolve().parent.parent)
    ran = subprocess.run(
        [sys.executable, *torchrun(2), str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 1
    report = json.loads(target.read_text())
    (attendance,) = [finding for finding in report["findings"] if finding["name"] == "ranks"]
    assert attendance["found"] == "rank 1 did not come; rank 0 did, on 1 host"
    assert report["exit_status"] == 1
