"""Traces and counters of the same calls, together: bytes by link, phases, merged traces."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deep_ep
from deep_ep import diagnose, moe
from deep_ep.diagnose.__main__ import main
from deep_ep.diagnose.storage import counter_archive
from deep_ep.diagnose.trace import counted, rank_trace, summary
from deep_ep.diagnose.trace.kernels import COMBINE
from deep_ep.diagnose.trace.operations import LinkBytes, added_up
from deep_ep.errors import EPArgumentError
from deep_ep.observe.parts import PARTS
from deep_ep.observe.phases import PHASES
from support.launch import DEVICE, raise_failures, run_processes

RANKS, TOKENS, HIDDEN, TOPK, EXPERTS = 4, 24, 256, 3, 8
LOW_LATENCY = ("deep_ep::low_latency_dispatch", "deep_ep::low_latency_combine")


def routing_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    topk_idx = torch.rand((TOKENS, EXPERTS), generator=generator).topk(TOPK).indices
    topk_idx[3:5, 1:] = -1
    return topk_idx


def one_rank(rank: int, group: Any, folder: str) -> None:
    """Profiles a layer forward and backward and a low-latency round, and saves the counters."""
    needed = deep_ep.sizes(hidden=HIDDEN, tokens=TOKENS, topk=TOPK, experts=EXPERTS, ranks=RANKS)
    rdma_bytes = max(needed.num_rdma_bytes, needed.low_latency_rdma_bytes)
    buffer = deep_ep.Buffer(
        group,
        needed.num_nvl_bytes,
        rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS,
        explicitly_destroy=True,
    )
    buffer.enable_counters()
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    topk_idx, weights = routing_of(rank).to(DEVICE), torch.ones(TOKENS, TOPK, device=DEVICE)
    # Of the first operation it is not known what was before it.
    moe.dispatch(x, topk_idx, weights, buffer, EXPERTS)
    with torch.profiler.profile(record_shapes=True) as profile:
        sent = moe.dispatch(x, topk_idx, weights, buffer, EXPERTS)
        moe.combine(sent.x, sent).sum().backward()
        # Calls that are no operations: numbers of calls and of operations differ from here on.
        buffer.clean_low_latency_buffer(TOKENS, HIDDEN, EXPERTS)
        received, _, handle, _, _ = buffer.low_latency_dispatch(
            x.detach(), topk_idx, TOKENS, EXPERTS
        )
        rows = torch.zeros_like(received[0], dtype=torch.bfloat16)
        buffer.low_latency_combine(rows, topk_idx, weights, handle)
    profile.export_chrome_trace(f"{folder}/trace_rank{rank}.json.gz")
    diagnose.save(diagnose.snapshot(buffer), f"{folder}/counters")
    buffer.destroy()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ranks_per_node, id=nodes, marks=pytest.mark.exhaustive)
        for ranks_per_node, nodes in ((4, "one node"), (2, "two nodes"))
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a run, with real operations of both modes, counters and a profiler; and its ranks per node."""
    folder = tmp_path_factory.mktemp("run")
    env = {"DEEP_EP_RANKS_PER_NODE": str(request.param)}
    raise_failures(run_processes(one_rank, RANKS, str(folder), env=env))
    return folder, request.param


def traces_of(folder: Path) -> list[rank_trace.RankTrace]:
    return [rank_trace.read(folder / f"trace_rank{rank}.json.gz") for rank in range(RANKS)]


def joined(folder: Path) -> list[rank_trace.RankTrace]:
    traces, known = traces_of(folder), counted.read(folder / "counters")
    assert [
        line for trace in traces for line in rank_trace.add_counted(trace, known[trace.rank])
    ] == []
    return traces


