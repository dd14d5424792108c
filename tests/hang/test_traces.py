"""Dumps: what torch's own tool makes of them, and what happens to files that are none."""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deep_ep.errors import EPArgumentError
from deep_ep.hang import plain_pickle, torch_dumps, traces
from deep_ep.hang.folder import read_folder
from deep_ep.hang.states import Call, Process, RankState
from deep_ep.hang.verdict import judge
from deep_ep.hang.wording import line
from made_up_ranks import Group
from support import system_tools

fr_trace = system_tools.package("torch.distributed.flight_recorder.fr_trace")


def dump(directory: Path, states: dict[int, RankState]) -> tuple[Path, ...]:
    return traces.write_dump(directory, states, judge(states))


def findings(directory: Path, *options: str) -> list[Any]:
    """The collectives that torch's tool finds fault with."""
    out = directory.parent / "db.pkl"
    try:
        fr_trace.main([str(directory), "-o", str(out), *options])
    finally:
        gc.enable()  # which the tool turns off
    _, db = pickle.loads(out.read_bytes())
    return [c for c in db.collectives if c.missing_ranks or c.mismatch_collectives]


@pytest.mark.parametrize("stuck", ["gone", "not_called", "unknown", "hook"])
def test_torch_s_tool_names_the_rank_that_is_missing(tmp_path: Path, stuck: str) -> None:
    dump(tmp_path / "fr", Group(4, stuck={2: stuck}).states())
    *others, found = findings(tmp_path / "fr")
    assert found.missing_ranks == {2}
    assert found.collective_seq_id == 12
    assert found.collective_name == "nccl:all_to_all deep_ep.low_latency_dispatch"
    # Whose hook was not called is in the operation before, which the others have completed.
    assert [other.collective_seq_id for other in others] == ([11] if stuck == "hook" else [])


@pytest.mark.parametrize("process", ["gone", "stopped", "ended", "unknown"])
@pytest.mark.parametrize("last_word", [0, 2])
def test_of_a_rank_that_does_not_answer_others_say_what_it_has_done(
    tmp_path: Path, process: Process, last_word: int
) -> None:
    group = Group(4, stuck={3: process})
    states = group.states()
    calls = (group.call(last_word, finished_ns=1),) if last_word else ()
    states[3] = replace(states[3], process=process, calls=calls)
    written = dump(tmp_path / "fr", states)
    assert tmp_path / "fr" / "deep_ep_rank_3" in written
    (found,) = findings(tmp_path / "fr")
    assert (found.missing_ranks, found.collective_seq_id) == ({3}, 12)


def test_what_went_on_without_masked_ranks_says_nothing_of_them(tmp_path: Path) -> None:
    states = {rank: replace(state, masked=(3,)) for rank, state in Group(4).states().items()}
    states[3] = RankState(3, 4, process="gone")
    dump(tmp_path / "fr", states)
    assert pickle.loads((tmp_path / "fr" / "deep_ep_rank_3").read_bytes())["entries"] == []


def test_others_may_not_read_what_stacks_show(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    umask = os.umask(0)
    try:
        written = dump(shared / "job" / "dump", Group(2).states())
    finally:
        os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}
    folders = (shared, shared / "job", shared / "job" / "dump")
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o755, 0o700, 0o700]


def test_torch_s_tool_sees_that_an_operation_was_called_in_the_place_of_another(
    tmp_path: Path,
) -> None:
    dump(tmp_path / "fr", Group(4, stuck={2: "mismatch"}).states())
    (found,) = findings(tmp_path / "fr")
    assert found.collective_seq_id == 12
    assert found.mismatch_collectives


def test_torch_s_tool_finds_nothing_where_all_are_in_one_operation(tmp_path: Path) -> None:
    group = Group(4, lost={(0, 1), (1, 0), (2, 3), (3, 2)})
    dump(tmp_path / "fr", group.states())
    assert findings(tmp_path / "fr") == []


