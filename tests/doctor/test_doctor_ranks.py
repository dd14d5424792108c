"""Ranks that tell each other what they have found, as threads and under torchrun; ranks that do not come."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore

from deep_ep import base
from deep_ep.doctor import exchange, job
from deep_ep.doctor.checks import FAIL, WARN, fail, ok, warn
from deep_ep.doctor.job import Job, Meeting, job_of
from deep_ep.doctor.ranks import RankReport, gather, together
from made_up_host import all_named, made_up, named
from support.launch import on_threads
from support.program import run_program, torchrun

LINE = ok("2.9", "why", name="torch", agreed={"torch": "2.9"})
# A rank that cannot start: it ends once the others have published, or never does anything.
NEVER_STARTS = """
import os, runpy, sys, time
if os.environ["RANK"] == "1":
    from torch.distributed import PrefixStore, TCPStore
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = PrefixStore("deep_ep.doctor", store)
    while not store.check(["report 0"]):
        time.sleep(0.05)
    sys.exit(7)
sys.argv = ["doctor", "--deadline", "60", "--json"]
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
        place = Job(rank, size, "", 0, is_served=False)
        return gather(Meeting(store, place, patience_s, ended), RankReport("a", [LINE]))

    came = [rank for rank in range(size) if rank not in absent]
    return dict(zip(came, on_threads(run, came)))


def test_the_lowest_rank_reports_what_all_have_said() -> None:
    said = meet(3, (), patience_s=60.0)
    assert said[0] is not None
    assert sorted(said[0]) == [0, 1, 2]
    assert said[0][2].findings == [LINE]
    assert (said[1], said[2]) == (None, None)


def test_ranks_that_do_not_come_are_named_though_the_first_is_one_of_them() -> None:
    said = meet(4, absent=(0, 3), patience_s=2.0)
    assert said[1] is not None
    assert said[2] is None
    attendance = named(together(said[1], 4), "ranks")
    assert attendance.status == FAIL
    assert attendance.found == "ranks 0, 3 did not come; ranks 1-2 did, on 1 host"


def test_a_job_that_is_being_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_GRACE_S", 0.2)
    said = meet(2, absent=(1,), patience_s=1e9, hurry=True)
    assert said[0] is not None
    assert sorted(said[0]) == [0]


@pytest.mark.parametrize(
    "published",
    [
        "",
        "[]",
        '{"host": "b", "findings": [], "tried": {"operation": 1, "bad_pairs": [[0, "1"]]}}',
        '{"host": "b", "findings": [], "tried": "ended with status 1: bye"}',
        '{"host": "b", "tried": null, "findings": [{"name": "torch", "status": "great", "found": "", '
        '"why": "", "repair": "", "agreed": {}}]}',
    ],
)
def test_what_no_doctor_of_this_version_publishes_is_a_finding(published: str) -> None:
    store = HashStore()
    store.set("report 1", published)
    said = gather(Meeting(store, Job(0, 2, "", 0), 60), RankReport("a", [LINE]))
    assert said is not None
    assert said[0] == RankReport("a", [LINE])
    findings = together(said, 2)
    found = named(findings, "other doctor")
    assert (found.status, found.found.startswith("rank 1: it published")) == (FAIL, True)
    assert not all_named(findings, "ranks differ")


def test_a_rank_without_numpy_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    store, said = HashStore(), RankReport("a", [LINE], exchange.Tried(1, bad_pairs=[(0, 1)]))
    store.set("report 0", "")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "deep_ep.base.codec", None)
        without.delattr(base, "codec")
        assert gather(Meeting(store, Job(1, 2, "", 0), 60), said) is None
    assert exchange.read(RankReport, store.get("report 1")) == said


def test_what_ranks_publish_moves_no_cursor() -> None:
    tried = exchange.Tried(operation=1, error="\x1b[2J", verdicts=["\x1b[1m"])
    line = warn("\x1b]0;x\x07", "\r", name="a\x1b[0m", agreed={"\x1b": "\x1b"})
    meeting = Meeting(HashStore(), Job(0, 2, "", 0), 0)
    said = gather(meeting, RankReport("\x1b[3A", [line], tried))
    assert said is not None
    assert said[0].tried == exchange.Tried(operation=1, error="\\x1b[2J", verdicts=["\\x1b[1m"])
    assert said[0].host == "\\x1b[3A"
    assert said[0].findings[0].agreed == {"\\x1b": "\\x1b"}
    assert all(finding.found.isprintable() for finding in together(said, 2))


def test_what_differs_is_named_with_the_ranks() -> None:
    other = ok("2.4", "why", name="torch", agreed={"torch": "2.4"})
    ours = ok("1", "why", name="deep_ep", agreed={"deep_ep": "1"})
    said = {
        0: RankReport("a", [LINE, ours]),
        1: RankReport("a", [LINE]),
        2: RankReport("b", [other, ours]),
    }
    findings = together(said, 3)
    differ = {finding.found: finding.status for finding in all_named(findings, "ranks differ")}
    assert differ == {
        "torch: 2.9 on ranks 0-1; 2.4 on rank 2": WARN,
        "deep_ep: 1 on ranks 0, 2; not there on rank 1": FAIL,
    }
    assert named(findings, "ranks").found == "all 3 came, on 2 hosts"


def test_what_is_bad_on_some_ranks_stands_once_with_their_numbers() -> None:
    bad = fail("64 KiB", "why", "ulimit", name="memlock")
    everywhere = warn("5", "why", "export", name="timeout")
    said = {
        0: RankReport("a", [LINE, everywhere]),
        1: RankReport("a", [LINE, bad, everywhere]),
        2: RankReport("a", [bad, everywhere]),
    }
    findings = together(said, 3)
    assert named(findings, "memlock").found == "ranks 1-2: 64 KiB"
    assert named(findings, "timeout").found == "5"
    assert len(all_named(findings, "torch")) == 1


def test_a_job_is_what_a_launcher_says(tmp_path: Path) -> None:
    said = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert job_of(made_up(tmp_path, environment=said)) == Job(3, 8, "10.0.0.1", 29500, False)
    served = {**said, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert job_of(made_up(tmp_path, environment=served)) == Job(3, 8, "10.0.0.1", 29500)
    assert job_of(made_up(tmp_path, environment={**said, "WORLD_SIZE": "1"})) is None
    assert job_of(made_up(tmp_path)) is None


@pytest.mark.exhaustive
def test_under_torchrun_a_rank_that_does_not_start_is_named(tmp_path: Path) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(NEVER_STARTS)
    ran = run_program(program, launcher=torchrun(2), timeout_s=120)
    assert ran.returncode == 1, ran.stderr
    report = json.loads(ran.stdout)
    (attendance,) = [finding for finding in report["findings"] if finding["name"] == "ranks"]
    assert attendance["found"] == "rank 1 did not come; rank 0 did, on 1 host"
    assert report["exit_status"] == 1