def test_calls_of_a_trace_find_their_phases(run: Any) -> None:
    kinds = {
        "MoEDispatch": "normal dispatch",
        "MoECombine": "normal combine",
        "MoECombineBackward": "normal dispatch",
        "MoEDispatchBackward": "normal combine",
        LOW_LATENCY[0]: "dispatch",
        LOW_LATENCY[1]: "combine",
    }
    for trace in joined(run[0]):
        found = {each.name: [call.phases.kind for call in each.counted] for each in trace.exchanges}
        assert found == {name: [kind] for name, kind in kinds.items()}
        assert all(kinds[each.name].endswith(each.operation) for each in trace.exchanges)
        numbers = [call.phases.operation for each in trace.exchanges for call in each.counted]
        assert numbers == sorted(numbers)
        rows = {row.name: row for row in summary.phase_rows(trace)}
        assert set(rows) == set(kinds)
        around = {name: rows[name].mean_us for name in rows}
        assert around["MoEDispatch"]["layout"] > 0
        assert around["MoECombine"]["permute"] > 0
        assert around["MoEDispatchBackward"]["unpermute"] > 0
        assert around["MoECombineBackward"]["layout"] == 0
        # The host takes part in fresh dispatches only.
        assert rows["MoEDispatch"].mean_us["host"] > 0
        assert rows["MoECombineBackward"].mean_us["host"] == 0


def test_counters_and_calls_agree_on_what_crosses_each_link(run: Any) -> None:
    """Over all ranks, since counters of a combine say what a rank receives, and the call what it sends."""
    folder = run[0]
    known = counted.read(folder / "counters")
    said, counters = {}, {}
    for trace in traces_of(folder):
        for each in trace.exchanges:
            if each.name not in LOW_LATENCY:
                said.setdefault(each.name, []).append(each.links)
                found = [known[trace.rank][call].links for call in each.calls]
                counters.setdefault(each.name, []).extend(found)
                if each.operation == COMBINE and run[1] == RANKS:
                    # Not the rows by expert, which do not travel; and nothing is relayed.
                    assert each.sent.num_bytes == sum(each.links or ())
    assert len(said) == 4
    for name, links in said.items():
        assert None not in links
        assert added_up(links) == added_up(counters[name]), name