def test_both_kernels_of_a_normal_dispatch_and_barriers_are_matched(tmp_path: Path) -> None:
    group = Group(4, lost={(0, 1), (1, 0), (2, 3), (3, 2)}, name="normal_dispatch")
    states = group.states()
    for rank, state in states.items():
        notify = [replace(call, name="normal_notify") for call in state.calls]
        pairs = [call for pair in zip(notify, state.calls) for call in pair]
        # Rings begin where they have room for.
        barriers = [
            Call(n, "barrier", n, "barrier", called_ns=n, entered_ns=n, finished_ns=n)
            for n in range(1 + rank, 8 if rank != 2 else 7)
        ]
        states[rank] = replace(state, calls=(*barriers, *pairs))
    dump(tmp_path / "fr", states)
    (found,) = findings(tmp_path / "fr")
    assert (found.pass_check, found.missing_ranks) == (True, {2})
    assert found.collective_name.startswith("nccl:barrier")


def test_where_torch_s_recorder_writes_ours_lie_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "nccl_trace_rank_"))
    folder = traces.default_folder()
    assert folder == tmp_path / "nccl_trace_rank_deep_ep"
    dump(folder, Group(2, stuck={1: "gone"}).states())
    assert (folder / "deep_ep_rank_1").is_file()
    # Its tool walks through folders: names of ours are none of its own.
    assert not any("nccl_trace_rank_" in path.name for path in folder.iterdir())


def test_global_ranks_name_the_files(tmp_path: Path) -> None:
    states = Group(2, stuck={1: "gone"}).states()
    states = {rank: replace(state, global_rank=8 + rank) for rank, state in states.items()}
    dump(tmp_path / "fr", states)
    assert {path.name for path in (tmp_path / "fr").iterdir()} == {
        *("deep_ep_rank_8", "deep_ep_rank_9", "8.hang.json", "9.hang.json", "verdict.hang.json")
    }
    (found,) = findings(tmp_path / "fr")
    assert found.missing_ranks == {9}


# ---- reading


def test_a_dump_is_read_and_judged_again(tmp_path: Path) -> None:
    states = Group(8, stuck={3: "not_called"}).states()
    dump(tmp_path, states)
    folder = read_folder(tmp_path)
    (buffer,) = folder.buffers
    assert (dict(buffer.states), buffer.verdict) == (states, judge(states))
    assert folder.remarks == ()
    # Torch's files alone are enough.
    for path in tmp_path.glob("*.json"):
        path.unlink()
    assert read_folder(tmp_path).buffers[0].verdict == judge(states)