def test_low_latency_has_the_rows_of_the_routing(run: Any) -> None:
    """A row for each expert of a token; FP8 with scales there, bfloat16 back."""
    folder, ranks_per_node = run
    for trace in joined(folder):
        row_bytes = dict(zip(LOW_LATENCY, (HIDDEN + 4 * HIDDEN // 128, 2 * HIDDEN)))
        for each in trace.exchanges:
            if each.name not in LOW_LATENCY:
                continue
            by_link = np.zeros(3, np.int64)
            for other in range(RANKS):
                source, owner = (
                    (other, trace.rank) if "dispatch" in each.name else (trace.rank, other)
                )
                idx = routing_of(source)
                rows = int(((idx >= 0) & (idx // (EXPERTS // RANKS) == owner)).sum())
                near = other // ranks_per_node == trace.rank // ranks_per_node
                by_link[0 if other == trace.rank else 1 if near else 2] += rows
            assert each.links == LinkBytes(*(by_link * row_bytes[each.name]).tolist()), each.name


def test_tables_have_links_and_phases(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["trace", str(run[0]), "--counters", str(run[0] / "counters"), "--width", "250"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    for title in ("NVLink MB", "RDMA MB", "Phases, us per call", "waits for", "true TB/s"):
        assert title in said
    assert main([*arguments, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    links = joined(run[0])[0].exchanges[0].links
    assert links is not None
    assert float(rows[0]["mean_nvlink_bytes"]) == links.nvlink
    assert float(rows[0]["effective_tbps"]) == pytest.approx(
        links.crossing / float(rows[0]["mean_us"]) / 1e6
    )


def test_a_merged_trace_has_phases_as_slices_and_is_else_the_same(
    run: Any, tmp_path: Path, capsys: Any
) -> None:
    folder = run[0]
    arguments = ["trace", str(folder), "--width", "250"]
    with_counters = ["--counters", str(folder / "counters"), "--merge", str(tmp_path)]
    assert main([*arguments, *with_counters]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("wrote 4 traces to ")
    trace = json.loads(gzip.decompress((tmp_path / "trace_rank1.json.gz").read_bytes()))
    original = json.loads(gzip.decompress((folder / "trace_rank1.json.gz").read_bytes()))
    assert {name: trace[name] for name in original if name != "traceEvents"} == {
        name: value for name, value in original.items() if name != "traceEvents"
    }
    slices = [event for event in trace["traceEvents"] if event.get("pid") == "deep_ep phases"]
    assert len(trace["traceEvents"]) == len(original["traceEvents"]) + len(slices)
    assert {event["tid"] for event in slices} == {"rank 1"}
    assert {event["name"] for event in slices} <= {*PHASES} - {"between", *PARTS}
    assert "copy" in {event["name"] for event in slices}
    # Slices of an operation follow each other.
    first = [event for event in slices if event["args"]["operation"] == 2]
    assert len(first) > 1
    for one, other in zip(first, first[1:]):
        assert other["ts"] == pytest.approx(one["ts"] + one["dur"], abs=0.01)


def test_a_trace_is_not_merged_into_itself(run: Any, capsys: Any) -> None:
    before = (run[0] / "trace_rank0.json.gz").read_bytes()
    assert main(["trace", str(run[0]), "--merge", str(run[0])]) == 2
    assert "it is the trace itself" in capsys.readouterr().err
    assert (run[0] / "trace_rank0.json.gz").read_bytes() == before


def test_counters_that_do_not_fit_are_left_out(run: Any) -> None:
    (trace, *_), known = traces_of(run[0]), counted.read(run[0] / "counters")
    # Those of another rank: what it received is not what this one did.
    (said,) = rank_trace.add_counted(trace, known[1])
    assert "of another buffer or run" in said
    assert all(not each.counted for each in trace.exchanges)
    first = trace.exchanges[0].calls[0]
    recent = {call: each for call, each in known[0].items() if call != first}
    assert "counters have 5 of 6 calls" in rank_trace.add_counted(trace, recent)[0]


def test_a_trace_without_numbers_of_calls_is_told(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where nothing but CSV is printed."""
    event = {"ph": "X", "cat": "cpu_op", "name": "FusedDispatch", "ts": 5, "dur": 1}
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [event]}))
    assert main(["trace", str(path), "--counters", str(run[0] / "counters"), "--csv"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 2
    assert "so counters add nothing; profile with record_shapes=True" in said.err


def test_counters_of_a_part_of_the_ranks_have_phases_and_no_links(run: Any) -> None:
    known = counted.read(run[0] / "counters" / "counters-rank2.npz")
    assert list(known) == [2]
    assert all(each.links is None for each in known[2].values())
    trace = traces_of(run[0])[2]
    assert rank_trace.add_counted(trace, known[2]) == []
    assert all(each.counted for each in trace.exchanges)


def test_rows_of_several_sizes_have_no_exact_bytes(run: Any, tmp_path: Path) -> None:
    for snapshot in counter_archive.load(run[0] / "counters"):
        snapshot.operations["dispatch"].totals[2, 0] += 1  # bytes of source 0
        diagnose.save(snapshot, tmp_path)
    trace = joined(run[0])[0]
    (again,) = [each for each in trace.exchanges if each.name == LOW_LATENCY[0]]
    known = counted.read(tmp_path)
    assert known[0][again.calls[0]].links is None


def test_archives_without_numbers_of_calls_join_nothing(run: Any, tmp_path: Path) -> None:
    """As earlier versions wrote them."""
    with np.load(run[0] / "counters" / "counters-rank0.npz") as archive:
        entries = {name: archive[name] for name in archive.files}
    damaged = tmp_path / "counters-rank0.npz"
    np.savez(damaged, **{**entries, "calls": entries["calls"][:, :1]})
    with pytest.raises(EPArgumentError, match="entry calls"):
        counted.read(damaged)
    del entries["calls"]
    entries["parts"][:, 0] = 7  # of a later version
    np.savez(damaged, **entries)
    assert counted.read(damaged) == {0: {}}