class Malicious:
    """Makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_dump_cannot_run_code(tmp_path: Path, protocol: int) -> None:
    proof = tmp_path / "proof"
    trap = {"version": "2.10", "entries": [Malicious(proof)], "pg_config": {}}
    data = pickle.dumps(trap, protocol=protocol)
    with pytest.raises(ValueError, match=r"byte \d+: \w*GLOBAL"):
        plain_pickle.loads(data)
    dump(tmp_path / "fr", Group(2, stuck={1: "gone"}).states())
    (tmp_path / "fr" / "trace_7").write_bytes(data)
    folder = read_folder(tmp_path / "fr")
    assert not proof.exists()
    assert len(folder.remarks) == 1
    assert str(tmp_path / "fr" / "trace_7") in folder.remarks[0]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_of_every_protocol_is_read(protocol: int) -> None:
    data = {"a": [1, -(2**70), 2.5, None, True, (), (1, 2, 3, 4)], "b": "ä" * 300, 3: {}}
    assert plain_pickle.loads(pickle.dumps(data, protocol=protocol)) == data


def test_a_number_that_would_take_all_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="LONG_BINPUT 2147483632 is out of range"):
        plain_pickle.loads(b"\x80\x02Nr\xf0\xff\xff\x7f.")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.99])
def test_damaged_files_are_named_with_the_position(tmp_path: Path, share: float) -> None:
    states = Group(4, stuck={3: "not_called"}).states()
    dump(tmp_path, states)
    for name in ("0.hang.json", "deep_ep_rank_0"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    folder = read_folder(tmp_path)
    assert len(folder.remarks) == 2
    for name, remark in zip(("0.hang.json", "deep_ep_rank_0"), folder.remarks):
        assert str(tmp_path / name) in remark
        assert "byte" in remark or "line 1 column" in remark
    (buffer,) = folder.buffers
    assert buffer.verdict.missing == (0,)
    assert line(buffer.verdict).startswith("rank 3 has not called")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello", "byte 0: it is neither a pickle nor a JSON object"),
        (b"{}", "it is no dump"),
        (b"[" * 100_000, "byte 0: it is neither"),
        (b'{"a":' * 100_000, "byte 0: it is nested too deeply"),
        (b'{"kind": "deep_ep.hang.state"}', "rank is missing; expected an integer"),
        (
            b'{"kind": "deep_ep.hang.state", "rank": "0", "num_ranks": 2}',
            'rank is "0"; expected an integer',
        ),
        (
            b'{"kind": "deep_ep.hang.state", "rank": 7, "num_ranks": 2}',
            "rank is 7; expected an integer of at least 0 and below 2",
        ),
        (
            b'{"kind": "deep_ep.hang.verdict", "causes": [{}]}',
            'causes[0].kind is missing; expected "gone"',
        ),
        (b'{"version": "2.10", "entries": [3]}', "entries[0] is 3; expected an object"),
        (b'{"version": "2.10", "entries": 3}', "entries is 3; expected a list"),
        (b"\x80\x02.", "the pickle is damaged"),
    ],
)
def test_foreign_files_are_left_out_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    dump(tmp_path, Group(2, stuck={1: "gone"}).states())
    (tmp_path / "other_5").write_bytes(content)
    folder = read_folder(tmp_path)
    assert len(folder.buffers) == 1
    (remark,) = folder.remarks
    assert f"{tmp_path / 'other_5'}: left out: " in remark
    assert reason in remark


def nested(inner: Any, times: int) -> Any:
    """What takes hundreds of bytes as a pickle, and 2**times lists where nobody knows that they are the same."""
    for _ in range(times):
        inner = [inner, inner]
    return inner


def in_itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("plain", "reason"),
    [
        ({"pg_config": {None: math.nan}}, "pg_config[null] is a number that is not finite"),
        ({"pg_config": {10**5000: math.nan}}, "is a number that is not finite"),
        ({"pg_config": nested([], 40)}, "it holds the same again and again"),
        ({"entries": nested([], 40)}, "it holds the same again and again"),
        ({"deep_ep": {"rank": nested([], 40)}}, "it holds the same again and again"),
        ({"pg_config": in_itself()}, "it holds the same again and again"),
    ],
)
def test_hostile_pickles_are_left_out_at_once(
    tmp_path: Path, plain: dict[str, Any], reason: str
) -> None:
    dump(tmp_path, Group(2, stuck={1: "gone"}).states())
    whole = {"version": "2.10", "entries": [], **plain}
    (tmp_path / "other_0").write_bytes(pickle.dumps(whole, 2))
    (remark,) = read_folder(tmp_path).remarks
    assert f"{tmp_path / 'other_0'}: left out: " in remark
    assert reason in remark


@pytest.mark.parametrize("ranks", ["[1e999]", f"[0x{'f' * 5000}]"])
def test_ranks_that_no_group_has_are_passed_over(tmp_path: Path, ranks: str) -> None:
    whole = torch_dump([torch_entry(5, "started")])
    whole["pg_config"]["0"]["ranks"] = ranks
    (tmp_path / "trace_0").write_bytes(pickle.dumps(whole, 2))
    (found,) = read_folder(tmp_path).collectives
    assert "rank 0 is in nccl:all_reduce 5" in torch_dumps.sentence(found)


def test_a_named_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    dump(tmp_path, Group(2, stuck={1: "gone"}).states())
    os.mkfifo(tmp_path / "pipe")
    (remark,) = read_folder(tmp_path).remarks
    assert "it is no regular file" in remark


def test_a_folder_that_cannot_be_opened_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump(tmp_path / "open", Group(2, stuck={1: "gone"}).states())
    closed = tmp_path / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refused(folder: str) -> Any:
        if str(folder) == str(closed):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)
    folder = read_folder(tmp_path)
    assert folder.buffers[0].verdict.ranks == (1,)
    assert folder.remarks == (f"{closed}: left out: [Errno 13] Permission denied: '{closed}'",)


def test_dumps_of_two_jobs_are_judged_apart(tmp_path: Path) -> None:
    dump(tmp_path / "a", Group(2, stuck={1: "gone"}).states())
    dump(tmp_path / "b", Group(4, stuck={2: "not_called"}).states())
    folder = read_folder(tmp_path)
    assert {buffer.verdict.ranks for buffer in folder.buffers} == {(1,), (2,)}
    assert any("several jobs are mixed" in remark for remark in folder.remarks)


def test_of_two_dumps_of_one_rank_the_newer_counts(tmp_path: Path) -> None:
    states = Group(4, stuck={2: "not_called"}).states()
    dump(tmp_path / "a", states)
    later = {rank: replace(state, taken_ns=state.taken_ns + 1) for rank, state in states.items()}
    later[2] = replace(later[2], process="gone")
    dump(tmp_path / "b", later)
    (buffer,) = read_folder(tmp_path).buffers
    assert [cause.kind for cause in buffer.verdict.causes] == ["gone"]


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(EPArgumentError, match=r"there is no such directory or file.* Name "):
        read_folder(tmp_path / "no")
    # A folder of records is one of another command.
    (tmp_path / "diagnose-host-1-0.jsonl").write_text("{}\n{}\n")
    with pytest.raises(EPArgumentError, match=r"no dump can be read.* `show` reads records"):
        read_folder(tmp_path)


def test_a_later_format_with_more_in_it_is_read(tmp_path: Path) -> None:
    states = Group(2, stuck={1: "gone"}).states()
    dump(tmp_path, states)
    for path in tmp_path.glob("*.json"):
        plain = json.loads(path.read_text())
        path.write_text(json.dumps({**plain, "format": 2, "new": [1]}))
    assert read_folder(tmp_path).remarks == ()


# ---- torch's own


def torch_entry(number: int, state: str, name: str = "nccl:all_reduce") -> dict[str, Any]:
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": name,
        "state": state,
        "retired": False,
    }


def torch_dump(entries: list[dict[str, Any]]) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    return {"version": "2.10", "pg_config": config, "entries": entries}


@pytest.mark.parametrize("as_json", [False, True])
def test_a_collective_of_torch_that_hangs_is_part_of_the_story(
    tmp_path: Path, as_json: bool
) -> None:
    for rank in range(4):
        entries = [torch_entry(4, "completed")] + [torch_entry(5, "started")] * (rank != 3)
        plain = torch_dump(entries)
        path = tmp_path / f"nccl_trace_rank_{rank}"
        data = json.dumps(plain).encode() if as_json else pickle.dumps(plain)
        path.with_suffix(".json" if as_json else "").write_bytes(data)
    dump(tmp_path / "nccl_trace_rank_deep_ep", Group(4, stuck={2: "not_called"}).states())
    folder = read_folder(tmp_path)
    assert folder.remarks == ()
    assert len(folder.buffers) == 1
    (found,) = folder.collectives
    assert (found.number, found.waiting, found.missing) == (5, (0, 1, 2), (3,))


def test_who_is_behind_a_collective_has_called_it_though_its_ring_has_forgotten() -> None:
    rings = [[(5, "started"), (6, "scheduled")], [(9, "completed"), (10, "started")]]
    dumps = {
        rank: torch_dumps.TorchDump(
            tuple(
                torch_dumps.Collective(("0", ""), number, "nccl:all_reduce", state)
                for number, state in ring
            )
        )
        for rank, ring in enumerate(rings)
    }
    (found,) = torch_dumps.hanging(dumps)
    assert (found.number, found.waiting, found.missing) == (5, (0,), ())


@pytest.mark.exhaustive
def test_what_torch_itself_writes_is_read(tmp_path: Path) -> None:
    """The real recorder, in a process of its own; gloo's entries are over once they are retired."""
    code = (
        "import pickle, sys, time, torch, torch.distributed as d\n"
        "d.init_process_group('gloo', rank=0, world_size=1, store=d.HashStore())\n"
        "d.all_reduce(torch.ones(4)); d.barrier()\n"
        "from torch._C._distributed_c10d import _dump_fr_trace\n"
        "end = time.monotonic() + 30\n"
        "while not all(entry['retired'] for entry in pickle.loads(_dump_fr_trace())['entries']):\n"
        "    assert time.monotonic() < end\n"
        "open(sys.argv[1], 'wb').write(_dump_fr_trace())\n"
    )
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    command = [sys.executable, "-c", code, str(tmp_path / "trace_0")]
    subprocess.run(command, check=True, env=environment)
    folder = read_folder(tmp_path)
    assert (folder.collectives, folder.remarks) == ((), ())
    written = plain_pickle.loads((tmp_path / "trace_0").read_bytes())
    assert written["entries"][0]["profiling_name"] == "gloo:all_reduce"
